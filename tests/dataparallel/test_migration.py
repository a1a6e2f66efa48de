"""Every line of the README's table "From torch's own" is run as it stands.

torch's own functions for one process take CUDA devices only. So what they give is written here by tensor_split, cat and the
module itself, on CPU devices; for ranks, DDP itself is the measure.
"""

import copy
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import unisono.dataparallel

README = Path(__file__).parents[2] / "packages/dataparallel/README.md"
DEVICES = ["cpu"] * 2
X = torch.arange(20.0).view(5, 4).sin()
PARTS = list(X.tensor_split(2))


def table() -> dict[str, str]:
    """The code of each row, by its first cell."""
    lines = README.read_text().partition("## From torch's own")[2].partition("\n## ")[0].splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")][1:]
    return {cells[0]: re.fullmatch(r"`([^`]+)`", cells[1])[1] for cells in rows}


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None, *, times: float = 1.0) -> torch.Tensor:
        return self.linear(x if y is None else x + y) * times


MODULE = Two()
OPTIONS = {"module": MODULE, "device_ids": DEVICES, "output_device": "cpu", "dim": 0}
ROWS = [[torch.ones(2), torch.ones(3)], [torch.ones(2) * 4, torch.ones(3) * 5]]

# names of the line, and what it must give; None: compared by a test of its own
LINES = {
    "`nn.DataParallel(module, device_ids, output_device, dim)(x)`": (OPTIONS | {"x": X}, lambda: nn.DataParallel(MODULE)(X)),
    "`nn.parallel.data_parallel(module, inputs, device_ids, output_device, dim, module_kwargs)`": (
        OPTIONS | {"inputs": (X, X), "module_kwargs": {"times": 2.0}},
        lambda: MODULE(X, X, times=2.0),
    ),
    "`nn.parallel.scatter(inputs, device_ids, dim)`": (
        {"inputs": (X, {"y": X}), "device_ids": DEVICES, "dim": 0},
        lambda: [(part, {"y": part}) for part in PARTS],
    ),
    "`nn.parallel.scatter_gather.scatter_kwargs(args, kwargs, device_ids)`": (
        {"args": (X,), "kwargs": {"y": X}, "device_ids": DEVICES},
        lambda: [((part,), {"y": part}) for part in PARTS],
    ),
    "`nn.parallel.gather(outputs, device, dim)`": (
        {"outputs": [{"y": part} for part in PARTS], "device": "cpu", "dim": 0},
        lambda: {"y": X},
    ),
    "`nn.parallel.replicate(module, device_ids)`": ({"module": MODULE, "device_ids": DEVICES}, None),
    "`nn.parallel.parallel_apply(modules, inputs, kwargs, device_ids)`": (
        {"modules": [MODULE] * 2, "inputs": [(x,) for x in PARTS], "kwargs": [{"times": 2.0}, {}], "device_ids": DEVICES},
        lambda: [MODULE(PARTS[0], times=2.0), MODULE(PARTS[1])],
    ),
    "`cuda.comm.broadcast(x, device_ids)`": ({"x": X, "device_ids": DEVICES}, lambda: [[X], [X]]),
    "`cuda.comm.broadcast_coalesced(xs, device_ids)`": ({"xs": PARTS, "device_ids": DEVICES}, lambda: [PARTS, PARTS]),
    "`cuda.comm.reduce_add(xs, device)`": ({"xs": [X, X, X], "device": "cpu"}, lambda: 3 * X),
    "`cuda.comm.reduce_add_coalesced(rows, device)`": (
        {"rows": ROWS, "device": "cpu"},
        lambda: [torch.full((2,), 5.0), torch.full((3,), 6.0)],
    ),
    "`cuda.comm.scatter(x, device_ids, sizes, dim)`": (
        {"x": X, "device_ids": DEVICES, "sizes": [1, 3], "dim": 1},
        lambda: list(X.split([1, 3], 1)),
    ),
    "`cuda.comm.gather(xs, dim, device)`": ({"xs": PARTS, "dim": 0, "device": "cpu"}, lambda: X),
    "`nn.SyncBatchNorm(num_features)`": ({"num_features": 4}, None),
    "`nn.SyncBatchNorm.convert_sync_batchnorm(module)`": ({"module": nn.Sequential(nn.BatchNorm1d(4))}, None),
    "`DistributedDataParallel(module)`, when it is made": ({}, None),
    "`DistributedDataParallel(module)`, in backward, with `find_unused_parameters`, `no_sync` or `static_graph`": ({}, None),
}


def run(row: str, names: dict) -> object:
    return eval(table()[row], vars(unisono.dataparallel) | names)


def test_every_row_of_the_table_is_run():
    assert list(table()) == list(LINES)


@pytest.mark.parametrize("row", [row for row, (_, expected) in LINES.items() if expected])
def test_the_line_gives_what_torch_gives(row):
    names, expected = LINES[row]
    torch.testing.assert_close(run(row, names), expected())


def test_a_single_input_needs_no_star():
    code = table()["`nn.parallel.data_parallel(module, inputs, device_ids, output_device, dim, module_kwargs)`"]
    code = code.replace("*inputs, **module_kwargs", "x")
    found = eval(code, vars(unisono.dataparallel) | OPTIONS | {"x": X})
    torch.testing.assert_close(found, MODULE(X))


def test_the_lines_that_make_modules():
    row = "`nn.parallel.replicate(module, device_ids)`"
    torch.testing.assert_close(run(row, LINES[row][0])(X), MODULE(X))
    expected = nn.BatchNorm1d(4)(X)
    for row in ("`nn.SyncBatchNorm(num_features)`", "`nn.SyncBatchNorm.convert_sync_batchnorm(module)`"):
        torch.testing.assert_close(run(row, LINES[row][0])(X), expected)


def ranks_as_ddp_does():
    rank = dist.get_rank()
    module = Two()
    nn.init.constant_(module.linear.weight, rank)
    unused = nn.ModuleDict({"used": module, "unused": nn.Linear(2, 2)})
    ours, theirs = copy.deepcopy(unused), copy.deepcopy(unused)
    DistributedDataParallel(theirs)
    run("`DistributedDataParallel(module)`, when it is made", {"module": ours})
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=0)

    x = X.tensor_split(2)[rank]
    wrapped = DistributedDataParallel(theirs["used"])
    with wrapped.no_sync():
        wrapped(x).square().sum().backward()
    wrapped(2 * x).square().sum().backward()
    for scale in (1, 2):
        ours["used"](scale * x).square().sum().backward()
    row = "`DistributedDataParallel(module)`, in backward, with `find_unused_parameters`, `no_sync` or `static_graph`"
    run(row, {"module": ours})
    torch.testing.assert_close(ours["used"].linear.weight.grad, theirs["used"].linear.weight.grad)
    assert ours["unused"].weight.grad is None


def test_ranks_get_what_ddp_gives(ranks):
    ranks(ranks_as_ddp_does, world_size=2)

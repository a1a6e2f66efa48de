"""Every row of the README's migration table is run as it is written: its code is taken from the table."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as NF
import torch.nn.functional as F
from torch.distributed import ReduceOp

import unisono.collectives
from unisono.collectives import all_reduce
from unisono.collectives.testing import run_ranks

README = Path(unisono.collectives.__file__).parents[3] / "README.md"
SIZES = (2, 3)  # rows of the two ranks, where they may differ
Run = Callable[..., list]  # run(t=..., dim=...) returns the values of the code in the row's second column


def tables(text: str) -> list[list[str]]:
    """Return the cells of every row of the table under "Coming from elsewhere"."""
    section = text.split("## Coming from elsewhere")[1].split("\n## ")[0]
    rows = [line.strip("|").split(" | ") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def tensor(rows: int, *shape: int, seed: int = 0) -> torch.Tensor:
    """A leaf that differs on every rank."""
    generator = torch.Generator().manual_seed(10 * seed + dist.get_rank())
    return torch.randn(rows, *shape, generator=generator, dtype=torch.float64).requires_grad_()


def everyone(x: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of both ranks, by torch alone."""
    found = [None, None]
    dist.all_gather_object(found, x.detach())
    return found


def equal(got, expected) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=0)


def x_clip(run: Run) -> None:
    t = tensor(4, SIZES[dist.get_rank()])
    gathered, sizes = run(t=t, dim=1, sizes=torch.tensor(SIZES))
    equal(gathered, torch.cat(everyone(t), 1))
    assert tuple(sizes) == SIZES


def torch_all_gather(run: Run) -> None:
    t = tensor(2, 3)
    equal(run(t=t)[0], NF.all_gather(t))
    uneven = tensor(SIZES[dist.get_rank()])
    equal(list(run(t=uneven)[0]), everyone(uneven))


def torch_all_reduce(run: Run) -> None:
    t = tensor(2, 3)
    by_enum, by_name = run(t=t)
    equal(by_enum, NF.all_reduce(t, op=ReduceOp.MAX))
    assert torch.equal(by_enum, by_name)


def torch_reduce_and_broadcast(run: Run) -> None:
    t = tensor(2, 3)
    for op in (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.PRODUCT):
        reduced, sent = run(t=t, dst=1, src=1, op=op)
        theirs = NF.reduce(t.clone(), 1, op)
        equal(reduced, theirs if dist.get_rank() == 1 else torch.zeros_like(theirs))
        equal(sent, everyone(t)[1])


def torch_gather_and_scatter(run: Run) -> None:
    t, ts = tensor(2, 3), [tensor(rows, 3, seed=rows) for rows in SIZES]
    gathered, part = run(t=t, dst=1, ts=ts, src=0)
    whole = torch.cat(everyone(t))
    equal(gathered, whole if dist.get_rank() == 1 else whole[:0])
    equal(part, everyone(torch.cat(ts))[0].split(SIZES)[dist.get_rank()])


def torch_reduce_scatter(run: Run) -> None:
    ts = [tensor(2, 3, seed=seed) for seed in range(2)]
    equal(run(ts=ts, op=ReduceOp.SUM)[0], NF.reduce_scatter(torch.zeros(2, 3, dtype=torch.float64), ts, ReduceOp.SUM))
    ts = [tensor(rows, seed=rows) for rows in SIZES]
    equal(run(ts=ts, op="max")[0], torch.stack(everyone(torch.cat(ts))).amax(0).split(SIZES)[dist.get_rank()])


def torch_all_to_all(run: Run) -> None:
    ins = [tensor(2, 3, seed=seed) for seed in range(2)]
    equal(run(ins=ins)[0], list(NF.all_to_all([torch.zeros(2, 3, dtype=torch.float64) for _ in range(2)], ins)))


def torch_all_to_all_single(run: Run) -> None:
    x = tensor(sum(SIZES), 3)
    out_sizes = [SIZES[dist.get_rank()]] * 2
    theirs = NF.all_to_all_single(torch.zeros(sum(out_sizes), 3, dtype=torch.float64), x, out_sizes, list(SIZES))
    equal(run(x=x, in_sizes=torch.tensor(SIZES), out_sizes=out_sizes)[0], theirs)


def plain_all_reduce(run: Run) -> None:
    t = tensor(2)
    before = t.detach().clone()
    equal(run(t=t)[0], torch.stack(everyone(t)).mean(0))
    assert torch.equal(t, before)
    assert run(t=t)[0].requires_grad


def gathers(run: Run) -> None:
    t = tensor(SIZES[dist.get_rank()], 3)
    equal(run(t=t)[0], torch.cat(everyone(t)))


def padded_tokens(run: Run) -> None:
    t = torch.arange(1, 1 + SIZES[dist.get_rank()] * 2).view(2, -1)[: 2 - dist.get_rank()]  # one row fewer on rank 1
    assert run(t=t, pad=-1)[0].tolist() == [[1, 2, -1], [3, 4, -1], [1, 2, 3]]


def image_and_text() -> dict[str, torch.Tensor]:
    return {name: tensor(SIZES[dist.get_rank()], 4, seed=seed) for seed, name in enumerate(("image", "text"))}


def with_gradient(run: Run, *, own_terms_only: bool = False) -> None:
    features = image_and_text()
    gathered = run(**features)[0]
    equal(gathered, {name: torch.cat(everyone(x)) for name, x in features.items()})
    (gathered["image"].square().sum() * (1 + dist.get_rank())).backward()
    factor = 1 + dist.get_rank() if own_terms_only else 3
    equal(features["image"].grad, 2 * factor * features["image"].detach())


def without_gradient(run: Run) -> None:
    with_gradient(run, own_terms_only=True)


def local_loss(run: Run) -> None:
    features = image_and_text()
    labels = torch.arange(sum(SIZES)).split(SIZES)[dist.get_rank()]
    loss = run(**features, labels=labels, scale=3.0)[0]
    whole = {name: torch.cat(everyone(x)).requires_grad_() for name, x in features.items()}
    expected = F.cross_entropy(3.0 * whole["image"] @ whole["text"].T, torch.arange(sum(SIZES)))
    equal(loss, expected)
    loss.backward()
    expected.backward()
    for name, x in features.items():
        equal(x.grad / 2, whole[name].grad.split(SIZES)[dist.get_rank()])  # DDP's average


def backward_of(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """The gradient of t for a loss whose gradient at y is 1 on rank 0, and 2 on rank 1."""
    return torch.autograd.grad(y, t, torch.full_like(y, 1.0 + dist.get_rank()))[0]


def copy_to_region(run: Run) -> None:
    t = tensor(2, 3)
    equal(run(t=t)[0], t)
    equal(backward_of(run(t=t)[0], t), torch.full_like(t, 3.0))


def reduce_from_region(run: Run) -> None:
    t = tensor(2, 3)
    equal(run(t=t)[0], sum(everyone(t)))
    equal(backward_of(run(t=t)[0], t), torch.full_like(t, 1.0 + dist.get_rank()))


def scatter_to_region(run: Run) -> None:
    t = everyone(tensor(2, 4))[0].requires_grad_()  # the same on both
    equal(run(t=t)[0], t.chunk(2, -1)[dist.get_rank()])
    equal(backward_of(run(t=t)[0], t), torch.tensor([1.0, 1, 2, 2], dtype=t.dtype).expand(2, 4))


def gather_from_region(run: Run) -> None:
    t = tensor(2, 3)
    equal(run(t=t)[0], torch.cat(everyone(t), -1))
    equal(backward_of(run(t=t)[0], t), torch.full_like(t, 1.0 + dist.get_rank()))


CHECKS: dict[str, Callable[[Run], None]] = {  # by how the row begins
    "x-clip, gigagan": x_clip,
    "`NF.all_gather(t)`": torch_all_gather,
    "`NF.all_reduce(": torch_all_reduce,
    "`NF.reduce(t, dst, op)`": torch_reduce_and_broadcast,
    "`NF.gather(t, dst)`": torch_gather_and_scatter,
    "`NF.reduce_scatter(": torch_reduce_scatter,
    "`NF.all_to_all(outs": torch_all_to_all,
    "`NF.all_to_all_single(": torch_all_to_all_single,
    "`dist.all_reduce(": plain_all_reduce,
    "`dist.all_gather`": gathers,
    "accelerate: `gather(t)`": gathers,
    "accelerate: `gather(pad_across_processes(t, dim=1": padded_tokens,
    "accelerate: `gather_for_metrics": gathers,
    "open_clip: `gather_features(image, text, gather_with_grad=True)`": with_gradient,
    "open_clip: `gather_features(image, text, gather_with_grad=False)`": without_gradient,
    "open_clip: `local_loss=True`": local_loss,
    "Megatron: `copy_to": copy_to_region,
    "Megatron: `reduce_from": reduce_from_region,
    "Megatron: `scatter_to": scatter_to_region,
    "Megatron: `gather_from": gather_from_region,
}
ROWS = tables(README.read_text())


def run_row(start: str) -> None:
    (row,) = (row for row in ROWS if row[0].startswith(start))
    known = {**vars(unisono.collectives), "torch": torch, "F": F, "ReduceOp": ReduceOp}

    def run(**names: object) -> list:
        return [eval(code, known | names) for code in re.findall(r"`([^`]+)`", row[1])]

    CHECKS[start](run)


@pytest.mark.parametrize("start", CHECKS)
def test_migration_row_runs_as_written(start):
    run_ranks(run_row, start, world_size=2)


def test_every_row_is_run():
    assert [start for row in ROWS for start in CHECKS if row[0].startswith(start)] == list(CHECKS)
    assert len(ROWS) == len(CHECKS)


def a_dict_of_tensors() -> None:
    (row,) = (row for row in ROWS if row[0].startswith("`dist.all_reduce("))
    (code,) = re.findall(r"`([^`]+)`", row[2])
    tensors = {"a": tensor(2), "b": tensor(3)}
    reduced = eval(code, {"all_reduce": all_reduce, "tensors": tensors})
    equal(reduced, {name: sum(everyone(x)) for name, x in tensors.items()})


def test_a_dict_is_reduced_in_one_call():
    run_ranks(a_dict_of_tensors, world_size=2)


def ignored_labels() -> None:
    code = re.search(r"`(global_mean\(F\.cross_entropy\([^`]+)`", README.read_text()).group(1)
    logits, labels = tensor(SIZES[dist.get_rank()], 4), torch.tensor([1, -100, 3])[: SIZES[dist.get_rank()]]
    known = {**vars(unisono.collectives), "F": F, "logits": logits, "labels": labels}
    equal(eval(code, known), F.cross_entropy(torch.cat(everyone(logits)), torch.cat(everyone(labels)), ignore_index=-100))


def test_ignored_labels_are_weights_of_the_mean():
    run_ranks(ignored_labels, world_size=2)

"""Equal sizes under torch.compile are torch's functional collectives, forward and backward, with the values of one process.

That is so on backends other than gloo, and where inductor does not reorder for memory. Here gloo plays another backend.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo.testing
import torch._inductor.config
import torch.distributed as dist

from tests.collectives.one_process import CASES, inputs_of, local_loss
from unisono.collectives import (
    all_gather,
    all_reduce,
    all_to_all_single,
    average_gradient,
    checked,
    global_mean,
    reduce_scatter,
    split,
    sum_gradient,
)
from unisono.collectives import compiled as compiled_collectives
from unisono.collectives.autograd import KINDS
from unisono.collectives.testing import run_ranks

GATHER, SCATTER, EXCHANGE, REDUCE = "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "all_reduce"


@contextmanager
def functional(kinds: set[str]) -> Iterator[None]:
    """Inductor does not reorder for memory, and gloo serves these kinds of maps."""
    with (
        torch._inductor.config.patch(reorder_for_peak_memory=False),
        mock.patch.object(compiled_collectives, "FUNCTIONAL_ON_GLOO", kinds),
    ):
        yield


def on_another_backend(body: Callable[..., Any]) -> Callable[..., Any]:
    """Run the body of a rank with gloo's own collectives for all kinds of maps: all ranks here see the same sizes."""

    @wraps(body)
    def run(*args: Any) -> Any:
        with functional(set(KINDS)):
            return body(*args)

    return run


class Graphs:
    """A backend of torch.compile that notes the collectives of each graph and runs it as it is."""

    def __init__(self) -> None:
        from torch._dynamo.backends.common import aot_autograd

        self.collectives: list[list[str]] = []
        self.backend = aot_autograd(fw_compiler=self._note, bw_compiler=self._note)

    def _note(self, graph: Any, inputs: Any) -> Any:
        from functorch.compile import make_boxed_func

        targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
        found = []
        for target in targets:
            namespace, name = getattr(target, "namespace", ""), str(target)
            if name == "with_effects" or namespace == "unisono_collectives":
                found.append("opaque")
            elif namespace == "_c10d_functional" and "wait_tensor" not in name:
                found.append(target._opname)
        waits = sum("wait_tensor" in str(target) for target in targets)
        assert waits == len(found) - found.count("opaque")
        self.collectives.append(found)
        return make_boxed_func(graph.forward)


# The case, and the collectives of its graphs, forward and backward.
LOWERED = {
    "all_gather_equal_sizes": ([GATHER], [SCATTER]),
    "start_all_gather_equal_sizes": ([GATHER], [SCATTER]),
    "all_gather_scalar": (None, None),  # sizes are exchanged: opaque
    "reduce_scatter_equal_sizes": ([SCATTER], [GATHER]),
    "all_to_all_single_equal_sizes": ([EXCHANGE], [EXCHANGE]),
    "all_reduce_sum": ([REDUCE], [REDUCE]),
    "all_reduce_avg_scalar": ([REDUCE], [REDUCE]),
    "all_reduce_max_ties_and_zeros": ([REDUCE], [REDUCE, REDUCE]),
    "all_reduce_min": ([REDUCE], [REDUCE, REDUCE]),
    "gather_equal_sizes": (["opaque"], ["opaque"]),
    "global_mean_one_side": ([REDUCE], [REDUCE]),  # rows differ by rank
}


@on_another_backend
def matches_one_process(names: list[str]) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for name in names:
        torch._dynamo.reset()
        case, graphs = CASES[name], Graphs()
        inputs = inputs_of(case, size)
        whole = [x.clone().requires_grad_() for x in inputs]
        expected = case.reference(whole)
        losses = torch.stack([local_loss(y, r) for r, y in enumerate(expected)]).sum()
        expected_gradient = torch.autograd.grad(losses, whole)[rank]
        x = inputs[rank].clone().requires_grad_()
        y = torch.compile(lambda x, case=case: case(x, None), backend=graphs.backend, fullgraph=True)(x)
        torch.testing.assert_close(y, expected[rank], rtol=1e-13, atol=1e-13)
        (gradient,) = torch.autograd.grad(local_loss(y, rank), x)
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-12)
        forward, backward = LOWERED[name]
        if forward is None:
            assert all(set(found) == {"opaque"} for found in graphs.collectives), (name, graphs.collectives)
        else:
            assert graphs.collectives == [forward, backward], (name, graphs.collectives)


@pytest.mark.parametrize("world_size", [2, 3])
def test_equal_sizes_are_functional_collectives(world_size):
    run_ranks(matches_one_process, list(LOWERED), world_size=world_size, timeout=240)


# The program, and the collectives of its graphs, forward and backward, on 2 ranks whose x is (4, 3).
PROGRAMS = {
    "sizes given": (lambda x: all_gather(x * 2, sizes=[4, 4]), [GATHER], [SCATTER]),
    "uneven": (lambda x: all_gather(x[: 2 + dist.get_rank()], sizes=[2, 3]), ["opaque"], ["opaque"]),
    "dim 1": (lambda x: all_gather(x.T, 1, sizes="equal"), [GATHER], [SCATTER]),
    "slice": (lambda x: all_gather(x * 2, sizes="equal", grad="slice"), [GATHER], []),
    "tree": (lambda x: sum(map(torch.sum, all_gather([x, x.sum(0)], sizes="equal"))), [GATHER, GATHER], [SCATTER, SCATTER]),
    "without a gradient": (lambda x: all_gather(x.detach(), sizes="equal") + all_reduce(x).sum(), ["opaque", REDUCE], [REDUCE]),
    "reduce_dtype": (lambda x: all_gather(x, sizes="equal", reduce_dtype=torch.float32), [GATHER], [SCATTER]),
    "product": (lambda x: all_reduce(x * 2, "product"), [EXCHANGE, GATHER], [SCATTER, EXCHANGE]),
    "identity": (lambda x: all_reduce(x * 2, grad="identity"), [REDUCE], []),
    "sum_gradient": (lambda x: sum_gradient(x * 2), [], [REDUCE]),
    "average_gradient": (lambda x: average_gradient(x * 2), [], [REDUCE]),
    "split": (lambda x: split(x * 2), [], [GATHER]),
    "one parameter, twice": (lambda x: all_reduce(global_mean(x) * x), [REDUCE, REDUCE], [REDUCE, REDUCE]),
    "16 bits": (lambda x: all_gather(x.bfloat16(), sizes="equal").double(), [GATHER], [SCATTER]),
    "complex": (lambda x: all_gather(torch.complex(x, x), sizes="equal").imag, ["opaque"], ["opaque"]),
}


@on_another_backend
def has_these_collectives() -> None:
    for name, (program, forward, backward) in PROGRAMS.items():
        torch._dynamo.reset()
        graphs = Graphs()
        x = (torch.arange(12.0, dtype=torch.float64).view(4, 3).sin() + dist.get_rank()).requires_grad_()
        found = []
        for function in (program, torch.compile(program, backend=graphs.backend, fullgraph=True)):
            y = function(x)
            found.append((y, *torch.autograd.grad(((dist.get_rank() + 1) * y**2).sum(), x)))
        torch.testing.assert_close(*found)
        assert graphs.collectives == [forward, backward], (name, graphs.collectives)


def test_what_is_equal_is_in_the_graph_and_the_rest_is_opaque():
    run_ranks(has_these_collectives, world_size=2, timeout=240)


def without_other_settings(reorders: bool) -> None:
    """By default all is opaque. On gloo, only a sum is functional where inductor does not reorder."""
    rank = dist.get_rank()
    programs = {
        "all_gather": (lambda x: all_gather(x, sizes="equal"), False),
        "reduce_scatter": (lambda x: reduce_scatter(x, sizes="equal"), False),
        "all_to_all": (lambda x: all_to_all_single(x, send_sizes=[2, 2], receive_sizes=[2, 2]), False),
        "max": (lambda x: all_reduce(x, "max"), False),
        "split": (lambda x: split(x * 2), False),
        "all_reduce": (lambda x: all_reduce(x * 2), True),
        "sum_gradient": (lambda x: sum_gradient(x * 2), True),
        "uneven and sum": (lambda x: all_gather(x[: 1 + rank], sizes=[1, 2]).sum() + all_reduce(x), True),
    }
    for name, (program, adds) in programs.items():
        torch._dynamo.reset()
        graphs = Graphs()
        x = (torch.arange(12.0, dtype=torch.float64).view(4, 3).sin() + rank).requires_grad_()
        found = []
        with torch._inductor.config.patch(reorder_for_peak_memory=reorders):
            for function in (program, torch.compile(program, backend=graphs.backend, fullgraph=True)):
                y = function(x)
                found.append((y, *torch.autograd.grad(((rank + 1) * y**2).sum(), x)))
        torch.testing.assert_close(*found)
        used = {each for graph in graphs.collectives for each in graph}
        assert used - {"opaque"} == ({REDUCE} if adds and not reorders else set()), (name, used)


@pytest.mark.parametrize("reorders", [True, False])
def test_gloo_has_functional_sums_where_inductor_does_not_reorder(reorders):
    assert torch._inductor.config.reorder_for_peak_memory  # the default
    run_ranks(without_other_settings, reorders, world_size=2, timeout=240)


def one_rank_sees_equal_sizes(eager: int | None) -> None:
    """Each pair of ranks sends as it says to each other; only rank 0 sees equal sizes. Rank `eager` does not compile."""
    torch._dynamo.reset()
    rank = dist.get_rank()
    rows = [[2, 2], [2, 3]][rank]
    x = (torch.arange(2.0 * sum(rows), dtype=torch.float64).view(-1, 2) + rank).requires_grad_()

    def program(x: torch.Tensor) -> torch.Tensor:
        exchanged = all_to_all_single(x, send_sizes=rows, receive_sizes=rows)
        return all_gather(exchanged[:2], sizes="equal").sum() + all_reduce(x.sum() * exchanged.sum())

    run = program if rank == eager else torch.compile(program, backend="aot_eager", fullgraph=True)
    with torch._inductor.config.patch(reorder_for_peak_memory=False):
        found = run(x), program(x)
        torch.testing.assert_close(*found)
        torch.testing.assert_close(*(torch.autograd.grad(y * (rank + 1), x) for y in found))


@pytest.mark.parametrize("eager", [None, 1])
def test_ranks_that_compile_other_code_meet_on_gloo(eager):
    run_ranks(one_rank_sees_equal_sizes, eager, world_size=2, timeout=60)


@on_another_backend
def nan_wins() -> None:
    torch._dynamo.reset()
    x = torch.tensor([[1.0, float("nan"), -0.0], [float("nan"), -float("inf"), 0.0]])[dist.get_rank()]
    x.requires_grad_()
    for op in ("max", "min"):
        graphs = Graphs()
        y = torch.compile(lambda x, op=op: all_reduce(x, op), backend=graphs.backend, fullgraph=True)(x)
        assert y.isnan().tolist() == [True, True, False] and graphs.collectives[0] == [REDUCE]


def test_nan_wins_in_compiled_max_and_min():
    run_ranks(nan_wins, world_size=2)


@on_another_backend
def checks_are_not_lost() -> None:
    """A graph that is compiled inside checked() compares the calls of the ranks."""
    torch._dynamo.reset()
    graphs = Graphs()
    with checked():
        program = torch.compile(lambda x: all_reduce(x) * 2, backend=graphs.backend, fullgraph=True)
        assert program(torch.ones(2, requires_grad=True)).tolist() == [4.0, 4.0]
        with pytest.raises(ValueError, match="the ranks disagree"):
            program(torch.ones(2 + dist.get_rank(), requires_grad=True))
    assert graphs.collectives[0] == ["opaque"]


def test_checked_graphs_stay_opaque():
    run_ranks(checks_are_not_lost, world_size=2)


@on_another_backend
def dynamic_batches() -> tuple[int, list[list[str]]]:
    torch._dynamo.reset()
    graphs = Graphs()
    counter = torch._dynamo.testing.CompileCounterWithBackend(graphs.backend)
    program = torch.compile(lambda x: all_gather(x, sizes="equal").square(), backend=counter, fullgraph=True)
    for rows in range(2, 8):
        x = torch.full((rows, 2), 1.0 + dist.get_rank(), requires_grad=True)
        y = program(x)
        assert y.shape == (2 * rows, 2) and y[-1, 0] == 4
        y.sum().backward()
        assert (x.grad == 4 * x).all()
    return counter.frame_count, graphs.collectives


def test_batches_of_any_size_share_a_graph():
    for frames, collectives in run_ranks(dynamic_batches, world_size=2):
        assert frames <= 2
        assert all(found in ([GATHER], [SCATTER]) for found in collectives)


@on_another_backend
def with_inductor() -> None:
    """Several collectives that do not depend on each other, one of uneven sizes, and one whose result rank 1 does not use."""
    torch._dynamo.reset()
    rank = dist.get_rank()

    def program(x: torch.Tensor) -> torch.Tensor:
        y = all_gather(x * 2, sizes="equal")
        z = reduce_scatter(y @ y.T, sizes="equal")
        uneven = all_gather(x[: 1 + rank], sizes=[1, 2])
        total = all_reduce(z, "max").sum() + global_mean(z) * uneven.sum()
        noted = all_gather(x.detach(), sizes="equal")
        return total + noted.sum() if rank == 0 else total

    x = (torch.arange(8.0, dtype=torch.float64).view(4, 2).cos() + rank).requires_grad_()
    found = []
    for function in (program, torch.compile(program, fullgraph=True)):
        y = function(x)
        found.append((y, *torch.autograd.grad(y * (rank + 1), x)))
    torch.testing.assert_close(*found)


def test_inductor_runs_what_one_rank_does_not_use():
    run_ranks(with_inductor, world_size=2, timeout=240)


@on_another_backend
def penalty_inside() -> None:
    """A gradient penalty within the compiled region: the backward of the backward."""
    torch._dynamo.reset()

    def program(x: torch.Tensor) -> torch.Tensor:
        y = all_reduce(all_gather(x, sizes="equal") ** 2)
        (g,) = torch.autograd.grad((y**2).sum(), x, create_graph=True)
        return (g**2).sum()

    x = (torch.arange(3.0, dtype=torch.float64).sin() + dist.get_rank()).requires_grad_()
    expected = torch.autograd.grad(program(x), x)[0]
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        got = torch.autograd.grad(torch.compile(program, backend="aot_eager", fullgraph=True)(x), x)[0]
    torch.testing.assert_close(got, expected)


def test_second_derivatives_inside_the_compiled_region():
    run_ranks(penalty_inside, world_size=2)

"""torch.compile: whole graphs, both backends, the values and gradients of eager, and no endless recompilation."""

import threading

import pytest
import torch
import torch._dynamo.testing
import torch.distributed as dist
from torch.fx.experimental.proxy_tensor import make_fx

from unisono.collectives import (
    Ring,
    all_gather,
    all_reduce,
    all_to_all,
    all_to_all_single,
    broadcast,
    count_bytes,
    exchange_sizes,
    gather,
    global_mean,
    reduce,
    reduce_scatter,
    scatter,
    shift,
)
from unisono.collectives.testing import run_ranks

LENGTHS = (3, 5)


def sizes() -> list[int]:
    return list(LENGTHS[: dist.get_world_size()])


PROGRAMS = {
    "all_gather": lambda x: all_gather(x * 2),
    "all_gather sizes": lambda x: all_gather(x * 2, sizes=sizes()),
    "all_gather slice": lambda x: all_gather(x * 2, grad="slice"),
    "all_gather dim": lambda x: all_gather(x.T, dim=1),
    "all_gather tree": lambda x: all_gather({"a": x, "b": [x.sum()]})["a"] * 2,
    "all_reduce": lambda x: all_reduce(x.sum(0)),
    "all_reduce avg": lambda x: all_reduce(x.sum(0), "avg"),
    "all_reduce of torch's op": lambda x: all_reduce(x.sum(0), dist.ReduceOp.AVG),
    "all_reduce max": lambda x: all_reduce(x.sum(0), "max"),
    "all_reduce product": lambda x: all_reduce(x.sum(0), "product"),
    "all_reduce identity": lambda x: all_reduce(x.sum(0), grad="identity"),
    "reduce": lambda x: reduce(x.sum(0), root=1),
    "reduce_scatter": lambda x: reduce_scatter(x.sum(0)),
    "reduce_scatter sizes": lambda x: reduce_scatter(x.sum(0), sizes=[1, 3], op="max"),
    "broadcast": lambda x: broadcast(x.sum(0), root=1),
    "gather": lambda x: gather(x),
    "gather sizes": lambda x: gather(x, sizes=sizes(), root=1),
    "all_to_all_single": lambda x: all_to_all_single(x),
    "shift": lambda x: shift(x),
    "global_mean": lambda x: global_mean(x),
    "exchange_sizes": lambda x: x * sum(exchange_sizes(x)),
    "several": lambda x: all_gather(all_reduce(x.sum(0)) * x) + broadcast(x.sum()),
}


def compiled_matches_eager(name: str, backend: str) -> None:
    torch._dynamo.reset()
    rank = dist.get_rank()
    program = PROGRAMS[name]
    torch.manual_seed(rank)
    x = torch.randn(LENGTHS[rank], 4, dtype=torch.float64, requires_grad=True)
    y, compiled = program(x), torch.compile(program, backend=backend, fullgraph=True)(x)
    torch.testing.assert_close(compiled, y)
    for result in (y, compiled):
        weights = torch.linspace(1, 2 + rank, result.numel(), dtype=torch.float64).view(result.shape)
        (gradient,) = torch.autograd.grad((weights * result**2).sum(), x)
        if result is y:
            expected = gradient
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("name", PROGRAMS)
def test_whole_graph_matches_eager_with_aot_eager(name):
    run_ranks(compiled_matches_eager, name, "aot_eager", world_size=2)


@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter sizes", "several"])
def test_whole_graph_matches_eager_with_inductor(name):
    run_ranks(compiled_matches_eager, name, "inductor", world_size=2, timeout=240)


def few_graphs_for_many_sizes(given: bool) -> int:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    rank, size = dist.get_rank(), dist.get_world_size()

    @torch.compile(backend=counter, fullgraph=True)
    def program(x: torch.Tensor, lengths: list[int] | None) -> torch.Tensor:
        part = reduce_scatter(all_gather(x, sizes=lengths), sizes=lengths if given else None)
        return all_gather(x, sizes=lengths) * 2 + 0 * part.sum()

    for step in range(8):
        lengths = [2 + step + r * (step % 3) for r in range(size)]
        x = torch.full((lengths[rank], 2), float(rank), requires_grad=True)
        y = program(x, lengths if given else None)
        assert y.shape == (sum(lengths), 2)
        y.sum().backward()
        assert (x.grad == 2 * size).all()
    return counter.frame_count


@pytest.mark.parametrize("given", [True, False], ids=["sizes given", "sizes asked"])
def test_dynamic_sizes_do_not_recompile_for_ever(given):
    assert max(run_ranks(few_graphs_for_many_sizes, given, world_size=2)) <= 3


def unused_result_still_communicates(backend: str) -> None:
    """A compiler that dropped the call on the rank that ignores the result would leave the other waiting."""
    torch._dynamo.reset()

    @torch.compile(backend=backend, fullgraph=True)
    def program(x: torch.Tensor) -> torch.Tensor:
        y = gather(x, sizes=[len(x)] * 2)
        return y * 2 if dist.get_rank() == 0 else x * 2

    with torch.no_grad():
        for rows in (3, 4, 5):  # the second makes the graph dynamic
            assert program(torch.ones(rows)).shape == ((2 * rows,) if dist.get_rank() == 0 else (rows,))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_unused_result_is_not_optimised_away(backend):
    run_ranks(unused_result_still_communicates, backend, world_size=2, timeout=120)


def breaks_but_works() -> None:
    torch._dynamo.reset()
    rank = dist.get_rank()
    program = torch.compile(lambda x: scatter(x if rank == 0 else None) * 2, backend="aot_eager")
    assert torch.equal(program(torch.arange(4.0)), torch.arange(4.0).split(2)[rank] * 2)
    program = torch.compile(lambda x: all_to_all([x, x[:1]])[0] * 2, backend="aot_eager")
    assert program(torch.ones(3)).shape == ((3,) if rank == 0 else (1,))


def test_scatter_and_list_all_to_all_break_the_graph_and_work():
    run_ranks(breaks_but_works, world_size=2)


def penalty_inside() -> None:
    """A gradient penalty within the compiled region, as GANs need it."""
    torch._dynamo.reset()

    def program(x: torch.Tensor) -> torch.Tensor:
        y = all_gather(x, sizes=sizes())
        (g,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
        return (g**2).sum()

    x = torch.randn(LENGTHS[dist.get_rank()], 2, dtype=torch.float64, requires_grad=True)
    expected = torch.autograd.grad(program(x), x)[0]
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        got = torch.autograd.grad(torch.compile(program, backend="aot_eager", fullgraph=True)(x), x)[0]
    torch.testing.assert_close(got, expected)


def test_gradient_penalty_inside_the_compiled_region():
    run_ranks(penalty_inside, world_size=2)


def func_inside_compile() -> None:
    """The opaque op has no tangent: never a silent zero, but an error, or eager code where the graph may break."""
    torch._dynamo.reset()
    x = torch.ones(2)

    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.func.jvp(all_reduce, (x,), (x,))[1]

    with pytest.raises(RuntimeError):
        torch.compile(program, backend="aot_eager", fullgraph=True)(x)
    torch._dynamo.reset()
    assert torch.compile(program, backend="aot_eager")(x).tolist() == [2.0, 2.0]


def test_jvp_inside_compile_is_not_silently_zero():
    run_ranks(func_inside_compile, world_size=2)


def counted_backward() -> None:
    torch._dynamo.reset()
    x = torch.ones(2, requires_grad=True)
    y = torch.compile(lambda x: all_gather(x, sizes=[2, 2]) * 2, backend="aot_eager", fullgraph=True)(x)
    with count_bytes():
        y.sum().backward()
    assert x.grad.tolist() == [4.0, 4.0]


def test_count_bytes_does_not_disturb_compiled_code():
    run_ranks(counted_backward, world_size=2)


def works_while_another_thread_compiles() -> None:
    torch._dynamo.reset()
    found = []

    def talk() -> None:
        x = torch.ones(dist.get_rank() + 1)
        found.append((exchange_sizes(x), all_gather(x).tolist()))

    def compiler(graph, inputs):
        assert torch.compiler.is_compiling()  # for every thread
        thread = threading.Thread(target=talk)
        thread.start()
        thread.join(20)
        return graph.forward

    assert torch.compile(lambda x: x + 1, backend=compiler)(torch.zeros(2)).tolist() == [1, 1]
    assert found == [((1, 2), [1.0, 1.0, 1.0])]


def test_collectives_of_a_thread_while_another_one_compiles(ranks):
    """As a checkpoint that is written in the background does."""
    ranks(works_while_another_thread_compiles, world_size=2)


def gradient_of(program):
    return torch.func.grad(lambda x: program(x).square().sum())


def make_fx_matches_eager() -> None:
    """A graph of sends and receives does not wait for them: most runs gave garbage."""
    programs = {
        "all_reduce": lambda x: all_reduce(x) * 2,
        "all_reduce max": lambda x: all_reduce(x, "max") * 2,
        "all_gather": lambda x: all_gather(x) * 2,
        "all_gather tree": lambda x: all_gather({"a": x, "b": x + 1})["b"] * 2,
        "all_to_all": lambda x: all_to_all([x, x + 1])[1] * 2,
        "scatter": lambda x: scatter(x) * 2,
        "global_mean": lambda x: global_mean(x),
    }
    first, second = (torch.randn(100_000) + dist.get_rank() for _ in range(2))
    for name, program in programs.items():
        for function in (program,) if name == "scatter" else (program, gradient_of(program)):
            graph = make_fx(function)(first)
            assert torch.equal(graph(second), function(second)), name
    with pytest.raises(RuntimeError, match="Ring: make_fx cannot trace it"):
        make_fx(lambda x: [block for _, (block,) in Ring([x])])(first)


def test_graphs_of_make_fx_match_eager():
    run_ranks(make_fx_matches_eager, world_size=2)

"""The law as code: what each collective computes in one process that has the tensors of all ranks, and the comparison.

A reference takes the list of all ranks' inputs and returns the list of all ranks' outputs, in plain torch.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from unisono import collectives
from unisono.collectives.groups import resolve_group

SKEWED = (3, 0, 5, 1)  # rows of ranks 0 to 3
REDUCTIONS = {
    "sum": lambda t: t.sum(0),
    "avg": lambda t: t.mean(0),
    "max": lambda t: t.amax(0),
    "min": lambda t: t.amin(0),
    "product": lambda t: t.prod(0),
}


@dataclass(frozen=True)
class Case:
    """A call to compare: function, shapes and arguments, and the reference in one process."""

    function: str
    shapes: Callable[[int], list[tuple[int, ...] | None]]  # for a world size, every rank's input
    reference: Callable[..., list[Tensor]]
    arguments: dict[str, Any] = field(default_factory=dict)
    make: Callable[[Tensor], Tensor] = lambda x: x  # turns random numbers into the input

    def __call__(self, x: Tensor, group: Any) -> Tensor:
        y = getattr(collectives, self.function)(x, group=group, **self.arguments)
        return y.wait() if isinstance(y, collectives.PendingTensor) else y


def ragged(*trailing: int, dim: int = 0) -> Callable[[int], list[tuple[int, ...] | None]]:
    return lambda size: [(*trailing[:dim], rows, *trailing[dim:]) for rows in SKEWED[:size]]


def same(*shape: int) -> Callable[[int], list[tuple[int, ...] | None]]:
    return lambda size: [shape] * size


def on_all(make: Callable[[list[Tensor]], Tensor]) -> Callable[[list[Tensor]], list[Tensor]]:
    return lambda xs: [make(xs)] * len(xs)


def on_root(make: Callable[[list[Tensor]], Tensor], otherwise: Callable[[Tensor], Tensor], root: int = -1) -> Any:
    def reference(xs: list[Tensor]) -> list[Tensor]:
        whole = make(xs)
        return [whole if r == root % len(xs) else otherwise(whole) for r in range(len(xs))]

    return reference


def exchanged(xs: list[Tensor], dim: int = 0) -> list[Tensor]:
    parts = [x.tensor_split(len(xs), dim) for x in xs]
    return [torch.cat([parts[source][target] for source in range(len(xs))], dim) for target in range(len(xs))]


def zeros_to_first(x: Tensor) -> Tensor:
    """Zeros in some places, so that products have one or several of them."""
    return torch.where(x.abs() < 0.7, torch.zeros_like(x), x)


CASES = {
    "all_gather": Case("all_gather", ragged(4), on_all(lambda xs: torch.cat(xs))),
    "all_gather_dim1": Case("all_gather", ragged(4, 2, dim=1), on_all(lambda xs: torch.cat(xs, 1)), {"dim": 1}),
    "all_gather_negative_dim": Case("all_gather", ragged(4, 2, dim=2), on_all(lambda xs: torch.cat(xs, -1)), {"dim": -1}),
    "all_gather_scalar": Case("all_gather", same(), on_all(torch.stack)),
    "all_gather_no_rows": Case("all_gather", same(0, 3), on_all(torch.cat)),
    "gather": Case("gather", ragged(4), on_root(torch.cat, lambda y: y[:0]), {"root": -1}),
    "gather_dim1": Case(
        "gather", ragged(4, dim=1), on_root(lambda xs: torch.cat(xs, 1), lambda y: y[:, :0]), {"root": -1, "dim": 1}
    ),
    "scatter": Case(
        "scatter",
        lambda size: [(7, 3) if r == size - 1 else (0, 3) for r in range(size)],
        lambda xs: list(xs[-1].tensor_split(len(xs))),
        {"root": -1},
    ),
    "scatter_dim1": Case(
        "scatter", lambda size: [(2, 5), *[(2, 0)] * (size - 1)], lambda xs: list(xs[0].tensor_split(len(xs), 1)), {"dim": 1}
    ),
    "broadcast": Case("broadcast", same(2, 3), on_all(lambda xs: xs[-1]), {"root": -1}),
    "broadcast_scalar": Case("broadcast", same(), on_all(lambda xs: xs[0])),
    "all_to_all_single": Case("all_to_all_single", lambda size: [(n + 3, 2) for n in SKEWED[:size]], exchanged),
    "all_to_all_single_dim1": Case(
        "all_to_all_single", lambda size: [(2, n) for n in SKEWED[:size]], lambda xs: exchanged(xs, 1), {"dim": -1}
    ),
    "shift": Case("shift", ragged(3), lambda xs: [xs[r - 1] for r in range(len(xs))]),
    "shift_back_two": Case("shift", ragged(3), lambda xs: [xs[(r + 2) % len(xs)] for r in range(len(xs))], {"offset": -2}),
    "shift_scalar": Case("shift", same(), lambda xs: [xs[r - 1] for r in range(len(xs))]),
    **{
        f"all_reduce_{op}{suffix}": Case(
            "all_reduce", same(*shape), on_all(lambda xs, f=f: f(torch.stack(xs))), {"op": op}, make
        )
        for op, f in REDUCTIONS.items()
        for suffix, shape, make in [
            ("", (3, 2), lambda x: x),
            ("_scalar", (), lambda x: x),
            ("_ties_and_zeros", (2, 9), lambda x: zeros_to_first(x.round())),
        ]
    },
    **{
        f"reduce_{op}": Case(
            "reduce", same(3, 2), on_root(lambda xs, f=f: f(torch.stack(xs)), lambda y: 0 * y), {"op": op, "root": -1}
        )
        for op, f in REDUCTIONS.items()
    },
    **{
        f"reduce_scatter_{op}{suffix}": Case(
            "reduce_scatter",
            same(2, 5),
            lambda xs, f=f: list(f(torch.stack(xs)).tensor_split(len(xs), 1)),
            {"op": op, "dim": 1},
            make,
        )
        for op, f in REDUCTIONS.items()
        for suffix, make in [("", lambda x: x), ("_ties_and_zeros", lambda x: zeros_to_first(x.round()))]
    },
    "start_all_gather": Case("start_all_gather", ragged(4, 2, dim=1), on_all(lambda xs: torch.cat(xs, 1)), {"dim": 1}),
    "start_all_to_all_single": Case("start_all_to_all_single", lambda size: [(n + 3, 2) for n in SKEWED[:size]], exchanged),
    **{
        f"start_all_reduce_{op}": Case("start_all_reduce", same(3, 2), on_all(lambda xs, f=f: f(torch.stack(xs))), {"op": op})
        for op, f in REDUCTIONS.items()
        if op in ("sum", "avg")
    },
    **{
        f"start_reduce_scatter_{op}": Case(
            "start_reduce_scatter",
            same(2, 5),
            lambda xs, f=f: list(f(torch.stack(xs)).tensor_split(len(xs), 1)),
            {"op": op, "dim": 1},
        )
        for op, f in REDUCTIONS.items()
        if op in ("sum", "avg")
    },
    **{
        f"{function}_equal_sizes": Case(function, same(4, 2), on_all(torch.cat), {"sizes": "equal"})
        for function in ("all_gather", "start_all_gather")
    },
    "gather_equal_sizes": Case("gather", same(3, 2), on_root(torch.cat, lambda y: y[:0]), {"root": -1, "sizes": "equal"}),
    "shift_equal_sizes": Case("shift", same(3), lambda xs: [xs[r - 1] for r in range(len(xs))], {"sizes": "equal"}),
    **{
        f"{function}_equal_sizes": Case(
            function,
            lambda size: [(2, 3 * size)] * size,
            lambda xs: list(sum(xs).tensor_split(len(xs), 1)),
            {"dim": 1, "sizes": "equal"},
        )
        for function in ("reduce_scatter", "start_reduce_scatter")
    },
    **{
        f"{function}_equal_sizes": Case(
            function, lambda size: [(2 * size, 3)] * size, exchanged, {"send_sizes": "equal", "receive_sizes": "equal"}
        )
        for function in ("all_to_all_single", "start_all_to_all_single")
    },
    "all_to_all_single_equal_uneven": Case("all_to_all_single", same(7), exchanged, {"receive_sizes": "equal"}),
    "global_mean_one_side": Case("global_mean", ragged(2), on_all(lambda xs: torch.cat(xs).mean())),
}


@cache  # making a group is a collective call: make each once in the life of the process
def group_named(name: str) -> tuple[Any, list[int]]:
    """Return a `group` argument and the global ranks in it; no ranks if this rank is not a member."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if name == "world":
        return None, list(range(size))
    if name == "without rank 0":
        members = list(range(1, size))
        return dist.new_group(members), members if rank else []
    if name == "every other rank":
        members = list(range(1, size, 2))
        return dist.new_group(members), members if rank % 2 else []
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replica", "shard"))
    if name == "mesh dimension":
        return (mesh, "replica"), [rank % (size // 2), rank % (size // 2) + size // 2]
    if name == "1-D mesh":
        return mesh["shard"], [rank // (size // 2) * (size // 2) + k for k in range(size // 2)]
    raise KeyError(name)


def inputs_of(case: Case, size: int, seed: int = 0) -> list[Tensor]:
    """Return the inputs of all ranks, which all differ. Every rank that calls this gets the same list."""
    generator = torch.Generator().manual_seed(seed)
    return [case.make(torch.randn(shape, generator=generator, dtype=torch.float64)) for shape in case.shapes(size)]


def local_loss(y: Tensor, rank: int) -> Tensor:
    """Return a loss that is not linear and differs by rank, so that a wrong factor, order or sum shows."""
    weights = torch.arange(1.0, y.numel() + 1, dtype=y.dtype).reshape(y.shape).sqrt()
    return ((y * weights).sin() * (rank + 1) + (rank + 2) * y**3).sum()


def first_and_second(losses: Tensor, xs: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the gradient, and the gradient of the sum of its cubes."""
    first = torch.autograd.grad(losses, xs, create_graph=True, materialize_grads=True)
    second = torch.autograd.grad(sum((g**3).sum() for g in first), xs, materialize_grads=True)
    return list(first), list(second)


def matches_one_process(case_name: str, group_name: str) -> None:
    """Compare value, gradient and second gradient with one process that has all inputs. Runs on every rank."""
    case = CASES[case_name]
    group, members = group_named(group_name)
    if not members:
        return
    rank = resolve_group(group).rank
    assert members[rank] == dist.get_rank()
    inputs = inputs_of(case, len(members))

    whole = [x.clone().requires_grad_() for x in inputs]
    expected = case.reference(whole)
    losses = torch.stack([local_loss(y, r) for r, y in enumerate(expected)]).sum()
    first_expected, second_expected = first_and_second(losses, whole)

    mine = inputs[rank].clone().requires_grad_()
    version, y = mine._version, case(mine, group)
    torch.testing.assert_close(y, expected[rank], rtol=1e-13, atol=1e-13)
    first, second = first_and_second(local_loss(y, rank), [mine])
    torch.testing.assert_close(first[0], first_expected[rank], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(second[0], second_expected[rank], rtol=1e-11, atol=1e-11)
    assert mine._version == version, "the input was modified"

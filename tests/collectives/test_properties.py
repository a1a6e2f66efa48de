"""Any shape, split, dimension, dtype and root that hypothesis can think of."""

from typing import Any

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from unisono.collectives import all_gather, all_to_all_single, gather, reduce_scatter, scatter, shift
from unisono.collectives.testing import run_ranks

relaxed = settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
WORLD = st.integers(1, 4)
DTYPES = st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])


@st.composite
def ragged(draw: Any) -> dict[str, Any]:
    """Shapes that differ along one dimension, which may be counted from the end."""
    size = draw(WORLD)
    other = draw(st.lists(st.integers(0, 3), max_size=3))
    dim = draw(st.integers(0, len(other)))
    lengths = draw(st.lists(st.integers(0, 5), min_size=size, max_size=size))
    return {
        "shapes": [(*other[:dim], length, *other[dim:]) for length in lengths],
        "dim": dim - len(other) - 1 if draw(st.booleans()) else dim,
        "dtype": draw(DTYPES),
        "root": draw(st.integers(0, size - 1)),
        "offset": draw(st.integers(-5, 5)),
        "give_sizes": draw(st.booleans()),
    }


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randint(0, 9, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def gathers(shapes: list, dim: int, dtype: torch.dtype, root: int, offset: int, give_sizes: bool) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    xs = [values(shape, dtype, r) for r, shape in enumerate(shapes)]
    mine = xs[rank].clone()
    if mine.is_floating_point():
        mine.requires_grad_()
    sizes = [x.shape[dim] for x in xs]
    known = sizes if give_sizes else None
    whole = torch.cat(xs, dim)
    assert torch.equal(all_gather(mine, dim, sizes=known), whole)
    got = gather(mine, dim, sizes=known, root=root)
    assert torch.equal(got, whole if rank == root else whole.narrow(dim, 0, 0))
    assert torch.equal(
        scatter(whole if rank == root else None, dim, root=root, sizes=sizes if rank == root else None), xs[rank]
    )
    if dim % mine.ndim == 0:
        assert torch.equal(shift(mine, offset, sizes=known), xs[(rank - offset) % size])
    if mine.is_floating_point():
        y = all_gather(mine, dim, sizes=known)
        (y * (rank + 1)).sum().backward()
        assert torch.equal(mine.grad, torch.full_like(mine, size * (size + 1) / 2))


@relaxed
@given(case=ragged())
def test_gathers_of_anything(case):
    run_ranks(gathers, *case.values(), world_size=len(case["shapes"]))


@st.composite
def matrix(draw: Any) -> dict[str, Any]:
    size = draw(WORLD)
    row = st.lists(st.integers(0, 4), min_size=size, max_size=size)
    return {
        "sends": draw(st.lists(row, min_size=size, max_size=size)),
        "known": draw(st.booleans()),
        "width": draw(st.integers(0, 3)),
    }


def exchanges(sends: list[list[int]], known: bool, width: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    blocks = [
        [torch.full((n, width), 10.0 * a + b, dtype=torch.float64) for b, n in enumerate(row)] for a, row in enumerate(sends)
    ]
    x = torch.cat(blocks[rank]).requires_grad_()
    receive = [sends[source][rank] for source in range(size)]
    y = all_to_all_single(x, send_sizes=sends[rank], receive_sizes=receive if known else None)
    assert torch.equal(y, torch.cat([blocks[source][rank] for source in range(size)]))
    (y * (rank + 1)).sum().backward()
    target = torch.arange(1.0, size + 1, dtype=torch.float64).repeat_interleave(torch.tensor(sends[rank]))
    assert torch.equal(x.grad, target[:, None].expand_as(x))


@relaxed
@given(case=matrix())
def test_exchanges_of_any_splits(case):
    run_ranks(exchanges, *case.values(), world_size=len(case["sends"]))


@st.composite
def shares(draw: Any) -> dict[str, Any]:
    size = draw(WORLD)
    lengths = draw(st.lists(st.integers(0, 4), min_size=size, max_size=size))
    return {
        "sizes": lengths,
        "op": draw(st.sampled_from(["sum", "avg", "max", "min", "product"])),
        "dim": draw(st.sampled_from([0, 1, -1])),
    }


def reductions(sizes: list[int], op: str, dim: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    shape = (sum(sizes), 3) if dim == 0 else (3, sum(sizes))
    xs = [values(shape, torch.float64, r) - 4 for r in range(size)]  # many ties, many zeros
    whole = [x.clone().requires_grad_() for x in xs]
    stacked = torch.stack(whole)
    reduced = {"sum": stacked.sum, "avg": stacked.mean, "max": stacked.amax, "min": stacked.amin, "product": stacked.prod}[op](
        0
    )
    parts = reduced.split(sizes, dim)
    sum((r + 1) * (part**2).sum() for r, part in enumerate(parts)).backward()
    mine = xs[rank].clone().requires_grad_()
    y = reduce_scatter(mine, dim, sizes=sizes, op=op)
    torch.testing.assert_close(y, parts[rank])
    ((rank + 1) * (y**2).sum()).backward()
    torch.testing.assert_close(mine.grad, whole[rank].grad)


@relaxed
@given(case=shares())
def test_reductions_of_any_shares(case):
    run_ranks(reductions, *case.values(), world_size=len(case["sizes"]))

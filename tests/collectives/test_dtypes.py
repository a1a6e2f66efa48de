"""Every dtype can be moved, and reduced where torch can add it, whatever the strides, conjugation or length."""

import pytest
import torch
import torch.distributed as dist

from unisono.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    all_to_all_single,
    average_gradient,
    broadcast,
    gather,
    global_mean,
    reduce,
    reduce_scatter,
    scatter,
    shift,
)
from unisono.collectives.testing import run_ranks

FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
WHOLE = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64, torch.bool]
REAL = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
REDUCED = [*REAL, *COMPLEX, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool]


def values(rank: int, dtype: torch.dtype, rows: int) -> torch.Tensor:
    x = torch.arange(rows * 3, dtype=torch.float32).view(rows, 3).remainder(5) + rank
    if dtype is torch.bool:
        return x.remainder(2) == 0
    return (x + 1j * x.flip(0)).to(dtype) if dtype.is_complex else x.to(dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    bits = [t.resolve_conj().contiguous().view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)


def moves(dtype: torch.dtype) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    xs = [values(r, dtype, 2 + r) for r in range(size)]
    mine, whole = xs[rank], torch.cat([x.view(torch.uint8) for x in xs]).view(dtype)
    assert same_bits(all_gather(mine), whole)
    assert same_bits(all_gather({"a": mine, "b": mine.T.contiguous().T})["b"], whole)
    assert same_bits(gather(mine, root=1), whole if rank == 1 else whole[:0])
    assert same_bits(broadcast(xs[rank][:2], root=1), xs[1][:2])
    assert same_bits(shift(mine), xs[rank - 1])
    assert same_bits(scatter(whole if rank == 0 else None, sizes=[2 + r for r in range(size)] if rank == 0 else None), mine)
    parts = [xs[r][:1] for r in range(size)]
    assert all(same_bits(y, xs[rank][:1]) for y in all_to_all(parts))
    mixed = all_to_all_single(torch.cat([p.view(torch.uint8) for p in parts]).view(dtype), send_sizes=[1] * size)
    assert same_bits(mixed, torch.cat([xs[rank][:1].view(torch.uint8)] * size).view(dtype))


@pytest.mark.parametrize("dtype", [*FLOAT8, *WHOLE, *REAL, *COMPLEX], ids=str)
def test_every_dtype_moves_bit_by_bit(dtype):
    run_ranks(moves, dtype, world_size=3)


def reduces(dtype: torch.dtype) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    stacked = torch.stack([values(r, dtype, 4) for r in range(size)])
    expected = {"sum": stacked.sum(0, dtype=dtype), "product": stacked.prod(0, dtype=dtype)}
    if not dtype.is_complex:
        expected |= {"max": stacked.amax(0), "min": stacked.amin(0)}
    if dtype.is_floating_point or dtype.is_complex:
        expected["avg"] = stacked.sum(0) / size
    for op, want in expected.items():
        assert torch.equal(all_reduce(stacked[rank], op), want), op
        assert torch.equal(reduce(stacked[rank], op, root=1), want if rank == 1 else torch.zeros_like(want)), op
        assert torch.equal(reduce_scatter(stacked[rank], op=op, sizes=[0, 3, 1]), want.split([0, 3, 1])[rank]), op


@pytest.mark.parametrize("dtype", REDUCED, ids=str)
def test_every_reducible_dtype_reduces(dtype):
    run_ranks(reduces, dtype, world_size=3)


def unsigned_sums() -> None:
    for dtype in (torch.int16, torch.uint16, torch.uint32, torch.uint64):
        largest = torch.iinfo(dtype).max
        x = torch.tensor([largest, 3, 0], dtype=dtype)
        for result in (all_reduce(x), reduce_scatter(x.repeat(2), sizes=[3, 3]), broadcast(reduce(x))):
            assert result.dtype == dtype and result.tolist() == [-2 if dtype is torch.int16 else largest - 1, 6, 0]


def test_sums_of_integers_that_backends_do_not_know_wrap_around():
    run_ranks(unsigned_sums, world_size=2)


def test_average_gradient_keeps_integers_as_they_are():
    assert run_ranks(average_gradient, torch.arange(2), world_size=2)[1].dtype is torch.int64


def float8_without_sums() -> None:
    """Gradients that are only moved are right; broadcast would have to add them."""
    x = torch.ones(2, requires_grad=True)
    for y in (
        all_gather(x.to(FLOAT8[0]), grad="slice"),
        shift(x.to(FLOAT8[0])),
        all_gather([x.to(FLOAT8[0])], grad="slice")[0],
    ):
        x.grad = None
        y.float().sum().backward()
        assert x.grad.tolist() == [1, 1]
    with pytest.raises(TypeError, match=r"broadcast: x: the ranks cannot add gradients in torch\.float8_e4m3fn"):
        broadcast(x.to(FLOAT8[0]))


def test_float8_has_the_gradients_that_need_no_sum():
    run_ranks(float8_without_sums, world_size=2)


def nan_is_kept() -> None:
    x = torch.tensor([1.0, float("nan") if dist.get_rank() == 0 else 2.0, float("inf")])
    for op in ("max", "min"):
        y = all_reduce(x, op)
        assert y[1].isnan() and y[2].isinf()


def test_nan_in_max_is_kept_as_torch_does():
    run_ranks(nan_is_kept, world_size=3)


def half_precision_means() -> None:
    x = torch.full((2,), 40000.0, dtype=torch.float16)
    assert all_reduce(x, "avg").tolist() == reduce_scatter(x.repeat(2), op="avg", sizes=[2, 2]).tolist() == [40000.0] * 2
    assert global_mean(x, weights=torch.full((2,), 4.0, dtype=torch.float16)).item() == 40000


def test_mean_of_half_precision_does_not_overflow():
    run_ranks(half_precision_means, world_size=2)


@pytest.mark.parametrize(
    ("x", "op", "message"),
    [
        (torch.zeros(2, dtype=torch.int64), "avg", "op='avg' needs a floating point or complex tensor, got torch.int64"),
        (torch.zeros(2, dtype=torch.complex64), "max", "op='max' needs an ordered dtype"),
        (torch.zeros(2).to(torch.float8_e4m3fn), "sum", "can be moved but not reduced"),
    ],
)
def test_what_cannot_be_reduced_is_refused(x, op, message):
    for function in (all_reduce, reduce, reduce_scatter):
        with pytest.raises(TypeError, match=message):
            function(x, op=op)


def strides_do_not_matter() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    base = torch.arange(24.0).view(4, 6)
    forms = {
        "transposed": lambda k: (base + k).T,
        "every other": lambda k: (base + k)[::2, ::3],
        "expanded": lambda k: torch.tensor([float(k)]).expand(4, 3),
        "flipped and conjugated": lambda k: torch.complex(base + k, base).conj(),
        "negated": lambda k: torch.complex(base + k, base).conj().imag,
        "channels last": lambda k: torch.full((2, 3, 4, 5), float(k)).to(memory_format=torch.channels_last),
    }
    for name, make in forms.items():
        xs = [make(k).clone(memory_format=torch.contiguous_format) for k in range(size)]
        mine = make(rank)
        assert torch.equal(all_gather(mine), torch.cat(xs)), name
        assert torch.equal(all_gather(mine, dim=-1), torch.cat(xs, -1)), name
        assert torch.equal(all_reduce(mine), torch.stack(xs).sum(0)), name
        assert torch.equal(broadcast(mine, root=-1), xs[-1]), name
        assert torch.equal(scatter(mine if rank == 0 else None, dim=1), xs[0].tensor_split(size, 1)[rank]), name
        assert torch.equal(shift(mine), xs[rank - 1]), name
        assert torch.equal(reduce_scatter(mine), torch.stack(xs).sum(0).tensor_split(size)[rank]), name
        assert all_gather(mine, dim=1).is_contiguous(), name


def test_strides_do_not_matter():
    run_ranks(strides_do_not_matter, world_size=3)


def nothing_anywhere() -> None:
    for shape in ((0,), (0, 3), (3, 0)):
        x = torch.zeros(shape, requires_grad=True)
        for op in (all_gather, gather, shift, all_reduce, reduce, broadcast, reduce_scatter, all_to_all_single):
            y = op(x)
            assert y.numel() == 0
            y.sum().backward()
    assert [y.shape for y in all_to_all([torch.zeros(0, r) for r in range(3)])] == [(0, dist.get_rank())] * 3
    assert all_gather({"a": torch.zeros(0, 2)})["a"].shape == (0, 2)
    assert all_gather({}) == {} and all_gather([None]) == [None]


def test_empty_tensors_everywhere():
    run_ranks(nothing_anywhere, world_size=3)


def sums_in_another_dtype() -> None:
    """1 and many values below its last bit: in 16 bits they vanish one by one, in float32 their sum stays."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.full((4,), 1.0 if rank == 0 else 2.0**-9, dtype=torch.bfloat16)
    exact = torch.full((4,), 1 + (size - 1) * 2.0**-9).bfloat16()
    for op, want in (("sum", exact), ("avg", (exact.float() / size).bfloat16())):
        got = all_reduce(x, op, reduce_dtype=torch.float32)
        assert got.dtype is torch.bfloat16 and torch.equal(got, want)
        assert torch.equal(
            reduce_scatter(x, op=op, reduce_dtype=torch.float32, sizes=[4, *[0] * (size - 1)]), want[: 4 * (rank == 0)]
        )
        assert torch.equal(reduce(x, op, reduce_dtype=torch.float32), want if rank == 0 else torch.zeros_like(want))
    got = all_reduce({"x": x, "y": x + 1}, reduce_dtype=torch.float32)
    assert torch.equal(got["x"], exact)
    y = torch.zeros(2, dtype=torch.bfloat16, requires_grad=True)
    for gathered in (all_gather(y, reduce_dtype=torch.float32), all_gather([y, y], reduce_dtype=torch.float64)[1]):
        (g,) = torch.autograd.grad(gathered, y, x[0].expand_as(gathered))
        assert torch.equal(g, exact[:2])
    for call, message in (
        (
            lambda: all_reduce(x, "max", reduce_dtype=torch.float32),
            "reduce_dtype=torch.float32 goes with op='sum' and op='avg'",
        ),
        (lambda: all_reduce(x, reduce_dtype="float32"), "must be a floating point dtype"),
        (lambda: all_gather(torch.arange(3), reduce_dtype=torch.float32), "needs a floating point tensor, got torch.int64"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            call()


def test_reduce_dtype_is_the_dtype_of_the_sums():
    run_ranks(sums_in_another_dtype, world_size=4)

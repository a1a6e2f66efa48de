"""reduce_dtype: in which dtype the ranks add, forward and backward. The result keeps the dtype of the input."""

import pytest
import torch
import torch.distributed as dist

from unisono.collectives.autograd import LinearMap, apply
from unisono.collectives.checks import validate_reduce_dtype
from unisono.collectives.groups import process_group, resolve_group
from unisono.collectives.testing import run_ranks
from unisono.collectives.wire import reduce, start_reduce_scatter, start_sum

TINY = 2.0**-9  # 1 + TINY is 1 in bfloat16, so adding in bfloat16 loses what other ranks hold


# In bfloat16 each order of adding them rounds to another number than their sum does.
SUMMANDS, ROUNDED_SUM = (0.154296875, 0.9921875, 0.2080078125), 1.3515625


def sums(reduce_dtype: torch.dtype | None) -> list[list[float]]:
    pg = process_group(resolve_group(None))
    x = torch.tensor([SUMMANDS[dist.get_rank()]], dtype=torch.bfloat16)
    results = [
        start_sum(x, pg, reduce_dtype).result(),
        start_reduce_scatter(x.repeat(3), pg, [1, 1, 1], reduce_dtype).result(),
    ]
    on_root = reduce(x, pg, 0, reduce_dtype)
    assert all(y.dtype is torch.bfloat16 for y in (*results, on_root))
    return [y.tolist() for y in (*results, on_root)]


def test_16_bit_values_are_added_in_reduce_dtype():
    exact = [ROUNDED_SUM]
    first, *others = run_ranks(sums, torch.float32, world_size=3)
    assert first == [exact, exact, exact] and others == [[exact, exact, [0.0]]] * 2
    assert run_ranks(sums, torch.float64, world_size=3)[0] == [exact, exact, exact]
    narrow = run_ranks(sums, torch.bfloat16, world_size=3)[0]
    assert narrow[0] != exact and narrow[2] != exact, "otherwise this test could not fail"


def narrow_sums() -> list[float]:
    """float32 that is added in bfloat16 travels in half the bytes, and is rounded."""
    pg = process_group(resolve_group(None))
    x = torch.tensor([1 + TINY, 3.0])
    both = start_sum(x, pg, torch.bfloat16), start_reduce_scatter(x, pg, [1, 1], torch.bfloat16)
    return [started.result()[0].item() for started in both]


def test_a_narrower_reduce_dtype_rounds_what_is_sent():
    assert run_ranks(narrow_sums, world_size=2) == [[2.0, 2.0], [2.0, 6.0]]


def gradients_of_gather() -> float:
    """The backward of all_gather, and the backward of that, add in the same dtype."""
    ranks = resolve_group(None)
    x = torch.ones(1, dtype=torch.bfloat16, requires_grad=True)
    sizes = (1,) * ranks.size
    plan = LinearMap("all_gather", ranks, send=(1,), receive=sizes, reduce_dtype=torch.float64)
    assert plan.adjoint().reduce_dtype is plan.adjoint().adjoint().reduce_dtype is torch.float64
    weight = 1.0 if ranks.rank == 0 else TINY
    apply(x, plan).backward(torch.full((ranks.size,), weight, dtype=torch.bfloat16))
    return x.grad.item()


def test_gradients_of_all_gather_are_added_in_reduce_dtype():
    assert run_ranks(gradients_of_gather, world_size=5) == [1 + 4 * TINY] * 5


def unsigned_on_gloo() -> list[int]:
    pg = process_group(resolve_group(None))
    return start_reduce_scatter(torch.tensor([65535, 3], dtype=torch.uint16), pg, [1, 1]).result().tolist()


def test_small_integers_are_added_in_a_wider_dtype():
    assert run_ranks(unsigned_on_gloo, world_size=2) == [[65534], [6]]


@pytest.mark.parametrize("bad", ["float32", torch.int64, torch.float8_e4m3fn, torch.complex64])
def test_reduce_dtype_must_be_a_float(bad):
    with pytest.raises(TypeError, match=r"all_reduce: reduce_dtype=.* must be a floating point dtype of at least 16 bits"):
        validate_reduce_dtype("all_reduce", bad, torch.zeros(1))
    with pytest.raises(TypeError, match=r"reduce: reduce_dtype=torch.float32 needs a floating point tensor, got torch.int64"):
        validate_reduce_dtype("reduce", torch.float32, torch.zeros(1, dtype=torch.int64))

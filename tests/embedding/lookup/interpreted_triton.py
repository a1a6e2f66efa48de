"""Tests of the Triton kernels on CPU tensors. test_triton_rows.py runs them in a process that has Triton's interpreter."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import pytest
import torch

from tests.collectives.triton_interpreter import like_a_gpu
from tests.embedding.lookup.test_compiled import DECAYED, fields, train, without_library
from tests.embedding.test_collection import matches
from tests.embedding.test_optimizers import compare_fused
from unisono.embedding import SGD, Adagrad, Adam, EmbeddingCollection, Layout, RowwiseAdagrad, Table
from unisono.embedding.lookup import triton_choice, triton_kernels, triton_rows
from unisono.embedding.lookup.compiled import Step
from unisono.embedding.lookup.kernels import Deduplicated, RowGradients, deduplicate, sum_bags, sum_duplicates
from unisono.embedding.lookup.triton_choice import largest_difference

TOLERANCES = {torch.float32: 2e-6, torch.float64: 1e-14, torch.bfloat16: 2**-8, torch.float16: 2**-11}


@contextmanager
def on_triton(*, small: bool = True) -> Iterator[None]:
    """Triton computes on CPU tensors; if `small`, with few columns and positions at a time, so that small cases have more."""
    sizes = {"_PROGRAMS": 5, "_CHUNK": 8, "_NO_CHUNKS": 16, "_WIDEST": 32, "_UNIQUE_BLOCK": 16, "_UNIQUE_COUNTS": 4}
    with ExitStack() as stack:
        for name, size in sizes.items() if small else ():
            stack.enter_context(mock.patch.object(triton_rows, name, size))
        stack.enter_context(mock.patch.object(triton_choice, "_DEVICE_TYPES", ("cpu",)))
        stack.enter_context(mock.patch.object(triton_choice, "_agrees", return_value=True))
        stack.enter_context(triton_rows._place_unique_op.set_kernel_enabled("cpu", enabled=False))
        stack.enter_context(without_library())
        stack.enter_context(like_a_gpu())
        yield


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("n", "limit"), [(0, 1), (1, 1), (16, 1), (48, 3), (129, 1000), (500, 60), (33, 2**31 - 1)])
def test_deduplicate_equals_torch(dtype, n, limit):
    numbers = torch.randint(limit, (n,), dtype=dtype)
    with without_library():
        expected = deduplicate(numbers)
    with on_triton():
        padded = deduplicate(numbers, may_pad=True)
        found = deduplicate(numbers)
    assert found.unique_count is None
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(fields(found), fields(expected), strict=True))
    assert torch.equal(padded.inverse, expected.inverse)
    if n:
        last = expected.unique.numel()
        assert padded.unique.shape == padded.counts.shape == (n,) and int(padded.unique_count) == last
        assert (padded.unique[last:] == expected.unique[-1]).all() and not padded.counts[last:].any()


def draw_bags(index_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Bags of up to four rows, some of them empty, and two long ones: one within chunks, one that fills them to the end."""
    lengths = torch.randint(5, (30,))
    lengths[[0, -2]] = 0
    lengths[7] = 45
    lengths[-1] = 64 + -int(lengths[:-1].sum()) % 8
    return torch.randint(50, (int(lengths.sum()),), dtype=index_dtype), lengths.cumsum(0) - lengths


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("index_dtype", "width"), [(torch.int32, 1), (torch.int64, 5), (torch.int32, 16), (torch.int64, 41)])
def test_sum_bags_equals_torch(dtype, index_dtype, width):
    torch.manual_seed(0)
    rows = torch.randn(50, width).to(dtype)
    index, starts = draw_bags(index_dtype)
    for weights in (None, torch.rand(len(index)).to(dtype)):
        expected = torch.embedding_bag(
            rows.double(), index, starts.to(index_dtype), per_sample_weights=None if weights is None else weights.double()
        )[0]
        with on_triton(), mock.patch.object(triton_rows, "_sum_bags_op", wraps=triton_rows._sum_bags_op) as op:
            found = sum_bags(rows, index, starts, weights)
            assert op.call_args.args[5].shape == (len(index) // 16, width)  # long bags are cut
            assert torch.equal(found, sum_bags(rows, index, starts.to(index_dtype), weights))  # the same bits
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), expected, rtol=TOLERANCES[dtype], atol=20 * TOLERANCES[dtype])


def test_bags_that_end_anywhere_in_a_chunk():
    rows, index = torch.arange(64.0)[:, None], torch.arange(64)
    with on_triton():
        for end in range(23, 34):  # a chunk has 8 positions
            found = sum_bags(rows, index, torch.tensor([0, end]))
            assert torch.equal(found, torch.stack([rows[:end].sum(0), rows[end:].sum(0)])), end


def test_sums_of_nothing():
    index, starts = torch.empty(0, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    with on_triton():
        assert torch.equal(sum_bags(torch.ones(4, 2), index, starts), torch.zeros(3, 2))
        assert torch.equal(sum_bags(torch.ones(4, 2), torch.tensor([1]), starts), torch.tensor([[0.0, 0], [0, 0], [1, 1]]))
        assert sum_bags(torch.ones(4, 0), torch.tensor([1]), starts).shape == (3, 0)
        assert sum_bags(torch.ones(4, 2), index, index).shape == (0, 2)


def test_sum_duplicates_equals_torch():
    torch.manual_seed(0)
    numbers, grads, weights = torch.randint(12, (150,)), torch.randn(40, 20), torch.randn(150)
    numbers[20:120] = 5
    for bags, own_weights in ((torch.randint(40, (150,)), weights), (None, None)):
        given = grads if bags is not None else grads[torch.arange(150) % 40]
        with without_library():
            expected = sum_duplicates(given, bags, deduplicate(numbers), own_weights)
        with on_triton():
            found = sum_duplicates(given, bags, deduplicate(numbers, may_pad=True), own_weights)
        torch.testing.assert_close(found[: len(expected)], expected, rtol=1e-5, atol=1e-5)
        assert not found[len(expected) :].any()


def train_by_triton(rule, dtype, plan="row") -> dict[str, torch.Tensor]:
    with on_triton(), mock.patch.object(triton_rows, "update", wraps=triton_rows.update) as update:
        found = train(rule, dtype, plan)
        assert update.call_count or plan == "replicated"
    return found


def assert_same_training(rule, dtype, plan="row") -> None:
    found, expected = train_by_triton(rule, dtype, plan), train(rule, dtype, plan)
    tolerance = {torch.float32: 2e-5, torch.float64: 1e-12}[dtype]
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize(("rule", "dtype"), [(DECAYED[1], torch.float64), (Adam(lr=0.1), torch.float32)], ids=str)
def test_training_equals_that_of_compiled_kernels(rule, dtype):
    """Tables with all options, one of them frozen for a while. Without a compiler: torch's operations."""
    assert_same_training(rule, dtype)


def update_of(dtype: torch.dtype, rule, *, n: int, squares: torch.Tensor | None = None, by_torch: bool = False):
    """Weight and states after a step with weights, divisors and a factor, in which one row has most of the positions."""
    torch.manual_seed(0)
    weight, grads, weights = (torch.randn(*shape).to(dtype) for shape in ((30, 40), (50, 40), (n,)))
    numbers, bags = torch.randint(30, (n,)), torch.randint(50, (n,))
    numbers[n // 10 :] = 17
    wide = torch.float64 if by_torch else dtype
    weight, grads, weights = weight.to(wide), grads.to(wide), weights.to(wide)
    state = rule.states(weight)
    with without_library():
        dedup = deduplicate(numbers)
    divisors = dedup.counts
    if by_torch:
        gradients = RowGradients(dedup.unique, grads, dedup, bags, weights, divisors, 0.3)
        ((_, sums),) = gradients.blocks()
        sums += rule.weight_decay * weight[dedup.unique]
        means = sums.square().mean(1) if squares is None else squares[: len(sums)] / 60
        weight.index_add_(0, dedup.unique, rule.step(dedup.unique, sums, state | {"step": torch.tensor(1)}, rule.lr, means))
    else:
        betas = getattr(rule, "betas", (0.0, 0.0))
        rate = rule.rate(rule.lr, 1) if isinstance(rule, Adam) else rule.lr
        number = [SGD, RowwiseAdagrad, Adagrad, Adam].index(type(rule))
        step = Step(number, rate, rule.weight_decay, getattr(rule, "eps", 0.0), betas, 40 if squares is None else 60)
        dedup = deduplicate(numbers, may_pad=True)
        divisors = torch.nn.functional.pad(divisors, (0, n - len(divisors)), value=1)
        gradients = RowGradients(dedup.unique, grads, dedup, bags, weights, divisors, 0.3)
        assert gradients.update(step, weight, list(state.values()), slice(0, n), squares)
    return [weight, *state.values()]


@pytest.mark.parametrize("rule", [SGD(lr=0.1), RowwiseAdagrad(lr=0.1), *DECAYED[1:]], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_update_with_a_row_that_is_hit_often(dtype, rule):
    """A row of 16 bits is rounded once, after its step: it is the nearest to that of a step in float64."""
    with on_triton():
        found, again = (update_of(dtype, rule, n=200) for _ in range(2))
        assert all(map(torch.equal, found, again))  # the same bits
    weight, *states = found
    assert weight.dtype == dtype and all(x.dtype == torch.promote_types(dtype, torch.float32) for x in states)
    true_weight, *true_states = update_of(dtype, rule, n=200, by_torch=True)
    accuracy = TOLERANCES[torch.float64 if dtype == torch.float64 else torch.float32]
    torch.testing.assert_close(weight.double(), true_weight, rtol=1.01 * TOLERANCES[dtype], atol=10 * accuracy)
    torch.testing.assert_close([x.double() for x in states], true_states, rtol=4 * accuracy, atol=20 * accuracy)


def test_update_with_given_square_sums():
    squares = torch.rand(30) + 1
    rule = RowwiseAdagrad(lr=0.1)
    with on_triton():
        found = update_of(torch.float32, rule, n=60, squares=squares)
    for a, b in zip(found, update_of(torch.float32, rule, n=60, squares=squares.double(), by_torch=True), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


def test_update_of_a_part():
    """Rows outside of the part do not change, nor do those of the padding."""
    dedup = Deduplicated(*(torch.tensor(x) for x in ([1, 4, 6, 6], [0, 1, 2, 3], [0, 2, 3, 4])), unique_count=torch.tensor([3]))
    weight = torch.zeros(8, 2, dtype=torch.float64)
    with on_triton():
        gradients = RowGradients(dedup.unique, torch.ones(4, 2, dtype=torch.float64), dedup)
        assert gradients.update(Step(0, 0.1), weight, [], slice(1, 4))
    assert torch.equal(weight[:, 0].nonzero()[:, 0], torch.tensor([4, 6]))


def of_columns_and_copies() -> None:
    column = {name: Layout.column() for name in ("plain", "mean", "rows", "max", "frequent", "frozen")}
    for plan in ("replicated", column):
        assert_same_training(RowwiseAdagrad(lr=0.1, weight_decay=0.2), torch.float64, plan)


def test_training_of_columns_and_copies(ranks):
    ranks(of_columns_and_copies, world_size=2, timeout=300)


def law(plans: list, rules: list[str], size: int) -> None:
    with on_triton(), mock.patch.object(triton_rows, "update", wraps=triton_rows.update) as update:
        matches(plans, False)
        assert update.call_count
        for rule in rules:
            compare_fused(rule, size)


@pytest.mark.parametrize("size", [2, 3])
def test_collections_match_one_process(size, ranks):
    ranks(law, ["row", "table"], ["RowwiseAdagrad"] if size == 3 else ["Adam"], size, world_size=size, timeout=300)


def test_autograd_notices_a_step():
    with on_triton():
        collection = EmbeddingCollection([Table("t", 10, 4)], optimizer=SGD(lr=0.1), plan="row")
        penalty = collection.weight("t").square().sum()
        collection({"t": torch.tensor([1, 2])})["t"].sum().backward()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            penalty.backward()


@pytest.mark.parametrize("sparse", [False, True])
def test_gradients_of_parameters_have_no_padding(sparse):
    ids = torch.tensor([[1, 2], [2, 2], [7, 1]])
    found = []
    for kernels in (on_triton, without_library):
        with kernels():
            collection = EmbeddingCollection([Table("t", 10, 4)], plan="row", sparse=sparse, dtype=torch.float64)
            (collection({"t": ids})["t"] * torch.arange(1.0, 4.0)[:, None]).sum().backward()
            found.append(collection.weight("t").grad)
    if sparse:
        assert found[0]._indices().tolist() == [[1, 2, 7]]
    torch.testing.assert_close(*(x.to_dense() for x in found))


def test_the_comparison_of_the_first_use():
    """It accepts these kernels as a GPU runs them, and rejects kernels that are a little off."""
    device = torch.device("cpu")
    with on_triton(small=False):
        assert largest_difference(device, torch.bfloat16, None) == ""
        for rule in range(4):
            assert largest_difference(device, torch.float64, rule) == ""

        def off(step, weight, *args, **kwargs):
            update(step, weight, *args, **kwargs)
            weight[60] *= 1.001

        update = triton_rows.update
        with mock.patch.object(triton_rows, "update", off):
            assert "a weight differs" in largest_difference(device, torch.float32, triton_kernels.ADAM)


def test_the_ops_say_what_they_change():
    rows, index, starts = torch.randn(5, 4), torch.tensor([1, 2, 2]), torch.tensor([0, 1])
    with on_triton():
        torch.library.opcheck(
            triton_rows._sum_bags_op,
            (rows, index, None, starts, None, torch.empty(0, 4), torch.empty(2, 4)),
            test_utils=("test_schema", "test_faketensor"),
        )

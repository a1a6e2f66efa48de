"""The top items and the metrics of rankings are those of plain loops, on any split and with any tile."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.recommender.metrics.metric_cases import (
    fuzz,
    own,
    plain_ranking,
    same,
    splits_of,
)
from unisono.collectives import checked
from unisono.collectives.testing import run_ranks
from unisono.embedding import Ragged
from unisono_models.recommender.metrics.ranking import ranking_metrics, top_items


class Largest(TorchFunctionMode):
    """The size of the largest tensor that any function of torch returned."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        parts = result if isinstance(result, tuple) else (result,)
        self.numel = max(self.numel, *(x.numel() if isinstance(x, Tensor) else 0 for x in parts))
        return result


def plain_top(users: Tensor, items: Tensor, k: int, seen: list[list[int]]) -> tuple[list[list[float]], list[list[int]]]:
    """Sort all items of each user. For numbers whose dot products are exact."""
    scores, indices = [], []
    for user, out in zip(users.double(), seen, strict=True):
        all_scores = (items.double() @ user).tolist()
        best = sorted((j for j in range(len(items)) if j not in out), key=lambda j: (-all_scores[j], j))[:k]
        scores.append([all_scores[j] for j in best] + [-math.inf] * (k - len(best)))
        indices.append(best + [-1] * (k - len(best)))
    return scores, indices


@st.composite
def tables(draw: Any) -> dict[str, Any]:
    users, items, width = draw(st.integers(0, 6)), draw(st.integers(0, 12)), draw(st.integers(1, 3))
    vectors = st.lists(st.integers(-2, 2), min_size=width, max_size=width)  # most scores are shared
    item = st.integers(0, items - 1) if items else st.nothing()
    return {
        "users": torch.tensor(draw(st.lists(vectors, min_size=users, max_size=users))).reshape(users, width),
        "items": torch.tensor(draw(st.lists(vectors, min_size=items, max_size=items))).reshape(items, width),
        "seen": draw(st.lists(st.lists(item, max_size=items), min_size=users, max_size=users)),
        "k": draw(st.integers(1, 14)),
        "tile": (draw(st.integers(1, 7)), draw(st.integers(1, 13))),
        "dtype": draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16])),
    }


@settings(fuzz, max_examples=150)
@given(tables())
def test_top_items_match_sorting(case):
    users, items = case["users"].to(case["dtype"]), case["items"].to(case["dtype"])
    scores, indices = top_items(users, items, k=case["k"], seen=Ragged.from_lists(case["seen"]), tile=case["tile"])
    expected = plain_top(users, items, case["k"], case["seen"])
    assert (scores.tolist(), indices.tolist()) == expected
    assert scores.dtype == torch.promote_types(case["dtype"], torch.float32) and indices.dtype == torch.int64
    if not any(case["seen"]):
        assert torch.equal(top_items(users, items, k=case["k"])[1], indices)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_top_items_of_any_tile_are_the_same_bits(dtype):
    """Every vector is there many times, and a matmul rounds its product by where in the tile it is."""
    generator = torch.Generator().manual_seed(1)
    users = torch.randn(37, 67, generator=generator, dtype=dtype)
    items = torch.randn(20, 67, generator=generator, dtype=dtype).repeat(15, 1)
    scores, indices = top_items(users, items, k=50)
    exact = users.double() @ items[:20].double().T
    assert torch.equal(indices[:, :15] % 20, exact.argmax(1, keepdim=True).expand(-1, 15))
    assert (indices[:, :15].diff() == 20).all() and (indices[:, 15:30].diff() == 20).all()  # ties: the lower index first
    torch.testing.assert_close(scores[:, 0].double(), exact.amax(1), rtol=torch.finfo(dtype).eps * 8, atol=0)
    for tile in ((1, 300), (5, 7), (37, 1), (16, 64)):
        other = top_items(users, items, k=50, tile=tile)
        assert torch.equal(other[0], scores) and torch.equal(other[1], indices), tile
    alike = top_items(users, items[:1].repeat(100, 1), k=3, tile=(8, 9))[1]
    assert alike.tolist() == [[0, 1, 2]] * 37


def test_top_items_of_sums_that_cancel():
    """A matmul in float32 is wrong by more than the scores differ."""
    generator = torch.Generator().manual_seed(2)
    users, items = (torch.randn(n, 40, generator=generator) for n in (20, 1000))
    large = 1e6 * torch.randn(1000, 32, generator=generator)
    expected = (users[:, 32:].double() @ items[:, 32:].double().T).topk(3).indices
    users, items = torch.cat([users, users[:, :32]], 1), torch.cat([large, items[:, 32:], -large], 1)
    assert not torch.equal((users @ items.T).topk(3).indices, expected)
    for tile in ((20, 1000), (1, 200)):
        assert torch.equal(top_items(users, items, k=3, tile=tile)[1], expected)
    torch.set_float32_matmul_precision("medium")
    try:
        assert torch.equal(top_items(users, items, k=3)[1], expected)
        torch.backends.mkldnn.matmul.fp32_precision = "tf32"  # now torch.get_float32_matmul_precision() raises
        assert torch.equal(top_items(users, items, k=3)[1], expected)
    finally:
        torch.set_float32_matmul_precision("highest")


def test_top_items_hold_one_tile_of_scores():
    generator = torch.Generator().manual_seed(3)
    users, items = torch.randn(100, 4, generator=generator), torch.randn(1000, 4, generator=generator)
    best = top_items(users, items, k=8)[1]
    seen = Ragged.from_dense(best[:, ::2].contiguous())
    for table in (items, torch.ones_like(items)):  # all alike: every item of a tile is looked at twice
        with Largest() as largest:
            indices = top_items(users, table, k=4, seen=seen, tile=(32, 128))[1]
        assert largest.numel <= 32 * (128 + 4), largest.numel
        assert table is not items or torch.equal(indices, best[:, 1::2])


def ranking_of(sizes: list[int], rows: list[tuple[list[int], list[int]]], ks: tuple[int, ...]) -> dict[str, float]:
    mine = own(sizes, rows)
    lists = torch.tensor([found for found, _ in mine], dtype=torch.int64).reshape(len(mine), 3)
    with checked():
        return ranking_metrics(lists, Ragged.from_lists([right for _, right in mine]), ks=ks)


@fuzz
@given(
    splits_of(
        st.tuples(
            st.lists(st.integers(0, 9), min_size=3, max_size=3, unique=True) | st.permutations([-1, 3, 4]),
            st.lists(st.integers(0, 9), max_size=6),
        )
    )
)
def test_ranking_metrics_of_random_lists_match_plain_loops(case):
    sizes, rows = case
    expected = plain_ranking([found for found, _ in rows], [right for _, right in rows], (1, 2, 3))
    one = run_ranks(ranking_of, [len(rows)], rows[::-1], (1, 2, 3), world_size=1)[0]
    for found in run_ranks(ranking_of, sizes, rows, (1, 2, 3), world_size=len(sizes)):
        assert found == pytest.approx(expected, rel=1e-13, nan_ok=True) and list(found) == list(expected)
        assert all(map(same, found.values(), one.values()))  # the same bits, in any order too


def test_perfect_lists_have_exactly_one():
    lists = torch.arange(100).repeat(50, 1)
    found = ranking_metrics(lists, Ragged.from_lists([list(range(1 + n * 2)) for n in range(50)]), ks=(10, 100))
    assert found["ndcg@10"] == found["ndcg@100"] == found["recall@100"] == found["mrr@10"] == 1


BAGS = Ragged.from_lists([[1]])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": 0}, "k=0 must be a positive number"),
        ({"tile": (1, 0)}, r"tile=\(1, 0\) must be two positive numbers"),
        ({"items": torch.ones(4, 3)}, r"one width on one device, got \(1, 2\) on cpu and \(4, 3\) on cpu"),
        ({"items": torch.tensor([[1.0, math.nan]])}, "not finite"),
        ({"users": torch.full((1, 2), 3e38)}, "so large that their products are not"),
        (
            {"users": torch.ones(1, 2).int()},
            r"users: expected floating point vectors of shape \(users, width\), got torch.int32",
        ),
        ({"seen": Ragged.from_lists([[4]])}, "seen: 4 is not the index of an item; they go from 0 to 3"),
        ({"seen": BAGS._replace(offsets=torch.tensor([0, 2]))}, "offsets must ascend from 0 to the number of values, 1"),
        ({"seen": [[1]]}, "seen: expected a Ragged, got list"),
    ],
)
def test_top_items_reject(change, message):
    arguments = {"users": torch.ones(1, 2), "items": torch.ones(4, 2), "k": 2} | change
    with pytest.raises(ValueError, match=f"top_items: .*{message}"):
        top_items(arguments.pop("users"), arguments.pop("items"), **arguments)

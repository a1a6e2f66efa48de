"""Metrics of clicks and rankings: what plain loops over all rows give, on any number of ranks and any split."""

import math
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.overrides import TorchFunctionMode

from unisono.collectives import all_gather, checked
from unisono.collectives.testing import run_ranks
from unisono.embedding import Ragged
from unisono_models.recommender.metrics.auc import _send_to_ranges, area_under_curve, click_metrics
from unisono_models.recommender.metrics.ranking import ranking_metrics, top_items

ROWS = {1: [[40]], 2: [[13, 27], [0, 40]], 3: [[9, 0, 31], [0, 40, 0]], 4: [[0, 6, 13, 21], [0, 0, 40, 0], [10] * 4]}
fuzz = settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


def same(got: float, expected: float) -> bool:
    return got == expected or (math.isnan(got) and math.isnan(expected))


# clicks


def plain_area(scores: list[float], labels: list[int]) -> float:
    """Every pair of a click and no click."""
    clicks, others = ([s for s, y in zip(scores, labels, strict=True) if y == label] for label in (1, 0))
    twice = sum(2 * (a > b) + (a == b) for a, b in product(clicks, others))
    return twice / (2 * len(clicks) * len(others)) if clicks and others else math.nan


def rows_of(kind: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    labels = torch.rand(40, generator=generator) < 0.3
    scores = torch.randn(40, generator=generator, dtype=torch.float64) + labels
    if kind == "ties":
        scores = scores.round()  # has both zeros
    elif kind == "all ties":
        scores = torch.full_like(scores, -0.1)
    elif kind == "one class":
        labels = torch.ones_like(labels)
    elif kind == "infinite":
        scores[::3], scores[1::5] = torch.inf, -torch.inf
    return scores.to(dtype), labels


AREAS = [
    *product(["random", "ties"], [torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    *product(["all ties", "one class", "infinite"], [torch.float32]),
]


def areas(splits: list[list[int]]) -> list[float]:
    found = []
    for (kind, dtype), rows in product(AREAS, splits):
        scores, labels = (x.split(rows)[dist.get_rank()] for x in rows_of(kind, dtype))
        with checked():
            found.append(area_under_curve(scores, labels))
    return found


def test_area_matches_counting_pairs(ranks, world_size):
    splits = ROWS[world_size]
    expected = [plain_area(*(x.tolist() for x in rows_of(*case))) for case, _ in product(AREAS, splits)]
    for found in ranks(areas, splits, world_size=world_size):
        assert all(map(same, found, expected)), list(zip(found, expected, strict=True))


@st.composite
def splits_of(draw: Any, row: Any) -> tuple[list[int], list[Any]]:
    """Rows of each rank, and all rows."""
    sizes = draw(st.lists(st.integers(0, 9), min_size=1, max_size=4))
    return sizes, draw(st.lists(row, min_size=sum(sizes), max_size=sum(sizes)))


def own(sizes: list[int], rows: list[Any]) -> list[Any]:
    start = sum(sizes[: dist.get_rank()])
    return rows[start : start + sizes[dist.get_rank()]]


def area_of(sizes: list[int], rows: list[tuple[float, int]]) -> float:
    mine = own(sizes, rows)
    return area_under_curve(torch.tensor([s for s, _ in mine], dtype=torch.float64), torch.tensor([y for _, y in mine]))


@fuzz
@given(splits_of(st.tuples(st.integers(-4, 4) | st.floats(allow_nan=False), st.integers(0, 1))))
def test_area_of_anything(case):
    sizes, rows = case
    expected = plain_area([s for s, _ in rows], [y for _, y in rows])
    assert all(same(found, expected) for found in run_ranks(area_of, sizes, rows, world_size=len(sizes)))


def in_a_subgroup() -> tuple[float, dict[str, float], dict[str, float]] | None:
    group = dist.new_group([0, 1, 3])
    rank = {0: 0, 1: 1, 3: 2}.get(dist.get_rank())
    if rank is None:
        return None
    scores, labels = (x.split(ROWS[3][0])[rank] for x in rows_of("ties", torch.float32))
    lists, relevant = LISTS[rank::3], RELEVANT[rank::3]
    ranking = ranking_metrics(torch.tensor(lists), Ragged.from_lists(relevant), ks=(1, 3), group=group)
    return area_under_curve(scores, labels, group=group), click_metrics(scores, labels, group=group), ranking


def test_metrics_in_a_subgroup(ranks):
    found = ranks(in_a_subgroup, world_size=4)
    scores, labels = rows_of("ties", torch.float32)
    expected = plain_area(scores.tolist(), labels.tolist())
    assert found[2] is None
    for area, clicks, ranking in (found[0], found[1], found[3]):
        assert area == clicks["auc"] == expected and clicks == found[0][1] and clicks["rows"] == 40
        assert ranking == found[0][2] and ranking == pytest.approx(plain_ranking(LISTS, RELEVANT, (1, 3)), rel=1e-14)


def received(skewed: bool, tied: bool) -> int:
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    scores = torch.randn(20000 * (rank == 1) if skewed else 5000, generator=generator).sort().values
    scores = torch.zeros(1) if tied else scores + rank
    return len(_send_to_ranges(scores, torch.ones(len(scores), 2, dtype=torch.int64), None)[0])


def test_no_rank_holds_all_scores(ranks):
    for skewed in (False, True):
        found = ranks(received, skewed, False, world_size=4)
        assert sum(found) == 20000 and max(found) <= 5000 * (1 + 6 / 256) + 4
    assert sorted(ranks(received, False, True, world_size=4)) == [0, 0, 0, 4]


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


def plain_clicks(logits: list[float], labels: list[int]) -> dict[str, float]:
    chances = [1 / (1 + math.exp(-x)) for x in logits]
    losses = [-math.log(p if y else 1 - p) for p, y in zip(chances, labels, strict=True)]
    right = [(p > 0.5) == bool(y) for p, y in zip(chances, labels, strict=True)]
    means = {"log_loss": losses, "accuracy": right, "rate": labels, "predicted_rate": chances}
    found = {name: math.fsum(x) / len(x) for name, x in means.items()}
    return {"auc": plain_area(logits, labels), **found, "rows": float(len(labels))}


def clicks_of(splits: list[list[int]], dtype: torch.dtype) -> list[dict[str, float]]:
    whole = rows_of("random", dtype)
    return [click_metrics(*(x.split(rows)[dist.get_rank()] for x in whole)) for rows in splits]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_click_metrics_match_plain_formulas(ranks, world_size, dtype):
    logits, labels = rows_of("random", dtype)
    expected = plain_clicks(logits.tolist(), labels.int().tolist())
    results = ranks(clicks_of, ROWS[world_size], dtype, world_size=world_size)
    assert all(result == results[0] for result in results)  # the same bits
    for found in results[0]:
        assert list(found) == list(expected) and found == pytest.approx(expected, rel=1e-12)
        assert all(type(value) is float for value in found.values())
        assert found["auc"] == expected["auc"]


def test_far_logits_keep_their_digits():
    found = click_metrics(torch.tensor([-800.0, 30.0, torch.inf], dtype=torch.float64), torch.tensor([1, 1, 1]))
    assert found["log_loss"] == pytest.approx((800 + math.exp(-30)) / 3, rel=1e-15)
    right = click_metrics(torch.tensor([30.0, torch.inf, -torch.inf]), torch.tensor([1, 1, 0]))
    assert right["log_loss"] == pytest.approx(math.exp(-30) / 3, rel=1e-12)


def nothing_at_all() -> tuple[dict[str, float], dict[str, float]]:
    none = torch.empty(0)
    assert math.isnan(area_under_curve(none, none))
    lists = torch.zeros(2, 3, dtype=torch.int64)  # users without a relevant item
    return click_metrics(none, none), ranking_metrics(lists, Ragged.from_lists([[], []]), ks=(3,))


def test_nothing_is_nan(ranks, world_size):
    for clicks, ranking in ranks(nothing_at_all, world_size=world_size):
        assert clicks.pop("rows") == 0 == ranking.pop("users")
        assert len(clicks) == len(ranking) == 5 and all(map(math.isnan, [*clicks.values(), *ranking.values()]))


# rankings


def plain_top(users: Tensor, items: Tensor, k: int, seen: list[list[int]]) -> tuple[list[list[float]], list[list[int]]]:
    """Sort all items of each user. For numbers whose dot products are exact."""
    scores, places = [], []
    for user, out in zip(users.double(), seen, strict=True):
        all_scores = (items.double() @ user).tolist()
        best = sorted((j for j in range(len(items)) if j not in out), key=lambda j: (-all_scores[j], j))[:k]
        scores.append([all_scores[j] for j in best] + [-math.inf] * (k - len(best)))
        places.append(best + [-1] * (k - len(best)))
    return scores, places


@st.composite
def tables(draw: Any) -> dict[str, Any]:
    users, items, width = draw(st.integers(0, 6)), draw(st.integers(0, 12)), draw(st.integers(1, 3))
    vectors = st.lists(st.integers(-2, 2), min_size=width, max_size=width)  # most scores are shared
    place = st.integers(0, items - 1) if items else st.nothing()
    return {
        "users": torch.tensor(draw(st.lists(vectors, min_size=users, max_size=users))).reshape(users, width),
        "items": torch.tensor(draw(st.lists(vectors, min_size=items, max_size=items))).reshape(items, width),
        "seen": draw(st.lists(st.lists(place, max_size=items), min_size=users, max_size=users)),
        "k": draw(st.integers(1, 14)),
        "tile": (draw(st.integers(1, 7)), draw(st.integers(1, 13))),
        "dtype": draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16])),
    }


@settings(fuzz, max_examples=150)
@given(tables())
def test_top_items_match_sorting(case):
    users, items = case["users"].to(case["dtype"]), case["items"].to(case["dtype"])
    scores, places = top_items(users, items, k=case["k"], seen=Ragged.from_lists(case["seen"]), tile=case["tile"])
    expected = plain_top(users, items, case["k"], case["seen"])
    assert (scores.tolist(), places.tolist()) == expected
    assert scores.dtype == torch.promote_types(case["dtype"], torch.float32) and places.dtype == torch.int64
    if not any(case["seen"]):
        assert torch.equal(top_items(users, items, k=case["k"])[1], places)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_top_items_of_any_tile_are_the_same_bits(dtype):
    """Every vector is there many times, and a matmul rounds its product by where in the tile it is."""
    generator = torch.Generator().manual_seed(1)
    users = torch.randn(37, 67, generator=generator, dtype=dtype)
    items = torch.randn(20, 67, generator=generator, dtype=dtype).repeat(15, 1)
    scores, places = top_items(users, items, k=50)
    exact = users.double() @ items[:20].double().T
    assert torch.equal(places[:, :15] % 20, exact.argmax(1, keepdim=True).expand(-1, 15))
    assert (places[:, :15].diff() == 20).all() and (places[:, 15:30].diff() == 20).all()  # ties: the lower place first
    torch.testing.assert_close(scores[:, 0].double(), exact.amax(1), rtol=torch.finfo(dtype).eps * 8, atol=0)
    for tile in ((1, 300), (5, 7), (37, 1), (16, 64)):
        other = top_items(users, items, k=50, tile=tile)
        assert torch.equal(other[0], scores) and torch.equal(other[1], places), tile
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
    finally:
        torch.set_float32_matmul_precision("highest")


def test_top_items_hold_one_tile_of_scores():
    generator = torch.Generator().manual_seed(3)
    users, items = torch.randn(100, 4, generator=generator), torch.randn(1000, 4, generator=generator)
    best = top_items(users, items, k=8)[1]
    seen = Ragged.from_dense(best[:, ::2].contiguous())
    for table in (items, torch.ones_like(items)):  # all alike: every item of a tile is looked at twice
        with Largest() as largest:
            places = top_items(users, table, k=4, seen=seen, tile=(32, 128))[1]
        assert largest.numel <= 32 * (128 + 4), largest.numel
        assert table is not items or torch.equal(places, best[:, 1::2])


def plain_ranking(lists: list[list[int]], relevant: list[list[int]], ks: tuple[int, ...]) -> dict[str, float]:
    pairs = [(found, set(right)) for found, right in zip(lists, relevant, strict=True) if right]
    means: dict[str, float] = {}
    for k in ks:
        sums = dict.fromkeys(("recall", "ndcg", "hit", "precision", "mrr"), 0.0)
        for found, right in pairs:
            hits = [i for i, place in enumerate(found[:k]) if place in right]
            sums["recall"] += len(hits) / len(right)
            best = sum(1 / math.log2(i + 2) for i in range(min(k, len(right))))
            sums["ndcg"] += sum(1 / math.log2(i + 2) for i in hits) / best
            sums["hit"] += bool(hits)
            sums["precision"] += len(hits) / k
            sums["mrr"] += 1 / (hits[0] + 1) if hits else 0
        means |= {f"{name}@{k}": total / len(pairs) if pairs else math.nan for name, total in sums.items()}
    return means | {"users": float(len(pairs))}


LISTS = [[4, 2, 7], [1, 3, 5], [0, 9, -1], [-1, -1, -1], [6, 5, 4], [8, 0, 1], [2, 3, 4]]
RELEVANT = [[2, 9], [], [9, 9, 0], [1], [4, 6, 5, 1, 0], [7], [4]]


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
def test_ranking_of_anything(case):
    sizes, rows = case
    expected = plain_ranking([found for found, _ in rows], [right for _, right in rows], (1, 2, 3))
    one = run_ranks(ranking_of, [len(rows)], rows[::-1], (1, 2, 3), world_size=1)[0]
    for found in run_ranks(ranking_of, sizes, rows, (1, 2, 3), world_size=len(sizes)):
        assert found == pytest.approx(expected, rel=1e-13, nan_ok=True) and list(found) == list(expected)
        assert all(map(same, found.values(), one.values()))  # the same bits, in any order too


def test_perfect_lists_have_one_exactly():
    lists = torch.arange(100).repeat(50, 1)
    found = ranking_metrics(lists, Ragged.from_lists([list(range(1 + n * 2)) for n in range(50)]), ks=(10, 100))
    assert found["ndcg@10"] == found["ndcg@100"] == found["recall@100"] == found["mrr@10"] == 1


# errors

ONES, LIST = torch.ones(3), torch.tensor([[0, 1]])
BAGS = Ragged.from_lists([[1]])
BAD: dict[str, tuple[Any, str]] = {
    "nan": (lambda bad: area_under_curve(torch.tensor([0.0, math.nan if bad else 1.0]), torch.ones(2)), "nan at row 1"),
    "label": (lambda bad: area_under_curve(ONES, ONES / (1 + bad)), "rank 1: labels: 0.5 at row 0; a label is 0 or 1"),
    "nan label": (lambda bad: click_metrics(ONES, ONES * (math.nan if bad else 1)), "rank 1: labels: nan at row 0"),
    "shape": (lambda bad: click_metrics(ONES, ONES[bad:]), "rank 1: logits and labels must be of one shape (rows,)"),
    "dtype": (lambda bad: area_under_curve(ONES.double() if bad else ONES, ONES), "rank 1: scores of torch.float64 on cpu"),
    "integers": (lambda bad: area_under_curve(ONES.int() if bad else ONES, ONES), "rank 1: scores of torch.int32: expected"),
    "list": (lambda bad: area_under_curve([1.0] if bad else ONES, ONES), "rank 1: scores: expected a Tensor, got list"),
    "ks": (lambda bad: ranking_metrics(LIST, BAGS, ks=(1, 2 + bad)), "rank 1: ks=(1, 3) must be numbers from 1 to"),
    "other ks": (lambda bad: ranking_metrics(LIST, BAGS, ks=(1 + bad,)), "rank 1: ks=(2,), lists of 2 on cpu"),
    "places": (lambda bad: ranking_metrics(LIST.int() if bad else LIST, BAGS, ks=(1,)), "rank 1: places: expected int64"),
    "bags": (lambda bad: ranking_metrics(LIST[bad:], BAGS, ks=(1,)), "rank 1: relevant: expected 0 bags, one for each user"),
    "negative": (
        lambda bad: ranking_metrics(LIST, BAGS._replace(values=LIST[0, :1] - bad), ks=(1,)),
        "rank 1: relevant: -1 is",
    ),
}


def caught(name: str) -> str:
    with pytest.raises(ValueError) as error:
        BAD[name][0](int(dist.get_rank() == 1))
    assert len(all_gather(torch.ones(1))) == dist.get_world_size()  # the ranks are in step
    return str(error.value)


@pytest.mark.parametrize("name", BAD)
def test_metrics_reject_on_all_ranks(ranks, name):
    messages = ranks(caught, name, world_size=3)
    assert len(set(messages)) == 1 and BAD[name][1] in messages[0], messages[0]
    assert messages[0].startswith(("area_under_curve: ", "click_metrics: ", "ranking_metrics: "))


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
        ({"seen": Ragged.from_lists([[4]])}, "seen: 4 is not the place of an item; they go from 0 to 3"),
        ({"seen": BAGS._replace(offsets=torch.tensor([0, 2]))}, "offsets must ascend from 0 to the number of values, 1"),
        ({"seen": [[1]]}, "seen: expected a Ragged, got list"),
    ],
)
def test_top_items_reject(change, message):
    arguments = {"users": torch.ones(1, 2), "items": torch.ones(4, 2), "k": 2} | change
    with pytest.raises(ValueError, match=f"top_items: .*{message}"):
        top_items(arguments.pop("users"), arguments.pop("items"), **arguments)

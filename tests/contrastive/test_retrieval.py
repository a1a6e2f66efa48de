"""retrieval_metrics on N ranks gives what one process finds by sorting all scores; ties count against the model."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.contrastive.bad_calls import error_of_a_bad_call
from unisono.collectives import checked
from unisono.collectives.testing import run_ranks
from unisono.contrastive.retrieval import retrieval_metrics

ROWS = {1: [13], 2: [5, 8], 3: [9, 0, 4], 4: [0, 6, 3, 4]}  # of each rank, by world size
KS = (1, 2, 5, 100)


def plain_ranks(x: Tensor, y: Tensor, ids: Tensor) -> list[int]:
    """Sort all candidates of each row, positives after others with the same score; return the place of the first positive."""
    ranks = []
    for anchor, key in zip(x.double(), ids.tolist(), strict=True):
        scores, positive = (y.double() @ anchor).tolist(), (ids == key).tolist()
        order = sorted(range(len(y)), key=lambda j: (-scores[j], positive[j]))
        ranks.append(1 + [positive[j] for j in order].index(True))
    return ranks


def plain(x: Tensor, y: Tensor, ids: Tensor | None, ks: tuple[int, ...] = KS) -> dict[str, float]:
    ids = torch.arange(len(x)) if ids is None else ids
    metrics = {"rows": float(len(x))}
    for side, ranks in (("x_to_y", plain_ranks(x, y, ids)), ("y_to_x", plain_ranks(y, x, ids))):
        metrics |= {f"{side}/recall@{k}": sum(rank <= k for rank in ranks) / len(ranks) for k in ks}
        middle = sorted(ranks)[(len(ranks) - 1) // 2 : len(ranks) // 2 + 1]
        metrics |= {f"{side}/median_rank": sum(middle) / len(middle), f"{side}/mean_rank": sum(ranks) / len(ranks)}
    return metrics


def whole_set(kind: str, dtype: torch.dtype, rows: int = 13, width: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    if kind == "ties":  # small integers: every score is exact and most are shared
        x, y = (torch.randint(-1, 2, (rows, width), generator=generator) for _ in range(2))
    else:
        x = torch.randn(rows, width, generator=generator, dtype=torch.float64)
        y = x + 1.2 * torch.randn(rows, width, generator=generator, dtype=torch.float64)
    if kind == "duplicates":
        x, y = x[torch.arange(rows) // 2], y[torch.arange(rows) // 3]
    return x.to(dtype), y.to(dtype)


def whole_ids(rows: int = 13) -> Tensor:
    values = torch.tensor([-1, 2**63 - 1, -(2**63), 0, 7, 8, 9])
    return values[torch.arange(rows) * 3 % 5 + torch.arange(rows) % 3]


def close(got: dict[str, float], expected: dict[str, float]) -> None:
    assert set(got) == set(expected)
    assert got == pytest.approx(expected, rel=1e-12, abs=0, nan_ok=True)
    assert all(type(value) is float for value in got.values())


def own(whole: Tensor | None, rows: list[int], rank: int) -> Tensor | None:
    return None if whole is None else whole.split(rows)[rank]


def matches_one_process(rows: list[int], kind: str, dtype: torch.dtype, with_ids: bool, options: dict[str, Any]) -> Any:
    x, y = whole_set(kind, dtype)
    ids = whole_ids() if with_ids else None
    rank = dist.get_rank()
    sizes = rows if options.pop("give_sizes", False) else None
    got = retrieval_metrics(own(x, rows, rank), own(y, rows, rank), own(ids, rows, rank), ks=KS, sizes=sizes, **options)
    close(got, plain(x, y, ids))
    return got


@pytest.mark.parametrize("with_ids", [False, True], ids=["pairs", "ids"])
@pytest.mark.parametrize("exchange", ["gather", "ring"])
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("random", torch.float64),
        ("random", torch.float32),
        ("random", torch.bfloat16),
        ("ties", torch.float32),
        ("ties", torch.bfloat16),
        ("duplicates", torch.float32),
    ],
)
def test_retrieval_matches_one_process(ranks, world_size, exchange, kind, dtype, with_ids):
    for options in ({}, {"tile": 2, "give_sizes": True}):
        options["exchange"] = exchange
        results = ranks(matches_one_process, ROWS[world_size], kind, dtype, with_ids, options, world_size=world_size)
        assert all(result == results[0] for result in results)  # the same bits


def matches_in_a_subgroup(kind: str) -> None:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "batch"))
    x, y = whole_set(kind, torch.float64)
    replica, rank = divmod(dist.get_rank(), 2)
    x = x.roll(replica, 0)  # another set in each group
    rows = ROWS[2] if replica else ROWS[2][::-1]
    got = retrieval_metrics(own(x, rows, rank), own(y, rows, rank), ks=KS, group=(mesh, "batch"))
    close(got, plain(x, y, None))


def test_retrieval_in_a_subgroup(ranks):
    ranks(matches_in_a_subgroup, "random", world_size=4)


def collapsed(rows: list[int], width: int, value: str) -> dict[str, float]:
    """All features are equal, but their scores round differently in tiles of different shapes."""
    feature = (
        torch.full((width,), 0.1) if value == "constant" else torch.rand(width, generator=torch.Generator().manual_seed(0))
    )
    feature = feature / feature.norm()
    x = feature.repeat(rows[dist.get_rank()], 1)
    return retrieval_metrics(x, x, tile=7 if width == 33 else None)


@pytest.mark.parametrize("value", ["constant", "random"])
@pytest.mark.parametrize("width", [33, 512, 4096])
def test_collapsed_encoder_finds_nothing(ranks, world_size, width, value):
    for got in ranks(collapsed, ROWS[world_size], width, value, world_size=world_size):
        assert got["x_to_y/recall@1"] == got["y_to_x/recall@10"] == 0
        assert got["x_to_y/median_rank"] == got["y_to_x/mean_rank"] == 13


def nothing_at_all() -> dict[str, float]:
    return retrieval_metrics(torch.empty(0, 3), torch.empty(0, 3), torch.empty(0, dtype=torch.int64), ks=[1])


def test_empty_set_is_nan(ranks, world_size):
    for got in ranks(nothing_at_all, world_size=world_size):
        assert got.pop("rows") == 0
        assert len(got) == 6 and all(math.isnan(value) for value in got.values())


@pytest.mark.parametrize("with_ids", [False, True])
def test_values_that_are_not_finite_count_against_the_model(with_ids):
    ids = torch.arange(4) if with_ids else None
    x = torch.eye(4)
    x[1, 0] = torch.nan
    got = retrieval_metrics(x, torch.eye(4), ids, ks=[1])
    assert got["x_to_y/recall@1"] == 0.75  # the row itself has the last rank
    assert got["y_to_x/recall@1"] == 0  # and it may be ahead of every positive
    broken = retrieval_metrics(torch.full((4, 4), torch.nan), torch.eye(4), ids, ks=[1])
    assert broken["x_to_y/mean_rank"] == broken["y_to_x/mean_rank"] == 4
    assert retrieval_metrics(torch.full((4, 4), torch.inf), torch.ones(4, 4), ids, ks=[1])["x_to_y/recall@1"] == 0


def test_ties_of_features_with_very_different_norms():
    """All scores are equal up to rounding, which depends on the larger norm: that of the positive or of the candidate."""
    part = (
        torch.randn(12, 500, generator=torch.Generator().manual_seed(0))
        * torch.tensor([1.0, 100.0, 10000.0]).repeat(4)[:, None]
    )
    part = part.round()
    x, y = torch.full((12, 1000), 0.1), torch.cat([part + 0.125, 0.125 - part], 1)
    got = retrieval_metrics(x, y, ks=[11])
    assert got["x_to_y/recall@11"] == 0


def test_no_graph_and_no_autocast():
    x, y = whole_set("random", torch.float32)
    expected = retrieval_metrics(x, y)
    with torch.autocast("cpu", torch.bfloat16):
        assert retrieval_metrics(x.clone().requires_grad_(), y) == expected
    close(retrieval_metrics(x, y.double(), ks=KS), plain(x, y, None))


class Largest(TorchFunctionMode):
    """The size of the largest tensor that any function of torch returned."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.numel = max(self.numel, result.numel() if isinstance(result, Tensor) else 0)
        return result


def largest_tensor(rows: int) -> int:
    x, ids = torch.randn(rows, 8), torch.arange(rows)
    with Largest() as largest:
        retrieval_metrics(x, x, ids, exchange="ring", tile=16)
    return largest.numel


def test_ring_holds_one_block_and_one_tile(ranks):
    for world_size in (1, 4):
        assert ranks(largest_tensor, 64, world_size=world_size) == [64 * 8] * world_size


@st.composite
def cases(draw: Any) -> dict[str, Any]:
    rows = draw(st.lists(st.integers(0, 6), min_size=1, max_size=4).filter(any))
    count = sum(rows)
    numbers = st.integers(-2, 2)
    return {
        "rows": rows,
        "x": draw(st.lists(st.lists(numbers, min_size=2, max_size=2), min_size=count, max_size=count)),
        "y": draw(st.lists(st.lists(numbers, min_size=2, max_size=2), min_size=count, max_size=count)),
        "ids": draw(st.none() | st.lists(st.integers(-3, 3), min_size=count, max_size=count)),
        "exchange": draw(st.sampled_from(["auto", "gather", "ring"])),
        "tile": draw(st.none() | st.integers(1, 8)),
    }


def agrees(rows: list[int], x: list, y: list, ids: list[int] | None, exchange: Any, tile: int | None) -> None:
    rank, keys = dist.get_rank(), None if ids is None else torch.tensor(ids)
    left, right = torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.float32)
    mine = [own(each, rows, rank) for each in (left, right, keys)]
    close(retrieval_metrics(*mine, ks=KS, exchange=exchange, tile=tile), plain(left, right, keys))


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(case=cases())
def test_retrieval_with_any_input(case):
    run_ranks(agrees, *case.values(), world_size=len(case["rows"]))


X = torch.ones(3, 2)
BAD: dict[str, tuple[Any, str]] = {
    "ks": (lambda bad: retrieval_metrics(X, X, ks=(1, 0) if bad else (1, 2)), "rank 1: ks=(1, 0) must be a sequence"),
    "bool": (lambda bad: retrieval_metrics(X, X, ks=[True] if bad else [1]), "rank 1: ks=[True] must be a sequence"),
    "shape": (lambda bad: retrieval_metrics(X, X[bad:]), "rank 1: x and y must have the same shape"),
    "width": (lambda bad: retrieval_metrics(X[:, bad:], X[:, bad:]), "the ranks disagree"),
    "ids": (lambda bad: retrieval_metrics(X, X, torch.arange(3.0) if bad else torch.arange(3)), "rank 1: ids: expected 3"),
    "no ids": (lambda bad: retrieval_metrics(X, X, None if bad else torch.arange(3)), "ids=False"),
    "other ks": (lambda bad: retrieval_metrics(X, X, ks=(1 + bad,)), "ks=(2,)"),
    "not a tensor": (lambda bad: retrieval_metrics([[1.0]] if bad else X, X), "rank 1: x: expected a Tensor, got list"),
}


@pytest.mark.parametrize("name", BAD)
def test_retrieval_rejects_on_all_ranks(ranks, name):
    messages = ranks(error_of_a_bad_call, __name__, name, world_size=3)
    assert len(set(messages)) == 1 and messages[0].startswith("retrieval_metrics: ")
    assert BAD[name][1] in messages[0], messages[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exchange": "tree"}, "exchange='tree' is not one of"),
        ({"tile": 0}, "tile=0 must be a positive"),
        ({"ks": 5}, "ks=5 must be a sequence of positive integers"),
        ({"sizes": [2]}, r"sizes=\(2,\) expects 2 rows on this rank"),
    ],
)
def test_retrieval_rejects(options, message):
    with pytest.raises(ValueError, match=f"retrieval_metrics: {message}"):
        retrieval_metrics(X, X, **options)


def ids_of_different_types(dtypes: list[torch.dtype]) -> dict[str, float]:
    """Ranks may have ids of different integer types, also under checked()."""
    rank = dist.get_rank()
    x, y = (own(each, ROWS[3], rank) for each in whole_set("random", torch.float32))
    with checked():
        return retrieval_metrics(x, y, (torch.arange(13) % 6).split(ROWS[3])[rank].to(dtypes[rank]), ks=KS)


def test_ids_of_any_integer_type(ranks):
    for got in ranks(ids_of_different_types, [torch.int64, torch.int32, torch.uint8], world_size=3):
        close(got, plain(*whole_set("random", torch.float32), torch.arange(13) % 6))

"""All metrics: in a subgroup, without rows, and with a bad call on one rank."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.recommender.metrics.metric_cases import (
    LISTS,
    RELEVANT,
    ROWS,
    plain_area,
    plain_ranking,
    rows_of,
)
from unisono.collectives import all_gather
from unisono.embedding import Ragged
from unisono_models.recommender.metrics.auc import area_under_curve, click_metrics
from unisono_models.recommender.metrics.ranking import ranking_metrics


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


def metrics_without_rows() -> tuple[dict[str, float], dict[str, float]]:
    none = torch.empty(0)
    assert math.isnan(area_under_curve(none, none))
    lists = torch.zeros(2, 3, dtype=torch.int64)  # users without a relevant item
    return click_metrics(none, none), ranking_metrics(lists, Ragged.from_lists([[], []]), ks=(3,))


def test_metrics_without_rows_are_nan(ranks, world_size):
    for clicks, ranking in ranks(metrics_without_rows, world_size=world_size):
        assert clicks.pop("rows") == 0 == ranking.pop("users")
        assert len(clicks) == len(ranking) == 5 and all(map(math.isnan, [*clicks.values(), *ranking.values()]))


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
    "indices": (lambda bad: ranking_metrics(LIST.int() if bad else LIST, BAGS, ks=(1,)), "rank 1: indices: expected int64"),
    "bags": (lambda bad: ranking_metrics(LIST[bad:], BAGS, ks=(1,)), "rank 1: relevant: expected 0 bags, one for each user"),
    "negative": (
        lambda bad: ranking_metrics(LIST, BAGS._replace(values=LIST[0, :1] - bad), ks=(1,)),
        "rank 1: relevant: -1 is",
    ),
}


def call_and_catch(name: str) -> str:
    with pytest.raises(ValueError) as error:
        BAD[name][0](int(dist.get_rank() == 1))
    assert len(all_gather(torch.ones(1))) == dist.get_world_size()  # the ranks are in step
    return str(error.value)


@pytest.mark.parametrize("name", BAD)
def test_metrics_reject_on_all_ranks(ranks, name):
    messages = ranks(call_and_catch, name, world_size=3)
    assert len(set(messages)) == 1 and BAD[name][1] in messages[0], messages[0]
    assert messages[0].startswith(("area_under_curve: ", "click_metrics: ", "ranking_metrics: "))

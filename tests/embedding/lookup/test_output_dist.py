"""Rows become features: every mode, empty bags and weights, against one process on every layout."""

import pytest
import torch
import torch.distributed as dist

from tests.embedding.reference import MIXED, compare_training, layouts, make_bag, make_embedding
from tests.embedding.test_collection import make_two_tables
from unisono.embedding import SGD, Ragged


def mean_does_not_count_padding() -> None:
    """torch's ShardedTensor counted the padding in the divisor of a mean."""
    compare_training(make_bag(mode="mean", padding_idx=3), MIXED)


def mean_of_an_empty_bag_is_zero() -> None:
    """torch's ShardedTensor gave NaN for mode="mean"."""
    compare_training(make_bag(mode="mean"), [[[], [4]], [[]], [[], [], [2, 3]]])


def max_has_the_right_gradient() -> None:
    """torch's ShardedTensor gave the table a wrong gradient for mode="max"."""
    compare_training(make_bag(mode="max"), MIXED)
    ties = make_bag(mode="max")
    ties.weight.data.round_()  # many rows with the same largest number: the first of the bag gets the gradient
    compare_training(ties, MIXED)


def there_may_be_more_bags_than_ids_or_no_ids() -> None:
    """torch's ShardedTensor crashed."""
    for mode in ("sum", "mean", "max"):
        compare_training(make_bag(mode=mode), [[[], [], [2], []], [], [[], []]])
        compare_training(make_bag(mode=mode), [[[], []], [], [[]]])
        compare_training(make_bag(mode=mode), [[], [], []])
    compare_training(make_embedding(), [[], [[1]], []])


def ranks_may_have_different_numbers_of_ids() -> None:
    """torch's ShardedTensor lost the connection."""
    compare_training(make_bag(), [[[1] * 40, [2, 3]], [[4]], [[5, 6], *[[7]] * 9]])


def weights_get_a_gradient_if_they_require_it() -> None:
    """TorchRec gives per-sample weights no gradient."""
    ids, offsets = torch.tensor([1, 4, dist.get_rank()]), torch.tensor([0, 2, 3])
    for layout in layouts(dist.get_world_size()).values():
        for learned in (True, False):
            module = make_two_tables({"a": layout, "b": "table"}, optimizer=SGD(lr=0.0))
            weights = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64, requires_grad=learned)
            out = module({"a": Ragged(ids, offsets, weights), "b": ids})["a"]
            (out * torch.tensor([[1.0], [10.0]], dtype=torch.float64)).sum().backward()
            sums = module.tables["a"].full_weight()[ids].sum(1) * torch.tensor([1.0, 1.0, 10.0], dtype=torch.float64)
            torch.testing.assert_close(weights.grad, sums if learned else None)


REGRESSIONS = [
    mean_does_not_count_padding,
    mean_of_an_empty_bag_is_zero,
    max_has_the_right_gradient,
    there_may_be_more_bags_than_ids_or_no_ids,
    ranks_may_have_different_numbers_of_ids,
    weights_get_a_gradient_if_they_require_it,
]


@pytest.mark.parametrize("body", REGRESSIONS, ids=lambda body: body.__name__)
@pytest.mark.parametrize("size", [1, 3])
def test_regression(body, size, ranks):
    ranks(body, world_size=size)

"""Every layout, at one to four ranks, gives what torch.nn gives with the whole batch: values, gradients, tables."""

import pytest
import torch

from tests.embedding.whole_table import layouts, run_bag, run_embedding

BAGS = {
    "sum": {},
    "mean": {"mode": "mean"},
    "max": {"mode": "max"},
    "mean of ranks": {"grad_reduce": "mean"},
    "int32": {"int": torch.int32},
    "weights": {"weights": "fixed"},
    "learned weights": {"weights": "learned"},
    "learned weights, padding": {"weights": "learned", "options": {"padding_idx": 3}},
    "weights, padding": {"weights": "fixed", "options": {"padding_idx": 3}},
    "mean, padding": {"mode": "mean", "options": {"padding_idx": 3}},
    "max, padding": {"mode": "max", "options": {"padding_idx": -2}},
    "max norm": {"options": {"max_norm": 1.5}},
    "max norm, mean, padding": {"mode": "mean", "options": {"max_norm": 1.5, "padding_idx": 3, "norm_type": 1.0}},
    "max norm, weights, padding": {"weights": "learned", "options": {"max_norm": 1.5, "padding_idx": 3, "norm_type": 3.0}},
    "largest norm": {"options": {"max_norm": 0.9, "norm_type": float("inf")}},
    "by frequency": {"options": {"scale_grad_by_freq": True}},
    "by frequency, mean, padding": {"mode": "mean", "options": {"scale_grad_by_freq": True, "padding_idx": 3}},
    "sparse": {"sparse": True},
    "all empty": {"lengths": [[]]},
    "empty bags only": {"lengths": [[0, 0], []]},
}
EMBEDDINGS = {
    "plain": {},
    "padding": {"options": {"padding_idx": 3}},
    "max norm": {"options": {"max_norm": 1.2}},
    "max norm, padding": {"options": {"max_norm": 1.2, "padding_idx": 3}},
    "by frequency": {"options": {"scale_grad_by_freq": True, "padding_idx": 3}},
    "sparse": {"sparse": True, "options": {"padding_idx": 3}},
    "upper rows only": {"low": 6},
}


def run_all_bags(layout):
    for case in BAGS.values():
        run_bag(case, layout)


def run_all_embeddings(layout):
    for case in EMBEDDINGS.values():
        run_embedding(case, layout)


PLACES = [(size, layout) for size in (1, 2, 3, 4) for layout in layouts(size)]


@pytest.mark.parametrize(("size", "layout"), PLACES)
def test_bag_matches_one_process(size, layout, ranks):
    ranks(run_all_bags, layout, world_size=size)


@pytest.mark.parametrize(("size", "layout"), PLACES)
def test_embedding_matches_one_process(size, layout, ranks):
    ranks(run_all_embeddings, layout, world_size=size)

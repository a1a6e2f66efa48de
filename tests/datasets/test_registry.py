"""Datasets by name."""

import pytest

from unisono_models.datasets.registry import Registry


def test_built_in_and_user_datasets_are_looked_up_alike():
    datasets = Registry("gan")
    datasets.register("digits")(lambda: 1)
    datasets.register("mine")(lambda: 2)
    assert [datasets[name]() for name in datasets.names()] == [1, 2] and "mine" in datasets and "other" not in datasets


def test_rejects_unknown_and_taken_names():
    datasets = Registry("gan")
    datasets.register("digits")(lambda: 1)
    with pytest.raises(ValueError, match=r"gan has no dataset 'digit'. Did you mean 'digits'\? The datasets are: digits"):
        datasets["digit"]
    with pytest.raises(ValueError, match="has a dataset 'digits' already"):
        datasets.register("digits")

"""The feature extractor is the same on any number of ranks, and from one start of a run to the next."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gan.small_datasets import small_datasets
from tests.gan.small_runs import ALONE
from unisono_models.gan.config import DataConfig, EvaluationConfig
from unisono_models.gan.data.dataset import Datasets, build_datasets
from unisono_models.gan.feature_extractor import (
    FeatureExtractor,
    load_or_train_feature_extractor,
    predicted_classes,
    read_feature_extractor,
    train_feature_extractor,
    write_feature_extractor,
)
from unisono_models.training.distributed.launch import start_ranks


@pytest.mark.parametrize(("size", "channels", "labelled"), [(16, 1, True), (28, 3, True), (64, 3, False)])
def test_feature_extractor_learns(size: int, channels: int, labelled: bool) -> None:
    datasets = small_datasets(labelled=labelled, size=size, channels=channels)
    extractor = FeatureExtractor(channels=channels, size=size, classes=predicted_classes(datasets))
    before = torch.random.get_rng_state()
    assert (
        train_feature_extractor(extractor, datasets, EvaluationConfig(feature_extractor_steps=40, feature_extractor_batch=25))
        == 1
    )
    assert torch.equal(torch.random.get_rng_state(), before)
    assert extractor.features(torch.zeros(2, channels, size, size)).shape == (2, 64)


def test_feature_extractor_is_read_as_it_was_written(tmp_path: Path) -> None:
    datasets, config = small_datasets(), EvaluationConfig(feature_extractor_steps=2, feature_extractor_batch=10)
    path = tmp_path / "feature_extractor.safetensors"
    before = torch.random.get_rng_state()
    trained = load_or_train_feature_extractor(path, datasets, config, ALONE)
    written = path.read_bytes()
    found = load_or_train_feature_extractor(path, datasets, EvaluationConfig(feature_extractor_steps=0), ALONE)
    assert torch.equal(torch.random.get_rng_state(), before) and path.read_bytes() == written
    assert found.accuracy == trained.accuracy and found.classes == ("a", "b", "c")
    for name, weight in trained.state_dict().items():
        assert torch.equal(found.state_dict()[name], weight), name
    with pytest.raises(ValueError, match=r"--data.source has other images now than when the run began"):
        load_or_train_feature_extractor(path, Datasets(datasets.train, datasets.test, fingerprint="circles"), config, ALONE)
    write_feature_extractor(path, FeatureExtractor(channels=3, size=16), fingerprint="squares")
    with pytest.raises(ValueError, match=r"is for .channels, size, classes. \(3, 16, \(\)\), but the images have \(1, 16, "):
        load_or_train_feature_extractor(path, datasets, config, ALONE)
    path.write_bytes(written[:-5])
    with pytest.raises(ValueError, match="is damaged, or not a feature extractor"):
        read_feature_extractor(path)


def load_or_train_on_ranks(path: Path, datasets: Datasets) -> tuple[float, list[float]]:
    config = EvaluationConfig(feature_extractor_steps=2, feature_extractor_batch=10)
    with start_ranks() as ranks:
        mine = path if ranks.first else path / "elsewhere"  # rank 0 decides whether the file exists
        extractor = load_or_train_feature_extractor(mine, datasets, config, ranks)
    return extractor.accuracy, extractor.head.weight.flatten().tolist()


def test_all_ranks_have_one_feature_extractor(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    path = tmp_path / "feature_extractor.safetensors"
    first = ranks(load_or_train_on_ranks, path, small_datasets(), world_size=2)
    assert first[0] == first[1] and first[0][1] == read_feature_extractor(path).head.weight.flatten().tolist()
    alone_path = tmp_path / "alone.safetensors"
    load_or_train_feature_extractor(
        alone_path, small_datasets(), EvaluationConfig(feature_extractor_steps=2, feature_extractor_batch=10), ALONE
    )
    assert alone_path.read_bytes() == path.read_bytes()  # the number of ranks changes no bit
    with pytest.raises(Exception, match=r"load_or_train_feature_extractor: rank 1: .*elsewhere"):
        ranks(load_or_train_on_ranks, path, small_datasets(), world_size=2)


def test_feature_extractor_classifies_real_digits() -> None:
    datasets = build_datasets(DataConfig(size=16), condition="class", ranks=ALONE)
    extractor = FeatureExtractor(channels=1, size=16, classes=predicted_classes(datasets))
    assert train_feature_extractor(extractor, datasets, EvaluationConfig(feature_extractor_steps=100)) > 0.9

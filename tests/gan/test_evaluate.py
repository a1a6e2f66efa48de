"""The Evaluator gives the same metrics on any number of ranks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.gan.small_datasets import small_datasets
from tests.gan.small_runs import ALONE
from unisono_models.gan.config import EvaluationConfig
from unisono_models.gan.data.dataset import Datasets
from unisono_models.gan.evaluate import Evaluator, describe_small_sets
from unisono_models.gan.feature_extractor import (
    FeatureExtractor,
)
from unisono_models.training.distributed.launch import start_ranks


def make(numbers: Tensor, indices: Tensor) -> Tensor:
    """Make images of 16 x 16 that depend on their numbers and indices."""
    random = torch.Generator().manual_seed(3)
    noise = torch.rand(200, 1, 16, 16, generator=random, dtype=torch.float64)
    return (small_datasets().train.floats(indices) + noise[numbers] - 0.5).clamp(-1, 1)


def evaluate(samples: int, conditional: bool, tile: int) -> list[dict[str, float]]:
    with start_ranks() as ranks:
        extractor = FeatureExtractor(channels=1, size=16, classes=("a", "b", "c")).double()
        extractor.initialize(5)
        config = EvaluationConfig(samples=samples, tile=tile)
        evaluator = Evaluator(small_datasets(), extractor, ranks, None, config, conditional=conditional)
        return [evaluator(make), evaluator.real(), evaluator(make)]


@pytest.mark.parametrize(("samples", "conditional"), [(120, True), (33, False)])
def test_evaluator_matches_one_process(ranks: Callable[..., list[Any]], samples: int, conditional: bool) -> None:
    expected = evaluate(samples, conditional, tile=500)
    assert list(expected[0])[:4] == ["frechet_distance", "relative_kernel_distance", "precision", "recall"]
    assert ("label_accuracy" in expected[0]) is conditional and expected[0] == expected[2]
    assert expected[1]["real/class_coverage"] <= 3 and list(expected[1]) == [f"real/{name}" for name in expected[0]]
    for world_size in (2, 3):
        results = ranks(evaluate, samples, conditional, 8, world_size=world_size)
        assert all(found == results[0] for found in results)
        for found, wanted in zip(results[0], expected, strict=True):
            assert found == pytest.approx(wanted, rel=1e-9, abs=1e-11)


def fail_on_one(kind: str) -> str:
    def generate(numbers: Tensor, indices: Tensor) -> Tensor:
        if dist.get_rank() == 1 and kind == "raises":
            raise ArithmeticError("no image today")
        return make(numbers, indices)[:, :, : 15 if dist.get_rank() == 1 else 16]

    with start_ranks() as ranks:
        extractor = FeatureExtractor(channels=1, size=16, classes=("a", "b", "c"))
        try:
            Evaluator(small_datasets(), extractor, ranks, None, EvaluationConfig(samples=20))(generate)
        except RuntimeError as error:
            return str(error)
    return "accepted"


def test_evaluator_fails_on_all_ranks(ranks: Callable[..., list[Any]]) -> None:
    assert ranks(fail_on_one, "raises", world_size=2) == ["Evaluator: rank 1: ArithmeticError: no image today"] * 2
    first, second = ranks(fail_on_one, "shape", world_size=2)
    assert first == second and "rank 1: ValueError" in first and "expected (10, 1, 16, 16)" in first


def test_training_images_score_perfectly() -> None:
    datasets = small_datasets()
    extractor = FeatureExtractor(channels=1, size=16, classes=("a", "b", "c"))
    extractor.initialize(5)
    found = Evaluator(datasets, extractor, ALONE, None, EvaluationConfig(samples=50))(
        lambda _, indices: datasets.train.floats(indices)
    )
    assert found["frechet_distance"] == pytest.approx(0, abs=1e-6)
    assert abs(found["relative_kernel_distance"]) < 0.05
    assert (found["precision"], found["recall"], found["coverage"]) == (1, 1, 1)


def test_relative_kernel_distance_has_a_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is 1 for features of 0, whatever their scale: the plain MMD² of the same features differs a millionfold."""
    extractor = FeatureExtractor(channels=1, size=16, classes=("a", "b", "c"))
    extractor.initialize(5)
    features = extractor.features
    found = []
    for scale in (100.0, 1000.0):
        monkeypatch.setattr(extractor, "features", lambda images, s=scale: s * features(images) * (images[:, :, 0, 0] > -1))
        evaluator = Evaluator(small_datasets(), extractor, ALONE, None, EvaluationConfig(samples=50))
        for image in (-torch.ones(1, 16, 16), torch.ones(1, 16, 16)):
            metrics = evaluator(lambda numbers, _, image=image: image.expand(len(numbers), -1, -1, -1))
            found.append(metrics["relative_kernel_distance"])
    assert found[0] == pytest.approx(1, abs=1e-3) and found[2] == pytest.approx(1, abs=1e-6)
    assert found[1] == pytest.approx(found[3], rel=0.05) and found[1] > 1


def test_small_sets_are_said() -> None:
    datasets, config = small_datasets(), EvaluationConfig()
    learnt, rough = describe_small_sets(datasets, config)
    assert (
        "only 50 images to train on" in learnt and "test set has only 21 images: the metrics of real images are rough" in rough
    )
    few = Datasets(datasets.train, datasets.test.select(torch.arange(3)))
    assert "only 3 images: too few for the metrics of real images" in describe_small_sets(few, config)[1]
    many = datasets.train.select(torch.arange(500) % 50)
    assert describe_small_sets(Datasets(many, many), config) == []

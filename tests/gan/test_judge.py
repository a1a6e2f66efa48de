"""The judge, and the evaluator that goes by it: the same on any number of ranks, and from one start of a run to the next."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from unisono_models.gan.config import DataConfig, EvaluationConfig
from unisono_models.gan.data.dataset import Datasets, build_datasets
from unisono_models.gan.data.images import Images
from unisono_models.gan.evaluate import Evaluator
from unisono_models.gan.feature_extractor import (
    Judge,
    classes_of,
    load_or_train_feature_extractor,
    read_judge,
    train_judge,
    write_judge,
)
from unisono_models.training.distributed.launch import Ranks, start_ranks


def squares(rows: int, *, labelled: bool = True, size: int = 16, channels: int = 1) -> Images:
    """A bright square in one of three corners, of another brightness each, with noise."""
    random = torch.Generator().manual_seed(rows)
    labels = torch.arange(rows) % 3 if labelled else torch.zeros(rows, dtype=torch.int64)
    pixels = torch.randint(60, (rows, channels, size, size), generator=random, dtype=torch.uint8)
    half = size // 2
    for row, label in enumerate(labels.tolist()):
        top, left = divmod(label, 2)
        pixels[row, :, top * half : (top + 1) * half, left * half : (left + 1) * half] += torch.tensor(
            80 + 5 * (row % 17), dtype=torch.uint8
        )
    return Images(pixels, labels if labelled else None, ("a", "b", "c") if labelled else ())


def small_source(**settings: Any) -> Datasets:
    return Datasets(squares(50, **settings), squares(21, **settings), fingerprint="squares")


def alone() -> Ranks:
    return Ranks(0, 1, 0, torch.device("cpu"))


@pytest.mark.parametrize(("size", "channels", "labelled"), [(16, 1, True), (28, 3, True), (64, 3, False)])
def test_judge_learns(size: int, channels: int, labelled: bool) -> None:
    source = small_source(labelled=labelled, size=size, channels=channels)
    judge = Judge(channels=channels, size=size, classes=classes_of(source))
    before = torch.random.get_rng_state()
    assert train_judge(judge, source, EvaluationConfig(judge_steps=40, judge_batch=25)) == 1
    assert torch.equal(torch.random.get_rng_state(), before)
    assert judge.features(torch.zeros(2, channels, size, size)).shape == (2, 64)


def test_judge_is_read_as_it_was_written(tmp_path: Path) -> None:
    source, config = small_source(), EvaluationConfig(judge_steps=2, judge_batch=10)
    path = tmp_path / "judge.safetensors"
    before = torch.random.get_rng_state()
    trained = load_or_train_feature_extractor(path, source, config, alone())
    written = path.read_bytes()
    found = load_or_train_feature_extractor(path, source, EvaluationConfig(judge_steps=0), alone())
    assert torch.equal(torch.random.get_rng_state(), before) and path.read_bytes() == written
    assert found.accuracy == trained.accuracy and found.classes == ("a", "b", "c")
    for name, weight in trained.state_dict().items():
        assert torch.equal(found.state_dict()[name], weight), name
    with pytest.raises(ValueError, match=r"trained on other pictures \(squares\) than there are now \(circles\)"):
        load_or_train_feature_extractor(path, Datasets(source.train, source.test, fingerprint="circles"), config, alone())
    write_judge(path, Judge(channels=3, size=16), fingerprint="squares")
    with pytest.raises(ValueError, match=r"is for .channels, size, classes. \(3, 16, \(\)\), the pictures are of \(1, 16, "):
        load_or_train_feature_extractor(path, source, config, alone())
    path.write_bytes(written[:-5])
    with pytest.raises(ValueError, match="not a judge, or damaged"):
        read_judge(path)


def ready_on_ranks(path: Path, source: Datasets) -> tuple[float, list[float]]:
    config = EvaluationConfig(judge_steps=2, judge_batch=10)
    with start_ranks() as ranks:
        mine = path if ranks.first else path / "elsewhere"  # whether it is there is rank 0's to say
        judge = load_or_train_feature_extractor(mine, source, config, ranks)
    return judge.accuracy, judge.head.weight.flatten().tolist()


def test_ranks_have_one_judge(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    path = tmp_path / "judge.safetensors"
    first = ranks(ready_on_ranks, path, small_source(), world_size=2)
    assert first[0] == first[1] and first[0][1] == read_judge(path).head.weight.flatten().tolist()
    alone_path = tmp_path / "alone.safetensors"
    load_or_train_feature_extractor(alone_path, small_source(), EvaluationConfig(judge_steps=2, judge_batch=10), alone())
    assert alone_path.read_bytes() == path.read_bytes()  # the number of ranks changes no bit
    with pytest.raises(Exception, match=r"ready_judge: rank 1: .*elsewhere"):
        ranks(ready_on_ranks, path, small_source(), world_size=2)


def make(numbers: Tensor, places: Tensor) -> Tensor:
    """Pictures of 16 x 16 that belong to their numbers and places."""
    random = torch.Generator().manual_seed(3)
    noise = torch.rand(200, 1, 16, 16, generator=random, dtype=torch.float64)
    return (small_source().train.floats(places) + noise[numbers] - 0.5).clamp(-1, 1)


def evaluate(samples: int, conditional: bool, tile: int) -> list[dict[str, float]]:
    with start_ranks() as ranks:
        judge = Judge(channels=1, size=16, classes=("a", "b", "c")).double()
        judge.start(5)
        config = EvaluationConfig(samples=samples, tile=tile)
        evaluator = Evaluator(small_source(), judge, ranks, None, config, conditional=conditional)
        return [evaluator(make), evaluator.real(), evaluator(make)]


@pytest.mark.parametrize(("samples", "conditional"), [(120, True), (33, False)])
def test_evaluator_matches_one_process(ranks: Callable[..., list[Any]], samples: int, conditional: bool) -> None:
    expected = evaluate(samples, conditional, tile=500)
    assert list(expected[0])[:4] == ["frechet_distance", "kernel_distance", "precision", "recall"]
    assert ("label_accuracy" in expected[0]) is conditional and expected[0] == expected[2]
    assert expected[1]["real/class_coverage"] <= 3 and list(expected[1]) == [f"real/{name}" for name in expected[0]]
    for world_size in (2, 3):
        results = ranks(evaluate, samples, conditional, 8, world_size=world_size)
        assert all(found == results[0] for found in results)
        for found, wanted in zip(results[0], expected, strict=True):
            assert found == pytest.approx(wanted, rel=1e-9, abs=1e-11)


def fail_on_one(kind: str) -> str:
    def generate(numbers: Tensor, places: Tensor) -> Tensor:
        if dist.get_rank() == 1 and kind == "raises":
            raise ArithmeticError("no picture today")
        return make(numbers, places)[:, :, : 15 if dist.get_rank() == 1 else 16]

    with start_ranks() as ranks:
        judge = Judge(channels=1, size=16, classes=("a", "b", "c"))
        try:
            Evaluator(small_source(), judge, ranks, None, EvaluationConfig(samples=20))(generate)
        except RuntimeError as error:
            return str(error)
    return "accepted"


def test_evaluator_fails_on_all_ranks(ranks: Callable[..., list[Any]]) -> None:
    assert ranks(fail_on_one, "raises", world_size=2) == ["Evaluator: rank 1: ArithmeticError: no picture today"] * 2
    first, second = ranks(fail_on_one, "shape", world_size=2)
    assert first == second and "rank 1: ValueError" in first and "expected (10, 1, 16, 16)" in first


def test_perfect_pictures_score_as_real_ones() -> None:
    source = small_source()
    judge = Judge(channels=1, size=16, classes=("a", "b", "c"))
    judge.start(5)
    found = Evaluator(source, judge, alone(), None, EvaluationConfig(samples=50))(lambda _, places: source.train.floats(places))
    assert found["frechet_distance"] == pytest.approx(0, abs=1e-6)
    assert (found["precision"], found["recall"], found["coverage"]) == (1, 1, 1)


def test_judge_knows_real_digits() -> None:
    source = build_datasets(DataConfig(size=16), condition="class", ranks=alone())
    judge = Judge(channels=1, size=16, classes=classes_of(source))
    assert train_judge(judge, source, EvaluationConfig(judge_steps=100)) > 0.9

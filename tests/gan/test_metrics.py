"""The metrics: torch-fidelity, plain loops and known values; the same on any number of ranks and any split."""

import math
import re
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from unisono_models.gan.metrics.frechet_distance import feature_moments, frechet_distance
from unisono_models.gan.metrics.kernel_distance import kernel_distance
from unisono_models.gan.metrics.label_accuracy import label_metrics
from unisono_models.gan.metrics.precision_recall import neighbour_radii, precision_recall

REAL, FAKE, WIDTH = 41, 30, 6
# rows of each rank: of the real ones, and of the fakes
SPLITS: dict[int, list[tuple[list[int], list[int]]]] = {
    1: [([41], [30])],
    2: [([13, 28], [30, 0]), ([0, 41], [29, 1])],
    3: [([9, 0, 32], [0, 11, 19])],
    4: [([0, 1, 40, 0], [10, 0, 5, 15]), ([10, 10, 10, 11], [8, 8, 7, 7])],
}


def features(rows: int, seed: int, *, shift: float = 0.0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(rows, WIDTH, generator=random, dtype=torch.float64).add(shift).clamp(min=-1)


def both() -> tuple[Tensor, Tensor]:
    """Return real and fake features. Some fakes are copies: they lie exactly at the edge of a ball, where rounding shows."""
    real, fake = features(REAL, 1), features(FAKE, 2, shift=0.4)
    return real, torch.cat([fake[:-8], real[3:11]])


def measure(real: Tensor, fake: Tensor, tile: int) -> dict[str, float]:
    logits, labels = fake[:, :4], (fake[:, 4] > 0).long()
    return {
        "frechet_distance": frechet_distance(feature_moments(fake), feature_moments(real)),
        "kernel": kernel_distance(real, fake, tile=tile),
        **precision_recall(real, fake, k=3, tile=tile),
        **label_metrics(logits, labels, real_counts=torch.tensor([5, 3, 0, 9])),
    }


def measure_share(real_rows: list[int], fake_rows: list[int], tile: int) -> dict[str, float]:
    rank = dist.get_rank()
    real, fake = (x.split(rows)[rank] for x, rows in zip(both(), (real_rows, fake_rows), strict=True))
    return measure(real, fake, tile)


def test_metrics_match_one_process(ranks: Callable[..., list[Any]], world_size: int) -> None:
    expected = measure(*both(), tile=500)
    for tile, (real_rows, fake_rows) in product((7, 500), SPLITS[world_size]):
        for found in ranks(measure_share, real_rows, fake_rows, tile, world_size=world_size):
            assert found == pytest.approx(expected, rel=1e-12, abs=1e-12)
            counted = expected.keys() - {"frechet_distance", "kernel"}
            assert {name: found[name] for name in counted} == {name: expected[name] for name in counted}


def test_metrics_match_torch_fidelity() -> None:
    from torch_fidelity.metric_fid import fid_features_to_statistics, fid_statistics_to_metric  # not in every rank's process
    from torch_fidelity.metric_kid import kid_features_to_metric
    from torch_fidelity.metric_prc import prc_features_to_metric

    real, fake = both()
    found = measure(real, fake, tile=11)
    statistics = [fid_features_to_statistics(x) for x in (fake, real)]
    fid = fid_statistics_to_metric(*statistics, verbose=False)["frechet_inception_distance"]
    assert found["frechet_distance"] == pytest.approx(fid)
    fewer = {"kid_subsets": 1, "kid_subset_size": FAKE, "kid_degree": 3, "kid_gamma": None, "kid_coef0": 1}
    kid = kid_features_to_metric(fake, real[:FAKE], **fewer, kid_kernel="poly", rng_seed=0, verbose=False)
    assert kernel_distance(real[:FAKE], fake) == pytest.approx(kid["kernel_inception_distance_mean"])
    near = prc_features_to_metric(fake, real, prc_neighborhood=3, prc_batch_size=10, save_cpu_ram=False, verbose=False)
    assert found["precision"] == pytest.approx(near["precision"]) and found["recall"] == pytest.approx(near["recall"])
    assert 0 < found["precision"] < 1 and 0 < found["recall"] < 1


def test_density_and_coverage_match_plain_loops() -> None:
    real, fake = both()
    found = precision_recall(real, fake, k=2, tile=8)
    radii = [sorted(math.dist(a, b) for j, b in enumerate(real.tolist()) if j != i)[1] for i, a in enumerate(real.tolist())]
    inside = [[math.dist(a, b) <= r + 1e-12 for a, r in zip(real.tolist(), radii, strict=True)] for b in fake.tolist()]
    assert found["density"] == pytest.approx(np.sum(inside) / (2 * FAKE))
    assert found["coverage"] == pytest.approx(np.any(inside, 0).mean())
    assert torch.allclose(neighbour_radii(real, k=2, tile=8), torch.tensor(radii, dtype=torch.float64))


def test_known_values() -> None:
    real = features(REAL, 1)
    moments = feature_moments(real)
    assert frechet_distance(moments, moments) == pytest.approx(0, abs=1e-12)
    assert frechet_distance(moments, feature_moments(real + 3)) == pytest.approx(9 * WIDTH)
    assert frechet_distance(moments, feature_moments(real * 3)) == pytest.approx(
        float(4 * (moments.mean.square().sum() + moments.covariance.trace()))
    )
    flat = torch.zeros_like(real)
    flat[:, 0] = real[:, 0]  # a covariance of rank 1
    assert frechet_distance(feature_moments(flat), feature_moments(flat * 2 + 1e6)) == pytest.approx(
        float(flat[:, 0].var()) + float((flat + 1e6).mean(0).square().sum()), rel=1e-9
    )
    same = precision_recall(real, real.clone(), k=3)
    assert (same["precision"], same["recall"], same["coverage"]) == (1, 1, 1)
    far = precision_recall(real, real + 1e6, k=3)
    assert set(far.values()) == {0}
    broken = precision_recall(real, real * math.nan, k=3)
    assert set(broken.values()) == {0} and math.isnan(frechet_distance(moments, feature_moments(real * math.nan)))


def test_moments_far_from_zero_keep_their_digits() -> None:
    real = features(REAL, 1)
    assert torch.allclose(feature_moments(real + 2.0**24).covariance, feature_moments(real).covariance, rtol=1e-6)


def test_logits_that_are_not_finite_count_as_wrong() -> None:
    logits = torch.eye(3).repeat(4, 1)
    logits[:3] = math.nan
    found = label_metrics(logits, torch.arange(3).repeat(4), real_counts=torch.tensor([4, 4, 4]))
    assert found == {"label_accuracy": 0.75, "class_coverage": 3}
    absent = label_metrics(logits, torch.arange(3).repeat(4), real_counts=torch.tensor([4, 4, 0]))
    assert absent["class_coverage"] == 2  # a class that no real image has does not count
    rare = torch.tensor([[1.0, 0]] * 19 + [[0, 1.0]])  # 5 %, by half of real ones: a tenth of a share
    assert label_metrics(rare, torch.zeros(20).long(), real_counts=torch.tensor([5, 5]))["class_coverage"] == 2
    assert label_metrics(rare[:-1], torch.zeros(19).long(), real_counts=torch.tensor([5, 5]))["class_coverage"] == 1


def refuse(what: str) -> str:
    rank = dist.get_rank()
    real, fake = features(4, 1), features(4, 2)
    try:
        if what == "few":
            precision_recall(real[: 3 if rank else 0], fake, k=3)
        elif what == "one":
            feature_moments(real[:1] if rank else real[:0])
        elif what == "width":
            kernel_distance(real[:, :3] if rank else real, fake[:, :3] if rank else fake)
        elif what == "kinds":
            kernel_distance(real, fake.float() if rank else fake)
        elif what == "tile":
            kernel_distance(real, fake, tile=0 if rank else 5)
        elif what == "labels":
            label_metrics(real, torch.zeros(3 + (not rank)), real_counts=torch.zeros(WIDTH))
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("few", "6 rows on all ranks|3 rows on all ranks"),
        ("one", "feature_moments: features have 1 rows on all ranks"),
        ("width", "kernel_distance: this must be equal on all ranks: rank 0: .*width 6.*rank 1: .*width 3"),
        ("kinds", "kernel_distance: rank 1: expected features of one dtype"),
        ("tile", "kernel_distance: rank 1: tile=0"),
        ("labels", r"label_metrics: rank 1: .*labels \(3,\)"),
    ],
)
def test_metrics_reject_on_all_ranks(ranks: Callable[..., list[Any]], what: str, words: str) -> None:
    first, second = ranks(refuse, what, world_size=2)
    assert first == second
    assert re.search(words, first), first

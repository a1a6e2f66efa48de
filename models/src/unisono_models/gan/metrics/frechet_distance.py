"""The Fréchet distance between two sets of features, taken as normal distributions.

The formula is that of FID, but FID is by definition computed on the features of one Inception network. Ours are the features of
the run's own feature extractor, so the numbers cannot be compared with FID.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from unisono.collectives import Group, all_reduce
from unisono_models.gan.metrics.features import validate_features


@dataclass(frozen=True, eq=False)
class FeatureMoments:
    """Mean and covariance of the features of all ranks, in float64."""

    count: int
    mean: Tensor
    """(width,)"""
    covariance: Tensor
    """(width, width)"""


@torch.no_grad()
def feature_moments(features: Tensor, *, group: Group = None) -> FeatureMoments:
    """Return the moments of the features of all ranks, (n, width) on each. The covariance is divided by n - 1.

    The mean is subtracted before the squares are summed, so that features far from 0 lose no digits.

    Raises: ValueError on all ranks if they have fewer than two rows together.

    Example:
        >>> feature_moments(torch.tensor([[1.0], [3.0]])).covariance
        tensor([[2.]], dtype=torch.float64)
    """
    count = validate_features("feature_moments", features=features, group=group)["features"]
    if count < 2:
        raise ValueError(f"feature_moments: features have {count} rows on all ranks together; a covariance needs at least 2")
    rows = features.double()
    mean = all_reduce(rows.sum(0), group=group) / count
    centred = rows - mean
    return FeatureMoments(count, mean, all_reduce(centred.T @ centred, group=group) / (count - 1))


@torch.no_grad()
def frechet_distance(a: FeatureMoments, b: FeatureMoments) -> float:
    """Return |mean_a - mean_b|² + trace(A + B - 2 (A B)^½) for covariances A and B. It does not communicate.

    The result is at least 0, and NaN if a moment is not finite. The trace of (A B)^½ is the sum of the singular values of
    A^½ B^½. Eigenvalues within rounding error count as 0, so covariances need not have full rank.

    Example:
        >>> a, b = (feature_moments(torch.tensor(x)) for x in ([[1.0], [3.0]], [[5.0], [7.0]]))
        >>> frechet_distance(a, b)  # equal covariances, means 4 apart
        16.0
    """
    if not all(x.isfinite().all() for moments in (a, b) for x in (moments.mean, moments.covariance)):
        return math.nan
    root = torch.linalg.svdvals(_matrix_root(a.covariance) @ _matrix_root(b.covariance)).sum()
    spread = a.covariance.trace() + b.covariance.trace() - 2 * root
    return max(0.0, float((a.mean - b.mean).square().sum() + spread))


def _matrix_root(covariance: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(covariance)
    rounding = values[-1:] * len(values) * torch.finfo(values.dtype).eps  # [-1:], since width may be 0
    root: Tensor = (vectors * values.where(values > rounding, 0.0).sqrt()) @ vectors.T
    return root

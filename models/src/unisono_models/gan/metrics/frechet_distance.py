"""The Fréchet distance between two sets of features, taken for normal distributions.

On the features of our own judge. The formula is that of FID, but this is not FID, which is by definition on the features of one
Inception network: the numbers of one say nothing about the other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from unisono.collectives import Group, all_reduce
from unisono_models.gan.metrics.features import settle


@dataclass(frozen=True, eq=False)
class Moments:
    """Of features on all ranks, in float64: how many rows, their mean (width,) and covariance (width, width)."""

    count: int
    mean: Tensor
    covariance: Tensor


@torch.no_grad()
def take_moments(features: Tensor, *, group: Group = None) -> Moments:
    """The moments of the features of all ranks, (n, width) on each, n of any size. The covariance is that of a sample (n - 1).

    The mean is known before squares are added, so that features far from 0 lose nothing.

    Raises: ValueError on all ranks if there are fewer than two rows in all.

    Example:
        >>> take_moments(torch.tensor([[1.0], [3.0]])).covariance
        tensor([[2.]], dtype=torch.float64)
    """
    count = settle("take_moments", features=features, group=group)["features"]
    if count < 2:
        raise ValueError(f"take_moments: features: {count} rows on all ranks together, a covariance needs at least 2")
    rows = features.double()
    mean = all_reduce(rows.sum(0), group=group) / count
    centred = rows - mean
    return Moments(count, mean, all_reduce(centred.T @ centred, group=group) / (count - 1))


@torch.no_grad()
def frechet_distance(a: Moments, b: Moments) -> float:
    """|mean - mean|² + trace(A + B - 2 (A B)^½), at least 0; NaN if a moment is not finite. No rank waits for another.

    The trace of the root is the sum of the singular values of A^½ B^½. Eigenvalues that may be rounding count as 0, so
    covariances of less than full rank do no harm.

    Example:
        >>> a, b = (take_moments(torch.tensor(x)) for x in ([[1.0], [3.0]], [[5.0], [7.0]]))
        >>> frechet_distance(a, b)  # the same spread, 4 apart
        16.0
    """
    if not all(x.isfinite().all() for moments in (a, b) for x in (moments.mean, moments.covariance)):
        return math.nan
    root = torch.linalg.svdvals(_root(a.covariance) @ _root(b.covariance)).sum()
    spread = a.covariance.trace() + b.covariance.trace() - 2 * root
    return max(0.0, float((a.mean - b.mean).square().sum() + spread))


def _root(covariance: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(covariance)
    rounding = values[-1:] * len(values) * torch.finfo(values.dtype).eps  # a tensor: [-1] alone has no value without features
    root: Tensor = (vectors * values.where(values > rounding, 0.0).sqrt()) @ vectors.T
    return root

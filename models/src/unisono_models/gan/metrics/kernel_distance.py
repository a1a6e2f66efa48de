"""The kernel distance between two sets of features: the squared maximum mean discrepancy that KID is made of.

On the features of our own judge, so not KID, which is by definition on those of one Inception network.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unisono.collectives import Group, Ring, all_reduce
from unisono_models.gan.metrics.features import settle, tile_complaint, tiles_of

DEGREE = 3


@torch.no_grad()
def kernel_distance(
    real: Tensor, fake: Tensor, *, tile: int = 500, real_mean: float | None = None, group: Group = None
) -> float:
    """MMD² by the kernel (x · y / width + 1)³ over all pairs of all ranks' features (not over random subsets), unbiased.

    `real`, `fake`: (n, width), each rank its own, n of any size. 0 is expected for two samples of one distribution, so it may
    be below. In float64; no more than a tile of kernel values is held, and no more than two ranks' features. `real_mean`:
    kernel_mean of `real`, if known.

    Raises: ValueError on all ranks if there are fewer than two rows in all of either.

    Example:
        >>> real, fake = torch.tensor([[0.0], [1.0]]), torch.tensor([[0.0], [2.0]])
        >>> kernel_distance(real, fake)  # 1 + 1 - 2 (1 + 1 + 1 + 27) / 4
        -13.0
    """
    counts = settle("kernel_distance", tile_complaint(tile), real=real, fake=fake, group=group)
    for name, count in counts.items():
        if count < 2:
            raise ValueError(f"kernel_distance: {name}: {count} rows on all ranks together, pairs need at least 2")
    m, n = counts["real"], counts["fake"]
    if real_mean is None:
        real_mean = kernel_mean(real, tile=tile, group=group)
    sums = torch.stack([_pairs(fake, None, tile, group), _pairs(real, fake, tile, group)])
    inside, across = all_reduce(sums, group=group).tolist()
    return float(real_mean + inside / (n * (n - 1)) - 2 * across / (m * n))


@torch.no_grad()
def kernel_mean(features: Tensor, *, tile: int = 500, group: Group = None) -> float:
    """The mean of the kernel over all pairs of different rows of all ranks' features: what kernel_distance needs of a set.

    Example:
        >>> kernel_mean(torch.tensor([[0.0], [1.0]]))
        1.0
    """
    count = settle("kernel_mean", tile_complaint(tile), features=features, group=group)["features"]
    if count < 2:
        raise ValueError(f"kernel_mean: features: {count} rows on all ranks together, pairs need at least 2")
    return float(all_reduce(_pairs(features, None, tile, group), group=group).item() / (count * (count - 1)))


def _pairs(a: Tensor, b: Tensor | None, tile: int, group: Group) -> Tensor:
    """The sum of the kernel over pairs of this rank's rows of `a` and all rows of `b`; of `a` and other rows of it, if None."""
    total = a.new_zeros((), dtype=torch.float64)
    for _, (block,) in Ring([a if b is None else b], group=group):
        for rows in tiles_of(a, tile):
            for columns in tiles_of(block, tile):
                total += _kernel(rows.double() @ columns.double().T, a.shape[1]).sum()
    if b is None:
        for rows in tiles_of(a, tile):
            total -= _kernel(rows.double().square().sum(1), a.shape[1]).sum()
    return total


def _kernel(products: Tensor, width: int) -> Tensor:
    base = products.div_(width).add_(1)
    return base * base * base

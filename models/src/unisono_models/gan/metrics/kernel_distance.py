"""The kernel distance between two sets of features: the squared maximum mean discrepancy (MMD²) of KID.

KID is by definition computed on the features of one Inception network, ours on those of the run's own feature extractor.
"""

import torch
from torch import Tensor

from unisono.collectives import Group, Ring, all_reduce
from unisono_models.gan.metrics.features import split_tiles, tile_problem, validate_features


@torch.no_grad()
def kernel_distance(
    real: Tensor, fake: Tensor, *, tile: int = 500, real_mean: float | None = None, group: Group = None
) -> float:
    """Return the unbiased MMD² with the kernel (x · y / width + 1)³ over all pairs of all ranks' features, in float64.

    All pairs count, not random subsets as in KID. The expected value for two samples of one distribution is 0, so the result
    may be negative. A rank holds one tile of kernel values and the features of two ranks at a time.

    real, fake: (n, width) on each rank, with any n.
    real_mean: the kernel_mean of `real`, if known.

    Raises: ValueError on all ranks if either has fewer than two rows over all ranks.

    Example:
        >>> real, fake = torch.tensor([[0.0], [1.0]]), torch.tensor([[0.0], [2.0]])
        >>> kernel_distance(real, fake)  # 1 + 1 - 2 (1 + 1 + 1 + 27) / 4
        -13.0
    """
    counts = validate_features("kernel_distance", tile_problem(tile), real=real, fake=fake, group=group)
    for name, count in counts.items():
        if count < 2:
            raise ValueError(f"kernel_distance: {name} has {count} rows on all ranks together; pairs need at least 2")
    m = counts["real"]
    n = counts["fake"]
    if real_mean is None:
        real_mean = kernel_mean(real, tile=tile, group=group)
    sums = torch.stack([_sum_of_kernel(fake, None, tile, group), _sum_of_kernel(real, fake, tile, group)])
    within_fake, between = all_reduce(sums, group=group).tolist()
    return float(real_mean + within_fake / (n * (n - 1)) - 2 * between / (m * n))


@torch.no_grad()
def kernel_mean(features: Tensor, *, tile: int = 500, group: Group = None) -> float:
    """Return the mean of the kernel over all pairs of different rows of all ranks' features.

    Example:
        >>> kernel_mean(torch.tensor([[0.0], [1.0]]))
        1.0
    """
    count = validate_features("kernel_mean", tile_problem(tile), features=features, group=group)["features"]
    if count < 2:
        raise ValueError(f"kernel_mean: features have {count} rows on all ranks together; pairs need at least 2")
    return float(all_reduce(_sum_of_kernel(features, None, tile, group), group=group).item() / (count * (count - 1)))


def _sum_of_kernel(a: Tensor, b: Tensor | None, tile: int, group: Group) -> Tensor:
    """Sum the kernel over this rank's rows of `a` and all ranks' rows of `b`. None: all other rows of `a`."""
    total = a.new_zeros((), dtype=torch.float64)
    for _, (block,) in Ring([a if b is None else b], group=group):
        for rows in split_tiles(a, tile):
            for columns in split_tiles(block, tile):
                total += _kernel(rows.double() @ columns.double().T, a.shape[1]).sum()
    if b is None:
        for rows in split_tiles(a, tile):
            total -= _kernel(rows.double().square().sum(1), a.shape[1]).sum()
    return total


def _kernel(products: Tensor, width: int) -> Tensor:
    base = products.div_(width).add_(1)
    return base * base * base

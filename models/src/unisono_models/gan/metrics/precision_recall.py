"""Precision and recall of generated images (Kynkäänniemi et al. 2019), density and coverage (Naeem et al. 2020)."""

import torch
from torch import Tensor

from unisono.collectives import Group, Ring, all_reduce
from unisono_models.gan.metrics.features import tile_problem, validate_features


@torch.no_grad()
def neighbour_radii(features: Tensor, *, k: int = 3, tile: int = 500, group: Group = None) -> Tensor:
    """Return the distance of each row of `features` (n, width) to its k-th nearest neighbour on all ranks: (n,).

    A row is not its own neighbour, but equal rows are neighbours. A rank holds one tile of distances and the features of two
    ranks at a time. Any split and any tile give the same bits.

    Raises: ValueError on all ranks if they have k rows or fewer together.

    Example:
        >>> neighbour_radii(torch.tensor([[0.0], [1.0], [5.0]]), k=1)
        tensor([1., 1., 4.])
    """
    problem = tile_problem(tile) or ("" if isinstance(k, int) and k > 0 else f"k={k!r} must be a positive number")
    count = validate_features("neighbour_radii", problem, features=features, group=group)["features"]
    if count <= k:
        raise ValueError(f"neighbour_radii: features have {count} rows on all ranks together; k={k} needs at least {k + 1}")
    nearest = features.new_full((len(features), k), torch.inf)
    ring = Ring([features], group=group)
    for rank, (block,) in ring:
        for start in range(0, len(features), tile):
            rows = features[start : start + tile]
            best = nearest[start : start + tile]
            for first in range(0, len(block), tile):
                distances = _distances(rows, block[first : first + tile])
                if rank == ring.ranks.rank and first == start:
                    distances.fill_diagonal_(torch.inf)  # a row is not its own neighbour
                best.copy_(torch.cat([best, distances], 1).topk(k, largest=False).values)
    return nearest.amax(1)


@torch.no_grad()
def precision_recall(
    real: Tensor,
    fake: Tensor,
    *,
    k: int = 3,
    tile: int = 500,
    real_radii: Tensor | None = None,
    group: Group = None,
) -> dict[str, float]:
    """Return "precision", "recall", "density" and "coverage" of the fakes, from features (n, width) on each rank.

    The ball around a row reaches to its k-th nearest neighbour of the same kind, real or fake. precision: fraction of the fakes
    that lie in the ball of a real image. recall: fraction of the real images that lie in the ball of a fake. density: mean
    number of real balls that a fake lies in, divided by k. coverage: fraction of the real balls that contain a fake. All of
    them depend on the numbers of images, so compare equal numbers only. Rows that are not finite lie in no ball.

    real_radii: this rank's neighbour_radii of `real`, if known.

    Raises: ValueError on all ranks if either has k rows or fewer over all ranks.

    Example:
        >>> real = torch.tensor([[0.0], [1.0], [2.0], [3.0]])
        >>> precision_recall(real, torch.tensor([[0.5], [0.6], [9.0]]), k=1)["coverage"]
        0.5
    """
    problem = tile_problem(tile)
    if real_radii is not None and real_radii.shape != real.shape[:1]:
        problem = problem or f"real_radii: expected shape ({len(real)},), got {tuple(real_radii.shape)}"
    counts = validate_features("precision_recall", problem, real=real, fake=fake, group=group)
    if real_radii is None:
        real_radii = neighbour_radii(real, k=k, tile=tile, group=group)
    fake_radii = neighbour_radii(fake, k=k, tile=tile, group=group)
    balls = torch.zeros(len(fake), dtype=torch.int64, device=fake.device)  # number of real balls that each fake lies in
    ring = Ring([real, real_radii], group=group)
    for _, (block, block_radii) in ring:
        # two flags for each real row of the block: it lies in the ball of a fake; its own ball contains a fake
        flags = torch.zeros(len(block), 2, dtype=torch.uint8, device=fake.device)
        real_tiles = zip(block.split(tile), block_radii.split(tile), flags.split(tile), strict=True)
        for real_rows, radii_of_real, flags_of_real in real_tiles:
            fake_tiles = zip(fake.split(tile), fake_radii.split(tile), balls.split(tile), strict=True)
            for fake_rows, radii_of_fake, balls_of_fake in fake_tiles:
                distances = _distances(fake_rows, real_rows)
                in_real_ball = distances <= radii_of_real
                in_fake_ball = distances <= radii_of_fake[:, None]
                balls_of_fake += in_real_ball.sum(1)
                flags_of_real |= torch.stack([in_fake_ball.any(0), in_real_ball.any(0)], 1)
        ring.add(flags, combine=torch.maximum)
    recalled, covered = ring.total().long().sum(0)
    totals = torch.stack([(balls > 0).sum(), balls.sum(), recalled, covered])
    precise, all_balls, recalled, covered = all_reduce(totals, group=group).tolist()
    return {
        "precision": precise / counts["fake"],
        "recall": recalled / counts["real"],
        "density": all_balls / (k * counts["fake"]),
        "coverage": covered / counts["real"],
    }


def _distances(a: Tensor, b: Tensor) -> Tensor:
    # A matrix product rounds a pair differently in a tile of another shape, and the edge of a ball is exactly at a neighbour.
    return torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist")

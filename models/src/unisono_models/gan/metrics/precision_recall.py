"""Precision and recall of generated pictures (Kynkäänniemi et al. 2019), density and coverage (Naeem et al. 2020)."""

from __future__ import annotations

import torch
from torch import Tensor

from unisono.collectives import Group, Ring, all_reduce
from unisono_models.gan.metrics.features import settle, tile_complaint


@torch.no_grad()
def neighbour_radii(features: Tensor, *, k: int = 3, tile: int = 500, group: Group = None) -> Tensor:
    """How far each row of this rank's `features` (n, width) is from its k-th nearest neighbour on all ranks: (n,).

    The row itself is none of its neighbours; others that are equal to it are. No more than a tile of distances is held, and no
    more than two ranks' features. The same bits for any split and tile.

    Raises: ValueError on all ranks if there are not more than k rows in all.

    Example:
        >>> neighbour_radii(torch.tensor([[0.0], [1.0], [5.0]]), k=1)
        tensor([1., 1., 4.])
    """
    problem = tile_complaint(tile) or ("" if isinstance(k, int) and k > 0 else f"k={k!r} must be a positive number")
    count = settle("neighbour_radii", problem, features=features, group=group)["features"]
    if count <= k:
        raise ValueError(f"neighbour_radii: features: {count} rows on all ranks together, the neighbour k={k} needs {k + 1}")
    nearest = features.new_full((len(features), k), torch.inf)
    ring = Ring([features], group=group)
    for rank, (block,) in ring:
        for start in range(0, len(features), tile):
            rows, best = features[start : start + tile], nearest[start : start + tile]
            for first in range(0, len(block), tile):
                found = _distances(rows, block[first : first + tile])
                if rank == ring.ranks.rank and first == start:
                    found.fill_diagonal_(torch.inf)
                best.copy_(torch.cat([best, found], 1).topk(k, largest=False).values)
    return nearest.amax(1)


@torch.no_grad()
def neighbour_metrics(
    real: Tensor,
    fake: Tensor,
    *,
    k: int = 3,
    tile: int = 500,
    real_radii: Tensor | None = None,
    group: Group = None,
) -> dict[str, float]:
    """Whether fakes lie among real pictures, and real pictures among fakes, by their features, (n, width) on each rank.

    A ball around each row reaches to its k-th nearest neighbour of its own kind. "precision": part of the fakes that are in
    the ball of any real one; "recall": part of the real ones that are in the ball of any fake; "density": how many real balls
    a fake is in, by k; "coverage": part of the real balls that hold a fake. They depend on the numbers of both, so compare
    like with like. `real_radii`: this rank's neighbour_radii of `real`, if known. Rows that are not finite are in no ball.

    Raises: ValueError on all ranks if there are not more than k rows in all of either.

    Example:
        >>> real = torch.tensor([[0.0], [1.0], [2.0], [3.0]])
        >>> neighbour_metrics(real, torch.tensor([[0.5], [0.6], [9.0]]), k=1)["coverage"]
        0.5
    """
    problem = tile_complaint(tile)
    if real_radii is not None and real_radii.shape != real.shape[:1]:
        problem = problem or f"real_radii: expected one for each of {len(real)} rows, got {tuple(real_radii.shape)}"
    counts = settle("neighbour_metrics", problem, real=real, fake=fake, group=group)
    if real_radii is None:
        real_radii = neighbour_radii(real, k=k, tile=tile, group=group)
    fake_radii = neighbour_radii(fake, k=k, tile=tile, group=group)
    balls = torch.zeros(len(fake), dtype=torch.int64, device=fake.device)  # of real ones, around each own fake
    ring = Ring([real, real_radii], group=group)
    for _, (block, reach) in ring:
        # whether each real one of the block is in a fake's ball, and whether it has a fake in its own
        met = torch.zeros(len(block), 2, dtype=torch.uint8, device=fake.device)
        for columns, reaches, into in zip(*(x.split(tile) for x in (block, reach, met)), strict=True):
            for rows, radii, inside in zip(*(x.split(tile) for x in (fake, fake_radii, balls)), strict=True):
                found = _distances(rows, columns)
                near = found <= reaches
                inside += near.sum(1)
                into |= torch.stack([(found <= radii[:, None]).any(0), near.any(0)], 1)
        ring.add(met, combine=torch.maximum)
    recalled, covered = ring.total().long().sum(0)
    totals = torch.stack([(balls > 0).sum(), balls.sum(), recalled, covered])
    precise, dense, recalled, covered = all_reduce(totals, group=group).tolist()
    return {
        "precision": precise / counts["fake"],
        "recall": recalled / counts["real"],
        "density": dense / (k * counts["fake"]),
        "coverage": covered / counts["real"],
    }


def _distances(a: Tensor, b: Tensor) -> Tensor:
    """Not by a product of matrices, which rounds a pair differently in a tile of another shape: balls end at a neighbour."""
    return torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist")

"""The training pictures that are nearest to generated ones: what was copied would be seen."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from unisono_models.gan.data.images import Images

_TILE = 1000  # pictures at a time


@torch.no_grad()
def find_nearest(
    pictures: Tensor, images: Images, *, describe: Callable[[Tensor], Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """For each of `pictures` (n, c, s, s): the place (n,) of the nearest of `images`, and its distance (n,).

    describe: pictures to features (m, d), between which the distance is Euclidean. None: the root mean square of pixels.

    Example:
        >>> images = Images(torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1))
        >>> find_nearest(torch.full((1, 1, 1, 1), 0.5), images)
        (tensor([1]), tensor([0.5000]))
    """
    describe = describe or _pixels
    wanted = describe(pictures)
    best, places = wanted.new_full((len(wanted),), torch.inf), torch.zeros(len(wanted), dtype=torch.int64)
    for tile in torch.arange(len(images)).split(_TILE):
        found = describe(images.floats(tile, dtype=pictures.dtype, device=pictures.device))
        nearest = torch.cdist(wanted, found).argmin(1)  # by products, which is fast, and inexact for what is very near
        distances = (wanted - found[nearest]).norm(dim=1)
        closer = distances < best
        best = torch.where(closer, distances, best)
        places = torch.where(closer.cpu(), tile[nearest.cpu()], places)
    return places, best.cpu()


def _pixels(pictures: Tensor) -> Tensor:
    flat: Tensor = pictures.flatten(1)
    return flat.div(flat.shape[1] ** 0.5)

"""What a reader hands over."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from unisono_models.gan.data.images import Images


@dataclass(frozen=True, eq=False)
class Found:
    """All pictures of a source that could be read, before they are split."""

    images: Images
    places: Tensor
    """int64, (n,): where each picture comes in the source; broken ones have left gaps."""
    total: int
    """Pictures in the source, with the broken ones."""
    test: Tensor | None = None
    """bool, (n,): those of the source's own test set. None: it has none."""
    notes: tuple[str, ...] = ()
    """Where it comes from, and what is odd about it."""

"""What a model is tested on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from unisono_models.clip.data.pairs import CaptionedPairs, Pairs


@dataclass(frozen=True)
class TestSet:
    """Pairs that were not trained on, and what can be asked of them."""

    __test__ = False  # pytest takes classes of such a name for its own

    pairs: CaptionedPairs
    """For text to image and image to text."""
    queries: Pairs | None = None
    """For image to image: other pictures of the same concepts, row by row those of `pairs`."""
    classes: tuple[str, ...] = ()
    """For zero-shot classification: names of classes."""
    class_of: Mapping[int, int] = field(default_factory=dict)
    """The class, a place in `classes`, of each concept."""

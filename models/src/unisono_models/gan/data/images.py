"""Pictures in memory, with what is known of each."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Images:
    """Pictures of one size, and what each is to show. Not to be written into.

    Example:
        >>> images = Images(torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1), torch.tensor([1, 0]), ("cat", "dog"))
        >>> images.floats(torch.tensor([1, 0])).flatten().tolist()
        [1.0, -1.0]
        >>> images.take(torch.tensor([1])).labels.tolist()
        [0]
    """

    pixels: Tensor
    """uint8, (n, channels, size, size)."""
    labels: Tensor | None = None
    """int64, (n,): places in `classes`. None: unlabelled."""
    classes: tuple[str, ...] = ()
    """Names of the classes; () if unlabelled."""
    vectors: Tensor | None = None
    """float32, (n, d): the condition of each picture, if it is a vector."""
    captions: tuple[str, ...] = ()
    """A text for each picture, empty where there is none; () if no picture has one."""

    def __post_init__(self) -> None:
        if self.pixels.dtype != torch.uint8 or self.pixels.dim() != 4 or self.pixels.shape[2] != self.pixels.shape[3]:
            raise ValueError(
                f"Images: pixels of {self.pixels.dtype} and shape {tuple(self.pixels.shape)}: must be uint8, (n, c, s, s)"
            )
        for name, value in (("labels", self.labels), ("vectors", self.vectors), ("captions", self.captions or None)):
            if value is not None and len(value) != len(self):
                raise ValueError(f"Images: {len(value)} {name} for {len(self)} pictures: must be one for each")

    def __len__(self) -> int:
        return len(self.pixels)

    @property
    def channels(self) -> int:
        return self.pixels.shape[1]

    @property
    def size(self) -> int:
        """Pixels a side."""
        return self.pixels.shape[2]

    def take(self, places: Tensor) -> Images:
        """The pictures at `places` (int64), in that order."""
        return replace(
            self,
            pixels=self.pixels[places],
            labels=None if self.labels is None else self.labels[places],
            vectors=None if self.vectors is None else self.vectors[places],
            captions=tuple(self.captions[place] for place in places.tolist()) if self.captions else (),
        )

    def floats(self, places: Tensor, *, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None) -> Tensor:
        """The pictures at `places` as (n, c, s, s) in [-1, 1], on `device`, or else where the pixels are."""
        return self.pixels[places].to(device or self.pixels.device).to(dtype) / 127.5 - 1


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
    families: tuple[str, ...] = ()
    """A name for each image. Images of one family are variants of each other: all are held out, or none. (): no families."""

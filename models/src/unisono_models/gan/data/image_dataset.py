"""Pictures in memory, with what is known of each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from unisono_models.gan.config import Condition
from unisono_models.training.order import SampleOrder
from unisono_models.training.randomness import key_of, normal
from unisono_models.training.ranks import Ranks


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


@dataclass(frozen=True, eq=False)
class Batch:
    """This rank's rows of the global batch of a step."""

    images: Tensor
    """(n, channels, size, size) between -1 and 1."""
    condition: Tensor | None
    """(n,) labels or (n, d) vectors: of the pictures, and of the fakes that are made in the same place."""
    ids: Tensor | None
    """(n,): the same number for the same condition."""
    noise: Tensor
    """(n, noise)"""
    sizes: tuple[int, ...]
    """Rows on every rank."""
    shift: int
    """How far off in the global batch the condition is taken from that does not match. At least 1, if there are two rows."""


@dataclass(frozen=True)
class Batches:
    """What rank `rank` of `size` gets in each step: slices of one global batch, whatever the number of ranks."""

    images: Images
    kind: Condition
    order: SampleOrder
    noise: int
    seed: int
    ranks: Ranks
    dtype: torch.dtype = torch.float32

    def at(self, step: int) -> Batch:
        """The share of `step`."""
        whole = self.order.at(step)
        shares = whole.tensor_split(self.ranks.size)
        sizes = tuple(len(share) for share in shares)
        mine, first = shares[self.ranks.rank], sum(sizes[: self.ranks.rank])
        places = torch.arange(first, first + len(mine), device=self.ranks.device)
        return Batch(
            images=self.images.floats(mine, dtype=self.dtype, device=self.ranks.device),
            condition=condition_of(self.images, mine, kind=self.kind, device=self.ranks.device, dtype=self.dtype),
            ids=None if self._ids is None else self._ids[mine].to(self.ranks.device),
            noise=normal(self.seed, "noise", step, places, (self.noise,)).to(self.dtype),
            sizes=sizes,
            shift=1 + key_of(self.seed, "matching", step) % max(1, len(whole) - 1),
        )

    @cached_property
    def _ids(self) -> Tensor | None:
        if self.kind == "none":
            return None
        if self.kind == "class" or self.images.vectors is None:
            return self.images.labels
        ids: Tensor = torch.unique(self.images.vectors, dim=0, return_inverse=True)[1]
        return ids


def condition_of(
    images: Images, places: Tensor, *, kind: Condition, device: torch.device, dtype: torch.dtype = torch.float32
) -> Tensor | None:
    """The condition of the pictures at `places`: labels, vectors or None. Raises: ValueError if there is none of that kind."""
    if kind == "none":
        return None
    held = images.labels if kind == "class" else images.vectors
    if held is None:
        raise ValueError(f"condition_of: kind={kind!r}, but the pictures have no {'labels' if kind == 'class' else 'vectors'}")
    return held[places.to(held.device)].to(device) if kind == "class" else held[places.to(held.device)].to(device, dtype)

"""The batch of each step: real images, conditions and noise, as a function of the seed, the step and the row."""

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from unisono_models.gan.config import AugmentConfig, Condition
from unisono_models.gan.data.augment import NUMBERS, mirror_images
from unisono_models.gan.data.images import ImageDataset
from unisono_models.training.distributed.launch import Ranks
from unisono_models.training.randomness import derive_seed, normal, uniform
from unisono_models.training.sampler import StepSampler
from unisono_models.training.to_device import to_device


@dataclass(frozen=True, eq=False)
class Batch:
    """This rank's rows of the global batch of one step."""

    images: Tensor
    """(n, channels, size, size) in [-1, 1]."""
    condition: Tensor | None
    """(n,) labels or (n, d) vectors. The real image and the fake in one row share their condition."""
    ids: Tensor | None
    """(n,): equal numbers for equal conditions."""
    noise: Tensor
    """(n, d)."""
    sizes: tuple[int, ...]
    """Number of rows on every rank."""
    shift: int
    """Distance in the global batch to the row whose condition serves as the mismatched one."""
    real_changes: Tensor | None = None
    """(n, d): the random numbers for `change_images` of the real images. None: they are shown as they are."""
    fake_changes: Tensor | None = None
    """The same for the fakes."""


@dataclass(frozen=True)
class BatchLoader:
    """Gives each rank its slice of one global batch per step. The global batch does not depend on the number of ranks."""

    images: ImageDataset
    condition: Condition
    sampler: StepSampler
    noise: int
    """Dimension of the noise."""
    seed: int
    ranks: Ranks
    dtype: torch.dtype = torch.float32
    augment: AugmentConfig = field(default_factory=AugmentConfig)

    def at(self, step: int) -> Batch:
        """Return this rank's rows of `step`."""
        device = self.ranks.device
        batch_indices = self.sampler.at(step)
        slices = batch_indices.tensor_split(self.ranks.world_size)
        sizes = tuple(len(rows) for rows in slices)
        indices = slices[self.ranks.rank]
        first = sum(sizes[: self.ranks.rank])
        rows = torch.arange(first, first + len(indices), device=device)
        images = self.images.floats(indices, dtype=self.dtype, device=device)
        if self.augment.mirror:
            draws = uniform(self.seed, "mirror", step, to_device(indices, device))
            images = mirror_images(images, draws < self.augment.mirror)
        changes: list[Tensor | None] = [None, None]
        if self.augment.shift or self.augment.colour:
            numbers = uniform(self.seed, "augment", step, rows, (2, NUMBERS)).to(self.dtype)
            changes = [*numbers.unbind(1)]
        return Batch(
            images=images,
            condition=self.images.condition(indices, kind=self.condition, device=device, dtype=self.dtype),
            ids=None if self._ids is None else to_device(self._ids[indices], device),
            noise=normal(self.seed, "noise", step, rows, (self.noise,)).to(self.dtype),
            sizes=sizes,
            shift=1 + derive_seed(self.seed, "matching", step) % max(1, len(batch_indices) - 1),
            real_changes=changes[0],
            fake_changes=changes[1],
        )

    @cached_property
    def _ids(self) -> Tensor | None:
        if self.condition == "none":
            return None
        if self.condition == "class" or self.images.vectors is None:
            return self.images.labels
        ids: Tensor = torch.unique(self.images.vectors, dim=0, return_inverse=True)[1]
        return ids

"""A rank's pairs of one step, as the learner takes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unisono_models.clip.augment import AugmentConfig, augment
from unisono_models.clip.data.pairs import PairBatch
from unisono_models.clip.features import PictureFeatures
from unisono_models.training.randomness import derive_seed


@dataclass(frozen=True)
class Batches:
    """Makes the batch of a step from what was read: augmented pictures, captions as the text tower takes them.

    `pictures`: features of pictures, if they are known beforehand. `views`: also make second views of the pictures. What a
    sample becomes depends on (seed, epoch, sample) alone.
    """

    read_text: Callable[[Sequence[str]], Tensor]
    pictures: PictureFeatures | None
    augmentation: AugmentConfig
    seed: int
    device: torch.device
    dtype: torch.dtype
    views: bool

    def make(self, pairs: PairBatch, *, step: int, epoch: int) -> dict[str, Any]:
        images, index = pairs.images.to(self.device, non_blocking=True), pairs.index.to(self.device, non_blocking=True)
        batch = {
            "images": self._view(images, index, epoch, first=True),
            "text": self.read_text(pairs.captions).to(self.device, non_blocking=True),
            "concepts": pairs.concepts.to(self.device, non_blocking=True),
            "index": index,
            "step": step,
            "seed": self.seed,
        }
        if self.views:
            batch["views"] = self._view(images, index, epoch, first=False)
        return batch

    def _view(self, images: Tensor, index: Tensor, epoch: int, *, first: bool) -> Tensor:
        if self.pictures is not None:
            return self.pictures(index, epoch if first else epoch + 1)
        seed = derive_seed(self.seed, "view", 0 if first else 1)
        return augment(images, seed=seed, epoch=epoch, index=index, config=self.augmentation).to(self.dtype)

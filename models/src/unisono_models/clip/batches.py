"""A rank's pairs of one step, as the learner takes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unisono_models.clip.augment import AugmentConfig, augment
from unisono_models.clip.data.pairs import PairBatch


@dataclass(frozen=True)
class Batches:
    """Makes the batch of a step from what was read: augmented pictures, captions as the text tower takes them.

    `views`: also make second views of the pictures. What a sample becomes depends on (seed, epoch, sample) alone.
    """

    read_text: Callable[[Sequence[str]], Tensor]
    augmentation: AugmentConfig
    seed: int
    device: torch.device
    dtype: torch.dtype
    views: bool

    def make(self, pairs: PairBatch, *, step: int, epoch: int) -> dict[str, Any]:
        images, index = pairs.images.to(self.device, non_blocking=True), pairs.index.to(self.device, non_blocking=True)
        batch = {
            "images": self._augmented(images, index, self.seed, epoch),
            "text": self.read_text(pairs.captions).to(self.device, non_blocking=True),
            "concepts": pairs.concepts.to(self.device, non_blocking=True),
            "index": index,
            "step": step,
            "seed": self.seed,
        }
        if self.views:
            batch["views"] = self._augmented(images, index, self.seed + 1, epoch)
        return batch

    def _augmented(self, images: Tensor, index: Tensor, seed: int, epoch: int) -> Tensor:
        return augment(images, seed=seed, epoch=epoch, index=index, config=self.augmentation).to(self.dtype)

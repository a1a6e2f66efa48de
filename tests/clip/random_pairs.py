"""Pairs without files: images of noise with captions of a few words, the same for every reader."""

import random
from dataclasses import dataclass

import numpy as np
import torch

from tests.clip.small_clip import CAPTIONS
from unisono_models.clip.data.pairs import PairBatch
from unisono_models.datasets.skip_report import SkippedSample

WORDS = sorted({word for text in CAPTIONS for word in text.split()})


@dataclass(frozen=True)
class RandomPairs:
    """`count` rows. If there are fewer `drawings`, their images come again with other captions.

    `broken`: rows that are skipped. `failing`: rows whose reading raises an error.
    """

    count: int
    seed: int = 0
    drawings: int = 1000
    broken: tuple[int, ...] = ()
    failing: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()

    def __len__(self):
        return self.count

    def read(self, indices, size):
        if any(row in self.failing for row in indices):
            raise OSError("the disk is gone")
        kept = [row for row in indices if row not in self.broken]
        images = torch.zeros(len(kept), 3, size, size, dtype=torch.uint8)
        for image, row in zip(images, kept, strict=True):
            image.random_(256, generator=torch.Generator().manual_seed(1000 * self.seed + row % self.drawings))
        skipped = tuple(SkippedSample(row % self.drawings, str(row), "broken image") for row in indices if row in self.broken)
        concepts, index = torch.from_numpy(self.concepts(kept)), torch.from_numpy(self.sample_ids(kept))
        return PairBatch(images, self.captions(kept), concepts, index, skipped)

    def sample_ids(self, indices):
        return np.array([row % self.drawings for row in indices], dtype=np.int64)

    def captions(self, indices):
        """Different captions of one to six words."""
        ends = [(WORDS[row % 12], WORDS[row // 12 % 12], WORDS[row // 144]) for row in indices]
        return [" ".join([*random.Random(row).choices(WORDS, k=row % 4), *end]) for row, end in zip(indices, ends, strict=True)]

    def concepts(self, indices):
        """Some pairs have the same concept."""
        return np.array([row % 1000 // 2 if row % 5 < 2 else row + 5000 for row in indices], dtype=np.int64)

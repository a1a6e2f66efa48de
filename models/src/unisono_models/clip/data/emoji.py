"""Emoji as pairs of picture and caption: three independent drawings of 3,953 concepts, and what they are called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from unisono_models.clip.data.pairs import PairBatch
from unisono_models.datasets.emoji.concepts import Concept, EmojiImage, list_captions, list_emoji
from unisono_models.datasets.emoji.images import load_emoji_images

Words = Literal["names", "names and aliases"]


@dataclass(frozen=True)
class EmojiPairs:
    """Some rows of the data set (see Pairs): each a drawing with one of its captions.

    `read` gives concepts that are those of `list_emoji`, and an index that is the drawing's place there: the same
    whatever the rows. Rows of one drawing in several languages therefore share the numbers that augment it.
    """

    rows: tuple[tuple[int, str], ...]
    """For every pair the number of its drawing in `list_emoji` and the caption."""
    cache: Path | None = None
    """Where the rendered drawings are kept. None: see `cache_directory`."""

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, indices: Sequence[int], size: int) -> PairBatch:
        """The pairs at `indices` of these rows, pictures of `size` pixels square on white."""
        rows = [self.rows[int(i)] for i in indices]
        numbers = torch.tensor([number for number, _ in rows], dtype=torch.int64)
        drawings = list_emoji()[1]
        concepts = torch.tensor([drawings[number].concept for number, _ in rows], dtype=torch.int64)
        pixels = load_emoji_images(size, cache=self.cache)
        return PairBatch(images=pixels[numbers], captions=[text for _, text in rows], concepts=concepts, index=numbers)

    def captions(self, indices: Sequence[int]) -> list[str]:
        return [self.rows[int(i)][1] for i in indices]

    def concepts(self, indices: Sequence[int]) -> NDArray[np.int64]:
        return np.array([self.concept(int(i)).id for i in indices], dtype=np.int64)

    @property
    def notes(self) -> tuple[str, ...]:
        return ()

    def concept(self, row: int) -> Concept:
        """What is drawn in a row."""
        concepts, drawings = list_emoji()
        return concepts[drawings[self.rows[row][0]].concept]

    def drawing(self, row: int) -> EmojiImage:
        """Who drew it."""
        return list_emoji()[1][self.rows[row][0]]

    def where(self, keep: Callable[[Concept, EmojiImage], bool]) -> EmojiPairs:
        """The rows that `keep` says yes to.

        Example:
            emoji_pairs().where(lambda concept, drawing: drawing.vendor == "noto" and not concept.toned)
        """
        kept = tuple(self.rows[row] for row in range(len(self)) if keep(self.concept(row), self.drawing(row)))
        return replace(self, rows=kept)


def emoji_pairs(*, languages: Sequence[str] = ("en",), words: Words = "names", cache: Path | None = None) -> EmojiPairs:
    """All drawings with their captions: 10,586 pairs in English, each drawing once for every language that names it.

    languages: of the `emoji` package: ar de en es fa fr id it ja ko pt ru tr zh.
    words: "names and aliases" has a row for every other English name as well ("thumbs up", "+1", "yes").
    """
    concepts, drawings = list_emoji()
    if not languages:
        raise ValueError("emoji_pairs: languages=() is empty, and there would be no captions")
    captions = [
        tuple(text for language in languages for text in list_captions(c, language=language, aliases=words != "names"))
        for c in concepts
    ]
    return EmojiPairs(tuple((n, text) for n, drawing in enumerate(drawings) for text in captions[drawing.concept]), cache)

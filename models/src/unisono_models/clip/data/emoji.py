"""Emoji as pairs of picture and caption: three independent drawings of 3,953 concepts, and what they are called."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from unisono_models.clip.data.pairs import PairBatch
from unisono_models.datasets.emoji.concepts import VENDORS, Concept, EmojiImage, Vendor, list_captions, list_emoji
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


HeldOut = Literal["vendor", "drawing"]


@dataclass(frozen=True)
class TestSet:
    """Pictures that were not trained on."""

    pairs: EmojiPairs
    """For text to image and image to text: one row for each concept, with its English name."""
    queries: EmojiPairs
    """For image to image: other drawings of the same concepts, row by row those of `pairs`."""


@dataclass(frozen=True)
class Splits:
    """A training set and the test sets that go with it."""

    train: EmojiPairs
    tests: dict[str, TestSet]


def emoji_splits(
    held_out: HeldOut = "vendor", *, languages: Sequence[str] = ("en",), words: Words = "names", cache: Path | None = None
) -> Splits:
    """The data of a run. A tenth of the families (see Concept.family) is never trained on, whatever is held out besides.

    held_out="vendor": trained on all of Noto and Twemoji.
        tests["vendor"]: OpenMoji's drawings of known concepts without skin tone; queries by Noto. 1,632 concepts.
    held_out="drawing": all three styles are trained on, but one drawing, chosen by hash, of each concept that has three is not.
        tests["drawing"]: these drawings of concepts without skin tone; queries are drawings trained on. 1,632 concepts.
    Both: tests["concept"]: Noto's drawings of the concepts that were never trained on; queries by OpenMoji. 297 concepts, 177
        of them without skin tone.

    languages, words: of the captions trained on, as in `emoji_pairs`, without aliases that are the name of a concept that is
    never trained on ("cat", of the cat face). Tests always are in English, by name.
    """
    if held_out not in ("vendor", "drawing"):
        raise ValueError(f"emoji_splits: held_out={held_out!r} is neither 'vendor' nor 'drawing'")
    hidden = _hidden_vendor if held_out == "drawing" else _last_vendor
    complete, drawn_by_noto = {c for c, count in _counts().items() if count == len(VENDORS)}, _ids("noto")
    names = emoji_pairs(cache=cache)

    def is_trained(concept: Concept, drawing: EmojiImage) -> bool:
        if is_unseen(concept) or (held_out == "vendor" and drawing.vendor == "openmoji"):
            return False
        return held_out == "vendor" or concept.id not in complete or drawing.vendor != hidden(concept)

    def is_tested(concept: Concept, _: EmojiImage) -> bool:
        return concept.id in complete and not concept.toned and not is_unseen(concept)

    known = names.where(is_tested)
    unseen = names.where(lambda concept, _: is_unseen(concept) and concept.id in drawn_by_noto)
    return Splits(
        train=_without_unseen_names(emoji_pairs(languages=languages, words=words, cache=cache).where(is_trained)),
        tests={
            held_out: TestSet(
                pairs=known.where(lambda concept, drawing: drawing.vendor == hidden(concept)),
                queries=known.where(lambda concept, drawing: drawing.vendor == _shown_vendor(hidden(concept))),
            ),
            "concept": TestSet(
                pairs=unseen.where(lambda _, drawing: drawing.vendor == "noto"),
                queries=unseen.where(lambda _, drawing: drawing.vendor == "openmoji"),
            ),
        },
    )


def is_unseen(concept: Concept) -> bool:
    """Whether the concept's family is one of the tenth that is never trained on."""
    # This salt was chosen, before anything was trained, for sizes within one of those of the figures to beat: 296 and 1,633.
    return _hash("unseen 144", concept.family) % 10 == 0


def _without_unseen_names(pairs: EmojiPairs) -> EmojiPairs:
    """Less the rows whose caption is the name of an unseen concept: a test asks for that one by this name."""
    names = {concept.name.casefold() for concept in list_emoji()[0] if is_unseen(concept)}
    return replace(pairs, rows=tuple(row for row in pairs.rows if row[1].casefold() not in names))


def _hidden_vendor(concept: Concept) -> Vendor:
    return VENDORS[_hash("hidden vendor", concept.emoji) % len(VENDORS)]


def _last_vendor(_: Concept) -> Vendor:
    return "openmoji"


def _shown_vendor(hidden: Vendor) -> Vendor:
    return next(vendor for vendor in VENDORS if vendor != hidden)


def _counts() -> dict[int, int]:
    """For each concept how many vendors drew it."""
    counts: dict[int, int] = {}
    for drawing in list_emoji()[1]:
        counts[drawing.concept] = counts.get(drawing.concept, 0) + 1
    return counts


def _ids(vendor: Vendor) -> set[int]:
    return {drawing.concept for drawing in list_emoji()[1] if drawing.vendor == vendor}


def _hash(salt: str, text: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{salt}/{text}".encode()).digest()[:8], "little")

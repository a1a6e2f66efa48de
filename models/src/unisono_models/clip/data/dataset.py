"""What a model is tested on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import overload

from unisono_models.clip.config import DataConfig
from unisono_models.clip.data.emoji import emoji_splits
from unisono_models.clip.data.files import open_pairs, split_pairs
from unisono_models.clip.data.pairs import CaptionedPairs, Pairs
from unisono_models.datasets.emoji.concepts import ARTISTS, list_emoji
from unisono_models.datasets.emoji.groups import GROUPS
from unisono_models.datasets.emoji.images import load_emoji_images
from unisono_models.training.distributed.launch import Ranks
from unisono_models.training.distributed.object_collectives import raise_together


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


CAPTIONS = 200_000  # as many are enough to train a tokenizer on


@dataclass(frozen=True)
class Source:
    """What there is to learn from and to be tested on."""

    train: Pairs
    captions: Sequence[str]
    """Of what is trained on, or of some of it. Users' data is read for them only by ranks that look: see SpreadCaptions."""
    complete: bool
    """Whether `captions` are all that training will meet."""
    tests: dict[str, TestSet]
    weights: Sequence[float] | None = None
    """How often each pair of `train` comes. None: alike."""
    notes: tuple[str, ...] = ()
    """Licences and damages, for the report."""


class SpreadCaptions(Sequence[str]):
    """The captions of at most `most` of the pairs, evenly spread: data often comes sorted, and its first pairs are alike.

    They are read when one is first asked for, and kept. Of all ranks only the one that trains a tokenizer has a use for them,
    unless the text tower is frozen; and in a run that has its tokenizer none.
    """

    def __init__(self, pairs: CaptionedPairs, most: int) -> None:
        self._pairs, self._count = pairs, min(len(pairs), most)

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, place: int) -> str: ...
    @overload
    def __getitem__(self, place: slice) -> list[str]: ...
    def __getitem__(self, place: int | slice) -> str | list[str]:
        return self._texts[place]

    @cached_property
    def _texts(self) -> list[str]:
        return self._pairs.captions([len(self._pairs) * place // self._count for place in range(self._count)])


def open_source(config: DataConfig, *, size: int, seed: int, ranks: Ranks) -> Source:
    """Open the data on all ranks together. Emoji are rendered by one rank of each host, once, and kept in the user's cache."""
    if config.source == "emoji":
        return _open_emoji(config, size, ranks)
    pairs = open_pairs(config.source, image=config.image, caption=config.caption, concept=config.concept)
    train, held_out = split_pairs(pairs, config.held_out, seed)
    captions = SpreadCaptions(train, CAPTIONS)
    return Source(train, captions, len(captions) == len(train), {"held_out": TestSet(held_out)}, notes=train.notes)


def _open_emoji(config: DataConfig, size: int, ranks: Ranks) -> Source:
    with raise_together("open_source"):
        if ranks.local_rank == 0:
            load_emoji_images(size)
    with raise_together("open_source"):
        splits = emoji_splits(config.split, languages=config.languages, words=config.words)
        load_emoji_images(size)
    classes = {concept.id: GROUPS.index(concept.group) for concept in list_emoji()[0]}
    tests = {name: TestSet(test.pairs, test.queries, GROUPS, classes) for name, test in splits.tests.items()}
    captions = [caption for _, caption in splits.train.rows]
    weights = None
    if config.toned < 1:
        weights = [config.toned if splits.train.concept(row).toned else 1.0 for row in range(len(splits.train))]
    notes = tuple(f"{art.name}, {art.licence}, {art.source}" for art in ARTISTS.values())
    return Source(splits.train, captions, True, tests, weights, notes)

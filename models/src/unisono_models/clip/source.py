"""The data of a run, as the config says: what is trained on, all captions of it, and the tests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from unisono_models.clip.config import DataConfig
from unisono_models.clip.data.emoji_concepts import ART, list_emoji
from unisono_models.clip.data.emoji_drawings import load_drawings
from unisono_models.clip.data.emoji_groups import GROUPS
from unisono_models.clip.data.emoji_splits import emoji_splits
from unisono_models.clip.data.pairs import Pairs, TestSet
from unisono_models.training.ranks import Ranks
from unisono_models.training.talk import together


@dataclass(frozen=True)
class Source:
    """What there is to learn from and to be tested on. `captions`: those of `train`. `notes`: licences, for the report."""

    train: Pairs
    captions: Iterable[str]
    tests: dict[str, TestSet]
    notes: tuple[str, ...] = ()

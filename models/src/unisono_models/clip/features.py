"""Features of a frozen text tower: computed once, before training, and looked up from then on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from unisono.collectives import all_gather
from unisono_models.clip.evaluate import prompts_for
from unisono_models.clip.model import Clip
from unisono_models.clip.source import Source
from unisono_models.training.ranks import Ranks

ROWS = 64  # captions in a forward. Fixed, and whole ones go to ranks: how many ranks there are changes no bit of a feature


def known_captions(source: Source) -> list[str]:
    """All captions that a run will meet: those it trains on, those of its tests, and the prompts of zero-shot classes."""
    tested = [text for test in source.tests.values() for text in test.pairs.captions(range(len(test.pairs)))]
    return [*source.captions, *tested, *(text for test in source.tests.values() for text in prompts_for(test.classes))]


class CaptionFeatures:
    """The trunk's features of known captions, as a function: captions to what the text tower takes.

    The ranks share the work. Captions that were not known before are encoded when they are asked for, by the rank that asks.
    """

    def __init__(self, clip: Clip, captions: Iterable[str], ranks: Ranks) -> None:
        self.clip, self.device = clip, ranks.device
        known = sorted(set(captions), key=lambda text: (len(text), text))  # alike in length: little padding
        parts = [known[start : start + ROWS] for start in range(0, len(known), ROWS)]
        width = clip.text.features
        mine = [self._encode(part) for part in parts[ranks.rank :: ranks.size]]
        gathered = all_gather(torch.cat(mine) if mine else self._encode([]).view(0, width))
        order = [text for rank in range(ranks.size) for part in parts[rank :: ranks.size] for text in part]
        self.places = {text: place for place, text in enumerate(order)}
        self.table = gathered

    def __call__(self, captions: Sequence[str]) -> Tensor:
        unknown = [text for text in captions if text not in self.places]
        if unknown:
            return self._encode(captions)
        return self.table[torch.tensor([self.places[text] for text in captions], dtype=torch.int64, device=self.device)]

    @torch.no_grad()
    def _encode(self, captions: Sequence[str]) -> Tensor:
        was_training = self.clip.training
        self.clip.eval()
        found = self.clip.text.encode(self.clip.tokenizer(captions).to(self.device))
        self.clip.train(was_training)
        return found

"""Features of frozen towers: computed once, before training, by all ranks together, and looked up from then on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from unisono.collectives import all_gather
from unisono_models.clip.data.augment import AugmentConfig, augment
from unisono_models.clip.data.dataset import Source
from unisono_models.clip.data.pairs import Pairs
from unisono_models.clip.evaluate import prompts_for
from unisono_models.clip.model import Clip
from unisono_models.clip.model.towers import ImageTower, TextTower
from unisono_models.training.distributed.launch import Ranks
from unisono_models.training.distributed.object_collectives import raise_together
from unisono_models.training.distributed.watchdog import Watchdog
from unisono_models.training.run.log import show_progress

ROWS = 64  # in a forward. Fixed, and whole ones go to ranks: how many ranks there are changes no bit of a feature


def tested_captions(source: Source) -> list[str]:
    """The captions of a run's tests, and the prompts of their zero-shot classes."""
    tests = source.tests.values()
    tested = [text for test in tests for text in test.pairs.captions(range(len(test.pairs)))]
    return [*tested, *(text for test in tests for text in prompts_for(test.classes))]


class CaptionFeatures:
    """The text trunk's features of known captions, as a function: captions to what the text tower takes.

    Captions that are not known are encoded when they are asked for, by the rank that asks. `trained`: those to learn from, by
    which features are standardized. `others`: to be known besides.
    """

    def __init__(self, clip: Clip, trained: Sequence[str], others: Sequence[str], ranks: Ranks, heartbeat: Watchdog) -> None:
        self.clip, self.device = clip, ranks.device
        known = sorted({*trained, *others}, key=lambda text: (len(text), text))  # alike in length: little padding
        self.places = {text: place for place, text in enumerate(known)}

        def encode(part: int) -> tuple[Tensor, Tensor]:
            places = torch.arange(part * ROWS, min((part + 1) * ROWS, len(known)), device=ranks.device)
            return self._encode([known[place] for place in places.tolist()]), places

        features, places = _encode_together("captions", -(-len(known) // ROWS), encode, clip.text, ranks, heartbeat)
        self.table = features[places.argsort()]
        clip.text.standardize.fit(self(sorted(set(trained))))

    def __call__(self, captions: Sequence[str]) -> Tensor:
        places = [self.places.get(text, -1) for text in captions]
        if -1 in places:
            return self._encode(captions)
        return self.table[torch.tensor(places, dtype=torch.int64, device=self.device)]

    @torch.no_grad()
    def _encode(self, captions: Sequence[str]) -> Tensor:
        return self.clip.text.encode(self.clip.tokenizer(captions).to(self.device))


class PictureFeatures:
    """The image trunk's features of `image.views` views of each picture of `pairs`, as a function.

    View 0 is the picture as it is, the others are augmented. An epoch takes one view of a picture, the next epoch the next.
    """

    def __init__(
        self, clip: Clip, pairs: Pairs, augmentation: AugmentConfig, seed: int, ranks: Ranks, heartbeat: Watchdog
    ) -> None:
        size, self.views = clip.config.image.size, clip.config.image.views
        dtype = next(clip.parameters()).dtype

        def encode(place: int) -> tuple[Tensor, Tensor]:
            view, part = divmod(place, parts)
            batch = pairs.read(range(part * ROWS, min((part + 1) * ROWS, len(pairs))), size)
            images, index = batch.images.to(ranks.device), batch.index.to(ranks.device)
            if view:
                pictures = augment(images, seed=seed, epoch=view, index=index, config=augmentation)
            else:
                pictures = images.float() / 255
            return clip.image.encode(pictures.to(dtype)), index * self.views + view

        parts = -(-len(pairs) // ROWS)
        features, keys = _encode_together("pictures", parts * self.views, encode, clip.image, ranks, heartbeat)
        self.keys, order = keys.sort(stable=True)
        self.table = features[order]
        clip.image.standardize.fit(self.table)

    def __call__(self, index: Tensor, epoch: int) -> Tensor:
        """Features of the pictures of these samples, (n, features), for what the image tower takes."""
        keys = index * self.views + epoch % self.views
        places = torch.searchsorted(self.keys, keys).clamp(max=len(self.keys) - 1)
        if not torch.equal(self.keys[places], keys):
            absent = int(index[self.keys[places] != keys][0])
            raise ValueError(f"features of pictures: sample {absent} has none: it could not be read when they were computed")
        return self.table[places]


@torch.no_grad()
def _encode_together(
    what: str,
    parts: int,
    encode: Callable[[int], tuple[Tensor, Tensor]],
    tower: ImageTower | TextTower,
    ranks: Ranks,
    heartbeat: Watchdog,
) -> tuple[Tensor, Tensor]:
    """What `encode` gives for each of `parts` parts, features and keys, on every rank, in the order of the parts.

    Each rank encodes some of them.
    """
    mine = range(ranks.rank, parts, ranks.size)
    with raise_together(f"features of {what}"):
        found = []
        for part in show_progress(mine, f"features of {what}, {ROWS} at a time", aloud=ranks.first):
            found.append(encode(part))
            heartbeat.beat()
    none = torch.zeros(0, tower.features, dtype=next(tower.parameters()).dtype, device=ranks.device)
    features = all_gather(torch.cat([none, *(x for x, _ in found)]))
    # a key may come twice, in parts of other sizes, with other bits: which is the first is not to depend on the ranks
    places = [torch.stack([keys, torch.full_like(keys, part)]) for part, (_, keys) in zip(mine, found, strict=True)]
    keys, part_of = all_gather(torch.cat([torch.zeros(2, 0, dtype=torch.int64, device=ranks.device), *places], 1), 1)
    order = part_of.argsort(stable=True)
    return features[order], keys[order]

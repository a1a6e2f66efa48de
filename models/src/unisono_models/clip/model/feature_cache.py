"""Features of frozen towers: all ranks compute them once, before training, and each step looks them up."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from unisono.collectives import all_gather
from unisono_models.clip.config import AugmentConfig
from unisono_models.clip.data.augment import augment
from unisono_models.clip.data.pairs import CaptionedPairs, Pairs, PairsWithoutImages, SubsetPairs
from unisono_models.clip.model.clip import Clip
from unisono_models.clip.model.towers import ImageTower, TextTower
from unisono_models.datasets.skip_report import SkippedSample, SkipReport
from unisono_models.training.distributed.launch import Ranks
from unisono_models.training.distributed.object_collectives import all_gather_object, raise_together
from unisono_models.training.distributed.watchdog import Watchdog
from unisono_models.training.errors import UserError
from unisono_models.training.run.log import show_progress

ROWS = 64  # rows of a forward. Fixed, and ranks take whole parts: the number of ranks changes no bit of a feature


class CaptionFeatures:
    """The text trunk's features of known captions. Calling it maps captions to what the text tower takes.

    The rank that is called with an unknown caption encodes it alone.
    """

    def __init__(self, clip: Clip, trained: Sequence[str], others: Sequence[str], ranks: Ranks, watchdog: Watchdog) -> None:
        """`trained`: the captions to train on; the tower standardizes features by them. `others`: more captions to know."""
        self.clip, self.device = clip, ranks.device
        known = sorted({*trained, *others}, key=lambda text: (len(text), text))  # similar lengths need little padding
        self.rows = {text: row for row, text in enumerate(known)}

        def encode(part: int) -> tuple[Tensor, Tensor]:
            rows = torch.arange(part * ROWS, min((part + 1) * ROWS, len(known)), device=ranks.device)
            return self._encode([known[row] for row in rows.tolist()]), rows

        features, rows = _encode_on_all_ranks("captions", -(-len(known) // ROWS), encode, clip.text, ranks, watchdog)
        self.table = features[rows.argsort()]
        clip.text.standardize.fit(self(sorted(set(trained))))

    def __call__(self, captions: Sequence[str]) -> Tensor:
        rows = [self.rows.get(text, -1) for text in captions]
        if -1 in rows:
            return self._encode(captions)
        return self.table[torch.tensor(rows, dtype=torch.int64, device=self.device)]

    @torch.no_grad()
    def _encode(self, captions: Sequence[str]) -> Tensor:
        return self.clip.text.encode(self.clip.tokenizer(captions).to(self.device))


class ImageFeatures:
    """The image trunk's features of `image.views` views of each image. Calling it maps samples to what the tower takes.

    View 0 is the image itself, the others are augmented. Each epoch uses the next view of an image.
    """

    def __init__(
        self, clip: Clip, pairs: Pairs, augmentation: AugmentConfig, seed: int, ranks: Ranks, watchdog: Watchdog
    ) -> None:
        size, self.views = clip.config.image.size, clip.config.image.views
        dtype = next(clip.parameters()).dtype
        broken: list[SkippedSample] = []

        def encode(part: int) -> tuple[Tensor, Tensor]:
            batch = pairs.read(range(part * ROWS, min((part + 1) * ROWS, len(pairs))), size)
            broken.extend(batch.skipped)
            images, index = batch.images.to(ranks.device), batch.index.to(ranks.device)
            features = []
            for view in range(self.views):  # one view at a time, to save memory
                if view:
                    inputs = augment(images, seed=seed, epoch=view, index=index, config=augmentation)
                else:
                    inputs = images.float() / 255
                features.append(clip.image.encode(inputs.to(dtype)))
                watchdog.beat()
            return torch.cat(features), torch.cat([index * self.views + view for view in range(self.views)])

        features, keys = _encode_on_all_ranks("images", -(-len(pairs) // ROWS), encode, clip.image, ranks, watchdog)
        self.keys, order = keys.sort(stable=True)
        self.table = features[order]
        gathered = all_gather_object([[skip.index, skip.name, skip.reason, skip.error] for skip in broken])
        self.broken = {fields[0]: SkippedSample(*fields) for rank in gathered for fields in rank}
        """The samples without features, by index, because they could not be read."""
        self.skipped = SkipReport(rows=len(pairs))
        """The same, for reports."""
        if ranks.first:
            self.skipped.count(len(pairs), list(self.broken.values()))
        if not len(self.keys):
            example = next(iter(self.broken.values()))
            raise UserError(
                f"--data.source: none of {len(pairs):,} pairs can be read, such as {example.name}: {example.reason}"
            )
        clip.image.standardize.fit(self.table)

    def __call__(self, index: Tensor, epoch: int) -> Tensor:
        """Look up the features of these samples in this epoch, (n, features)."""
        keys = index * self.views + epoch % self.views
        rows = torch.searchsorted(self.keys, keys).clamp(max=len(self.keys) - 1)
        if not torch.equal(self.keys[rows], keys):
            absent = int(index[self.keys[rows] != keys][0])
            raise ValueError(f"ImageFeatures: sample {absent} has no features: it could not be read when they were computed")
        return self.table[rows]

    def without_images(self, pairs: CaptionedPairs) -> CaptionedPairs:
        """Return the same pairs for training on these features: no image of them is read or decoded again."""
        if isinstance(pairs, SubsetPairs):  # inside it, so that workers are not sent the indices of the subset
            return SubsetPairs(PairsWithoutImages(pairs.dataset, self.broken), pairs.indices)
        return PairsWithoutImages(pairs, self.broken)


@torch.no_grad()
def _encode_on_all_ranks(
    what: str,
    parts: int,
    encode: Callable[[int], tuple[Tensor, Tensor]],
    tower: ImageTower | TextTower,
    ranks: Ranks,
    watchdog: Watchdog,
) -> tuple[Tensor, Tensor]:
    """Call `encode` for each of `parts` parts on some rank; gather the features and keys it returns, in the order of parts."""
    mine = range(ranks.rank, parts, ranks.world_size)
    with raise_together(f"features of {what}"):
        encoded = []
        for part in show_progress(mine, f"features of {what}, {ROWS} at a time", aloud=ranks.first):
            encoded.append(encode(part))
            watchdog.beat()
    empty = torch.zeros(0, tower.features, dtype=next(tower.parameters()).dtype, device=ranks.device)
    features = all_gather(torch.cat([empty, *(x for x, _ in encoded)]))
    # A key may come twice, in parts of different sizes and so with different bits. Which one is first must not depend on the
    # number of ranks.
    numbered = [torch.stack([keys, torch.full_like(keys, part)]) for part, (_, keys) in zip(mine, encoded, strict=True)]
    keys, part_of = all_gather(torch.cat([torch.zeros(2, 0, dtype=torch.int64, device=ranks.device), *numbered], 1), 1)
    order = part_of.argsort(stable=True)
    return features[order], keys[order]

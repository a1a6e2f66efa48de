"""How well a model finds: retrieval both ways, pictures by pictures, and zero-shot classification; distributed, in tiles."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unisono.collectives import all_gather, global_mean
from unisono.contrastive import retrieval_metrics
from unisono_models.clip.data.dataset import TestSet
from unisono_models.clip.data.pairs import Pairs
from unisono_models.training.distributed.launch import Ranks
from unisono_models.training.distributed.watchdog import Watchdog

TEMPLATES = ("{}", "an emoji of {}", "a drawing of {}", "something of the kind {}")


@dataclass(frozen=True)
class Encoder:
    """Features of unit length from a model that may be sharded: all ranks ask at once, each for its share.

    `model`: takes a batch and "images" or "text" as Learner does. `read_text`: captions to what the text tower takes.
    """

    model: nn.Module
    read_text: Callable[[Sequence[str]], Tensor]
    ranks: Ranks
    heartbeat: Watchdog
    size: int
    dtype: torch.dtype = torch.float32
    rows: int = 256

    def pairs(self, pairs: Pairs) -> tuple[Tensor, Tensor, Tensor]:
        """Of this rank's share: features of the pictures, features of the captions, and concepts."""
        images, texts, concepts = [], [], []
        for share in self._shares(len(pairs)):
            batch = pairs.read(share, self.size)
            images.append(self._encode_pictures(batch.images))
            texts.append(self._encode("text", self.read_text(batch.captions)))
            concepts.append(batch.concepts)
        return torch.cat(images), torch.cat(texts), torch.cat(concepts).to(self.ranks.device)

    @torch.no_grad()
    def all_pictures(self, pairs: Pairs) -> Tensor:
        """Features of all pictures, in order, on every rank. None may be broken."""
        self.model.eval()
        parts = (pairs.read(share, self.size).images for share in self._shares(len(pairs)))
        return all_gather(torch.cat([self._encode_pictures(images) for images in parts]))

    def captions(self, captions: Sequence[str]) -> Tensor:
        """Features of all captions, on every rank."""
        shares = self._shares(len(captions))
        return all_gather(torch.cat([self._encode("text", self.read_text([captions[i] for i in share])) for share in shares]))

    def _shares(self, count: int) -> list[list[int]]:
        """This rank's rows, in as many parts on every rank: a sharded model communicates in each forward."""
        mine = torch.arange(count).tensor_split(self.ranks.size)[self.ranks.rank]
        largest = -(-count // self.ranks.size)
        return [part.tolist() for part in mine.tensor_split(max(1, -(-largest // self.rows)))]

    def _encode_pictures(self, images: Tensor) -> Tensor:
        return self._encode("images", images.to(self.ranks.device, self.dtype) / 255)

    def _encode(self, part: str, rows: Tensor) -> Tensor:
        self.heartbeat.beat()
        rows = rows.to(self.ranks.device)
        index = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
        features: Tensor = self.model({part: rows, "index": index, "step": 0, "seed": 0}, part)
        return features


def prompts_for(classes: Sequence[str]) -> list[str]:
    """What a picture of each class might be called: the same number of prompts for each, one class after the other."""
    return [template.format(label) for label in classes for template in TEMPLATES]


@torch.no_grad()
def evaluate(encoder: Encoder, tests: Mapping[str, TestSet]) -> dict[str, float]:
    """The figures of each test, by "test/task/figure": the same on every rank, and for any number of ranks.

    Tasks: text_to_image, image_to_text, image_to_image where there are queries, zero_shot where there are classes.
    """
    encoder.model.eval()
    figures: dict[str, float] = {}
    for name, test in tests.items():
        images, texts, concepts = encoder.pairs(test.pairs)
        found = retrieval_metrics(texts, images, ids=concepts)
        for side, task in (("x_to_y", "text_to_image"), ("y_to_x", "image_to_text")):
            figures |= {f"{name}/{task}/{key.partition('/')[2]}": v for key, v in found.items() if key.startswith(side)}
        if test.queries is not None:
            queries = encoder.pairs(test.queries)[0]
            figures |= _one_way(f"{name}/image_to_image", retrieval_metrics(queries, images, ids=concepts))
        if test.classes:
            classes = F.normalize(
                encoder.captions(prompts_for(test.classes)).unflatten(0, (len(test.classes), -1)).mean(1), dim=1
            )
            truth = torch.tensor([test.class_of[c] for c in concepts.tolist()], device=images.device)
            right = ((images @ classes.T).argmax(1) == truth).to(images.dtype)
            figures[f"{name}/zero_shot/accuracy"] = float(global_mean(right))
        figures[f"{name}/rows"] = found["rows"]
    return figures


@torch.no_grad()
def pixel_floor(tests: Mapping[str, TestSet], ranks: Ranks, *, size: int) -> dict[str, float]:
    """Image to image by the pixels themselves, of pictures of `size` brought down to 32: what a model must beat."""
    figures: dict[str, float] = {}
    for name, test in tests.items():
        if test.queries is None:
            continue
        mine = torch.arange(len(test.pairs)).tensor_split(ranks.size)[ranks.rank].tolist()
        batches = [pairs.read(mine, size) for pairs in (test.queries, test.pairs)]
        small = (F.adaptive_avg_pool2d(batch.images.float(), min(size, 32)) for batch in batches)
        x, y = (_centred(images.flatten(1)) for images in small)
        figures |= _one_way(f"{name}/image_to_image_by_pixels", retrieval_metrics(x, y, ids=batches[0].concepts))
    return figures


def _centred(pixels: Tensor) -> Tensor:
    return F.normalize(pixels - pixels.mean(1, keepdim=True), dim=1)  # correlation: the best of the plain measures tried


def _one_way(name: str, found: Mapping[str, float]) -> dict[str, float]:
    return {f"{name}/{key.partition('/')[2]}": v for key, v in found.items() if key.startswith("x_to_y")}

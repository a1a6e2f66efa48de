"""Evaluation: retrieval in both directions, image to image, and zero-shot classification, on all ranks together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unisono.collectives import all_gather, global_mean
from unisono.contrastive import retrieval_metrics
from unisono_models.clip.data.dataset import RetrievalTest
from unisono_models.clip.data.pairs import Pairs
from unisono_models.training.distributed.launch import Ranks, shard_chunks, shard_range
from unisono_models.training.distributed.watchdog import Watchdog

TEMPLATES = ("{}", "an emoji of {}", "a drawing of {}", "something of the kind {}")


@dataclass(frozen=True)
class Encoder:
    """Encodes images and captions to unit features with a model that may be sharded. All ranks call it together."""

    model: nn.Module
    """Takes a batch and "images" or "text", like ClipTrainingModule."""
    prepare_text: Callable[[Sequence[str]], Tensor]
    """From captions to what the text tower takes."""
    ranks: Ranks
    watchdog: Watchdog
    size: int
    """Pixels of the images."""
    dtype: torch.dtype = torch.float32
    rows: int = 256
    """Rows of a forward, at most."""

    def encode_pairs(self, pairs: Pairs) -> tuple[Tensor, Tensor, Tensor]:
        """Encode this rank's share: features of the images, features of the captions, and concepts."""
        images, texts, concepts = [], [], []
        for indices in self._split(len(pairs)):
            batch = pairs.read(indices, self.size)
            images.append(self._encode("images", self._to_floats(batch.images)))
            texts.append(self._encode("text", self.prepare_text(batch.captions)))
            concepts.append(batch.concepts)
        return torch.cat(images), torch.cat(texts), torch.cat(concepts).to(self.ranks.device)

    def encode_images(self, pairs: Pairs) -> Tensor:
        """Encode the images of this rank's share."""
        parts = (pairs.read(indices, self.size).images for indices in self._split(len(pairs)))
        return torch.cat([self._encode("images", self._to_floats(images)) for images in parts])

    @torch.no_grad()
    def encode_all_images(self, pairs: Pairs) -> Tensor:
        """Encode all images and return their features in order, on every rank. Broken ones are left out."""
        self.model.eval()
        return all_gather(self.encode_images(pairs))

    def encode_all_captions(self, captions: Sequence[str]) -> Tensor:
        """Encode all captions and return their features in order, on every rank."""
        parts = [self.prepare_text([captions[i] for i in indices]) for indices in self._split(len(captions))]
        return all_gather(torch.cat([self._encode("text", part) for part in parts]))

    def _split(self, count: int) -> list[range]:
        """Split this rank's share into the same number of parts on every rank: a sharded model communicates in a forward."""
        return shard_chunks(count, self.ranks.rank, self.ranks.world_size, self.rows)

    def _to_floats(self, images: Tensor) -> Tensor:
        return images.to(self.ranks.device, self.dtype) / 255

    def _encode(self, part: str, rows: Tensor) -> Tensor:
        self.watchdog.beat()
        rows = rows.to(self.ranks.device)
        index = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
        features: Tensor = self.model({part: rows, "index": index, "step": 0, "seed": 0}, part)
        return features


def make_prompts(classes: Sequence[str]) -> list[str]:
    """List what an image of each class might be called: the same number of prompts for each class, class by class."""
    return [template.format(label) for label in classes for template in TEMPLATES]


def list_test_captions(tests: Mapping[str, RetrievalTest]) -> list[str]:
    """List every caption that `evaluate` will encode: those of the tests, and the prompts of their classes."""
    captions = [text for test in tests.values() for text in test.pairs.captions(range(len(test.pairs)))]
    return [*captions, *(text for test in tests.values() for text in make_prompts(test.classes))]


@torch.no_grad()
def evaluate(encoder: Encoder, tests: Mapping[str, RetrievalTest]) -> dict[str, float]:
    """Compute the metrics of each test, by "test/task/metric". They are the same on every rank and any number of ranks.

    Tasks: text_to_image, image_to_text, image_to_image where there are queries, zero_shot where there are classes.
    """
    encoder.model.eval()
    metrics: dict[str, float] = {}
    for name, test in tests.items():
        images, texts, concepts = encoder.encode_pairs(test.pairs)
        found = retrieval_metrics(texts, images, ids=concepts)
        metrics |= _one_direction(found, "x_to_y", f"{name}/text_to_image")
        metrics |= _one_direction(found, "y_to_x", f"{name}/image_to_text")
        if test.queries is not None:
            by_image = retrieval_metrics(encoder.encode_images(test.queries), images, ids=concepts)
            metrics |= _one_direction(by_image, "x_to_y", f"{name}/image_to_image")
        if test.classes:
            prompts = encoder.encode_all_captions(make_prompts(test.classes))
            classes = F.normalize(prompts.unflatten(0, (len(test.classes), -1)).mean(1), dim=1)
            labels = torch.tensor([test.class_of[c] for c in concepts.tolist()], device=images.device)
            correct = ((images @ classes.T).argmax(1) == labels).to(images.dtype)
            metrics[f"{name}/zero_shot/accuracy"] = float(global_mean(correct))
        metrics[f"{name}/rows"] = found["rows"]
    return metrics


@torch.no_grad()
def pixel_baseline(tests: Mapping[str, RetrievalTest], ranks: Ranks, *, size: int) -> dict[str, float]:
    """Compute image to image by the pixels themselves, averaged down to 32: what a model must beat. `size`: of the images."""
    metrics: dict[str, float] = {}
    for name, test in tests.items():
        if test.queries is None:
            continue
        mine = shard_range(len(test.pairs), ranks.rank, ranks.world_size)
        batches = [pairs.read(mine, size) for pairs in (test.queries, test.pairs)]
        small = (F.adaptive_avg_pool2d(batch.images.float(), min(size, 32)) for batch in batches)
        queries, images = (_correlation_features(x.flatten(1)) for x in small)
        found = retrieval_metrics(queries, images, ids=batches[0].concepts)
        metrics |= _one_direction(found, "x_to_y", f"{name}/image_to_image_by_pixels")
    return metrics


def _correlation_features(pixels: Tensor) -> Tensor:
    """Features whose dot products are correlations: the best of the simple measures that were tried."""
    return F.normalize(pixels - pixels.mean(1, keepdim=True), dim=1)


def _one_direction(found: Mapping[str, float], direction: str, task: str) -> dict[str, float]:
    return {f"{task}/{key.partition('/')[2]}": value for key, value in found.items() if key.startswith(direction)}

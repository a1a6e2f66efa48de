"""What is kept from training, where data comes without a test set: decided once for all runs, not by their seeds."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from unisono_models.datasets.emoji.images import load_emoji_images
from unisono_models.gan.config import Condition, DataConfig
from unisono_models.gan.data import emoji, mnist
from unisono_models.gan.data.conditions import TextEncoder, check_condition, check_settings, encode_captions
from unisono_models.gan.data.folder import read_folder
from unisono_models.gan.data.images import Found, Images
from unisono_models.gan.data.mnist import find_idx, read_idx_folder
from unisono_models.training.distributed.launch import Ranks
from unisono_models.training.distributed.object_collectives import all_gather_object, raise_together
from unisono_models.training.randomness import derive_seed, uniform

_SEED = 0  # of the split: another would make other data sets, and runs could not be compared


def hold_out(labels: Tensor | None, *, count: int, part: float) -> Tensor:
    """bool, (count,): True for what is kept from training: of each class the same `part`, rounded, and never all.

    Example:
        >>> hold_out(torch.tensor([0] * 10 + [1] * 5), count=15, part=0.2).view(3, 5).sum(1).sum().item()
        3
    """
    _check(part)
    draws, held = uniform(_SEED, "gan: held out", 0, torch.arange(count)), torch.zeros(count, dtype=torch.bool)
    classes = torch.zeros(count, dtype=torch.int64) if labels is None else labels
    for label in classes.unique():
        members = (classes == label).nonzero().squeeze(1)
        order = members[draws[members].argsort(stable=True)]
        held[order[: min(round(part * len(members)), len(members) - 1)]] = True
    return held


def hold_out_families(families: Sequence[str], labels: Sequence[int], *, part: float) -> Tensor:
    """The same for samples of which some are variants of each other: those of one family stay together.

    Of the families of each class (that of a family's first sample) the same `part` is held out.

    Example:
        >>> hold_out_families(["cat", "dog", "cat", "cow"], [0, 0, 0, 0], part=0.5).tolist()
        [True, False, True, True]
    """
    _check(part)
    class_of: dict[str, int] = {}
    for family, label in zip(families, labels, strict=True):
        class_of.setdefault(family, label)
    held: set[str] = set()
    for label in sorted(set(class_of.values())):
        members = sorted(family for family in class_of if class_of[family] == label)
        members.sort(key=lambda family: derive_seed(_SEED, "gan: held out", family))
        held.update(members[: round(part * len(members))])
    return torch.tensor([family in held for family in families], dtype=torch.bool)


def _check(part: float) -> None:
    if not 0 < part < 1:
        raise ValueError(f"data.test_part={part}: must be above 0 and below 1")


@dataclass(frozen=True, eq=False)
class Datasets:
    """What there is to learn from, and what was kept from it. The same on all ranks."""

    train: Images
    test: Images
    notes: tuple[str, ...] = ()
    """Where the data comes from, its licences, and what was left out."""
    fingerprint: str = ""
    """Stands for pixels, labels and conditions: a run that continues must find the same."""

    def shapes(self, condition: Condition) -> dict[str, int]:
        """What networks must fit: `size`, `channels`, and `conditions`, the number of classes or the width of vectors."""
        vectors = self.train.vectors
        conditions = 0 if vectors is None else vectors.shape[1]
        if condition in ("class", "none"):
            conditions = len(self.train.classes) if condition == "class" else 0
        return {"size": self.train.size, "channels": self.train.channels, "conditions": conditions}


def build_datasets(
    config: DataConfig, *, condition: Condition, ranks: Ranks, beat: Callable[[], None] | None = None
) -> Datasets:
    """Open the data on all ranks together. What fails on one fails on all.

    condition: what the model is told of a picture; it must come with the data. For "text", captions become `vectors` here.
    beat: called now and then, so that reading many files is not taken for a halt.

    Raises: ValueError or FileNotFoundError that says what is missing and what to do; RanksError for the same on many ranks.

    Example:
        source = open_source(DataConfig("mnist-5k", size=16), condition="class", ranks=ranks)
        len(source.train), len(source.test)  ->  4000, 1000
    """
    with raise_together("open_source"):
        check_settings(config, condition=condition)
    found = _read(config, ranks, beat)
    encoder = None
    with raise_together("open_source"):
        found = check_condition(found, config, condition=condition)
        if condition == "text":
            encoder = TextEncoder(config.text_model, device=ranks.device)
    if encoder is not None:
        vectors = encode_captions(found.images.captions, encoder, ranks=ranks, beat=beat)
        found = replace(found, images=replace(found.images, vectors=vectors))
    with raise_together("open_source"):
        train, test = _split(found, config, condition)
        fingerprint = _fingerprint(train, test, "" if encoder is None else encoder.fingerprint)
    heard = all_gather_object(fingerprint)
    if others := [rank for rank, theirs in enumerate(heard) if theirs != heard[0]]:
        raise ValueError(
            f"open_source: data.source={config.source}: ranks {others} have other pictures or conditions than rank 0: "
            "are the files, Pillow and the packages of data the same on all hosts?"
        )
    return Datasets(train, test, found.notes, fingerprint)


def _read(config: DataConfig, ranks: Ranks, beat: Callable[[], None] | None) -> Found:
    folder = Path(config.source).expanduser()
    found: Found | None = None
    with raise_together("open_source"):
        if config.source == emoji.NAME and ranks.local_rank == 0:
            load_emoji_images(config.size)  # one rank of each host renders them; the others find them rendered
    with raise_together("open_source"):
        if config.source == mnist.NAME:
            found = mnist.read_mnist(size=config.size, colour=config.colour)
        elif config.source == emoji.NAME:
            found = emoji.read_emoji(size=config.size, colour=config.colour)
        elif not folder.is_dir():
            raise FileNotFoundError(
                f"data.source={config.source}: neither {mnist.NAME} nor {emoji.NAME} nor a folder that exists"
            )
        elif find_idx(folder):
            found = read_idx_folder(folder, size=config.size, colour=config.colour)
    if len(set(all_gather_object(found is None))) > 1:
        raise ValueError(f"open_source: data.source={config.source}: there are idx files on some ranks only")
    return found or read_folder(
        folder, size=config.size, colour=config.colour, max_broken=config.max_broken, ranks=ranks, beat=beat
    )


def _split(found: Found, config: DataConfig, condition: Condition) -> tuple[Images, Images]:
    images, source = found.images, f"data.source={config.source}"
    test = found.test
    if test is None and found.families and images.labels is not None:
        test = hold_out_families(found.families, images.labels.tolist(), part=config.test_part)
    if test is None:
        test = hold_out(images.labels, count=len(images), part=config.test_part)
    train, held = (images.take(kept.nonzero().squeeze(1)) for kept in (~test, test))
    if not len(train) or not len(held):
        raise ValueError(
            f"{source}, data.test_part={config.test_part}: {len(train)} pictures to train on and {len(held)} to test on: "
            "both must be some. Bring more pictures, or change data.test_part"
        )
    if condition == "class" and train.labels is not None:
        learned = set(train.labels.unique().tolist())
        if absent := [name for number, name in enumerate(train.classes) if number not in learned]:
            raise ValueError(f"{source}: pictures of the class {', '.join(absent[:5])} are in the test set only: train on some")
    return train, held


def _fingerprint(train: Images, test: Images, encoder: str) -> str:
    """`encoder`: stands for what made vectors of captions, whose last bits are not the same on all machines; else empty."""
    digest = hashlib.sha256(encoder.encode())
    for images in (train, test):
        vectors = None if encoder else images.vectors
        texts = images.captions if encoder else ()
        digest.update(repr((tuple(images.pixels.shape), images.classes, texts)).encode(errors="surrogatepass"))
        for tensor in (images.pixels, images.labels, vectors):
            if tensor is not None:
                digest.update(repr((tensor.dtype, tuple(tensor.shape))).encode())
                digest.update(tensor.contiguous().numpy().data)
    return digest.hexdigest()

"""The training and test set of a run, built from the config."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from unisono_models.gan.config import Condition, DataConfig
from unisono_models.gan.data import emoji  # noqa: F401, registers its dataset
from unisono_models.gan.data.conditions import (
    TextEncoder,
    encode_captions,
    require_condition,
    validate_condition_options,
)
from unisono_models.gan.data.folder import read_folder
from unisono_models.gan.data.images import DATASETS, ImageDataset, RawImageDataset
from unisono_models.gan.data.mnist import find_idx_files, read_idx_folder
from unisono_models.training.distributed.launch import Ranks
from unisono_models.training.distributed.object_collectives import all_gather_object, raise_together
from unisono_models.training.errors import UserError
from unisono_models.training.randomness import derive_seed, uniform

_SPLIT_SEED = 0  # not the run's seed: all runs have the same test set, so that their metrics can be compared


@dataclass(frozen=True, eq=False)
class Datasets:
    """The training and test set, the same on all ranks."""

    train: ImageDataset
    test: ImageDataset
    notes: tuple[str, ...] = ()
    """Origin, licences, and what was left out."""
    fingerprint: str = ""
    """A hash of pixels, labels and conditions. A run that continues must find the same."""

    def shapes(self, condition: Condition) -> dict[str, int]:
        """Return the arguments `size`, `channels` and `conditions` of both networks."""
        vectors = self.train.vectors
        conditions = 0 if vectors is None else vectors.shape[1]
        if condition in ("class", "none"):
            conditions = len(self.train.classes) if condition == "class" else 0
        return {"size": self.train.size, "channels": self.train.channels, "conditions": conditions}


def build_datasets(
    config: DataConfig, *, condition: Condition, ranks: Ranks, beat: Callable[[], None] | None = None
) -> Datasets:
    """Read, check and split the data. All ranks call it together, and what fails on one rank fails on all.

    condition: the condition of the model, which the data must have. For "text", captions are encoded to vectors here.
    beat: called now and then, to tell the watchdog that the rank is alive.

    Raises: UserError that says what is missing and what to do.

    Example:
        datasets = build_datasets(DataConfig("mnist-5k", size=16), condition="class", ranks=ranks)
        len(datasets.train), len(datasets.test)  ->  4000, 1000
    """
    with raise_together("build_datasets"):
        validate_condition_options(config, condition=condition)
    raw = _read(config, ranks, beat)
    encoder = None
    with raise_together("build_datasets"):
        raw = require_condition(raw, config, condition=condition)
        if condition == "text":
            encoder = TextEncoder(config.text_model, device=ranks.device)
    if encoder is not None:
        vectors = encode_captions(raw.images.captions, encoder, ranks=ranks, beat=beat)
        raw = replace(raw, images=replace(raw.images, vectors=vectors))
    with raise_together("build_datasets"):
        train, test = _split(raw, config, condition)
        fingerprint = _fingerprint(train, test, "" if encoder is None else encoder.fingerprint)
    fingerprints = all_gather_object(fingerprint)
    if others := [rank for rank, theirs in enumerate(fingerprints) if theirs != fingerprints[0]]:
        raise UserError(
            f"--data.source {config.source}: ranks {others} have other images or conditions than rank 0. Check that files, "
            "Pillow and data packages are the same on all hosts"
        )
    return Datasets(train, test, (*raw.notes, *_hints(train, config, condition)), fingerprint)


def _hints(train: ImageDataset, config: DataConfig, condition: Condition) -> list[str]:
    """Return what a user may want to change."""
    hints = []
    if config.batch > len(train):
        hints.append(
            f"--data.batch {config.batch} is more than the {len(train):,} images to train on: each step has all of them once."
        )
    if condition == "none" and config.source not in DATASETS:
        if len(train.classes) > 1:
            names = ", ".join(train.classes[:3]) + (", …" if len(train.classes) > 3 else "")
            hints.append(f"The {len(train.classes)} classes ({names}) are not used. --model.condition class trains by class.")
        if any(train.captions):
            hints.append("The captions are not used. --model.condition text trains by caption.")
    return hints


def _read(config: DataConfig, ranks: Ranks, beat: Callable[[], None] | None) -> RawImageDataset:
    if config.source in DATASETS:
        return _read_registered(config, ranks)
    folder = Path(config.source).expanduser()
    raw: RawImageDataset | None = None
    with raise_together("build_datasets"):
        if not config.source:
            raise UserError("--data.source: say which folder holds your images")
        if not folder.is_dir():
            names = " or ".join(sorted(DATASETS.names()))
            problem = "is a file, and no folder" if folder.exists() else "there is no such folder"
            raise UserError(f"--data.source {config.source}: {problem}. It must be a folder of images, or {names}")
        if find_idx_files(folder):
            raw = read_idx_folder(folder, size=config.size, colour=config.colour)
    if len(set(all_gather_object(raw is None))) > 1:
        raise UserError(f"--data.source {config.source}: only some ranks see idx files in it")
    return raw or read_folder(
        folder, size=config.size, colour=config.colour, max_broken=config.max_broken, ranks=ranks, beat=beat
    )


def _read_registered(config: DataConfig, ranks: Ranks) -> RawImageDataset:
    read = partial(DATASETS[config.source], size=config.size, colour=config.colour)
    first_on_host = ranks.local_rank == 0
    # One rank of each host reads first: it may fill a cache, such as that of rendered emoji, which the others then find.
    with raise_together("build_datasets"):
        raw = read() if first_on_host else None
    with raise_together("build_datasets"):
        return read() if raw is None else raw


def _split(raw: RawImageDataset, config: DataConfig, condition: Condition) -> tuple[ImageDataset, ImageDataset]:
    is_test = raw.test
    if is_test is None and raw.families and raw.images.labels is not None:
        is_test = hold_out_families(raw.families, raw.images.labels.tolist(), fraction=config.test_part)
    if is_test is None:
        is_test = hold_out(raw.images.labels, count=len(raw.images), fraction=config.test_part)
    train = raw.images.select((~is_test).nonzero().squeeze(1))
    test = raw.images.select(is_test.nonzero().squeeze(1))
    if not len(train) or not len(test):
        raise UserError(
            f"--data.source {config.source}: with --data.test-part {config.test_part} there are {len(train)} images to train "
            f"on and {len(test)} to test on. There must be some of both: add images, or change --data.test-part"
        )
    if condition == "class" and train.labels is not None:
        known = set(train.labels.unique().tolist())
        if missing := [name for number, name in enumerate(train.classes) if number not in known]:
            raise UserError(
                f"--data.source {config.source}: all images of the class {', '.join(missing[:5])} are in the test set. Move "
                "some of them to the folder train, or set --model.condition none"
            )
    return train, test


def hold_out(labels: Tensor | None, *, count: int, fraction: float) -> Tensor:
    """Return which of `count` images are held out, bool (count,): the same fraction of each class, rounded, but never all.

    Example:
        >>> hold_out(torch.tensor([0] * 10 + [1] * 5), count=15, fraction=0.2).sum().item()
        3
    """
    _validate_fraction(fraction)
    draws = uniform(_SPLIT_SEED, "gan: held out", 0, torch.arange(count))
    held = torch.zeros(count, dtype=torch.bool)
    classes = torch.zeros(count, dtype=torch.int64) if labels is None else labels
    for label in classes.unique():
        members = (classes == label).nonzero().squeeze(1)
        order = members[draws[members].argsort(stable=True)]
        held[order[: min(round(fraction * len(members)), len(members) - 1)]] = True
    return held


def hold_out_families(families: Sequence[str], labels: Sequence[int], *, fraction: float) -> Tensor:
    """Return which images are held out, bool (n,): whole families, and the same fraction of the families of each class.

    The class of a family is that of its first image.

    Example:
        >>> hold_out_families(["cat", "dog", "cat", "cow"], [0, 0, 0, 0], fraction=0.5).tolist()
        [True, False, True, True]
    """
    _validate_fraction(fraction)
    class_of: dict[str, int] = {}
    for family, label in zip(families, labels, strict=True):
        class_of.setdefault(family, label)
    held: set[str] = set()
    for label in sorted(set(class_of.values())):
        members = sorted(family for family in class_of if class_of[family] == label)
        members.sort(key=lambda family: derive_seed(_SPLIT_SEED, "gan: held out", family))
        held.update(members[: round(fraction * len(members))])
    return torch.tensor([family in held for family in families], dtype=torch.bool)


def _validate_fraction(fraction: float) -> None:
    if not 0 < fraction < 1:
        raise UserError(f"--data.test-part {fraction}: must be above 0 and below 1")


def _fingerprint(train: ImageDataset, test: ImageDataset, encoder: str) -> str:
    """Hash both sets. `encoder` is the hash of the text encoder, or "".

    With a text encoder, the captions are hashed in place of their vectors, whose last bits differ between machines.
    """
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

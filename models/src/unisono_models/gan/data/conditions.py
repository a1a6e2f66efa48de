"""What a model is told of each picture: whether it comes with the data, and how it is read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from unisono_models.gan.config import Condition, DataConfig
from unisono_models.gan.data.found import Found
from unisono_models.gan.data.images import Images


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
    return replace(found, images=images, places=found.places[kept], test=test, notes=(*found.notes, *notes))


def _drop_classes(images: Images) -> tuple[Images, tuple[str, ...]]:
    """Without the classes that no picture is of, and their names."""
    if images.labels is None:
        return images, ()
    used, labels = images.labels.unique(return_inverse=True)
    classes = tuple(images.classes[number] for number in used.tolist())
    return replace(images, labels=labels, classes=classes), tuple(name for name in images.classes if name not in classes)

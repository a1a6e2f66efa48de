"""What a model is told of each picture: whether it comes with the data, and how it is read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from unisono_models.gan.config import Condition, DataConfig
from unisono_models.gan.data.found import Found


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
                "the folder, or say --model.condition class or none"
            )
        return _drop_silent(found)
    return found


def read_vectors(path: Path, places: Tensor, *, total: int) -> Tensor:
    """The rows at `places` of a .npy file, float32 (n, d). It must have a row for each of the `total` pictures of the source.

    Nothing in the file is executed.
    """
    try:
        table = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"data.vectors={path}: not a .npy file of numbers: {error}") from error
    if not isinstance(table, np.ndarray) or table.ndim != 2 or table.dtype.kind not in "fiu" or 0 in table.shape:
        raise ValueError(f"data.vectors={path}: must hold one table of numbers, a row for each picture")
    if len(table) != total:
        raise ValueError(
            f"data.vectors={path}: {len(table):,} rows for {total:,} pictures: must be one for each, broken ones too"
        )
    vectors = torch.from_numpy(table[places.numpy()].astype(np.float32))
    if not bool(vectors.isfinite().all()):
        row = int(places[~vectors.isfinite().all(1)][0])
        raise ValueError(f"data.vectors={path}: row {row} has numbers that are not finite")
    return vectors


def _drop_silent(found: Found) -> Found:
    spoken = torch.tensor([bool(text) for text in found.images.captions])
    if bool(spoken.all()):
        return found
    kept = spoken.nonzero().squeeze(1)
    note = f"{len(spoken) - len(kept):,} of {len(spoken):,} pictures left out: they have no caption."
    test = None if found.test is None else found.test[kept]
    return replace(found, images=found.images.take(kept), places=found.places[kept], test=test, notes=(*found.notes, note))

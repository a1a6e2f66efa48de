"""The features of a gallery's pictures: computed in batches, and kept in a file."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]

from unisono_models.clip.data.pairs import Pairs
from unisono_models.clip.model import Clip

BATCH = 256
_LAYOUT = 1  # of the file, and of what is computed; a new one makes old files go unused


def encode_pixels(clip: Clip, pixels: Tensor) -> dict[str, Tensor]:
    """{"features"} of pictures, uint8 (n, 3, height, width)."""
    return {"features": _encode(clip, pixels.split(BATCH), len(pixels))}


def encode_pairs(clip: Clip, pairs: Pairs, rows: Sequence[int]) -> dict[str, Tensor]:
    """{"features", "rows"} of the pictures in `rows` of `pairs`; without the rows that cannot be read."""
    size = clip.config.image.size
    found: list[Tensor] = []

    def read() -> Iterable[Tensor]:
        for start in range(0, len(rows), BATCH):
            asked = rows[start : start + BATCH]
            images = pairs.read(asked, size).images
            if len(images) < len(asked):  # a batch does not tell by row which it left out: ask for them one by one
                ones = [pairs.read([row], size).images for row in asked]
                asked = [row for row, one in zip(asked, ones, strict=True) if len(one)]
                images = torch.cat(ones)
            found.append(torch.tensor(asked, dtype=torch.int64))
            yield images

    features = _encode(clip, read(), len(rows))
    return {"features": features, "rows": torch.cat(found) if found else torch.empty(0, dtype=torch.int64)}


def kept_features(file: Path | None, *, clip: Clip, data: str, compute: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """What `compute` gives, or what `file` has of it from an earlier time.

    `file` counts only if it was made by the same weights from the same `data` and is whole: it carries a hash of both, and of
    its own content. A file that cannot be written is said, and is no error.
    """
    if file is None:
        return compute()
    key = _hash([f"layout {_LAYOUT}", data, *_describe(clip)])
    kept = _read(file, key)
    if kept is None:
        kept = {name: value.contiguous() for name, value in compute().items()}
        try:
            _write(file, kept, {"key": key, "content": _hash_of(kept)})
        except OSError as error:
            print(f"{file} cannot be written ({error.strerror}): the pictures will be encoded again next time", file=sys.stderr)
    return kept


def _encode(clip: Clip, batches: Iterable[Tensor], total: int) -> Tensor:
    was_training = clip.training
    clip.eval()
    features = []
    with tqdm(total=total, desc="encoding the pictures", unit=" pictures", disable=None) as bar:
        for images in batches:
            features.append(clip.encode_images(images).float().cpu())
            bar.update(len(images))
    clip.train(was_training)
    return torch.cat(features) if features else torch.empty(0, clip.config.width)


def _read(file: Path, key: str) -> dict[str, Tensor] | None:
    try:
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata() or {}
            if metadata.get("key") != key:
                return None
            kept = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        return kept if metadata.get("content") == _hash_of(kept) else None
    except (OSError, SafetensorError, ValueError):
        return None


def _write(file: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=file.stem, suffix=".part")
    os.close(handle)
    try:
        save_file(tensors, temporary, metadata)
        os.chmod(temporary, 0o644)  # as any other file of the run; a temporary one is for its owner alone
        os.replace(temporary, file)  # at once: nobody ever reads half a file
    except SafetensorError as error:  # of a full disk, for one
        raise OSError(0, str(error)) from error
    finally:
        Path(temporary).unlink(missing_ok=True)


def _describe(clip: Clip) -> Iterable[str]:
    """All that decides the features of pictures."""
    image = clip.config.image
    yield json.dumps([image.model, image.kwargs, image.size, clip.config.width], sort_keys=True)
    yield _hash_of(clip.image.state_dict())


def _hash_of(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _hash(parts: Iterable[str]) -> str:
    return hashlib.sha256(json.dumps(list(parts)).encode()).hexdigest()

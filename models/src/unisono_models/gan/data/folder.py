"""Captions of pictures in a folder, as Hugging Face's ImageFolder has them: metadata.csv or metadata.jsonl beside them."""

from __future__ import annotations

import csv
import io
import json
import os
import posixpath
import stat
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from unisono.collectives import all_gather
from unisono_models.datasets.file_patterns import check_same_files
from unisono_models.datasets.skip_report import SkippedSample, SkipReport
from unisono_models.gan.data.images import Found, Images
from unisono_models.gan.data.mnist import fit_square
from unisono_models.training.distributed.launch import Ranks
from unisono_models.training.distributed.object_collectives import raise_together
from unisono_models.training.run.log import show_progress

_FILE, _TEXTS = "file_name", ("text", "caption")


def read_captions(root: Path, folders: Sequence[str] = ("",)) -> dict[str, str] | None:
    """The caption of each picture by its path below `root`, with forward slashes. None: there is no metadata file.

    folders: where below `root` to look, "" for itself. Names in a file are relative to the file's own folder. A picture that is
    named twice keeps its first caption; one with an empty caption has none.

    Raises: ValueError that names the file and line if one cannot be read, or has no column file_name or text.

    Example:
        metadata.jsonl with {"file_name": "cats/1.png", "text": "a sleepy cat"}  ->  {"cats/1.png": "a sleepy cat"}
    """
    found: dict[str, str] = {}
    files = [path for name in folders for path in (root / name / "metadata.csv", root / name / "metadata.jsonl")]
    there = [path for path in files if path.is_file()]
    for path in there:
        for line, row in _rows(path):
            column = next((name for name in _TEXTS if row.get(name) is not None), None)
            if column is None or not isinstance(row.get(_FILE), str):
                names = ", ".join(str(name) for name in row)[:200]
                raise ValueError(
                    f"read_captions: {path}, line {line}: columns file_name and text are needed; there are {names}"
                )
            name = posixpath.normpath(posixpath.join(path.parent.relative_to(root).as_posix(), row[_FILE].strip()))
            if text := " ".join(str(row[column]).split()):
                found.setdefault(name, text)
    return found if there else None


def _rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Rows by the names of their columns, each with the line that it begins in."""
    data = path.read_bytes()
    try:
        text = data.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise ValueError(f"read_captions: {path}, line {data.count(10, 0, error.start) + 1}: {error}") from error
    return _csv_rows(path, text) if path.suffix == ".csv" else _json_rows(path, text)


def _csv_rows(path: Path, text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    reader, line = csv.reader(io.StringIO(text, newline="")), 1
    try:
        header: list[str] = next(reader, [])
        if _FILE not in header or not set(_TEXTS) & set(header):
            yield 1, dict.fromkeys(header)  # which is refused, also if no row follows
        line = reader.line_num + 1
        for values in reader:
            if values:
                yield line, dict(zip(header, values, strict=False))
            line = reader.line_num + 1
    except csv.Error as error:
        raise ValueError(f"read_captions: {path}, line {line}: {error}") from error


def _json_rows(path: Path, text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for line, part in enumerate(text.split("\n"), 1):
        if part.strip():
            try:
                row = json.loads(part)
            except (json.JSONDecodeError, RecursionError) as error:
                why = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
                raise ValueError(f"read_captions: {path}, line {line}: not JSON: {why}") from error
            if not isinstance(row, dict):
                raise ValueError(f"read_captions: {path}, line {line}: not an object in braces")
            yield line, row


SUFFIXES = frozenset((".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"))
# Raster formats only: Pillow would hand EPS to Ghostscript, and the rare ones are where decoders are weakest.
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
_MOST = 64 * 2**20  # pixels: a picture that claims more would unpack to any amount of memory, from a file that may be tiny


class BrokenPictureError(ValueError):
    """What was to be a picture is none, or is cut off, or would be too large."""


def read_picture(path: Path, *, size: int, colour: bool) -> Tensor:
    """The picture as uint8, (3 if colour else 1, size, size): its centre square, scaled by LANCZOS.

    Turned as its EXIF orientation says; transparent parts over white; the first frame if it moves.

    Raises: BrokenPictureError that says why.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise BrokenPictureError("not a plain file")  # a pipe would never end
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd metadata, one for every such picture
            pixels = fit_square(_flatten(_load(path), colour), size)
    except (BrokenPictureError, MemoryError):
        raise
    except UnidentifiedImageError as error:  # its own text is the path, another on every machine
        raise BrokenPictureError(f"not a picture in a known format ({', '.join(_FORMATS)})") from error
    except Exception as error:  # a decoder that is fed anything at all raises anything at all
        raise BrokenPictureError(f"{type(error).__name__}: {error}") from error
    return torch.from_numpy(pixels if colour else pixels[:, :, None]).permute(2, 0, 1).contiguous()


def _load(path: Path) -> Image.Image:
    with Image.open(path, formats=_FORMATS) as image:
        width, height = image.size
        if min(width, height) < 1 or width * height > _MOST:
            raise BrokenPictureError(f"{width} x {height} pixels, more than the {_MOST:,} that a picture may have")
        image.load()
        loaded: Image.Image = image
    with suppress(Exception):  # of metadata; the pixels are good
        ImageOps.exif_transpose(loaded, in_place=True)
    return loaded


def _flatten(image: Image.Image, colour: bool) -> Image.Image:
    """Without transparency, in mode RGB or L."""
    if image.mode.startswith("I"):  # 16 bits of grey; Pillow's own conversion would clip them to white
        grey = np.asarray(image).astype(np.int64)
        image = Image.fromarray(((grey.clip(0, 65535) * 255 + 32767) // 65535).astype(np.uint8))
    elif image.mode == "F":
        raise BrokenPictureError("a picture of floating-point numbers, whose range is not known")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB" if colour else "L")


_TESTS = ("test", "val", "valid", "validation")
_MANY = 1000  # files that take long enough to show how far it is


@dataclass(frozen=True)
class Listing:
    """The picture files of a folder, by their names alone."""

    names: tuple[str, ...]
    """Paths below the folder, sorted."""
    classes: tuple[str | None, ...]
    """Of each picture; all None if one of them lies in no subfolder."""
    test: tuple[bool, ...] | None
    """Whether each belongs to the test set. None: there is no such folder."""
    folders: tuple[str, ...]
    """Where a metadata file may lie."""


def list_folder(root: Path) -> Listing:
    """What is in `root`, with its subfolders. Names that begin with a dot are passed over.

    root/cat/1.png is of the class cat. root/train/cat/1.png and root/test/cat/1.png (or val, valid, validation) are too, and
    what is not in train is the test set. A picture that lies in no class folder makes them all unlabelled. Links to folders are
    followed; a folder that is reached in several ways counts once.

    Raises: FileNotFoundError if there are no pictures.
    """
    names = tuple(sorted(_walk(root)))
    if not names:
        raise FileNotFoundError(f"data.source={root}: a folder without pictures ({', '.join(sorted(SUFFIXES))})")
    paths = [name.split("/") for name in names]
    tops = {path[0] if len(path) > 1 else "" for path in paths}
    divided = "train" in tops and tops <= {"train", *_TESTS}
    below = [path[1:] if divided else path for path in paths]
    labelled = all(len(path) > 1 for path in below)
    classes = tuple(path[0] if labelled else None for path in below)
    test = tuple(path[0] != "train" for path in paths) if divided and len(tops) > 1 else None
    return Listing(names, classes, test, ("", *sorted(tops)) if divided else ("",))


def read_folder(
    root: Path,
    *,
    size: int,
    ranks: Ranks,
    colour: bool = False,
    max_broken: float = 1.0,
    beat: Callable[[], None] | None = None,
) -> Found:
    """All pictures of `root`, on every rank, in the order of their sorted paths. For all ranks together.

    Each rank reads its share of the files. Those that cannot be read are left out, and a note says how many, which, and why.
    max_broken: the part of the files that may be broken.
    beat: called after each file.

    Raises: ValueError, on all ranks, if none or too few can be read, or if the ranks do not see the same files.

    Example:
        found = read_folder(Path("/data/flowers"), size=64, colour=True, ranks=ranks)
        found.images.classes  ->  ("daisy", "rose", …)
    """
    with raise_together("read_folder"):
        listing = list_folder(root)
        captions = read_captions(root, listing.folders)
    check_same_files([root / name for name in listing.names], source=str(root), what="read_folder")
    total, skipped = len(listing.names), SkipReport(what="pictures", place="file")
    first, last = (total * rank // ranks.size for rank in (ranks.rank, ranks.rank + 1))
    with raise_together("read_folder"):
        mine, good, broken = _read_share(root, listing.names, range(first, last), size, colour, beat, ranks.first)
        skipped.count(last - first, broken)
    pixels, places = all_gather(mine), all_gather(good)
    notes: tuple[str, ...] = (skipped.report(),) if len(places) < total else ()
    if not len(places):
        raise ValueError(f"data.source={root}: none of its pictures can be read. {notes[0]}")
    try:
        skipped.check(max_broken, at_least=1)
    except ValueError as error:
        raise ValueError(f"data.source={root}: {error} (--data.max-broken)") from None
    kept = places.tolist()
    labels, classes = _label([listing.classes[place] for place in kept])
    if lost := sorted({name for name in listing.classes if name is not None} - set(classes)):
        notes += (f"Without a readable picture, and so no class: {', '.join(lost)}.",)
    if None in listing.classes and any("/" in name for name in listing.names) and listing.test is None:
        notes += ("Subfolders are not taken for classes: there are pictures beside them.",)
    if captions and captions.keys().isdisjoint(listing.names):
        there, here = next(iter(captions)), listing.names[0]
        notes += (f"No file_name of the metadata is that of a picture: they are such as {there}, and pictures such as {here}.",)
    texts = () if captions is None else tuple(captions.get(listing.names[place], "") for place in kept)
    test = None if listing.test is None else torch.tensor([listing.test[place] for place in kept])
    return Found(Images(pixels, labels, classes, captions=texts if any(texts) else ()), places, total, test, notes)


def _walk(root: Path) -> list[str]:
    found: list[str] = []
    seen: set[tuple[int, int]] = set()
    starts = deque([root])  # links come last and in order: a folder has its own name, if it has one here, on every rank
    while starts:
        for folder, inner, files in os.walk(starts.popleft()):
            about = os.stat(folder)
            if (about.st_dev, about.st_ino) in seen:
                inner.clear()
                continue
            seen.add((about.st_dev, about.st_ino))
            inner[:] = sorted(name for name in inner if not name.startswith("."))
            starts += [Path(folder, name) for name in inner if Path(folder, name).is_symlink()]
            below = Path(folder).relative_to(root)
            found += [(below / x).as_posix() for x in files if not x.startswith(".") and Path(x).suffix.lower() in SUFFIXES]
    return found


def _read_share(
    root: Path,
    names: Sequence[str],
    share: range,
    size: int,
    colour: bool,
    beat: Callable[[], None] | None,
    aloud: bool,
) -> tuple[Tensor, Tensor, list[SkippedSample]]:
    """The pixels of the files at `share` that can be read, their places, and what was left out."""
    pixels = torch.empty(len(share), 3 if colour else 1, size, size, dtype=torch.uint8)
    good: list[int] = []
    broken: list[SkippedSample] = []
    for place in show_progress(share, "pictures", aloud=aloud and len(share) >= _MANY):
        try:
            pixels[len(good)] = read_picture(root / names[place], size=size, colour=colour)
            good.append(place)
        except BrokenPictureError as error:
            broken.append(SkippedSample(place, names[place], "broken picture", str(error)))
        if beat is not None:
            beat()
    return pixels[: len(good)], torch.tensor(good, dtype=torch.int64), broken


def _label(names: Sequence[str | None]) -> tuple[Tensor | None, tuple[str, ...]]:
    known = [name for name in names if name is not None]
    if len(known) < len(names):
        return None, ()
    classes = tuple(sorted(set(known)))
    numbers = {name: number for number, name in enumerate(classes)}
    return torch.tensor([numbers[name] for name in known], dtype=torch.int64), classes

"""A folder of image files: subfolders are classes, and metadata.csv or metadata.jsonl holds captions (HF's ImageFolder)."""

import csv
import io
import json
import os
import posixpath
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from unisono.collectives import all_gather
from unisono_models.datasets.file_patterns import check_same_files
from unisono_models.datasets.images import (
    IMAGE_SUFFIXES,
    BrokenImageError,
    explain_broken_images,
    flatten_image,
    open_image,
)
from unisono_models.datasets.skip_report import SkippedSample, SkipReport
from unisono_models.gan.data.images import ImageDataset, RawImageDataset, fit_square
from unisono_models.training.distributed.launch import Ranks, shard_range
from unisono_models.training.distributed.object_collectives import all_gather_object, raise_together
from unisono_models.training.errors import UserError
from unisono_models.training.run.log import show_progress

_TEST_FOLDERS = ("test", "val", "valid", "validation")
_FILE_COLUMN = "file_name"
_CAPTION_COLUMNS = ("text", "caption")
_SHOW_PROGRESS_FROM = 1000  # files
_CHANGES = {
    "crop": "are not square: their centre square is used.",
    "enlarge": "are smaller than --data.size: they are enlarged.",
    "grey": "are saved in colour and turned to grey. --data.colour trains on their colours.",
}


@dataclass(frozen=True)
class FolderListing:
    """The image files of a folder, found by their names alone."""

    names: tuple[str, ...]
    """Paths relative to the folder, sorted."""
    classes: tuple[str | None, ...]
    """The class of each image. All are None if one of the images lies in no subfolder."""
    test: tuple[bool, ...] | None
    """Whether each image belongs to the test set. None if there is no test folder."""
    metadata_folders: tuple[str, ...]
    """Folders that may hold a metadata file, relative to the folder."""


def list_folder(root: Path) -> FolderListing:
    """List the image files in `root` and its subfolders. Names that begin with a dot are ignored.

    root/cat/1.png has the class cat. So have root/train/cat/1.png and root/test/cat/1.png (or val, valid, validation); what
    is not in train is the test set. If one image lies in no class folder, no image has a class. Links to folders are followed;
    a folder that can be reached in several ways counts once.

    Raises: UserError if there are no images.
    """
    names = tuple(sorted(_find_images(root)))
    if not names:
        kinds = ", ".join(sorted(IMAGE_SUFFIXES))
        raise UserError(f"--data.source {root}: the folder has no image files. Their names must end in one of {kinds}")
    paths = [name.split("/") for name in names]
    top_folders = {path[0] if len(path) > 1 else "" for path in paths}
    is_split = "train" in top_folders and top_folders <= {"train", *_TEST_FOLDERS}
    class_paths = [path[1:] if is_split else path for path in paths]
    has_classes = all(len(path) > 1 for path in class_paths)
    classes = tuple(path[0] if has_classes else None for path in class_paths)
    test = tuple(path[0] != "train" for path in paths) if is_split and len(top_folders) > 1 else None
    return FolderListing(names, classes, test, ("", *sorted(top_folders)) if is_split else ("",))


def read_folder(
    root: Path,
    *,
    size: int,
    ranks: Ranks,
    colour: bool = False,
    max_broken: float = 1.0,
    beat: Callable[[], None] | None = None,
) -> RawImageDataset:
    """Read all images of `root` on every rank, in the order of their sorted paths. All ranks call it together.

    Each rank decodes its share of the files. Files that cannot be read are left out, and a note says how many, which, and why.
    Other notes say how many images were cropped, enlarged or turned to grey.

    max_broken: fraction of the files that may be unreadable.
    beat: called after each file, to tell the watchdog that the rank is alive.

    Raises: UserError, on all ranks, if too few files can be read or the ranks do not see the same files.

    Example:
        raw = read_folder(Path("/data/flowers"), size=64, colour=True, ranks=ranks)
        raw.images.classes  ->  ("daisy", "rose", …)
    """
    with raise_together("read_folder"):
        listing = list_folder(root)
        captions = read_captions(root, listing.metadata_folders)
    check_same_files([root / name for name in listing.names], source=str(root), what="--data.source")
    total = len(listing.names)
    share = shard_range(total, ranks.rank, ranks.world_size)
    skipped = SkipReport(what="images", place="file")
    with raise_together("read_folder"):
        decoded, decoded_indices, broken, changes = _read_files(root, listing.names, share, size, colour, beat, ranks.first)
        skipped.count(len(share), broken)
    pixels = all_gather(decoded)
    indices = all_gather(decoded_indices)
    notes: tuple[str, ...] = (skipped.report(),) if len(indices) < total else ()
    if not len(indices):
        raise UserError(f"--data.source {root}: none of its images can be read. {notes[0]}")
    try:
        skipped.check(max_broken, at_least=1)
    except ValueError as error:
        raise UserError(f"--data.source {root}: {error}") from None
    all_changes = all_gather_object(changes)
    for change, text in _CHANGES.items():
        if count := sum(of_rank.get(change, 0) for of_rank in all_changes):
            notes += (f"{count:,} of {len(indices):,} images {text}",)
    kept = indices.tolist()
    labels, classes = _number_classes([listing.classes[index] for index in kept])
    if lost := sorted({name for name in listing.classes if name is not None} - set(classes)):
        notes += (f"These classes are dropped, since none of their images can be read: {', '.join(lost)}.",)
    if None in listing.classes and any("/" in name for name in listing.names) and listing.test is None:
        notes += ("Subfolders are not used as classes, since some images lie beside them.",)
    if captions and captions.keys().isdisjoint(listing.names):
        notes += (
            f"No file_name of the metadata is the path of an image: they look like {next(iter(captions))}, and the images "
            f"like {listing.names[0]}.",
        )
    texts = () if captions is None else tuple(captions.get(listing.names[index], "") for index in kept)
    test = None if listing.test is None else torch.tensor([listing.test[index] for index in kept])
    images = ImageDataset(pixels, labels, classes, captions=texts if any(texts) else ())
    return RawImageDataset(images, indices, total, test, notes)


def _find_images(root: Path) -> list[str]:
    found: list[str] = []
    seen: set[tuple[int, int]] = set()
    starts = deque([root])  # links come last and in order, so that a folder has the same name on every rank
    while starts:
        for folder, subfolders, files in os.walk(starts.popleft()):
            status = os.stat(folder)
            if (status.st_dev, status.st_ino) in seen:
                subfolders.clear()
                continue
            seen.add((status.st_dev, status.st_ino))
            subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
            starts += [Path(folder, name) for name in subfolders if Path(folder, name).is_symlink()]
            relative = Path(folder).relative_to(root)
            found += [
                (relative / name).as_posix()
                for name in files
                if not name.startswith(".") and Path(name).suffix.lower() in IMAGE_SUFFIXES
            ]
    return found


def _read_files(
    root: Path,
    names: Sequence[str],
    indices: range,
    size: int,
    colour: bool,
    beat: Callable[[], None] | None,
    aloud: bool,
) -> tuple[Tensor, Tensor, list[SkippedSample], Counter[str]]:
    """Return the pixels of the files that can be read, their indices, what was skipped, and how many images were changed."""
    pixels = torch.empty(len(indices), 3 if colour else 1, size, size, dtype=torch.uint8)
    good: list[int] = []
    broken: list[SkippedSample] = []
    changes: Counter[str] = Counter()
    for index in show_progress(indices, "images", aloud=aloud and len(indices) >= _SHOW_PROGRESS_FROM):
        try:
            pixels[len(good)], changed = read_image(root / names[index], size=size, colour=colour)
            good.append(index)
            changes.update(changed)
        except BrokenImageError as error:
            broken.append(SkippedSample(index, names[index], "broken image", str(error)))
        if beat is not None:
            beat()
    return pixels[: len(good)], torch.tensor(good, dtype=torch.int64), broken, changes


def _number_classes(names: Sequence[str | None]) -> tuple[Tensor | None, tuple[str, ...]]:
    known = [name for name in names if name is not None]
    if len(known) < len(names):
        return None, ()
    classes = tuple(sorted(set(known)))
    numbers = {name: number for number, name in enumerate(classes)}
    return torch.tensor([numbers[name] for name in known], dtype=torch.int64), classes


def read_image(path: Path, *, size: int, colour: bool) -> tuple[Tensor, list[str]]:
    """Decode an image file to uint8 (3 if colour else 1, size, size): its centre square, scaled by LANCZOS.

    The EXIF orientation is applied, transparent parts become white, and of an animation the first frame is used. The second
    result says how the image was changed: "crop", "enlarge", "grey".

    Raises: BrokenImageError that says why.
    """
    with explain_broken_images():
        image = open_image(path)
        width, height = image.size
        grey = Image.getmodebase(image.mode) == "L"
        pixels = fit_square(flatten_image(image, "RGB" if colour else "L"), size)
    changed = {"crop": width != height, "enlarge": min(width, height) < size, "grey": not colour and not grey}
    decoded = torch.from_numpy(pixels if colour else pixels[:, :, None]).permute(2, 0, 1).contiguous()
    return decoded, [change for change, happened in changed.items() if happened]


def read_captions(root: Path, folders: Sequence[str] = ("",)) -> dict[str, str] | None:
    """Read the caption of each image, by its path relative to `root`. Returns None if there is no metadata file.

    folders: folders below `root` that may hold metadata.csv or metadata.jsonl; "" is `root` itself. Names in such a file are
    relative to its folder. If an image is named twice, its first caption counts. Empty captions are ignored.

    Raises: UserError that names the file and the line if a line cannot be read, or has no column file_name or text.

    Example:
        metadata.jsonl with {"file_name": "cats/1.png", "text": "a sleepy cat"}  ->  {"cats/1.png": "a sleepy cat"}
    """
    captions: dict[str, str] = {}
    candidates = [root / folder / name for folder in folders for name in ("metadata.csv", "metadata.jsonl")]
    files = [path for path in candidates if path.is_file()]
    for path in files:
        folder = path.parent.relative_to(root).as_posix()
        for line, row in _metadata_rows(path):
            column = next((name for name in _CAPTION_COLUMNS if row.get(name) is not None), None)
            if column is None or not isinstance(row.get(_FILE_COLUMN), str):
                names = ", ".join(str(name) for name in row)[:200]
                raise UserError(f"{path}, line {line}: needs the columns file_name and text, but has {names}")
            name = posixpath.normpath(posixpath.join(folder, row[_FILE_COLUMN].strip()))
            if text := " ".join(str(row[column]).split()):
                captions.setdefault(name, text)
    return captions if files else None


def _metadata_rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield the number of the line in which a row begins, and the row as a dict."""
    data = path.read_bytes()
    try:
        text = data.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}, line {data.count(10, 0, error.start) + 1}: {error}") from error
    return _csv_rows(path, text) if path.suffix == ".csv" else _json_rows(path, text)


def _csv_rows(path: Path, text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    reader = csv.reader(io.StringIO(text, newline=""))
    line = 1
    try:
        header: list[str] = next(reader, [])
        if _FILE_COLUMN not in header or not set(_CAPTION_COLUMNS) & set(header):
            yield 1, dict.fromkeys(header)  # read_captions rejects it, also if no row follows
        line = reader.line_num + 1
        for values in reader:
            if values:
                yield line, dict(zip(header, values, strict=False))
            line = reader.line_num + 1
    except csv.Error as error:
        raise UserError(f"{path}, line {line}: {error}") from error


def _json_rows(path: Path, text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for line, content in enumerate(text.split("\n"), 1):
        if content.strip():
            try:
                row = json.loads(content)
            except (json.JSONDecodeError, RecursionError) as error:
                reason = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
                raise UserError(f"{path}, line {line}: not JSON: {reason}") from error
            if not isinstance(row, dict):
                raise UserError(f"{path}, line {line}: not an object in braces")
            yield line, row

"""Where the pictures and captions of a tar lie in it, found once and kept. Nothing is ever extracted."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from unisono_models.clip.data.records import clean_text, concept_from, printable

PICTURES = ("jpg", "jpeg", "png", "webp")
COLUMNS = 6
"""Of a row: where the picture starts, its bytes; where the caption starts (-1: none), its bytes, 1 if it is JSON; concept."""
_LAYOUT = 1  # of the cached files; a new one makes old files go unused
_NAME = re.compile(r"((?:.*/)?[^./]+)\.([^/]*)", re.DOTALL)  # as webdataset has it: the key ends at the first dot
_MAX_HEADER = 1 << 16
_MAX_CAPTION = 1 << 16
_MAX_JSON = 1 << 22
MAX_TEXT = _MAX_JSON + 1
"""Bytes of a member that are read for a caption: enough to tell that it is too long."""


@dataclass(frozen=True)
class TextFields:
    """Which texts of a key are its caption and its concept.

    caption: a field of its .json; None: its .txt, or without one the `caption` or `text` of its .json.
    concept: a field of its .json; None: the caption.
    """

    caption: str | None = None
    concept: str | None = None

    def caption_of(self, data: bytes, *, is_json: bool) -> str:
        """The caption in what was read. Raises ValueError if it is JSON and broken."""
        if not is_json:
            return clean_text(data[:_MAX_CAPTION])
        fields = _parse(data)
        if self.caption is not None:
            return clean_text(fields.get(self.caption))
        return clean_text(fields.get("caption") or fields.get("text"))


def index_tar(path: Path, fields: TextFields) -> tuple[NDArray[np.int64], list[str]]:
    """A row of `COLUMNS` for each key with a picture, in the order of the tar, and notes on what is damaged or left out."""
    notes: list[str] = []
    keys: dict[str, dict[str, tuple[int, int]]] = {}
    with path.open("rb") as file:
        for name, offset, size in _members(file, notes):
            if match := _NAME.fullmatch(name):
                keys.setdefault(match[1], {}).setdefault(match[2].lower(), (offset, size))
        rows = [row for members in keys.values() if (row := _row(file, members, fields))]
    if without := len(keys) - len(rows):
        notes.append(f"keys without a picture: {without}")
    return np.array(rows, dtype=np.int64).reshape(-1, COLUMNS), notes


def index_cached(path: Path, fields: TextFields, cache: Path) -> tuple[NDArray[np.int64], list[str]]:
    """`index_tar`, kept in the folder `cache` as long as the file has the same size and time."""
    kept = cache / f"tar-{fingerprint([path], fields)}.safetensors"
    if (found := load_index(kept)) is not None:
        return found[0].numpy(), found[2]
    rows, notes = index_tar(path, fields)
    save_index(kept, torch.from_numpy(rows), torch.tensor([0, len(rows)]), notes)
    return rows, notes


def fingerprint(paths: list[Path], fields: TextFields) -> str:
    """The same as long as the files have their places, sizes and times."""
    files = [(str(path.absolute()), (status := path.stat()).st_size, status.st_mtime_ns) for path in paths]
    text = json.dumps([_LAYOUT, fields.caption, fields.concept, files])
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def save_index(path: Path, rows: torch.Tensor, starts: torch.Tensor, notes: list[str]) -> bool:
    """Write it whole or not at all. False if it cannot be written: a full or read-only disk is no reason not to train."""
    temporary = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".tar-")
        os.close(handle)
        save_file({"rows": rows.contiguous(), "starts": starts}, temporary, {"notes": json.dumps(notes)})
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, SafetensorError):
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        return False
    return True


def load_index(path: Path) -> tuple[torch.Tensor, torch.Tensor, list[str]] | None:
    """Rows (mapped, not read: ranks and workers of a host share the memory), where each tar's begin, and notes."""
    try:
        with safe_open(str(path), framework="pt") as file:
            rows, starts, notes = file.get_tensor("rows"), file.get_tensor("starts"), json.loads(file.metadata()["notes"])
    except Exception:  # missing, or cut off by a fault: it is made anew
        return None
    good = rows.dtype == starts.dtype == torch.int64 and rows.shape[1:] == (COLUMNS,) and int(starts[-1]) == len(rows)
    return (rows, starts, notes) if good else None


class _Headers:
    """The file as tarfile may read it: headers only. One that claims to be long, or of negative length, would read it all."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.seek, self.tell = file.seek, file.tell

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= _MAX_HEADER:
            raise tarfile.ReadError(f"a header of {size} bytes")
        return self._file.read(size)


def _members(file: BinaryIO, notes: list[str]) -> Iterator[tuple[str, int, int]]:
    """Name, offset and size of each plain file that is there as a whole. The names are but names: nothing is opened by them."""
    length = os.fstat(file.fileno()).st_size
    place, odd = 0, 0
    try:
        archive = tarfile.TarFile(fileobj=_Headers(file), mode="r", encoding="utf-8")  # type: ignore[arg-type]
        while (member := archive.next()) is not None:
            archive.members.clear()  # type: ignore[attr-defined]  # it would keep them all
            if member.size < 0 or member.offset_data <= place or archive.offset <= place:
                raise tarfile.ReadError("a header that leads back")  # tarfile would go round in it forever
            if not member.isreg() or member.issparse():
                odd += not member.isdir()
            elif member.offset_data + member.size > length:
                raise tarfile.ReadError(f"the file ends within {printable(member.name, 80)}")
            else:
                yield member.name, member.offset_data, member.size
            place = archive.offset
        file.seek(place)
        if (block := file.read(tarfile.BLOCKSIZE)).strip(b"\0"):  # tarfile takes what it cannot read for the end
            raise tarfile.ReadError("no header where one should be")
        if len(block) < tarfile.BLOCKSIZE:
            raise tarfile.ReadError("the file ends without an end mark")
    except Exception as error:  # a hostile header makes tarfile raise anything
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise  # the disk's fault, perhaps for a moment: not to be kept as the tar's. EINVAL is a seek to nowhere
        compressed = " (compressed? only plain tars can be read at any place: unpack it first)" if place == 0 else ""
        notes.append(f"damaged after byte {place:,} of {length:,}: {printable(error)}{compressed}; what lies before is used")
    if odd:
        notes.append(f"links and special files, ignored: {odd}")


def _row(file: BinaryIO, members: Mapping[str, tuple[int, int]], fields: TextFields) -> tuple[int, ...] | None:
    picture = next((members[kind] for kind in PICTURES if kind in members), None)
    if picture is None:
        return None
    is_json = fields.caption is not None or "txt" not in members
    offset, size = members.get("json" if is_json else "txt", (-1, 0))
    caption, concept = "", None
    try:
        if offset >= 0:
            caption = fields.caption_of(_read(file, offset, size), is_json=is_json)
        if fields.concept is not None and "json" in members:
            concept = _parse(_read(file, *members["json"])).get(fields.concept)
    except ValueError:
        caption = ""  # reading the row will say so
    return (*picture, offset, size, int(is_json), concept_from(concept, caption))


def _read(file: BinaryIO, offset: int, size: int) -> bytes:
    file.seek(offset)
    return file.read(min(size, MAX_TEXT))


def _parse(data: bytes) -> dict[str, Any]:
    if len(data) > _MAX_JSON:
        raise ValueError(f"JSON of more than {_MAX_JSON:,} bytes")
    try:
        value = json.loads(data.decode("utf-8-sig", "replace"))
    except RecursionError as error:
        raise ValueError("JSON nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError(f"JSON with a {type(value).__name__} where an object is expected")
    return value

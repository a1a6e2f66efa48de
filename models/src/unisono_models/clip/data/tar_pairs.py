"""Pairs in webdataset's tars as img2dataset writes them: 00000.tar with {key}.jpg, {key}.txt and {key}.json.

An index says where the images and captions lie in the tars. It is made once and cached. Nothing is ever extracted.
"""

import errno
import hashlib
import json
import os
import re
import socket
import tarfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from tarfile import TarInfo
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from unisono.collectives import all_gather
from unisono.collectives.groups import resolve_group
from unisono_models.clip.data.pairs import (
    EncodedPair,
    PairBatch,
    check_indices,
    clean_text,
    make_batch,
    make_skip,
    parse_concept,
    printable,
)
from unisono_models.datasets.images import MAX_BYTES
from unisono_models.datasets.skip_report import SkippedSample
from unisono_models.training.checkpoint.atomic_file import atomic_path
from unisono_models.training.distributed.launch import shard_range
from unisono_models.training.distributed.object_collectives import all_gather_object, raise_together
from unisono_models.training.errors import UserError

IMAGE_TYPES = ("jpg", "jpeg", "png", "webp")
COLUMNS = 6
"""A row of the index: offset and size of the image; offset (-1: none) and size of the caption, 1 if it is JSON; concept."""
_LAYOUT = 1  # version of the cached files; old files are not used
_NAME = re.compile(r"((?:.*/)?[^./]+)\.([^/]*)", re.DOTALL)  # as in webdataset: the key ends at the first dot
_MAX_HEADER = 1 << 16
_MAX_CAPTION = 1 << 16
_MAX_JSON = 1 << 22
MAX_TEXT = _MAX_JSON + 1
"""How many bytes are read for a caption at most: one more than JSON may have, so that a longer one is noticed."""


@dataclass(frozen=True)
class TextFields:
    """Where the caption and the concept of a key are found.

    caption: a field of the .json. None: the .txt; if there is none, `caption` or `text` of the .json.
    concept: a field of the .json. None: the hash of the caption.
    """

    caption: str | None = None
    concept: str | None = None

    def caption_of(self, data: bytes, *, is_json: bool) -> str:
        """Extract the caption from what was read. Raises: ValueError for broken JSON."""
        if not is_json:
            return clean_text(data[:_MAX_CAPTION])
        fields = _parse(data)
        if self.caption is not None:
            return clean_text(fields.get(self.caption))
        return clean_text(fields.get("caption") or fields.get("text"))


def index_tar(path: Path, fields: TextFields) -> tuple[NDArray[np.int64], list[str]]:
    """Make a row of `COLUMNS` for each key with an image, in the order of the tar, and notes on what is damaged or left out."""
    notes: list[str] = []
    keys: dict[str, dict[str, tuple[int, int]]] = {}
    with path.open("rb") as file:
        for name, offset, size in _members(file, notes):
            if match := _NAME.fullmatch(name):
                keys.setdefault(match[1], {}).setdefault(match[2].lower(), (offset, size))
        rows = [row for members in keys.values() if (row := _row(file, members, fields))]
    if without := len(keys) - len(rows):
        notes.append(f"keys without an image: {without}")
    return np.array(rows, dtype=np.int64).reshape(-1, COLUMNS), notes


def index_cached(path: Path, fields: TextFields, cache: Path) -> tuple[NDArray[np.int64], list[str]]:
    """Call `index_tar`, or load its result from the folder `cache` if the file still has the same size and time."""
    file = cache / f"tar-{fingerprint([path], fields)}.safetensors"
    cached = load_index(file)
    if cached is not None:
        return cached[0].numpy(), cached[2]
    rows, notes = index_tar(path, fields)
    save_index(file, torch.from_numpy(rows), torch.tensor([0, len(rows)]), notes)
    return rows, notes


def fingerprint(paths: list[Path], fields: TextFields) -> str:
    """Hash the paths, sizes and times of the files."""
    files = [(str(path.absolute()), (status := path.stat()).st_size, status.st_mtime_ns) for path in paths]
    text = json.dumps([_LAYOUT, fields.caption, fields.concept, files])
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def save_index(path: Path, rows: torch.Tensor, starts: torch.Tensor, notes: list[str]) -> bool:
    """Write the index atomically. Returns False if it cannot be written: training goes on with a full or read-only disk."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(path) as temporary:
            save_file({"rows": rows.contiguous(), "starts": starts}, temporary, {"notes": json.dumps(notes)})
    except (OSError, SafetensorError):
        return False
    return True


def load_index(path: Path) -> tuple[torch.Tensor, torch.Tensor, list[str]] | None:
    """Map rows into memory, which ranks and workers of a host then share; also load the start of each tar, and notes."""
    try:
        with safe_open(str(path), framework="pt") as file:
            rows, starts, notes = file.get_tensor("rows"), file.get_tensor("starts"), json.loads(file.metadata()["notes"])
    except Exception:  # missing or cut off: the index is made again
        return None
    good = rows.dtype == starts.dtype == torch.int64 and rows.shape[1:] == (COLUMNS,) and int(starts[-1]) == len(rows)
    return (rows, starts, notes) if good else None


class _Headers:
    """A file of which tarfile may read headers only: one of a huge or a negative size would make it read everything."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.seek, self.tell = file.seek, file.tell

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= _MAX_HEADER:
            raise tarfile.ReadError(f"a header of {size} bytes")
        return self._file.read(size)


def _members(file: BinaryIO, notes: list[str]) -> Iterator[tuple[str, int, int]]:
    """Yield name, offset and size of each plain file that is complete. Nothing is ever opened by these names."""
    length = os.fstat(file.fileno()).st_size
    place, odd = 0, 0
    try:
        archive = tarfile.TarFile(fileobj=_Headers(file), mode="r", encoding="utf-8")  # type: ignore[arg-type]
        while (member := archive.next()) is not None:
            archive.members.clear()  # type: ignore[attr-defined]  # it would keep them all
            if member.size < 0 or member.offset_data <= place or archive.offset <= place:
                raise tarfile.ReadError("a header that leads back")  # tarfile would loop forever
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
            raise  # an error of the disk, which may pass: not to be cached as damage. EINVAL is a seek to a negative offset
        compressed = " (is it compressed? Only plain tars can be read at random: unpack it first)" if place == 0 else ""
        notes.append(f"damaged after byte {place:,} of {length:,}: {printable(error)}{compressed}; what comes before is used")
    if odd:
        notes.append(f"links and special files, ignored: {odd}")


def _row(file: BinaryIO, members: Mapping[str, tuple[int, int]], fields: TextFields) -> tuple[int, ...] | None:
    image = next((members[kind] for kind in IMAGE_TYPES if kind in members), None)
    if image is None:
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
        caption = ""  # `read` will skip the row and say why
    return (*image, offset, size, int(is_json), parse_concept(concept, caption))


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


_OPEN_FILES = 64


class TarPairs:
    """The pairs (see CaptionedPairs) of many tars as one dataset, in the order of the tars and of the keys in them.

    `read` reads an image directly from its offset in the tar. `open_tars` makes it.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        rows: Tensor,
        starts: Tensor,
        *,
        fields: TextFields,
        notes: Sequence[str],
        index_file: Path | None,
    ) -> None:
        """`rows`: the index of all tars; that of tar i begins at starts[i]. `index_file`: the file that has both, too."""
        self.notes = tuple(notes)
        self._paths = [str(path) for path in paths]
        self._fields = fields
        self._index_file = index_file
        self._hold(rows, starts)

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, indices: Sequence[int], size: int) -> PairBatch:
        return make_batch(self._encoded_pairs(check_indices(indices, len(self))), size, name_of=self._name)

    def captions(self, indices: Sequence[int]) -> list[str]:
        return [self._caption_or_none(int(index)) for index in check_indices(indices, len(self))]

    def concepts(self, indices: Sequence[int]) -> NDArray[np.int64]:
        concepts: NDArray[np.int64] = self._rows[check_indices(indices, len(self)), COLUMNS - 1]
        return concepts

    def sample_ids(self, indices: Sequence[int]) -> NDArray[np.int64]:
        return check_indices(indices, len(self))

    def _encoded_pairs(self, indices: NDArray[np.int64]) -> Iterator[EncodedPair | SkippedSample]:
        for index in indices.tolist():
            offset, size, *_, concept = self._rows[index].tolist()
            try:
                caption = self._caption(index)
            except (OSError, ValueError) as error:
                yield make_skip(index, self._name(index), "broken caption", error)
                continue
            try:
                image = self._pread(index, offset, size)
            except OSError as error:
                yield make_skip(index, self._name(index), "unreadable file", error)
                continue
            yield EncodedPair(index, image, caption, concept)

    def _caption(self, index: int) -> str:
        _, _, offset, size, is_json, _ = self._rows[index].tolist()
        if offset < 0:
            return ""
        return self._fields.caption_of(self._pread(index, offset, min(size, MAX_TEXT)), is_json=bool(is_json))

    def _caption_or_none(self, index: int) -> str:
        try:
            return self._caption(index)
        except (OSError, ValueError):
            return ""

    def _name(self, index: int) -> str:
        path = self._paths[self._tar_of(index)]
        try:  # the header lies right before the image; it has the beginning of a very long name
            name = TarInfo.frombuf(self._pread(index, int(self._rows[index, 0]) - 512, 512), "utf-8", "replace").name
        except Exception:
            name = f"byte {self._rows[index, 0]}"
        return f"{os.path.basename(path)}/{name}"

    def _tar_of(self, index: int) -> int:
        return int(np.searchsorted(self._starts, index, side="right")) - 1

    def _pread(self, index: int, offset: int, size: int) -> bytes:
        if size > MAX_BYTES:
            raise OSError(f"{size:,} bytes, more than the {MAX_BYTES:,} that an image may have")
        path = self._paths[self._tar_of(index)]
        file = self._files.pop(path, None) or FileIO(path)
        self._files[path] = file
        while len(self._files) > _OPEN_FILES:
            self._files.popitem(last=False)
        data = os.pread(file.fileno(), size, offset)
        if len(data) != size:
            raise OSError(f"{path} is shorter than when it was indexed")
        return data

    def _hold(self, rows: Tensor, starts: Tensor) -> None:
        self._rows: NDArray[np.int64] = rows.numpy()
        self._starts: NDArray[np.int64] = starts.numpy()
        self._files: OrderedDict[str, FileIO] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        state = {key: value for key, value in self.__dict__.items() if key != "_files"}
        if self._index_file is not None:  # workers map the file: hundreds of millions of rows are not copied to each
            del state["_rows"], state["_starts"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._index_file is None:
            self._hold(torch.from_numpy(self._rows), torch.from_numpy(self._starts))
        elif (found := load_index(self._index_file)) is not None:
            self._hold(found[0], found[1])
        else:
            raise FileNotFoundError(f"TarPairs: {self._index_file}, which had the index of the tars, is gone")


def open_tars(
    paths: Sequence[Path], *, caption: str | None = None, concept: str | None = None, cache: Path | None = None
) -> TarPairs:
    """Open the tars `paths` as one dataset. All ranks call it together: each indexes a share of the tars for all.

    caption: the field of the .json. None: the .txt; if there is none, `caption` or `text` of the .json.
    concept: the field of the .json that says what is shown. None: pairs with equal captions have the same concept.
    cache: the folder of the cached index. None: $XDG_CACHE_HOME/unisono or ~/.cache/unisono.

    Images are .jpg, .jpeg, .png and .webp. A tar that is cut off or damaged is used as far as it can be read; `notes` says
    which tars are. Links, special files and names such as ../x do no harm, because nothing is extracted.

    Raises: UserError if there is no pair at all.
    """
    folder = cache or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "unisono"
    fields = TextFields(caption, concept)
    ranks = resolve_group(None)
    with raise_together("open_tars"):
        index_file = folder / f"tars-{fingerprint(list(paths), fields)}.safetensors"
        index = load_index(index_file)
    if not all(all_gather_object(index is not None)):
        share = shard_range(len(paths), ranks.rank, ranks.size)
        own_paths = paths[share.start : share.stop]
        with raise_together("open_tars: indexing"):
            mine = [index_cached(path, fields, folder) for path in own_paths]
        gathered = _gather(mine, [path.name for path in own_paths])
        places = all_gather_object([socket.gethostname(), str(index_file)])
        with raise_together("open_tars: writing the index"):
            if places.index(places[ranks.rank]) == ranks.rank:  # the first rank of its host
                save_index(index_file, *gathered)
        # Mapped from the file if it could be written, so that the ranks of a host share the memory.
        index = load_index(index_file)
    rows, starts, notes = index if index is not None else gathered
    if not len(rows):
        more = "; ".join(notes[:3])
        raise UserError(f"--data.source: there is no image in any of {len(paths)} tars, beginning with {paths[0]}. {more}")
    return TarPairs(paths, rows, starts, fields=fields, notes=notes, index_file=index_file if index is not None else None)


def _gather(mine: Sequence[tuple[NDArray[np.int64], list[str]]], names: Sequence[str]) -> tuple[Tensor, Tensor, list[str]]:
    """Gather every rank's share: the rows of all tars, where those of each tar begin, and notes with the tars' names."""
    arrays = [torch.from_numpy(rows) for rows, _ in mine]
    rows = all_gather(torch.cat([torch.empty((0, COLUMNS), dtype=torch.int64), *arrays]))
    counts = all_gather(torch.tensor([len(part) for part in arrays], dtype=torch.int64))
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    notes = [f"{name}: {note}" for name, (_, found) in zip(names, mine, strict=True) for note in found]
    return rows, starts, [note for part in all_gather_object(notes) for note in part]

"""Pairs in webdataset's tars, as img2dataset writes them: 00000.tar with {key}.jpg, {key}.txt and {key}.json."""

from __future__ import annotations

import os
import socket
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from io import FileIO
from pathlib import Path
from tarfile import TarInfo
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unisono.collectives import all_gather
from unisono.collectives.groups import resolve_group
from unisono_models.clip.data.images import MAX_BYTES
from unisono_models.clip.data.pairs import PairBatch
from unisono_models.clip.data.records import Record, check_indices, make_batch, skip
from unisono_models.clip.data.tar_index import COLUMNS, MAX_TEXT, TextFields, fingerprint, index_cached, load_index, save_index
from unisono_models.datasets.skip_report import SkippedSample
from unisono_models.training.distributed.object_collectives import all_gather_object, raise_together

_OPEN_FILES = 64


class TarPairs:
    """Pairs (see CaptionedPairs) of many tars as one data set, in the order of the tars and of the keys in them.

    `read` takes a picture straight from its place in the tar. Made by `open_tars`.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        rows: Tensor,
        starts: Tensor,
        *,
        fields: TextFields,
        notes: Sequence[str],
        kept: Path | None,
    ) -> None:
        """`rows`: of all tars (tar_index.COLUMNS); those of tar i begin at starts[i]. `kept`: the file that has them too."""
        self.notes = tuple(notes)
        self._paths, self._fields, self._kept = [str(path) for path in paths], fields, kept
        self._hold(rows, starts)

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, indices: Sequence[int], size: int) -> PairBatch:
        """The pairs at `indices`, pictures of `size` pixels square."""
        return make_batch(self._records(check_indices(indices, len(self))), size, name_of=self._name)

    def captions(self, indices: Sequence[int]) -> list[str]:
        """The captions at `indices`; empty where there is none."""
        return [self._caption_or_none(int(index)) for index in check_indices(indices, len(self))]

    def concepts(self, indices: Sequence[int]) -> NDArray[np.int64]:
        """The concepts at `indices`, from memory."""
        concepts: NDArray[np.int64] = self._rows[check_indices(indices, len(self)), COLUMNS - 1]
        return concepts

    def _records(self, indices: NDArray[np.int64]) -> Iterator[Record | SkippedSample]:
        for index in indices.tolist():
            offset, size, *_, concept = self._rows[index].tolist()
            try:
                caption = self._caption(index)
            except (OSError, ValueError) as error:
                yield skip(index, self._name(index), "broken caption", error)
                continue
            try:
                image = self._pread(index, offset, size)
            except OSError as error:
                yield skip(index, self._name(index), "unreadable file", error)
                continue
            yield Record(index, image, caption, concept)

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
        try:  # the header lies right before the bytes; of a very long name it has the beginning
            name = TarInfo.frombuf(self._pread(index, int(self._rows[index, 0]) - 512, 512), "utf-8", "replace").name
        except Exception:
            name = f"byte {self._rows[index, 0]}"
        return f"{os.path.basename(path)}/{name}"

    def _tar_of(self, index: int) -> int:
        return int(np.searchsorted(self._starts, index, side="right")) - 1

    def _pread(self, index: int, offset: int, size: int) -> bytes:
        if size > MAX_BYTES:
            raise OSError(f"{size:,} bytes, more than the {MAX_BYTES:,} that a member may have")
        path = self._paths[self._tar_of(index)]
        file = self._files.pop(path, None) or FileIO(path)
        self._files[path] = file
        while len(self._files) > _OPEN_FILES:
            self._files.popitem(last=False)
        data = os.pread(file.fileno(), size, offset)
        if len(data) != size:
            raise OSError(f"{path} has become shorter since it was indexed")
        return data

    def _hold(self, rows: Tensor, starts: Tensor) -> None:
        self._rows: NDArray[np.int64] = rows.numpy()
        self._starts: NDArray[np.int64] = starts.numpy()
        self._files: OrderedDict[str, FileIO] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        state = {key: value for key, value in self.__dict__.items() if key != "_files"}
        if self._kept is not None:  # a worker maps the same file: rows by the hundred million are not copied to each
            del state["_rows"], state["_starts"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._kept is None:
            self._hold(torch.from_numpy(self._rows), torch.from_numpy(self._starts))
        elif (found := load_index(self._kept)) is not None:
            self._hold(found[0], found[1])
        else:
            raise FileNotFoundError(f"TarPairs: {self._kept}, the index that this process wrote, is gone")


def open_tars(
    paths: Sequence[Path], *, caption: str | None = None, concept: str | None = None, cache: Path | None = None
) -> TarPairs:
    """The pairs of all `paths`. For all ranks together: each indexes a share of the tars, and tells the others.

    caption: the field of the .json; None: the .txt, or without one the `caption` or `text` of the .json.
    concept: the field of the .json that says what is shown; None: pairs with the same caption show the same.
    cache: where the index is kept for the next time; None: $XDG_CACHE_HOME/unisono or ~/.cache/unisono.

    Pictures are .jpg, .jpeg, .png and .webp. A tar that is cut off or damaged is used as far as it can be read; `notes` says
    which. Links, special files and names such as ../x are harmless, for nothing is extracted.

    Raises: ValueError if there is no pair at all.
    """
    folder = cache or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "unisono"
    fields, ranks = TextFields(caption, concept), resolve_group(None)
    with raise_together("open_tars"):
        kept = folder / f"tars-{fingerprint(list(paths), fields)}.safetensors"
        found = load_index(kept)
    if not all(all_gather_object(found is not None)):
        first, last = (len(paths) * r // ranks.size for r in (ranks.rank, ranks.rank + 1))
        with raise_together("open_tars: indexing"):
            mine = [index_cached(path, fields, folder) for path in paths[first:last]]
        gathered = _gather(mine, [path.name for path in paths[first:last]])
        places = all_gather_object([socket.gethostname(), str(kept)])
        with raise_together("open_tars: keeping the index"):
            if places.index(places[ranks.rank]) == ranks.rank:  # the first of its host
                save_index(kept, *gathered)
        # Mapped from the file if it could be written, so that the ranks of a host have it in memory once.
        found = load_index(kept)
    mapped = kept if found is not None else None
    rows, starts, notes = found if found is not None else gathered
    if not len(rows):
        raise ValueError(f"open_tars: no picture in any of {len(paths)} tars, from {paths[0]} on. " + "; ".join(notes[:3]))
    return TarPairs(paths, rows, starts, fields=fields, notes=notes, kept=mapped)


def _gather(mine: Sequence[tuple[NDArray[np.int64], list[str]]], names: Sequence[str]) -> tuple[Tensor, Tensor, list[str]]:
    """Rows of all tars, where each tar's begin, and notes with the tar's name, from every rank's share of them."""
    arrays = [torch.from_numpy(rows) for rows, _ in mine]
    rows = all_gather(torch.cat([torch.empty((0, COLUMNS), dtype=torch.int64), *arrays]))
    counts = all_gather(torch.tensor([len(part) for part in arrays], dtype=torch.int64))
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    notes = [f"{name}: {note}" for name, (_, found) in zip(names, mine, strict=True) for note in found]
    return rows, starts, [note for part in all_gather_object(notes) for note in part]

"""An index of the lines of text files: where every so many of them begin, so that reading can start there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unisono.collectives import all_gather
from unisono.collectives.groups import resolve_group
from unisono_models.datasets.file_patterns import PACKED, check_same_files
from unisono_models.recommender.data.blocks import share
from unisono_models.training.distributed.launch import Ranks
from unisono_models.training.distributed.object_collectives import raise_together

_CHUNK = 1 << 20
_SEGMENT = 1 << 26
_NEWLINE = 10


class Place(NamedTuple):
    """Where a block is: bytes `start` to `stop` of a file. `line`: how many lines of the file are before it."""

    file: int
    start: int
    stop: int
    line: int


class LineIndex:
    """Blocks of neighbouring lines, in the order of the files. Made by `index_lines`.

    sizes: int64 (blocks,), lines in each. starts: int64 (blocks,), the byte of its file at which each begins.
    files: int64 (files, 2), the number of blocks of each file, and its bytes.
    """

    def __init__(self, sizes: Tensor, starts: Tensor, files: Tensor) -> None:
        self.sizes, self.starts, self.files = sizes, starts, files
        self._rows = torch.nn.functional.pad(sizes.cumsum(0), (1, 0))
        self._ends = files[:, 0].cumsum(0)

    def lines_before(self, block: int) -> int:
        """Lines in all blocks before this one, of all files."""
        return int(self._rows[block])

    def locate(self, block: int) -> Place:
        """Where to read a block."""
        if not 0 <= block < len(self.sizes):
            raise IndexError(f"LineIndex.locate: block={block} must be at least 0 and less than {len(self.sizes)}")
        file = int(torch.searchsorted(self._ends, block, right=True))
        end, (count, size) = int(self._ends[file]), self.files[file].tolist()
        stop = size if block + 1 == end else int(self.starts[block + 1])
        return Place(file, int(self.starts[block]), stop, self.lines_before(block) - self.lines_before(end - count))


def index_lines(paths: Sequence[Path], *, lines_per_block: int = 512, ranks: Ranks | None = None) -> LineIndex:
    """The lines of all `paths`, in blocks. For all ranks together: each reads a share of the bytes, once, and tells the others.

    A block has `lines_per_block` lines; fewer at the end of a file and of each 64 MiB of it, so that no rank needs to know
    what another has counted. So the blocks do not depend on the number of ranks. A last line need not end, and an empty file
    has no lines. Memory: 16 bytes for each block.

    ranks: None: those of the process group, or one.

    Raises: ValueError for compressed files, or if ranks see different files; what a rank cannot read reaches all as RanksError.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "day_0"
        >>> _ = path.write_text("first\\nsecond\\nthird")
        >>> index = index_lines([path], lines_per_block=2)
        >>> index.sizes, index.locate(1)
        (tensor([2, 1]), Place(file=0, start=13, stop=18, line=2))
    """
    paths = [Path(path) for path in paths]
    if lines_per_block < 1:
        raise ValueError(f"index_lines: lines_per_block={lines_per_block} must be at least 1")
    with raise_together("index_lines"):
        if packed := [str(path) for path in paths if path.suffix.lower() in PACKED]:
            raise ValueError(
                f"index_lines: {packed[0]}: a compressed file cannot be read from any line: unpack it, or convert it to parquet"
            )
    me = ranks or resolve_group(None)
    check_same_files(paths, source=paths, what="index_lines")
    with raise_together("index_lines"):
        sizes = [path.stat().st_size for path in paths]
        segments = [
            (file, start, min(start + _SEGMENT, size)) for file, size in enumerate(sizes) for start in range(0, size, _SEGMENT)
        ]
        first, last = share(len(segments), me.rank, me.size)
        mine = [_find_lines(paths[file], start, stop, lines_per_block) for file, start, stop in segments[first:last]]
    blocks = all_gather(torch.cat([torch.empty((0, 2), dtype=torch.int64), *map(torch.from_numpy, mine)]))
    counts = all_gather(torch.tensor([len(found) for found in mine], dtype=torch.int64))
    of_file = torch.tensor([file for file, _, _ in segments], dtype=torch.int64)
    by_file = torch.zeros(len(paths), dtype=torch.int64).index_add_(0, of_file, counts)
    files = torch.stack([by_file, torch.tensor(sizes, dtype=torch.int64)], 1)
    return LineIndex(blocks[:, 1].contiguous(), blocks[:, 0].contiguous(), files)


def _find_lines(path: Path, start: int, stop: int, every: int) -> NDArray[np.int64]:
    """Every so many of the lines that begin between two bytes of a file: where it begins, and the lines up to the next such."""
    count, found = 0, []
    if start == 0:  # elsewhere a line begins behind a newline, which may be the last byte of the segment before
        count, found = 1, [np.zeros(1, dtype=np.int64)]
    buffer = np.empty(_CHUNK, dtype=np.uint8)
    place, last = max(start - 1, 0), stop - 1
    with path.open("rb", buffering=0) as file:
        file.seek(place)
        while place < last:
            size = file.readinto(buffer[: last - place].data)
            if not size:
                raise OSError(f"{path}: ends at byte {place:,}, but had {stop:,} or more when indexing began")
            newlines = np.flatnonzero(buffer[:size] == _NEWLINE)
            found.append(newlines[-count % every :: every] + (place + 1))
            count += len(newlines)
            place += size
    starts = np.concatenate([np.empty(0, dtype=np.int64), *found])
    lines = np.full(len(starts), every, dtype=np.int64)
    lines[-1:] = count - every * (len(starts) - 1)
    return np.stack([starts, lines], 1)

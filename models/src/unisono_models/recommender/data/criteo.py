"""The fields of Criteo's lines: of many at once if all are well formed, otherwise line by line."""

from __future__ import annotations

import re
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
from unisono_models.datasets.skip_report import SkippedSample
from unisono_models.recommender.data.batch import Batch, Ids
from unisono_models.recommender.data.chunks import share
from unisono_models.recommender.data.features import Feature
from unisono_models.training.distributed.launch import Ranks
from unisono_models.training.distributed.object_collectives import raise_together

INTEGERS, HEXES = 13, 26
COLUMNS = 1 + INTEGERS + HEXES
_TAB, _NEWLINE, _RETURN, _MINUS = b"\t\n\r-"
_WORD = 8
_PAD = 2 * _WORD  # before the first byte, so that 16 digits can be read up to the end of any field
_INTEGER = re.compile(rb"[+-]?[0-9]{1,18}")
_HEX = re.compile(rb"[0-9a-fA-F]{1,16}")
_NIBBLES = bytes(int(chr(byte), 16) if chr(byte) in "0123456789abcdefABCDEF" else 255 for byte in range(256))
# By number of digits: which bytes of a word are theirs. A word that is read from memory has the last byte in its highest bits.
_OWN = np.array([0, *((1 << 64) - (1 << 8 * (_WORD - digits)) for digits in range(1, _WORD + 1))], dtype=np.uint64)


class Fields(NamedTuple):
    """What the lines that are well formed have; -1 stands for a blank hex field, 0 for a blank integer."""

    good: NDArray[np.bool_]
    """(lines,): which ones."""
    labels: NDArray[np.int64]
    """(good lines,)"""
    integers: NDArray[np.int64]
    """(columns asked for, good lines)"""
    ids: NDArray[np.int64]
    """(columns asked for, good lines)"""
    bad: list[tuple[int, str, str]]
    """The others: line, reason, detail."""


def parse_lines(data: bytes, *, integers: Sequence[int], ids: Sequence[int]) -> Fields:
    """Label, integers and hex strings of the lines of `data`. Only the columns that are asked for are looked at.

    integers, ids: which of the 13 and of the 26, from 0. The last line may lack its newline.

    Example:
        >>> line = "\\t".join(["1", "-5", *[""] * 12, "00ff", *[""] * 25])
        >>> fields = parse_lines(f"{line}\\n1\\t2".encode(), integers=[0, 1], ids=[0, 1])
        >>> fields.labels.tolist(), fields.integers.tolist(), fields.ids.tolist()
        ([1], [[-5], [0]], [[255], [-1]])
        >>> fields.bad
        [(1, 'wrong number of columns', '2 columns, expected 40')]
    """
    if data and not data.endswith(b"\n"):
        data += b"\n"
    fields = _parse_all(data, [1 + column for column in integers], [1 + INTEGERS + column for column in ids])
    return fields or _parse_each(data, integers, ids)


def _parse_all(data: bytes, integers: Sequence[int], ids: Sequence[int]) -> Fields | None:
    """None if anything is unusual."""
    text = np.frombuffer(data, dtype=np.uint8)
    marks = np.flatnonzero((text == _TAB) | (text == _NEWLINE))
    newlines = text[marks] == _NEWLINE
    rows = int(newlines.sum())
    if len(marks) != rows * COLUMNS or not newlines[COLUMNS - 1 :: COLUMNS].all() or not data.isascii():
        return None
    starts = np.ascontiguousarray(np.concatenate([[0], marks[:-1] + 1])[: len(marks)].reshape(rows, COLUMNS).T)
    stops = np.ascontiguousarray(marks.reshape(rows, COLUMNS).T)
    stops[-1] -= text[stops[-1] - 1] == _RETURN
    labels = text[starts[0]] - ord("0")
    if (labels > 1).any() or (stops[0] - starts[0] != 1).any():
        return None
    nibbles = (b"\0" * _PAD + data).translate(_NIBBLES)
    found = _decimals(text, nibbles, starts[integers], stops[integers])
    raw = _hexes(nibbles, starts[ids], stops[ids])
    if found is None or raw is None:
        return None
    return Fields(np.ones(rows, dtype=np.bool_), labels.astype(np.int64), found, raw, [])


def _decimals(
    text: NDArray[np.uint8], nibbles: bytes, starts: NDArray[np.int64], stops: NDArray[np.int64]
) -> NDArray[np.int64] | None:
    lengths = stops - starts
    negative = (text[starts] == _MINUS) & (lengths > 0)
    digits = lengths - negative
    if (negative & (digits == 0)).any() or digits.max(initial=0) > 2 * _WORD:
        return None
    value = np.zeros(starts.shape, dtype=np.int64)
    for word, scale in _words(nibbles, stops, digits, 10**_WORD):
        if ((word | (word + np.uint64(0x0606060606060606))) & np.uint64(0xF0F0F0F0F0F0F0F0)).any():  # a digit above 9
            return None
        # Pairs of digits, of pairs, of these: the lower byte is the higher digit.
        word = (word * np.uint64(10 * 2**8 + 1) >> np.uint64(8)) & np.uint64(0x00FF00FF00FF00FF)
        word = (word * np.uint64(100 * 2**16 + 1) >> np.uint64(16)) & np.uint64(0x0000FFFF0000FFFF)
        value += (word * np.uint64(10_000 * 2**32 + 1) >> np.uint64(32)).astype(np.int64) * scale
    return np.where(negative, -value, value)


def _hexes(nibbles: bytes, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> NDArray[np.int64] | None:
    digits = stops - starts
    if digits.max(initial=0) > 2 * _WORD:
        return None
    value = np.zeros(starts.shape, dtype=np.uint64)
    for word, scale in _words(nibbles, stops, digits, 2**32):
        if (word & np.uint64(0xF0F0F0F0F0F0F0F0)).any():
            return None
        word = (word << np.uint64(4) | word >> np.uint64(8)) & np.uint64(0x00FF00FF00FF00FF)
        word = (word << np.uint64(8) | word >> np.uint64(16)) & np.uint64(0x0000FFFF0000FFFF)
        word = (word << np.uint64(16) | word >> np.uint64(32)) & np.uint64(0x00000000FFFFFFFF)
        value += word * np.uint64(scale)
    return np.where(digits == 0, np.int64(-1), value.view(np.int64))


def _words(
    nibbles: bytes, stops: NDArray[np.int64], digits: NDArray[np.int64], base: int
) -> list[tuple[NDArray[np.uint64], int]]:
    """The last 8 digits of each field, one in each byte, and the 8 before if any field has so many; with what they count."""
    if len(nibbles) < _PAD + _WORD:  # no text
        return []
    words = np.ndarray(len(nibbles) - _WORD + 1, dtype="<u8", buffer=nibbles, strides=(1,))
    found = [(words[stops + (_PAD - _WORD)] & _OWN[np.minimum(digits, _WORD)], 1)]
    if digits.max(initial=0) > _WORD:
        found.append((words[stops + (_PAD - 2 * _WORD)] & _OWN[np.clip(digits - _WORD, 0, _WORD)], base))
    return found


def _parse_each(data: bytes, integers: Sequence[int], ids: Sequence[int]) -> Fields:
    rows, bad = [], []
    lines = data.split(b"\n")[:-1]
    good = np.ones(len(lines), dtype=np.bool_)
    for number, line in enumerate(lines):
        try:
            rows.append(_parse(line, integers, ids))
        except _BadLineError as error:
            bad.append((number, *error.args))
            good[number] = False
    table = np.ascontiguousarray(np.array(rows, dtype=np.int64).reshape(len(rows), 1 + len(integers) + len(ids)).T)
    return Fields(good, table[0], table[1 : 1 + len(integers)], table[1 + len(integers) :], bad)


class _BadLineError(ValueError):
    """Reason and detail."""


def _parse(line: bytes, integers: Sequence[int], ids: Sequence[int]) -> list[int]:
    try:
        line.decode()
    except UnicodeDecodeError as error:
        raise _BadLineError("not UTF-8", f"byte {line[error.start]:#x} at {error.start}") from error
    fields = line.removesuffix(b"\r").split(b"\t")
    if len(fields) != COLUMNS:
        raise _BadLineError("wrong number of columns", f"{len(fields)} columns, expected {COLUMNS}")
    if fields[0] not in (b"0", b"1"):
        raise _BadLineError("label not 0 or 1", _show(fields[0]))
    row = [int(fields[0])]
    for column in integers:
        field = fields[1 + column]
        if field and not _INTEGER.fullmatch(field):
            raise _BadLineError("not an integer", f"I{column + 1} is {_show(field)}")
        row.append(int(field or b"0"))
    for column in ids:
        field = fields[1 + INTEGERS + column]
        if field and not _HEX.fullmatch(field):
            raise _BadLineError("not hex of at most 16 digits", f"C{column + 1} is {_show(field)}")
        value = int(field, 16) if field else -1
        row.append(value - (value >> 63 << 64) if value >= 0 else value)
    return row


def _show(field: bytes) -> str:
    return repr(field[:40].decode(errors="replace")) + ("…" if len(field) > 40 else "")


_CHUNK = 1 << 20
_SEGMENT = 1 << 26
_NEWLINE = 10


class ChunkLocation(NamedTuple):
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

    def locate(self, block: int) -> ChunkLocation:
        """Where to read a block."""
        if not 0 <= block < len(self.sizes):
            raise IndexError(f"LineIndex.locate: block={block} must be at least 0 and less than {len(self.sizes)}")
        file = int(torch.searchsorted(self._ends, block, right=True))
        end, (count, size) = int(self._ends[file]), self.files[file].tolist()
        stop = size if block + 1 == end else int(self.starts[block + 1])
        return ChunkLocation(file, int(self.starts[block]), stop, self.lines_before(block) - self.lines_before(end - count))


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


INTEGER_COLUMNS = tuple(f"I{number}" for number in range(1, INTEGERS + 1))
HEX_COLUMNS = tuple(f"C{number}" for number in range(1, HEXES + 1))


class CriteoChunks:
    """Blocks (see blocks.Blocks) of Criteo's files, with the features asked for: numbers of I1 to I13, ids of C1 to C26.

    A number is log(x + 3), x being at least -2, and 0 if blank. An id is the value of the hex string (as int64, so that
    16 digits may give a negative one), and -1 if blank.
    index: of the lines of these files (line_index.index_lines).

    A line is bad if it has not 40 columns, is not UTF-8, its label is not 0 or 1, or a field that is asked for is neither
    blank nor an integer, or hex of at most 16 digits. So all lines of a test file without labels are.

    Example:
        index = index_lines(paths)
        blocks = CriteoBlocks(paths, [Feature("I1", "number"), Feature("C1", "id", 100_000)], index=index)
        blocks.read(0, 0, 100).labels  ->  float32 (100,)
    """

    def __init__(self, paths: Sequence[Path], features: Sequence[Feature], *, index: LineIndex) -> None:
        if len(paths) != len(index.files):
            raise ValueError(f"CriteoBlocks: index: of {len(index.files)} files, but there are {len(paths)} paths")
        for feature in features:
            known = {"number": INTEGER_COLUMNS, "id": HEX_COLUMNS}.get(feature.kind, ())
            if feature.name not in known:
                raise ValueError(
                    f"CriteoBlocks: features: {feature.name!r} of kind {feature.kind!r}: there are numbers I1 to "
                    f"I{INTEGERS} and ids C1 to C{HEXES}"
                )
        self._paths, self._index = [Path(path) for path in paths], index
        self._integers = [INTEGER_COLUMNS.index(feature.name) for feature in features if feature.kind == "number"]
        self._names = [feature.name for feature in features if feature.kind == "id"]
        self._hexes = [HEX_COLUMNS.index(name) for name in self._names]

    @property
    def sizes(self) -> Tensor:
        return self._index.sizes

    @property
    def groups(self) -> None:
        return None

    def read(self, block: int, start: int, stop: int) -> Batch:
        """Lines `start` to `stop` of a block.

        Raises: OSError if the file has changed since it was indexed.
        """
        place = self._index.locate(block)
        path, size = self._paths[place.file], int(self.sizes[block])
        if not 0 <= start <= stop <= size:
            raise IndexError(
                f"CriteoBlocks.read: start={start} and stop={stop} must be within the {size} rows of block {block}"
            )
        with path.open("rb") as file:
            file.seek(place.start)
            data = file.read(place.stop - place.start)
        ends = np.flatnonzero(np.frombuffer(data, dtype=np.uint8) == ord("\n")) + 1
        if len(data) != place.stop - place.start or len(ends) + (not data.endswith(b"\n")) != size:
            raise OSError(
                f"CriteoBlocks.read: {path} has changed since it was indexed: bytes {place.start:,} to {place.stop:,}"
            )
        edges = [0, *ends.tolist()] if data.endswith(b"\n") else [0, *ends.tolist(), len(data)]
        fields = parse_lines(data[edges[start] : edges[stop]], integers=self._integers, ids=self._hexes)
        ids: dict[str, Ids] = {name: torch.from_numpy(column) for name, column in zip(self._names, fields.ids, strict=True)}
        numbers = np.log(np.maximum(fields.integers, -2) + 3.0).astype(np.float32).T
        name = path.name if path.name.isprintable() else ascii(path.name)
        return Batch(
            ids,
            numbers=torch.from_numpy(np.ascontiguousarray(numbers)),
            labels=torch.from_numpy(fields.labels.astype(np.float32)),
            index=torch.from_numpy(np.flatnonzero(fields.good) + (self._index.lines_before(block) + start)),
            skipped=tuple(
                SkippedSample(place.line + start + number + 1, name, reason, error) for number, reason, error in fields.bad
            ),
        )

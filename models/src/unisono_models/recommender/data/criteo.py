"""Criteo's click logs: TSV without a header, with a label, 13 integers (I1 to I13) and 26 hex strings (C1 to C26).

The lines are parsed here and not by pyarrow.csv: it reads no hex numbers, it raises for a whole chunk if one field is bad, and
with hex numbers converted in Python it is four times slower on chunks of 512 lines.
"""

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
from unisono_models.recommender.data.features import Feature
from unisono_models.training.distributed.launch import shard_range
from unisono_models.training.distributed.object_collectives import raise_together

INTEGER_COLUMNS = tuple(f"I{number}" for number in range(1, 14))
HEX_COLUMNS = tuple(f"C{number}" for number in range(1, 27))
COLUMNS = ("label", *INTEGER_COLUMNS, *HEX_COLUMNS)
_TAB, _NEWLINE, _RETURN, _MINUS = b"\t\n\r-"
_READ_BYTES = 1 << 20
_SEGMENT_BYTES = 1 << 26
_WORD = 8
_PAD = 2 * _WORD  # bytes before the text, so that 16 digits can be read up to the end of any field
_INTEGER = re.compile(rb"[+-]?[0-9]{1,18}")
_HEX = re.compile(rb"[0-9a-fA-F]{1,16}")
_NIBBLES = bytes(int(chr(byte), 16) if chr(byte) in "0123456789abcdefABCDEF" else 255 for byte in range(256))
# For each number of digits, a mask of their bytes in a word. A word read from memory has the last byte in its highest bits.
_DIGIT_MASKS = np.array([0, *((1 << 64) - (1 << 8 * (_WORD - digits)) for digits in range(1, _WORD + 1))], dtype=np.uint64)


class CriteoChunks:
    """Chunks (see chunks.py) of Criteo's files, with some of the features: numbers I1 to I13, ids C1 to C26.

    A number becomes log(x + 3), where x is at least -2 and a blank is 0. An id is the value of the hex string as an int64 (16
    digits may give a negative one), and -1 for a blank.

    A line is bad if it does not have 40 columns, is not UTF-8, has a label other than 0 or 1, or if one of the features is not
    an integer or hex of at most 16 digits. So all lines of a test file without labels are bad.

    Args:
        index: The index of these files, from `index_lines`.

    Example:
        index = index_lines(paths)
        chunks = CriteoChunks(paths, [Feature("I1", "number"), Feature("C1", "id", 100_000)], index=index)
        chunks.read(0, 0, 100).labels  ->  float32 (100,)
    """

    def __init__(self, paths: Sequence[Path], features: Sequence[Feature], *, index: LineIndex) -> None:
        if len(paths) != len(index.files):
            raise ValueError(f"CriteoChunks: index: it has {len(index.files)} files, but there are {len(paths)} paths")
        for feature in features:
            known = {"number": INTEGER_COLUMNS, "id": HEX_COLUMNS}.get(feature.kind, ())
            if feature.name not in known:
                raise ValueError(
                    f"CriteoChunks: features: {feature.name!r} of kind {feature.kind!r}: there are numbers I1 to I13 and ids "
                    "C1 to C26"
                )
        self._paths = [Path(path) for path in paths]
        self._index = index
        self._names = [feature.name for feature in features if feature.kind == "id"]
        self._id_columns = [COLUMNS.index(name) for name in self._names]
        self._integer_columns = [COLUMNS.index(feature.name) for feature in features if feature.kind == "number"]

    @property
    def sizes(self) -> Tensor:
        return self._index.sizes

    @property
    def groups(self) -> None:
        return None

    def read(self, chunk: int, start: int, stop: int) -> Batch:
        """Read lines `start` to `stop` of a chunk. Raises: OSError if the file has changed since it was indexed."""
        location = self._index.locate(chunk)
        path = self._paths[location.file]
        size = int(self.sizes[chunk])
        if not 0 <= start <= stop <= size:
            raise IndexError(
                f"CriteoChunks.read: start={start} and stop={stop} must be within the {size} rows of chunk {chunk}"
            )
        with path.open("rb") as file:
            file.seek(location.start)
            data = file.read(location.stop - location.start)
        edges = [0, *(np.flatnonzero(np.frombuffer(data, dtype=np.uint8) == _NEWLINE) + 1).tolist()]
        if not data.endswith(b"\n"):
            edges.append(len(data))
        if len(data) != location.stop - location.start or len(edges) - 1 != size:
            raise OSError(
                f"CriteoChunks.read: {path} has changed since it was indexed: bytes {location.start:,} to {location.stop:,}"
            )
        lines = parse_lines(data[edges[start] : edges[stop]], integers=self._integer_columns, ids=self._id_columns)
        ids: dict[str, Ids] = {name: torch.from_numpy(column) for name, column in zip(self._names, lines.ids, strict=True)}
        numbers = np.log(np.maximum(lines.integers, -2) + 3.0).astype(np.float32).T
        file_name = path.name if path.name.isprintable() else ascii(path.name)
        first_line = location.line + start + 1
        return Batch(
            ids,
            numbers=torch.from_numpy(np.ascontiguousarray(numbers)),
            labels=torch.from_numpy(lines.labels.astype(np.float32)),
            index=torch.from_numpy(np.flatnonzero(lines.good) + (self._index.lines_before(chunk) + start)),
            skipped=tuple(SkippedSample(first_line + number, file_name, reason, error) for number, reason, error in lines.bad),
        )


class ChunkLocation(NamedTuple):
    """Bytes `start` to `stop` of a file. `line`: how many lines of the file come before."""

    file: int
    start: int
    stop: int
    line: int


class LineIndex:
    """Where chunks of neighbouring lines begin, in the order of the files. `index_lines` makes it.

    Args:
        sizes: int64 (chunks,), the lines of each chunk.
        starts: int64 (chunks,), the byte of its file at which each chunk begins.
        files: int64 (files, 2), the number of chunks of each file, and its size in bytes.
    """

    def __init__(self, sizes: Tensor, starts: Tensor, files: Tensor) -> None:
        self.sizes, self.starts, self.files = sizes, starts, files
        self._lines_before = torch.nn.functional.pad(sizes.cumsum(0), (1, 0))
        self._file_ends = files[:, 0].cumsum(0)

    def lines_before(self, chunk: int) -> int:
        """The number of lines in all chunks before this one, over all files."""
        return int(self._lines_before[chunk])

    def locate(self, chunk: int) -> ChunkLocation:
        if not 0 <= chunk < len(self.sizes):
            raise IndexError(f"LineIndex.locate: chunk={chunk} must be at least 0 and less than {len(self.sizes)}")
        file = int(torch.searchsorted(self._file_ends, chunk, right=True))
        file_end = int(self._file_ends[file])
        chunks_of_file, file_bytes = self.files[file].tolist()
        stop = file_bytes if chunk + 1 == file_end else int(self.starts[chunk + 1])
        line = self.lines_before(chunk) - self.lines_before(file_end - chunks_of_file)
        return ChunkLocation(file, int(self.starts[chunk]), stop, line)


def index_lines(paths: Sequence[Path], *, lines_per_chunk: int = 512) -> LineIndex:
    """Count the lines of all `paths` and divide them into chunks. All ranks call; each reads a share of the bytes, once.

    A chunk has `lines_per_chunk` lines, and fewer at the end of a file and at the end of each 64 MiB of it, so that no rank
    needs to know what another has counted. The chunks do not depend on the number of ranks. The last line of a file may lack
    its newline; an empty file has no lines. Memory: 16 bytes for each chunk.

    Raises: ValueError for compressed files, or if ranks see different files. RanksError on all ranks if one cannot read.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "day_0"
        >>> _ = path.write_text("first\\nsecond\\nthird")
        >>> index = index_lines([path], lines_per_chunk=2)
        >>> index.sizes, index.locate(1)
        (tensor([2, 1]), ChunkLocation(file=0, start=13, stop=18, line=2))
    """
    paths = [Path(path) for path in paths]
    if lines_per_chunk < 1:
        raise ValueError(f"index_lines: lines_per_chunk={lines_per_chunk} must be at least 1")
    with raise_together("index_lines"):
        if packed := [str(path) for path in paths if path.suffix.lower() in PACKED]:
            raise ValueError(
                f"index_lines: {packed[0]}: a compressed file cannot be read from any line: unpack it, or convert it to parquet"
            )
    me = resolve_group(None)
    check_same_files(paths, source=paths, what="index_lines")
    with raise_together("index_lines"):
        sizes = [path.stat().st_size for path in paths]
        segments = [
            (file, start, min(start + _SEGMENT_BYTES, size))
            for file, size in enumerate(sizes)
            for start in range(0, size, _SEGMENT_BYTES)
        ]
        my_segments = [segments[number] for number in shard_range(len(segments), me.rank, me.size)]
        mine = [_find_chunks(paths[file], start, stop, lines_per_chunk) for file, start, stop in my_segments]
    chunks = all_gather(torch.cat([torch.empty((0, 2), dtype=torch.int64), *map(torch.from_numpy, mine)]))
    counts = all_gather(torch.tensor([len(found) for found in mine], dtype=torch.int64))
    file_of_segment = torch.tensor([file for file, _, _ in segments], dtype=torch.int64)
    chunks_of_file = torch.zeros(len(paths), dtype=torch.int64).index_add_(0, file_of_segment, counts)
    files = torch.stack([chunks_of_file, torch.tensor(sizes, dtype=torch.int64)], 1)
    return LineIndex(chunks[:, 1].contiguous(), chunks[:, 0].contiguous(), files)


def _find_chunks(path: Path, start: int, stop: int, every: int) -> NDArray[np.int64]:
    """Make chunks of `every` lines of those that begin between two bytes: (first byte, lines) of each."""
    count = 0
    found = []
    if start == 0:  # elsewhere a line begins after a newline, which may be the last byte of the segment before
        count = 1
        found.append(np.zeros(1, dtype=np.int64))
    buffer = np.empty(_READ_BYTES, dtype=np.uint8)
    position, last = max(start - 1, 0), stop - 1
    with path.open("rb", buffering=0) as file:
        file.seek(position)
        while position < last:
            size = file.readinto(buffer[: last - position].data)
            if not size:
                raise OSError(f"{path}: ends at byte {position:,}, but had at least {stop:,} bytes when indexing began")
            newlines = np.flatnonzero(buffer[:size] == _NEWLINE)
            found.append(newlines[-count % every :: every] + (position + 1))
            count += len(newlines)
            position += size
    starts = np.concatenate([np.empty(0, dtype=np.int64), *found])
    lines = np.full(len(starts), every, dtype=np.int64)
    lines[-1:] = count - every * (len(starts) - 1)
    return np.stack([starts, lines], 1)


class ParsedLines(NamedTuple):
    """The fields of the good lines, and what is wrong with the others. A blank hex field is -1, a blank integer is 0."""

    good: NDArray[np.bool_]
    """(lines,)"""
    labels: NDArray[np.int64]
    """(good lines,)"""
    integers: NDArray[np.int64]
    """(integer columns, good lines)"""
    ids: NDArray[np.int64]
    """(hex columns, good lines)"""
    bad: list[tuple[int, str, str]]
    """(line, reason, detail) of each bad line."""


def parse_lines(data: bytes, *, integers: Sequence[int], ids: Sequence[int]) -> ParsedLines:
    """Parse the label, some integers and some hex strings of each line. Other columns are not looked at.

    All lines are parsed at once if all are well formed, otherwise one by one. The last line may lack its newline.

    Args:
        integers: Columns of integers, among 1 to 13.
        ids: Columns of hex strings, among 14 to 39.

    Example:
        >>> line = "\\t".join(["1", "-5", *[""] * 12, "00ff", *[""] * 25])
        >>> lines = parse_lines(f"{line}\\n1\\t2".encode(), integers=[1, 2], ids=[14, 15])
        >>> lines.labels.tolist(), lines.integers.tolist(), lines.ids.tolist()
        ([1], [[-5], [0]], [[255], [-1]])
        >>> lines.bad
        [(1, 'wrong number of columns', '2 columns, expected 40')]
    """
    if data and not data.endswith(b"\n"):
        data += b"\n"
    return _parse_all(data, integers, ids) or _parse_each(data, integers, ids)


def _parse_all(data: bytes, integers: Sequence[int], ids: Sequence[int]) -> ParsedLines | None:
    """Parse all lines at once; None if anything is unusual."""
    text = np.frombuffer(data, dtype=np.uint8)
    marks = np.flatnonzero((text == _TAB) | (text == _NEWLINE))
    newlines = text[marks] == _NEWLINE
    rows = int(newlines.sum())
    width = len(COLUMNS)
    if len(marks) != rows * width or not newlines[width - 1 :: width].all() or not data.isascii():
        return None
    starts = np.ascontiguousarray(np.concatenate([[0], marks[:-1] + 1])[: len(marks)].reshape(rows, width).T)
    stops = np.ascontiguousarray(marks.reshape(rows, width).T)
    stops[-1] -= text[stops[-1] - 1] == _RETURN
    labels = text[starts[0]] - ord("0")
    if (labels > 1).any() or (stops[0] - starts[0] != 1).any():
        return None
    nibbles = (b"\0" * _PAD + data).translate(_NIBBLES)
    integer_fields = _parse_decimals(text, nibbles, starts[integers], stops[integers])
    id_fields = _parse_hexes(nibbles, starts[ids], stops[ids])
    if integer_fields is None or id_fields is None:
        return None
    return ParsedLines(np.ones(rows, dtype=np.bool_), labels.astype(np.int64), integer_fields, id_fields, [])


def _parse_decimals(
    text: NDArray[np.uint8], nibbles: bytes, starts: NDArray[np.int64], stops: NDArray[np.int64]
) -> NDArray[np.int64] | None:
    lengths = stops - starts
    negative = (text[starts] == _MINUS) & (lengths > 0)
    digits = lengths - negative
    if (negative & (digits == 0)).any() or digits.max(initial=0) > 2 * _WORD:
        return None
    value = np.zeros(starts.shape, dtype=np.int64)
    for word, scale in _digit_words(nibbles, stops, digits, 10**_WORD):
        if ((word | (word + np.uint64(0x0606060606060606))) & np.uint64(0xF0F0F0F0F0F0F0F0)).any():  # a digit above 9
            return None
        # Eight digits become four pairs, two groups of four, one number. The lower byte is the higher digit.
        word = (word * np.uint64(10 * 2**8 + 1) >> np.uint64(8)) & np.uint64(0x00FF00FF00FF00FF)
        word = (word * np.uint64(100 * 2**16 + 1) >> np.uint64(16)) & np.uint64(0x0000FFFF0000FFFF)
        value += (word * np.uint64(10_000 * 2**32 + 1) >> np.uint64(32)).astype(np.int64) * scale
    return np.where(negative, -value, value)


def _parse_hexes(nibbles: bytes, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> NDArray[np.int64] | None:
    digits = stops - starts
    if digits.max(initial=0) > 2 * _WORD:
        return None
    value = np.zeros(starts.shape, dtype=np.uint64)
    for word, scale in _digit_words(nibbles, stops, digits, 2**32):
        if (word & np.uint64(0xF0F0F0F0F0F0F0F0)).any():
            return None
        word = (word << np.uint64(4) | word >> np.uint64(8)) & np.uint64(0x00FF00FF00FF00FF)
        word = (word << np.uint64(8) | word >> np.uint64(16)) & np.uint64(0x0000FFFF0000FFFF)
        word = (word << np.uint64(16) | word >> np.uint64(32)) & np.uint64(0x00000000FFFFFFFF)
        value += word * np.uint64(scale)
    return np.where(digits == 0, np.int64(-1), value.view(np.int64))


def _digit_words(
    nibbles: bytes, stops: NDArray[np.int64], digits: NDArray[np.int64], base: int
) -> list[tuple[NDArray[np.uint64], int]]:
    """The last 8 digits of each field, one in each byte, and the 8 before if a field has so many; each with its factor."""
    if len(nibbles) < _PAD + _WORD:  # no text
        return []
    words = np.ndarray(len(nibbles) - _WORD + 1, dtype="<u8", buffer=nibbles, strides=(1,))
    found = [(words[stops + (_PAD - _WORD)] & _DIGIT_MASKS[np.minimum(digits, _WORD)], 1)]
    if digits.max(initial=0) > _WORD:
        found.append((words[stops + (_PAD - 2 * _WORD)] & _DIGIT_MASKS[np.clip(digits - _WORD, 0, _WORD)], base))
    return found


def _parse_each(data: bytes, integers: Sequence[int], ids: Sequence[int]) -> ParsedLines:
    rows, bad = [], []
    lines = data.split(b"\n")[:-1]
    good = np.ones(len(lines), dtype=np.bool_)
    for number, line in enumerate(lines):
        try:
            rows.append(_parse_line(line, integers, ids))
        except _BadLineError as error:
            bad.append((number, *error.args))
            good[number] = False
    table = np.ascontiguousarray(np.array(rows, dtype=np.int64).reshape(len(rows), 1 + len(integers) + len(ids)).T)
    return ParsedLines(good, table[0], table[1 : 1 + len(integers)], table[1 + len(integers) :], bad)


class _BadLineError(ValueError):
    """Its arguments are a reason and a detail."""


def _parse_line(line: bytes, integers: Sequence[int], ids: Sequence[int]) -> list[int]:
    try:
        line.decode()
    except UnicodeDecodeError as error:
        raise _BadLineError("not UTF-8", f"byte {line[error.start]:#x} at {error.start}") from error
    fields = line.removesuffix(b"\r").split(b"\t")
    if len(fields) != len(COLUMNS):
        raise _BadLineError("wrong number of columns", f"{len(fields)} columns, expected {len(COLUMNS)}")
    if fields[0] not in (b"0", b"1"):
        raise _BadLineError("label not 0 or 1", _quote(fields[0]))
    row = [int(fields[0])]
    for column in integers:
        field = fields[column]
        if field and not _INTEGER.fullmatch(field):
            raise _BadLineError("not an integer", f"{COLUMNS[column]} is {_quote(field)}")
        row.append(int(field or b"0"))
    for column in ids:
        field = fields[column]
        if field and not _HEX.fullmatch(field):
            raise _BadLineError("not hex of at most 16 digits", f"{COLUMNS[column]} is {_quote(field)}")
        value = int(field, 16) if field else -1
        row.append(value - (value >> 63 << 64) if value >= 0 else value)
    return row


def _quote(field: bytes) -> str:
    return repr(field[:40].decode(errors="replace")) + ("…" if len(field) > 40 else "")

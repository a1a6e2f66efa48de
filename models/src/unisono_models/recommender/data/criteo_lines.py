"""The fields of Criteo's lines: of many at once if all are well formed, otherwise line by line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

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

"""Criteo's click logs: TSV without header, a label, 13 integers (I1 to I13) and 26 hex strings (C1 to C26)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from unisono_models.datasets.skip_report import SkippedSample
from unisono_models.recommender.data.batch import Batch, Ids
from unisono_models.recommender.data.criteo_lines import HEXES, INTEGERS, parse_lines
from unisono_models.recommender.data.line_index import LineIndex
from unisono_models.recommender.features import Feature

INTEGER_COLUMNS = tuple(f"I{number}" for number in range(1, INTEGERS + 1))
HEX_COLUMNS = tuple(f"C{number}" for number in range(1, HEXES + 1))


class CriteoBlocks:
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

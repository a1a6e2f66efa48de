"""Parquet files, read by row group. The last row groups and files stay in memory."""

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Any

from unisono_models.training.errors import UserError

_OPEN_FILES = 16
_CACHE_BYTES = 256 * 2**20


def import_pyarrow(path: Path, *, what: str) -> Any:
    """Import pyarrow, to read `path`. Raises: UserError that says what to install."""
    try:
        import pyarrow  # type: ignore[import-untyped]
        import pyarrow.parquet  # type: ignore[import-untyped]
    except ImportError as error:
        raise UserError(
            f"{what}: {path}: this needs pyarrow: pip install 'unisono-models[parquet]', or pip install pyarrow"
        ) from error
    return pyarrow


def open_parquet(path: Path, *, what: str) -> Any:
    """Open a pyarrow ParquetFile. `what` names the calling function, or the option of the command line, in errors.

    Raises: UserError that says what to install, or if it is not parquet; FileNotFoundError.
    """
    pyarrow = import_pyarrow(path, what=what)
    try:
        return pyarrow.parquet.ParquetFile(path, memory_map=True)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise UserError(f"{what}: {path}: not a whole parquet file: {str(error)[:160]!a}") from error


class RowGroupReader:
    """Reads columns of row groups of several parquet files, and keeps the most recent ones up to 256 MiB.

    Threads may share it. It can be pickled for the workers of a DataLoader: a copy starts with nothing open or cached.

    Example:
        reader = RowGroupReader([Path("a.parquet"), Path("b.parquet")], what="open_pairs")
        table = reader.read(file=1, group=0, columns=["caption"])
    """

    def __init__(self, paths: Sequence[Path], *, what: str) -> None:
        """`what` names the calling function in errors."""
        self.paths = [Path(path) for path in paths]
        self._what = what
        self._reset()

    def file(self, number: int) -> Any:
        """The open ParquetFile `number`, for its schema and metadata."""
        file = self._files.pop(number, None) or open_parquet(self.paths[number], what=self._what)
        self._files[number] = file
        while len(self._files) > _OPEN_FILES:
            self._files.popitem(last=False)
        return file

    def read(self, file: int, group: int, columns: Sequence[str]) -> Any:
        """Read `columns` of row group `group` of file `file` as a pyarrow Table. Raises: OSError or ValueError if damaged."""
        key = file, group, tuple(columns)
        with self._lock:  # one thread may prefetch for training while another reads for evaluation
            table = self._cache.pop(key, None)
            if table is None:
                # One thread: ranks and workers share the cores, and the pool of threads does not survive a fork.
                table = self.file(file).read_row_group(group, columns=list(columns), use_threads=False)
            self._cache[key] = table
            while len(self._cache) > 1 and sum(cached.nbytes for cached in self._cache.values()) > _CACHE_BYTES:
                self._cache.popitem(last=False)
        return table

    def _reset(self) -> None:
        self._lock = Lock()
        self._files: OrderedDict[int, Any] = OrderedDict()
        self._cache: OrderedDict[tuple[int, int, tuple[str, ...]], Any] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {"paths": self.paths, "_what": self._what}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

"""A parquet file, opened, or an error that says what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def open_parquet(path: Path, *, what: str) -> Any:
    """A pyarrow ParquetFile. `what`: the function that asks, for its errors.

    Raises: ImportError with what to install; ValueError for what is no parquet; FileNotFoundError.
    """
    try:
        from pyarrow.parquet import ParquetFile  # type: ignore[import-untyped]
    except ImportError as error:
        raise ImportError(
            f"{what}: {path}: parquet needs pyarrow: pip install 'unisono-models[parquet]', or pip install pyarrow"
        ) from error
    try:
        return ParquetFile(path, memory_map=True)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise ValueError(f"{what}: {path}: not a whole parquet file: {str(error)[:160]!a}") from error

"""Which reader a data set needs: told from its files."""

from __future__ import annotations

import glob
import hashlib
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, TypeAlias

from unisono.collectives.groups import resolve
from unisono_models.clip.data.pairs import CaptionedPairs
from unisono_models.clip.data.parquet import ParquetPairs
from unisono_models.clip.data.tables import TablePairs
from unisono_models.clip.data.tars import open_tars
from unisono_models.training.talk import hear, together

Spec: TypeAlias = str | Path | Sequence[str | Path]
_KINDS = {".tar": "tar", ".parquet": "parquet", ".csv": "csv", ".tsv": "csv"}
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)", re.ASCII)
_SPLIT = re.compile(r"(.+)-\d{5}-of-\d{5}\.parquet")
_MOST_FILES = 1_000_000


def open_pairs(
    source: Spec,
    *,
    image: str | None = None,
    caption: str | None = None,
    concept: str | None = None,
    root: Path | None = None,
    cache: Path | None = None,
) -> CaptionedPairs:
    """The data set at `source`: webdataset tars, Hugging Face parquet, or CSV/TSV files of paths and captions.

    source: a file, a folder, a pattern (data/*.tar, data/{00000..00123}.tar, data/{a,b}.csv), or a list of such. In a folder
    tars count before parquet, and parquet before tables: img2dataset puts tables without pictures beside its tars.
    image, caption, concept: the columns, or the fields of the tars' .json. None: the usual names, and equal captions mean
    equal concepts.
    root, cache: see TablePairs and open_tars.

    For all ranks together. All of them must see the same files. What is damaged is said in `notes`, and in a warning on rank 0.

    Raises: ValueError (RanksError if not all ranks have it) that says what is wrong with the source.

    Example:
        pairs = open_pairs("/data/cc3m/{00000..00331}.tar")
        train, held_out = split_pairs(pairs, 0.01, seed=0)
    """
    with together("open_pairs"):
        kind, paths = find_files(source)
    _check_alike(source, paths)
    pairs: CaptionedPairs
    if kind == "tar":
        pairs = open_tars(paths, caption=caption, concept=concept, cache=cache)
    else:
        reader = ParquetPairs if kind == "parquet" else TablePairs
        with together("open_pairs"):
            pairs = reader(paths, image=image, caption=caption, concept=concept, root=root)
    if pairs.notes and resolve(None).rank == 0:
        more = f"\n  and {len(pairs.notes) - 5} more" if len(pairs.notes) > 5 else ""
        warnings.warn(f"open_pairs: {source}:\n  " + "\n  ".join(pairs.notes[:5]) + more, stacklevel=2)
    return pairs


def find_files(source: Spec) -> tuple[Literal["tar", "parquet", "csv"], list[Path]]:
    """What kind of data set `source` is, and its files, sorted within each pattern.

    Raises: ValueError if there are none, or of several kinds, or of several splits.
    """
    parts = [source] if isinstance(source, (str, Path)) else list(source)
    paths = [path for part in parts for path in _expand(str(part))]
    if not paths:
        raise ValueError(f"open_pairs: {source}: no files")
    if not all(path.is_file() for path in paths):
        gone = [str(path) for path in paths if not path.is_file()]
        raise ValueError(f"open_pairs: {source}: {len(gone)} of {len(paths)} files are missing, such as {', '.join(gone[:3])}")
    kinds = {_kind(path) for path in paths}
    if len(kinds) > 1:
        raise ValueError(f"open_pairs: {source}: files of several kinds ({', '.join(sorted(kinds))}): choose one by a pattern")
    splits = {match[1] for path in paths if (match := _SPLIT.fullmatch(path.name))}
    if len(splits) > 1:
        raise ValueError(
            f"open_pairs: {source}: several splits ({', '.join(sorted(splits))}) would be one data set: "
            f"choose one by a pattern, such as {paths[0].parent / min(splits)}-*.parquet"
        )
    return kinds.pop(), paths  # type: ignore[return-value]


def expand_braces(pattern: str) -> Iterator[str]:
    """`pattern` with each {000..123} and {a,b} written out; other braces stay.

    Example:
        >>> list(expand_braces("{08..10}-{a,b}.tar"))
        ['08-a.tar', '08-b.tar', '09-a.tar', '09-b.tar', '10-a.tar', '10-b.tar']
    """
    for match in _BRACES.finditer(pattern):
        inner = match[1]
        if bounds := _RANGE.fullmatch(inner):
            first, last = int(bounds[1]), int(bounds[2])
            if last - first >= _MOST_FILES:
                raise ValueError(f"open_pairs: {pattern}: more than {_MOST_FILES:,} files")
            width = len(bounds[1]) if bounds[1].startswith("0") else 0
            texts: Sequence[str] = [f"{number:0{width}d}" for number in range(first, last + 1)]
        elif "," in inner:
            texts = inner.split(",")
        else:
            continue
        for text in texts:
            for rest in expand_braces(pattern[match.end() :]):
                yield pattern[: match.start()] + text + rest
        return
    yield pattern


def _expand(part: str) -> list[Path]:
    if re.match(r"[a-z][a-z0-9+.-]*:", part) and not os.path.exists(part):
        raise ValueError(f"open_pairs: {part}: only files of this machine are read; bring the data here first")
    path = Path(part).expanduser()
    if path.is_dir():
        return _in_folder(path)
    if path.exists():
        return [path]
    found: list[Path] = []
    for text in expand_braces(str(path)):
        if glob.has_magic(text):
            found += map(Path, sorted(glob.glob(text, recursive=True)))
        else:
            found.append(Path(text))
        if len(found) > _MOST_FILES:
            raise ValueError(f"open_pairs: {part}: more than {_MOST_FILES:,} files")
    if not found:
        raise ValueError(f"open_pairs: {part}: no file matches")
    return found


def _in_folder(folder: Path) -> list[Path]:
    for files in (folder.iterdir(), folder.rglob("*")):  # deeper only if there is nothing at the top
        known = sorted(path for path in files if path.suffix.lower() in _KINDS and not path.name.startswith("."))
        for kind in ("tar", "parquet", "csv"):
            if chosen := [path for path in known if _kind(path) == kind and path.is_file()]:
                return chosen
    raise ValueError(f"open_pairs: {folder}: a folder without .tar, .parquet, .csv or .tsv files")


def _kind(path: Path) -> str:
    kind = _KINDS.get(path.suffix.lower())
    if kind is None:
        packed = ". Unpack it to a plain .tar: a compressed one cannot be read at any place" if ".tar" in path.suffixes else ""
        raise ValueError(f"open_pairs: {path}: not a .tar, .parquet, .csv or .tsv file{packed}")
    return kind


def _check_alike(source: Spec, paths: Sequence[Path]) -> None:
    """Every rank must have the same files, or its rows would not be those of the others."""
    with together("open_pairs"):
        text = "\n".join(f"{path.name} {path.stat().st_size}" for path in paths)
    mine = [len(paths), hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()]
    heard = hear(mine)
    if any(other != heard[0] for other in heard):
        different = [rank for rank, other in enumerate(heard) if other != heard[0]]
        counts = ", ".join(str(count) for count, _ in heard)
        raise ValueError(
            f"open_pairs: {source}: ranks {different} see other files than rank 0, by name or size (files a rank: {counts})"
        )

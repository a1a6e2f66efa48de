"""Files by name, folder or pattern: data/*.tar, data/{00000..00123}.tar, data/{a,b}.csv."""

import glob
import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from unisono_models.training.distributed.object_collectives import all_gather_object, raise_together
from unisono_models.training.errors import UserError

Spec: TypeAlias = str | Path | Sequence[str | Path]
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)", re.ASCII)
PACKED = (".gz", ".bz2", ".xz", ".zst", ".lz4", ".lzma", ".zip")
_MOST_FILES = 1_000_000


def find_files(source: Spec, *, kinds: Mapping[str, str], what: str) -> tuple[str, list[Path]]:
    """Find the files of `source`. Return their kind, and the files sorted by name within each folder and each * of a pattern.

    Args:
        source: A file, a folder, a pattern, or a list of these. day_{0..23} is sorted by number, day_* is not.
        kinds: From suffix to kind; "" is for names without a suffix. If a folder has several kinds, only the first counts.
        what: The option that the user typed, for errors.

    Raises: UserError if there are no files, or files of several kinds.

    Example:
        find_files("/data/criteo/day_{0..22}", kinds={".parquet": "parquet", ".tsv": "text", "": "text"}, what="--data.source")
            ->  "text", [PosixPath("/data/criteo/day_0"), …]
    """
    parts = [source] if isinstance(source, (str, Path)) else list(source)
    paths = [path for part in parts for path in _expand(str(part), kinds, what)]
    if not paths:
        raise UserError(f"{what} {source}: no files")
    if not all(path.is_file() for path in paths):
        gone = [str(path) for path in paths if not path.is_file()]
        if len(paths) == 1:
            raise UserError(f"{what} {source}: there is no such file or folder")
        raise UserError(f"{what} {source}: {len(gone)} of {len(paths)} files are missing, such as {', '.join(gone[:3])}")
    found = {_kind(path, kinds, what) for path in paths}
    if len(found) > 1:
        raise UserError(f"{what} {source}: files of several kinds ({', '.join(sorted(found))}): choose one by a pattern")
    return found.pop(), paths


def expand_braces(pattern: str, *, what: str = "expand_braces") -> Iterator[str]:
    """Expand each {000..123} and {a,b} of `pattern`. Other braces stay.

    Example:
        >>> list(expand_braces("{08..10}-{a,b}.tar"))
        ['08-a.tar', '08-b.tar', '09-a.tar', '09-b.tar', '10-a.tar', '10-b.tar']
    """
    for match in _BRACES.finditer(pattern):
        inner = match[1]
        if bounds := _RANGE.fullmatch(inner):
            first, last = int(bounds[1]), int(bounds[2])
            if last - first >= _MOST_FILES:
                raise UserError(f"{what} {pattern}: more than {_MOST_FILES:,} files")
            width = len(bounds[1]) if bounds[1].startswith("0") else 0
            texts: Sequence[str] = [f"{number:0{width}d}" for number in range(first, last + 1)]
        elif "," in inner:
            texts = inner.split(",")
        else:
            continue
        for text in texts:
            for rest in expand_braces(pattern[match.end() :], what=what):
                yield pattern[: match.start()] + text + rest
        return
    yield pattern


def check_same_files(paths: Sequence[Path], *, source: Spec, what: str) -> None:
    """Check that every rank sees the same files, by name and size. All ranks call it together.

    Raises: UserError that names the ranks whose files differ from those of rank 0.
    """
    with raise_together(what):
        text = "\n".join(f"{path.name} {path.stat().st_size}" for path in paths)
    mine = [len(paths), hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()]
    all_files = all_gather_object(mine)
    if any(other != all_files[0] for other in all_files):
        different = [rank for rank, other in enumerate(all_files) if other != all_files[0]]
        counts = ", ".join(str(count) for count, _ in all_files)
        raise UserError(
            f"{what} {source}: ranks {different} see other files than rank 0, by name or size (numbers of files: {counts})"
        )


def _expand(part: str, kinds: Mapping[str, str], what: str) -> list[Path]:
    if re.match(r"[a-z][a-z0-9+.-]*:", part) and not os.path.exists(part):
        raise UserError(f"{what} {part}: only local files can be read: download the data first")
    path = Path(part).expanduser()
    if path.is_dir():
        return _in_folder(path, kinds, what)
    if path.exists():
        return [path]
    found: list[Path] = []
    for text in expand_braces(str(path), what=what):
        if glob.has_magic(text):
            found += map(Path, sorted(glob.glob(text, recursive=True)))
        else:
            found.append(Path(text))
        if len(found) > _MOST_FILES:
            raise UserError(f"{what} {part}: more than {_MOST_FILES:,} files")
    if not found:
        raise UserError(f"{what} {part}: no file matches")
    return found


def _in_folder(folder: Path, kinds: Mapping[str, str], what: str) -> list[Path]:
    for files in (folder.iterdir(), folder.rglob("*")):  # deeper only if there is nothing at the top
        known = sorted(path for path in files if path.suffix.lower() in kinds and not path.name.startswith("."))
        for kind in dict.fromkeys(kinds.values()):
            if chosen := [path for path in known if kinds[path.suffix.lower()] == kind and path.is_file()]:
                return chosen
    raise UserError(f"{what} {folder}: a folder without {_name(kinds)} files")


def _kind(path: Path, kinds: Mapping[str, str], what: str) -> str:
    kind = kinds.get(path.suffix.lower())
    if kind is None:
        inner = next((suffix for suffix in path.suffixes if suffix.lower() in kinds), "file")
        plain = f". Unpack it to a plain {inner}: random access needs an uncompressed file"
        hint = plain if path.suffix.lower() in PACKED else ""
        raise UserError(f"{what} {path}: not a {_name(kinds)} file{hint}")
    return kind


def _name(kinds: Mapping[str, str]) -> str:
    *most, last = [suffix or "suffixless" for suffix in kinds]
    return f"{', '.join(most)} or {last}" if most else last

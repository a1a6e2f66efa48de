"""Search a run's gallery from the command line: `python -m unisono_models.clip.commands.search RUN_DIR "red heart"`."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from PIL import Image
from rich.console import Console
from rich.table import Table
from rich.text import Text

from unisono_models.clip.data.images import decode_image, read_file
from unisono_models.clip.data.pairs import printable
from unisono_models.clip.gallery import Gallery, Hit, RunError, open_gallery
from unisono_models.clip.report import Row, draw_results, make_row
from unisono_models.datasets.emoji.concepts import Vendor

PROG = "python -m unisono_models.clip.commands.search"


@dataclass(frozen=True)
class Search:
    """Type words, get pictures: a table in the terminal, and a PNG file. Nothing is opened."""

    run: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="RUN_DIR")]]
    """The directory of a finished run, or a folder with an exported model."""
    queries: tyro.conf.Positional[Annotated[tuple[str, ...], tyro.conf.arg(metavar="QUERY …")]] = ()
    """What to look for, in words. Several give a row each. An emoji stands for its name."""
    image: tyro.conf.UseAppendAction[Annotated[tuple[Path, ...], tyro.conf.arg(metavar="FILE")]] = ()
    """A picture to look for others like it. May be given several times."""
    top: int = 12
    """How many to show."""
    out: Path | None = None
    """The PNG file to write. Without it: RUN_DIR/samples/search-….png, named by the query."""
    vendor: Vendor | None = None
    """Of emoji: whose drawings to show. Without it: the closest of all."""
    tones: Literal["named", "all"] = "named"
    """Of emoji. named: variants by skin tone only if a query has the word "skin". all: always."""
    limit: int = 20_000
    """Of other data than emoji: how many of its pictures to look through."""


def main(args: Sequence[str] | None = None) -> None:
    """The command. Ends with SystemExit and one line that says why if it cannot be done."""
    search = tyro.cli(Search, prog=PROG, args=args)
    try:
        path = run_search(search, Console())
    except (RunError, ValueError, OSError) as error:
        raise SystemExit(f"{PROG}: {error}") from error
    print(f"drawn in {path}")


def run_search(search: Search, console: Console) -> Path:
    """Search, print a table for each query, and draw them all. Returns the file drawn."""
    _check(search)
    pictures = [(file, _read(file)) for file in search.image]
    gallery, folder = open_gallery(search.run, limit=search.limit)
    rows = [_find(gallery, search, query, query) for query in search.queries]
    rows += [_find(gallery, search, file.name, content) for file, content in pictures]
    for row in rows:
        console.print(_table(row.query, row.hits))
    path = search.out or folder / "samples" / f"search-{slug([*search.queries, *(file.stem for file in search.image)])}.png"
    draw_results(rows, path, credits=gallery.credits)
    return path


def slug(queries: Sequence[str]) -> str:
    """A part of a file's name that stands for `queries`.

    Example:
        >>> slug(["Red heart!"]), slug(["red heart", "a cat"])
        ('red-heart', 'red-heart-and-1-more')
    """
    words = re.sub(r"[\W_]+", "-", queries[0].casefold()).strip("-")[:40].rstrip("-") or "query"
    return words if len(queries) == 1 else f"{words}-and-{len(queries) - 1}-more"


def _check(search: Search) -> None:
    if not search.queries and not search.image:
        raise ValueError('nothing to look for: give words, such as "red heart", or --image FILE')
    if any(not query.strip() for query in search.queries):
        raise ValueError("a query is empty: say in words what to look for")
    if not 1 <= search.top <= 100:
        raise ValueError(f"--top {search.top} must be between 1 and 100")
    if search.out is not None and search.out.suffix.lower() != ".png":
        raise ValueError(f"--out {search.out}: what is drawn is a PNG file: its name has to end in .png")


def _read(file: Path) -> bytes:
    try:
        content = read_file(str(file))
        decode_image(content, 8)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ValueError(f"--image {file} cannot be read as a picture: {reason}") from error
    return content


def _find(gallery: Gallery, search: Search, name: str, query: str | bytes) -> Row:
    hits = gallery.search(query, top=search.top, vendor=search.vendor, tones=search.tones)
    shown = None
    if isinstance(query, bytes):
        pixels = decode_image(query, 128)
        shown = Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
    return make_row(gallery, name, hits, shown=shown)


def _table(query: str, hits: Sequence[Hit]) -> Table:
    drawn = any(hit.emoji for hit in hits)
    table = Table(title=Text(printable(query)), title_justify="left", title_style="bold")
    table.add_column("", justify="right", style="dim")
    if drawn:
        table.add_column("emoji")
    table.add_column("name")
    if drawn:
        table.add_column("drawn by")
    table.add_column("cosine", justify="right")
    for place, hit in enumerate(hits, start=1):
        cells = [hit.emoji, Text(printable(hit.label)), hit.vendor] if drawn else [Text(printable(hit.label))]
        table.add_row(str(place), *cells, f"{hit.score:.3f}")
    return table


if __name__ == "__main__":
    main(sys.argv[1:])

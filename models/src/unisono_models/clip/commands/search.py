"""Search a trained model's images from the command line: `python -m unisono_models.clip search RUN_DIR "red heart"`."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from PIL import Image
from rich.console import Console
from rich.table import Table
from rich.text import Text

from unisono_models.clip.data.decode import decode_image
from unisono_models.clip.data.pairs import printable
from unisono_models.clip.figures import SearchRow, draw_search_rows, make_search_row
from unisono_models.clip.gallery import Gallery, SearchHit, open_gallery
from unisono_models.datasets.images import read_image_bytes
from unisono_models.training.errors import UserError

PROG = "python -m unisono_models.clip search"


@dataclass(frozen=True)
class SearchOptions:
    """Search images by words or by an image. Prints a table and writes the results to a PNG file."""

    run: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="RUN_DIR")]]
    """The directory of a finished run, or a folder with an exported model."""
    queries: tyro.conf.Positional[Annotated[tuple[str, ...], tyro.conf.arg(metavar="QUERY …")]] = ()
    """What to look for, in words. Each query gets a row of results. An emoji stands for its name."""
    image: tyro.conf.UseAppendAction[Annotated[tuple[Path, ...], tyro.conf.arg(metavar="FILE")]] = ()
    """An image file: finds images that are similar to it. This option may be given several times."""
    top: int = 12
    """How many results to show for each query."""
    out: Path | None = None
    """The PNG file to write. Without this option: RUN_DIR/samples/search-….png, named after the query."""
    vendor: str | None = None
    """emoji: show only drawings by this vendor: noto, twemoji or openmoji. Without this option: the closest drawing."""
    tones: Literal["named", "all"] = "named"
    """emoji: when to show variants by skin tone. named: if a query contains the word "skin". all: always."""
    limit: int = 20_000
    """Files: how many of the images to search, at most."""


def main(args: Sequence[str] | None = None) -> None:
    """Run the command. Raises: UserError that says what is wrong."""
    options = tyro.cli(SearchOptions, prog=PROG, args=args)
    try:
        path = run_search(options, Console())
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from error
    print(f"The results are drawn in {path}")


def run_search(options: SearchOptions, console: Console) -> Path:
    """Search, print a table for each query, and draw all results into one file, whose path is returned."""
    _check_options(options)
    images = [(file, _read_query_image(file)) for file in options.image]
    gallery, folder = open_gallery(options.run, limit=options.limit)
    rows = [_search(gallery, options, query, query) for query in options.queries]
    rows += [_search(gallery, options, file.name, content) for file, content in images]
    for row in rows:
        console.print(_make_table(row.query, row.hits))
    names = [*options.queries, *(file.stem for file in options.image)]
    path = options.out or folder / "samples" / f"search-{slug(names)}.png"
    draw_search_rows(rows, path, credits=gallery.credits)
    return path


def slug(queries: Sequence[str]) -> str:
    """Make a part of a file name from `queries`.

    Example:
        >>> slug(["Red heart!"]), slug(["red heart", "a cat"])
        ('red-heart', 'red-heart-and-1-more')
    """
    words = re.sub(r"[\W_]+", "-", queries[0].casefold()).strip("-")[:40].rstrip("-") or "query"
    return words if len(queries) == 1 else f"{words}-and-{len(queries) - 1}-more"


def _check_options(options: SearchOptions) -> None:
    if not options.queries and not options.image:
        raise ValueError("there is nothing to look for: give words in quotation marks, or --image FILE")
    if any(not query.strip() for query in options.queries):
        raise ValueError("a query is empty: say in words what to look for")
    if not 1 <= options.top <= 100:
        raise ValueError(f"--top {options.top} must be between 1 and 100")
    if options.out is not None and options.out.suffix.lower() != ".png":
        raise ValueError(f"--out {options.out}: a PNG file is written, so its name must end in .png")


def _read_query_image(file: Path) -> bytes:
    try:
        content = read_image_bytes(str(file))
        decode_image(content, 8)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ValueError(f"--image {file} cannot be read as an image: {reason}") from error
    return content


def _search(gallery: Gallery, options: SearchOptions, name: str, query: str | bytes) -> SearchRow:
    hits = gallery.search(query, top=options.top, vendor=options.vendor, tones=options.tones)
    query_image = None
    if isinstance(query, bytes):
        query_image = Image.fromarray(decode_image(query, 128).permute(1, 2, 0).contiguous().numpy())
    return make_search_row(gallery, name, hits, query_image=query_image)


def _make_table(query: str, hits: Sequence[SearchHit]) -> Table:
    has_emoji = any(hit.emoji for hit in hits)
    table = Table(title=Text(printable(query)), title_justify="left", title_style="bold")
    table.add_column("", justify="right", style="dim")
    if has_emoji:
        table.add_column("emoji")
    table.add_column("name")
    if has_emoji:
        table.add_column("drawn by")
    table.add_column("cosine", justify="right")
    for place, hit in enumerate(hits, start=1):
        label = Text(printable(hit.label))
        cells = [hit.emoji, label, hit.vendor] if has_emoji else [label]
        table.add_row(str(place), *cells, f"{hit.score:.3f}")
    return table

"""report.html: what a run did, on one page that contains its images and needs no network."""

import base64
import json
import math
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import Path

from unisono_models.training.checkpoint.atomic_file import atomic_write
from unisono_models.training.config.serialization import read_json
from unisono_models.training.distributed.object_collectives import Json, raise_together
from unisono_models.training.run.log import read_metrics
from unisono_models.training.run.plots import draw_plots, readable_name, write_plots
from unisono_models.training.run.run_directory import RunDirectory, read_config, read_provenance

Row = Mapping[str, object]
IMAGE_TYPES = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp", ".gif": "gif", ".svg": "svg+xml"}


def html_table(rows: Sequence[Row]) -> str:
    """Format `rows` as an HTML table. The columns are their keys, in order of appearance. Numbers are aligned to the right.

    On a narrow screen a table of many columns shows each row as a list: report.css needs the name of its column in each cell.
    """
    columns = list(dict.fromkeys(name for row in rows for name in row))
    numeric = {name for name in columns if all(_is_number(row.get(name, 0)) for row in rows)}
    heads = "".join(f"<th{_class(name in numeric)}>{escape(name)}</th>" for name in columns)
    lines = []
    texts = {name: _aligned([row.get(name, "") for row in rows]) for name in columns}
    for i in range(len(rows)):
        cells = [f'<td data-column="{escape(name)}"{_class(name in numeric)}>{escape(texts[name][i])}</td>' for name in columns]
        lines.append(f"<tr>{''.join(cells)}</tr>")
    kind = ' class="wide"' if len(columns) > 3 else ""
    return f'<div class="scroll"><table{kind}><thead><tr>{heads}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def key_value_table(values: Mapping[str, object], *, code: bool = False) -> str:
    """Format names and values as an HTML table. `code` shows the values as they would be typed."""
    lines = []
    for name, value in values.items():
        kind = ' class="code"' if code else _class(_is_number(value))
        lines.append(f"<tr><th>{escape(name)}</th><td{kind}>{escape(str(value) if code else format_number(value))}</td></tr>")
    return f'<div class="scroll"><table><tbody>{"".join(lines)}</tbody></table></div>'


def embed_image(path: Path, caption: str) -> str:
    """Return HTML that contains the image file `path`. Raises: ValueError if browsers cannot show its type."""
    if path.suffix.lower() not in IMAGE_TYPES:
        raise ValueError(f"write_report: the image {path} is none of {', '.join(IMAGE_TYPES)}")
    link = data_url(path.read_bytes(), IMAGE_TYPES[path.suffix.lower()])
    below = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f'<figure><img src="{link}" alt="{escape(caption)}">{below}</figure>'


def data_url(content: bytes, kind: str = "png") -> str:
    """Return a link that contains the image."""
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def format_number(value: object) -> str:
    """Format a value for people, with four digits.

    Example:
        >>> [format_number(value) for value in (0.20483, 0.05, 12.3, 1633.0, 12345.678, 3e-9, "a")]
        ['0.2048', '0.0500', '12.30', '1,633', '12,346', '3e-09', 'a']
    """
    if not isinstance(value, float) or not math.isfinite(value):
        return f"{value:,}" if _is_number(value) and isinstance(value, int) else str(value)
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if 0.001 <= abs(value) < 1:
        return f"{value:.4f}"
    return f"{value:#.4g}".rstrip(".") if abs(value) >= 1 else f"{value:.4g}"


def print_table(rows: Sequence[Row], *, title: str, format_cell: Callable[[object], str] = format_number) -> None:
    """Print `rows` as a table on the terminal. Texts are aligned to the left, numbers to the right."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    for name in columns:
        is_text = any(isinstance(row.get(name), str) and row[name] for row in rows)
        table.add_column(name.replace("_", " "), justify="left" if is_text else "right")
    for row in rows:
        table.add_row(*(format_cell(row.get(name, "")) for name in columns))
    Console(width=None if Console().is_terminal else 110).print(table)


def print_next_commands(run: RunDirectory, commands: Mapping[str, str]) -> None:
    """Print where the report is, and what to type next: titles, and commands for `python -m`."""
    from rich.console import Console

    python = "python" if shutil.which("python") == sys.executable else sys.executable  # that of .venv may not be on the PATH
    lines = {"Report": str(run.path / "report.html")} | {title: f"{python} -m {command}" for title, command in commands.items()}
    for title, line in lines.items():
        Console().print(f"{title}:  {line}", soft_wrap=True, highlight=False)


def _aligned(values: Sequence[object]) -> list[str]:
    """Format a column of numbers below 100 with the same number of decimals. Empty cells stay empty."""
    texts = [format_number(value) for value in values]
    given = [(value, text) for value, text in zip(values, texts, strict=True) if text]
    if all(isinstance(value, float) and abs(value) < 100 and "e" not in text for value, text in given):
        decimals = max((len(text.partition(".")[2]) for _, text in given), default=0)
        if any(isinstance(value, float) and abs(value) >= 0.01 for value, _ in given):
            decimals = min(decimals, 4)
        return [f"{value:.{decimals}f}" if text else "" for value, text in zip(values, texts, strict=True)]
    return texts


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _class(numeric: bool) -> str:
    return ' class="number"' if numeric else ""


POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"  # the page loads nothing and runs nothing


@dataclass(frozen=True)
class ReportImage:
    """An image file for the report, and its caption."""

    path: Path
    caption: str


def write_report(
    run: RunDirectory,
    *,
    title: str,
    intro: str,
    images: Sequence[ReportImage] = (),
    tables: Mapping[str, Sequence[Row]] | None = None,
    notes: Sequence[str] = (),
    summary: Mapping[str, float] | None = None,
    highlights: Sequence[str] = (),
) -> Path:
    """Write report.html into the run's directory, and its curves into plots/. Return the path of the report.

    Every rank calls this; rank 0 writes. Call it before run.finish, so that a finished run has its report.

    Args:
        intro: Paragraphs, separated by empty lines.
        images: They are copied into the page, in this order.
        tables: Rows by heading. A row maps columns to values.
        notes: Shown at the end, such as licences.
        summary: The final metrics. None takes summary.json, or the last evaluation.
        highlights: The names of metrics that are shown large. None given takes the first four.

    Example:
        write_report(run, title="Emoji by their names", intro="…", images=[ReportImage(grid, "Search results")])
    """
    path = run.path / "report.html"
    with raise_together("write_report"):
        if run.first:
            lines = read_metrics(run.path)
            final = _final(run.path, lines) if summary is None else dict(summary)
            body = [
                _header(title, intro, run.path),
                html_numbers(final, highlights),
                html_section("Samples", "".join(embed_image(image.path, image.caption) for image in images), "images"),
                *(html_section(heading, html_table(rows)) for heading, rows in (tables or {}).items() if rows),
                html_section("Curves", _curves(run, lines), "curves"),
                html_section(
                    "Final metrics",
                    key_value_table({readable_name(name): value for name, value in final.items()}) if final else "",
                ),
                _reproduction(run.path),
                html_section("Notes", html_notes(notes)),
                "<footer>Written by unisono-models.</footer>",
            ]
            atomic_write(path, html_page(f"{title} ({run.path.name})", "\n".join(part for part in body if part)))
    return path


def html_page(title: str, body: str) -> str:
    """Return a whole page with the style of the reports, which loads nothing and runs nothing."""
    style = resources.files(__package__).joinpath("report.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _header(title: str, intro: str, path: Path) -> str:
    saved = read_config(path)
    starts = read_provenance(path)["starts"]
    facts = {"run": path.name, "model": saved["model"], "recipe": saved["recipe"]}
    run = saved["config"].get("run", {})
    facts |= {name: format_number(run[name]) for name in ("steps", "seed") if name in run}
    if starts:
        last = starts[-1]
        facts |= {"ranks": format_number(last["world_size"]), "device": last["machine"]["device"]}
        facts["started"] = starts[0]["time"][:16].replace("T", " ")
        if last["git"]:
            facts["commit"] = last["git"]["commit"][:10] + (" with changes" if last["git"]["dirty"] else "")
    chips = "".join(f"<li><span>{escape(name)}</span> <b>{escape(str(value))}</b></li>" for name, value in facts.items())
    paragraphs = "".join(f"<p>{escape(part.strip())}</p>" for part in intro.split("\n\n") if part.strip())
    return f'<header><h1>{escape(title)}</h1>{paragraphs}<ul class="facts">{chips}</ul></header>'


def html_numbers(final: Mapping[str, object], chosen: Sequence[str] = ()) -> str:
    """Format some values large: those in `chosen`, or the first four."""
    names = [name for name in chosen if name in final] or list(final)[:4]
    cards = [
        f"<div><dt>{escape(readable_name(name))}</dt><dd>{escape(format_number(final[name]))}</dd></div>" for name in names
    ]
    return f'<dl class="numbers">{"".join(cards)}</dl>' if cards else ""


def _curves(run: RunDirectory, lines: Sequence[dict[str, Json]]) -> str:
    light = write_plots(run.path, run.plots)
    dark = draw_plots(lines, theme="dark")
    return "".join(
        html_plot(path.read_bytes(), dark[name], f"{readable_name(name)} over steps") for name, path in light.items()
    )


def html_plot(light: bytes, dark: bytes, description: str) -> str:
    """Return a plot that follows the colour scheme of the reader."""
    return (
        f'<figure><picture><source media="(prefers-color-scheme: dark)" srcset="{data_url(dark)}">'
        f'<img src="{data_url(light)}" alt="{escape(description)}"></picture></figure>'
    )


def _reproduction(path: Path) -> str:
    """Show the commands that repeat the run, its config and its provenance."""
    saved = read_config(path)
    starts = read_provenance(path)["starts"]
    folder = shlex.quote(str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path))
    again = f"python -m unisono_models.training reproduce {folder}"
    parts = [
        "<p>Repeat the run and compare the numbers. They are bitwise equal on the same machine with as many ranks:</p>",
        f"<pre>{escape(again)}</pre>",
    ]
    if starts:
        ranks = starts[-1]["world_size"]
        runner = f"torchrun --standalone --nproc-per-node {ranks} -m" if starts[-1]["torchrun"] else "python -m"
        train = f"{runner} unisono_models.{saved['model']} train --config {folder}/config.json --run.dir {folder}-again"
        parts += ["<p>Repeat it without comparing:</p>", f"<pre>{escape(train)}</pre>"]
    flat = {name: json.dumps(value, ensure_ascii=False) for name, value in _flat(saved["config"]).items()}
    parts.append(f"<details><summary>Configuration</summary>{key_value_table(flat, code=True)}</details>")
    for place, start in enumerate(starts, 1):
        heading = "Provenance" if len(starts) == 1 else f"Provenance of start {place} of {len(starts)}"
        shown = {name: value if isinstance(value, str) else json.dumps(value) for name, value in _flat(start).items()}
        parts.append(f"<details><summary>{heading}</summary>{key_value_table(shown, code=True)}</details>")
    return html_section("How to reproduce", "".join(parts))


def html_notes(notes: Sequence[str]) -> str:
    """Format `notes` as a list."""
    return '<ul class="notes">' + "".join(f"<li>{escape(note)}</li>" for note in notes) + "</ul>" if notes else ""


def html_section(heading: str, content: str, kind: str = "") -> str:
    """Return a section, or nothing if it has no content. `kind` is a class of report.css for the content."""
    if not content:
        return ""
    inner = f'<div class="{kind}">{content}</div>' if kind else content
    return f"<section><h2>{escape(heading)}</h2>{inner}</section>"


def _final(path: Path, lines: Sequence[dict[str, Json]]) -> dict[str, float]:
    if (path / "summary.json").exists():
        return dict(read_json(path / "summary.json"))
    evaluations = [line for line in lines if line["kind"] == "evaluation"]
    return {name: value for name, value in evaluations[-1].items() if name not in ("kind", "step")} if evaluations else {}


def _flat(value: Json, where: str = "") -> dict[str, Json]:
    """Flatten nested objects to one with dotted names."""
    if not isinstance(value, dict) or not value:
        return {where: value}
    return {name: item for key in value for name, item in _flat(value[key], f"{where}.{key}" if where else key).items()}

"""Show results in the terminal, and write them as a JSON file, a Markdown report and a plot."""

import os
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.harness.benchmark import Benchmark, Section, Target
from benchmarks.harness.plot import draw
from benchmarks.harness.results import Results

TARGET_HEAD = ("target", "measured", "met", "worst case")


def print_results(benchmark: Benchmark, results: Results, console: Console) -> None:
    for section in benchmark.sections(results):
        console.print(terminal_table(benchmark, section))
    for line in benchmark.skipped():
        console.print(line, soft_wrap=True)
    table = Table(*TARGET_HEAD, title="Targets")
    for row in target_rows(benchmark.targets(results)):
        table.add_row(*row, style="red" if row[2] == "no" else "green")
    console.print(table if table.row_count else "no targets for these options")


def terminal_table(benchmark: Benchmark, section: Section) -> Table:
    table = Table(title=section.heading)
    columns = [column for column in section.columns if column.in_terminal]
    for column in columns:
        is_name = column.head == "contender"
        table.add_column(column.head, justify="left" if is_name else "right", no_wrap=is_name)
    for previous, m in zip((None, *section.rows), section.rows, strict=False):
        if previous and previous.case != m.case:
            table.add_section()
        table.add_row(*(column.cell(m) for column in columns), style="green" if benchmark.is_ours(m.contender) else None)
    return table


def write_files(benchmark: Benchmark, results: Results, folder: Path) -> Path:
    """Write DATE-NAME.json, .md and .png, and return the path of the Markdown file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{results.about['date'].split()[0]}-{results.about['benchmark']}.md"
    results.save(path.with_suffix(".json"), benchmark.derived(results))
    return write_report(benchmark, results, path)


def write_report(benchmark: Benchmark, results: Results, path: Path) -> Path:
    """Write the Markdown report at `path` and the plot beside it."""
    about = results.about
    draw(benchmark, results, path.with_suffix(".png"))
    versions = [f"{name} {version}" for name, version in {"torch": about["torch"], **about.get("packages", {})}.items()]
    facts = [
        f"Command: `{about['command']}`{' (quick: too small to quote)' if about.get('quick') else ''}",
        f"Date: {about['date']}",
        f"Machine: {about['machine']}",
        ", ".join(versions),
    ]
    targets = markdown_table(TARGET_HEAD, target_rows(benchmark.targets(results)))
    parts = [
        f"# Benchmark of {benchmark.title}",
        bullet_list(facts) + "\n" + benchmark.text(results).rstrip(),
        "## Targets",
        targets if "\n| " in targets.partition("---")[2] else "There are none for these options.",
        f"![{benchmark.plot_title}]({path.with_suffix('.png').name})",
    ]
    for section in benchmark.sections(results):
        parts += [f"## {section.heading}", section.before, section_table(benchmark, section), section.after]
    parts.append(bullet_list(benchmark.skipped()))
    path.write_text("\n\n".join(part for part in parts if part) + "\n")
    return path


def section_table(benchmark: Benchmark, section: Section) -> str:
    rows = []
    for m in section.rows:
        cells = [column.cell(m) for column in section.columns]
        rows.append([f"**{cell}**" for cell in cells] if benchmark.is_ours(m.contender) else cells)
    return markdown_table([column.head for column in section.columns], rows)


def target_rows(targets: Iterable[Target]) -> list[list[str]]:
    return [[t.text, t.form.format(t.measured), "yes" if t.met else "no", t.worst_case] for t in targets]


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def bullet_list(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def describe_machine() -> str:
    """Describe the machine and its load. Call it before the run, so that the load is not the benchmark's own."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    system = f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    return f"{model}, {os.cpu_count()} cores, {system}, load {os.getloadavg()[0]:.1f} before the run"

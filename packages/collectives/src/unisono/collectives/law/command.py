"""unisono-check train_step.py: the check on the command line."""

import argparse
import os
import sys
from importlib import resources
from pathlib import Path
from typing import Any

from unisono.collectives.law.check import CheckError, check_file

_DESCRIPTION = """\
Prove that a training step does not depend on the number of ranks, or say why it does.

FILE is a Python file with build(), which returns (model, optimizer); step(model, batch), which returns the loss; and batch, the
whole batch; or with a build() that returns a Hugging Face Trainer. --example writes one. The step runs on real gloo ranks on
this machine, and is compared with one process.

Exit code: 0 if nothing deviates, 1 if something does, 2 if the step cannot be checked."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="unisono-check", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", metavar="FILE", nargs="?", default="train_step.py", help="default: train_step.py")
    parser.add_argument("--example", action="store_true", help="write FILE, an example to start from")
    parser.add_argument("--world-sizes", type=_integers, metavar="2,3,4", help="numbers of ranks; default: 1,2,3,4")
    parser.add_argument(
        "--splits", type=_splits, metavar="even,uneven,empty", help="how rows are divided; or numbers of rows, such as 3+9"
    )
    parser.add_argument("--steps", type=int, help="optimizer steps; default: 2")
    parser.add_argument("--tolerance", type=float, help="largest relative deviation; default: 1e-8, in float32 1e-3")
    parser.add_argument("--dtype", choices=("float64", "float32"), help="default: float64 if the step runs in it")
    parser.add_argument("--dropout", choices=("on", "off"), help="off: dropout probabilities are 0; default: on")
    parser.add_argument("--resume", action="store_const", const=True, help="save and go on on other numbers of ranks, too")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="for each case; what takes longer hangs")
    parser.add_argument("--html", type=Path, metavar="PAGE", help="write the report as a page, too")
    parser.add_argument("--no-color", action="store_true", help="no colours; NO_COLOR in the environment does the same")
    given = vars(parser.parse_args(arguments))
    file, page = Path(given.pop("file")), given.pop("html")
    colour = not given.pop("no_color") and sys.stdout.isatty() and "NO_COLOR" not in os.environ
    if given.pop("example"):
        return _write_example(file)
    options = {name: value for name, value in given.items() if value is not None}
    try:
        report = check_file(file, progress=_show_progress if sys.stderr.isatty() else None, **options)
    except (CheckError, ValueError, TypeError) as error:
        print(f"unisono-check: {str(error).removeprefix('check: ')}", file=sys.stderr)
        return 2
    print(report.text(colour=colour))
    if page is not None:
        page.write_text(report.to_html())
    return 0 if report.ok else 1


def _write_example(file: Path) -> int:
    if file.exists():
        print(f"unisono-check: {file} exists already, and stays as it is", file=sys.stderr)
        return 2
    file.write_text(resources.files(__package__).joinpath("example_step.py").read_text())
    print(f"wrote {file}; now run: unisono-check {file}")
    return 0


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def _splits(text: str) -> tuple[Any, ...]:
    """ "even,3+9" → ("even", (3, 9))"""
    return tuple(tuple(map(int, part.split("+"))) if part[:1].isdigit() else part for part in text.split(","))


def _show_progress(done: int, total: int, text: str) -> None:
    bar = "#" * (20 * done // max(total, 1))
    print(f"\r\033[K[{bar:<20}] {text}" if done < total else "\r\033[K", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())

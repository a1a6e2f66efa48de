"""The museum of bugs as a page, packages/collectives/MUSEUM.md. Write it again: python -m tests.collectives.law.museum"""

import inspect
import re
from pathlib import Path

from tests.collectives.law.bugs import BUGS
from unisono.collectives.law import Finding, check

PAGE = Path(__file__).parents[3] / "packages" / "collectives" / "MUSEUM.md"
INTRODUCTION = """\
# A museum of bugs

Training steps that depend on the number of ranks. Each has one bug, nearly all met in public; the code is ours, cut down to
the bug. `unisono-check` finds all of them by their cause. This page is made from `tests/collectives/law/bugs.py`, where a test
runs every piece, by `python -m tests.collectives.law.museum`. Pieces change what their bug needs of `Piece`, a small regression
with DDP.
"""


def write_entry(name: str, finding: Finding) -> str:
    """Return the section of a bug: where it was met, its code, what the check says, and the fix."""
    code = inspect.getsource(BUGS[name])
    code = re.sub(r'\n    """.*?"""\n', "\n", code, count=1, flags=re.DOTALL)
    code = re.sub(r"\n    (cause|where|options) = .*", "", code)
    code = re.sub(r"  # noqa: \w+", "", re.sub(r":\n+", ":\n", code, count=1)).strip()
    met = re.sub(r"([\w.-]+/[\w.-]+)#(\d+)", r"[\1#\2](https://github.com/\1/issues/\2)", inspect.getdoc(BUGS[name]) or "")
    shown = f"\n```python\n{code}\n```\n" if "def " in code else ""
    return (
        f"## {name}\n\n{met}\n{shown}\n- The check says: **{finding.cause}**: {stable(finding.what)}.\n- Fix: {finding.fix}.\n"
    )


def stable(text: str) -> str:
    """Leave out what changes with versions: measured deviations, and the numbers of lines."""
    return re.sub(r" \((outputs are )?off by [^)]*\)|(?<=\.py):\d+", "", text)


def write_page() -> None:
    findings = {name: check(bug.build, bug.step, bug.batch, **bug.options).findings[0] for name, bug in BUGS.items()}
    PAGE.write_text("\n".join([INTRODUCTION, *(write_entry(name, finding) for name, finding in findings.items())]))


if __name__ == "__main__":
    write_page()

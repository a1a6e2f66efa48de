"""Report: what a check found, as text and as a page."""

from __future__ import annotations

import html
from dataclasses import dataclass, field

from unisono.collectives.law.comparison import ASPECTS, Case
from unisono.collectives.law.diagnoses.finding import Finding

_RED, _GREEN, _BOLD, _END = "\033[31m", "\033[32m", "\033[1m", "\033[0m"
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; color: #222 }
table { border-collapse: collapse } th, td { padding: .3em .8em; text-align: right; border-bottom: 1px solid #ddd }
th:first-child, td:first-child { text-align: left } .ok { color: #197741 } .bad { color: #b3261e; font-weight: 600 }
@media (prefers-color-scheme: dark) { body { background: #181818; color: #ddd } .ok { color: #6dc48c } .bad { color: #ff8a80 } }
"""


class LawBroken(AssertionError):  # noqa: N818  (it reads as what it says)
    """The step depends on the number of ranks. The message is the report."""


@dataclass
class CaseResult:
    """One number of ranks and one split: the largest relative deviation of each aspect, and the cause if it is too large."""

    case: Case
    deviations: dict[str, float]
    finding: Finding | None

    @property
    def ok(self) -> bool:
        return self.finding is None


@dataclass
class Report:
    """What `check` found. `ok`, `findings` and `cases` for programs; print it, or let a notebook show it, for people."""

    dtype: str
    tolerance: float
    steps: int
    cases: list[CaseResult] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)  # one for each cause
    not_compared: list[str] = field(default_factory=list)  # parameters that have another shape on other numbers of ranks
    skipped: int = 0  # cases after one that hung

    @property
    def ok(self) -> bool:
        return not self.findings

    @property
    def causes(self) -> list[str]:
        return [finding.cause for finding in self.findings]

    def add(self, result: CaseResult) -> None:
        """Add a case. Cases with the same cause share one finding."""
        self.cases.append(result)
        if result.finding is None:
            return
        known = next((finding for finding in self.findings if finding.cause == result.finding.cause), None)
        if known is None:
            self.findings.append(result.finding)
        else:
            known.cases += result.finding.cases

    def raise_if_broken(self) -> None:
        """Raise LawBroken, with the report as its message, unless everything is equal."""
        __tracebackhide__ = True
        if not self.ok:
            raise LawBroken(f"the step depends on the number of ranks\n\n{self}")

    def __str__(self) -> str:
        return self.text()

    def text(self, *, colour: bool = False) -> str:
        """Return the table and the findings."""
        good, bad, bold, end = (_GREEN, _RED, _BOLD, _END) if colour else ("", "", "", "")
        header, *rows = self._rows()
        widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]

        def line(row: list[str]) -> str:
            return "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()

        lines = [f"{bold}{line(header)}{end}"]
        for result, row in zip(self.cases, rows, strict=True):
            lines.append(f"{good if result.ok else bad}{line(row)}{end}")
        lines += ["", f"{good if self.ok else bad}{bold}{self.summary()}{end}"]
        for number, finding in enumerate(self.findings, 1):
            lines += ["", f"{number}. {bold}{finding.cause}{end}: {finding.what}."]
            lines += [f"   where: {finding.where}"] if finding.where else []
            lines += [f"   cases: {'; '.join(map(str, finding.cases))}", f"   {good}fix: {finding.fix}.{end}"]
        return "\n".join(lines + [f"\n{note}" for note in self._notes()])

    def summary(self) -> str:
        """Return the verdict in one sentence."""
        how = (
            f"{self.steps} step{'s' * (self.steps > 1)} in {self.dtype}, relative deviations up to {self.tolerance:.0e} allowed"
        )
        if self.ok:
            return f"The step does not depend on the number of ranks: {len(self.cases)} cases equal one process ({how})."
        wrong = sum(not result.ok for result in self.cases)
        return f"The step depends on the number of ranks: {wrong} of {len(self.cases)} cases deviate from one process ({how})."

    def to_html(self) -> str:
        """Return a page of its own."""
        return (
            f"<!doctype html><html lang=en><meta charset=utf-8><title>unisono check</title><style>{_STYLE}</style>"
            f"<h1>unisono check</h1>{self._repr_html_()}</html>"
        )

    def _repr_html_(self) -> str:
        header, *rows = self._rows()
        table = "<tr>" + "".join(f"<th>{html.escape(cell)}</th>" for cell in header) + "</tr>"
        for result, row in zip(self.cases, rows, strict=True):
            kind = "ok" if result.ok else "bad"
            table += f"<tr class={kind}>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
        parts = [f"<p class={'ok' if self.ok else 'bad'}>{html.escape(self.summary())}</p><table>{table}</table>"]
        for finding in self.findings:
            where = f"<p>Where: <code>{html.escape(finding.where)}</code></p>" if finding.where else ""
            cases = html.escape("; ".join(map(str, finding.cases)))
            parts.append(
                f"<h2>{html.escape(finding.cause)}</h2><p>{html.escape(finding.what)}.</p>{where}<p>Cases: {cases}</p>"
                f"<p><b>Fix:</b> {html.escape(finding.fix)}.</p>"
            )
        return "".join(parts + [f"<p>{html.escape(note)}</p>" for note in self._notes()])

    def _rows(self) -> list[list[str]]:
        shown = [aspect for aspect in ASPECTS if any(aspect in result.deviations for result in self.cases)]
        rows = [["", *shown, "cause"]]
        for result in self.cases:
            cells = [_number(result.deviations.get(aspect), self.tolerance) for aspect in shown]
            rows.append([str(result.case), *cells, result.finding.cause if result.finding else ""])
        return rows

    def _notes(self) -> list[str]:
        notes = []
        if self.dtype == "float32":
            notes.append("The step does not run in float64, so small deviations cannot be told from rounding.")
        if self.not_compared:
            names = ", ".join(self.not_compared[:3])
            notes.append(f"Not compared, because the shape depends on the number of ranks: {names}. Their effect on others is.")
        if self.skipped:
            notes.append(f"{self.skipped} more cases were not run, because they could hang, too.")
        return notes


def _number(value: float | None, tolerance: float) -> str:
    if value is None:
        return "-"
    return "ok" if value <= tolerance else "not finite" if value == float("inf") else f"{value:.1e}"

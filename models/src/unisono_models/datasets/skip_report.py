"""The samples that a run had to skip, counted by reason."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from unisono_models.training.distributed.object_collectives import Json, all_gather_object
from unisono_models.training.errors import UserError

_EXAMPLES = 3  # for each reason


@dataclass(frozen=True)
class SkippedSample:
    """A sample that could not be read."""

    index: int
    name: str
    """Where it came from, in printable characters."""
    reason: str
    """A reason to count by: "broken image", "empty caption", …"""
    error: str = ""


class ReadBatch(Protocol):
    """A batch that was read: its length, and the samples that were skipped."""

    def __len__(self) -> int: ...

    @property
    def skipped(self) -> Sequence[SkippedSample]: ...


class SkipReport:
    """Counts the samples that a rank has read and skipped. All ranks call `summary`, `check` and `report` together.

    Args:
        before: The `summary()` of an earlier start of the run, from its checkpoint.
        what: The word for samples.
        place: The word for what `SkippedSample.index` counts.
        rows: How many samples there are, if they are read again in each epoch. Then a sample that is skipped in several epochs
            counts once. None: everything that is read counts.

    Example:
        skipped = SkipReport(rows=2048)
        skipped.add(batch)
        skipped.check(0.01)
        skipped.report()  ->  1 of 2,048 pairs skipped. empty caption: 1, such as 00003.tar/31.jpg (row 31)
    """

    def __init__(
        self,
        *,
        before: Mapping[str, Json] | None = None,
        what: str = "pairs",
        place: str = "row",
        rows: int | None = None,
    ) -> None:
        self._what, self._place, self._rows = what, place, rows
        self._before = before or {"read": 0, "reasons": {}, "examples": {}}
        self._read = 0
        self._reasons: Counter[str] = Counter()
        self._samples: dict[str, set[int]] = {}  # the skipped samples of each reason, if `rows` are counted
        self._examples: dict[str, list[list[Json]]] = {}

    def add(self, batch: ReadBatch) -> None:
        """Count a batch that this rank has read."""
        self.count(len(batch) + len(batch.skipped), batch.skipped)

    def count(self, read: int, skipped: Sequence[SkippedSample]) -> None:
        """Count `read` samples, `skipped` among them."""
        self._read += read
        for skip in skipped:
            if self._rows is not None:
                known = self._samples.setdefault(skip.reason, set())
                if skip.index in known:
                    continue
                known.add(skip.index)
            self._reasons[skip.reason] += 1
            examples = self._examples.setdefault(skip.reason, [])
            if len(examples) < _EXAMPLES:
                examples.append([skip.index, skip.name, skip.error])

    def summary(self) -> dict[str, Json]:
        """Return, for all ranks: `read`, the number of samples; `reasons`, the number skipped for each; `examples` of each.

        If `rows` are counted, also `samples`: the skipped ones, by reason.
        """
        mine = {"read": self._read, "reasons": self._reasons, "examples": self._examples}
        if self._rows is not None:
            mine["samples"] = {reason: sorted(found) for reason, found in self._samples.items()}
        parts = [self._before, *all_gather_object(mine)]
        reasons: Counter[str] = Counter()
        examples: dict[str, list[Json]] = {}
        samples: dict[str, set[int]] = {}
        for part in parts:
            reasons.update(part["reasons"])
            for reason, found in part["examples"].items():
                new = [example for example in found if example not in examples.setdefault(reason, [])]
                examples[reason].extend(new)
            for reason, indices in part.get("samples", {}).items():
                samples.setdefault(reason, set()).update(indices)
        reasons.update({reason: len(found) - reasons[reason] for reason, found in samples.items()})
        summary = {
            "read": sum(part["read"] for part in parts),
            "reasons": {reason: reasons[reason] for reason in sorted(reasons)},
            "examples": {reason: examples[reason][:_EXAMPLES] for reason in sorted(examples)},
        }
        return summary if self._rows is None else summary | {"samples": {r: sorted(samples[r]) for r in sorted(samples)}}

    def check(self, threshold: float, *, at_least: int = 100) -> None:
        """Raise on every rank if more than the fraction `threshold` of the samples was skipped.

        `at_least`: fewer samples than that count as that many. Otherwise the first broken one could end a run.

        Raises: UserError with the report.
        """
        if not 0 <= threshold <= 1:
            raise UserError(f"--data.max-broken {threshold} must be a fraction between 0 and 1")
        summary = self.summary()
        if sum(summary["reasons"].values()) > threshold * max(self._count(summary), at_least):
            raise UserError(
                f"{self._describe(summary)}\nThis is more than the allowed fraction of {threshold:.4g}. "
                "Repair the data, or allow more by --data.max-broken"
            )

    def report(self) -> str:
        """Describe the skipped samples in one paragraph."""
        return self._describe(self.summary())

    def _count(self, summary: Mapping[str, Json]) -> int:
        """Return how many different samples were read: an epoch reads each once."""
        return int(summary["read"] if self._rows is None else min(summary["read"], self._rows))

    def _describe(self, summary: Mapping[str, Json]) -> str:
        total = sum(summary["reasons"].values())
        parts = [f"{total:,} of {self._count(summary):,} {self._what} skipped."]
        for reason, count in summary["reasons"].items():
            shown = [SkippedSample(index, name, reason, error) for index, name, error in summary["examples"].get(reason, [])]
            names = [s.name if f", {self._place} " in s.name else f"{s.name} ({self._place} {s.index})" for s in shown]
            texts = [name + (f": {s.error}" if s.error else "") for name, s in zip(names, shown, strict=True)]
            parts.append(f"{reason}: {count:,}, such as " + "; ".join(texts))
        return "\n  ".join(parts) if len(parts) > 2 else " ".join(parts)

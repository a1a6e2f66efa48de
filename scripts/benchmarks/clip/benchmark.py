"""Is a whole training step faster than open_clip's with the same towers, and does it take less memory?"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.clip import contenders
from benchmarks.clip.contenders import CONTENDERS, OPEN_CLIP_CUT, OURS, OURS_CONCEPTS, OURS_CUT, OURS_SIGMOID, PEERS, WORLD_SIZE
from benchmarks.harness.benchmark import Benchmark, Column, Section, Target, require_at_least
from benchmarks.harness.ranks import Ranks
from benchmarks.harness.results import Measurement, Ratio, Results

LOSS_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 1e-4
MAX_GIGABYTES = 7.0  # on each rank
MAX_SECONDS = 90.0  # of a step
FLAT = 1.5  # times the memory of the smallest batch, at most


@dataclass(frozen=True)
class Clip(Benchmark):
    """Measure a whole training step of unisono_models.clip against open_clip's own, with the same towers and weights.

    Both towers, the loss over the global batch, backward, the exchange of gradients, and the optimizer: on two gloo ranks
    of this machine, one thread each, float32. First a fresh pair of processes for each contender checks its first loss and
    gradients and measures its peak memory; then all take turns in every round. Takes about 8 minutes on two cores and up to
    9 GB: leave the machine alone. --quick runs two rounds of batches of 256 and 512, with the memory of all contenders
    measured in the same processes.
    """

    sizes: tuple[int, ...] = (256, 1024, 4096)
    """Global batches."""
    large: tuple[int, ...] = (8192,)
    """Global batches of which only the memory is measured."""
    repeats: int | None = None
    """Rounds of each size. [default: 20 up to a batch of 256, 12 up to 1024, 5 beyond]"""
    plain_malloc: bool = False
    """Measure memory with glibc's allocator as it is, including unused gaps between tensors."""

    title = "the training step"
    plot_title = "A whole training step with the same towers, on two ranks"
    peers = ("open_clip_torch", "timm", "transformers")

    def validate(self) -> None:
        require_at_least(1, repeats=self.repeats)
        require_at_least(2 * WORLD_SIZE, sizes=self.sizes, large=self.large)
        if any(size % WORLD_SIZE for size in (*self.sizes, *self.large)):
            raise SystemExit(f"--sizes {self.sizes} and --large {self.large}: must be multiples of {WORLD_SIZE}")

    def is_ours(self, contender: str) -> bool:
        return CONTENDERS[contender].is_ours

    def rounds(self) -> dict[int, int]:
        """Return the rounds of each number of rows on a rank. No rounds: only memory."""
        sizes, large = ((256, 512), ()) if self.quick else (self.sizes, self.large)
        rounds = {}
        for batch in sorted({*sizes, *large}):
            usual = 2 if self.quick else 20 if batch <= 256 else 12 if batch <= 1024 else 5
            rounds[batch // WORLD_SIZE] = (self.repeats or usual) if batch in sizes else 0
        return rounds

    def skipped(self) -> list[str]:
        reasons = [(name, rows, reason_to_skip(name, rows)) for rows in self.rounds() for name in CONTENDERS]
        return [f"left out: {name}, batch {rows * WORLD_SIZE}: {reason}" for name, rows, reason in reasons if reason]

    def run(self, ranks: Ranks) -> list[Measurement]:
        return ranks.compare_sizes(
            self.rounds(),
            {rows: [name for name in CONTENDERS if not reason_to_skip(name, rows)] for rows in self.rounds()},
            world_size=WORLD_SIZE,
            measure=contenders.measure,
            check=check_deviations,
            warm_up=contenders.warm_up,
            time_round=contenders.time_round,
            seconds=guess_seconds,
            label=lambda rows: f"batch {rows * WORLD_SIZE}",
            plain_malloc=self.plain_malloc,
            fresh=not self.quick,
        )

    def values(self, results: Results) -> dict[str, Any]:
        from benchmarks.clip.towers import DESCRIPTION

        rounds = {case: max(len(m.wall) for m in results.of(case)) for case in results.cases}
        return {
            "towers": DESCRIPTION,
            "rounds": ", ".join(f"{n} at {case}" for case, n in rounds.items() if n),
            "check_rows": contenders.CHECK_ROWS,
            "loss": max(m["loss_deviation"] for m in results.measurements),
            "gradients": max(m["gradient_deviation"] for m in results.measurements),
        }

    def sections(self, results: Results) -> list[Section]:
        def rate(m: Measurement) -> float | None:
            return 1e3 * batch(m) / m.wall_ms if m.is_timed else None

        speed_plot = "samples/s / open_clip, with the range over rounds (more is faster)"
        columns = [
            Column("batch", batch),
            Column("contender", lambda m: m.contender),
            Column("samples/s", rate, "{:.0f}", "samples_per_second"),
            Column("/ open_clip", lambda m: speed(results, m), "{:.2fx}", "speed_to_open_clip", plot=speed_plot),
            Column("CPU s a step", lambda m: 1e-3 * m.cpu_ms if m.is_timed else None, "{:.3f}"),
            Column("CPU / open_clip", lambda m: cpu(results, m), "{:.2fx}", "cpu_to_open_clip"),
            Column("MB", lambda m: m["extra_mib"], "{:.0f}", plot="peak memory of a step, MB"),
            Column("MB / open_clip", lambda m: memory(results, m), "{:.2f}x", "memory_to_open_clip"),
        ]
        sections = []
        for family in PEERS:
            rows = [m for m in results.measurements if CONTENDERS[m.contender].family == family]
            sections.append(
                Section(f"{family[0].upper()}{family[1:]} loss", columns, rows, label=lambda m: f"{m.case}: {m.contender}")
            )
        return sections

    def targets(self, results: Results) -> list[Target]:
        """Never slower, and memory that does not grow."""
        targets = []
        for name in (OURS, OURS_CONCEPTS, OURS_SIGMOID):
            found = [(ratio, m) for m in results.by(name) if (ratio := speed(results, m))]
            if found:
                ratio, m = min(found, key=lambda each: each[0].median)
                text = f"{name}: samples/s, as many as {PEERS[CONTENDERS[name].family]}"
                where = f"{m.case}, rounds {ratio.least:.2f}x to {ratio.most:.2f}x"
                targets.append(Target.at_least(1, text, ratio.median, where))
        cut = results.by(OURS_CUT)
        if len(cut) > 1:
            first, most = cut[0], max(cut, key=lambda m: m["extra_mib"])
            growth = most["extra_mib"] / first["extra_mib"]
            where = f"{first['extra_mib']:.0f} MB at {first.case}, {most['extra_mib']:.0f} MB at {most.case}"
            targets.append(Target.at_most(FLAT, f"{OURS_CUT}: growth of peak memory over all batches", growth, where))
        pairs = [(a, b) for a in cut if (b := results.find(a.case, OPEN_CLIP_CUT))]
        if pairs:
            ours, theirs = (m["extra_mib"] for m in pairs[-1])
            text = f"{OURS_CUT}: peak memory, less than {OPEN_CLIP_CUT}"
            where = f"{pairs[-1][0].case}, {ours:.0f} of {theirs:.0f} MB"
            targets.append(Target(text, theirs / ours, theirs > ours, where, "1/{:.1f}"))
        return targets


def reason_to_skip(name: str, rows: int) -> str:
    contender = CONTENDERS[name]
    if not contender.can_take(rows):
        return f"its {rows} rows on each rank are not two or more equal parts of {contenders.MICRO_BATCH}"
    if (gigabytes := contender.gigabytes(rows)) > MAX_GIGABYTES:
        return f"about {gigabytes:.1f} GB on each rank"
    if (seconds := guess_seconds(name, rows)) > MAX_SECONDS:
        return f"about {seconds:.0f} s a step"
    return ""


def guess_seconds(name: str, rows: int) -> float:
    """Estimate the time of a step, for the progress bar and to leave out what takes too long."""
    loss = 1e-7 * rows**2 * (rows / contenders.MICRO_BATCH if name == OPEN_CLIP_CUT else 1)
    return 0.05 + 1.4e-3 * rows + loss


def check_deviations(name: str, numbers: Mapping[str, float]) -> None:
    loss, gradients = numbers["loss_deviation"], numbers["gradient_deviation"]
    if not (loss <= LOSS_TOLERANCE and gradients <= GRADIENT_TOLERANCE):
        away = f"its first loss deviates from open_clip's by {loss:.1e} and its gradients by {gradients:.1e}"
        raise SystemExit(f"{name}: with {contenders.CHECK_ROWS} rows on each rank {away}, so it computes something else")


def batch(m: Measurement) -> int:
    return int(m["size"]) * WORLD_SIZE


def peer_of(results: Results, m: Measurement) -> Measurement | None:
    """Return open_clip's step of the same family."""
    return results.find(m.case, PEERS[CONTENDERS[m.contender].family])


def speed(results: Results, m: Measurement) -> Ratio | None:
    """Return how many times as many samples per second as open_clip's it has, in the same round."""
    peer = peer_of(results, m)
    return Ratio.of(peer.wall / m.wall) if peer and m.is_timed else None


def cpu(results: Results, m: Measurement) -> Ratio | None:
    peer = peer_of(results, m)
    return Ratio.of(m.cpu / peer.cpu) if peer and m.is_timed else None


def memory(results: Results, m: Measurement) -> float | None:
    peer = peer_of(results, m)
    return m["extra_mib"] / peer["extra_mib"] if peer else None

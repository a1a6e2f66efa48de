"""Are the exact contrastive losses about as fast as the matmuls they need, and do they take little memory?"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import normalize, softplus
from torch.utils.checkpoint import checkpoint

from benchmarks.harness.benchmark import Benchmark, Column, Section, Target, require_at_least
from benchmarks.harness.measure import Prepared, Seconds, deviations_from_peer, peak_of_call, return_freed_memory, take_turns
from benchmarks.harness.ranks import Ranks
from benchmarks.harness.results import MIB, Measurement, Results
from unisono.contrastive import clip_loss, sigmoid_loss

Family = Literal["CLIP", "sigmoid"]

WORLD_SIZE = 2
WIDTH = 512  # of the features
CHUNK = 512  # rows, in the chunked SigLIP
LIMIT_ROWS = 4096  # with more rows, the time of the limit is derived from a matmul of so many: the logits would not fit
WARM_UP_ROWS = 128
TOLERANCE = 1e-4
MAX_GIGABYTES = 3.0  # on each rank

LIMIT = "the limit: three matmuls"
CLIP_AUTO = "clip_loss"
SIGMOID = "sigmoid_loss"
OPEN_CLIP_LOCAL = "open_clip local"
SIGLIP = "open_clip SigLIP"
SIGLIP_CHUNKS = "SigLIP in chunks of 512 (as open_clip PR 1145)"
SIGLIP_RECOMPUTED = "SigLIP in chunks of 512 (as open_clip PR 1214)"
PEERS: dict[Family, str] = {"CLIP": OPEN_CLIP_LOCAL, "sigmoid": SIGLIP}


@dataclass(frozen=True)
class Contrastive(Benchmark):
    """Measure time and memory of clip_loss and sigmoid_loss against open_clip's losses, and the matmuls that all of them need.

    Forward and backward, two gloo ranks on this machine, one thread each, float32, width 512. First a fresh pair of
    processes for each contender measures its peak memory and checks its loss and gradients; then all take turns in every
    round. Takes about 10 minutes on two cores: leave the machine alone. --quick runs two rounds of 128 and 768 rows.
    """

    sizes: tuple[int, ...] = (1024, 4096, 8192)
    """Rows on each rank. The targets are about 4096 and 8192."""
    repeats: int | None = None
    """Rounds of each size. [default: 15 up to 1024 rows, 5 up to 4096, 3 beyond]"""
    full: bool = False
    """Also run what is estimated to need more than 3 GB on each rank: open_clip global with 8192 rows."""
    plain_malloc: bool = False
    """Measure memory with glibc's allocator as it is, including unused gaps between tensors."""

    title = "the contrastive losses"
    plot_title = "Exact contrastive losses, forward and backward, on two ranks (shorter is better)"
    peers = ("open_clip_torch",)

    def validate(self) -> None:
        require_at_least(2, sizes=self.sizes)
        require_at_least(1, repeats=self.repeats)

    def is_ours(self, contender: str) -> bool:
        return contender != LIMIT and CONTENDERS[contender].is_ours

    def rounds(self) -> dict[int, int]:
        """Return the rounds of each number of rows."""
        sizes = (128, 768) if self.quick else self.sizes
        usual = {rows: 15 if rows <= 1024 else 5 if rows <= 4096 else 3 for rows in sizes}
        return {rows: self.repeats or (2 if self.quick else usual[rows]) for rows in sizes}

    def too_large(self, rows: int) -> list[str]:
        return [name for name, c in CONTENDERS.items() if c.gigabytes(rows) > MAX_GIGABYTES and not self.full]

    def skipped(self) -> list[str]:
        return [
            f"skipped: {name}, b = {rows}: needs about {CONTENDERS[name].gigabytes(rows):.1f} GB on each rank (--full runs it)"
            for rows in self.rounds()
            for name in self.too_large(rows)
        ]

    def run(self, ranks: Ranks) -> list[Measurement]:
        return ranks.compare_sizes(
            self.rounds(),
            {rows: [name for name in CONTENDERS if name not in self.too_large(rows)] for rows in self.rounds()},
            world_size=WORLD_SIZE,
            measure=measure,
            check=check_deviation,
            warm_up=warm_up,
            time_round=time_round,
            seconds=lambda name, rows: 0.05 + 1e-7 * rows**2,
            label=lambda rows: f"b = {rows}",
            plain_malloc=self.plain_malloc,
            fresh=True,
        )

    def values(self, results: Results) -> dict[str, Any]:
        limits = [limit for limit in results.by(LIMIT) if limit["size"] <= LIMIT_ROWS]
        rates = [f"{limit_flops(limit['size']) / limit.cpu.min() / 1e6:.0f} at {limit.case}" for limit in limits]
        worst = max((m for m in results.measurements if m.contender != LIMIT), key=lambda m: m["deviation"])
        where = f"{worst.contender}, {worst.case}"
        return {"gflops": ", ".join(rates), "limit_rows": LIMIT_ROWS, "deviation": worst["deviation"], "worst": where}

    def sections(self, results: Results) -> list[Section]:
        def to_limit(value: Callable[[Measurement], float]) -> Callable[[Measurement], float | None]:
            return lambda m: divide(m, results.find(m.case, LIMIT), value)

        def to_peer(value: Callable[[Measurement], float]) -> Callable[[Measurement], float | None]:
            return lambda m: divide(m, peer(results, m), value)

        cpu_plot = "CPU time / the limit, three matmuls"
        columns = [
            Column("b", lambda m: m["size"]),
            Column("contender", lambda m: m.contender),
            Column("CPU s", lambda m: cpu_seconds(m), "{:.3f}"),
            Column("CPU, most", lambda m: 1e-3 * m.cpu.max(), "{:.3f}", in_terminal=False),
            Column("CPU / limit", to_limit(cpu_seconds), "{:.2f}x", "cpu_to_limit", plot=cpu_plot),
            Column("CPU / open_clip", to_peer(cpu_seconds), "{:.2f}x", "cpu_to_open_clip"),
            Column("wall s", lambda m: 1e-3 * m.wall_ms, "{:.3f}"),
            Column("wall / limit", to_limit(lambda m: m.wall_ms), "{:.2f}x", "wall_to_limit", in_terminal=False),
            Column("wall / open_clip", to_peer(lambda m: m.wall_ms), "{:.2f}x", "wall_to_open_clip", in_terminal=False),
            Column("MB", lambda m: m.numbers.get("extra_mib"), "{:.0f}", plot="peak memory of a step, MB"),
            Column("MB / open_clip", to_peer(lambda m: m["extra_mib"]), "{:.2f}x", "memory_to_open_clip"),
        ]
        sections = []
        for family in PEERS:
            rows = [m for m in results.measurements if m.contender == LIMIT or CONTENDERS[m.contender].family == family]
            sections.append(
                Section(f"{family[0].upper()}{family[1:]} losses", columns, rows, label=lambda m: f"{m.case}: {m.contender}")
            )
        return sections

    def targets(self, results: Results) -> list[Target]:
        targets = []
        at_4096 = {m.contender: m for m in results.of("b = 4096")}
        at_8192 = {m.contender: m for m in results.of("b = 8192")}
        if at_4096:
            cpu = {name: cpu_seconds(m) for name, m in at_4096.items()}
            best = min((SIGLIP_CHUNKS, SIGLIP_RECOMPUTED), key=cpu.__getitem__)
            at = "b = 4096"
            for name in (CLIP_AUTO, SIGMOID):
                targets.append(Target.at_most(1.4, f"{name}, CPU time to the limit", cpu[name] / cpu[LIMIT], at))
            faster = cpu[OPEN_CLIP_LOCAL] / cpu[CLIP_AUTO]
            targets.append(Target.at_least(2.2, "clip_loss, speed to open_clip local by CPU time", faster, at))
            faster = cpu[best] / cpu[SIGMOID]
            targets.append(Target.at_least(1, "sigmoid_loss, speed to SigLIP in chunks by CPU time", faster, f"{at}, {best}"))
        for case, found in (("b = 4096", at_4096), ("b = 8192", at_8192)):
            if found:
                ours, theirs = (found[name]["extra_mib"] for name in (CLIP_AUTO, OPEN_CLIP_LOCAL))
                text = f"clip_loss, peak memory, {case}: ≤ 1/12 of open_clip local"
                where = f"{ours:.0f} of {theirs:.0f} MB"
                targets.append(Target(text, theirs / ours, theirs / ours >= 12, where, "1/{:.1f}"))
        for name in (CLIP_AUTO, SIGMOID) if at_8192 else ():
            memory = at_8192[name]["extra_mib"]
            targets.append(Target(f"{name}, peak memory: ≤ 100 MB", memory, memory <= 100, "b = 8192", "{:.0f} MB"))
        return targets


def check_deviation(name: str, numbers: Mapping[str, float]) -> None:
    if not numbers["deviation"] <= TOLERANCE:
        away = f"loss or gradients deviate from open_clip's by {numbers['deviation']:.1e}"
        raise SystemExit(f"{name}: {away}, so it computes something else")


def cpu_seconds(m: Measurement) -> float:
    return float(1e-3 * m.cpu.min())


def peer(results: Results, m: Measurement) -> Measurement | None:
    """Return open_clip's loss of the same family."""
    return None if m.contender == LIMIT else results.find(m.case, PEERS[CONTENDERS[m.contender].family])


def divide(m: Measurement, other: Measurement | None, value: Callable[[Measurement], float]) -> float | None:
    return value(m) / value(other) if other else None


# What follows runs on the ranks.


class Inputs(NamedTuple):
    """One rank's share of the batch, as leaves: rows of length 1, each similar to its partner."""

    x: Tensor
    y: Tensor
    scale: Tensor
    bias: Tensor

    @classmethod
    def make(cls, rows: int, family: Family) -> Inputs:
        generator = torch.Generator().manual_seed(rows * 100 + dist.get_rank())
        x, noise = torch.randn(2, rows, WIDTH, generator=generator)
        features = [normalize(f).requires_grad_() for f in (x, x + 2 * noise)]
        scale, bias = (1 / 0.07, 0.0) if family == "CLIP" else (10.0, -10.0)  # where training starts
        return cls(*features, torch.tensor(scale, requires_grad=True), torch.tensor(bias, requires_grad=True))

    def zero_grad(self) -> None:
        for leaf in self:
            leaf.grad = None


Loss = Callable[[Inputs], Tensor]


class Contender(NamedTuple):
    """`make` builds the loss. `held` estimates the floats that it holds at once, with b rows and N columns."""

    family: Family
    make: Callable[[], Loss]
    is_ours: bool = False
    held: Callable[[int, int], int] = lambda b, n: 0

    def gigabytes(self, rows: int) -> float:
        return 4e-9 * self.held(rows, rows * WORLD_SIZE)


def our_clip(exchange: Any, logits: Any = "recompute") -> Callable[[], Loss]:
    return lambda: lambda i: clip_loss(i.x, i.y, i.scale, exchange=exchange, logits=logits)


def our_sigmoid() -> Loss:
    return lambda i: sigmoid_loss(i.x, i.y, i.scale, i.bias)


def open_clip(*, local: bool) -> Callable[[], Loss]:
    def make() -> Loss:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        loss = open_clip_losses().ClipLoss(local_loss=local, gather_with_grad=True, rank=rank, world_size=world_size)
        return lambda i: loss(i.x, i.y, i.scale)

    return make


def siglip(kind: Literal["whole", "chunks", "recomputed"]) -> Callable[[], Loss]:
    def make() -> Loss:
        plain = open_clip_losses().SigLipLoss
        made = plain if kind == "whole" else in_chunks(plain, recompute=kind == "recomputed")
        loss = made(rank=dist.get_rank(), world_size=dist.get_world_size())
        return lambda i: loss(i.x, i.y, i.scale, i.bias)

    return make


@cache
def open_clip_losses() -> Any:
    """Import open_clip's loss.py alone: the whole package takes 15 s because of its models."""
    warnings.simplefilter("ignore", FutureWarning)  # torch.distributed.nn is deprecated
    package = importlib.util.find_spec("open_clip")
    if package is None or not package.submodule_search_locations:
        raise ImportError("open_clip is not installed: ./scripts/setup installs it")
    path = Path(package.submodule_search_locations[0]) / "loss.py"
    spec = importlib.util.spec_from_file_location("open_clip_loss", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def in_chunks(plain: Any, *, recompute: bool) -> Any:
    """Derive a class from open_clip's SigLipLoss that takes the rows in chunks, as its pull requests describe.

    Release 3.3.0 has neither. PR 1145 (merged after it) takes the rows in chunks, and autograd keeps the logits of all; PR
    1214 (open) computes each chunk again in the backward instead. The exchange between ranks is that of the release.
    """

    def chunk_loss(x: Tensor, partners: Tensor | None, y: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        x = scale * x
        logits = x @ y.T
        logits += bias
        loss = softplus(logits).sum()
        return loss if partners is None else loss - ((x * partners).sum() + bias * x.shape[0])

    class InChunks(plain):  # type: ignore[misc]
        def _loss(self, x: Tensor, y: Tensor, scale: Tensor, bias: Tensor, negative_only: bool = False) -> Tensor:
            total = x.new_zeros(())
            for start in range(0, x.shape[0], CHUNK):
                rows = slice(start, start + CHUNK)
                args = (x[rows], None if negative_only else y[rows], y, scale, bias)
                total = total + (checkpoint(chunk_loss, *args, use_reentrant=False) if recompute else chunk_loss(*args))
            return total / x.shape[0]

    return InChunks


# The first of each family is the peer: the others must agree with it and are compared with it.
CONTENDERS: dict[str, Contender] = {
    OPEN_CLIP_LOCAL: Contender("CLIP", open_clip(local=True), held=lambda b, n: 4 * b * n),
    CLIP_AUTO: Contender("CLIP", our_clip("auto", "auto"), is_ours=True),
    "clip_loss, gather, logits recomputed": Contender("CLIP", our_clip("gather"), is_ours=True),
    "clip_loss, ring, logits recomputed": Contender("CLIP", our_clip("ring"), is_ours=True),
    "open_clip global": Contender("CLIP", open_clip(local=False), held=lambda b, n: 4 * n * n),
    SIGLIP: Contender("sigmoid", siglip("whole"), held=lambda b, n: 4 * b * n),
    SIGMOID: Contender("sigmoid", our_sigmoid, is_ours=True),
    SIGLIP_CHUNKS: Contender("sigmoid", siglip("chunks"), held=lambda b, n: b * n),
    SIGLIP_RECOMPUTED: Contender("sigmoid", siglip("recomputed")),
}


def measure(name: str, sizes: Sequence[int], folder: Path, plain_malloc: bool) -> dict[int, dict[str, float]]:
    """Measure the memory of one forward and backward of each size, and compare the results with the peer's."""
    if not plain_malloc:
        return_freed_memory()
    family = CONTENDERS[name].family
    loss_of = CONTENDERS[name].make()
    warm_up([name])
    numbers = {}
    for rows in sizes:
        inputs = Inputs.make(rows, family)
        loss, extra = peak_of_call(partial(step, loss_of, inputs))
        path = folder / f"{family}-{rows}-{dist.get_rank()}.pt"
        deviations = deviations_from_peer(global_results(loss, inputs, family), path, is_peer=name == PEERS[family])
        numbers[rows] = {"extra_mib": extra / MIB, "deviation": max(deviations.values())}
    return numbers


def warm_up(names: Sequence[str]) -> None:
    """Load all code: torch's checkpoint, for example, imports for seconds when it is first called."""
    for name in names:
        CONTENDERS[name].make()(Inputs.make(WARM_UP_ROWS, CONTENDERS[name].family)).backward()


def time_round(names: Sequence[str], rows: int, turn: int) -> dict[str, list[Seconds]]:
    """Time one step of every contender and the matmuls of the limit, in turns."""
    matmuls, factor = limit(rows)
    inputs = {family: Inputs.make(rows, family) for family in PEERS}

    calls: dict[str, Callable[[], Any] | Prepared] = {LIMIT: matmuls}
    for name in names:
        own = inputs[CONTENDERS[name].family]
        timed = partial(step, CONTENDERS[name].make(), own)
        calls[name] = Prepared(own.zero_grad, lambda _, timed=timed: timed())
    seconds = take_turns(calls, range(turn, turn + 1))
    seconds[LIMIT] = [Seconds(factor * taken.wall, factor * taken.cpu) for taken in seconds[LIMIT]]
    return seconds


def step(loss_of: Loss, inputs: Inputs) -> Tensor:
    loss = loss_of(inputs)
    loss.backward()
    return loss.detach()


def global_results(loss: Tensor, inputs: Inputs, family: Family) -> dict[str, Tensor]:
    """Return what must be equal for all: the gradients of this rank's rows, and the mean over ranks of the loss and of the
    gradients of scale and bias, as DDP takes it.

    open_clip local and SigLIP return the loss of this rank's rows; the mean of these is the global loss.
    """
    shared = [loss, inputs.scale.grad, *([inputs.bias.grad] if family == "sigmoid" else [])]
    values = torch.stack([torch.as_tensor(v).double().reshape(()) for v in shared])
    dist.all_reduce(values)
    means = dict(zip(("loss", "scale", "bias"), values / dist.get_world_size(), strict=False))
    assert inputs.x.grad is not None and inputs.y.grad is not None
    return {**means, "x": inputs.x.grad, "y": inputs.y.grad}


def limit(rows: int) -> tuple[Callable[[], None], float]:
    """Return the three matmuls that any exact loss needs, and the factor from their time to that of `rows`.

    They compute the logits and the gradients of x and of all ranks' y, into outputs that are allocated once.
    """
    b = min(rows, LIMIT_ROWS)
    n = b * WORLD_SIZE
    generator = torch.Generator().manual_seed(0)
    x, y = (normalize(torch.randn(size, WIDTH, generator=generator)) for size in (b, n))
    logits, dx, dy = torch.zeros(b, n), torch.zeros_like(x), torch.zeros_like(y)

    def call() -> None:
        torch.mm(x, y.T, out=logits)
        torch.mm(logits, y, out=dx)
        torch.mm(logits.T, x, out=dy)

    return call, (rows / b) ** 2


def limit_flops(rows: int) -> float:
    return 3.0 * 2 * rows * rows * WORLD_SIZE * WIDTH

"""Simulate a training: what one rank of many would need and do in a step. No GPU and no data is needed.

./scripts/simulate MODEL [RECIPE] [--hosts H] [--gpus G] [--hardware h100] [--field VALUE …]
"""

import importlib
import json
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from unisono.collectives import A100_SXM, H100_SXM, Hardware
from unisono_models.training.errors import UserError
from unisono_models.training.run.log import show_progress
from unisono_models.training.run.report import Row, print_table
from unisono_models.training.simulate.advice import Remedy, find_remedies
from unisono_models.training.simulate.page import GB, TIMES, choose_unit, draw_growth, write_page
from unisono_models.training.simulate.rank import StepCosts, Topology, simulate_step
from unisono_models.training.simulate.training import largest_share

MODELS = ("clip", "gan", "recommender")
HARDWARE = {"h100": H100_SXM, "a100": A100_SXM}
RANKS = (1, 2, 4, 8, 16, 64, 256, 1024, 4096)
_MAX_RANKS = 65_536
_HELP = """usage: ./scripts/simulate MODEL [RECIPE | --config RUN] [options] [--field VALUE ...]

Counts what one rank of many does in one training step: memory, FLOPs, bytes, collectives, waits; and models its time.
It runs the model's own code on tensors without data: no GPU is needed, and no data is read. The fields are those of training.

options:
  --hosts H             The number of hosts. (1)
  --gpus G              The number of GPUs on a host, each with a NIC. (8)
  --hardware NAME       The GPU: h100 or a100. (h100)
  --gpu-memory GB       The memory of a GPU, if it is not that of --hardware.
  --scaling strong|weak How the work grows with the ranks in the plots and the last table. strong: the batch of the recipe is
                        shared by all ranks. weak: each rank keeps the rows that it has on H x G ranks. (strong)
  --growth / --no-growth  Simulate 1 to 4,096 ranks, too, which takes a minute. (--growth)
  --out FOLDER          Where index.html and simulation.json go. (simulations/MODEL-RECIPE-HxG-HARDWARE)
"""


@dataclass(frozen=True)
class Options:
    """The options of the command beside the fields of the recipe."""

    hosts: int = 1
    gpus: int = 8
    hardware: str = "h100"
    gpu_memory: float | None = None
    scaling: Literal["strong", "weak"] = "strong"
    growth: bool = True
    out: Path | None = None

    @property
    def device(self) -> Hardware:
        found = HARDWARE[self.hardware]
        memory = found.memory if self.gpu_memory is None else int(self.gpu_memory * GB)
        return replace(found, memory=memory, gpus_per_host=self.gpus)


def main(args: Sequence[str]) -> None:
    """`MODEL [RECIPE] [--hosts H] [--gpus G] [--hardware NAME] [--field VALUE …]`"""
    if not args or args[0] in ("-h", "--help"):
        print(_HELP, end="")
        if not args:
            raise UserError(f"which model? Take {', '.join(MODELS[:-1])} or {MODELS[-1]}")
        return
    model = args[0]
    if model not in MODELS:
        raise UserError(f"there is no model {model!r}: take {', '.join(MODELS[:-1])} or {MODELS[-1]}")
    options, fields = parse_options(args[1:])
    if fields[:1] in (["-h"], ["--help"]):
        print(_HELP)
    recipes = importlib.import_module(f"unisono_models.{model}.recipes").RECIPES
    recipe, config = recipes.choose(fields, command="simulate")
    Simulation(model, recipe, config, options, command=["./scripts/simulate", *args]).run()


def parse_options(args: Sequence[str]) -> tuple[Options, list[str]]:
    """Return the options of this command, and the arguments that are left for the recipe."""
    given: dict[str, Any] = {}
    left: list[str] = []
    for arg in (following := iter(args)):
        name, equals, value = arg.partition("=")
        if name in ("--growth", "--no-growth"):
            given["growth"] = name == "--growth"
        elif name in _READERS:
            text = value if equals else next(following, None)
            if text is None:
                raise UserError(f"{name} needs a value")
            given[name[2:].replace("-", "_")] = _READERS[name](name, text)
        else:
            left.append(arg)
    options = Options(**given)
    ranks = options.hosts * options.gpus
    if ranks > _MAX_RANKS:
        raise UserError(f"--hosts {options.hosts} --gpus {options.gpus}: {ranks:,} ranks are more than {_MAX_RANKS:,}")
    return options, left


def _read_count(name: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"{name} {text}: must be a number, at least 1")
    return int(text)


def _read_memory(name: str, text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < 1e6:
        raise UserError(f"{name} {text}: must be a number of GB above 0")
    return found


def _read_choice(*choices: str) -> Callable[[str, str], str]:
    def read(name: str, text: str) -> str:
        if text.lower() not in choices:
            raise UserError(f"{name} {text}: must be one of {', '.join(choices)}")
        return text.lower()

    return read


_READERS: dict[str, Callable[[str, str], Any]] = {
    "--hosts": _read_count,
    "--gpus": _read_count,
    "--hardware": _read_choice(*HARDWARE),
    "--gpu-memory": _read_memory,
    "--scaling": _read_choice("strong", "weak"),
    "--out": lambda _, text: Path(text),
}


class Simulation:
    """One call of the command."""

    def __init__(self, model: str, recipe: str, config: Any, options: Options, *, command: Sequence[str]) -> None:
        self.model, self.recipe, self.config, self.options = model, recipe, config, options
        self.command = shlex.join(command)
        self.topology = Topology(options.hosts, options.gpus)
        self.hardware = options.device
        self.build = importlib.import_module(f"unisono_models.{model}.simulate").build_training

    def run(self) -> None:
        if not torch.backends.cuda.is_built():
            raise UserError("this torch is built without CUDA, which a simulation of GPUs needs: install a torch with CUDA")
        costs = self.simulate(self.config, self.topology)
        remedies = self._remedies(costs)
        growth = [costs if where == self.topology else self.simulate(config, where) for config, where in self._points()]
        growth = growth or [costs]
        self._print(costs, remedies, growth)
        folder = self._write(costs, remedies, growth)
        print(f"Report:  {folder / 'index.html'}")

    def simulate(self, config: Any, topology: Topology) -> StepCosts:
        return simulate_step(self.build, config, topology, device_memory=self.hardware.memory)

    def _points(self) -> Iterable[tuple[Any, Topology]]:
        if not self.options.growth:
            return []
        world_size = self.topology.world_size
        rows = largest_share(self.config.data.batch, world_size)
        points = []
        for ranks in sorted({*RANKS, world_size}):
            where = self.topology if ranks == world_size else Topology.of(ranks, self.options.gpus)
            batch = rows * ranks if self.options.scaling == "weak" else self.config.data.batch
            points.append((replace(self.config, data=replace(self.config.data, batch=batch)), where))
        return show_progress(points, "ranks: 1 to 4,096", aloud=True)

    def _remedies(self, costs: StepCosts) -> list[Remedy]:
        if costs.peak <= self.hardware.memory:
            return []
        print(
            f"{costs.peak / GB:,.1f} GB do not fit into {self.hardware.memory / GB:,.3g} GB: trying other settings", flush=True
        )
        return find_remedies(self.simulate, self.config, self.topology, memory=self.hardware.memory)

    # What is shown

    def _title(self) -> str:
        return f"{self.model} {self.recipe} on {self.topology} {self.hardware.name}"

    def _advice(self, costs: StepCosts, remedies: Sequence[Remedy]) -> list[str]:
        size, room = costs.peak / GB, self.hardware.memory / GB
        if costs.peak <= self.hardware.memory:
            return [f"It fits: {size:,.2g} of {room:,.3g} GB at the peak. A caching allocator reserves some percent more."]
        largest = max(costs.memory, key=costs.memory.__getitem__)
        lines = [f"It does not fit: {size:,.1f} GB at the peak, and the device has {room:,.3g}. Most of it is {largest}."]
        for remedy in remedies:
            then = remedy.costs
            time = then.time(self.hardware).estimate * 1e3
            lines.append(f"With {remedy.options} it fits: {then.peak / GB:,.1f} GB, {time:,.0f} modelled ms a step (tried).")
        return lines if remedies else [*lines, "None of the settings that were tried makes it fit: lower --data.batch."]

    def _memory_rows(self, costs: StepCosts) -> list[Row]:
        total = costs.peak
        unit, scale = choose_unit([total], "B")
        rows: list[Row] = [
            {"part": part, unit: size / scale, "share": f"{size / max(total, 1):.0%}"}
            for part, size in costs.memory.items()
            if size
        ]
        return [*rows, {"part": "peak", unit: total / scale, "share": f"{total / self.hardware.memory:.1%} of the device"}]

    def _phase_rows(self, costs: StepCosts) -> list[Row]:
        modelled, total = costs.time(self.hardware), costs.ledger.total
        work, per_work = choose_unit([sum(total.flops.values())], "FLOP")
        touched, per_touched = choose_unit([total.bytes_touched], "B")
        sent, per_sent = choose_unit([total.traffic.sent], "B")
        rows: list[Row] = []
        for name, phase in [*costs.ledger.phases.items(), ("total", total)]:
            parts = modelled.phases.get(name, modelled.total)
            rows.append(
                {
                    "phase": name,
                    "kernels": phase.kernels,
                    work: sum(phase.flops.values()) / per_work,
                    f"{touched} touched": phase.bytes_touched / per_touched,
                    "messages": phase.traffic.calls,
                    f"{sent} sent": phase.traffic.sent / per_sent,
                    "host syncs": len(phase.host_syncs),
                    "ms at least": parts.lower_bound * 1e3,
                    "ms estimated": parts.estimate * 1e3,
                }
            )
        return rows

    def _collective_rows(self, costs: StepCosts) -> list[Row]:
        unit, scale = choose_unit([costs.ledger.traffic.sent], "B")
        return [
            {"collective": name, "calls": op.calls, f"{unit} sent": op.sent / scale, f"{unit} received": op.received / scale}
            for name, op in sorted(costs.ledger.collectives.items())
        ]

    def _growth_rows(self, growth: Sequence[StepCosts]) -> list[Row]:
        rows: list[Row] = []
        links = [costs.link_bytes(self.hardware) for costs in growth]
        unit, scale = choose_unit([costs.peak for costs in growth], "B")
        link_unit, per_link = choose_unit([size for pair in links for size in pair], "B")
        for costs, (inside, network) in zip(growth, links, strict=True):
            parts = costs.time(self.hardware).total
            rows.append(
                {
                    "ranks": costs.topology.world_size,
                    "batch": costs.batch,
                    "rows": costs.rows,
                    unit: costs.peak / scale,
                    "fits": "yes" if costs.peak <= self.hardware.memory else "no",
                    f"{link_unit} links": inside / per_link,
                    f"{link_unit} NIC": network / per_link,
                    "ms at least": parts.lower_bound * 1e3,
                    "ms estim.": parts.estimate * 1e3,
                    "samples/s": costs.batch / parts.estimate,
                    "hours": round(parts.estimate * self.config.run.steps / 3600, 3),
                }
            )
        return rows

    def _numbers(self, costs: StepCosts) -> dict[str, Any]:
        """What simulation.json has for one number of ranks: bytes, seconds and counts of a step."""
        total, modelled = costs.ledger.total, costs.time(self.hardware)
        inside, network = costs.link_bytes(self.hardware)
        return {
            "ranks": costs.topology.world_size,
            "hosts": costs.topology.hosts,
            "batch": costs.batch,
            "rows": costs.rows,
            "memory": costs.memory,
            "kernels": total.kernels,
            "flops": {str(dtype): count for dtype, count in total.flops.items()},
            "bytes_touched": total.bytes_touched,
            "sent": total.traffic.sent,
            "collectives": total.traffic.calls,
            "link_bytes": inside,
            "nic_bytes": network,
            "host_syncs": len(total.host_syncs),
            "modelled_seconds": {"lower_bound": modelled.lower_bound, "estimate": modelled.estimate},
        }

    def _notes(self, costs: StepCosts) -> list[str]:
        notes = [
            "Counts are exact for the code that runs; times are a model of the figures above, not a measurement.",
            "The step is that of rank 0, which has the largest share of the batch. Reading data is not part of it.",
            "Memory is that of tensors at the peak; DDP's buckets are gradients. Not counted: workspaces of cuDNN and cuBLAS, "
            "NCCL's buffers, and what dropout and noise need while they draw their numbers.",
            *(f"Assumed: {note}." for note in costs.notes),
        ]
        parallel = getattr(self.config, "parallel", None)
        if parallel is not None and parallel.compile:
            notes.append("torch.compile is not simulated: it would fuse kernels, and touch less memory.")
        if costs.batch < costs.topology.world_size:
            notes.append(f"The batch of {costs.batch:,} leaves {costs.topology.world_size - costs.batch:,} ranks without rows.")
        return notes

    def _print(self, costs: StepCosts, remedies: Sequence[Remedy], growth: Sequence[StepCosts]) -> None:
        share = f"{costs.rows:,} of {costs.batch:,} rows on a rank"
        print_table(self._memory_rows(costs), title=f"Memory of a rank: {self._title()}, {share}")
        print_table(self._phase_rows(costs), title="A step of a rank (times are modelled)")
        print_table(self._collective_rows(costs), title="Collectives of a step")
        if len(growth) > 1:
            kind = "the batch is shared" if self.options.scaling == "strong" else "each rank keeps its rows"
            print_table(self._growth_rows(growth), title=f"How it grows: {kind} (times are modelled)")
        if costs.host_syncs:
            print("The host waits for the device at:")
            for text, count in costs.host_syncs.most_common(12):
                print(f"  {count} x {text}")
        print(self.hardware)
        for line in [*self._advice(costs, remedies), *self._notes(costs)]:
            print(line)

    def _write(self, costs: StepCosts, remedies: Sequence[Remedy], growth: Sequence[StepCosts]) -> Path:
        size = f"{self.topology.hosts}x{self.topology.gpus}"
        folder = self.options.out or Path("simulations") / f"{self.model}-{self.recipe}-{size}-{self.options.hardware}"
        modelled = costs.time(self.hardware)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--out {folder}: the folder cannot be made: {error.strerror}") from error
        light, dark = (draw_growth(growth, self.hardware, self.hardware.memory, theme=theme) for theme in ("light", "dark"))
        for name, png in light.items():
            (folder / f"{name}.png").write_bytes(png)
        step_hours = modelled.estimate * self.config.run.steps / 3600
        write_page(
            folder / "index.html",
            title=self._title(),
            intro=[
                f"What one of {self.topology.world_size:,} ranks needs and does in a training step, counted by running the "
                "model's own code on tensors without data. Times are a model, not a measurement: nobody has run this on a GPU."
            ],
            facts={
                "model": self.model,
                "recipe": self.recipe,
                "hosts": self.topology.hosts,
                "GPUs a host": self.topology.gpus,
                "batch": f"{costs.batch:,}",
                "rows a rank": f"{costs.rows:,}",
                "steps": f"{self.config.run.steps:,}",
            },
            numbers={
                "GB of memory at the peak": round(costs.peak / GB, 2),
                "TFLOP a step and rank": round(sum(costs.ledger.flops.values()) / 1e12, 3),
                "modelled ms a step": f"{modelled.lower_bound * 1e3:,.3g} to {modelled.estimate * 1e3:,.3g}",
                "modelled hours, if nothing overlaps": round(step_hours, 2),
            },
            plots={name: (light[name], dark[name]) for name in light} if len(growth) > 1 else {},
            tables={
                "Memory of a rank": self._memory_rows(costs),
                "A step of a rank": self._phase_rows(costs),
                "Where the modelled time goes": _time_rows(modelled.phases),
                "Collectives": self._collective_rows(costs),
                "How it grows": self._growth_rows(growth) if len(growth) > 1 else [],
                "Where the host waits for the device": [
                    {"times": n, "what": text} for text, n in costs.host_syncs.most_common()
                ],
            },
            advice=self._advice(costs, remedies),
            constants=str(self.hardware),
            notes=self._notes(costs),
            command=self.command,
        )
        found = {**self._numbers(costs), "growth": [self._numbers(each) for each in growth]}
        (folder / "simulation.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        return folder


def _time_rows(phases: Mapping[str, Any]) -> list[Row]:
    return [
        {"phase": phase, **{f"{name.replace('_', ' ')} ms": getattr(parts, name) * 1e3 for name in TIMES}}
        for phase, parts in phases.items()
    ]

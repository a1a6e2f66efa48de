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
from unisono_models.training.simulate.page import TIMES, draw_growth, readable, write_page
from unisono_models.training.simulate.rank import StepCosts, Topology, simulate_step
from unisono_models.training.simulate.training import largest_share

MODELS = ("clip", "gan", "recommender")
HARDWARE = {"h100": H100_SXM, "a100": A100_SXM}
RANKS = (1, 2, 4, 8, 16, 64, 256, 1024, 4096)
_MAX_RANKS = 65_536
_CONSTANT = "--hardware."
_USABLE = 0.9  # of a device's memory: the rest is for workspaces, NCCL's buffers, the CUDA context and fragments
_HELP = """usage: ./scripts/simulate MODEL [RECIPE | --config RUN] [options] [--field VALUE ...]

Counts what one rank of many does in one training step: memory, FLOPs, bytes, collectives, waits; and models its time.
It runs the model's own code on tensors without data: no GPU is needed, and no data is read. The fields are those of training.

options:
  --hosts H             The number of hosts. (1)
  --gpus G              The number of GPUs on a host, each with a NIC. (8)
  --hardware NAME       The GPU: h100 or a100. (h100)
  --hardware.CONSTANT N Another figure for the model of the time, in the unit that is printed: --hardware.bfloat16 700,
                        --hardware.memory 40, --hardware.network-bandwidth 25, --hardware.launch 3. The output lists them all.
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
    constants: tuple[tuple[str, float], ...] = ()
    scaling: Literal["strong", "weak"] = "strong"
    growth: bool = True
    out: Path | None = None

    @property
    def device(self) -> Hardware:
        found = replace(HARDWARE[self.hardware], gpus_per_host=self.gpus)
        for name, value in self.constants:
            found = found.with_constant(name, value)
        return found


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
    recipe, config = recipes.choose(fields, prog=f"./scripts/simulate {model}")
    Simulation(model, recipe, config, options, command=["./scripts/simulate", *args]).run()


def parse_options(args: Sequence[str]) -> tuple[Options, list[str]]:
    """Return the options of this command, and the arguments that are left for the recipe."""
    given: dict[str, Any] = {}
    left: list[str] = []
    constants: dict[str, float] = {}
    for arg in (following := iter(args)):
        name, equals, value = arg.partition("=")
        if name in ("--growth", "--no-growth"):
            given["growth"] = name == "--growth"
        elif name in _READERS or name.startswith(_CONSTANT):
            text = value if equals else next(following, None)
            if text is None:
                raise UserError(f"{name} needs a value")
            if name in _READERS:
                given[name[2:].replace("-", "_")] = _READERS[name](name, text)
            else:
                constants[name] = _read_number(name, text)
        else:
            left.append(arg)
    known = HARDWARE[given.get("hardware", Options.hardware)].constants()
    names = {_CONSTANT + constant.name.replace("_", "-"): constant.name for constant in known}
    if wrong := next((name for name in constants if name not in names), None):
        raise UserError(f"{wrong}: there is no such figure; take one of {', '.join(names)}")
    options = Options(**given, constants=tuple((names[name], value) for name, value in constants.items()))
    ranks = options.hosts * options.gpus
    if ranks > _MAX_RANKS:
        raise UserError(f"--hosts {options.hosts} --gpus {options.gpus}: {ranks:,} ranks are more than {_MAX_RANKS:,}")
    return options, left


def _read_count(name: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"{name} {text}: must be a number, at least 1")
    return int(text)


def _read_number(name: str, text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < 1e9:
        raise UserError(f"{name} {text}: must be a number above 0")
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
        folder = self._make_folder()
        costs = self.simulate(self.config, self.topology)
        remedies = self._remedies(costs)
        growth = [costs if where == self.topology else self.simulate(config, where) for config, where in self._points()]
        growth = growth or [costs]
        self._print(costs, remedies, growth)
        self._write(folder, costs, remedies, growth)
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
        if self._fits(costs):
            return []
        size, room = readable(costs.peak, "B"), readable(_USABLE * self.hardware.memory, "B")
        print(f"{size} do not fit into {room}, {_USABLE:.0%} of the device: trying other settings", flush=True)
        return find_remedies(self.simulate, self.config, self.topology, memory=int(_USABLE * self.hardware.memory))

    def _fits(self, costs: StepCosts) -> bool:
        return costs.peak <= _USABLE * self.hardware.memory

    # What is shown

    def _title(self) -> str:
        return f"{self.model} {self.recipe} on {self.topology} {self.hardware.name}"

    def _advice(self, costs: StepCosts, remedies: Sequence[Remedy]) -> list[str]:
        size, room = readable(costs.peak, "B"), readable(self.hardware.memory, "B")
        spare = f"{1 - _USABLE:.0%} of the device are for what is not counted, such as the fragments of the caching allocator."
        if self._fits(costs):
            return [f"It fits: {size} of {room} at the peak. {spare}"]
        largest = max(costs.memory, key=costs.memory.__getitem__)
        lines = [f"It does not fit: {size} at the peak, and the device has {room}. Most of it is {largest}. {spare}"]
        for remedy in remedies:
            then = remedy.costs
            time = readable(then.time(self.hardware).estimate, "s")
            lines.append(f"With {remedy.options} it fits: {readable(then.peak, 'B')}, and a step takes {time} (modelled).")
        return lines if remedies else [*lines, "None of the settings that were tried makes it fit: lower --data.batch."]

    def _memory_rows(self, costs: StepCosts) -> list[Row]:
        total = costs.peak
        rows: list[Row] = [
            {"part": part, "memory": readable(size, "B"), "share": f"{size / max(total, 1):.1%}"}
            for part, size in costs.memory.items()
            if size
        ]
        of_device = f"{total / self.hardware.memory:.1%} of the device"
        return [*rows, {"part": "peak", "memory": readable(total, "B"), "share": of_device}]

    def _phase_rows(self, costs: StepCosts) -> list[Row]:
        modelled, total = costs.time(self.hardware), costs.ledger.total
        rows: list[Row] = []
        for name, phase in [*costs.ledger.phases.items(), ("total", total)]:
            parts = modelled.phases.get(name, modelled.total)
            rows.append(
                {
                    "phase": name,
                    "kernels": phase.kernels,
                    "matmuls": readable(sum(phase.flops.values()), "FLOP"),
                    "touched": readable(phase.bytes_touched, "B"),
                    "collectives": phase.traffic.calls,
                    "sent": readable(phase.traffic.sent, "B"),
                    "host syncs": len(phase.host_syncs),
                    "at least": readable(parts.lower_bound, "s"),
                    "estimate": readable(parts.estimate, "s"),
                }
            )
        return rows

    def _collective_rows(self, costs: StepCosts) -> list[Row]:
        return [
            {"collective": name, "calls": op.calls, "sent": readable(op.sent, "B"), "received": readable(op.received, "B")}
            for name, op in sorted(costs.ledger.collectives.items())
        ]

    def _growth_rows(self, growth: Sequence[StepCosts]) -> list[Row]:
        rows: list[Row] = []
        links = [costs.link_bytes(self.hardware) for costs in growth]
        for costs, (inside, network) in zip(growth, links, strict=True):
            parts = costs.time(self.hardware).total
            rows.append(
                {
                    "ranks": costs.topology.world_size,
                    "batch": costs.batch,
                    "rows": costs.rows,
                    "memory": readable(costs.peak, "B"),
                    "fits": "yes" if self._fits(costs) else "no",
                    "links": readable(inside, "B"),
                    "NIC": readable(network, "B"),
                    "at least": readable(parts.lower_bound, "s"),
                    "estimate": readable(parts.estimate, "s"),
                    "samples/s": readable(costs.batch / parts.estimate, "").strip(),
                    "hours": f"{parts.estimate * self.config.run.steps / 3600:.3g}",
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
            "Counts are those of the code that runs; how many kernels an op launches is a rule. Times are a model of these "
            "figures, not a measurement: at least, if everything overlaps; estimate, if nothing does.",
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
        print("Another figure: --hardware.bfloat16 700, --hardware.launch 3, and so on, in these units.")
        for line in [*self._advice(costs, remedies), *self._notes(costs)]:
            print(line)

    def _make_folder(self) -> Path:
        size = f"{self.topology.hosts}x{self.topology.gpus}"
        folder = self.options.out or Path("simulations") / f"{self.model}-{self.recipe}-{size}-{self.options.hardware}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--out {folder}: the folder cannot be made: {error.strerror}") from error
        return folder

    def _write(self, folder: Path, costs: StepCosts, remedies: Sequence[Remedy], growth: Sequence[StepCosts]) -> None:
        modelled = costs.time(self.hardware)
        plots: dict[str, tuple[bytes, bytes]] = {}
        if len(growth) > 1:
            light, dark = (draw_growth(growth, self.hardware, theme=theme) for theme in ("light", "dark"))
            plots = {name: (light[name], dark[name]) for name in light}
        for name, (png, _) in plots.items():
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
                "memory of a rank at the peak": readable(costs.peak, "B"),
                "matmuls of a step, on a rank": readable(sum(costs.ledger.flops.values()), "FLOP"),
                "modelled time of a step": f"{readable(modelled.lower_bound, 's')} to {readable(modelled.estimate, 's')}",
                "modelled hours, if nothing overlaps": f"{step_hours:.3g}",
            },
            plots=plots,
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
            constants=_constant_rows(self.hardware),
            notes=self._notes(costs),
            command=self.command,
        )
        found = {**self._numbers(costs), "growth": [self._numbers(each) for each in growth]}
        (folder / "simulation.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _constant_rows(hardware: Hardware) -> list[Row]:
    return [
        {
            "figure": f"{constant.name.replace('_', ' ')}, {constant.unit}",
            "used": f"{constant.value:,.4g}",
            "datasheet": "" if constant.datasheet is None else f"{constant.datasheet:,.4g}",
            "to change it": f"{_CONSTANT}{constant.name.replace('_', '-')} {constant.value:.4g}",
        }
        for constant in hardware.constants()
    ]


def _time_rows(phases: Mapping[str, Any]) -> list[Row]:
    return [
        {"phase": phase, **{name.replace("_", " "): readable(getattr(parts, name), "s") for name in TIMES}}
        for phase, parts in phases.items()
    ]

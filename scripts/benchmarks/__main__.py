"""The command line of the benchmarks: ./scripts/bench NAME [--help], and ./scripts/bench report FILE.json"""

import shlex
import sys
from collections.abc import Sequence
from datetime import datetime
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import tyro
from rich.console import Console

from benchmarks.harness.benchmark import Benchmark
from benchmarks.harness.results import Results

RESULTS = Path(__file__).parent / "results"
# Name: the module, its class, and one line for --help. The modules are imported when they are needed.
BENCHMARKS = {
    "collectives": ("collectives", "Collectives", "all_gather and its backward against torch's own collectives"),
    "contrastive": ("contrastive", "Contrastive", "time and memory of the losses against open_clip's and three matmuls"),
    "dataparallel": (
        "dataparallel",
        "DataParallel",
        "scatter, gather and replicas against torch.nn.parallel, GradientSync against DDP",
    ),
    "embedding": ("embedding.benchmark", "Embedding", "a training step of 26 sharded tables against TorchRec's"),
    "id-maps": ("id_maps", "IdMaps", "26 maps of dynamic ids in one exchange against one by one"),
    "recommender": (
        "recommender.benchmark",
        "Recommender",
        "a training step of DLRM against the same model with TorchRec's tables",
    ),
    "gpu-ledger": (
        "gpu_ledger.benchmark",
        "GpuLedger",
        "what one GPU of 8 to 1,024 does, counted without a GPU, against open_clip's and torch's",
    ),
    "clip": ("clip.benchmark", "Clip", "a training step of CLIP against open_clip's own, with the same towers"),
}
USAGE = "\n".join(
    [
        "usage: ./scripts/bench NAME [options]    run a benchmark; NAME --help shows its options",
        "       ./scripts/bench report FILE.json  write the Markdown report and the plot of a results file again",
        "",
        *(f"  {name:14}{summary}" for name, (_, _, summary) in BENCHMARKS.items()),
    ]
)


def main(args: Sequence[str]) -> None:
    if not args or args[0] in ("-h", "--help"):
        print(USAGE)
        return
    name, *rest = args
    if name == "report":
        tyro.cli(write_report_again, prog="./scripts/bench report", args=rest)
        return
    if name not in BENCHMARKS:
        raise SystemExit(f"bench: no benchmark is named {name!r}\n{USAGE}")
    benchmark = tyro.cli(benchmark_class(name), prog=f"./scripts/bench {name}", args=rest)
    run_benchmark(name, benchmark, shlex.join(["./scripts/bench", *args]))


def benchmark_class(name: str) -> type[Benchmark]:
    module, attribute, _ = BENCHMARKS[name]
    found: type[Benchmark] = getattr(import_module(f"benchmarks.{module}"), attribute)
    return found


def run_benchmark(name: str, benchmark: Benchmark, command: str) -> None:
    """Run a benchmark, print its results and write them."""
    benchmark.validate()
    if benchmark.needs_linux and not Path("/proc/self/clear_refs").exists():
        raise SystemExit(f"{name}: memory and traffic are read from /proc, which only Linux has")
    console = Console()
    if not console.is_terminal:
        console.width = 190
    if benchmark.needs_torchrec:
        from benchmarks.harness import torchrec_environment

        torchrec_environment.enter(console)
    import torch

    from benchmarks.harness.ranks import Ranks
    from benchmarks.harness.report import describe_machine, print_results, write_files

    about = {
        "benchmark": name,
        "command": command,
        "quick": benchmark.quick,
        "date": f"{datetime.now().astimezone():%Y-%m-%d %H:%M %Z}",
        "machine": describe_machine(),
        "torch": torch.__version__,
        "packages": {package: version(package) for package in benchmark.peers},
        "options": benchmark.options(),
    }
    with Ranks(console) as ranks:
        results = Results(benchmark.run(ranks), about)
    print_results(benchmark, results, console)
    if not benchmark.quick or benchmark.out:
        path = write_files(benchmark, results, benchmark.out or RESULTS)
        console.print(f"written: {path}, .json and .png", soft_wrap=True)


def write_report_again(file: tyro.conf.Positional[Path], out: Path | None = None) -> None:
    """Write the Markdown report and the plot of a results file again.

    Args:
        file: A DATE-NAME.json that a benchmark has written.
        out: Folder for the two files. [default: the folder of the results file]
    """
    from benchmarks.harness.report import write_report

    results = Results.load(file)
    folder = out or file.parent
    folder.mkdir(parents=True, exist_ok=True)
    options = {key: tuple(x) if isinstance(x, list) else x for key, x in results.about.get("options", {}).items()}
    benchmark = benchmark_class(results.about["benchmark"])(quick=results.about.get("quick", False), **options)
    print(f"written: {write_report(benchmark, results, folder / f'{file.stem}.md')} and .png")


if __name__ == "__main__":
    main(sys.argv[1:])

"""python -m unisono_models.recommender export RUN_DIR: write programs for one process, and say what quantized tables cost."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro

from unisono.embedding import sharded_parameters
from unisono.embedding.inference import Bits
from unisono_models.recommender.commands import evaluate
from unisono_models.recommender.model.export import VOCABULARIES_FILE, read_export
from unisono_models.recommender.model.serving import export_programs, save_programs
from unisono_models.training.distributed.launch import Ranks
from unisono_models.training.errors import UserError


@dataclass(frozen=True)
class Options:
    """Write the model of a run as programs of torch.export, in one process.

    torch.export.load(path).module() runs them without this package: model.pt2, or users.pt2 and items.pt2 of two towers.
    """

    run: Annotated[Path, tyro.conf.Positional]
    """The directory of a finished run."""
    bits: Literal["4", "8", "32"] = "8"
    """The bits of a number in the tables. 32: the tables as they are."""
    out: Path | None = None
    """The folder to write to; by default serving-BITS in the directory of the run."""
    split: Literal["test", "valid", "none"] = "test"
    """The split on which the model is compared before and after."""


@dataclass(frozen=True)
class Exported:
    """What was written, and what it costs."""

    files: list[Path]
    bytes_before: int
    """Of the tables."""
    bytes_after: int
    metrics_before: dict[str, float]
    metrics_after: dict[str, float]


def export_run(options: Options) -> Exported:
    """Write the programs of a run, and compare the model with the one that it has exported."""
    bits_of: dict[str, Bits | None] = {"4": 4, "8": 8, "32": None}
    bits = bits_of[options.bits]
    before: dict[str, float] = {}
    after: dict[str, float] = {}
    if options.split != "none":
        ranks = Ranks(0, 1, 0, torch.device("cpu"))
        evaluator, _ = evaluate.load_evaluator(evaluate.Options(options.run, options.split), ranks)
        before = evaluator(options.split)
        evaluator.module.tables.convert_for_inference(bits)
        after = evaluator(options.split)
    exported = read_export(options.run / "export")
    tables = exported.model.tables
    bytes_before = sum(weight.nbytes for weight in sharded_parameters(tables).values())
    tables.convert_for_inference(bits)
    folder = options.out or options.run / f"serving-{options.bits}"
    files = save_programs(export_programs(exported.model, exported.features), folder)
    shutil.copyfile(options.run / "export" / VOCABULARIES_FILE, folder / VOCABULARIES_FILE)
    assert tables.inference is not None
    bytes_after = sum(buffer.nbytes for buffer in tables.inference.buffers())
    return Exported(files, bytes_before, bytes_after, before, after)


def main(args: Sequence[str] | None = None) -> None:
    options = tyro.cli(Options, prog="python -m unisono_models.recommender export", args=args)
    try:
        exported = export_run(options)
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from error
    before, after = exported.bytes_before, exported.bytes_after
    print(f"tables: {before / 2**20:.2f} MB before, {after / 2**20:.2f} MB after ({before / max(after, 1):.2f} times smaller)")
    for name, value in exported.metrics_before.items():
        change = exported.metrics_after[name] - value
        print(f"{name:24} {value:.6f} before, {exported.metrics_after[name]:.6f} after ({change:+.6f})")
    for path in exported.files:
        print(f"wrote {path} ({path.stat().st_size / 2**20:.2f} MB)")

"""The figures of a finished run, again: python -m unisono_models.gan.evaluate RUN_DIR (or by torchrun)"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro

from unisono_models.gan.config import Config
from unisono_models.gan.data.dataset import build_datasets
from unisono_models.gan.evaluate import Evaluator
from unisono_models.gan.feature_extractor import load_or_train_feature_extractor
from unisono_models.gan.model.export import FILES, read_export
from unisono_models.gan.model.sampling import generate_for_evaluation
from unisono_models.gan.report import figure_rows, print_table
from unisono_models.training.config.serialization import read_json
from unisono_models.training.distributed.launch import Ranks, start_ranks
from unisono_models.training.distributed.object_collectives import RanksError, raise_together
from unisono_models.training.distributed.watchdog import Watchdog
from unisono_models.training.run.run_directory import RunError, find_run

_TIMEOUT = 1800.0  # seconds without progress: reading many pictures takes long on some disks


@dataclass(frozen=True)
class Options:
    """Measure the generator that a run has exported by the run's own judge, alone or on any number of ranks by torchrun."""

    run: Annotated[Path, tyro.conf.Positional]
    """The directory of the run."""
    samples: int | None = None
    """Pictures to make. Figures of fewer are worse: chance makes distances larger. None: as many as the run made."""
    seed: int | None = None
    """Of the noise. None: the run's, which gives the figures that it has kept."""


def evaluate_run(options: Options, ranks: Ranks, heartbeat: Watchdog | None = None) -> list[dict[str, float | str]]:
    """A row for each figure: of generated pictures now, as the run has kept it, and of real test pictures. All ranks call."""
    judge_file = options.run / "judge.safetensors"
    with raise_together("evaluate"):
        if options.samples is not None and options.samples < 2:
            raise RunError(f"--samples {options.samples}: at least 2")
        config = find_run(options.run, model="gan", kind=Config, files=FILES)
        generator = read_export(options.run / "export").generator
        if not judge_file.is_file():
            raise RunError(
                f"{judge_file} is not there, by which the run was measured: another judge's figures would not compare"
            )
        summary = options.run / "summary.json"
        kept = read_json(summary) if summary.exists() else {}
    generator.to(ranks.device)
    evaluation = config.evaluation if options.samples is None else replace(config.evaluation, samples=options.samples)
    beat = None if heartbeat is None else heartbeat.beat
    source = build_datasets(config.data, condition=config.model.condition, ranks=ranks, beat=beat)
    judge = load_or_train_feature_extractor(judge_file, source, evaluation, ranks, heartbeat)
    evaluator = Evaluator(source, judge, ranks, heartbeat, evaluation, conditional=config.model.condition != "none")
    seed = config.run.seed if options.seed is None else options.seed
    found = evaluator(partial(generate_for_evaluation, generator, source.train, seed=seed))
    rows = figure_rows(found, evaluator.real())
    beside = zip(rows, found, strict=True)
    return [
        {"figure": row["figure"], "generated": row["generated"], "run": kept.get(name, ""), "real": row["real"]}
        for row, name in beside
    ]


def main(args: Sequence[str] | None = None) -> None:
    options = tyro.cli(Options, prog="python -m unisono_models.gan.evaluate", args=args)
    with start_ranks(timeout=_TIMEOUT) as ranks, Watchdog(ranks, timeout=_TIMEOUT) as heartbeat:
        try:
            rows = evaluate_run(options, ranks, heartbeat)
        except (ValueError, OSError, RanksError) as error:
            raise SystemExit(str(error)) from None
        if ranks.first:
            print_table(rows, title=str(options.run))


if __name__ == "__main__":
    main()

"""Compute the metrics of a finished run again: python -m unisono_models.gan evaluate RUN_DIR (or with torchrun)"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro

from unisono_models.gan.config import Config
from unisono_models.gan.data.dataset import build_datasets
from unisono_models.gan.evaluate import Evaluator
from unisono_models.gan.feature_extractor import FILE, load_or_train_feature_extractor
from unisono_models.gan.model.export import FILES, read_export
from unisono_models.gan.model.sampling import generate_for_evaluation
from unisono_models.gan.report import metric_rows
from unisono_models.training.config.serialization import read_json
from unisono_models.training.distributed.launch import Ranks, start_ranks
from unisono_models.training.distributed.object_collectives import raise_together
from unisono_models.training.distributed.watchdog import Watchdog
from unisono_models.training.run.report import print_table
from unisono_models.training.run.run_directory import RunError, find_run

_TIMEOUT = 1800.0  # seconds without progress; reading many images takes long on some disks


@dataclass(frozen=True)
class EvaluateOptions:
    """Evaluate the generator that a run has exported, with the run's own feature extractor, on any number of ranks."""

    run: Annotated[Path, tyro.conf.Positional]
    """The directory of the run."""
    samples: int | None = None
    """The number of images to generate. Without it, it is that of the run. Fewer images give larger distances by chance."""
    seed: int | None = None
    """The seed of the noise. Without it the run's own seed is used, which gives the metrics of its summary."""


def evaluate_run(options: EvaluateOptions, ranks: Ranks, watchdog: Watchdog | None = None) -> list[dict[str, float | str]]:
    """Return a table row for each metric: of generated images now, in the run's summary, and of real images.

    All ranks call it.
    """
    extractor_file = options.run / FILE
    with raise_together("evaluate"):
        if options.samples is not None and options.samples < 2:
            raise RunError(f"--samples {options.samples}: must be at least 2")
        config = find_run(options.run, model="gan", kind=Config, files=FILES)
        generator = read_export(options.run / "export").generator
        if not extractor_file.is_file():
            raise RunError(f"{extractor_file} is missing. Metrics with another feature extractor could not be compared")
        summary_file = options.run / "summary.json"
        summary = read_json(summary_file) if summary_file.exists() else {}
    generator.to(ranks.device)
    condition = config.model.condition
    evaluation = config.evaluation if options.samples is None else replace(config.evaluation, samples=options.samples)
    seed = config.run.seed if options.seed is None else options.seed
    beat = None if watchdog is None else watchdog.beat
    datasets = build_datasets(config.data, condition=condition, ranks=ranks, beat=beat)
    extractor = load_or_train_feature_extractor(extractor_file, datasets, evaluation, ranks, watchdog)
    evaluator = Evaluator(datasets, extractor, ranks, watchdog, evaluation, conditional=condition != "none")
    metrics = evaluator(partial(generate_for_evaluation, generator, datasets.train, seed=seed))
    rows = metric_rows(metrics, evaluator.real())
    return [
        {"metric": row["metric"], "generated": row["generated"], "run": summary.get(name, ""), "real": row["real"]}
        for row, name in zip(rows, metrics, strict=True)
    ]


def main(args: Sequence[str] | None = None) -> None:
    options = tyro.cli(EvaluateOptions, prog="python -m unisono_models.gan evaluate", args=args)
    with start_ranks(timeout=_TIMEOUT) as ranks, Watchdog(ranks, timeout=_TIMEOUT) as watchdog:
        rows = evaluate_run(options, ranks, watchdog)
        if ranks.first:
            print_table(rows, title=str(options.run))

"""python -m unisono_models.recommender evaluate RUN_DIR: test the model of a finished run again."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro
from safetensors.torch import load_file

from unisono_models.recommender.config import Config
from unisono_models.recommender.data.dataset import build_datasets
from unisono_models.recommender.evaluate import Evaluator
from unisono_models.recommender.loss import build_training_module
from unisono_models.recommender.model.export import (
    FILES,
    WEIGHTS_FILE,
    dtype_of_weights,
    load_weights,
    read_data_config,
    read_vocabularies,
)
from unisono_models.recommender.protocols import complete_config
from unisono_models.training.distributed.launch import Ranks, start_ranks
from unisono_models.training.distributed.object_collectives import RanksError, raise_together
from unisono_models.training.errors import UserError
from unisono_models.training.run.run_directory import find_run


@dataclass(frozen=True)
class Options:
    """Evaluate the exported model of a run, in one process or on any number of ranks by torchrun."""

    run: Annotated[Path, tyro.conf.Positional]
    """The directory of the run."""
    split: Literal["test", "valid"] = "test"
    """The split to evaluate on."""
    source: str = ""
    """Evaluate on these files, of the same format, instead of the data of the run."""


def evaluate_run(options: Options, ranks: Ranks) -> tuple[dict[str, float], dict[str, float]]:
    """Return the metrics of the exported model, and those that the run has saved. All ranks call."""
    evaluator, saved = load_evaluator(options, ranks)
    return evaluator(options.split), saved


def load_evaluator(options: Options, ranks: Ranks) -> tuple[Evaluator, dict[str, float]]:
    """Load the exported model and its data. Returns the metrics that the run has saved, too. All ranks call."""
    with raise_together("evaluate"):
        export = options.run / "export"
        config = find_run(options.run, model="recommender", kind=Config, files=FILES)
        data = read_data_config(export)
        weights = load_file(export / WEIGHTS_FILE)
        vocabularies = read_vocabularies(export)
        summary = options.run / "summary.json"
        saved = json.loads(summary.read_text()) if summary.exists() else {}
    if options.source and data.test and options.split == "test":
        data = replace(data, test=options.source)
    elif options.source:
        data = replace(data, source=options.source)
    config = replace(config, data=data)
    datasets = build_datasets(data, seed=config.run.seed, ranks=ranks, vocabularies=vocabularies)
    config = complete_config(config, datasets)
    dtype = dtype_of_weights(weights)
    module = build_training_module(config, datasets, dtype=dtype, device=ranks.device)
    load_weights(module.model, weights)
    repeats = config.evaluation.repeats
    return Evaluator(module, datasets, ranks, dtype=dtype, max_broken=data.max_broken, repeats=repeats), saved


def main(args: Sequence[str] | None = None) -> None:
    options = tyro.cli(Options, prog="python -m unisono_models.recommender evaluate", args=args)
    with start_ranks(timeout=300) as ranks:
        try:
            metrics, saved = evaluate_run(options, ranks)
        except (ValueError, OSError, RanksError) as error:
            raise UserError(str(error)) from error
        if ranks.first:
            for name, value in metrics.items():
                print(f"{name:24} {_format(value)}" + (f"   (run: {_format(saved[name])})" if name in saved else ""))


def _format(value: float) -> str:
    return f"{value:,.0f}" if value > 1 and value.is_integer() else f"{value:.6f}"  # a count, or a metric

"""The test of a finished run, again: python -m unisono_models.recommender.commands.evaluate RUN_DIR (or by torchrun)"""

from __future__ import annotations

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
from unisono_models.recommender.export import FILES, dtype_of_weights, exported_data, load_weights, read_vocabularies
from unisono_models.recommender.loss import build_training_module
from unisono_models.training.distributed.launch import Ranks, start_ranks
from unisono_models.training.distributed.object_collectives import RanksError, raise_together
from unisono_models.training.run.run_directory import find_run


@dataclass(frozen=True)
class Options:
    """Test the model that a run has exported, on the data of its config, alone or on any number of ranks by torchrun."""

    run: Annotated[Path, tyro.conf.Positional]
    """The directory of the run."""
    part: Literal["test", "valid"] = "test"
    source: str = ""
    """Other data of the same layout, in place of what the run was tested on. Empty: where it was."""


def evaluate_run(options: Options, ranks: Ranks) -> tuple[dict[str, float], dict[str, float]]:
    """The figures of the exported model, and those that the run has kept. All ranks call."""
    with raise_together("evaluate"):
        config = find_run(options.run, model="recommender", kind=Config, files=FILES)
        config = replace(config, data=exported_data(options.run / "export"))
        weights = load_file(options.run / "export" / FILES[0])
        vocabularies = read_vocabularies(options.run / "export")
        summary = options.run / "summary.json"
        kept = json.loads(summary.read_text()) if summary.exists() else {}
    if options.source and config.data.test and options.part == "test":
        config = replace(config, data=replace(config.data, test=options.source))
    elif options.source:
        config = replace(config, data=replace(config.data, source=options.source))
    source = build_datasets(config.data, seed=config.run.seed, ranks=ranks, vocabularies=vocabularies)
    dtype = dtype_of_weights(weights)
    learner = build_training_module(config, source, dtype=dtype, device=ranks.device)
    load_weights(learner.model, weights)
    return Evaluator(learner, source, ranks, dtype=dtype, max_broken=config.data.max_broken)(options.part), kept


def main(args: Sequence[str] | None = None) -> None:
    options = tyro.cli(Options, prog="python -m unisono_models.recommender.commands.evaluate", args=args)
    with start_ranks(timeout=300) as ranks:
        try:
            found, kept = evaluate_run(options, ranks)
        except (ValueError, OSError, RanksError) as error:
            raise SystemExit(str(error)) from None
        if ranks.first:
            for name, value in found.items():
                print(f"{name:24} {value:.6f}" + (f"   (run: {kept[name]:.6f})" if name in kept else ""))


if __name__ == "__main__":
    main()

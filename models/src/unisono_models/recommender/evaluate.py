"""The test of a finished run, again: python -m unisono_models.recommender.evaluate RUN_DIR (or by torchrun)"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro
from safetensors.torch import load_file

from unisono_models.recommender.config import Config
from unisono_models.recommender.evaluation import Evaluator
from unisono_models.recommender.export import FILES, load_weights
from unisono_models.recommender.objective import make_learner
from unisono_models.recommender.run_export import RunError, find_run
from unisono_models.recommender.source import open_source
from unisono_models.training.ranks import Ranks, start_ranks


@dataclass(frozen=True)
class Options:
    """Test the model that a run has exported, on the data of its config, alone or on any number of ranks by torchrun."""

    run: Annotated[Path, tyro.conf.Positional]
    """The directory of the run."""
    part: Literal["test", "valid"] = "test"
    source: str = ""
    """Other data of the same layout, such as a copy elsewhere. Empty: where it was."""


def evaluate_run(options: Options, ranks: Ranks) -> tuple[dict[str, float], dict[str, float]]:
    """The figures of the exported model, and those that the run has kept. All ranks call."""
    config: Config = find_run(options.run)
    if options.source:
        config = replace(config, data=replace(config.data, source=options.source))
    source = open_source(config.data, seed=config.run.seed, ranks=ranks)
    weights = load_file(options.run / "export" / FILES[0])
    dtype = next(iter(weights.values())).dtype
    learner = make_learner(config, source, dtype=dtype, device=ranks.device)
    load_weights(learner.model, weights)
    kept = json.loads((options.run / "summary.json").read_text()) if (options.run / "summary.json").exists() else {}
    return Evaluator(learner, source, ranks, dtype=dtype)(options.part), kept


def main(args: Sequence[str] | None = None) -> None:
    options = tyro.cli(Options, prog="python -m unisono_models.recommender.evaluate", args=args)
    with start_ranks(timeout=300) as ranks:
        try:
            found, kept = evaluate_run(options, ranks)
        except RunError as error:
            raise SystemExit(str(error)) from None
        if ranks.first:
            for name, value in found.items():
                print(f"{name:24} {value:.6f}" + (f"   (run: {kept[name]:.6f})" if name in kept else ""))


if __name__ == "__main__":
    main()

"""The sections that the config of every model has. They are frozen: a run is what its config says.

tyro makes the command line from them: the text below a field is what --help says about it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from unisono_models.training.config.validate import check_options


@dataclass(frozen=True)
class RunConfig:
    """The run: how long it trains, where it is kept, when it logs and evaluates."""

    steps: int
    """The number of optimizer steps. It does not depend on the number of ranks. With the --run.dir of a run of fewer steps,
    finished or not, the run is extended: it goes on with the learning rate schedule of the new number."""
    seed: int = 0
    """The seed of everything random: initial weights, order of samples, augmentation, dropout."""
    dir: Path | None = None
    """The run directory. None takes runs/{model}-{recipe}, or adds a number to it if that holds a finished run or a run of
    another config. An interrupted run of the same config is continued."""
    init_from: Path | None = None
    """Start from the weights of another run: its directory (the newest checkpoint in it is taken), or one of its checkpoints,
    such as RUN/checkpoints/step-00000100. Optimizer and step begin anew. The model has to have the same shape."""
    log_every: int = 10
    """The number of steps between log lines. metrics.jsonl has every step, whatever this is."""
    evaluate_every: int = 0
    """The number of steps between evaluations. 0 evaluates only at the end."""
    stop_after: int | None = None
    """Save and stop after this many steps, as after a SIGTERM. The learning rate schedule stays that of --run.steps. The same
    command without this option continues the run."""
    timeout: float = 300.0
    """The number of seconds without progress after which the run gives up and names the ranks that are missing."""

    def __post_init__(self) -> None:
        check_options("run", self, "at least 1", steps=self.steps >= 1, log_every=self.log_every >= 1)
        check_options("run", self, "at least 1, or None", stop_after=self.stop_after is None or self.stop_after >= 1)
        check_options("run", self, "at least 0", evaluate_every=self.evaluate_every >= 0)
        check_options("run", self, "above 0, and at most a year", timeout=0 < self.timeout < 365 * 86400)


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints. They are written in the background and verified before they are loaded."""

    every: int = 0
    """The number of steps between checkpoints. 0 saves only at the end, after evaluations, and when the run is stopped."""
    keep: int = 2
    """The number of newest checkpoints to keep. The one with the best score is kept in addition."""

    def __post_init__(self) -> None:
        check_options("checkpoint", self, "at least 0", every=self.every >= 0)
        check_options("checkpoint", self, "at least 1", keep=self.keep >= 1)


@dataclass(frozen=True)
class ParallelConfig:
    """How the model is distributed over ranks, and the precision it computes in."""

    kind: Literal["ddp", "fsdp", "hybrid"] = "ddp"
    """ddp keeps a copy of the model on every rank. fsdp shards it over all ranks.
    hybrid shards it over groups of `shard` neighbouring ranks: each group has a copy."""
    shard: int | None = None
    """The number of ranks that share one copy of the model if kind is hybrid. None takes the ranks of one host."""
    precision: Literal["float32", "bfloat16", "float64"] = "float32"
    """bfloat16 computes by autocast, with float32 parameters.
    float64 computes everything in float64, to tell rounding errors from bugs."""
    checkpoint_activations: bool = False
    """Recompute the activations of the model's blocks in the backward pass instead of keeping them in memory."""
    compile: bool = False
    """Compile the model's blocks with torch.compile."""

    def __post_init__(self) -> None:
        check_options("parallel", self, "at least 1, or None", shard=self.shard is None or self.shard >= 1)

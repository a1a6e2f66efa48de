"""The settings that every recipe has. Frozen: a run is what its config says. The command line comes from these by tyro."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class RunConfig:
    """The run: where it is kept, how long it goes, what it shows."""

    steps: int
    """Steps of the optimizer. The run ends here, whatever the number of ranks."""
    seed: int = 0
    """Decides everything that is random: initial weights, order, augmentation, dropout."""
    dir: Path | None = None
    """The run directory. None: runs/{model}-{recipe}, continued if it was interrupted, numbered if it is finished."""
    log_every: int = 10
    """Steps between looks at the loss. Every step's loss is kept all the same."""
    evaluate_every: int = 0
    """Steps between evaluations. 0: only at the end."""
    stop_after: int | None = None
    """Stop in order after this many steps, as if told to: the schedule stays that of `steps`."""
    timeout: float = 300.0
    """Seconds without progress after which a run gives up and says which rank is missing."""


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints: written in the background, verified before they are loaded."""

    every: int = 0
    """Steps between checkpoints. 0: only at the end and when the run is told to stop."""
    keep: int = 2
    """How many of the newest to keep. The best one is kept besides."""


@dataclass(frozen=True)
class ParallelConfig:
    """How the model is spread over ranks, and in what precision it computes."""

    kind: Literal["ddp", "fsdp", "hybrid"] = "ddp"
    """ddp: a copy on every rank. fsdp: sharded over all ranks. hybrid: sharded over `shard` neighbours, and copies of that."""
    shard: int | None = None
    """Ranks that share one copy when hybrid. None: those of one host."""
    precision: Literal["float32", "bfloat16", "float64"] = "float32"
    """bfloat16: of the computation; parameters stay float32. float64: of everything, to tell rounding from faults."""
    checkpoint_activations: bool = False
    """Compute the blocks of the towers again in the backward instead of keeping their activations."""
    compile: bool = False
    """torch.compile the towers."""

"""Adapters: training loops of other libraries, recorded as they are."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn

from unisono.collectives.law.splits import as_float64

if TYPE_CHECKING:
    from unisono.collectives.law.record import Recorder


def run_trainer(built: Any, steps: int, float64: bool, start: Callable[[Any, Any], Recorder]) -> Recorder:
    """Let a Hugging Face Trainer train `steps` steps, and return the recorder that `start(model, optimizer)` made.

    The loop is the Trainer's own, with its accumulation, clipping, sampler and overridden methods. Its
    per_device_train_batch_size is taken as that of one process, and divided by the number of ranks.
    """
    transformers = sys.modules.get("transformers.trainer")
    if transformers is None or not isinstance(built, transformers.Trainer):
        raise TypeError(
            f"check: without a step, build() must return a Hugging Face Trainer; it returned {type(built).__name__}. "
            "Give check a step and a batch"
        )
    trainer, args = built, built.args
    if args.per_device_train_batch_size % dist.get_world_size():
        raise ValueError(
            f"check: per_device_train_batch_size={args.per_device_train_batch_size} is divided by the number of ranks, and "
            f"must be a multiple of {dist.get_world_size()}: 12 is one of 1, 2, 3 and 4"
        )
    args.per_device_train_batch_size //= dist.get_world_size()
    trainer._train_batch_size = args.train_batch_size  # the Trainer's copy of it
    args.max_steps = steps
    args.save_strategy = args.eval_strategy = args.logging_strategy = "no"
    trainer.remove_callback(transformers.DEFAULT_PROGRESS_CALLBACK)
    training_step, recorders = trainer.training_step, []

    class Record(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            recorders.append(start(trainer.model_wrapped, trainer.optimizer))

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            recorders[0].begin_step()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            recorders[0].end_step()

    def record_micro_batch(model: nn.Module, inputs: Any, *more: Any, **named: Any) -> Any:
        inputs = as_float64(inputs) if float64 else inputs
        recorders[0].add_rows(inputs)
        loss = training_step(model, inputs, *more, **named)
        recorders[0].add_loss(float(loss))
        return loss

    trainer.training_step = record_micro_batch
    trainer.add_callback(Record)
    trainer.train()
    return recorders[0]


def reset_accelerate() -> None:
    """Let accelerate find its ranks and dtypes anew: it remembers them for the life of a process."""
    if state := sys.modules.get("accelerate.state"):
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()

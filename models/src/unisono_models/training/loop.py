"""The loop that all models share. It is no Trainer: what happens in a step is the model's own code."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import Protocol

from torch import Tensor, nn

from unisono_models.training.checkpoint.manager import Checkpoints
from unisono_models.training.checkpoint.manifest import list_steps
from unisono_models.training.checkpoint.state_dict import Extra, Optimizers
from unisono_models.training.config import CheckpointConfig, RunConfig
from unisono_models.training.config.validate import learning_rates, warn_of_learning_rates
from unisono_models.training.distributed.launch import Ranks, start_ranks
from unisono_models.training.distributed.object_collectives import Json, broadcast_object, raise_together
from unisono_models.training.distributed.shared_directory import check_directory_is_shared
from unisono_models.training.distributed.watchdog import Watchdog
from unisono_models.training.errors import UserError, note_run_directory
from unisono_models.training.run.log import RunLog
from unisono_models.training.run.preemption import StopSignal
from unisono_models.training.run.run_directory import RunDirectory, open_run
from unisono_models.training.schedule import is_due, learning_rate_factor

_OWN_STATE = "loop"  # the loop's own entry in the state of a checkpoint


class TrainingConfig(Protocol):
    """The sections that the config of every model has."""

    @property
    def run(self) -> RunConfig: ...

    @property
    def checkpoint(self) -> CheckpointConfig: ...


@dataclass(frozen=True)
class Session:
    """One start of a run: this process among its ranks, the directory of the run, and what watches over it."""

    config: TrainingConfig
    ranks: Ranks
    directory: RunDirectory
    watchdog: Watchdog
    stop_signal: StopSignal

    def load_initial_weights(self, model: nn.Module) -> None:
        """Load now the weights of `model` that TrainingLoop will load. Does nothing without --run.init-from. All ranks call it.

        For a model that uses frozen weights before the loop begins, such as for features that it caches.
        """
        run = self.config.run
        if run.init_from is not None:
            with Checkpoints(self.directory.checkpoints, timeout=run.timeout) as checkpoints:
                continues = broadcast_object(bool(list_steps(self.directory.checkpoints)))
                checkpoints.load_weights(self.directory.path if continues else run.init_from, model)


@contextmanager
def start_session(config: TrainingConfig, *, model: str, recipe: str) -> Iterator[Session]:
    """Join the other ranks, watch for signals and for ranks that hang, and open the directory of the run.

    Example:
        recipe, config = RECIPES.choose(args)
        with start_session(config, model="clip", recipe=recipe) as session:
            train(config, session)
    """
    timeout = config.run.timeout
    with (
        start_ranks(timeout=timeout) as ranks,
        StopSignal() as stop_signal,
        Watchdog(ranks, timeout=timeout) as watchdog,
        open_run(config, model=model, recipe=recipe, ranks=ranks) as directory,
        note_run_directory(directory.path),
    ):
        check_directory_is_shared(directory.path, ranks)
        if ranks.first:
            warn_of_learning_rates(config)
        yield Session(config, ranks, directory, watchdog, stop_signal)


class TrainingLoop:
    """Iterates over the steps that are left, and decides when to log, evaluate, save and stop. A context manager.

    Entering it loads the newest checkpoint into the model, the optimizers and `extra`. In each step the body calls `log` once,
    then `record` if `evaluation_due`, then `save` if `checkpoint_due`. Every rank does the same.

    A signal, or config.run.stop_after, ends the iteration after a step that was saved. Then `finished` is False, and the same
    command continues the run.

    Example:
        with TrainingLoop(session, model, optimizer) as loop:
            for step in loop:
                losses = train_step(batches.at(step))
                loop.log(losses, samples=batches.size(step))
                if loop.evaluation_due:
                    loop.record(evaluate(model))
                if loop.checkpoint_due:
                    loop.save({})
            if not loop.finished:
                return
            metrics = loop.final_metrics(lambda: evaluate(model))
        write_report(...)
    """

    def __init__(self, session: Session, model: nn.Module, optimizers: Optimizers, *, extra: Extra | None = None) -> None:
        """`optimizers`: one, or several by name. `extra`: further tensors and modules to save, such as averaged weights."""
        run = session.config.run
        self.steps = run.steps
        self.last_step = run.steps if run.stop_after is None else min(run.steps, run.stop_after)
        """The step before which the iteration ends at the latest."""
        self.first_step = 0
        """The step at which this start begins: not 0 if the run is continued."""
        self.state: dict[str, Json] = {}
        """What the last start gave to `save`; empty in a new run."""
        self.metrics: Mapping[str, float] | None = None
        """The metrics that were recorded after the newest step, if any."""
        self.done = 0
        """How many steps the run has taken."""
        self.stopping = False
        """Whether the iteration ends after this step although the run is not finished: the same on all ranks."""
        self.ended_early: str | None = None
        """Why the run was finished before its last step, if `finish_early` was called, now or in an earlier start."""
        self._session, self._model, self._optimizers, self._extra = session, model, optimizers, extra
        self._logged = self._saved = True
        self._source: Json = None  # the checkpoint of another run that the weights come from

    @property
    def just_resumed(self) -> bool:
        """Whether this is the first step of a start that continues a run.

        DDP decides in its first backward how it packs gradients into buckets, and so how their sums are rounded. A model on
        DDP repeats that before this step: a forward and a backward whose gradients it throws away.
        """
        return self.done == self.first_step > 0

    @property
    def finished(self) -> bool:
        """Whether the run has taken all its steps, or was finished early."""
        return self.done >= self.steps or self.ended_early is not None

    @property
    def log_due(self) -> bool:
        return is_due(self.done, self._session.config.run.log_every)

    @property
    def evaluation_due(self) -> bool:
        return self.finished or is_due(self.done, self._session.config.run.evaluate_every)

    @property
    def checkpoint_due(self) -> bool:
        """True after metrics were recorded, too: so the best checkpoint is one that was evaluated."""
        every = self._session.config.checkpoint.every
        return self.stopping or self.finished or bool(self.metrics) or is_due(self.done, every)

    @property
    def first_metric(self) -> float | None:
        """The first of the recorded metrics: the score that checkpoints are compared by."""
        return next(iter(self.metrics.values())) if self.metrics else None

    def __enter__(self) -> TrainingLoop:
        config, directory = self._session.config, self._session.directory
        with ExitStack() as stack:
            self._checkpoints = stack.enter_context(
                Checkpoints(directory.checkpoints, keep=config.checkpoint.keep, timeout=config.run.timeout)
            )
            loaded = self._checkpoints.load(self._model, self._optimizers, extra=self._extra, state_type=dict)
            if loaded is not None:
                self.first_step, self.state = loaded
                self._note_early_end(self.state.pop(_OWN_STATE, {}).get("ended_early"))
            elif config.run.init_from is not None:
                self._source = self._checkpoints.load_weights(config.run.init_from, self._model, extra=self._extra)
            self.done = self.first_step
            self._stack = stack.pop_all()
        return self

    @cached_property
    def _log(self) -> RunLog:
        """The log. It is opened when it is first used: a start that is refused before that changes no file of the run."""
        session = self._session
        session.directory.record_start(
            first_step=self.first_step, **({} if self._source is None else {"init_from": self._source})
        )
        log_every = session.config.run.log_every
        log = RunLog(session.directory, session.ranks, steps=self.steps, first_step=self.first_step, log_every=log_every)
        return self._stack.enter_context(log)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.__exit__(kind, error, trace)

    def __iter__(self) -> Iterator[int]:
        directory = self._session.directory
        if self._source is not None:
            self.say(f"starting from the weights of {self._source['checkpoint']}")
        if directory.hint:
            self.say(directory.hint)
        if self.first_step:
            self.say(f"continuing at step {self.first_step:,}")
        if directory.changed_steps is not None:
            self.say(explain_new_steps(*directory.changed_steps, first_step=self.first_step, config=self._session.config))
        for step in range(self.first_step, self.first_step if self.finished else self.last_step):
            self._logged = self._saved = False
            yield step
            if not self._logged:
                raise RuntimeError(f"TrainingLoop: step {step} was not logged: call log once in each step")
            if self.checkpoint_due and not self._saved:
                raise RuntimeError(f"TrainingLoop: step {step} was not saved: call save if checkpoint_due")
            if self.stopping or self.finished:
                break
        saved = self._checkpoints.wait()
        if not self.finished:
            if not saved:
                raise UserError(f"stopped after step {self.done:,} of {self.steps:,}, which could not be saved")
            self.say(f"stopped after step {self.done:,} of {self.steps:,}; the same command continues the run")
        elif self.ended_early is not None:
            self.say(f"ended early {self.ended_early}")

    def log(self, values: Mapping[str, Tensor | float], *, samples: int) -> None:
        """End the step: log the `values` of the global batch, whose size is `samples`, and ask whether to stop."""
        step = self.done
        self.done = step + 1
        self.metrics = None
        self._logged = True
        self._session.watchdog.beat(self.done)
        self._log.step(step, values, samples=samples, read=self.evaluation_due or self.checkpoint_due)
        stop_here = self.done == self.last_step < self.steps
        signal, diverged = self._session.stop_signal.agree(failed=self._log.diverged is not None)
        if diverged:
            self._raise_problem()
        self.stopping = signal or stop_here

    def record(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Log the `metrics` of an evaluation after the newest step, and return them."""
        self.metrics = metrics
        self._log.evaluation(self.done - 1, metrics)
        return metrics

    def final_metrics(self, evaluate: Callable[[], Mapping[str, float]]) -> Mapping[str, float]:
        """The metrics after the last step. Evaluates now if an earlier start took that step."""
        return self.record(evaluate()) if self.metrics is None else self.metrics

    def save(self, state: dict[str, Json], *, score: float | None = None) -> None:
        """Save a checkpoint in the background. `state`: what else the next start needs, as JSON, the same on every rank.

        The checkpoint with the highest `score` is kept, however old. A save that fails is reported and does not end training.
        """
        self._log.flush()  # the next start begins after the checkpoint: all lines before it have to be on the disk
        self._raise_problem()
        own = {} if self.ended_early is None else {_OWN_STATE: {"ended_early": self.ended_early}}
        self._checkpoints.save(self.done, self._model, self._optimizers, {**state, **own}, score=score, extra=self._extra)
        self._saved = True

    def load_best(self) -> int | None:
        """Load the checkpoint with the highest score. Return its step, or None if none has a score.

        Call it after the last step: then the model that is tested and exported is the one that validation chose.
        """
        loaded = self._checkpoints.load(self._model, self._optimizers, extra=self._extra, state_type=dict, which="best")
        return None if loaded is None else loaded[0]

    def _raise_problem(self) -> None:
        """Raise UserError on all ranks if rank 0 knows why the run cannot go on."""
        with raise_together("TrainingLoop"):
            if self._session.ranks.first:
                self._session.directory.raise_if_vanished()
                if self._log.diverged is not None:
                    raise UserError(explain_divergence(self._log.diverged, self._session.config))

    def finish_early(self, reason: str) -> None:
        """Make the step that was just logged the last one of the run, which then counts as finished.

        Call it between `record` and `save`, on every rank in the same step: what decides has to be the same on all ranks, as
        global metrics are. `reason` is part of a sentence, such as "valid/auc has not improved in 3 evaluations".
        summary.json gets it under "ended_early", with the step. A later start of the run does not go on, whatever its
        --run.steps are: a longer run would have ended at the same step.
        """
        if self.done < self.steps:
            self._note_early_end(f"after step {self.done:,} of {self.steps:,}: {broadcast_object(reason)}")
            self.stopping = False  # a signal in the same step has nothing left to stop

    def _note_early_end(self, text: str | None) -> None:
        self.ended_early = text
        if text is not None:
            self._session.directory.remarks["ended_early"] = text

    def say(self, text: str) -> None:
        """Print a line, on rank 0."""
        self._log.say(text)


def explain_new_steps(old: int, new: int, *, first_step: int, config: object) -> str:
    """Say what another number of steps means for a run that goes on at `first_step`.

    Example:
        >>> explain_new_steps(100, 200, first_step=100, config=None)
        '--run.steps is 200 now, not 100: the learning rate and other schedules are those of 200 steps from here on'
    """
    text = f"--run.steps is {new:,} now, not {old:,}"
    text += f": the learning rate and other schedules are those of {new:,} steps from here on"
    optimizer = getattr(config, "optimizer", None)
    if not first_step or not all(hasattr(optimizer, name) for name in ("warmup", "final")):
        return text
    shape = {"warmup": optimizer.warmup, "final": optimizer.final}  # type: ignore[union-attr]
    last = learning_rate_factor(first_step - 1, old, **shape)
    following = learning_rate_factor(first_step, new, **shape)
    return f"{text}. The learning rate was {last:.0%} of its peak in the last step, and is {following:.0%} in the next"


def explain_divergence(what: str, config: object) -> str:
    """Say what to do about a loss that is not finite. `what`: the step, and what the loss is.

    Example:
        >>> explain_divergence("step 3: loss is nan", CheckpointConfig())
        'step 3: loss is nan: the training has diverged. Look for values in the data that are not finite'
    """
    options = " and ".join(f"{option} (it is {value:g})" for option, value in learning_rates(config))
    advice = f"Start another run with a lower {options}, or look" if options else "Look"
    return f"{what}: the training has diverged. {advice} for values in the data that are not finite"

"""What one rank records while it trains: every tensor that the law is about, as fingerprints, and how it came about."""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any, Literal, cast
from unittest import mock

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from unisono.collectives.law.adapters import reset_accelerate, run_trainer
from unisono.collectives.law.fingerprint import fingerprint, fingerprint_rows
from unisono.collectives.law.resume import load_state, save_state
from unisono.collectives.law.splits import as_float64, take_rows, tensors_with_rows
from unisono.collectives.traffic import collective_call

_LIBRARIES = ("torch", "unisono", "contextlib", "functools", "accelerate", "transformers")


@dataclass
class ModuleCall:
    """One forward of one module, and the gradient that reached its outputs. Tensors are fingerprints of rows."""

    name: str
    module: str  # its class
    is_entry: bool  # no other module called it
    training: bool
    inputs: list[Tensor]
    outputs: list[Tensor] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)  # elements in a row of each output
    gradients: dict[int, Tensor] = field(default_factory=dict)  # by the number of the output
    draws: bool = False  # random numbers


@dataclass
class CollectiveCall:
    """One collective of the step."""

    name: str
    line: str  # of the user's code
    cuts_gradient: bool  # its input requires a gradient, and its output has none


@dataclass
class StepRecord:
    """One step on one rank."""

    data: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.float64))  # fingerprints of each row's tensors
    widths: list[list[int]] = field(default_factory=list)  # elements in a row of each tensor, for each micro-batch
    loss: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    calls: list[ModuleCall] = field(default_factory=list)
    local: list[dict[str, Tensor]] = field(default_factory=list)  # gradients before any sync, for each backward
    final: dict[str, Tensor | None] = field(default_factory=dict)  # gradients that the optimizer gets
    collectives: list[CollectiveCall] = field(default_factory=list)
    wrapper_calls: int = 0  # forwards of DDP
    wrapper_calls_without_sync: int = 0  # in no_sync()
    bypassed: list[str] = field(default_factory=list)  # modules inside a DDP that were called without it, and the line
    draws_before_model: bool = False


@dataclass
class RankRecord:
    """What one rank did in all steps, and what it ended with."""

    rank: int
    world_size: int
    initial: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    unwrapped: list[str] = field(default_factory=list)  # parameters that neither DDP nor FSDP syncs
    has_wrapper: bool = False
    hyperparameters: list[dict[str, float]] = field(default_factory=list)  # for each parameter group
    is_float64: bool = True
    steps: list[StepRecord] = field(default_factory=list)
    state: dict[str, Any] | None = None  # after the last step, on rank 0, if the plan says so


@dataclass(frozen=True)
class Plan:
    """Which steps a run takes, and how."""

    steps: int  # the step after the last one
    dropout: Literal["on", "off"] = "on"
    first: int = 0  # steps before it are left out
    state: dict[str, Any] | None = None  # to go on from
    saves: bool = False  # the state after the last step


class LossError(TypeError):
    """The step returned nothing that can be a loss."""


def record_steps(
    build: Callable[[], Any],
    step: Callable[..., Any] | None,
    batch: Any,
    *,
    sizes: tuple[int, ...] | None,
    plan: Plan,
    float64: bool,
) -> RankRecord:
    """Build the model, train the steps of `plan` on this rank's part of the batch, and return the record, on every rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, {name: str(value) for name, value in environment.items()}))
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))  # every case would print again
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # hooks run in Python
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float64 if float64 else torch.float32)
        reset_accelerate()
        _seed_everything()

        def start(models: Any, optimizers: Any) -> Recorder:
            if plan.dropout == "off":
                switch_off_dropout(models)
            recorder = Recorder(RankRecord(rank, world_size), models, optimizers)
            stack.callback(recorder.remove_hooks)
            return recorder

        if step is None:
            recorder = run_trainer(build(), plan.steps, float64, start)
        else:
            models, optimizers, loader = _read_build(build())
            recorder = start(models, optimizers)
            parts = _batches(batch if loader is None else lambda: loader, sizes, plan.steps, float64)
            for _ in range(plan.first):
                next(parts)
            if plan.state is not None:
                load_state(models, recorder.optimizers, plan.state)
            for part in parts:
                recorder.run_step(step, models, optimizers, part)
            if plan.saves:
                state = save_state(models, recorder.optimizers)
                recorder.record.state = state if rank == 0 else None
        recorder.finish()
    return recorder.record


def switch_off_dropout(models: Any) -> None:
    """Set the probability of each dropout to 0: `p` of torch's modules, and every float attribute that is named like one."""
    for _, module, _ in walk_modules(models):
        for name, value in list(vars(module).items()):
            is_probability = "drop" in name or (name == "p" and "drop" in type(module).__name__.lower())
            if isinstance(value, float) and is_probability:
                setattr(module, name, 0.0)


def _batches(batch: Any, sizes: tuple[int, ...] | None, steps: int, float64: bool) -> Iterator[Any]:
    if sizes is not None:
        start = sum(sizes[: dist.get_rank()])
        part = take_rows(batch, start, start + sizes[dist.get_rank()])
        yield from [as_float64(part) if float64 else part] * steps
    else:  # the user's own loader
        for part in islice(batch(), steps):
            yield as_float64(part) if float64 else part


def _seed_everything() -> None:
    torch.manual_seed(0)
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)


def _random_state() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy")
    return torch.get_rng_state().sum().item(), random.getstate(), (numpy and numpy.random.get_state()[2:3]) or None


def _read_build(built: Any) -> tuple[Any, Any, Any]:
    """Return what `build()` returned as (models, optimizers, loader); the optimizers and the loader may be None."""
    loader = None
    if isinstance(built, tuple) and len(built) == 3 and not isinstance(built[2], nn.Module):
        *built, loader = built
        built = tuple(built)
    if isinstance(built, tuple) and len(built) == 2 and not isinstance(built[1], nn.Module):
        models, optimizers = built
    else:
        models, optimizers = built, None
    if not [leaf for leaf in pytree.tree_leaves(models) if isinstance(leaf, nn.Module)]:
        raise TypeError(f"check: build() must return a Module, or (model, optimizer); it returned {type(built).__name__}")
    return models, optimizers, loader


def walk_modules(models: Any) -> Iterator[tuple[str, nn.Module, DistributedDataParallel | None]]:
    """Yield each module with its name and the DDP that holds it. DDP and torch.compile do not show in the names."""
    seen: set[int] = set()

    def walk(module: nn.Module, name: str, owner: DistributedDataParallel | None) -> Iterator[Any]:
        if id(module) in seen:
            return
        seen.add(id(module))
        if isinstance(module, DistributedDataParallel):
            yield from walk(module.module, name, module)
        elif isinstance(getattr(module, "_orig_mod", None), nn.Module):
            yield from walk(cast(nn.Module, module._orig_mod), name, owner)
        else:
            yield name, module, owner
            for child_name, child in module.named_children():
                yield from walk(child, f"{name}.{child_name}" if name else child_name, owner)

    for path, model in pytree.tree_leaves_with_path(models):
        if isinstance(model, nn.Module):
            yield from walk(model, pytree.keystr(path).strip("[]'"), None)


class Recorder:
    """The hooks on a model and its optimizers, which fill a RankRecord."""

    def __init__(self, record: RankRecord, models: Any, optimizers: Any) -> None:
        self.record = record
        self.parameters: dict[str, nn.Parameter] = {}
        self.buffers: dict[str, Tensor] = {}
        leaves = [getattr(leaf, "optimizer", leaf) for leaf in pytree.tree_leaves(optimizers)]  # accelerate wraps them
        self.optimizers = [leaf for leaf in leaves if hasattr(leaf, "param_groups")]
        self.handles: list[Any] = []
        self.stack: list[Any] = []  # of module calls, and of DDPs
        self.random_states: list[Tensor] = []  # when the module calls of the stack began
        self.entered = False  # the step has called a module
        self.step: StepRecord | None = None
        self.log = contextlib.ExitStack()  # of the step's collectives
        self.state_at_start: tuple[Any, ...] = ()
        self.backward = -1
        self.stepped: set[int] = set()
        wrappers: dict[int, DistributedDataParallel] = {}
        for name, module, owner in walk_modules(models):
            self._hook_module(module, name or "model", owner)
            if owner is not None:
                wrappers[id(owner)] = owner
            prefix = f"{name}." if name else ""
            self.parameters |= {prefix + key: p for key, p in module.named_parameters(recurse=False)}
            self.buffers |= {prefix + key: b for key, b in module.named_buffers(recurse=False)}
        for wrapper in wrappers.values():
            self.handles.append(wrapper.register_forward_pre_hook(self._enter_wrapper))
            self.handles.append(wrapper.register_forward_hook(self._leave_wrapper, always_call=True))
        self._hook_parameters(wrappers.values())
        for optimizer in self.optimizers:
            if hasattr(optimizer, "register_step_pre_hook"):
                self.handles.append(optimizer.register_step_pre_hook(self._before_optimizer))
        record.has_wrapper = bool(wrappers) or any(hasattr(p, "full_tensor") for p in self.parameters.values())
        record.is_float64 = all(p.dtype == torch.float64 for p in self.parameters.values() if p.is_floating_point())
        record.initial = self._state(self.parameters) | self._state(self.buffers)
        record.shapes = {name: tuple(p.shape) for name, p in self.parameters.items()}

    def _hook_parameters(self, wrappers: Iterable[DistributedDataParallel]) -> None:
        synced = {id(p) for wrapper in wrappers for p in wrapper._module_parameters}
        for name, parameter in self.parameters.items():
            if not parameter.requires_grad:
                continue
            self.handles.append(parameter.register_hook(lambda grad, name=name: self._receive_gradient(name, grad)))
            if id(parameter) not in synced and not hasattr(parameter, "full_tensor"):
                self.record.unwrapped.append(name)

    def _hook_module(self, module: nn.Module, name: str, owner: DistributedDataParallel | None) -> None:
        if isinstance(module, torch.jit.ScriptModule):
            return

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._enter_module(module, name, owner, (args, kwargs))

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self._leave_module(output)

        self.handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        self.handles.append(module.register_forward_hook(leave, always_call=True))

    def remove_hooks(self) -> None:
        self.log.close()
        for handle in self.handles:
            handle.remove()

    def _enter_wrapper(self, wrapper: nn.Module, args: Any) -> None:
        self.stack.append(wrapper)
        if self.step is not None and not _in_backward():
            self.step.wrapper_calls += 1
            self.step.wrapper_calls_without_sync += not wrapper.require_backward_grad_sync

    def _leave_wrapper(self, wrapper: nn.Module, args: Any, output: Any) -> None:
        self.stack.pop()

    def _enter_module(self, module: nn.Module, name: str, owner: nn.Module | None, inputs: Any) -> None:
        if self.step is None:
            self.stack.append(None)
            return
        is_entry = not any(isinstance(above, ModuleCall) for above in self.stack)
        if not self.entered:
            self.entered = True
            self.step.draws_before_model = _random_state() != self.state_at_start
        rows = [] if _in_backward() else [fingerprint_rows(x) for x in tensors_with_rows(inputs)]
        call = ModuleCall(name, type(module).__name__, is_entry, module.training, rows)
        self.random_states.append(torch.get_rng_state())
        if is_entry and owner is not None and owner not in self.stack and torch.is_grad_enabled():
            self.step.bypassed.append(f"{name} at {user_line()}")
        self.stack.append(call)

    def _leave_module(self, output: Any) -> None:
        call = self.stack.pop()
        if call is None:
            return
        call.draws = not torch.equal(self.random_states.pop(), torch.get_rng_state())
        if self.step is None or _in_backward():  # checkpointing calls a module again in backward
            return
        self.step.calls.append(call)  # in the order in which they end
        for number, y in enumerate(tensors_with_rows(output)):
            call.outputs.append(fingerprint_rows(y))
            call.widths.append(y[:1].numel() if len(y) else -1)
            if y.requires_grad:
                y.register_hook(lambda grad, number=number: _add(call.gradients, number, fingerprint_rows(grad)))

    def _receive_gradient(self, name: str, grad: Tensor) -> None:
        if self.step is None:
            return
        backward = torch._C._current_graph_task_id()
        if backward != self.backward:
            self.backward = backward
            self.step.local.append({})
        _add(self.step.local[-1], name, fingerprint(grad))

    def _before_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.stepped.add(id(optimizer))
        owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self._keep_gradients(owned)

    def _keep_gradients(self, owned: set[int]) -> None:
        if self.step is None:
            return
        for name, parameter in self.parameters.items():
            if id(parameter) in owned:
                grad = parameter.grad
                self.step.final[name] = None if grad is None else fingerprint(grad)

    def run_step(self, step: Callable[..., Any], models: Any, optimizers: Any, batch: Any) -> None:
        """Run the user's step. What it leaves out (backward, optimizer.step) is done here."""
        current = self.begin_step()
        self.add_rows(batch)
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        required = [p for p in inspect.signature(step).parameters.values() if p.kind in positional and p.default is p.empty]
        result = step(models, optimizers, batch) if len(required) > 2 else step(models, batch)
        loss, current.metrics = read_result(result)
        has_gradient = any(p.grad is not None for p in self.parameters.values())
        if isinstance(loss, Tensor) and loss.requires_grad and not has_gradient and not self.stepped:
            loss.backward()
        self.add_loss(float(loss))
        self.end_step()
        for optimizer in self.optimizers:
            if id(optimizer) not in self.stepped:
                optimizer.step()

    def begin_step(self) -> StepRecord:
        for parameter in self.parameters.values():
            parameter.grad = None
        self.step = StepRecord()
        self.record.steps.append(self.step)
        self.state_at_start = _random_state()
        self.entered = False
        self.stepped = set()
        self.log.enter_context(_CollectiveLog(self.step.collectives))
        return self.step

    def add_rows(self, batch: Any) -> None:
        """Record that the current step reads the rows of `batch`."""
        assert self.step is not None
        rows, widths = _rows_of(batch)
        self.step.data = torch.cat([self.step.data, rows]) if self.step.widths else rows
        self.step.widths.append(widths)

    def add_loss(self, loss: float) -> None:
        """Add the loss of a micro-batch to that of the current step."""
        assert self.step is not None
        self.step.loss = loss + (self.step.loss or 0.0)

    def end_step(self) -> None:
        assert self.step is not None
        self.log.close()
        kept = set(self.step.final)
        self._keep_gradients({id(p) for name, p in self.parameters.items() if name not in kept})
        self.step = None

    def finish(self) -> None:
        self.record.parameters = self._state(self.parameters)
        self.record.buffers = self._state(self.buffers)
        self.record.hyperparameters = [
            {key: float(value) for key, value in group.items() if isinstance(value, (int, float, Tensor)) and key != "params"}
            for optimizer in self.optimizers
            for group in optimizer.param_groups
        ]

    @staticmethod
    def _state(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: fingerprint(x) for name, x in tensors.items()}


def read_result(result: Any) -> tuple[Tensor | float, dict[str, float]]:
    """Return the loss and the metrics of what a step returned: a loss, (loss, metrics), or something with a `loss`."""
    metrics: Any = {}
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
        result, metrics = result
    elif isinstance(result, Mapping) and "loss" in result:
        metrics = {key: value for key, value in result.items() if key != "loss"}
        result = result["loss"]
    elif hasattr(result, "loss"):
        result = result.loss
    if not isinstance(result, (Tensor, int, float)) or (isinstance(result, Tensor) and result.numel() != 1):
        kind = f"a tensor of shape {tuple(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
        raise LossError(
            f"check: the step must return its loss (a tensor with one element, or a number), or (loss, metrics); it "
            f"returned {kind}"
        )
    scalars = {key: value for key, value in metrics.items() if not isinstance(value, Tensor) or value.numel() == 1}
    return result, {key: float(value) for key, value in scalars.items() if isinstance(value, (Tensor, int, float))}


def _rows_of(batch: Any) -> tuple[Tensor, list[int]]:
    """Return the fingerprints of each sample, those of its tensors side by side; and how many elements each tensor has."""
    leaves = tensors_with_rows(batch)
    leaves = [leaf for leaf in leaves if len(leaf) == len(leaves[0])]
    if not leaves:
        return torch.zeros(0, 0, dtype=torch.float64), []
    return torch.cat([fingerprint_rows(leaf) for leaf in leaves], dim=1), [leaf.shape[1:].numel() for leaf in leaves]


def _add(totals: dict[Any, Tensor], key: Any, value: Tensor) -> None:
    totals[key] = totals[key] + value if key in totals else value


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


class _CollectiveLog(TorchDispatchMode):
    """Notes every collective that runs, also those of DDP and FSDP."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init__(self, log: list[CollectiveCall]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if call := collective_call(func, args, result):
            tensors = [x for x in pytree.tree_leaves(args) if isinstance(x, Tensor)]
            cuts = any(x.requires_grad and not x.is_leaf for x in tensors) and not _has_own_backward()
            self.log.append(CollectiveCall(call.name, user_line(), cuts))
        return result


def _frames() -> Iterator[FrameType]:
    """Yield the frames between here and the step, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not record_steps.__code__:
        yield frame
        frame = frame.f_back


def _has_own_backward() -> bool:
    """Return whether the collective runs inside an autograd Function, or in one of our own functions."""
    modules = [frame.f_globals.get("__name__", "") for frame in _frames()]
    ours = [name for name in modules if name.startswith("unisono.") and not name.startswith("unisono.collectives.law")]
    return "torch.autograd.function" in modules or bool(ours)


def user_line() -> str:
    """Return the innermost line of the user's code: "train.py:12 in step". Empty outside of the step."""
    for frame in _frames():
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _LIBRARIES:
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"
    return ""

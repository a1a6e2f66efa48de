"""Model and optimizers as named tensors and JSON, and back. Plain, DDP and FSDP2 models have the same names.

Names: model/{parameter}, optimizer/{optimizer}/{parameter}/{entry}, extra/{name}. Everything that is not a tensor
(hyperparameters, a step count, a module's extra state) must be JSON, or a dict of tensors and JSON.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from unisono.embedding.parameters import ShardedTable
from unisono_models.training.checkpoint.storage import TensorEntry
from unisono_models.training.distributed.object_collectives import Json
from unisono_models.training.errors import UserError

Optimizers: TypeAlias = Optimizer | Mapping[str, Optimizer]
Extra: TypeAlias = Mapping[str, Tensor | nn.Module]
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")  # of torch.compile and of activation checkpointing


def collect_state(model: nn.Module, optimizers: Optimizers, extra: Extra) -> tuple[dict[str, Tensor], Json]:
    """Return the tensors by name, not copied, and everything else as JSON."""
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {"model": {}, "optimizers": {}}
    for name, value in _entries(model, extra):
        if isinstance(value, Tensor):
            tensors[name] = value
        elif name.startswith("extra/"):
            raise TypeError(f"{name}: expected a tensor, got {type(value).__name__}; put it into the checkpoint's `state`")
        else:
            values["model"][name] = _checked(value, name)
    for name, optimizer in _named(optimizers).items():
        names = parameter_names(model, name, optimizer)
        groups: list[dict[str, Any]] = []
        states: dict[str, Json] = {}
        for number, group in enumerate(optimizer.param_groups):
            groups.append({"params": [names[parameter] for parameter in group["params"]], "values": {}})
            for key, value in group.items():
                if isinstance(value, Tensor):
                    tensors[f"optimizer/{name}/group {number}/{key}"] = value
                elif key not in ("params", "param_names"):
                    groups[-1]["values"][key] = _checked(value, f"optimizer {name!r}, group {number}, {key!r}")
        for parameter, state in optimizer.state.items():
            place = f"optimizer/{name}/{names[parameter]}"
            held = {key: value for key, value in state.items() if isinstance(value, Tensor)}
            for key, value in held.items():
                if isinstance(parameter, DTensor) and not isinstance(value, DTensor) and value.numel() > 1:
                    raise TypeError(f"{place}/{key}: a plain tensor beside a sharded parameter may differ from rank to rank")
                tensors[f"{place}/{key}"] = value
            rest = {key: _checked(value, f"{place}/{key}") for key, value in state.items() if key not in held}
            states[names[parameter]] = {"tensors": list(held), "values": rest}
        values["optimizers"][name] = {"class": type(optimizer).__name__, "groups": groups, "states": states}
    return tensors, values


_FORM: Any = {
    "model": dict,
    "optimizers": {
        ...: {
            "class": str,
            "groups": [{"params": [str], "values": dict}],
            "states": {...: {"tensors": [str], "values": dict}},
        }
    },
}


def validate_values(values: Json) -> None:
    """Raise ValueError unless `values` has the form of what collect_state returns."""
    if not _has_form(values, _FORM):
        raise ValueError("its values do not have the form that a checkpoint has")


def _has_form(value: Json, form: Any) -> bool:
    """`form`: a type, a list with the form of all items, a dict with the forms of its values, or of all of them under `...`."""
    if isinstance(form, type):
        return isinstance(value, form)
    if isinstance(form, list):
        return isinstance(value, list) and all(_has_form(item, form[0]) for item in value)
    if not isinstance(value, dict):
        return False
    if ... in form:
        return all(_has_form(item, form[...]) for item in value.values())
    return all(name in value and _has_form(value[name], inner) for name, inner in form.items())


class LoadTargets:
    """The objects that a checkpoint is loaded into. Fill `tensors`, by name, then call `install()`.

    `weights_only` leaves out the optimizers, the state of the optimizers of embedding tables, which is part of the model's
    state, and what `extra` does not ask for.

    Raises: UserError that names every entry that only the checkpoint or only these objects have, or that has another shape or
    dtype. Nothing is cast and nothing is left out.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Optimizers,
        extra: Extra,
        index: Mapping[str, TensorEntry],
        values: Json,
        *,
        weights_only: bool = False,
    ) -> None:
        self._model = model
        self._values = {"model": values["model"], "optimizers": {}} if weights_only else values
        self._optimizers = _named(optimizers)
        self._states: list[tuple[Optimizer, dict[Tensor, dict[str, Any]]]] = []
        self._differences: list[str] = []
        self.tensors = {name: value for name, value in _entries(model, extra) if isinstance(value, Tensor)}
        if weights_only:
            tables = _table_names(model)
            self.tensors = {name: value for name, value in self.tensors.items() if not _is_table_state(name, tables)}
            kept = (name for name in index if name.startswith("model/") or name in self.tensors)
            index = {name: index[name] for name in kept if not _is_table_state(name, tables)}
        stored = self._values["optimizers"]
        self._compare_names("optimizers", set(stored), set(self._optimizers))
        for name, optimizer in self._optimizers.items():
            if name in stored:
                self._add_optimizer(name, optimizer, stored[name], index)
        self._compare_names("tensors", set(index), set(self.tensors))
        for name in sorted(index.keys() & self.tensors.keys()):
            entry, here = index[name], self.tensors[name]
            if entry.shape != tuple(here.shape) or entry.dtype != here.dtype:
                self._differences.append(
                    f"{name} is {_kind(entry.dtype, entry.shape)} in the checkpoint, {_kind(here.dtype, here.shape)} here"
                )
        if self._differences:
            shown = 4 if weights_only else 12
            more = f"; and {len(self._differences) - shown} more" if len(self._differences) > shown else ""
            advice = (
                "Give the new run the --model options of that one"
                if weights_only
                else "It was written under another config: give the run the old one, or another directory"
            )
            raise UserError(f"the checkpoint does not fit: {'; '.join(self._differences[:shown])}{more}. {advice}")

    def install(self) -> None:
        """Put the filled tensors and everything else into the model and the optimizers."""
        model: dict[str, Any] = {}
        for name, value in [*self.tensors.items(), *self._values["model"].items()]:
            kind, key, *inner = name.split("/", 2)
            if kind == "model" and inner:
                model.setdefault(key, {})[inner[0]] = value
            elif kind == "model":
                model[key] = value
        set_model_state_dict(_inner(self._model), model)
        for optimizer, states in self._states:
            optimizer.state.clear()
            optimizer.state.update(states)
        for name, optimizer in self._optimizers.items():
            for group, stored in zip(optimizer.param_groups, self._values["optimizers"][name]["groups"], strict=True):
                for key, value in stored["values"].items():
                    group[key] = tuple(value) if isinstance(group.get(key), tuple) else value  # JSON has lists only

    def _add_optimizer(self, name: str, optimizer: Optimizer, stored: Json, index: Mapping[str, TensorEntry]) -> None:
        names = parameter_names(self._model, name, optimizer)
        groups = [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
        if stored["class"] != type(optimizer).__name__:
            self._differences.append(
                f"optimizer {name!r} is {stored['class']} in the checkpoint, {type(optimizer).__name__} here"
            )
            return
        if [group["params"] for group in stored["groups"]] != groups:
            self._differences.append(f"optimizer {name!r} has other parameters or groups of them than in the checkpoint")
            return
        states: dict[Tensor, dict[str, Any]] = {}
        for number, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                if isinstance(value, Tensor):
                    self.tensors[f"optimizer/{name}/group {number}/{key}"] = value
            for parameter in group["params"]:
                if names[parameter] not in stored["states"]:  # the parameter had no gradient yet
                    continue
                held = stored["states"][names[parameter]]
                states[parameter] = dict(held["values"])
                for key in held["tensors"]:
                    full = f"optimizer/{name}/{names[parameter]}/{key}"
                    if full in index:  # if not, it is reported as missing
                        on_cpu = key == "step" and not group.get("capturable") and not group.get("fused")
                        states[parameter][key] = _room_for(index[full], parameter, on_cpu=on_cpu)
                        self.tensors[full] = states[parameter][key]
        self._states.append((optimizer, states))

    def _compare_names(self, what: str, stored: set[str], here: set[str]) -> None:
        self._differences += [f"{name} ({what}) is in the checkpoint only" for name in sorted(stored - here)]
        self._differences += [f"{name} ({what}) is not in the checkpoint" for name in sorted(here - stored)]


def parameter_names(model: nn.Module, name: str, optimizer: Optimizer) -> dict[Tensor, str]:
    """Map the optimizer's parameters to their names, without what DDP, torch.compile and activation checkpointing add."""
    names: dict[Tensor, str] = {parameter: _plain_name(model, full) for full, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in names:
                raise ValueError(
                    f"optimizer {name!r} has a parameter of shape {tuple(parameter.shape)} that is not in the model"
                )
    return names


def _plain_name(model: nn.Module, full: str) -> str:
    module: Any = model
    kept = []
    for part in full.split("."):
        if not (isinstance(module, DistributedDataParallel) and part == "module") and part not in _WRAPPERS:
            kept.append(part)
        module = getattr(module, part)
    return ".".join(kept)


def _entries(model: nn.Module, extra: Extra) -> Iterator[tuple[str, Any]]:
    for name, value in get_model_state_dict(_inner(model)).items():
        if isinstance(value, dict):  # the extra state of a module
            yield from ((f"model/{name}/{key}", held) for key, held in value.items())
        else:
            yield f"model/{name}", value
    for name, held in extra.items():
        if isinstance(held, Tensor):
            yield f"extra/{name}", held
        else:
            yield from ((f"extra/{name}/{inner}", value) for inner, value in get_model_state_dict(held).items())


def _table_names(model: nn.Module) -> set[str]:
    """The names of the embedding tables in `model`."""
    tables = (name for name, module in _inner(model).named_modules() if isinstance(module, ShardedTable))
    return {".".join(part for part in name.split(".") if part not in _WRAPPERS) for name in tables}


def _is_table_state(name: str, tables: set[str]) -> bool:
    """Whether the tensor `name` is the state of an optimizer that works in the backward of a table."""
    table, _, entry = name.removeprefix("model/").rpartition(".")
    return table in tables and entry != "weight"


def _inner(model: nn.Module) -> nn.Module:
    """Unwrap DDP: under its wrapper torch does not find entries that are neither parameters nor buffers."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def _room_for(entry: TensorEntry, parameter: Tensor, *, on_cpu: bool) -> Tensor:
    """Allocate an entry of an optimizer's state. If it has the shape of its parameter, it is sharded like it."""
    if entry.shape == tuple(parameter.shape) and not on_cpu:
        return torch.empty_like(parameter.detach(), dtype=entry.dtype)
    return torch.empty(entry.shape, dtype=entry.dtype, device="cpu" if on_cpu else parameter.device)


def _named(optimizers: Optimizers) -> dict[str, Optimizer]:
    return {"main": optimizers} if isinstance(optimizers, Optimizer) else dict(optimizers)


def _checked(value: Any, name: str) -> Json:
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name}: neither a tensor nor JSON, so it cannot be saved: {error}") from error
    return value


def _kind(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"

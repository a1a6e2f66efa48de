"""validate_inputs: check the arguments of a loss, so that a bad call on one rank raises the same error on all ranks."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unisono.collectives import Group, all_reduce, average_gradient
from unisono.collectives.checks import checks_enabled, describe
from unisono.collectives.groups import resolve_group
from unisono.collectives.sizes import (
    Sizes,
    all_gather_metadata,
    as_tuple,
    join_graph,
    metadata_lengths,
    promises_equal,
    raise_local_error,
    sizes_error,
)
from unisono.contrastive.hints import ContrastiveWarning, warn_of_likely_mistakes
from unisono.contrastive.tiled.tiles import TilePlan, statistics_dtype

_CHOICES = {
    "direction": ("both", "x_to_y"),
    "exchange": ("auto", "gather", "ring"),
    "grad_reduce": ("mean", "sum"),
    "logits": ("auto", "keep", "recompute"),
    "precision": ("exact", "fast"),
    "same_id": ("positive", "masked"),
}


class LossInputs(NamedTuple):
    """Validated arguments."""

    x: Tensor  # requires a gradient if it does so on any rank: all ranks have to run the backward
    y: Tensor  # likewise; with the negatives appended
    ids: Tensor | None  # as int64: what travels must have one dtype on all ranks
    sizes: tuple[int, ...] | None  # each rank's number of columns; None if a compiled graph has to exchange them
    paired: bool  # y has the partners of x and no negatives
    group: Group
    options: Mapping[str, Any]

    def tile_plan(self, **fields: Any) -> TilePlan:
        """Return a TilePlan with these `fields`, over the ranks and with the options of this call."""
        options = {name: self.options[name] for name in ("exchange", "tile", "logits", "precision") if name in self.options}
        return TilePlan(**{"sizes": self.sizes, "group": self.group, **options, **fields})

    def global_rows(self, features: Tensor) -> Tensor | float:
        """Return the number of rows of `features`, which are x or y, on all ranks together."""
        if self.sizes is not None and (features is self.y or self.paired):
            return float(sum(self.sizes))
        return all_reduce(self.x.new_full((), features.shape[0], dtype=statistics_dtype(self.x.device)), group=self.group)


def validate_inputs(
    function: str,
    x: Tensor,
    y: Tensor,
    *,
    scale: Tensor | float = 1.0,
    ids: Tensor | None = None,
    weights: Tensor | None = None,
    negatives: Tensor | None = None,
    sizes: Sizes = None,
    group: Group = None,
    options: Mapping[str, object],
    problem: str = "",
    names: tuple[str, str] = ("scale", "ids"),
) -> LossInputs:
    """Validate the arguments on every rank and exchange the sizes. If one rank has a bad call, all raise the same error.

    `options`: the other arguments of the caller. They must be the same on all ranks, except `logits`. `problem`: an error that
    the caller has found, or "". `names`: how the caller's own arguments for scale and ids are called.
    """
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            f"{function}: the transforms of torch.func (grad, vmap, jvp and others) are not supported; use torch.autograd"
        )
    ranks = resolve_group(group)
    same = ", ".join(f"{name}={value}" for name, value in options.items() if name != "logits")
    same += f", ids={ids is not None}, negatives={negatives is not None}"
    same += f", a gradient for {names[0]}: {isinstance(scale, Tensor) and scale.requires_grad}"
    problem = _options_error(options) or problem
    problem = problem or _tensors_error(x, y, ids, weights, negatives, names[1]) or _scale_error(scale, names[0])
    given = as_tuple(sizes, 0 if problem else x.shape[0], ranks)
    problem = problem or sizes_error("sizes", given, ranks)
    if not problem and given is not None and given[ranks.rank] != x.shape[0]:
        problem = f"sizes={tuple(given)} expects {given[ranks.rank]} rows on this rank, but x has shape {tuple(x.shape)}"
    if not problem and checks_enabled():
        problem = _finite_error({"x": x, "y": y, "weights": weights})
        same += f", scale={float(scale.detach() if isinstance(scale, Tensor) else scale)!r}"
    if not problem and function != "retrieval_metrics":
        try:
            warn_of_likely_mistakes(function, x, y, scale, names[0])
        except ContrastiveWarning as warning:  # by a filter "error": all ranks have to raise it
            problem = str(warning)
    if problem:
        columns = x if isinstance(x, Tensor) else torch.empty(0, device="cpu")
    else:
        dtype = torch.promote_types(x.dtype, y.dtype)
        x, y = x.to(dtype), y.to(dtype)
        ids = None if ids is None else ids.to(torch.int64)
        columns = y if negatives is None else torch.cat([y, negatives.to(dtype)])
    paired = negatives is None
    if not torch.compiler.is_compiling() and (sizes is None or not paired or checks_enabled()):
        if given is not None and not problem:
            same += f", sizes='equal' to {x.shape[0]}" if promises_equal(sizes) else f", sizes={tuple(given)}"
        wants_grad = not problem and x.requires_grad and torch.is_grad_enabled()
        table = all_gather_metadata(function, columns, 0, ranks, extra=[int(wants_grad)], same=same, problem=problem)
        x = join_graph(x, [[0, wanted] for _, _, wanted in table])
        return LossInputs(x, join_graph(columns, table), ids, metadata_lengths(table), paired, group, options)
    raise_local_error(function, problem, ranks)
    known_sizes = tuple(given) if given is not None and paired else None
    return LossInputs(x, columns, ids, known_sizes, paired, group, options)


def as_scalar(value: Tensor | float) -> Tensor:
    """Return a scale or bias as a scalar tensor."""
    if isinstance(value, Tensor):
        return value.reshape(())
    # On the CPU wherever the features are, and whatever the default device is: no copy to wait for.
    return torch.tensor(value, dtype=torch.float64, device="cpu")


def shared_scalar(value: Tensor | float, group: Group) -> Tensor:
    """Return a scale or bias as a scalar tensor whose gradient is the same on all ranks. Its value must be so, too."""
    scalar = as_scalar(value)
    scalar = scalar.to(statistics_dtype(scalar.device))  # before any multiplication, because it may have 16 bits
    return average_gradient(scalar, group=group) if scalar.requires_grad else scalar


def number_error(value: object, name: str) -> str:
    if isinstance(value, Tensor) and value.numel() != 1:
        return f"{name}: expected one number, got {describe(value)}"
    if not isinstance(value, Tensor | int | float):
        return f"{name}: expected a number or a Tensor, got {type(value).__name__}"
    return ""


def is_integral(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def _options_error(options: Mapping[str, object]) -> str:
    for name, choices in _CHOICES.items():
        if name in options and options[name] not in choices:
            return f"{name}={options[name]!r} is not one of {', '.join(map(repr, choices))}"
    tile = options["tile"]
    if tile is not None and (not isinstance(tile, int) or tile < 1):
        return f"tile={tile!r} must be a positive number of rows and columns, or None"
    return ""


def _tensors_error(x: object, y: object, ids: object, weights: object, negatives: object, ids_name: str) -> str:
    for name, value in (("x", x), ("y", y)):
        if not isinstance(value, Tensor):
            return f"{name}: expected a Tensor, got {type(value).__name__}"
        if value.ndim != 2 or not value.is_floating_point():
            return f"{name}: expected floating point features of shape (rows, width), got {describe(value)}"
    assert isinstance(x, Tensor) and isinstance(y, Tensor)
    if x.shape != y.shape:
        return (
            f"x and y must have the same shape, because row i of x belongs to row i of y; got {describe(x)} and {describe(y)}"
        )
    if x.device != y.device:
        return f"x is on {x.device}, y on {y.device}"
    rows = x.shape[:1]
    if ids is not None and not (isinstance(ids, Tensor) and ids.shape == rows and is_integral(ids)):
        return f"{ids_name}: expected {x.shape[0]} integers, one for each row, got {describe(ids)}"
    if weights is not None and not (isinstance(weights, Tensor) and weights.shape == rows and weights.is_floating_point()):
        return f"weights: expected {x.shape[0]} floating point numbers, one for each row, got {describe(weights)}"
    for name, value in ((ids_name, ids), ("weights", weights), ("negatives", negatives)):
        if isinstance(value, Tensor) and value.device != x.device:
            return f"{name}: on {value.device}, but x is on {x.device}"
    if negatives is not None and not (
        isinstance(negatives, Tensor) and negatives.ndim == 2 and negatives.shape[1] == x.shape[1]
    ):
        return f"negatives: expected features of shape (rows, {x.shape[1]}), got {describe(negatives)}"
    return ""


def _scale_error(scale: object, name: str) -> str:
    if problem := number_error(scale, name):
        return problem
    if isinstance(scale, Tensor) and (torch.compiler.is_compiling() or (scale.device.type != "cpu" and not checks_enabled())):
        return ""  # reading a value from a GPU would make the host wait
    value = float(scale.detach() if isinstance(scale, Tensor) else scale)  # type: ignore[arg-type]
    hint = " (a temperature t is a scale of 1 / t)" if name == "scale" else ""
    return "" if value > 0 else f"{name}={value!r} must be positive{hint}"


def _finite_error(tensors: dict[str, Tensor | None]) -> str:
    for name, x in tensors.items():
        if x is not None and not bool(x.isfinite().all()):
            bad = (~x.isfinite()).nonzero()
            place = tuple(bad[0].tolist())
            return f"{name} has {float(x.detach()[place])} at {place}; {len(bad)} values are not finite"
    return ""

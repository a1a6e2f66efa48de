"""What every loss checks first, and on what all ranks agree before any of them computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from unisono.collectives import Group, all_reduce, average_gradient
from unisono.collectives.checks import checks_enabled, describe
from unisono.collectives.groups import resolve_group
from unisono.collectives.sizes import all_gather_metadata, join_graph, metadata_lengths, raise_local_error, sizes_error
from unisono.contrastive.tiles import statistics_dtype


class Call(NamedTuple):
    """Arguments that have passed, in the form that the tiles want."""

    x: Tensor  # in the graph if that of any rank is: all ranks have to run the backward
    y: Tensor  # likewise
    ids: Tensor | None  # as int64: what travels must be of one dtype on all ranks
    sizes: tuple[int, ...] | None  # every rank's columns; None where they will be asked for inside a compiled graph
    paired: bool  # y has the partners of x and nothing more

    def candidates(self, group: Group, columns: bool = True) -> Tensor | float:
        """How many columns there are on all ranks, or how many rows."""
        if self.sizes is not None and (columns or self.paired):
            return float(sum(self.sizes))
        rows = (self.y if columns else self.x).shape[0]
        return all_reduce(self.x.new_full((), rows, dtype=statistics_dtype(self.x.device)), group=group)


def settle(
    function: str,
    x: Tensor,
    y: Tensor,
    *,
    scale: Tensor | float = 1.0,
    ids: Tensor | None = None,
    weights: Tensor | None = None,
    more: Tensor | None = None,
    sizes: Sequence[int] | None = None,
    group: Group = None,
    same: str = "",
    problem: str = "",
    names: tuple[str, str] = ("scale", "ids"),
) -> Call:
    """Check the arguments on every rank, exchange the sizes, and raise the same error everywhere if one rank has a bad call.

    `more`: columns of `y` beyond the partners of `x`. `same`: the options, which must be the same on all ranks. `names`:
    what the caller knows scale and ids as.
    """
    ranks = resolve_group(group)
    same += f", a gradient for {names[0]}: {isinstance(scale, Tensor) and scale.requires_grad}"
    problem = problem or _complaint(x, y, ids, weights, more, names[1]) or _scale_complaint(scale, names[0])
    problem = problem or sizes_error("sizes", sizes, ranks)
    if not problem and sizes is not None and sizes[ranks.rank] != x.shape[0]:
        problem = f"sizes={tuple(sizes)} promises {sizes[ranks.rank]} rows, but x has shape {tuple(x.shape)}"
    if not problem and checks_enabled():
        problem = _value_complaint({"x": x, "y": y, "weights": weights})
        same += f", scale={float(scale.detach() if isinstance(scale, Tensor) else scale)!r}"
    if problem:
        columns = x if isinstance(x, Tensor) else torch.empty(0)
    else:
        dtype = torch.promote_types(x.dtype, y.dtype)
        x, y, ids = x.to(dtype), y.to(dtype), None if ids is None else ids.to(torch.int64)
        columns = y if more is None else torch.cat([y, more.to(dtype).detach()])
    if torch.compiler.is_compiling():
        raise_local_error(function, problem, ranks)
        lengths = None if sizes is None or more is not None else tuple(sizes)
        return Call(x, columns, ids, lengths, more is None)
    if sizes is None or more is not None or checks_enabled():
        wants = not problem and x.requires_grad and torch.is_grad_enabled()
        table = all_gather_metadata(function, columns, 0, ranks, extra=[int(wants)], same=same, problem=problem)
        x = join_graph(x, [[0, wanted] for _, _, wanted in table])
        return Call(x, join_graph(columns, table), ids, metadata_lengths(table), more is None)
    raise_local_error(function, problem, ranks)
    return Call(x, columns, ids, tuple(sizes), more is None)


def shared(value: Tensor | float, group: Group) -> Tensor:
    """A scale or bias, the same on all ranks, as a scalar tensor whose gradient will be the same on all ranks too."""
    if not isinstance(value, Tensor):
        return torch.tensor(value, dtype=torch.float64)  # on the CPU, wherever the features are: no copy to wait for
    value = value.reshape(()).to(statistics_dtype(value.device))  # before anything is multiplied: it may have 16 bits
    return average_gradient(value, group=group) if value.requires_grad else value


def options_complaint(
    all_gather_metadata: object = "auto",
    grad_reduce: object = "mean",
    tile: object = None,
    logits: object = "auto",
    **choices: tuple[object, tuple[str, ...]],
) -> str:
    """What is wrong with the options that losses share, or with others given as name=(value, its choices)."""
    all_choices: dict[str, tuple[object, tuple[str, ...]]] = {
        "exchange": (all_gather_metadata, ("auto", "gather", "ring")),
        "grad_reduce": (grad_reduce, ("mean", "sum")),
        "logits": (logits, ("auto", "keep", "recompute")),
        **choices,
    }
    for name, (value, known) in all_choices.items():
        if value not in known:
            return f"{name}={value!r} is not one of {', '.join(map(repr, known))}"
    if tile is not None and (not isinstance(tile, int) or tile < 1):
        return f"tile={tile!r} must be a positive number of rows and columns, or None"
    return ""


def _complaint(x: object, y: object, ids: object, weights: object, more: object, ids_name: str) -> str:
    for name, value in (("x", x), ("y", y)):
        if not isinstance(value, Tensor):
            return f"{name}: expected a Tensor, got {type(value).__name__}"
        if value.ndim != 2 or not value.is_floating_point():
            return f"{name}: expected floating point features of shape (rows, width), got {describe(value)}"
    assert isinstance(x, Tensor) and isinstance(y, Tensor)
    if x.shape != y.shape:
        return f"x and y must have the same shape, for their rows belong together; got {describe(x)} and {describe(y)}"
    if x.device != y.device:
        return f"x is on {x.device}, y on {y.device}"
    if ids is not None and not (isinstance(ids, Tensor) and ids.shape == x.shape[:1] and is_integral(ids)):
        return f"{ids_name}: expected {x.shape[0]} integers, one for each row, got {describe(ids)}"
    if weights is not None and not (
        isinstance(weights, Tensor) and weights.shape == x.shape[:1] and weights.is_floating_point()
    ):
        return f"weights: expected {x.shape[0]} floating point numbers, one for each row, got {describe(weights)}"
    for name, value in ((ids_name, ids), ("weights", weights), ("negatives", more)):
        if isinstance(value, Tensor) and value.device != x.device:
            return f"{name}: on {value.device}, but x is on {x.device}"
    if more is not None and not (isinstance(more, Tensor) and more.ndim == 2 and more.shape[1] == x.shape[1]):
        return f"negatives: expected features of shape (rows, {x.shape[1]}), got {describe(more)}"
    return ""


def is_integral(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def number_complaint(value: object, name: str) -> str:
    if isinstance(value, Tensor) and value.numel() != 1:
        return f"{name}: expected one number, got {describe(value)}"
    return (
        "" if isinstance(value, Tensor | int | float) else f"{name}: expected a number or a Tensor, got {type(value).__name__}"
    )


def _scale_complaint(scale: object, name: str) -> str:
    """Read it where that costs nothing: on a GPU the host would have to wait."""
    if problem := number_complaint(scale, name):
        return problem
    if isinstance(scale, Tensor) and (torch.compiler.is_compiling() or (scale.device.type != "cpu" and not checks_enabled())):
        return ""
    value = float(scale.detach() if isinstance(scale, Tensor) else scale)  # type: ignore[arg-type]
    hint = " (a temperature t is a scale of 1 / t)" if name == "scale" else ""
    return "" if value > 0 else f"{name}={value!r} must be positive{hint}"


def _value_complaint(tensors: dict[str, Tensor | None]) -> str:
    for name, x in tensors.items():
        if x is not None and not bool(x.isfinite().all()):
            bad = (~x.isfinite()).nonzero()
            place = tuple(bad[0].tolist())
            return f"{name} has {float(x.detach()[place])} at {place}; values that are not finite: {len(bad)}"
    return ""

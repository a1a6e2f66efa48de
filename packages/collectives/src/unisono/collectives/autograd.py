"""Collectives as linear maps over all ranks. The backward of a linear map is its adjoint, which is a collective too.

The table KINDS says how each map runs and which map is its adjoint. One autograd Function (and, under torch.compile, one
custom op) turns the table into first and higher gradients, jvp and vmap. Reductions that are not linear (max, min, product)
are composed of these maps in functional/reduce.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._library.effects import EffectType
from torch.autograd import forward_ad
from torch.distributed.distributed_c10d import ProcessGroup

from unisono.collectives import wire
from unisono.collectives.checks import call_site, validate_linear_map
from unisono.collectives.groups import GroupRanks, process_group


@dataclass(frozen=True)
class LinearMap:
    """One collective call, ready to run on rows (dimension 0).

    `send` and `receive` count the rows that leave for and arrive from each rank; the adjoint swaps them.
    """

    kind: str
    ranks: GroupRanks
    send: tuple[int, ...] = ()
    receive: tuple[int, ...] = ()
    root: int = 0
    reduce_dtype: torch.dtype | None = None  # in which the ranks add, here and in the adjoints; None: that of the tensor
    call: str = ""  # what the user called, for errors
    site: str = ""  # the user's line if checks are enabled: then the map is validated over all ranks before it runs

    def adjoint(self) -> LinearMap:
        kind = KINDS[self.kind].adjoint
        call = f"backward of {self.call}"
        return replace(self, kind=kind, send=self.receive, receive=self.send, call=call)

    def tangent(self) -> LinearMap:
        return replace(self, kind=KINDS[self.kind].tangent or self.kind, call=f"jvp of {self.call}")


class Kind(NamedTuple):
    """How a linear map runs, and which one is its adjoint."""

    run: Callable[[Tensor, LinearMap, ProcessGroup], Tensor]
    adjoint: str
    tangent: str = ""  # for a named gradient: the map whose adjoint that gradient is
    communicates: bool = True
    sets_rows: bool = True  # the result has sum(receive) rows; otherwise the shape of the input
    start: Callable[[Tensor, LinearMap, ProcessGroup], wire.Started] | None = None  # run, but without waiting for the result


def _own_slice(x: Tensor, plan: LinearMap, pg: ProcessGroup) -> Tensor:
    return x[sum(plan.send[: plan.ranks.rank]) :][: sum(plan.receive)].clone()


def _own_pad(x: Tensor, plan: LinearMap, pg: ProcessGroup) -> Tensor:
    out = x.new_zeros((sum(plan.receive), *x.shape[1:]))
    out[sum(plan.receive[: plan.ranks.rank]) :][: len(x)] = x
    return out


def _all_gather(x: Tensor, plan: LinearMap, pg: ProcessGroup) -> Tensor:
    return wire.all_gather(x, plan.receive, pg)


def _start_all_gather(x: Tensor, plan: LinearMap, pg: ProcessGroup) -> wire.Started:
    return wire.start_gather(x, plan.receive, pg)


def _reduce_scatter(x: Tensor, plan: LinearMap, pg: ProcessGroup) -> Tensor:
    return wire.reduce_scatter(x, plan.send, pg, plan.reduce_dtype)


def _start_reduce_scatter(x: Tensor, plan: LinearMap, pg: ProcessGroup) -> wire.Started:
    return wire.start_reduce_scatter(x, plan.send, pg, plan.reduce_dtype)


def _all_to_all(x: Tensor, plan: LinearMap, pg: ProcessGroup) -> Tensor:
    return wire.all_to_all(x, plan.send, plan.receive, pg)


def _start_all_to_all(x: Tensor, plan: LinearMap, pg: ProcessGroup) -> wire.Started:
    return wire.start_all_to_all(x, plan.send, plan.receive, pg)


def _all_reduce(x: Tensor, plan: LinearMap, pg: ProcessGroup) -> Tensor:
    return wire.all_reduce(x, pg, plan.reduce_dtype)


def _start_all_reduce(x: Tensor, plan: LinearMap, pg: ProcessGroup) -> wire.Started:
    return wire.start_sum(x, pg, plan.reduce_dtype)


KINDS = {
    "all_gather": Kind(_all_gather, "reduce_scatter", start=_start_all_gather),
    "reduce_scatter": Kind(_reduce_scatter, "all_gather", start=_start_reduce_scatter),
    "all_to_all": Kind(_all_to_all, "all_to_all", start=_start_all_to_all),
    "point_to_point": Kind(lambda x, plan, pg: wire.point_to_point(x, plan.send, plan.receive, pg), "point_to_point"),
    "all_reduce": Kind(_all_reduce, "all_reduce", sets_rows=False, start=_start_all_reduce),
    "broadcast": Kind(lambda x, plan, pg: wire.broadcast(x, plan.root, pg), "reduce", sets_rows=False),
    "reduce": Kind(lambda x, plan, pg: wire.reduce(x, plan.root, pg, plan.reduce_dtype), "broadcast", sets_rows=False),
    # Not linear, so without an adjoint: functional/reduce.py has their derivatives.
    "all_reduce_max": Kind(lambda x, plan, pg: wire.reduce_natively(x, "max", pg), "", sets_rows=False),
    "all_reduce_min": Kind(lambda x, plan, pg: wire.reduce_natively(x, "min", pg), "", sets_rows=False),
    "all_reduce_product": Kind(lambda x, plan, pg: wire.reduce_natively(x, "product", pg), "", sets_rows=False),
    # The named gradients: the tensors of the other ranks count as constants.
    "all_gather_own": Kind(_all_gather, "own_slice", tangent="own_pad", start=_start_all_gather),
    "all_reduce_own": Kind(_all_reduce, "identity", tangent="identity", sets_rows=False, start=_start_all_reduce),
    "own_slice": Kind(_own_slice, "own_pad", communicates=False),
    "own_pad": Kind(_own_pad, "own_slice", communicates=False),
    "copy": Kind(lambda x, plan, pg: x.clone(), "all_reduce", tangent="copy", communicates=False, sets_rows=False),
    # Tensor parallelism: all ranks have the same tensor and compute the same loss, which counts once.
    "split": Kind(_own_slice, "all_gather_own", communicates=False),
    "replicate": Kind(lambda x, plan, pg: x.clone(), "all_reduce_own", communicates=False, sets_rows=False),
    "identity": Kind(lambda x, plan, pg: x.clone(), "identity", communicates=False, sets_rows=False),
}


_LEVELS = 64  # of torch's batched tensors


def run(x: Tensor, plan: LinearMap) -> Tensor:
    """Run `plan` without autograd. The result is always a new tensor; `x` does not change."""
    if wire.is_traced_by_make_fx():
        return _run_as_op(x, plan)  # a graph of sends and receives would not wait for them
    kind = KINDS[plan.kind]
    x = x.resolve_conj().resolve_neg().contiguous()
    if plan.ranks.size == 1:
        return x.clone()
    if plan.site and kind.communicates:
        validate_linear_map(x, plan)
    return kind.run(x, plan, process_group(plan.ranks))


def start(x: Tensor, plan: LinearMap) -> wire.Started:
    """Begin to run `plan` without autograd. Where nothing is sent, or while make_fx traces, the result is there already."""
    kind = KINDS[plan.kind]
    if kind.start is None or plan.ranks.size == 1 or wire.is_traced_by_make_fx():
        y = run(x, plan)
        return wire.Started((), lambda: y)
    x = x.resolve_conj().resolve_neg().contiguous()
    if plan.site:
        validate_linear_map(x, plan)
    return kind.start(x, plan, process_group(plan.ranks))


class _Collective(torch.autograd.Function):
    """Backward: the adjoint of the plan. No tensor is saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: LinearMap) -> Tensor:
        ctx.plan = plan
        return run(x, plan)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return apply(grad, ctx.plan.adjoint()), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        return apply(tangent, ctx.plan.tangent())


class _TransformedCollective(_Collective):
    """The same in the form that torch.func needs. It costs 40 us more for each call, as much as a small collective."""

    @staticmethod
    def forward(x: Tensor, plan: LinearMap) -> Tensor:  # type: ignore[override]
        return run(x, plan)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, LinearMap], output: Tensor) -> None:
        ctx.plan = inputs[1]

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, None], x: Tensor, plan: LinearMap) -> tuple[Tensor, int | None]:
        if in_dims[0] is None:
            return apply(x, plan), None
        y = apply(x.movedim(in_dims[0], -1), plan)  # rows stay first
        return y, y.ndim - 1


def apply(x: Tensor, plan: LinearMap) -> Tensor:
    """Run `plan` on the rows of `x`, differentiably."""
    if torch.compiler.is_compiling():
        if torch._C._functorch.maybe_current_level() is not None:
            raise RuntimeError(
                f"{plan.call}: torch.func transforms of a collective do not work inside torch.compile; do not compile them"
            )
        y = _run_as_op(x, plan)
    elif torch._C._functorch.is_legacy_batchedtensor(x):
        y = apply_batched([x], [plan])[0]
    elif torch._C._are_functorch_transforms_active():
        y = _TransformedCollective.apply(x, plan)
    elif not (x.requires_grad and torch.is_grad_enabled()) and forward_ad._current_level < 0:
        y = run(x, plan)  # nothing to differentiate; most often this is the backward itself
    else:
        y = _Collective.apply(x, plan)
    return y


def is_transformed(x: Tensor) -> bool:
    """Return whether something other than autograd's backward watches `x`: torch.compile, torch.func, forward mode, batches."""
    return (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or torch._C._functorch.is_legacy_batchedtensor(x)
    )


class Call(NamedTuple):
    """A collective that is ready to run: `finish` turns what `plan` makes of `rows` into what the user gets."""

    rows: Tensor
    plan: LinearMap
    finish: Callable[[Tensor], Tensor]

    def result(self) -> Tensor:
        return self.finish(apply(self.rows, self.plan))


def apply_batched(xs: Sequence[Tensor], plans: Sequence[LinearMap]) -> list[Tensor]:
    """Run plan k on `xs[k]`, where some are batches of torch.autograd.grad(is_grads_batched=True): all run as batches, then."""
    level, size = _batch_level(next(x for x in xs if torch._C._functorch.is_legacy_batchedtensor(x)))
    rows = [torch._remove_batch_dim(x, level, size, 0).movedim(0, -1) for x in xs]  # rows stay first
    ys = [apply(x, plan) for x, plan in zip(rows, plans, strict=True)]
    return [torch._add_batch_dim(y, y.ndim - 1, level) for y in ys]


def _batch_level(x: Tensor) -> tuple[int, int]:
    """Return the level of a batched tensor, and its batch size.

    torch counts levels by thread, and on accelerators backward runs in threads of its own: only the tensor knows its level.
    """
    for level in range(1, _LEVELS):
        # Where `x` has no such level, it is expanded to the size that is asked for.
        size, other = (torch._remove_batch_dim(x, level, asked, 0).shape[0] for asked in (0, 1))
        if size == other:
            return level, size
    raise RuntimeError("torch.autograd.grad(is_grads_batched=True): the batch dimension was not found")


def _run_as_op(x: Tensor, plan: LinearMap) -> Tensor:
    ranks = plan.ranks
    y: Tensor = _op(x, plan.kind, plan.send, plan.receive, plan.root, plan.reduce_dtype, plan.call, *ranks)
    return y


# The compiled graph contains one opaque op. Rank and size are arguments because they decide the shape of the result: the
# ranks of a host share inductor's cache, and a rank must not get the code of another one.
@torch.library.custom_op("unisono_collectives::linear", mutates_args=())
def _op(
    x: Tensor,
    kind: str,
    send: Sequence[int],
    receive: Sequence[int],
    root: int,
    reduce_dtype: torch.dtype | None,
    call: str,
    group: str,
    rank: int,
    size: int,
) -> Tensor:
    plan = LinearMap(kind, GroupRanks(group, rank, size), tuple(send), tuple(receive), root, reduce_dtype, call)
    return run(x, replace(plan, site="compiled code" if call_site() else ""))


@_op.register_fake
def _(x: Tensor, kind: str, send: Sequence[int], receive: Sequence[int], *_: Any) -> Tensor:
    rows = sum(receive) if KINDS[kind].sets_rows else x.shape[0]
    return x.new_empty((rows, *x.shape[1:]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.arguments = inputs[1:]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    kind, send, receive, root, reduce_dtype, call, *ranks = ctx.arguments
    adjoint = KINDS[kind].adjoint
    return _op(grad, adjoint, receive, send, root, reduce_dtype, f"backward of {call}", *ranks), *(None,) * 9


_op.register_autograd(_backward, setup_context=_save)
# Communication is an effect: otherwise a compiler may drop or reorder it on one rank and not on another.
_op.register_effect(EffectType.ORDERED)


_P = ParamSpec("_P")
_T = TypeVar("_T")


def disable_compile(fn: Callable[_P, _T]) -> Callable[_P, _T]:
    """torch.compiler.disable, but without its import of the compiler, which takes seconds, where nothing is compiled."""

    @wraps(fn)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if torch.compiler.is_compiling():
            result: _T = torch.compiler.disable(fn)(*args, **kwargs)
            return result
        return fn(*args, **kwargs)

    return call

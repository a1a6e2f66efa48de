"""Collectives as linear maps over all ranks. The backward of a linear map is its adjoint, which is a collective too.

The table KINDS says how each map runs and which map is its adjoint. One autograd Function (and, under torch.compile, one
custom op) turns the table into first and higher gradients, jvp and vmap. Reductions that are not linear (max, min, product)
are composed of these maps in functional/reduce.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._library.effects import EffectType
from torch.autograd import forward_ad
from torch.distributed.distributed_c10d import ProcessGroup

from unisono.collectives import compiled, wire
from unisono.collectives.checks import call_site, validate_linear_map
from unisono.collectives.groups import GroupRanks, process_group
from unisono.collectives.profiling import profiled


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
    functional: bool = False  # runs as one of torch's functional collectives, for torch.compile, and so do its adjoints

    def adjoint(self) -> LinearMap:
        kind = KINDS[self.kind].adjoint
        call = f"backward of {self.call}"
        own = self.root, self.reduce_dtype, call, self.site, self.functional
        return LinearMap(kind, self.ranks, self.receive, self.send, *own)  # in half the time of replace()

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
    functional: Callable[[Tensor, LinearMap], Tensor] | None = None  # run by torch's functional collectives, for equal sizes


def _own_slice(x: Tensor, plan: LinearMap, pg: ProcessGroup) -> Tensor:
    return x[sum(plan.send[: plan.ranks.rank]) :][: sum(plan.receive)].clone()


def _own_pad(x: Tensor, plan: LinearMap, pg: ProcessGroup) -> Tensor:
    out = x.new_zeros((sum(plan.receive), *x.shape[1:]))
    out[sum(plan.receive[: plan.ranks.rank]) :][: len(x)] = x
    return out


def _in_flight(
    start: Callable[..., wire.Started], functional: Callable[[Tensor, LinearMap], Tensor], adjoint: str, **options: Any
) -> Kind:
    """Return the kind of a collective that can be started, and that has a functional form for equal sizes."""

    def run(x: Tensor, plan: LinearMap, pg: ProcessGroup) -> Tensor:
        return start(x, plan, pg, async_op=False).result()

    return Kind(run, adjoint, start=start, functional=functional, **options)


def _start_all_gather(x: Tensor, plan: LinearMap, pg: ProcessGroup, async_op: bool = True) -> wire.Started:
    return wire.start_all_gather(x, pg, plan.receive, async_op=async_op)


def _start_reduce_scatter(x: Tensor, plan: LinearMap, pg: ProcessGroup, async_op: bool = True) -> wire.Started:
    return wire.start_reduce_scatter(x, pg, plan.send, plan.reduce_dtype, async_op=async_op)


def _start_all_to_all(x: Tensor, plan: LinearMap, pg: ProcessGroup, async_op: bool = True) -> wire.Started:
    return wire.start_all_to_all(x, pg, plan.send, plan.receive, async_op=async_op)


def _start_all_reduce(x: Tensor, plan: LinearMap, pg: ProcessGroup, async_op: bool = True) -> wire.Started:
    return wire.start_sum(x, pg, plan.reduce_dtype, async_op=async_op)


def _elementwise(op: str) -> Kind:
    """Return the kind of a reduction that is not linear: it has no adjoint, but a derivative (_Extreme)."""
    functional = None if op == "product" else partial(compiled.all_reduce_extreme, op=op)
    return Kind(lambda x, plan, pg: wire.reduce_natively(x, pg, op), "", sets_rows=False, functional=functional)


def _copy(x: Tensor, plan: LinearMap, pg: ProcessGroup) -> Tensor:
    return x.clone()


KINDS = {
    "all_gather": _in_flight(_start_all_gather, compiled.all_gather, "reduce_scatter"),
    "reduce_scatter": _in_flight(_start_reduce_scatter, compiled.reduce_scatter, "all_gather"),
    "all_to_all": _in_flight(_start_all_to_all, compiled.all_to_all, "all_to_all"),
    "point_to_point": Kind(lambda x, plan, pg: wire.point_to_point(x, pg, plan.send, plan.receive), "point_to_point"),
    "all_reduce": _in_flight(_start_all_reduce, compiled.all_reduce, "all_reduce", sets_rows=False),
    "broadcast": Kind(lambda x, plan, pg: wire.broadcast(x, pg, plan.root), "reduce", sets_rows=False),
    "reduce": Kind(lambda x, plan, pg: wire.reduce(x, pg, plan.root, plan.reduce_dtype), "broadcast", sets_rows=False),
    "all_reduce_max": _elementwise("max"),
    "all_reduce_min": _elementwise("min"),
    "all_reduce_product": _elementwise("product"),  # its derivative is composed of other maps: functional/reduce.py
    # The named gradients: the tensors of the other ranks count as constants.
    "all_gather_own": _in_flight(_start_all_gather, compiled.all_gather, "own_slice", tangent="own_pad"),
    "all_reduce_own": _in_flight(_start_all_reduce, compiled.all_reduce, "identity", tangent="identity", sets_rows=False),
    "own_slice": Kind(_own_slice, "own_pad", communicates=False),
    "own_pad": Kind(_own_pad, "own_slice", communicates=False),
    "copy": Kind(_copy, "all_reduce", tangent="copy", communicates=False, sets_rows=False),
    # Tensor parallelism: all ranks have the same tensor and compute the same loss, which counts once.
    "split": Kind(_own_slice, "all_gather_own", communicates=False),
    "replicate": Kind(_copy, "all_reduce_own", communicates=False, sets_rows=False),
    "identity": Kind(_copy, "identity", communicates=False, sets_rows=False),
}


_LEVELS = 64  # of torch's batched tensors


def run(x: Tensor, plan: LinearMap) -> Tensor:
    """Run `plan` without autograd. The result is always a new tensor; `x` does not change."""
    kind = KINDS[plan.kind]
    if plan.functional:
        return kind.functional(x, plan) if kind.functional else kind.run(x, plan, process_group(plan.ranks))
    if wire.is_traced_by_make_fx():
        return _run_as_op(x, plan)  # a graph of sends and receives would not wait for them
    x = x.resolve_conj().resolve_neg().contiguous()
    if plan.ranks.size == 1:
        return x.clone()
    if plan.site and kind.communicates:
        validate_linear_map(x, plan)
    return profiled(plan.call, kind.run, x, plan, process_group(plan.ranks))


def start(x: Tensor, plan: LinearMap) -> wire.Started:
    """Begin to run `plan` without autograd. Where nothing is sent, or while make_fx traces, the result is there already."""
    kind = KINDS[plan.kind]
    if kind.start is None or plan.ranks.size == 1 or wire.is_traced_by_make_fx():
        y = run(x, plan)
        return wire.Started((), lambda: y)
    x = x.resolve_conj().resolve_neg().contiguous()
    if plan.site:
        validate_linear_map(x, plan)
    return profiled(plan.call, kind.start, x, plan, process_group(plan.ranks))


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


class _Extreme(torch.autograd.Function):
    """max or min over the ranks. Backward: the gradients of all ranks are added; ranks that hold the extreme share them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: LinearMap) -> Tensor:
        y = run(x, plan)
        ctx.save_for_backward(x, y)
        ctx.plan = plan
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        x, y = ctx.saved_tensors
        plan = replace(ctx.plan, kind="all_reduce", call=f"backward of {ctx.plan.call}")
        holds = x == y
        ties = apply(holds.to(torch.int32), plan)
        return apply(grad, plan) * holds / ties, None


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
        if plan.ranks.size == 1:
            return x.clone()
        if torch._C._functorch.maybe_current_level() is not None:
            raise RuntimeError(
                f"{plan.call}: torch.func transforms of a collective do not work inside torch.compile; do not compile them"
            )
        y = _run_in_graph(x, plan)
    elif torch._C._functorch.is_legacy_batchedtensor(x):
        y = apply_batched([x], [plan])[0]
    elif torch._C._are_functorch_transforms_active():
        y = _TransformedCollective.apply(x, plan)
    elif not (x.requires_grad and torch.is_grad_enabled()) and forward_ad._current_level < 0:
        y = run(x, plan)  # nothing to differentiate; most often this is the backward itself
    else:
        y = (_Collective if KINDS[plan.kind].adjoint else _Extreme).apply(x, plan)
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
    level, size = batch_level(next(x for x in xs if torch._C._functorch.is_legacy_batchedtensor(x)))
    rows = [torch._remove_batch_dim(x, level, size, 0).movedim(0, -1) for x in xs]  # rows stay first
    ys = [apply(x, plan) for x, plan in zip(rows, plans, strict=True)]
    return [torch._add_batch_dim(y, y.ndim - 1, level) for y in ys]


def batch_level(x: Tensor) -> tuple[int, int]:
    """Return the level of a batched tensor, and its batch size.

    torch counts levels by thread, and on accelerators backward runs in threads of its own: only the tensor knows its level.
    """
    for level in range(1, _LEVELS):
        # Where `x` has no such level, it is expanded to the size that is asked for.
        size, other = (torch._remove_batch_dim(x, level, asked, 0).shape[0] for asked in (0, 1))
        if size == other:
            return level, size
    raise RuntimeError("torch.autograd.grad(is_grads_batched=True): the batch dimension was not found")


def has_functional_form(x: Tensor, plan: LinearMap) -> bool:
    """Return whether torch.compile may see `plan` as one of torch's functional collectives, or as plain torch.

    torch drops functional collectives from a training graph where nothing depends on them, and that may be so on one rank only:
    while others log the result, for instance. So only what has a gradient is functional: most often all ranks use it, or their
    backward would wait. A loss that is reduced for a log must be detached.
    """
    kind = KINDS[plan.kind]
    if not compiled.are_equal((*plan.send, *plan.receive)):
        return False
    if not kind.communicates:
        return True
    if kind.functional is None or not (plan.functional or (x.requires_grad and torch.is_grad_enabled())):
        return False
    return compiled.is_served(plan.kind, x.dtype, x.device.type, plan.ranks.name)


def _run_in_graph(x: Tensor, plan: LinearMap) -> Tensor:
    """Put `plan` into the graph that is being compiled."""
    if not has_functional_form(x, plan):
        return _run_as_op(x, plan)
    op = torch.ops.unisono_collectives.functional
    y: Tensor = op(x, plan.kind, plan.send, plan.receive, plan.reduce_dtype, plan.call, *plan.ranks)
    return y


torch.library.define(
    "unisono_collectives::functional",
    "(Tensor x, str kind, SymInt[] send, SymInt[] receive, ScalarType? reduce_dtype, str call, str group, int rank, int size) "
    "-> Tensor",
)


@torch.library.impl("unisono_collectives::functional", "CompositeImplicitAutograd")
def _functional(
    x: Tensor,
    kind: str,
    send: Sequence[int],
    receive: Sequence[int],
    reduce_dtype: torch.dtype | None,
    call: str,
    *ranks: Any,
) -> Tensor:
    """Dynamo sees one op; the tracer behind it sees through it, because it is composite: our Function and its backward."""
    plan = LinearMap(kind, GroupRanks(*ranks), tuple(send), tuple(receive), 0, reduce_dtype, call, functional=True)
    y: Tensor = (_Collective if KINDS[kind].adjoint else _Extreme).apply(x, plan)
    return y


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

"""start_all_gather, start_all_reduce, start_reduce_scatter, start_all_to_all_single: collectives that run beside the caller.

Each returns a PendingTensor at once; its wait() returns the tensor, with its gradient. In the backward, too, the communication
starts as soon as the gradient of the result is there, and is waited for only where the gradient of the input is needed.
"""

import sys
import warnings
from typing import Any

import torch
from torch import Tensor

from unisono.collectives.autograd import Call, LinearMap, apply, is_transformed, start
from unisono.collectives.checks import tensor_error, user_frame, validate_choice
from unisono.collectives.functional.all_to_all import prepare_all_to_all_single
from unisono.collectives.functional.gather import GatherGrad, prepare_all_gather
from unisono.collectives.functional.reduce import (
    ReduceGrad,
    ReduceOp,
    prepare_all_reduce,
    prepare_reduce_scatter,
    validate_op,
)
from unisono.collectives.groups import Group, resolve_group
from unisono.collectives.profiling import profiled
from unisono.collectives.sizes import Sizes
from unisono.collectives.wire import Started

_dropped: list[Started] = []  # messages still use the memory of pending tensors that nobody has waited for


class PendingTensor:
    """A tensor that a collective is computing. `wait()` returns it; as with torch's Work, every rank must call that.

    Do not change the input before. Where there is a backward, all ranks must wait for several of them in the same order,
    which decides the order of the communication in the backward.

    A PendingTensor that is dropped without wait() warns. Its messages still arrive, so other calls stay right, but its memory
    may be kept until the end of the process, and a backward through the results of the other ranks would wait for this rank.
    """

    def __init__(self, call: Call) -> None:
        self._call = call.plan.call
        self._place = user_frame() if not torch.compiler.is_compiling() else ""
        self._finish = call.finish
        self._flight: _Flight | None = _Flight(call.rows, call.plan)
        self._result: Tensor | None = None

    def wait(self) -> Tensor:
        """Return the result, with its gradient. On a GPU only the current stream waits for it. It may be called again."""
        if self._flight is not None:
            self._result = self._finish(self._flight.wait())
            self._flight = None
        assert self._result is not None  # wait() has set it, or the flight is there
        return self._result

    def is_completed(self) -> bool:
        """Return whether wait() would return at once, as far as the backend can tell; gloo's messages cannot."""
        return self._flight is None or self._flight.is_completed()

    def __del__(self) -> None:
        flight = getattr(self, "_flight", None)  # there is none if the call was wrong
        if flight is None or not flight.works() or sys.is_finalizing():
            return
        flight.drop()
        warnings.warn(
            f"{self._call} at {self._place}: its result was dropped without wait(); all ranks must wait for what they start",
            RuntimeWarning,
            stacklevel=2,
        )


def start_all_gather(
    x: Tensor,
    dim: int = 0,
    *,
    sizes: Sizes = None,
    grad: GatherGrad = "sum",
    reduce_dtype: torch.dtype | None = None,
    group: Group = None,
) -> PendingTensor:
    """Start all_gather(x, ...), of one tensor. The sizes are exchanged before it returns, unless they are given.

    Backward: that of all_gather. It starts where the gradient of the result is there, and is waited for where that of `x` is
    needed: computations between the two calls overlap with it in the backward, too.

    Example:
        >>> import torch
        >>> from unisono.collectives import start_all_gather
        >>> x = torch.ones(2)
        >>> pending = start_all_gather(x)
        >>> y = x * 3  # runs beside the communication
        >>> pending.wait() + y
        tensor([4., 4.])
    """
    name = "start_all_gather"
    _require_tensor(name, x)
    validate_choice(name, "grad", grad, ("sum", "slice"))
    return PendingTensor(prepare_all_gather(name, x, dim, sizes, grad, reduce_dtype, resolve_group(group)))


def start_all_reduce(
    x: Tensor,
    op: ReduceOp = "sum",
    *,
    grad: ReduceGrad = "sum",
    reduce_dtype: torch.dtype | None = None,
    group: Group = None,
) -> PendingTensor:
    """Start all_reduce(x, op, ...), for op="sum" and "avg", of one tensor.

    Backward: that of all_reduce, started and waited for as in start_all_gather.

    Example, 2 ranks holding [1.] and [2.]:
        start_all_reduce(x).wait()  ->  [3.] on both
    """
    name = "start_all_reduce"
    _require_tensor(name, x)
    validate_choice(name, "grad", grad, ("sum", "identity"))
    op_name = _sum_or_mean(name, op, x, reduce_dtype)
    if grad == "identity" and op_name != "sum":
        raise ValueError(f"{name}: grad='identity' goes with op='sum', not with op={op_name!r}")
    return PendingTensor(prepare_all_reduce(name, x, op_name, grad, reduce_dtype, resolve_group(group)))


def start_reduce_scatter(
    x: Tensor,
    dim: int = 0,
    *,
    sizes: Sizes = None,
    op: ReduceOp = "sum",
    reduce_dtype: torch.dtype | None = None,
    group: Group = None,
) -> PendingTensor:
    """Start reduce_scatter(x, ...), for op="sum" and "avg". The ranks compare their shapes first, unless sizes are given.

    Backward: that of reduce_scatter, started and waited for as in start_all_gather.

    Example, 2 ranks holding [1., 2.] and [3., 4.]:
        start_reduce_scatter(x).wait()  ->  [4.] on rank 0, [6.] on rank 1
    """
    name = "start_reduce_scatter"
    _require_tensor(name, x)
    op_name = _sum_or_mean(name, op, x, reduce_dtype)
    return PendingTensor(prepare_reduce_scatter(name, x, dim, sizes, op_name, reduce_dtype, resolve_group(group)))


def start_all_to_all_single(
    x: Tensor, dim: int = 0, *, send_sizes: Sizes = None, receive_sizes: Sizes = None, group: Group = None
) -> PendingTensor:
    """Start all_to_all_single(x, ...). What arrives is exchanged before it returns, unless `receive_sizes` are given.

    Backward: that of all_to_all_single, started and waited for as in start_all_gather.

    Example, 2 ranks holding [1., 2.] and [3., 4.]:
        start_all_to_all_single(x).wait()  ->  [1., 3.] on rank 0, [2., 4.] on rank 1
    """
    name = "start_all_to_all_single"
    _require_tensor(name, x)
    return PendingTensor(prepare_all_to_all_single(name, x, dim, send_sizes, receive_sizes, resolve_group(group)))


class _Flight:
    """A linear map between its start and its result, and the way back of the gradient."""

    def __init__(self, x: Tensor, plan: LinearMap) -> None:
        self.plan = plan
        self.way_back: _Flight | None = None  # of the gradient, from the backward of _Land to that of _TakeOff
        self._token: Tensor | None = None
        self._started: Started | None = None
        if is_transformed(x):
            self._value: Tensor = apply(x, plan)
            return
        _dropped[:] = [started for started in _dropped if not _is_completed(started)]
        self._started = start(x.detach(), plan)
        if x.requires_grad and torch.is_grad_enabled():
            self._token = _TakeOff.apply(x, self)

    def wait(self) -> Tensor:
        if self._started is None:
            return self._value
        token, self._token = self._token, None
        return self.land() if token is None else _Land.apply(token, self)

    def land(self) -> Tensor:
        assert self._started is not None  # wait() is called once
        y = profiled(f"wait of {self.plan.call}", self._started.result)
        self._started = None
        return y

    def works(self) -> bool:
        return self._started is not None and bool(self._started.works)

    def is_completed(self) -> bool:
        return self._started is None or _is_completed(self._started)

    def drop(self) -> None:
        assert self._started is not None  # said by works()
        _dropped.append(self._started)


class _TakeOff(torch.autograd.Function):
    """Returns a token that stands for the result until it is there. Backward: waits for the gradient that is on its way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, flight: _Flight) -> Tensor:
        ctx.flight = flight
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        way_back = ctx.flight.way_back
        ctx.flight.way_back = None
        return way_back.wait(), None


class _Land(torch.autograd.Function):
    """Waits for the result. Backward: starts the adjoint; autograd runs what was called in between before that of _TakeOff."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, flight: _Flight) -> Tensor:
        ctx.flight = flight
        return flight.land()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.flight.way_back = _Flight(grad, ctx.flight.plan.adjoint())
        return grad.new_empty(0), None


def _is_completed(started: Started) -> bool:
    return all(work.is_completed() for work in started.works)


def _require_tensor(name: str, x: object) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: {tensor_error(x)}; start a tree leaf by leaf")


def _sum_or_mean(name: str, op: ReduceOp, x: Tensor, reduce_dtype: torch.dtype | None) -> str:
    found = validate_op(name, op, x, reduce_dtype)
    if found not in ("sum", "avg"):
        raise ValueError(f"{name}: op={found!r} cannot be started, only 'sum' and 'avg'")
    return found

"""Collectives of equal sizes as torch.compile sees them: torch's functional collectives, `_c10d_functional`.

The opaque op of autograd.py runs where it stands. These ops inductor knows: it may start them early, wait for them late and
fuse what lies around them. They take equal sizes only. torch keeps their order among each other, and that of opaque ops among
each other. To save memory, inductor moves one past the other, depending on the sizes of a rank's tensors, so that ranks would
wait for different messages: functional collectives are used only where torch._inductor.config.reorder_for_peak_memory is off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from unisono.collectives import wire
from unisono.collectives.checks import checks_enabled_at_run_time
from unisono.collectives.groups import backend_or_none, group_by_name

if TYPE_CHECKING:
    from unisono.collectives.autograd import LinearMap

_c10d = torch.ops._c10d_functional


# On gloo wire.py sends messages from rank to rank, which do not meet gloo's own collectives. A rank may be the only one that
# sees equal sizes in an all_to_all, or that runs without torch.compile; what wire.py sends by an all_reduce always meets.
FUNCTIONAL_ON_GLOO = {"all_reduce", "all_reduce_own"}


def is_served(kind: str, dtype: torch.dtype, device_type: str, group: str) -> bool:
    """Return whether a map of this kind may be a functional collective: the group's own backend takes the tensor as it is.

    Otherwise, and while checks are enabled, the opaque op has the ways of wire.py: bytes, side groups, host memory.
    """
    import torch._inductor.config
    import torch.distributed._functional_collectives  # says that a wait must stay, used or not; takes 20 ms

    if torch._inductor.config.reorder_for_peak_memory:
        return False

    backend = backend_or_none(torch.device(device_type), group_by_name(group))
    if backend is None or dtype not in wire.SENT_AS_THEY_ARE or checks_enabled_at_run_time():
        return False
    return backend != "gloo" or (device_type == "cpu" and kind in FUNCTIONAL_ON_GLOO)


# What torch.compiler.assume_constant_result does, which imports the compiler, for seconds, also where nothing is compiled.
is_served._dynamo_marked_constant = True  # type: ignore[attr-defined]


def are_equal(sizes: Sequence[int]) -> bool:
    """Return whether all sizes are known to be the same; not if some are known only when the graph runs."""
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return all(guard_or_false(size == sizes[0]) for size in sizes[1:])


def all_gather(x: Tensor, plan: LinearMap) -> Tensor:
    return _wait(_c10d.all_gather_into_tensor(x.contiguous(), plan.ranks.size, plan.ranks.name))


def reduce_scatter(x: Tensor, plan: LinearMap) -> Tensor:
    summands = x.to(wire.sum_dtype(x, plan.reduce_dtype)).contiguous()
    return _wait(_c10d.reduce_scatter_tensor(summands, "sum", plan.ranks.size, plan.ranks.name)).to(x.dtype)


def all_reduce(x: Tensor, plan: LinearMap) -> Tensor:
    summands = x.to(wire.sum_dtype(x, plan.reduce_dtype)).contiguous()
    return _wait(_c10d.all_reduce(summands, "sum", plan.ranks.name)).to(x.dtype)


def all_reduce_extreme(x: Tensor, plan: LinearMap, *, op: str) -> Tensor:
    """Return the max or min over the ranks. NaN wins, as torch has it."""
    return wire.with_ordered_integers(x, op, lambda integers: _wait(_c10d.all_reduce(integers, op, plan.ranks.name)))


def all_to_all(x: Tensor, plan: LinearMap) -> Tensor:
    return _wait(_c10d.all_to_all_single(x.contiguous(), list(plan.receive), list(plan.send), plan.ranks.name))


_wait: Callable[[Tensor], Tensor] = _c10d.wait_tensor

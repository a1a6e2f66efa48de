"""DistributedDataParallel for fake tensors: its reducer in C++ needs real ones.

The class stays torch's. Inside `simulate_rank` its methods do what the reducer does: the same buckets, one all_reduce for each
while the backward runs, the same copies, the memory of the buckets, the broadcast of buffers.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from unisono.collectives.ledger.ledger import Ledger

_MIB = 1 << 20
_BROADCAST_BYTES = 250 * _MIB  # DDP broadcasts parameters and buffers in parts of this size


@contextmanager
def simulated_ddp(ledger: Ledger) -> Iterator[None]:
    def init(
        self: Any,
        module: torch.nn.Module,
        device_ids: list[Any] | None = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: Any = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        device_mesh: Any = None,
        **options: Any,
    ) -> None:
        if given := [name for name, value in options.items() if value]:
            raise NotImplementedError(f"DistributedDataParallel: simulate_rank does not know the options {', '.join(given)}")
        torch.nn.Module.__init__(self)
        self.module = module
        self.device_ids = device_ids
        self.broadcast_buffers = broadcast_buffers is not False
        self.require_backward_grad_sync = True
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.process_group = device_mesh.get_group() if device_mesh is not None else process_group or dist.group.WORLD
        ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
        parameters: list[Tensor] = [p for name, p in module.named_parameters() if p.requires_grad and name not in ignored]
        if not parameters:
            raise RuntimeError(
                "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a gradient."
            )
        self.device = parameters[0].device
        if init_sync:
            named = [*module.named_parameters(), *module.named_buffers()]
            _broadcast([x.detach() for name, x in named if name not in ignored], self.process_group)
        self.synced_buffers = [x for name, x in module.named_buffers() if name not in ignored]
        self.static_graph = static_graph
        self.reducer = _Reducer(ledger, self, parameters, bucket_cap_mb, static_graph)

    def forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            self.reducer._rebuild_buckets()
        if self.broadcast_buffers and self.require_backward_grad_sync and self.synced_buffers:
            _broadcast(self.synced_buffers, self.process_group)
        if self.device_ids:
            inputs, kwargs = pytree.tree_map_only(Tensor, lambda x: x.to(self.device), (inputs, kwargs))
        return self.module(*inputs, **kwargs)

    def register_comm_hook(self: Any, state: Any, hook: Any) -> None:
        raise NotImplementedError(
            "DistributedDataParallel.register_comm_hook: simulate_rank counts the all_reduces of DDP itself"
        )

    with ExitStack() as stack:
        for name, method in (("__init__", init), ("forward", forward), ("register_comm_hook", register_comm_hook)):
            stack.enter_context(mock.patch.object(DistributedDataParallel, name, method))
        yield


class _Bucket:
    """Some parameters whose gradients travel together in one flat buffer."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self.parameters = parameters
        with torch.no_grad():
            self.buffer = torch.zeros(
                sum(p.numel() for p in parameters), dtype=parameters[0].dtype, device=parameters[0].device
            )
        parts = self.buffer.split([p.numel() for p in parameters])
        self.views = {id(p): part.view(p.shape) for p, part in zip(parameters, parts, strict=True)}
        self.ready: set[int] = set()
        self.work: Any = None


class _Reducer:
    def __init__(
        self, ledger: Ledger, ddp: Any, parameters: list[Tensor], bucket_cap_mb: float | None, static_graph: bool
    ) -> None:
        self.ledger = ledger
        self.ddp = ddp
        self.parameters = parameters
        self.size = ddp.process_group.size()
        cap = int((bucket_cap_mb or 25) * _MIB)
        self.caps = [_MIB if bucket_cap_mb is None else cap, cap]
        # As in torch: the first backward has one bucket, unless parameters may be unused; it shows the order for the buckets.
        first = [2**62] if static_graph or not ddp.find_unused_parameters else self.caps
        self.order: list[Tensor] = []
        self.may_rebuild = static_graph or not ddp.find_unused_parameters
        self.in_backward = False
        self._assign([list(reversed(bucket)) for bucket in reversed(_assign_buckets(parameters, first))])
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._hook())

    def prepare_for_forward(self) -> None:
        """Part of the interface of DDP's reducer; there is nothing to do."""

    def prepare_for_backward(self, outputs: list[Tensor]) -> None:
        """Part of the interface of DDP's reducer; there is nothing to do."""

    def _rebuild_buckets(self) -> None:
        """Before a forward pass: after the first backward, assign the buckets in the order in which gradients came."""
        if self.may_rebuild and len(self.order) == len(self.parameters):
            self.may_rebuild = False
            self._assign(_assign_buckets(self.order, self.caps))

    def _assign(self, groups: list[list[Tensor]]) -> None:
        self.buckets = [_Bucket(group) for group in groups]
        self.bucket_of = {id(p): bucket for bucket in self.buckets for p in bucket.parameters}
        self.ledger.memory.note([bucket.buffer for bucket in self.buckets], "gradient buckets")

    def _hook(self) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            if not self.ddp.require_backward_grad_sync:
                return
            if not self.in_backward:
                self.in_backward = True
                torch.autograd.Variable._execution_engine.queue_callback(self._finish)
            if self.may_rebuild and not any(parameter is p for p in self.order[-1:]):
                self.order.append(parameter)
            self._put(parameter)

        return hook

    def _put(self, parameter: Tensor) -> None:
        bucket = self.bucket_of[id(parameter)]
        view = bucket.views[id(parameter)]
        with torch.no_grad():
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad is view or parameter.grad.untyped_storage()._cdata == bucket.buffer.untyped_storage()._cdata:
                view.div_(self.size)
            else:
                torch.mul(parameter.grad, 1 / self.size, out=view)  # the copy into the bucket divides
                if self.ddp.gradient_as_bucket_view:
                    parameter.grad = view
        bucket.ready.add(id(parameter))
        if len(bucket.ready) == len(bucket.parameters):
            bucket.work = dist.all_reduce(bucket.buffer, group=self.ddp.process_group, async_op=True)

    def _finish(self) -> None:
        self.in_backward = False
        missing = [p for bucket in self.buckets for p in bucket.parameters if id(p) not in bucket.ready]
        if missing and not self.ddp.find_unused_parameters:
            names = [name for name, p in self.ddp.module.named_parameters() if any(p is m for m in missing)]
            raise RuntimeError(
                f"DistributedDataParallel: the loss does not use {len(missing)} parameters, {', '.join(names[:5])} ...; "
                "pass find_unused_parameters=True"
            )
        if self.ddp.find_unused_parameters:
            used = torch.ones(len(self.parameters), dtype=torch.int32, device=self.buckets[0].buffer.device)
            dist.all_reduce(used, group=self.ddp.process_group)
        for parameter in missing:
            self._put(parameter)
        with torch.no_grad():
            for bucket in self.buckets:
                bucket.work.wait()
                bucket.work = None
                bucket.ready.clear()
                for parameter in bucket.parameters:
                    if parameter.grad is not None and not self.ddp.gradient_as_bucket_view:
                        parameter.grad.copy_(bucket.views[id(parameter)])


def _assign_buckets(parameters: list[Tensor], caps: list[int]) -> list[list[Tensor]]:
    """Fill buckets in order, those of each dtype apart; a bucket is full when it has reached its cap."""
    full: list[list[Tensor]] = []
    filling: dict[Any, list[Tensor]] = {}
    filled: dict[Any, int] = {}
    closed: dict[Any, int] = {}
    for parameter in parameters:
        key = (parameter.dtype, parameter.device)
        filling.setdefault(key, []).append(parameter)
        filled[key] = filled.get(key, 0) + parameter.numel() * parameter.element_size()
        if filled[key] >= caps[min(closed.get(key, 0), len(caps) - 1)]:
            full.append(filling.pop(key))
            filled[key] = 0
            closed[key] = closed.get(key, 0) + 1
    return full + list(filling.values())


def _broadcast(tensors: list[Tensor], group: Any) -> None:
    """Broadcast from rank 0 in flat parts, as DDP does with parameters and buffers."""
    for part in _assign_buckets(tensors, [_BROADCAST_BYTES]):
        with torch.no_grad():
            flat = torch.cat([x.reshape(-1) for x in part])
            dist.broadcast(flat, group=group, group_src=0)
            if group.rank() != 0:
                for x, values in zip(part, flat.split([x.numel() for x in part]), strict=True):
                    x.copy_(values.view(x.shape))

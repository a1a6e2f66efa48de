"""One module on several devices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from unisono.dataparallel.coalescing import BUCKET_BYTES
from unisono.dataparallel.devices import Device, full_device, full_devices
from unisono.dataparallel.gathering import gather
from unisono.dataparallel.replicas import Replicas
from unisono.dataparallel.scattering import split
from unisono.dataparallel.streaming import stream
from unisono.dataparallel.threads import run_all


class ReplicaSet(nn.Module):
    """`module` on several `devices` of this process at once: for inference, evaluation and training.

    A call splits the batch along `dim` (see scatter), runs a replica on each device that got rows, and puts the results
    together on `output_device`, the first device unless given (see gather): outputs without dimensions, as losses, become a
    vector with one entry for each replica that ran. The module itself stays where it is, on any device, and keeps the
    parameters; the replicas get copies in every call, once for a whole map(), but keep those of frozen parameters
    (requires_grad=False) until these change.

    Buffers: every replica works on its own copies. What a call changes in them (the running statistics of a batch norm) is
    taken back into the module: the mean over replicas, weighted by their rows; of integers, the first replica's. In training
    a batch norm sees the rows of its own device: use ranks and SyncBatchNorm where it must see the whole batch.

    Changes of the module (tensors, parts, hooks, attributes) are noticed at the next call. After changes inside of an
    attribute (of a list, say), or of frozen parameters through `.data`, call sync().

    Backward: gradients reach the parameters of `module` itself: the sum over the replicas. Where replicas are on other
    devices than the module, a parameter that was not used gets zeros, for it travelled with others.

    Example:
        >>> import torch
        >>> replicas = ReplicaSet(torch.nn.Linear(3, 2), ["cpu", "cpu"])
        >>> replicas(torch.ones(5, 3)).shape
        torch.Size([5, 2])
        >>> [y.shape[0] for y in replicas.map(torch.ones(7, 3).split(3))]
        [3, 3, 1]
    """

    def __init__(
        self,
        module: nn.Module,
        devices: Sequence[Device],
        *,
        dim: int = 0,
        output_device: Device | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        super().__init__()
        self.module = module
        self.devices = full_devices("ReplicaSet", devices)
        self.output_device = self.devices[0]
        if output_device is not None:
            self.output_device = full_device("ReplicaSet", "output_device", output_device)
        self.dim = dim
        self.bucket_bytes = bucket_bytes
        self.sync()

    def sync(self) -> None:
        """Forget all copies: the next call makes them anew, from the module as it is then."""
        self._idle: list[Replicas] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        parts, rows = split("ReplicaSet", (args, kwargs), self.devices, dim=self.dim)
        # a replica without rows has nothing to say; where there is nothing to split, one says it all
        active = [i for i, length in enumerate(rows or []) if length] or [0]

        def call(k: int) -> Any:
            own_args, own_kwargs = parts[active[k]]
            return replicas.call(active[k], lambda module: module(*own_args, **own_kwargs))

        with self._check_out() as replicas:
            replicas.prepare(active)
            outputs = run_all(call, [self.devices[i] for i in active], name="ReplicaSet")
            replicas.take_back_buffers({i: max(rows[i], 1) if rows else 1 for i in active})
        return gather(outputs, self.output_device, dim=self.dim)

    def map(self, batches: Iterable[Any], *, ahead: int = 1, progress: bool | str = False) -> Iterator[Any]:
        """Run a whole evaluation set through the devices: each batch on one of them; results in order, on `output_device`.

        A batch that is a tuple or list is given as arguments, a mapping as keyword arguments, anything else as the one
        argument. While a device works on one batch, `ahead` more are being copied to it; no more than (1 + ahead) batches
        or results for each device exist at a time. Without gradients; put the module in eval mode first. What replicas
        change in buffers is not taken back.

        `progress` shows a bar (by tqdm), with that text if it is one. An error of a replica comes at the place of its
        batch, after the results before it, with a note that says which batch it was, and on which device.
        """
        if ahead < 0:
            raise ValueError(f"ReplicaSet.map: ahead={ahead} must not be negative")
        return stream(self._check_out(), batches, self.devices, self.output_device, ahead=ahead, progress=progress)

    @contextmanager
    def _check_out(self) -> Iterator[Replicas]:
        """Replicas that nobody else uses meanwhile: a call during a map, or in another thread, gets others."""
        idle = self._idle
        try:
            replicas = idle.pop()
        except IndexError:
            replicas = Replicas(self.module, self.devices, self.bucket_bytes)
        try:
            yield replicas
        finally:
            replicas.release()
            idle.append(replicas)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_idle": []}  # copies are made where they are needed

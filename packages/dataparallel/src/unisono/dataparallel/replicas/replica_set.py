"""ReplicaSet: one module on several devices of this process, for one call or for a whole evaluation set."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import nn

from unisono.dataparallel.replicas.broadcast import BUCKET_BYTES
from unisono.dataparallel.replicas.devices import Copies, Device, resolve_device, resolve_devices
from unisono.dataparallel.replicas.parallel_apply import (
    ThreadContext,
    executor,
    run_on_devices,
    run_with_note,
    threads_supported,
)
from unisono.dataparallel.replicas.replicate import Replicas
from unisono.dataparallel.replicas.scatter_gather import gather, move_tree, split_tree


class ReplicaSet(nn.Module):
    """`module` on several `devices` of this process at once, for inference, evaluation and training.

    A call splits the batch along `dim` (see scatter), runs a replica on each device that got rows, and gathers the results on
    `output_device`, by default the first device (see gather). Outputs without dimensions, such as losses, become a vector
    with one entry for each replica that ran. The module itself stays on its device and owns the parameters. Each call, or
    each map(), copies the parameters to the replicas; copies of frozen parameters (requires_grad=False) are reused until
    these change.

    Buffers: every replica works on its own copies. If a call changes them (running statistics of a batch norm), the module
    gets their mean over replicas, weighted by rows; for integers, the first replica's. In training, a batch norm uses the
    rows of its own device only: use ranks and SyncBatchNorm if it must use the whole batch.

    Changes of the module (tensors, submodules, hooks, attributes) take effect at the next call. After a change inside an
    attribute (for example of a list), or of frozen parameters through `.data`, call sync().

    Backward: the parameters of `module` get the sum of the replicas' gradients. If replicas are on other devices than the
    module, an unused parameter gets zeros, because it was copied together with others.

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
        self.devices = resolve_devices("ReplicaSet", devices)
        self.output_device = self.devices[0]
        if output_device is not None:
            self.output_device = resolve_device("ReplicaSet", "output_device", output_device)
        self.dim = dim
        self.bucket_bytes = bucket_bytes
        self.sync()

    def sync(self) -> None:
        """Drop all copies: the next call makes new ones from the module as it is then."""
        self._idle: list[Replicas] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        parts, rows = split_tree("ReplicaSet", (args, kwargs), self.devices, dim=self.dim)
        # A replica without rows does not run; if there is nothing to split, one replica runs.
        active = [i for i, length in enumerate(rows or []) if length] or [0]

        def call(k: int) -> Any:
            own_args, own_kwargs = parts[active[k]]
            return replicas.call(active[k], lambda module: module(*own_args, **own_kwargs))

        with self._check_out() as replicas:
            replicas.prepare(active)
            outputs = run_on_devices(call, [self.devices[i] for i in active], name="ReplicaSet")
            replicas.write_back_buffers({i: max(rows[i], 1) if rows else 1 for i in active})
        return gather(outputs, self.output_device, dim=self.dim)

    def map(self, batches: Iterable[Any], *, ahead: int = 1, progress: bool | str = False) -> Iterator[Any]:
        """Run each of `batches` on one of the devices; yield the results in order, on `output_device`, without gradients.

        A batch that is a tuple or list is passed as arguments, a mapping as keyword arguments, anything else as one argument.
        While a device works on one batch, `ahead` more are being copied to it; at most (1 + ahead) batches or results for
        each device exist at a time. Put the module in eval mode first. Changes of buffers are not written back.

        `progress` shows a bar (by tqdm), with that text if it is a string. An error of a replica is raised in place of the
        result of its batch, with a note that says which batch it was, and on which device.
        """
        if ahead < 0:
            raise ValueError(f"ReplicaSet.map: ahead={ahead} must not be negative")
        return map_batches(self._check_out(), batches, self.devices, self.output_device, ahead=ahead, progress=progress)

    @contextmanager
    def _check_out(self) -> Iterator[Replicas]:
        """Yield replicas that nobody else uses meanwhile: a call during a map, or in another thread, gets others."""
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
        return vars(self) | {"_idle": []}  # copies of the module are not saved


def map_batches(
    replica_context: AbstractContextManager[Replicas],
    batches: Iterable[Any],
    devices: Sequence[torch.device],
    output: torch.device,
    *,
    ahead: int,
    progress: bool | str,
) -> Iterator[Any]:
    """Yield the results of the batches, in order, on `output`.

    Batch k goes to replica k % len(devices), which has its own thread. The copy of a batch starts at once, while the replica
    still works on the batches before it.
    """
    waiting: deque[Future[Any]] = deque()
    failure: Exception | None = None
    source = iter(batches)
    with ExitStack() as stack:
        bar = stack.enter_context(_bar(batches, progress)) if progress else None
        replicas = stack.enter_context(replica_context)
        with torch.no_grad():
            replicas.prepare(range(len(devices)))
        context = ThreadContext([*devices, output]) if threads_supported() else None
        # These end before the replicas are returned to the set, so no replica is still running then.
        threads = [stack.enter_context(executor(1 if context else 0)) for _ in devices]
        stack.callback(lambda: [future.cancel() for future in waiting])
        for number in count():
            i = number % len(devices)
            try:
                copies = Copies()
                batch = move_tree(next(source), devices[i], copies)
            except StopIteration:
                break
            except Exception as error:  # of the loader or of a copy; raised after the results of the batches before
                failure = error
                break
            note = f"in batch {number} of ReplicaSet.map, in replica {i} on {devices[i]}"
            work = partial(_run_batch, replicas, i, batch, copies, output)
            waiting.append(threads[i].submit(run_with_note, work, devices[i], context, note))
            if len(waiting) >= len(devices) * (1 + ahead):
                yield _next(waiting, bar)
        while waiting:
            yield _next(waiting, bar)
    if failure is not None:
        raise failure


@torch.no_grad()
def _run_batch(replicas: Replicas, i: int, batch: Any, arriving: Copies, output: torch.device) -> Any:
    arriving.join()
    result = replicas.call(i, lambda module: _call(module, batch))
    leaving = Copies()
    moved = move_tree(result, output, leaving)
    leaving.join()
    return moved


def _call(module: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return module(**batch)
    return module(*batch) if isinstance(batch, tuple | list) else module(batch)


def _next(waiting: deque[Future[Any]], bar: Any) -> Any:
    result = waiting.popleft().result()
    if bar is not None:
        bar.update()
    return result


def _bar(batches: Iterable[Any], progress: bool | str) -> Any:
    try:
        from tqdm.auto import tqdm  # type: ignore[import-untyped]
    except ImportError as error:
        raise ImportError("ReplicaSet.map: progress needs tqdm: pip install tqdm") from error
    text = progress if isinstance(progress, str) else None
    return tqdm(total=len(batches) if isinstance(batches, Sized) else None, desc=text, unit="batch")

"""simulate_rank: what one rank of many does on a GPU, counted in one process without a GPU."""

import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from unisono.collectives.checks import validate_choice
from unisono.collectives.groups import is_fake_group
from unisono.collectives.ledger.autograd_engine import PythonEngine
from unisono.collectives.ledger.distributed_data_parallel import simulated_ddp
from unisono.collectives.ledger.fake_device import HostCalls, fake_cuda, fake_tensor_mode, tolist_of
from unisono.collectives.ledger.ledger import Ledger, OnSync, counting


@contextmanager
def simulate_rank(
    world_size: int,
    rank: int = 0,
    *,
    device: Literal["cuda", "cpu"] = "cuda",
    host_syncs: OnSync = "count",
    device_memory: int = 80 << 30,
    device_capability: tuple[int, int] = (9, 0),
    devices_per_host: int = 8,
) -> Iterator[Ledger]:
    """Run the code inside as rank `rank` of `world_size`, on a GPU and with ranks that are not there, and count what it costs.

    Tensors inside are fake: they have a device, a dtype and a shape, and no data. Collectives return at once. Everything else
    is real code, also of other libraries: models, `loss.backward()`, `torch.autograd.grad`, optimizers, autocast, GradScaler,
    checkpointing, DistributedDataParallel, FSDP2. What torch.compile compiled runs as it was written. A value that the code
    reads from the device is 1 or True, and selections by data (nonzero, unique, a boolean index) select everything. A model
    that was built before may be moved inside by `.cuda()`; it stays fake.

    Arguments:
        device: "cuda", or "cpu" to compare with a real run on CPUs.
        host_syncs: "raise" raises HostSyncError at the first call that makes the CPU wait for the device.
        device_memory, device_capability, devices_per_host: what torch.cuda says about the device.

    Example:
        >>> import torch
        >>> from unisono.collectives import all_gather, simulate_rank
        >>> with simulate_rank(world_size=256, rank=3) as ledger:
        ...     x = torch.randn(64, 512, device="cuda", requires_grad=True)
        ...     loss = (x @ all_gather(x, sizes=[64] * 256).T).logsumexp(dim=1).mean()
        ...     loss.backward()
        >>> ledger.collectives["all_gather"].calls, ledger.collectives["reduce_scatter"].calls
        (1, 1)
        >>> ledger.flops  # one product forward, two backward
        {torch.float32: 3221225472}
        >>> ledger.host_syncs
        []
    """
    validate_choice("simulate_rank", "device", device, ("cuda", "cpu"))
    validate_choice("simulate_rank", "host_syncs", host_syncs, ("count", "raise"))
    if not 0 <= rank < world_size:
        raise ValueError(f"simulate_rank: rank={rank} is not one of {world_size} ranks: it must be 0 to {world_size - 1}")
    if device == "cuda" and not torch.backends.cuda.is_built():
        raise RuntimeError('simulate_rank: device="cuda" needs a torch that is built with CUDA; take device="cpu"')
    ledger = Ledger(device, host_syncs=host_syncs)
    with ExitStack() as stack:
        stack.enter_context(_fake_group(world_size, rank))
        stack.enter_context(fake_tensor_mode())
        if device == "cuda":
            stack.enter_context(
                fake_cuda(ledger, rank=rank, devices=devices_per_host, memory=device_memory, capability=device_capability)
            )
            stack.enter_context(PythonEngine(ledger).use())
            stack.enter_context(mock.patch.object(dist, "get_backend", _nccl))  # code that asks goes NCCL's way
        stack.enter_context(HostCalls(ledger))
        stack.enter_context(mock.patch.object(FakeTensor, "tolist", tolist_of(ledger)))
        stack.enter_context(simulated_ddp(ledger))
        stack.enter_context(_without_compiler())
        stack.enter_context(counting(ledger, fake=True))
        yield ledger


@contextmanager
def _without_compiler() -> Iterator[None]:
    """Run compiled code as it was written: the compiler runs fake tensors of its own, and aborts the process on ours."""

    def compile(model: Any = None, **options: Any) -> Any:
        warnings.warn("simulate_rank: torch.compile is left out, so the kernels of the eager code are counted", stacklevel=2)
        return (lambda decorated: decorated) if model is None else model

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch, "compile", compile))
        if "torch._dynamo" in sys.modules:  # then something may be compiled already; otherwise the import would take seconds
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def _nccl(group: object = None) -> str:
    return "nccl"


@contextmanager
def _fake_group(world_size: int, rank: int) -> Iterator[None]:
    if dist.is_initialized():
        pg = dist.group.WORLD
        assert pg is not None
        if not is_fake_group(pg) or (pg.size(), pg.rank()) != (world_size, rank):
            raise RuntimeError(
                f"simulate_rank: torch.distributed is initialised already (rank {pg.rank()} of {pg.size()}, backend "
                f"{dist.get_backend()}); the simulation of rank {rank} of {world_size} needs its own: destroy that one first"
            )
        yield
        return
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()

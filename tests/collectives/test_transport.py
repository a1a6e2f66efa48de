"""How bytes travel: the CPU side group, small messages, devices that gloo cannot send from, and padding.

No GPU is needed: "cuda:gloo" is a group without a CPU backend, and a gloo backend with another name takes the path of NCCL.
"""

import os
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore
from torch.distributed.distributed_c10d import ProcessGroup
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.dataparallel import pretend_device
from unisono.collectives import (
    MismatchError,
    Ring,
    all_gather,
    all_reduce,
    count_bytes,
    exchange_sizes,
    gather,
    reduce_scatter,
    shift,
)
from unisono.collectives.groups import _make_side_group, backend_for, cpu_side_group, small_message_device
from unisono.collectives.padding import is_padded
from unisono.collectives.small_messages import _all_gather_rounds
from unisono.collectives.testing import run_ranks


def without_cpu_backend(seconds: float = 40, ranks: list[int] | None = None) -> Any:
    return dist.new_group(ranks, backend="cuda:gloo", timeout=timedelta(seconds=seconds))


def exchanges_on_the_side() -> tuple[int, ...]:
    group = without_cpu_backend()
    rank, size = dist.get_rank(), dist.get_world_size()
    assert small_message_device(group, None).type == "cpu"
    side = cpu_side_group(group)
    assert side is not None and side is cpu_side_group(group), "made once"
    assert (side.rank(), side.size()) == (rank, size) and group.group_name in side.group_desc
    assert side._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=40)
    x = torch.full((rank + 1,), float(rank), requires_grad=True)
    sizes = exchange_sizes(x, group=group)
    y = all_gather(x, group=group)  # CPU tensors travel over the side group
    assert y.tolist() == [float(r) for r in range(size) for _ in range(r + 1)]
    y.square().sum().backward()
    assert x.grad.tolist() == [2.0 * rank * size] * (rank + 1)
    assert all_reduce(torch.ones(1), group=group).item() == size
    with pytest.raises(MismatchError, match="the ranks disagree"):
        all_gather(torch.zeros(1, dtype=torch.int64 if rank else torch.int32), group=group)
    dist.destroy_process_group(group)
    return sizes


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_group_without_a_cpu_backend_gets_one_on_the_side(world_size):
    assert run_ranks(exchanges_on_the_side, world_size=world_size) == [tuple(range(1, world_size + 1))] * world_size


def alone_on_the_side() -> None:
    group = dist.new_group([dist.get_rank()], backend="cuda:gloo", use_local_synchronization=True)
    side = cpu_side_group(group)
    assert side is not None and (side.rank(), side.size()) == (0, 1)
    assert all_gather(torch.ones(2), group=group).tolist() == [1, 1]


def test_a_group_of_one_rank_gets_one_too():
    run_ranks(alone_on_the_side, world_size=2)


def only_members_make_it() -> None:
    """Neither the other ranks nor the names of groups that are made later know of the side group."""
    part = without_cpu_backend(ranks=[0, 2])
    if dist.get_rank() != 1:
        assert exchange_sizes(torch.zeros(dist.get_rank()), group=part) == (0, 2)
    later = dist.new_group([0, 1])
    if dist.get_rank() != 2:
        assert exchange_sizes(torch.zeros(1), group=later) == (1, 1)


def test_only_the_members_of_a_subgroup_make_its_side_group():
    run_ranks(only_members_make_it, world_size=3)


def the_same_store_again() -> None:
    """A store may outlive its group, as torchrun's does: the second side group does not find the addresses of the first."""
    group = without_cpu_backend()
    for _ in range(3):
        side = _make_side_group(group)
        assert side is not None
        side.barrier().wait()


def test_side_groups_can_be_made_again():
    run_ranks(the_same_store_again, world_size=2)


def one_rank_has_no_gloo() -> str:
    group = without_cpu_backend(seconds=5)
    if dist.get_rank() == 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "nowhere0"  # an interface that does not exist
    try:
        with pytest.warns(UserWarning, match="gloo could not connect its ranks") as caught:
            assert cpu_side_group(group) is None
    finally:
        os.environ.pop("GLOO_SOCKET_IFNAME", None)
    return str(caught[0].message)


def test_all_ranks_do_without_if_one_cannot_have_it():
    first, second = run_ranks(one_rank_has_no_gloo, world_size=2)
    assert "(rank 0: " in first and "nowhere0" in second


def bruck(size: int) -> list[list[list[int]]]:
    """The small all_gather of `size` ranks, each a thread of this process with a real gloo backend."""
    store = HashStore()
    results: list[Any] = [None] * size

    def one_rank(rank: int) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=60)
        options._devices = [dist.ProcessGroupGloo.create_default_device(lazy_init=True)]
        pg = ProcessGroup(PrefixStore("g", store), rank, size)
        pg._set_default_backend(ProcessGroup.BackendType.GLOO)
        backend = dist.ProcessGroupGloo(PrefixStore("b", store), rank, size, options)
        pg._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, backend)
        rounds = _all_gather_rounds(torch.tensor([rank, -rank]), pg)
        next(rounds)
        results[rank] = next(rounds).tolist()

    threads = [threading.Thread(target=one_rank, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 16, 18, 33])
def test_small_messages_of_any_number_of_ranks(size):
    assert bruck(size) == [[[rank, -rank] for rank in range(size)]] * size


class Plain(dist.ProcessGroupGloo):
    """gloo under another name: the path that NCCL takes, on real ranks, with real values."""

    def name(self) -> str:
        return "plain"


def plain_group() -> Any:
    if "PLAIN" not in dist.Backend._plugins:
        dist.Backend.register_backend("plain", Plain, devices=["cpu"])
    return dist.new_group(backend="plain")


def takes_nccls_path(sizes: list[int]) -> None:
    group, rank = plain_group(), dist.get_rank()
    assert is_padded(sizes, 24)
    whole = torch.arange(sum(sizes) * 3, dtype=torch.float64).view(-1, 3) + 1
    own = whole.split(sizes)[rank]
    x = own.clone().requires_grad_()
    y = all_gather(x, sizes=sizes, group=group)
    assert torch.equal(y, whole)
    y.backward((rank + 1) * whole)
    total = len(sizes) * (len(sizes) + 1) // 2
    assert torch.equal(x.grad, total * own)
    assert torch.equal(reduce_scatter(whole.to(torch.int16), sizes=sizes, group=group), len(sizes) * own.to(torch.int16))
    flags = all_gather(own > 5, sizes=sizes, group=group)  # a dtype that travels as bytes
    assert torch.equal(flags, whole > 5)
    complex_rows = torch.complex(whole, -whole)
    assert torch.equal(reduce_scatter(complex_rows, sizes=sizes, group=group), len(sizes) * torch.complex(own, -own))


@pytest.mark.parametrize("sizes", [[3, 3, 3, 3, 2, 2, 2, 2], [2, 3, 2, 3, 2, 3, 2, 3], [4, 4, 4, 4, 4, 4, 4, 0], [2] * 8])
def test_padded_parts_have_the_values_of_one_process(sizes):
    run_ranks(takes_nccls_path, sizes, world_size=8)


def moves_between_few() -> None:
    group, rank, size = plain_group(), dist.get_rank(), dist.get_world_size()
    xs = [torch.arange(r * 2.0).view(r, 2) + r for r in range(size)]
    x = xs[rank].clone().requires_grad_()
    assert torch.equal(shift(x, group=group), xs[rank - 1])
    assert torch.equal(shift(x, 0, group=group), x)
    y = gather(x, root=1, group=group)
    assert torch.equal(y, torch.cat(xs) if rank == 1 else y[:0])
    (y * 3).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 3))


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_point_to_point_has_the_values_of_one_process(world_size):
    run_ranks(moves_between_few, world_size=world_size)


def trees_are_merged() -> None:
    """torch merges the leaves, which have equal sizes, into one call."""
    group, rank, size = plain_group(), dist.get_rank(), dist.get_world_size()
    xs = [{name: torch.arange(2.0 * n).view(n, 2) + 10 * r for name, n in (("a", 2), ("b", 3))} for r in range(size)]
    whole = {name: torch.cat([x[name] for x in xs]) for name in xs[0]}
    leaves = {name: x.clone().requires_grad_() for name, x in xs[rank].items()}
    with count_bytes() as traffic:
        gathered = all_gather(leaves, sizes="equal", group=group)
    assert all(torch.equal(gathered[name], whole[name]) for name in whole)
    assert traffic.by_op["all_gather"].calls == 1, traffic
    with count_bytes() as traffic:
        sum((rank + 1) * (y**2).sum() for y in gathered.values()).backward()
    assert traffic.by_op["reduce_scatter"].calls == 1, traffic
    for name, x in leaves.items():
        assert torch.equal(x.grad, size * (size + 1) * xs[rank][name])
    totals = all_reduce([leaves["a"], leaves["b"]], group=group)
    assert torch.equal(totals[1], sum(x["b"] for x in xs))


def is_plain() -> bool:
    return backend_for(torch.device("cpu"), plain_group()) == "plain"


@pytest.mark.parametrize("world_size", [2, 3])
def test_fused_trees_have_the_values_of_one_process(world_size):
    if not all(run_ranks(is_plain, world_size=world_size)):
        pytest.skip("this torch does not ask a backend that is a subclass of gloo's for its name")
    run_ranks(trees_are_merged, world_size=world_size)


def test_padding_is_chosen_by_what_all_ranks_know():
    assert is_padded([10] * 32 + [9] * 32, 4096)
    assert not is_padded([10, 9], 4096), "few ranks: two broadcasts"
    assert not is_padded([100] + [1] * 63, 4096), "skewed: most of it would be padding"
    assert not is_padded([2000] * 32 + [1000] * 32, 1 << 14), "large: the padding takes longer than the broadcasts"


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="fake CUDA tensors need a torch built with CUDA")
def test_kernels_and_dtypes_of_a_padded_gather():
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Ops(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[tuple[str, Any]] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            tensors = [a for a in args if isinstance(a, torch.Tensor)]
            self.seen.append((func._schema.name, tensors[0].dtype if tensors else None))
            return func(*args, **(kwargs or {}))

    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=1024)
    try:
        for sizes in ([8] * 500 + [7] * 524, [8 - r % 2 for r in range(1024)]):
            with FakeTensorMode(), Ops() as ops, count_bytes() as traffic:
                x = torch.empty(sizes[3], 512, dtype=torch.bfloat16, device="cuda")
                ops.seen.clear()
                all_gather(x, sizes=sizes)
            assert traffic.by_op["all_gather"].calls == 1
            views = ("aten::view", "aten::split_with_sizes", "aten::slice", "aten::alias", "aten::detach")
            work = [name for name, _ in ops.seen if name.startswith("aten") and name not in views and "empty" not in name]
            assert len(work) <= 4, work  # zeros and a copy for a short part, and one that removes the padding
            sent = [dtype for name, dtype in ops.seen if name.startswith("c10d")]
            assert sent == [torch.bfloat16], "profilers see the dtype"
    finally:
        dist.destroy_process_group()


def by_host_memory(rank: int, folder: str) -> None:
    """One rank of two, in a process of its own: the device must be loaded before the first backward."""
    pretend_device.load()
    pretend_device.set_available(True)
    dist.init_process_group(
        "pretend:gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2, timeout=timedelta(seconds=40)
    )
    sizes = [1, 2]
    xs = [torch.arange(2.0 * n).view(n, 2) + 10 * n for n in sizes]
    x = xs[rank].to("pretend:0").requires_grad_()
    y = all_gather(x)
    assert y.device.type == "pretend" and torch.equal(y.cpu(), torch.cat(xs))
    (y * (rank + 1)).sum().backward()
    assert torch.equal(x.grad.cpu(), torch.full_like(xs[rank], 3))
    assert torch.equal(shift(x.detach()).cpu(), xs[1 - rank])
    assert torch.equal(all_reduce(x.detach()[:1]).cpu(), xs[0] + xs[1][:1])
    ring = Ring([x.detach()])
    assert torch.equal(torch.cat([block.cpu() for _, (block,) in ring]), torch.cat([xs[rank], xs[1 - rank]]))
    dist.destroy_process_group()


def test_gloo_serves_other_devices_by_host_memory(tmp_path):
    try:
        pretend_device._built()
    except pretend_device.NoCompilerError as problem:
        pytest.skip(str(problem))
    torch.multiprocessing.spawn(by_host_memory, args=(str(tmp_path),), nprocs=2)

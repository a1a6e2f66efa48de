"""sync_gradients and GradientSync: the gradients of one process with the whole batch, and those of DDP."""

import copy
import gc
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from unisono.collectives import MismatchError, count_bytes, global_mean, simulate_rank
from unisono.collectives.testing import RankPool
from unisono.dataparallel import GradientSync, sync_gradients
from unisono.dataparallel.gradient_sync.buckets import _is_the_only_one

SPLITS = {1: (7,), 2: (5, 2), 3: (4, 0, 3), 4: (3, 0, 2, 2)}  # rows of each rank


def network(seed=0, width=3):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, width)).double()


def batch(rows, width=4):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def share(x, group=None):
    return x.split_with_sizes(SPLITS[dist.get_world_size(group)])[dist.get_rank(group)]


def parameter(*values, **options):
    return nn.Parameter(torch.tensor(values, dtype=torch.float64, **options))


def grads(parameters):
    return [None if p.grad is None else p.grad.clone() for p in parameters]


def close(found, wanted):
    for a, b in zip(found, wanted, strict=True):
        assert (a is None) == (b is None)
        if b is not None:
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


def obeys_the_law(reduce, bucket_bytes, in_half):
    group = dist.new_group([0, 1]) if in_half else None
    if in_half and dist.get_rank() > 1:
        return
    x = batch(7)
    alone = network()
    alone(x).square().sum(1).mean().backward()
    model = network()
    sync = GradientSync(model.parameters(), reduce=reduce, group=group, bucket_bytes=bucket_bytes)

    def backward():
        global_mean(model(share(x, group)).square().sum(1), grad_reduce=reduce, group=group).backward()

    def check():
        close(grads(model.parameters()), grads(alone.parameters()))
        model.zero_grad()

    backward()
    sync_gradients(model.parameters(), reduce=reduce, group=group, bucket_bytes=bucket_bytes)
    check()
    backward()
    sync()
    check()
    with sync.overlap():
        backward()
    check()
    if in_half:
        dist.destroy_process_group(group)


@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_sync_matches_one_process(ranks, world_size, reduce):
    for bucket_bytes in (25 * 2**20, 300, 1):
        ranks(obeys_the_law, reduce, bucket_bytes, False, world_size=world_size)
    if world_size == 3:
        ranks(obeys_the_law, reduce, 300, True, world_size=world_size)


def equals_ddp():
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        wrapped = DistributedDataParallel(network().to(dtype), bucket_cap_mb=0.0005)
        model = network().to(dtype)
        x = share(batch(7)).to(dtype)
        for step in range(2):
            wrapped.zero_grad()
            model.zero_grad()
            wrapped(x).square().sum().backward()
            model(x).square().sum().backward()
            sync_gradients(model.parameters())
            pairs = zip(grads(model.parameters()), grads(wrapped.parameters()), strict=True)
            tolerance = {} if dtype != torch.float64 else {"rtol": 1e-14, "atol": 0}
            for mine, ddps in pairs:
                torch.testing.assert_close(mine, ddps, **tolerance, msg=lambda m, step=step: f"step {step}: {m}")


def test_sync_equals_ddp(ranks):
    for world_size in (2, 3):
        ranks(equals_ddp, world_size=world_size)


def gan_step(discriminator, generator, noise, data, mean, after_d, after_g):
    """D's loss in two backward passes, then G's through D, which must not disturb D's next gradients."""
    d_optimizer, g_optimizer = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (discriminator, generator))
    for _ in range(2):
        d_optimizer.zero_grad()
        mean(discriminator(data).square().sum(1)).backward()
        mean((discriminator(generator(noise).detach()) - 1).square().sum(1)).backward()
        after_d()
        d_optimizer.step()
        g_optimizer.zero_grad()
        with after_g():
            mean(discriminator(generator(noise)).square().sum(1)).backward()
        g_optimizer.step()
    return [p.detach() for m in (discriminator, generator) for p in m.parameters()]


def trains_a_gan():
    noise, data = batch(7), batch(7).flip(0)
    wanted = gan_step(network(0, 1), network(1, 4), noise, data, torch.mean, lambda: None, nullcontext)
    discriminator, generator = network(0, 1), network(1, 4)
    of_d, of_g = GradientSync(discriminator.parameters()), GradientSync(generator.parameters())
    close(gan_step(discriminator, generator, share(noise), share(data), global_mean, of_d, of_g.overlap), wanted)


def test_several_backward_passes_of_a_gan(ranks):
    ranks(trains_a_gan, world_size=3)


def syncs(parameters, how, **options):
    """One sync by the function, or in a block that has learned to expect all the gradients."""
    if how == "function":
        return nullcontext(), lambda: sync_gradients(parameters, **options)
    sync = GradientSync(parameters, **options)
    for p in parameters:
        p.grad = torch.zeros_like(p)
    sync()
    for p in parameters:
        p.grad = None
    return sync.overlap(), lambda: None


def missing_gradients(how):
    """One parameter has a gradient on rank 1 only, one nowhere, one is frozen, one given twice, one of no elements."""
    rank, world = dist.get_rank(), dist.get_world_size()
    some, none, frozen, twice, empty, scalar = (
        parameter(1, 2),
        parameter(3),
        parameter(4),
        parameter(5),
        parameter(),
        parameter(6),
    )
    scalar.data = scalar.data.reshape(())
    block, after = syncs([some, none, frozen, twice, twice, empty, scalar], how, bucket_bytes=24)
    frozen.requires_grad_(False)
    with block:
        loss = (rank + 1) * (twice * twice).sum() + scalar * rank + empty.sum() * (rank == 0)
        (loss + (some * 6).sum() if rank == 1 else loss).backward()
        kept = twice.grad
    after()
    assert none.grad is None and frozen.grad is None and twice.grad is kept
    total = world * (world + 1) / 2
    close([some.grad, twice.grad], [parameter(6, 6) / world, parameter(10) * total / world])
    assert scalar.grad.shape == () and scalar.grad.item() == pytest.approx((world - 1) / 2) and empty.grad.shape == (0,)


@pytest.mark.parametrize("how", ["function", "overlap"])
def test_missing_shared_and_frozen_parameters(ranks, how):
    for world_size in (2, 3):
        ranks(missing_gradients, how, world_size=world_size)


def rows_of(rank, rows):
    """A gradient that is not coalesced where `rows` has one twice."""
    values = torch.arange(2.0 * len(rows), dtype=torch.float64).view(-1, 2) + rank
    indices = torch.tensor([rows], dtype=torch.int64)
    return torch.sparse_coo_tensor(indices, values, (5, 2), check_invariants=True)


def sparse_gradients(how, reduce):
    """By parameter: sparse on all; on rank 0 only; sparse on rank 0 and dense elsewhere; other sparse dimensions on rank 0."""
    rank, world = dist.get_rank(), dist.get_world_size()
    parameters = [nn.Parameter(torch.zeros(5, 2, dtype=torch.float64)) for _ in range(4)]
    block, after = syncs(parameters, how, reduce=reduce)
    local = [rows_of(rank, rows) for rows in ([0, rank, 4], [1, 1] if rank == 0 else [], [2, rank], [3])]
    with block:
        parameters[0].grad = kept = local[0].clone()
        parameters[1].grad = local[1].clone() if rank == 0 else None
        parameters[2].grad = local[2].clone() if rank == 0 else local[2].to_dense()
        parameters[3].grad = local[3].to_dense().to_sparse(1 + (rank == 0))
    after()
    for place, p in enumerate(parameters):
        wanted = local[place].to_dense() / (world if reduce == "mean" else 1)
        dist.all_reduce(wanted)
        assert p.grad.is_sparse == (place < 2)
        torch.testing.assert_close(p.grad.to_dense(), wanted, rtol=1e-13, atol=0)
    first = parameters[0].grad
    assert first is kept and first.is_coalesced() and parameters[1].grad.is_coalesced()
    return first.indices().tolist(), first.values().tolist()


@pytest.mark.parametrize("how", ["function", "overlap"])
def test_sparse_gradients(ranks, how):
    for world_size, reduce in ((2, "mean"), (3, "sum")):
        results = ranks(sparse_gradients, how, reduce, world_size=world_size)
        assert all(result == results[0] for result in results)


def embedding_trains():
    torch.manual_seed(0)
    alone = nn.Embedding(9, 3, sparse=True, dtype=torch.float64)
    model = copy.deepcopy(alone)
    ids = torch.tensor([1, 1, 8, 0, 3, 3, 3])
    alone(ids).square().mean().backward()
    sync = GradientSync(model.parameters())
    for step in range(3):
        model.zero_grad()
        with sync.overlap() if step else nullcontext():
            global_mean(model(share(ids)).square()).backward()
        with count_bytes() as traffic:
            sync() if step == 0 else None
        assert "all_reduce" not in traffic.by_op, "only the touched rows travel"
        close([model.weight.grad.to_dense()], [alone.weight.grad.to_dense()])


def test_sparse_embedding_matches_one_process(ranks):
    ranks(embedding_trains, world_size=3)


def odd_layouts(how):
    """Other dtypes and strides; large ones go without a copy where they can."""
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(rank)

    def draw(*shape, dtype=torch.float64):
        return torch.randn(*shape, dtype=dtype, generator=generator)

    made = {
        "float32": draw(3, dtype=torch.float32),
        "bfloat16": draw(4, dtype=torch.bfloat16),
        "complex": draw(2, 3, dtype=torch.complex128),
        "conjugate": draw(2, 2, dtype=torch.complex64).conj(),
        "transposed": draw(3, 2).t(),
        "channels": draw(2, 3, 2, 2).contiguous(memory_format=torch.channels_last),
        "expanded": draw(3, 1).expand(3, 4),
        "sliced": draw(3, 8)[:, ::2],
        "large": draw(200, 100),
        "large complex": draw(200, 100, dtype=torch.complex64),
        "large transposed": draw(200, 100).t() if rank == 0 else draw(100, 200),
    }
    parameters = [nn.Parameter(torch.zeros(g.shape, dtype=g.dtype)) for g in made.values()]
    wanted = []
    for g in made.values():
        parts = [torch.empty(g.shape, dtype=g.dtype) for _ in range(world)]
        dist.all_gather(parts, g.contiguous().resolve_conj())
        wanted.append(sum(part / world for part in parts))
    block, after = syncs(parameters, how, bucket_bytes=200)
    with block:
        for p, g in zip(parameters, made.values(), strict=True):
            p.grad = g
    after()
    for (name, g), p, mean in zip(made.items(), parameters, wanted, strict=True):
        # sums of numbers near 1 that may cancel: what counts is the error against those, not against the sum
        near = {torch.bfloat16: 2e-2, torch.float32: 1e-6, torch.complex64: 1e-6}.get(p.dtype, 1e-14)
        torch.testing.assert_close(p.grad, mean, rtol=near, atol=near, msg=lambda m, name=name: f"{name}: {m}")
        assert (p.grad is g) == (name != "expanded"), name
    assert made["channels"].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("how", ["function", "overlap"])
def test_dtypes_and_layouts(ranks, how):
    ranks(odd_layouts, how, world_size=3)


def adds_shared_memory_once():
    """Under "sum" a gradient that is read after its alias was written would count again."""
    parameters = [nn.Parameter(torch.zeros(3, dtype=torch.float64)) for _ in range(9)]
    memory = torch.ones(3, dtype=torch.float64)
    for p in parameters:
        p.grad = memory
    sync_gradients(parameters, reduce="sum", bucket_bytes=1)
    assert memory.tolist() == [2.0] * 3


def joined_on_one_rank():
    """The backward of cat gives views of one tensor. A rank without them must send buckets of the same lengths."""
    p, q = (nn.Parameter(torch.ones(2**20)) for _ in "pq")
    if dist.get_rank() == 0:
        (torch.cat([p, q]) * torch.ones(2**21)).sum().backward()
        assert p.grad.untyped_storage().data_ptr() == q.grad.untyped_storage().data_ptr()
    sync_gradients([p, q], reduce="sum")
    assert (p.grad == 1).all() and (q.grad == 1).all()


def test_gradients_that_share_memory(ranks):
    ranks(adds_shared_memory_once, world_size=2)
    ranks(joined_on_one_rank, world_size=2)


def counts_and_reuses():
    parameters = [nn.Parameter(torch.zeros(100, dtype=torch.float64)) for _ in range(10)]
    parameters.append(nn.Parameter(torch.zeros(2**15, dtype=torch.float64)))
    sync = GradientSync(parameters, bucket_bytes=2400)

    def step(block, after):
        with count_bytes() as traffic:
            for p in parameters:
                p.grad = torch.ones_like(p)
            with block:
                pass
            after()
        assert traffic.by_op["all_reduce"].calls == 5, "three of 800 bytes in a bucket, and a large one alone"
        return sorted(buffer.data_ptr() for buffer in sync._buffers.tensors.values())

    first = step(nullcontext(), sync)
    assert len(first) == 3 and sum(buffer.numel() for buffer in sync._buffers.tensors.values()) == 900
    assert step(nullcontext(), sync) == first
    third = step(sync.overlap(), lambda: None)
    assert set(first) < set(third) and step(sync.overlap(), lambda: None) == third == step(nullcontext(), sync)


def test_buckets_are_filled_and_reused(ranks):
    ranks(counts_and_reuses, world_size=2)


def leaves_during_backward():
    """When the first parameter's gradient arrives, the last of backward, the other buckets have left."""
    rank = dist.get_rank()
    model, alone = network(), network()
    sync = GradientSync(model.parameters(), bucket_bytes=1)
    seen = []
    for step in range(3):
        model.zero_grad()
        with count_bytes() as traffic, sync.overlap():
            hook = next(model.parameters()).register_hook(lambda _, ops=traffic.by_op: seen.append("all_reduce" in ops))
            model(batch(7) * (rank + step)).square().sum().backward()
            hook.remove()
        assert traffic.by_op["all_reduce"].calls == 6
    assert seen == [False, True, True], "learned from the first block"
    alone(batch(7) * (rank + 2)).square().sum().backward()
    sync_gradients(alone.parameters())
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), alone.parameters(), strict=True))
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_overlap_leaves_during_backward(ranks):
    ranks(leaves_during_backward, world_size=2)


def overlap_cases():
    """Other orders on each rank, threads, an earlier pass, a second one, gradients that are replaced or removed."""
    rank, world = dist.get_rank(), dist.get_world_size()
    parameters = [parameter(1.0 + i) for i in range(6)]
    sync = GradientSync(parameters, bucket_bytes=8)

    def pass_over(order, factor=1.0):
        for i in order:
            (parameters[i] * factor * (rank + 1) * (i + 1)).sum().backward()

    def check(factors):
        mean = (world + 1) / 2
        for i, (p, factor) in enumerate(zip(parameters, factors, strict=True)):
            assert p.grad is None if factor is None else p.grad.item() == pytest.approx(factor * mean * (i + 1))
            p.grad = None

    order = list(range(6))
    for turn in range(2):
        with count_bytes() as traffic, sync.overlap():
            pass_over(order if rank == turn else order[::-1])
        assert traffic.by_op["all_reduce"].calls == 6, "none was sent before it was complete, and then again"
        check([1] * 6)
    with sync.overlap(), ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: pass_over([i]), order))
    check([1] * 6)
    pass_over(order, 0.5)
    with sync.overlap():
        pass_over(order)
    check([1.5] * 6)
    with sync.overlap():
        pass_over(order[::-1])
        pass_over(order if rank else order[1:])
        if rank == 0:
            pass_over([0])
    check([2] * 6)
    with sync.overlap():
        pass_over(order[::-1])
        parameters[5].grad.mul_(3)
        parameters[4].grad = parameters[4].grad * 4
        parameters[3].grad = None
    check([1, 1, 1, None, 4, 3])
    with sync.overlap():  # parameters[3] is no longer expected: it goes when the block is left
        pass_over(order)
    check([1] * 6)


def test_overlap_is_right_in_every_order(ranks):
    for world_size in (2, 3):
        ranks(overlap_cases, world_size=world_size)


def sends_when_complete():
    """A bucket leaves when its last gradient comes, whichever that is: here others than in the step before."""
    parameters = [parameter(1.0 + i) for i in range(4)]
    sync = GradientSync(parameters, bucket_bytes=24)  # [3, 2, 1], and [0], which leaves at the end of the block
    sent = []
    for order in ((3, 2, 1, 0), (3, 2, 1, 0), (1, 3, 2, 0), (1, 2, 3, 0), (2, 3, 1, 0)):
        for p in parameters:
            p.grad = None
        with count_bytes() as traffic, sync.overlap():
            hooks = sum(len(p._post_accumulate_grad_hooks or ()) for p in parameters)
            for i in order:
                sent.append("all_reduce" in traffic.by_op)
                (parameters[i] * (i + 1.0) * (dist.get_rank() + 1)).sum().backward()
        assert [p.grad.item() for p in parameters] == [1.5, 3.0, 4.5, 6.0]
        assert hooks == (0 if len(sent) == 4 else 2), "one for each bucket, after the first block"
    assert sent == [False] * 4 + [False, False, False, True] * 4


def test_overlap_sends_a_bucket_when_its_last_gradient_comes(ranks):
    ranks(sends_when_complete, world_size=2)


def asks_once():
    """A block has one survey. A second one follows on all ranks if the gradients of any rank are not as expected."""
    rank, world = dist.get_rank(), dist.get_world_size()
    parameters = [parameter(1.0 + i) for i in range(3)]
    rest = parameter(9.0)
    sync = GradientSync([*parameters, rest], bucket_bytes=16)
    surveys = []
    start = sync._start_survey
    sync._start_survey = lambda step, *args: (surveys.append(step.split(",")[0]), start(step, *args))[1]

    def block(change, factors):
        surveys.clear()
        for p in (*parameters, rest):
            p.grad = None
        with sync.overlap():
            sum(p * (rank + 1) for p in parameters).sum().backward()
            if rank == world - 1:
                change()
        mean = (world + 1) / 2
        assert [p.grad.item() for p in parameters] == pytest.approx([mean + extra / world for extra in factors])
        return list(surveys)

    nothing = [0.0] * 3
    both = ["overlap", "end of overlap"]
    assert block(lambda: None, nothing) == both, "the first block expects nothing yet"
    assert block(lambda: None, nothing) == ["overlap"] and rest.grad is None
    assert block(lambda: parameters[2].grad.add_(6), [0, 0, 6]) == both, "late, in a bucket that was sent"
    assert block(lambda: parameters[0].grad.add_(6), [6, 0, 0]) == ["overlap"], "in the bucket that leaves last"
    assert block(lambda: setattr(parameters[1], "grad", None), [0, -world, 0]) == both
    assert block(lambda: rest.sum().backward(), nothing) == both and rest.grad.item() == 1 / world
    assert block(lambda: None, nothing) == both, "rest is expected now, and missing on all ranks"
    assert rest.grad is None
    assert block(lambda: None, nothing) == ["overlap"]


def test_overlap_asks_a_second_time_only_if_gradients_are_unexpected(ranks):
    for world_size in (2, 3):
        ranks(asks_once, world_size=world_size)


def large_gradients(how):
    """They are reduced in their own memory, or exchange it with the bucket. What others know of that memory stays right."""
    rank = dist.get_rank()
    large, small, other = (nn.Parameter(torch.zeros(n)) for n in (2**20, 5, 2**20))
    sync = GradientSync([small, large, other])
    kept, seen = [], {}

    def alias(p):
        if p.grad is not None and len(kept) in seen:
            seen[len(kept)] = p.grad.numpy() if len(kept) == 1 else p.grad[:3] if len(kept) == 2 else p.grad

    for step in range(5):
        for p in (large, small, other):
            p.grad = None
        seen[step] = None
        with sync.overlap() if how == "overlap" else nullcontext():
            ((large.sum() + other.sum()) * (rank + step) + small.sum() * rank).backward()
            alias(large)
        if how == "call":
            sync()
        assert (large.grad == 0.5 + step).all() and (other.grad == 0.5 + step).all() and (small.grad == 0.5).all()
        assert seen[step] is None or float(seen[step][0]) == 0.5 + step, "an alias sees the mean"
        kept.append(large.grad)
        assert [float(grad[-1]) for grad in kept] == [0.5 + k for k in range(step + 1)], "a gradient that is kept stays"
        users = torch._C._storage_Use_Count(other.grad.untyped_storage()._cdata)
        assert users == 2, "p.grad and the storage here: nothing else holds the memory when p.grad is set to None"
    assert large.grad.untyped_storage().nbytes() == 2**22


@pytest.mark.parametrize("how", ["call", "overlap"])
def test_large_gradients_are_not_copied_back(ranks, how):
    ranks(large_gradients, how, world_size=2)


@pytest.mark.parametrize(
    "know", [Tensor.numpy, Tensor.detach, Tensor.untyped_storage, Tensor.share_memory_, lambda grad: grad[:2], torch.to_dlpack]
)
def test_memory_that_others_know_is_not_exchanged(know):
    p = nn.Parameter(torch.zeros(4))
    p.grad = torch.ones(4)
    assert _is_the_only_one(p.grad)
    known = know(p.grad)
    assert not _is_the_only_one(p.grad), known


def raises_inside():
    p, q = parameter(1.0), parameter(2.0)
    sync = GradientSync([p, q], bucket_bytes=8)
    for fails in (False, True, False):
        p.grad = q.grad = None
        with pytest.raises(ZeroDivisionError) if fails else nullcontext(), sync.overlap():
            (p * q * (dist.get_rank() + 1)).sum().backward()
            with pytest.raises(RuntimeError, match="inside its own overlap"):
                sync()
            if fails:
                raise ZeroDivisionError
        assert not p._post_accumulate_grad_hooks
        assert p.grad.item() == (2.0 * (dist.get_rank() + 1) if fails else 3.0)


def test_an_error_inside_overlap_propagates(ranks):
    ranks(raises_inside, world_size=2)


def raises_here_sooner_than_there():
    """On one rank a bucket has left, on the other none: the next sync would take the old one for a new one."""
    p, q = parameter(1.0), parameter(2.0)
    sync = GradientSync([p, q], bucket_bytes=8, group=dist.new_group(timeout=timedelta(seconds=20)))
    (p * q).sum().backward()
    sync()
    with suppress(ZeroDivisionError), sync.overlap():
        if dist.get_rank() == 0:
            (p * q * 1000).sum().backward()  # the last bucket waits for the end of the block
        raise ZeroDivisionError
    with pytest.raises(MismatchError, match=r"after blocks that raised when 1 buckets had been sent"):
        sync()


def test_blocks_that_raise_at_different_places_are_noticed():
    with RankPool(2) as pool:  # of their own: a bucket is on its way for ever
        pool.run(raises_here_sooner_than_there)


def lets_go_and_outlives_a_mode():
    large, small = nn.Parameter(torch.zeros(2**16)), parameter(1.0)
    sync = GradientSync([large, small])
    for mode in (torch.inference_mode, nullcontext):
        large.grad, small.grad = torch.full_like(large, dist.get_rank()), torch.ones_like(small) if dist.get_rank() else None
        with mode():
            sync()
        assert large.grad[0] == 0.5 and small.grad == 0.5 and not small.grad.is_inference()
    gone = weakref.ref(large.grad)
    large.grad = None
    gc.collect()
    assert gone() is None  # zero_grad() frees what it should


def test_nothing_is_kept_of_gradients_or_of_modes(ranks):
    ranks(lets_go_and_outlives_a_mode, world_size=2)


class NotATensor:
    pass


def rejects():
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    table = nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]))

    def fails(words, parameters, error=MismatchError, **options):
        parameters = list(parameters)
        before = grads(p for p in parameters if isinstance(p, nn.Parameter))
        for sync in (
            lambda: sync_gradients(parameters, **options),
            GradientSync(parameters, **options),
            lambda: GradientSync(parameters, **options).overlap().__enter__(),
        ):
            with pytest.raises(error, match=words) as caught:
                sync()
            texts = [None] * dist.get_world_size()
            dist.all_gather_object(texts, str(caught.value).split(" at ")[0])
            assert len(set(texts)) == 1, texts
        for old, new in zip(before, grads(p for p in parameters if isinstance(p, nn.Parameter)), strict=True):
            assert old is new is None or torch.equal(old, new)

    def ready(*shape, dtype=torch.float64):
        p = nn.Parameter(torch.ones(shape, dtype=dtype))
        p.grad = torch.full(shape, rank + 1.0, dtype=dtype)
        return p

    fails(r"(?s)the ranks disagree.*float64\[2\].*float64\[3\]", [ready(4), ready(2 + (rank == 1))])
    fails(r"(?s)sync of 2 parameters|overlap.* of 2 parameters", [ready(1)] * 1 + [ready(1)] * (rank == 0))
    fails("reduce='mean'", [ready(2)], reduce="mean" if rank else "sum")
    fails("bucket_bytes=7", [ready(2)], bucket_bytes=7 + rank)
    fails("float32", [ready(2, dtype=torch.float32 if rank else torch.float64)])
    fails("must be 'mean' or 'sum', got 'avg'", [ready(2)], reduce="avg" if rank else "mean")
    fails("positive int, got 0", [ready(2)], bucket_bytes=0)
    fails(r"parameters\[1\]: expected a Tensor, got NotATensor", [ready(2)] + [NotATensor()] * rank)
    fails("lazy module", [ready(2), nn.UninitializedParameter()])
    fails("not a leaf", [ready(2) * 1])
    fails("cannot be reduced", [nn.Parameter(torch.ones(2).to(torch.float8_e4m3fn))])
    fails("none for a tensor on meta", [nn.Parameter(torch.ones(2, device="meta"))])
    fails(r"(?s)bad call on rank 1.*parameters\[1\] is a DTensor.*leave it out", [ready(2)] + [table] * rank, TypeError)
    resized, other = ready(2), ready(2)
    sync = GradientSync([resized, other])
    sync()
    other.grad = torch.full_like(other, rank)

    def resize_inside():
        with sync.overlap():
            other.grad += 10
            if rank == 0:
                resized.data, resized.grad = torch.ones(1, dtype=torch.float64), None
                resized.grad = torch.ones_like(resized)

    with pytest.raises(MismatchError, match=r"(?s)bad call on rank 0.*is float64\[2\].*its gradient is float64\[1\]"):
        resize_inside()
    assert other.grad.tolist() == [rank + 10.0] * 2


def test_a_bad_call_is_one_error_on_all_ranks(ranks):
    ranks(rejects, world_size=2)


def disagrees_after_agreeing():
    """Every GradientSync has learned its buckets, of different sizes: a rank that sent them at once would end the process."""
    rank = dist.get_rank()
    small = [parameter(1.0, 2.0)]
    large = [nn.Parameter(torch.ones(5000, dtype=torch.float64))]
    syncs = [GradientSync(small), GradientSync(large)]

    def backward():
        for p in (*small, *large):
            p.grad = None
            (p * (rank + 1)).sum().backward()

    def block(sync):
        with sync.overlap():
            backward()

    for sync in syncs:
        backward()
        sync()
    for mine in (syncs[rank], lambda: block(syncs[rank]), lambda: block(syncs[0]) if rank else syncs[0]()):
        backward()
        with pytest.raises(MismatchError, match="the ranks disagree"):
            mine()
        assert small[0].grad.tolist() == [rank + 1.0] * 2 and (large[0].grad == rank + 1).all()
    for sync in syncs:  # nothing was sent, so the group still works
        block(sync)
    backward()
    for sync in syncs:
        sync()
    assert small[0].grad.tolist() == [1.5] * 2 and (large[0].grad == 1.5).all()


def test_ranks_that_disagree_later_send_nothing(ranks):
    ranks(disagrees_after_agreeing, world_size=2)


def other_gradients_in_each_step():
    """The buckets that were filled for the gradients of the last step are not sent if some rank has others now."""
    rank, world = dist.get_rank(), dist.get_world_size()
    parameters = [nn.Parameter(torch.zeros(3, dtype=torch.float64)) for _ in range(5)]
    sync = GradientSync(parameters, bucket_bytes=48)
    everything = {0, 1, 2, 3, 4}
    steps = [everything, everything, {0, 1, 4}, {0, 1, 4}, {1, 2, 4}, set(), {3}, everything, everything]
    for overlaps in (False, True):
        for step, present in enumerate(steps):
            on_last_rank_only = {1, 3} if step % 2 else set()
            mine = present if rank == world - 1 else present - on_last_rank_only
            for place, p in enumerate(parameters):
                p.grad = None
                if place in mine and not overlaps:
                    p.grad = torch.full_like(p, (rank + 1.0) * (place + step + 1))
            if overlaps:
                with sync.overlap():
                    for place in sorted(mine, reverse=True):
                        (parameters[place] * (rank + 1.0) * (place + step + 1)).sum().backward()
            else:
                sync()
            for place, p in enumerate(parameters):
                if place not in present:
                    assert p.grad is None
                    continue
                total = world if place in on_last_rank_only else world * (world + 1) / 2
                close([p.grad], [torch.full((3,), total / world * (place + step + 1), dtype=torch.float64)])


def test_gradients_may_be_others_in_each_step(ranks, world_size):
    ranks(other_gradients_in_each_step, world_size=world_size)


def changes_between_calls():
    """Frozen, converted and moved parameters are noticed, and a gradient of the new kind is synced."""
    rank = dist.get_rank()
    p, q = parameter(1.0), parameter(2.0)
    sync = GradientSync([p, q])
    cases = [
        (torch.float64, False),
        (torch.float32, False),
        (torch.float32, True),
        (torch.bfloat16, True),
        (torch.float16, False),
    ]
    for overlaps in (False, True):
        for dtype, frozen in cases:
            for r in (p, q):
                r.data, r.grad = r.data.to(dtype), None
                r.grad = torch.full_like(r, rank + 1.0)
            q.requires_grad_(not frozen)
            with sync.overlap() if overlaps else nullcontext():
                pass
            if not overlaps:
                sync()
            assert p.grad.dtype == dtype and p.grad.item() == 1.5 and q.grad.item() == (rank + 1.0 if frozen else 1.5)


def test_parameters_may_change_between_calls(ranks):
    ranks(changes_between_calls, world_size=2)


def test_one_rank_checks_its_arguments_and_changes_nothing():
    p = parameter(1.0)
    p.grad = torch.tensor([3.0], dtype=torch.float64)
    sync_gradients(p)
    sync_gradients([])
    with GradientSync(p, reduce="sum").overlap():
        (p * 2).sum().backward()
    assert p.grad.item() == 5.0
    with pytest.raises(MismatchError, match="reduce must be 'mean' or 'sum', got 'avg'"):
        sync_gradients(p, reduce="avg")
    with pytest.raises(MismatchError, match="expected tensors, got NoneType"):
        sync_gradients(None)


@pytest.fixture
def fake_world() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=64)
    with FakeTensorMode():
        yield
    dist.destroy_process_group()


SIZES = [300, 2**20, 700, 2**22, 100, 2**22, 2**21, 2**19, 900, 2**21]  # of parameters: 54 MiB


def costs_of_a_step(how, world_size):
    with simulate_rank(world_size, 1) as ledger:
        model = nn.ParameterList(nn.Parameter(torch.empty(n, device="cuda")) for n in SIZES)
        sync = GradientSync(model.parameters(), compare_weights=False)
        wrapped = DistributedDataParallel(Sum(model)) if how == "DDP" else Sum(model)
        for _ in range(2):
            wrapped.zero_grad()
            loss = wrapped(torch.ones((), device="cuda"))
            with ledger.phase(f"step {_}"), sync.overlap() if how == "overlap" else nullcontext():
                loss.backward()
            with ledger.phase(f"sync {_}"):
                sync() if how == "call" else None
    return [ledger.phases["step 1"], ledger.phases["sync 1"]]


class Sum(nn.Module):
    def __init__(self, parameters):
        super().__init__()
        self.weights = parameters

    def forward(self, x):
        return sum((p * x).sum() for p in self.weights)


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="fake CUDA tensors need a torch built with CUDA")
@pytest.mark.parametrize("how", ["call", "overlap"])
def test_a_step_on_gpus_has_no_host_sync_and_no_more_kernels_and_collectives_than_ddp(how):
    kernels = set()
    for world_size in (8, 1024):
        ours, ddps = costs_of_a_step(how, world_size), costs_of_a_step("DDP", world_size)
        assert [part.host_syncs for part in ours] == [[], []]
        counts = [sum(part.collectives["all_reduce"].calls for part in costs if part.collectives) for costs in (ours, ddps)]
        assert counts[0] <= counts[1], counts
        kernels.add(sum(part.kernels for part in ours))
        assert max(kernels) <= sum(part.kernels for part in ddps)
        assert {op for part in ours for op in part.collectives} == {"all_reduce"}
    assert len(kernels) == 1, "they do not grow with the number of ranks"


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="fake CUDA tensors need a torch built with CUDA")
def test_placement_on_fake_cuda(fake_world):
    """Mixing devices, or reading a value from the GPU, raises on fake tensors."""
    devices = ["cuda:0", "cuda:1", "cpu", "cuda:0"]
    parameters = [nn.Parameter(torch.empty(2**15, device=device)) for device in devices]
    small = nn.Parameter(torch.empty(3, device="cuda:1"))
    for p in parameters:
        p.grad = torch.empty_like(p)
    sync = GradientSync([*parameters, small])
    kept = [p.grad for p in parameters]
    with count_bytes() as traffic:
        sync()
        small.grad = torch.empty_like(small)
        with sync.overlap():
            pass
    assert traffic.by_op["all_reduce"].calls == 3 + 3 + 1, "small is not expected in the block, and goes when it is left"
    assert [p.grad for p in parameters] == kept
    assert {str(device) for device, _, _ in sync._buffers.tensors} == {"cuda:0", "cuda:1"}, "alone on the CPU: no buffer"
    assert all(buffer.device == device for (device, _, _), buffer in sync._buffers.tensors.items())

"""Ranks that start from different weights are found by GradientSync, and made equal by broadcast_parameters."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from unisono.collectives import MismatchError, count_bytes
from unisono.dataparallel import GradientSync, SyncBatchNorm, broadcast_parameters, sync_gradients, weights
from unisono.dataparallel.weights import _checksums
from unisono.embedding import ShardedEmbedding, exclude_from_ddp


class Everything(nn.Module):
    """Parameters and buffers of many dtypes and shapes; shared, frozen, empty and None ones."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(3, 4)
        self.shared = self.first.weight
        self.narrow = nn.Parameter(torch.randn(5).bfloat16())
        self.imaginary = nn.Parameter(torch.randn(2, 2, dtype=torch.complex64))
        self.frozen = nn.Linear(4, 2).requires_grad_(False).double()
        self.empty = nn.Parameter(torch.randn(0, 3))
        self.scalar = nn.Parameter(torch.randn(()))
        self.norm = nn.BatchNorm2d(2)
        self.conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.register_buffer("mask", torch.rand(6) > 0.5)
        self.register_buffer("cache", torch.randn(4), persistent=False)
        self.register_buffer("nothing", None)


def bits(module):
    return [x.detach().clone() for x in (*module.parameters(), *module.buffers())]


def all_ranks_get_the_weights_of(root):
    rank = dist.get_rank()
    module = Everything(seed=rank)
    identities = [id(x) for x in (*module.parameters(), *module.buffers())]
    with count_bytes() as traffic:
        broadcast_parameters(module, root=root)
    expected = Everything(seed=root)
    assert all(torch.equal(a, b) for a, b in zip(bits(module), bits(expected), strict=True))
    assert identities == [id(x) for x in (*module.parameters(), *module.buffers())]
    assert module.conv.weight.is_contiguous(memory_format=torch.channels_last) and module.shared is module.first.weight
    assert traffic.by_op["broadcast"].calls <= 6, "one message for each dtype"


@pytest.mark.parametrize("root", [0, 2])
def test_all_ranks_get_the_weights_of_one(ranks, root):
    ranks(all_ranks_get_the_weights_of, root, world_size=3)


def tables_stay():
    rank = dist.get_rank()
    torch.manual_seed(0)
    plain = ShardedEmbedding(6, 2, plan="row", sparse=True)  # other rows on each rank, in plain tensors of one shape
    module = nn.Sequential(ShardedEmbedding(6, 2, plan="row"), ShardedEmbedding(4, 2, plan="table"), plain, nn.Linear(2, 2))
    tables = [module[k].full_weight() for k in range(3)]
    for marked in (module, exclude_from_ddp(module)):
        nn.init.constant_(module[3].weight, rank)
        broadcast_parameters(nn.Sequential(marked), root=1)
        assert all(torch.equal(module[k].full_weight(), tables[k]) for k in range(3))
        assert torch.equal(module[3].weight, torch.ones(2, 2))
    plain(torch.tensor([rank, 4])).sum().backward()
    for sync in (sync_gradients, lambda parameters: GradientSync(parameters)()):
        with pytest.raises(TypeError, match=r"(?s)bad call on ranks 0-1.*parameters\[0\] is a shard of a table.*leave it out"):
            sync(plain.parameters())
    alone = [dist.new_group([k]) for k in range(2)][rank]
    sync_gradients(plain.parameters(), group=alone)  # over another group than that of the table


def test_sharded_tables_stay_as_they_are(ranks):
    ranks(tables_stay, world_size=2)


def bad_broadcasts():
    rank = dist.get_rank()
    bad = {
        "expected a Module, got list": lambda: broadcast_parameters([]),
        "root=7 is not a rank": lambda: broadcast_parameters(nn.Linear(2, 2), root=7),
        r"weight float32\[2, 3\]": lambda: broadcast_parameters(nn.Linear(3, 2)),
        "is on the meta device": lambda: broadcast_parameters(nn.Linear(2, 2, device="meta")),
        "has no shape yet": lambda: broadcast_parameters(nn.LazyLinear(2)),
    }
    for words, call in bad.items():
        with pytest.raises(MismatchError, match=words):
            call() if rank == 1 else broadcast_parameters(nn.Linear(2, 2))
    broadcast_parameters(nn.Identity())


def test_a_bad_broadcast_is_one_error_on_all_ranks(ranks):
    ranks(bad_broadcasts, world_size=2)


def differ(overlap):
    for which in ("shared", "frozen.bias", "narrow", "imaginary"):
        differ_in(which, overlap)


def differ_in(which, overlap):
    """Ranks differ in one parameter only, trained or frozen."""
    rank = dist.get_rank()
    module = Everything(seed=0)
    place = [name for name, _ in module.named_parameters()].index(which)
    if rank == 1:
        with torch.no_grad():
            module.get_parameter(which).flatten()[0] += 1
    before = bits(module)
    module.first.bias.grad = torch.full((4,), float(rank))
    for _ in range(2):  # until someone makes them equal
        sync = GradientSync(module.parameters())
        with pytest.raises(MismatchError) as caught, sync.overlap() if overlap else torch.no_grad():
            sync() if not overlap else None
        assert f"parameters[{place}], " in str(caught.value) and "on rank 0 is not that on rank 1; 1 of" in str(caught.value)
        assert "broadcast_parameters(module)" in str(caught.value) and "compare_weights=False" in str(caught.value)
        assert module.first.bias.grad[0] == rank, "no gradient was touched"
    GradientSync(module.parameters(), compare_weights=False)()
    sync_gradients(module.parameters())
    assert module.first.bias.grad[0] == 0.5 and all(torch.equal(a, b) for a, b in zip(bits(module), before, strict=True))
    broadcast_parameters(module)
    sync()


@pytest.mark.parametrize("overlap", [False, True])
def test_different_weights_are_found_in_the_first_call(ranks, overlap):
    ranks(differ, overlap, world_size=2)


def costs_nothing_later():
    module = Everything(seed=0)
    sync, other = GradientSync(module.parameters()), GradientSync(copy.deepcopy(module).parameters(), compare_weights=False)
    sent = []
    for each in (sync, sync, sync, other):
        with count_bytes() as traffic:
            each()
        sent.append(traffic.sent)
    with torch.no_grad():
        module.scalar.fill_(dist.get_rank())
    sync()  # a later call does not look
    return sent


def test_later_calls_compare_nothing(ranks):
    for first, second, third, without in ranks(costs_nothing_later, world_size=2):
        assert first >= second == third == without


def one_rank_is_new():
    module = nn.Linear(2, 2)
    nn.init.zeros_(module.weight)
    nn.init.zeros_(module.bias)
    sync = GradientSync(module.parameters())
    sync()
    sync = GradientSync(module.parameters()) if dist.get_rank() == 1 else sync
    with pytest.raises(MismatchError, match="first sync of 2 parameters"):
        sync()


def test_a_first_call_on_one_rank_only_is_an_error(ranks):
    ranks(one_rank_is_new, world_size=2)


def test_the_checksum_sees_one_bit():
    module = SyncBatchNorm(3).double()
    before = _checksums([module.weight, module.bias])
    with torch.no_grad():
        module.bias[1] = -0.0
    after = _checksums([module.weight, module.bias])
    assert after[0] == before[0] and after[1] != before[1]
    assert _checksums([torch.zeros(2).to_sparse(), torch.zeros(0), torch.ones(2, dtype=torch.bool)]) == [0, 0, 1 + 3]


def test_the_checksum_sees_where_numbers_are(monkeypatch):
    monkeypatch.setattr(weights, "_CHUNK", 4)
    x = torch.randn(3, 5)
    swapped = [x.flatten().clone() for _ in range(2)]
    swapped[0][[1, 2]] = swapped[0][[2, 1]]  # within a chunk
    swapped[1][[1, 9]] = swapped[1][[9, 1]]  # between chunks
    ours, *others = _checksums([x, x.T.contiguous(), *swapped])
    assert ours not in others and len(set(others)) == 3
    assert _checksums([x.T.contiguous().T, x.clone()]) == [ours, ours], "strides do not count"

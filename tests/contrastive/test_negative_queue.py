"""NegativeQueue on any ranks holds the same keys as a list in one process that sees the whole batches."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from torch.nn.parallel import DistributedDataParallel

from tests.contrastive.bad_calls import error_of_a_bad_call
from unisono.collectives import all_gather, checked, count_bytes
from unisono.collectives.testing import run_ranks
from unisono.contrastive.clip import clip_loss
from unisono.contrastive.negative_queue import NegativeQueue

WIDTH = 3
PLACEMENTS = ["sharded", "replicated"]
BATCHES = [4, 0, 7, 1, 30, 5, 11, 2]  # rows of the whole batch, step by step: fewer than the queue has room for, and more


def rank_and_world() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def batch(step: int, rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(rows, WIDTH, generator=generator), torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator)


def split(rows: int, step: int, world: int) -> list[int]:
    """Rows of each rank: uneven, different at each step, and sometimes none."""
    cuts = sorted((rows * (7 * step + 5 * rank) % (rows + 1)) for rank in range(1, world))
    return [b - a for a, b in zip([0, *cuts], [*cuts, rows], strict=True)]


class PlainQueue:
    """The specification: a list of all keys, of which the last `size` count."""

    def __init__(self, size: int) -> None:
        self.size, self.keys, self.ids = size, torch.empty(0, WIDTH), torch.empty(0, dtype=torch.int64)

    def enqueue(self, keys: Tensor, ids: Tensor) -> None:
        self.keys, self.ids = torch.cat([self.keys, keys])[-self.size :], torch.cat([self.ids, ids])[-self.size :]


def step_both(queue: NegativeQueue, plain: PlainQueue, step: int, rows: int, sizes: list[int] | None = None) -> None:
    rank, world = rank_and_world()
    whole = batch(step, rows)
    plain.enqueue(*whole)
    keys, ids = (x.split(sizes or split(rows, step, world))[rank] for x in whole)
    queue.enqueue(keys.requires_grad_(), ids if queue.with_ids else None)


def same_content(queue: NegativeQueue, plain: PlainQueue) -> None:
    """Compare the keys in order, from the oldest to the newest."""
    assert len(queue) == len(plain.keys)
    oldest = queue._count % queue.size if len(queue) == queue.size else 0
    mine = queue.negatives()
    assert not mine.requires_grad
    assert torch.equal(all_gather(mine, group=queue.group).roll(-oldest, 0), plain.keys)
    if queue.with_ids:
        assert torch.equal(all_gather(queue.negative_ids(), group=queue.group).roll(-oldest, 0), plain.ids)


def evolves(size: int, placement: Any, with_ids: bool) -> int:
    queue, plain = NegativeQueue(size, WIDTH, placement=placement, with_ids=with_ids), PlainQueue(size)
    same_content(queue, plain)
    for step, rows in enumerate(BATCHES):
        step_both(queue, plain, step, rows)
        same_content(queue, plain)
    return sum(x.shape[0] for x in queue._stored.values()) // len(queue._stored)


@pytest.mark.parametrize("with_ids", [False, True])
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("size", [1, 3, 10, 16, 1000])
def test_queue_matches_one_process(ranks, world_size, size, placement, with_ids):
    stored = ranks(evolves, size, placement, with_ids, world_size=world_size)
    assert sum(stored) == size * (world_size if placement == "replicated" else 1)
    assert placement == "replicated" or max(stored) == -(-size // world_size)


def follows(size: int, placement: Any, splits: list[list[int]]) -> None:
    queue, plain = NegativeQueue(size, WIDTH, placement=placement, with_ids=True), PlainQueue(size)
    with checked():
        for step, sizes in enumerate(splits):
            step_both(queue, plain, step, sum(sizes), sizes)
            same_content(queue, plain)


@st.composite
def histories(draw: Any) -> tuple[int, str, list[list[int]]]:
    world = draw(st.integers(1, 4))
    sizes = st.lists(st.integers(0, 5), min_size=world, max_size=world)
    return draw(st.integers(1, 12)), draw(st.sampled_from(PLACEMENTS)), draw(st.lists(sizes, min_size=1, max_size=5))


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(history=histories())
def test_queue_with_any_history(history):
    run_ranks(follows, *history, world_size=len(history[2][0]))


def close(got: Tensor, expected: Tensor) -> None:
    assert torch.allclose(got, expected, rtol=1e-11, atol=1e-13)  # the first call of torch.testing takes seconds on every rank


def plain_loss(x: Tensor, y: Tensor, scale: Tensor, ids: Tensor, plain: PlainQueue, masked: bool) -> Tensor:
    logits = scale * x @ torch.cat([y, plain.keys.double()]).T
    if masked:
        same = ids.unsqueeze(1) == torch.cat([ids, plain.ids])
        same.fill_diagonal_(False)
        logits = logits.masked_fill(same, -torch.inf)
    return cross_entropy(logits, torch.arange(len(x)))


def trains(placement: Any, masked: bool, exchange: Any) -> None:
    rank, world = rank_and_world()
    queue = NegativeQueue(10, WIDTH, placement=placement, with_ids=masked, dtype=torch.float64)
    plain = PlainQueue(10)
    for step, rows in enumerate([6, 3, 8, 5]):
        sizes = split(rows, step, world)
        keys, ids = batch(step, rows)
        ids %= 4  # in the queue too
        whole = [normalize(keys.double(), dim=1), normalize(keys.double() ** 3, dim=1), torch.tensor(7.0).double()]
        whole = [x.requires_grad_() for x in whole]
        expected = plain_loss(*whole, ids, plain, masked)
        expected.backward()
        x, y, own_ids = (t.detach().split(sizes)[rank].clone() for t in (*whole[:2], ids))
        scale = whole[2].detach().clone().requires_grad_()
        more = {"ids": own_ids, "same_id": "masked", "negative_ids": queue.negative_ids()} if masked else {}
        loss = clip_loss(
            x.requires_grad_(),
            y.requires_grad_(),
            scale,
            direction="x_to_y",
            negatives=queue.negatives(),
            exchange=exchange,
            grad_reduce="sum",
            **more,
        )
        queue.enqueue(y, own_ids if masked else None)  # before the backward, as most training loops do
        plain.enqueue(whole[1].detach(), ids)
        loss.backward()
        close(loss, expected)
        close(x.grad, whole[0].grad.split(sizes)[rank])
        close(y.grad, whole[1].grad.split(sizes)[rank])
        close(scale.grad * world, whole[2].grad)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_loss_and_gradients_match_one_process(ranks, world_size, placement, masked):
    for exchange in ("gather", "ring"):
        ranks(trains, placement, masked, exchange, world_size=world_size)


class Model(nn.Module):
    def __init__(self, size: int, placement: Any) -> None:
        super().__init__()
        self.tower = nn.Linear(WIDTH, WIDTH)
        self.queue = NegativeQueue(size, WIDTH, placement=placement, with_ids=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.tower(x)


def replay(size: int, steps: int) -> PlainQueue:
    plain = PlainQueue(size)
    for step, rows in enumerate(BATCHES[:steps]):
        plain.enqueue(*batch(step, rows))
    return plain


def saves(folder: Path, size: int, placement: Any, steps: int, way: str) -> None:
    model, plain = Model(size, placement), PlainQueue(size)
    for step, rows in enumerate(BATCHES[:steps]):
        step_both(model.queue, plain, step, rows)
    if way == "checkpoint":
        import torch.distributed.checkpoint as dcp  # imported here because it takes seconds

        dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    else:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        if dist.get_rank() == 0:
            torch.save(state, folder / "whole.pt")


def loads(folder: Path, size: int, placement: Any, steps: int, way: str) -> None:
    model, plain = Model(size, placement), replay(size, steps)
    if way == "checkpoint":
        import torch.distributed.checkpoint as dcp

        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=folder)
        model.load_state_dict(state["model"])
    else:
        model.load_state_dict(torch.load(folder / "whole.pt"))
    same_content(model.queue, plain)
    for step, rows in enumerate(BATCHES[steps:], steps):
        step_both(model.queue, plain, step, rows)
        same_content(model.queue, plain)


@pytest.mark.parametrize("way", ["checkpoint", "whole"])
@pytest.mark.parametrize(
    ("size", "before", "after", "steps"),
    [
        (10, (3, "sharded"), (2, "sharded"), 6),
        (4, (2, "sharded"), (3, "sharded"), 3),  # 2, 2 keys become 2, 2, 0
        (10, (1, "sharded"), (3, "sharded"), 6),
        (10, (2, "replicated"), (3, "sharded"), 6),
        (10, (3, "sharded"), (2, "replicated"), 6),
        (10, (3, "replicated"), (2, "replicated"), 6),
        (10, (3, "sharded"), (2, "sharded"), 0),
        (20, (3, "sharded"), (2, "sharded"), 3),  # not yet full
    ],
)
def test_checkpoint_loads_on_other_ranks(ranks, tmp_path, size, before, after, steps, way):
    ranks(saves, tmp_path, size, before[1], steps, way, world_size=before[0])
    ranks(loads, tmp_path, size, after[1], steps, way, world_size=after[0])


def inside_ddp(placement: Any) -> None:
    model, plain = Model(10, placement), PlainQueue(10)
    ddp = DistributedDataParallel(model)
    for step, rows in enumerate(BATCHES):
        ddp(torch.ones(2, WIDTH)).sum().backward()
        step_both(model.queue, plain, step, rows)
        same_content(model.queue, plain)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_ddp_does_not_overwrite_the_shares(ranks, placement):
    ranks(inside_ddp, placement, world_size=2)


def in_subgroups(placement: Any) -> None:
    groups = [dist.new_group([0, 2]), dist.new_group([1])]
    which, rank = dist.get_rank() % 2, dist.get_rank() // 2
    queue, plain = NegativeQueue(7, WIDTH, placement=placement, group=groups[which]), PlainQueue(7)
    for step, rows in enumerate(BATCHES):
        keys, ids = batch(step + 100 * which, rows + which)
        plain.enqueue(keys, ids)
        queue.enqueue(keys.split(split(len(keys), step, 2 - which))[rank])
        same_content(queue, plain)
    twin = copy.deepcopy(queue)
    same_content(twin, plain)
    other = NegativeQueue(7, WIDTH, placement=placement, group=groups[which])
    other.load_state_dict(queue.state_dict())
    queue.enqueue(torch.ones(3, WIDTH))
    same_content(twin, plain)  # the copy has its own content
    same_content(other, plain)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_subgroup_and_deepcopy(ranks, placement):
    ranks(in_subgroups, placement, world_size=3)


def first_alone() -> None:
    """A queue that was filled on one rank is then split over several. The reverse needs a checkpoint."""
    everyone = dist.group.WORLD
    alone = [dist.new_group([r]) for r in range(dist.get_world_size())][dist.get_rank()]
    queue, plain = NegativeQueue(10, WIDTH, group=alone), PlainQueue(10)
    for step, rows in enumerate(BATCHES):
        plain.enqueue(*batch(step, rows))
        queue.enqueue(batch(step, rows)[0])
    queue.group = everyone
    same_content(queue, plain)
    queue.group = alone
    with pytest.raises(ValueError, match="NegativeQueue: the queue was filled on a number of ranks other than 1"):
        queue.negatives()
    with pytest.raises(ValueError, match="was sharded over other ranks"):
        NegativeQueue(10, WIDTH, group=alone).load_state_dict(NegativeQueue(10, WIDTH, group=everyone).state_dict())


def test_ranks_that_change(ranks):
    ranks(first_alone, world_size=3)


def sent(placement: Any) -> int:
    queue = NegativeQueue(64, 1000, placement=placement)
    with count_bytes() as traffic:
        queue.enqueue(torch.ones(4, 1000))
        queue.negatives()
    return traffic.sent


def test_sharded_keys_travel_once(ranks):
    own = 4 * 1000 * 4
    assert ranks(sent, "sharded", world_size=3)[2] < 1.1 * own
    assert 1.9 * own < ranks(sent, "replicated", world_size=3)[2] < 2.1 * own


# The tests below need one rank only, and run without a process group.


def test_negatives_are_a_copy():
    queue = NegativeQueue(4, WIDTH, with_ids=True)
    queue.enqueue(torch.ones(4, WIDTH), torch.arange(4))
    keys, ids = queue.negatives(), queue.negative_ids()
    queue.enqueue(torch.zeros(4, WIDTH), torch.zeros(4, dtype=torch.int32))
    assert torch.equal(keys, torch.ones(4, WIDTH)) and torch.equal(ids, torch.arange(4))


def test_moves_with_the_module():
    model = Model(4, "sharded")
    model.queue.enqueue(torch.full((3, WIDTH), 0.1), torch.tensor([2**62 + 1] * 3))
    model.to(torch.float64)
    assert model.queue.negatives().dtype == torch.float64 and model.queue.negative_ids().tolist() == [2**62 + 1] * 3
    assert model.to("meta").queue.negatives().device.type == "meta"


def test_a_queue_filled_in_inference_mode_can_be_used_outside():
    queue = NegativeQueue(4, WIDTH)
    with torch.inference_mode():
        queue.enqueue(torch.ones(3, WIDTH))
        loaded = NegativeQueue(4, WIDTH)
        loaded.load_state_dict(queue.state_dict())
    for each in (queue, loaded):
        each.enqueue(torch.zeros(2, WIDTH))
        assert each.negatives().sum() == 3 * WIDTH - WIDTH and len(each) == 4


def test_keys_are_stored_in_the_dtype_of_the_queue():
    queue = NegativeQueue(4, WIDTH, dtype=torch.bfloat16)
    queue.enqueue(torch.full((2, WIDTH), 0.1))
    assert torch.equal(queue.negatives(), torch.full((2, WIDTH), 0.1, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: NegativeQueue(0, 3), "size=0 must be a positive integer"),
        (lambda: NegativeQueue(3, 2.5), "width=2.5 must be a positive integer"),
        (lambda: NegativeQueue(3, 3, placement="spread"), "placement='spread' is not one of 'sharded', 'replicated'"),
        (lambda: NegativeQueue(3, 3).negative_ids(), "negative_ids: the queue was made with with_ids=False"),
        (lambda: NegativeQueue(3, 3).load_state_dict(NegativeQueue(4, 3).state_dict()), r"keys: expected shape \[3, 3\]"),
        (
            lambda: NegativeQueue(3, 3, with_ids=True).load_state_dict(NegativeQueue(3, 3).state_dict()),
            r"expected \['keys', 'ids', 'count'\], got \['keys', 'count'\]",
        ),
        (lambda: NegativeQueue(3, 3).enqueue(torch.ones(2, 3, device="meta")), r"are on \['cpu', 'meta'\]; move the queue"),
    ],
)
def test_rejects(make, message):
    with pytest.raises(ValueError, match=f"NegativeQueue.*{message}"):
        make()


def one_ahead(bad: int) -> None:
    queue = NegativeQueue(4, WIDTH)
    if bad:  # as after a checkpoint that only some ranks have loaded
        queue.load_state_dict(queue.state_dict() | {"_extra_state": queue.get_extra_state() | {"count": torch.tensor(1)}})
    queue.enqueue(torch.ones(2, WIDTH))


KEYS, IDS = torch.ones(2, WIDTH), torch.arange(2)
BAD: dict[str, tuple[Any, str]] = {
    "width": (lambda bad: NegativeQueue(4, 3).enqueue(KEYS[:, bad:]), "rank 1: keys: expected floating point keys of shape"),
    "kind": (lambda bad: NegativeQueue(4, 3).enqueue([KEYS, 3][bad]), "(rows, 3), got int"),
    "ids": (lambda bad: NegativeQueue(4, 3, with_ids=True).enqueue(KEYS, IDS[bad:]), "rank 1: ids: expected 2 integers"),
    "no ids": (lambda bad: NegativeQueue(4, 3, with_ids=True).enqueue(KEYS, [IDS, None][bad]), "got NoneType"),
    "more ids": (lambda bad: NegativeQueue(4, 3).enqueue(KEYS, [None, IDS][bad]), "with_ids=False"),
    "size": (lambda bad: NegativeQueue(4 + bad, 3).enqueue(KEYS), "size=5"),
    "content": (one_ahead, "1 so far"),
}


@pytest.mark.parametrize("name", BAD)
def test_rejects_on_all_ranks(ranks, name):
    messages = ranks(error_of_a_bad_call, __name__, name, world_size=3)
    assert len(set(messages)) == 1 and messages[0].startswith("NegativeQueue.enqueue: ")
    assert BAD[name][1] in messages[0], messages[0]

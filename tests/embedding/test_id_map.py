"""IdMap on any number of ranks does what plain dictionaries in one process do that see the whole batches."""

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from unisono.collectives import MismatchError, all_gather, checked, count_bytes
from unisono.collectives.testing import run_ranks
from unisono.embedding import IdMap, IdMapCollection, Ragged

GOLDEN_ROWS = [4, 1, 3, 5, 6, 2]
EVICTIONS = [None, "least_recent", "least_frequent"]


def shard_of(key: int, shards: int) -> int:
    """Hash with splitmix64, then divide the range of signed hashes into `shards` equal parts."""
    x = (key + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    x ^= x >> 31
    return ((x >> 32) ^ 2**31) * shards // 2**32


class PlainMap:
    """The reference: for each shard a dict from id to row and a list of candidates, with counts and last calls."""

    def __init__(self, capacity: int, *, threshold: int = 1, eviction: Any = None, candidates: int = 0, shards: int = 0):
        self.capacity, self.threshold, self.eviction, self.now = capacity, threshold, eviction, 0
        self.shards = min(shards or max(1, min(64, (capacity - 1) // 64)), capacity - 1)
        self.count: Counter[int] = Counter()
        self.last: dict[int, int] = {}
        self.rows: list[dict[int, int]] = [{} for _ in range(self.shards)]
        self.waiting: list[list[int | None]] = [[] for _ in range(self.shards)]
        self.remember(candidates or capacity - 1)

    def remember(self, candidates: int) -> None:
        for waiting in self.waiting if self.threshold > 1 else []:
            waiting += [None] * (-(-candidates // self.shards) - len(waiting))

    def row(self, key: int) -> int:
        return self.rows[shard_of(key, self.shards)].get(key, 0)

    def known(self) -> int:
        return sum(map(len, self.rows))

    def train(self, keys: list[int]) -> list[int]:
        """Count and admit `keys`; return the rows that were reassigned."""
        self.now += 1
        for key, n in Counter(keys).items():
            self.count[key] += n
            self.last[key] = self.now
        in_order = sorted(set(keys), key=lambda key: (-self.count[key], key))
        queues: list[list[int]] = [[] for _ in range(self.shards)]
        for key in in_order:
            if not self.row(key) and self.count[key] >= self.threshold:
                queues[shard_of(key, self.shards)].append(key)
        handed = self.admit(queues)
        for key in in_order:
            shard = shard_of(key, self.shards)
            if not self.row(key) and key not in self.waiting[shard]:
                place = self.choose(self.waiting[shard])
                if place is not None:
                    self.waiting[shard][place] = key
        remembered = {key for part in (*self.rows, *self.waiting) for key in part}
        for key in set(self.count) - remembered:
            del self.count[key], self.last[key]
        return sorted(handed)

    def admit(self, queues: list[list[int]]) -> list[int]:
        """Give rows to those that queue in each shard: free ones first, one after the other to the shard with the fewest."""
        grants, first = [0] * self.shards, 1 + self.known()
        for _ in range(self.capacity - first):
            left = [s for s in range(self.shards) if grants[s] < len(queues[s])]
            if left:
                grants[min(left, key=lambda s: (len(self.rows[s]) + grants[s], s))] += 1
        handed = []
        for shard, queue in enumerate(queues):
            for turn, key in enumerate(queue):
                if turn < grants[shard]:
                    row, first = first, first + 1
                else:
                    old = [k for k in self.rows[shard] if self.last[k] < self.now]
                    if not old or not self.eviction:
                        break
                    frequent = self.eviction == "least_frequent"
                    loser = min(old, key=lambda k: (self.count[k] * frequent, self.last[k], self.row(k)))
                    row = self.rows[shard].pop(loser)
                    handed.append(row)
                self.rows[shard][key] = row
                if key in self.waiting[shard]:
                    self.waiting[shard][self.waiting[shard].index(key)] = None
        return handed

    def choose(self, places: list[int | None]) -> int | None:
        if None in places:
            return places.index(None)
        old = [place for place, key in enumerate(places) if self.last[key] < self.now]
        return min(old, key=lambda place: (self.last[places[place]], place)) if old else None


def rank_and_world() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def batch(step: int) -> Tensor:
    """Draw few or many different ids, some of them huge; sometimes none."""
    generator = torch.Generator().manual_seed(step)
    numbers = (torch.rand(step * 37 % 90, generator=generator) ** 3 * [25, 120, 300][step % 3]).long()
    return numbers * (2**63 // 299) * (1 - 2 * (numbers % 2))


def split(rows: int, step: int, world: int) -> list[int]:
    """Split unevenly, in another way at each step, with empty ranks."""
    cuts = sorted((rows * (7 * step + 5 * rank) % (rows + 1)) for rank in range(1, world))
    return [b - a for a, b in zip([0, *cuts], [*cuts, rows], strict=True)]


def step_both(id_map: IdMap, plain: PlainMap, whole: Tensor, sizes: list[int]) -> None:
    rank, _ = rank_and_world()
    handed = plain.train(whole.tolist())
    rows = id_map(whole.split(sizes)[rank])
    assert all_gather(rows).tolist() == [plain.row(key) for key in whole.tolist()]
    assert id_map.reassigned.tolist() == handed


def evolves(options: dict[str, Any], start: int, steps: int, id_map: IdMap | None = None) -> tuple[IdMap, PlainMap, int]:
    """Compare `steps` steps, after replaying the first `start` in the dictionaries only."""
    _, world = rank_and_world()
    id_map, plain, handed = id_map or IdMap(**options), PlainMap(**options), 0
    for step in range(start):
        plain.train(batch(step).tolist())
    for step in range(start, start + steps):
        whole = batch(step)
        step_both(id_map, plain, whole, split(len(whole), step, world))
        handed += len(id_map.reassigned)
    return id_map, plain, handed


CASES = {
    "grows": {"capacity": 400},
    "full": {"capacity": 50, "shards": 7},
    "forgets": {"capacity": 100, "threshold": 4, "candidates": 20, "shards": 5},
    "recent": {"capacity": 60, "eviction": "least_recent", "shards": 8},
    "frequent": {"capacity": 60, "eviction": "least_frequent", "shards": 8},
    "recent, threshold": {"capacity": 31, "eviction": "least_recent", "threshold": 2, "shards": 4},
    "frequent, threshold": {"capacity": 31, "eviction": "least_frequent", "threshold": 2, "shards": 3},
    "tiny": {"capacity": 3, "eviction": "least_recent", "shards": 2},  # fewer shards than ranks
}


def matches(name: str) -> tuple[int, int]:
    id_map, plain, handed = evolves(CASES[name], 0, 16)
    known = plain.known()
    assert id_map.count() == known
    before = {key: x.clone() for key, x in id_map._slots.stored(0).items()}
    id_map.eval()
    whole = torch.cat([batch(1), batch(2), torch.tensor([2**63 - 1, -(2**63), 0])])
    assert id_map(whole).tolist() == [plain.row(key) for key in whole.tolist()]
    assert id_map._slots.calls == [16] and all(torch.equal(x, before[key]) for key, x in id_map._slots.stored(0).items())
    assert not len(id_map.reassigned)
    return known, handed


@pytest.mark.parametrize("name", CASES)
def test_rows_match_one_process(ranks, world_size, name):
    results = ranks(matches, name, world_size=world_size)
    assert all(known > 0 and (handed > 0) == ("eviction" in CASES[name]) for known, handed in results)


def follows(options: dict[str, Any], steps: list[list[list[int]]]) -> None:
    id_map, plain = IdMap(**options), PlainMap(**options)
    with checked():
        for parts in steps:
            whole = torch.tensor([key for part in parts for key in part], dtype=torch.int64)
            step_both(id_map, plain, whole, [len(part) for part in parts])


@st.composite
def histories(draw: Any) -> tuple[dict[str, Any], list[list[list[int]]]]:
    world = draw(st.integers(1, 4))
    threshold = draw(st.integers(1, 3))
    options = {
        "capacity": draw(st.integers(2, 12)),
        "shards": draw(st.integers(1, 5)),
        "threshold": threshold,
        "eviction": draw(st.sampled_from(EVICTIONS)),
    } | ({"candidates": draw(st.integers(1, 6))} if threshold > 1 else {})
    key = st.integers(0, 15) | st.sampled_from([-1, 2**63 - 1, -(2**63)])
    part = st.lists(key, max_size=6)
    return options, draw(st.lists(st.lists(part, min_size=world, max_size=world), min_size=1, max_size=8))


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(history=histories())
def test_rows_with_any_history(history):
    run_ranks(follows, *history, world_size=len(history[1][0]))


class Model(nn.Module):
    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.tower = nn.Linear(2, 2)
        self.id_map = IdMap(**options)

    def forward(self, x: Tensor) -> Tensor:
        return self.tower(x)


STEPS = 12


def saves(folder: Path, name: str) -> None:
    import torch.distributed.checkpoint as dcp  # here: it takes seconds
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    model = Model(CASES[name])
    evolves(CASES[name], 0, STEPS, model.id_map)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder / name)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if dist.get_rank() == 0:
        torch.save(whole, folder / f"{name}.pt")


def loads(folder: Path, name: str, alone: bool) -> None:
    import torch.distributed.checkpoint as dcp

    model = Model(CASES[name])
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder / name)
    model.load_state_dict(state["model"])
    if alone:  # a DTensor over all ranks, into a map that this rank has for itself
        groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
        other = Model(CASES[name] | {"group": groups[dist.get_rank()]})
        other.load_state_dict(model.state_dict())
        whole = batch(STEPS)
        expected = model.id_map(whole if dist.get_rank() == 0 else whole[:0])
        assert torch.equal(all_gather(expected), other.id_map(whole))
        return
    evolves(CASES[name], STEPS, 8, model.id_map)  # and back again, into a map that has gone on:
    model.load_state_dict(torch.load(folder / f"{name}.pt"))
    evolves(CASES[name], STEPS, 8, model.id_map)


@pytest.mark.parametrize("name", ["forgets", "recent, threshold", "frequent, threshold"])
def test_checkpoint_loads_on_other_ranks(ranks, tmp_path, name):
    ranks(saves, tmp_path, name, world_size=2)
    for world in (1, 3, 4):
        ranks(loads, tmp_path, name, False, world_size=world)
    ranks(loads, tmp_path, name, True, world_size=3)


def test_checkpoint_of_one_process_loads_in_a_sharded_map(ranks, tmp_path):
    name = "recent, threshold"
    id_map, _, _ = evolves(CASES[name], 0, STEPS)
    torch.save({"id_map." + key: x for key, x in id_map.state_dict().items()}, tmp_path / "one.pt")
    ranks(loads_one, tmp_path / "one.pt", name, world_size=3)


def loads_one(path: Path, name: str) -> None:
    model = Model(CASES[name])
    model.load_state_dict(torch.load(path), strict=False)
    evolves(CASES[name], STEPS, 8, model.id_map)


def in_subgroups_and_ddp() -> None:
    groups = [dist.new_group([0, 2]), dist.new_group([1])]
    which, rank = dist.get_rank() % 2, dist.get_rank() // 2
    options = CASES["recent"]
    model, plain = Model(options | {"group": groups[which]}), PlainMap(**options)
    ddp = DistributedDataParallel(model)
    for step in range(6):
        ddp(torch.ones(2, 2)).sum().backward()
        whole = batch(step + 10 * which)
        plain.train(whole.tolist())
        mine = whole.split(split(len(whole), step, 2 - which))[rank]
        assert model.id_map(mine).tolist() == [plain.row(key) for key in mine.tolist()]
    twin = copy.deepcopy(model.id_map)
    model.id_map(torch.arange(1000) if rank == 0 else torch.arange(0))
    rows = [plain.row(key) for key in batch(7).tolist()]
    assert twin.eval()(batch(7)).tolist() == rows != model.id_map.eval()(batch(7)).tolist()


def test_subgroups_ddp_and_deepcopy(ranks):
    ranks(in_subgroups_and_ddp, world_size=3)


BAD: dict[str, tuple[Any, str]] = {
    "float": (lambda m: m(torch.ones(2)), "ids: expected a Tensor of integers, got float32[2]"),
    "bool": (lambda m: m(torch.ones(2) > 0), "ids: expected a Tensor of integers, got bool[2]"),
    "list": (lambda m: m([1, 2]), "ids: expected a Tensor of integers, got list"),
    "mode": (lambda m: m.eval()(torch.arange(2)), "training=False"),
    "other map": (lambda m: IdMap(20, threshold=2)(torch.arange(2)), "capacity=20, threshold=2"),
}


def one_rank_is_wrong(name: str) -> str:
    id_map, ids = IdMap(10, shards=2), torch.tensor([3, 4])
    expected = all_gather(id_map(ids))
    with pytest.raises(MismatchError) as caught:
        BAD[name][0](id_map) if dist.get_rank() == 1 else id_map(torch.arange(100, 120))
    assert BAD[name][1] in str(caught.value) and "rank 1" in str(caught.value), str(caught.value)
    assert torch.equal(all_gather(id_map.train()(ids)), expected), "nothing was admitted, and the next call works"
    assert id_map.count() == 2
    return str(caught.value)


@pytest.mark.parametrize("name", BAD)
def test_all_ranks_raise_the_same_error(ranks, name):
    assert len(set(ranks(one_rank_is_wrong, name, world_size=3))) == 1


def sent(training: bool, eviction: Any) -> int:
    id_map = IdMap(100_000, eviction=eviction)
    ids = torch.arange(8000).repeat(5)
    id_map(ids)
    with count_bytes() as traffic:
        id_map.train(training)(ids)
    return traffic.sent


def test_different_ids_travel_once(ranks):
    ids = 8000 * 8  # bytes of the ids of a rank, of which half belong to each; their rows come back
    assert max(ranks(sent, False, None, world_size=2)) < 1.1 * ids
    assert max(ranks(sent, True, None, world_size=2)) < 1.6 * ids
    assert max(ranks(sent, True, "least_recent", world_size=2)) < 1.6 * ids


# What follows needs one rank only, and runs without a process group.


def test_index_finds_everything_after_many_evictions():
    """There are so many that the hash table has to be swept several times."""
    id_map, generator, handed = IdMap(2001, eviction="least_recent", shards=4), torch.Generator().manual_seed(0), 0
    for _ in range(30):
        ids = torch.randint(-(2**63), 2**63 - 1, (400,), generator=generator)
        rows = id_map.train()(ids)
        handed += len(id_map.reassigned)
        assert len(rows.unique()) == 400 and rows.min() > 0
        assert torch.equal(id_map.eval()(ids), rows)
    assert handed == 30 * 400 - 2000
    stored = id_map._slots.stored(0)
    used = stored["rows"] > 0
    assert torch.equal(id_map(stored["ids"][used]), stored["rows"][used]), "every id that is stored is found in its own row"
    assert stored["rows"][used].sort().values.tolist() == list(range(1, 2001))


def test_any_shape_and_integer():
    id_map = IdMap(10, shards=1)
    with torch.inference_mode():
        assert id_map(torch.tensor([[8, 7]])).tolist() == [[2, 1]]
    assert id_map(torch.zeros(2, 0, 3, dtype=torch.int64)).shape == (2, 0, 3)
    assert id_map(torch.tensor(7)).shape == () and id_map(torch.tensor([9, 8], dtype=torch.int16)).tolist() == [3, 2]


def test_rows_never_change():
    """A checkpoint is worth nothing to a version that divides the ids in another way."""
    id_map = IdMap(1000, shards=10)
    assert id_map(torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 1234567890123])).tolist() == GOLDEN_ROWS


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"capacity": 1}, "IdMap: capacity=1 must be an integer, 2 or more"),
        ({"capacity": 9, "threshold": 0}, "IdMap: threshold=0 must be"),
        ({"capacity": 9, "shards": 1.5}, "IdMap: shards=1.5 must be"),
        ({"capacity": 9, "eviction": "oldest"}, "IdMap: eviction='oldest' is not one of None, 'least_recent'"),
        ({"capacity": 9, "candidates": 5}, "IdMap: candidates=5 must be a positive integer, and threshold=1 more than 1"),
        ({"capacity": 2**31}, "is more than 1073741823 together"),
    ],
)
def test_bad_arguments(options, text):
    with pytest.raises(ValueError, match=text):
        IdMap(**options)


def test_bad_checkpoints():
    state = IdMap(10, shards=3).state_dict()
    with pytest.raises(ValueError, match=r"ids: expected int64\[2, 9\] for IdMap\(capacity=10, .* got int64\[3, 9\]"):
        IdMap(10, shards=2).load_state_dict(state)
    with pytest.raises(ValueError, match="saved with capacity=10, but this is IdMap"):
        IdMap(9, shards=3).load_state_dict(state)


def ids_of_shard(shard: int, shards: int, n: int) -> list[int]:
    return [key for key in range(n * shards * 2) if shard_of(key, shards) == shard][:n]


def test_no_shard_is_full_while_there_are_free_rows():
    """Hashes give shards 76 to 118 of these ids. With rows of their own, ten shards of 100 would have turned some away."""
    id_map = IdMap(1001, shards=10)
    rows = id_map(torch.arange(1000))
    assert rows.sort().values.tolist() == list(range(1, 1001))
    crowded = IdMap(1001, shards=10)  # what hashes do not do: one shard gets more ids than it has memory for
    rows = crowded(torch.tensor(ids_of_shard(3, 10, 300)))
    assert len(rows.unique()) == 1 + crowded.count() and 180 < crowded.count() < 300
    assert crowded(torch.tensor(ids_of_shard(4, 10, 100))).min() > 0


def test_the_last_rows_go_to_the_shards_that_have_the_fewest():
    id_map, keys = IdMap(9, shards=4), [ids_of_shard(shard, 4, 9) for shard in range(4)]
    id_map(torch.tensor(keys[0][:3] + keys[2][:1]))
    id_map(torch.tensor([key for part in keys for key in part]))
    assert [int((id_map(torch.tensor(part)) > 0).sum()) for part in keys] == [3, 2, 2, 1]


GROWING = {"capacity": 20, "threshold": 2, "eviction": "least_recent", "shards": 3}


def grows(folder: Path) -> None:
    id_map, plain, _ = evolves(GROWING, 0, 5)
    torch.save(id_map.state_dict(), folder / f"{rank_and_world()[0]}.pt")
    larger = IdMap(**GROWING | {"capacity": 70})
    larger.load_state_dict(torch.load(folder / f"{rank_and_world()[0]}.pt", weights_only=False))
    id_map.grow(70)
    plain.capacity = 70
    plain.remember(69)
    for step in range(5, 12):
        whole = batch(step)
        parts = split(len(whole), step, rank_and_world()[1])
        mine = whole.split(parts)[rank_and_world()[0]]
        expected = larger(mine)
        step_both(id_map, plain, whole, parts)
        assert torch.equal(id_map.eval()(mine), expected)
        id_map.train()
    assert id_map.count() > 20


@pytest.mark.parametrize("world", [1, 3])
def test_ids_keep_their_rows_as_a_map_grows(ranks, tmp_path, world):
    ranks(grows, tmp_path, world_size=world)


# Many maps in one exchange.

MANY = {"a": CASES["grows"], "b": CASES["recent, threshold"], "c": CASES["frequent"], "d": CASES["full"], "e": CASES["tiny"]}
INPUTS = {"a": "a", "b": "b", "c": "c", "c2": "c", "d": "d", "e": "e"}


def parts_of(step: int) -> dict[str, Tensor]:
    """The whole batch of each input: of different lengths, and sometimes one is missing."""
    names = [name for k, name in enumerate(INPUTS) if (step + k) % 5 or name == "a"]
    return {name: batch(step + 3 * k) for k, name in enumerate(names)}


def matches_maps_alone(folder: Path) -> None:
    rank, world = rank_and_world()
    maps = IdMapCollection({name: IdMap(**options) for name, options in MANY.items()}, INPUTS)
    plain = {name: PlainMap(**options) for name, options in MANY.items()}
    for step in range(10):
        if step == 6:
            maps.maps["c"].eval()
        whole = parts_of(step)
        mine = {name: x.split(split(len(x), step + k, world))[rank] for k, (name, x) in enumerate(whole.items())}
        given = {name: Ragged.from_dense(x) if name == "b" else x for name, x in mine.items()}
        found = maps(given)
        assert list(found) == list(given) and ("b" not in found or isinstance(found["b"], Ragged))
        for name in {INPUTS[name] for name in whole}:
            inputs = [x for each, x in whole.items() if INPUTS[each] == name]
            handed = [] if name == "c" and step >= 6 else plain[name].train(torch.cat(inputs).tolist())
            assert maps.reassigned[name].tolist() == handed, name
        for name, x in mine.items():
            rows = found[name].values if isinstance(found[name], Ragged) else found[name]
            assert rows.tolist() == [plain[INPUTS[name]].row(key) for key in x.tolist()], (step, name)
    saves_and_loads_alone(maps, folder)


def saves_and_loads_alone(maps: IdMapCollection, folder: Path) -> None:
    """What a collection has saved loads into single maps, and these into a collection."""
    import torch.distributed.checkpoint as dcp

    dcp.save(maps.state_dict(), checkpoint_id=folder)
    other = IdMapCollection({name: IdMap(**options) for name, options in MANY.items()}, INPUTS)
    state = other.state_dict()
    dcp.load(state, checkpoint_id=folder)
    alone = {name: IdMap(**options) for name, options in MANY.items()}
    for name, id_map in alone.items():
        id_map.load_state_dict({"_extra_state": state[f"maps.{name}._extra_state"]})
    twin = copy.deepcopy(IdMapCollection(alone, INPUTS))
    for step in (10, 11):
        mine = {name: x.tensor_split(rank_and_world()[1])[rank_and_world()[0]] for name, x in parts_of(step).items()}
        expected = maps.train()(mine)
        assert all(torch.equal(x, expected[name]) for name, x in twin(mine).items())


def loads_many(folder: Path) -> dict[str, Any]:
    import torch.distributed.checkpoint as dcp

    maps = IdMapCollection({name: IdMap(**options) for name, options in MANY.items()}, INPUTS)
    state = maps.state_dict()
    dcp.load(state, checkpoint_id=folder)
    maps.load_state_dict(state)
    mine = {name: x if rank_and_world()[0] == 0 else x[:1] for name, x in parts_of(6).items()}
    return {name: x.tolist() for name, x in maps.eval()(mine).items()}


def test_maps_in_one_exchange_give_the_rows_that_they_give_alone(ranks, tmp_path):
    results = []
    for world in (1, 2, 3, 4):
        ranks(matches_maps_alone, tmp_path / str(world), world_size=world)
        results.append(ranks(loads_many, tmp_path / "1", world_size=world)[0])
    assert all(result == results[0] for result in results)


def collectives_of(names: list[str], training: bool) -> dict[str, int]:
    maps = IdMapCollection({name: IdMap(1000) for name in names}).train(training)
    ids = {name: torch.arange(50) for name in names}
    maps(ids)
    with count_bytes() as traffic:
        maps(ids)
    return {name: op.calls for name, op in traffic.by_op.items()}


def one_map_or_many() -> None:
    for training in (False, True):
        calls = collectives_of(["a"], training)
        assert collectives_of(list("abcdefgh"), training) == calls
        assert training or calls == {"send": 3, "recv": 3}, "to the other rank: sizes, ids, rows"


def test_many_maps_communicate_once(ranks):
    ranks(one_map_or_many, world_size=2)


COLLECTION_BAD: dict[str, tuple[Any, str]] = {
    "no dict": (lambda m: m(torch.arange(2)), "features: expected a dict from feature to ids, got Tensor"),
    "unknown": (lambda m: m({"x": torch.arange(2)}), "features: 'x' is not one of ['a', 'b']"),
    "float": (lambda m: m({"a": torch.ones(2), "b": torch.arange(2)}), "ids: expected a Tensor of integers, got float32[2]"),
    "missing": (lambda m: m({"a": torch.arange(2)}), "b: capacity=20"),
    "one frozen": (lambda m: (m.maps["b"].eval(), m({"a": torch.arange(2), "b": torch.arange(2)})), "training=False"),
}


def one_rank_calls_wrongly(name: str) -> str:
    maps = IdMapCollection({"a": IdMap(10), "b": IdMap(20)})
    good = {"a": torch.arange(3), "b": torch.arange(4)}
    with pytest.raises(MismatchError) as caught:
        COLLECTION_BAD[name][0](maps) if dist.get_rank() == 1 else maps(good)
    assert COLLECTION_BAD[name][1] in str(caught.value), str(caught.value)
    assert [maps.train()(good)[key].min() > 0 for key in good] == [True, True], "the next call works"
    return str(caught.value)


def all_wrong_calls() -> list[str]:
    return [one_rank_calls_wrongly(name) for name in COLLECTION_BAD]


def test_all_ranks_raise_the_same_error_of_a_collection(ranks):
    first, *others = ranks(all_wrong_calls, world_size=3)
    assert all(errors == first for errors in others)


def test_reassigned_rows_are_those_of_the_last_call():
    """A row that was handed over earlier may have been trained since then: it must not be reset again."""
    maps = IdMapCollection({name: IdMap(3, eviction="least_recent") for name in "ab"})
    for a in ([1, 2], [3]):
        maps({"a": torch.tensor(a), "b": torch.tensor([1])})
    assert maps.reassigned["a"].tolist() == [1]
    maps({"b": torch.tensor([1])})
    assert maps.reassigned["a"].tolist() == maps.reassigned["b"].tolist() == []


def test_bad_collections():
    id_map = IdMap(10)
    for maps, features, text in [
        ({"a": 3}, None, "expected an IdMap, got int"),
        ({"a.b": IdMap(10)}, None, "a map cannot be called 'a.b'"),
        ({"keys": IdMap(10)}, None, "a map cannot be called 'keys'"),
        ({"a": id_map, "b": id_map}, None, "an IdMap is there twice"),
        ({"a": IdMap(10), "b": IdMap(10, device="meta")}, None, "the same group and device"),
        ({"a": IdMap(10)}, {"x": "y"}, "'y' is not one of the maps"),
    ]:
        with pytest.raises((ValueError, TypeError), match=text):
            IdMapCollection(maps, features)
    IdMapCollection({"a": id_map, "b": IdMap(10)})
    with pytest.raises(ValueError, match="is in a collection already"):
        IdMapCollection({"a": id_map})
    with pytest.raises(ValueError, match="capacity=5 must be an integer, 10 or more"):
        id_map.grow(5)

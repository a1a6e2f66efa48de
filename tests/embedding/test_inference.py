"""quantize and unshard: the tables of any number of ranks in one process, with the results of the sharded ones."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim
from torch.fx.experimental import _config as symbolic_shapes

from unisono.embedding import (
    EmbeddingCollection,
    IdMap,
    IdMapCollection,
    IdOutOfRange,
    InferenceCollection,
    Ragged,
    Table,
    UnknownFeature,
    quantize,
    unshard,
)

TABLES = [
    Table("a", 50, 5, ["x", "y"], mode="mean", padding_idx=3),
    Table("b", 40, 6, ["x", "z"], max_norm=1.0),
    Table("c", 30, 7, ["m"], mode="max", padding_idx=3),
    Table("d", 20, 4, ["n"], mode=None),
]
BAGS = [[1, 3], [], [2, 2, 19], [3], [5], [6, 7]]
BATCH: dict[str, Any] = {
    "x": torch.arange(18).view(6, 3) * 2,
    "y": Ragged.from_lists(BAGS),
    "z": Ragged.from_lists(BAGS, [[float(number) - 4 for number in bag] for bag in BAGS]),
    "m": Ragged.from_lists(BAGS),
    "n": Ragged.from_lists(BAGS),
}


def plain(found: Any) -> dict[str, Tensor]:
    return {name: x.values if isinstance(x, Ragged) else x for name, x in found.items()}


def make_collection(plan: str = "row") -> EmbeddingCollection:
    torch.manual_seed(0)
    return EmbeddingCollection(TABLES, plan=plan, dtype=torch.float64)


def copies(plan: str) -> list[dict[str, Tensor]]:
    """The results of all copies; each rank calls the sharded tables with its own part, or none, of the batch."""
    collection = make_collection(plan)
    made: list[nn.Module] = [unshard(collection), quantize(collection), quantize(collection, bits=4)]
    expected, found = plain(collection(BATCH)), plain(made[0](BATCH))
    assert list(found) == list(expected) == ["x@a", "x@b", "y", "z", "m", "n"]
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-12, atol=1e-12)
    return [plain(module(BATCH)) for module in made]


@pytest.mark.parametrize("plan", ["row", "column", "table"])
def test_copies_do_not_depend_on_ranks_and_layout(ranks, plan):
    first = copies("replicated")
    for world in (2, 3) if plan == "row" else (2,):
        for results in ranks(copies, plan, world_size=world):
            for one, other in zip(first, results, strict=True):
                assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_rows_are_within_half_a_step(bits):
    torch.manual_seed(1)
    weight = torch.randn(200, 7) * torch.logspace(-20, 3, 200)[:, None] + torch.randn(200, 1) * 30
    weight[:3] = torch.tensor([0.0, 1.0, -1e-3])[:, None]  # rows of one value
    collection = EmbeddingCollection([Table("t", 200, 7, mode=None)])
    collection.load_state_dict({"tables.t.weight": weight})
    small = quantize(collection, bits=bits)
    rows = small({"t": torch.arange(200)})["t"].values
    scale = small.tables["t"].scales[:, 0].float()
    assert torch.all((rows - weight).abs() <= scale[:, None] / 2 * (1 + 1e-4) + 1e-6 * weight.abs())
    span = weight.amax(1) - weight.amin(1)
    assert torch.all(scale * (2**bits - 1) <= (span + weight.abs().amax(1) / 64) * 1.02 + 1e-30)
    assert small.tables["t"].codes.nbytes + small.tables["t"].scales.nbytes == 200 * ((7 * bits + 7) // 8 + 4)


@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_rows_are_pooled_as_in_embedding_bag(bits):
    small = quantize(make_collection(), bits=bits)
    found = plain(small(BATCH))
    for name, feature in {"x@a": "x", "x@b": "x", "y": "y", "z": "z", "m": "m"}.items():
        module = small.tables["b" if name in ("x@b", "z") else "c" if name == "m" else "a"]
        bags = BATCH[feature] if isinstance(BATCH[feature], Ragged) else Ragged.from_dense(BATCH[feature])
        expected = F.embedding_bag(
            bags.values,
            module._rows(torch.arange(module.table.rows)),
            bags.offsets,
            mode=module.table.mode,
            include_last_offset=True,
            padding_idx=module.table.padding_idx,
            per_sample_weights=None if bags.weights is None else bags.weights.double(),
        )
        torch.testing.assert_close(found[name], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mode", ["mean", "sum", "max"])
def test_long_bags_of_16_bits_are_pooled_in_32(dtype, mode):
    """A bag of 6,000 ids: its sum and its count need more digits than 16 bits have."""
    collection = EmbeddingCollection([Table("t", 500, 4, mode=mode)], dtype=dtype)
    weight = torch.linspace(0, 1, 500)[:, None].expand(500, 4)
    collection.load_state_dict({"tables.t.weight": weight})
    bags = Ragged.from_lists([[*range(500)] * 12, [7]], [[0.5] * 6000, [2.0]] if mode == "sum" else None)
    expected = F.embedding_bag(
        bags.values, weight, bags.offsets, mode=mode, include_last_offset=True, per_sample_weights=bags.weights
    )
    for made in (quantize(collection), unshard(collection)):
        found = made({"t": bags})["t"]
        assert found.dtype == dtype
        torch.testing.assert_close(found.float(), expected, rtol=0.01, atol=0.003)


@pytest.mark.parametrize("mode", ["sum", None])
def test_quantized_rows_of_float16_stay_finite(mode):
    collection = EmbeddingCollection([Table("t", 2, 2, mode=mode)], dtype=torch.float16)
    collection.load_state_dict({"tables.t.weight": torch.tensor([[-65500.0, 0.0], [1.0, 2.0]])})
    rows = plain(quantize(collection)({"t": torch.tensor([0, 1])}))["t"]
    torch.testing.assert_close(rows, collection.full_weight("t"), rtol=0, atol=130)


def test_unsharded_tables_change_their_dtype():
    collection = EmbeddingCollection([Table("t", 8, 2), Table("rows", 8, 2, mode=None)])
    bags = Ragged.from_lists([[1, 2], [3]], [[0.5, 2.0], [1.0]])
    found = plain(unshard(collection).double()({"t": bags, "rows": bags._replace(weights=None)}))
    weight = collection.full_weight("t").double()
    assert all(x.dtype == torch.float64 for x in found.values())
    torch.testing.assert_close(found["t"], torch.stack([weight[1] / 2 + weight[2] * 2, weight[3]]))


@pytest.mark.parametrize("bits", [None, 4, 8])
def test_state_dict_loads_into_an_empty_copy(bits, tmp_path):
    made = quantize(make_collection(), bits=bits) if bits else unshard(make_collection())
    torch.save(made.state_dict(), tmp_path / "tables.pt")
    other = InferenceCollection(TABLES, bits=bits, dtype=torch.float64)
    other.load_state_dict(torch.load(tmp_path / "tables.pt"))
    expected, found = plain(made(BATCH)), plain(other(BATCH))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


class TuplesForBags(nn.Module):
    """torch.export.save knows tuples, but not Ragged."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, features: Any) -> dict[str, Tensor]:
        return plain(self.module({name: Ragged(*x) if isinstance(x, tuple) else x for name, x in features.items()}))


def export_and_load(module: nn.Module, features: dict[str, Any], path: Path) -> Any:
    shapes = {
        name: tuple(None if part is None else {0: Dim.AUTO} for part in x) if isinstance(x, tuple) else {0: Dim.AUTO}
        for name, x in features.items()
    }
    with symbolic_shapes.patch(backed_size_oblivious=True):  # otherwise one bag would not be allowed
        program = torch.export.export(module, (features,), dynamic_shapes={"features": shapes})
    torch.export.save(program, path)
    return torch.export.load(path).module()


@pytest.mark.parametrize("bits", [None, 4, 8])
def test_exported_tables_take_any_batch(bits, tmp_path):
    made = quantize(make_collection(), bits=bits) if bits else unshard(make_collection())
    module = TuplesForBags(made)
    given = {name: tuple(x) if isinstance(x, Ragged) else x for name, x in BATCH.items()}
    program = export_and_load(module, given, tmp_path / "tables.pt2")
    for bags in (BAGS, BAGS[1:4] * 3, BAGS[:1], []):
        ragged = Ragged.from_lists(bags)
        weights = torch.linspace(-1, 1, len(ragged.values))
        batch = {"x": torch.arange(3 * len(bags)).view(-1, 3), **dict.fromkeys("ymn", tuple(ragged))}
        batch["z"] = tuple(ragged._replace(weights=weights))
        expected, found = module(batch), program(batch)
        assert set(found) == set(expected) and all(torch.equal(found[name], expected[name]) for name in expected)


def known_ids_of_all_ranks() -> list[list[int]]:
    maps = IdMapCollection({"a": IdMap(200, shards=7), "b": IdMap(20), "none": IdMap(5)}, {"x": "a", "y": "b", "z": "none"})
    x = torch.arange(150) * (2**63 // 151) * (1 - 2 * (torch.arange(150) % 2))
    maps({"x": x, "y": x[:30]})
    batch = {"x": torch.cat([x[::3], torch.tensor([5, -(2**63)])]), "y": Ragged.from_dense(x[:40].view(20, 2)), "z": x[:3]}
    expected, found = plain(maps.eval()(batch)), plain(unshard(maps)(batch))
    assert all(torch.equal(found[name], expected[name]) for name in batch)
    assert 0 < int((found["y"] > 0).sum()) < 40 and int(found["z"].sum()) == 0
    return [found[name].tolist() for name in batch]


def test_unsharded_id_maps_know_the_ids_of_all_ranks(ranks):
    expected = known_ids_of_all_ranks()
    assert ranks(known_ids_of_all_ranks, world_size=3) == [expected] * 3


def test_outputs_in_one_tensor():
    collection = EmbeddingCollection([Table("a", 9, 4), Table("b", 9, 4, ["b", "c"])])
    batch = {name: torch.arange(3) + k for k, name in enumerate("cab")}
    for module in (unshard(collection), quantize(collection)):
        assert torch.equal(module(batch, stack=True), torch.stack(list(module(batch).values()), 1))


def test_bad_input():
    small = quantize(make_collection())
    with pytest.raises(UnknownFeature, match="missing features: y, z, m, n"):
        small({"x": torch.tensor([1])})
    with pytest.raises(IdOutOfRange, match="id 20 at position 1 of feature 'n' is out of range: table 'd' has 20 rows"):
        small(BATCH | {"n": torch.tensor([3, 20])})
    with pytest.raises(ValueError, match="weights go with mode='sum' only, not with 'mean'"):
        small(BATCH | {"y": BATCH["z"]})
    with pytest.raises(ValueError, match="bits=3 is none of 4, 8, None"):
        quantize(make_collection(), bits=3)
    for made in (small, unshard(make_collection())):
        for offsets in ([0, 2], [1, 3], [0, 2, 1, 3]):
            with pytest.raises(ValueError, match="feature 'y': offsets must rise from 0 to the number of ids, 3"):
                made(BATCH | {"y": Ragged(torch.tensor([1, 2, 3]), torch.tensor(offsets))})
        with pytest.raises(ValueError, match="stack=True: table 'd' has no mode"):
            made(BATCH, stack=True)
    collection = make_collection()
    collection.weight("a").data[3, :2] = torch.tensor([-1e39, 1e39], dtype=torch.float64)
    with pytest.raises(ValueError, match=r"table 'a' has values from -1e\+39 to 1e\+39: too large for scales in bfloat16"):
        quantize(collection)
    collection = make_collection()
    collection.weight("a").data[3, 2] = float("nan")
    with pytest.raises(ValueError, match="table 'a' has values that are infinite or NaN"):
        quantize(collection)

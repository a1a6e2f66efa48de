"""A bad look-up on one rank is the same clear error on all of them, and the next one works."""

import re

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.embedding.reference import DIM, ROWS, layouts
from unisono.collectives import MismatchError
from unisono.embedding import (
    SGD,
    Adagrad,
    Adam,
    EmbeddingCollection,
    IdOutOfRange,
    KeyedRagged,
    Layout,
    Ragged,
    RowwiseAdagrad,
    ShardedEmbedding,
    ShardedEmbeddingBag,
    Table,
    unshard,
)

IDS, OFFSETS, WEIGHTS = torch.tensor([1, 5, 2]), torch.tensor([0, 2]), torch.ones(3)
BAGS = Ragged(IDS, torch.tensor([0, 2, 3]))
BATCH = {"user": BAGS, "seen": torch.tensor([[1, 2], [3, 3]]), "word": torch.tensor([4, 0])}

# (the good arguments, {case: (what the last rank gives instead, what the error says)}) for each module
BAD_IDS = {
    "negative": ([torch.tensor([2, -1])], "id -1 at position 1 of feature 'weight' is out of range: table 'weight' has 7 rows"),
    "too large": ([torch.tensor([[2, 7]])], "id 7 at position 1 of feature 'weight' is out of range"),
    "far too large": ([torch.tensor([2**40])], "id 1099511627776 at position 0"),
    "float": ([torch.ones(2)], "values: expected int32 or int64 numbers, got torch.float32 (2,)"),
    "int8": ([torch.ones(2, dtype=torch.int8)], "got torch.int8 (2,)"),
    "list": ([[1, 2]], "input: expected a strided Tensor, got list"),
    "nothing": ([None], "input: expected a strided Tensor, got NoneType"),
    "device": ([IDS.to("meta")], "is on meta, its table on cpu"),
    "sparse": ([IDS.to_sparse()], "input: expected a strided Tensor, got torch.sparse_coo"),
}
BAD_BAGS = {
    "negative": ([IDS - 2, OFFSETS], "id -1 at position 0 of feature 'weight' is out of range: table 'weight' has 7 rows"),
    "too large": ([IDS + 2, OFFSETS], "id 7 at position 1"),
    "float": ([IDS.float(), OFFSETS], "values: expected int32 or int64 numbers, got torch.float32 (3,)"),
    "list": ([[1, 2], OFFSETS], "input: expected a strided Tensor, got list"),
    "sparse": ([IDS[None].to_sparse()], "input: expected a strided Tensor, got torch.sparse_coo"),
    "number": ([torch.tensor(3), OFFSETS], "input: expected 1 or 2 dimensions, got shape ()"),
    "cube": ([torch.ones(1, 1, 1, dtype=torch.int64)], "input: expected 1 or 2 dimensions, got shape (1, 1, 1)"),
    "no offsets": ([IDS], "offsets must be a 1-D Tensor if input is 1-D"),
    "2-D offsets": ([IDS, OFFSETS[None]], "offsets must be a 1-D Tensor if input is 1-D"),
    "float offsets": ([IDS, OFFSETS.float()], "offsets: expected int32 or int64 numbers, got torch.float32"),
    "offsets too many": ([IDS[None], OFFSETS], "offsets must be None if input is 2-D"),
    "device of offsets": ([IDS, OFFSETS.to("meta")], "is on meta, its table on cpu"),
    "first offset": ([IDS, OFFSETS + 1], "offsets must rise from 0 to the number of ids, 3; they go from 1 to 3"),
    "falling offsets": ([IDS, torch.tensor([0, 2, 1])], "they go from 0 to 3 and fall between"),
    "last offset": ([IDS, torch.tensor([0, 4])], "offsets must rise from 0 to the number of ids, 3"),
    "ids but no bags": ([IDS, OFFSETS[:0]], "offsets must rise from 0 to the number of ids, 3; they go from 3 to 3"),
}
BAD_WEIGHTS = {
    "too few": ([IDS, OFFSETS, WEIGHTS[:2]], "weights: expected 3, one for each id, got (2,)"),
    "too few in rows": ([IDS[None], None, WEIGHTS], "per_sample_weights has shape (3,), but input (1, 3)"),
    "integers": ([IDS, OFFSETS, IDS], "weights: expected floating point numbers, got torch.int64"),
    "list": ([IDS, OFFSETS, [1.0, 1.0, 1.0]], "weights: expected 3, one for each id, got list"),
    "list in rows": ([IDS[None], None, [[1.0, 1.0, 1.0]]], "per_sample_weights: expected a Tensor, got list"),
    "device": ([IDS, OFFSETS, WEIGHTS.to("meta")], "is on meta, its table on cpu"),
    "only here not": ([IDS, OFFSETS], "with or without weights"),
    "only here learned": ([IDS, OFFSETS, WEIGHTS.clone().requires_grad_()], "features weight*+; gradients: True"),
}
BAD_LAST = {
    "no offsets": ([IDS, OFFSETS[:0]], "offsets must have one number more than there are bags, got none"),
    "last offset": ([IDS, OFFSETS], "offsets must rise from 0 to the number of ids, 3; they go from 0 to 2"),
}
BAD_MEAN = {"weights": ([IDS, OFFSETS, WEIGHTS], "weights go with mode='sum' only, not with 'mean'")}


def test_a_bad_keyed_batch_is_found_where_a_feature_has_two_tables_and_in_serving():
    """It was cut into features first, which hid what is wrong."""
    collection = EmbeddingCollection([Table("a", 9, 4, ["x"]), Table("b", 9, 4, ["x", "y"])], plan="row")
    good = KeyedRagged(["x", "y"], torch.tensor([1, 2, 3]), torch.tensor([1, 1, 0, 1]))  # names may be a list
    assert collection(good)["x@a"].shape == (2, 4) and unshard(collection)(good)["y"].shape == (2, 4)
    wrong = {
        "lengths must add up to the number of values, 3": {"lengths": torch.tensor([1, 1, 0, 0])},
        "5 are not the same number for each of 2 features": {"lengths": torch.tensor([1, 1, 0, 1, 0])},
        "has a name twice": {"names": ("x", "x")},
        "weights: expected 3, one for each id, got (2,)": {"weights": torch.ones(2)},
    }
    for text, change in wrong.items():
        for module in (collection, unshard(collection)):
            with pytest.raises(ValueError, match=re.escape(text)):
                module(good._replace(**change))


KEYED = KeyedRagged(("user", "seen", "word"), torch.tensor([1, 2, 3]), torch.ones(3, dtype=torch.int64))
BAD_BATCH = {
    "id": (
        [{**BATCH, "seen": torch.tensor([[2, 9]])}],
        "id 9 at position 1 of feature 'seen' is out of range: table 'item' has 9",
    ),
    "list": ([[BAGS]], "features: expected a dict from feature to Ragged or Tensor, a KeyedRagged or a KeyedJaggedTensor"),
    "keyed names": ([KEYED._replace(names=("user", "seen", "wrd"))], "feature 'wrd' looks into no table"),
    "keyed lengths": (
        [KEYED._replace(lengths=KEYED.lengths + 1)],
        "KeyedRagged: lengths must add up to the number of values, 3",
    ),
    "negative lengths": ([KEYED._replace(lengths=torch.tensor([2, -1, 2]))], "and the least is -1"),
    "lengths of no features": ([KEYED._replace(lengths=torch.ones(4).long())], "4 are not the same number for each of 3"),
    "keyed floats": ([KEYED._replace(values=WEIGHTS)], "KeyedRagged: values: expected int32 or int64 numbers"),
    "keyed id": ([KEYED._replace(values=torch.tensor([1, 9, 1]))], "id 9 at position 0 of feature 'seen' is out of range"),
    "keyed weights": ([KEYED._replace(weights=WEIGHTS)], "weights go with mode='sum' only, not with 'mean'"),
    "few keyed weights": ([KEYED._replace(weights=WEIGHTS[:1])], "KeyedRagged: weights: expected 3, one for each id, got (1,)"),
    "missing": ([{"user": BAGS, "word": IDS}], "missing features: seen"),
    "nothing": ([{}], "missing features: user, seen, word"),
    "unknown": ([{**BATCH, "usr": BAGS}], "feature 'usr' looks into no table; the features are user, seen, word"),
    "a list": ([{**BATCH, "user": [1, 2]}], "a feature must be a Ragged, a jagged tensor, or a tensor"),
    "a cube": ([{**BATCH, "user": torch.ones(1, 1, 1)}], "a feature must be a Ragged, a jagged tensor, or a tensor"),
    "sparse": ([{**BATCH, "user": IDS.to_sparse()}], "got torch.sparse_coo of shape (3,)"),
    "a tuple": ([{**BATCH, "user": tuple(BAGS)}], "got tuple"),
    "float": ([{**BATCH, "user": torch.ones(2)}], "feature 'user': values: expected int32 or int64 numbers"),
    "offsets": ([{**BATCH, "user": Ragged(IDS, OFFSETS)}], "feature 'user': offsets must rise from 0 to the number of ids, 3"),
    "lists": ([{**BATCH, "user": Ragged([1], [0, 1])}], "feature 'user': values: expected int32 or int64 numbers, got list"),
    "weights": ([{**BATCH, "user": Ragged(IDS, BAGS.offsets, [1.0])}], "feature 'user': weights: expected 3, one for each id"),
    "weights of a mean": (
        [{**BATCH, "seen": Ragged(IDS, BAGS.offsets, WEIGHTS)}],
        "feature 'seen': weights go with mode='sum' only, not with 'mean'",
    ),
    "weights of rows": (
        [{**BATCH, "word": Ragged(IDS, BAGS.offsets, WEIGHTS)}],
        "weights go with mode='sum' only, not with None",
    ),
    "some weights": ([{**BATCH, "user": Ragged(IDS, BAGS.offsets, WEIGHTS)}], "features seen, user*, word"),
}
TABLES = [Table("user", 7, 2), Table("item", 9, 4, ["seen"], mode="mean"), Table("word", 6, 2, mode=None)]


def modules(plan: str | Layout):
    """Yield modules, each with its good arguments and its bad ones."""
    bag = ShardedEmbeddingBag(7, 2, mode="sum", plan=plan)
    yield ShardedEmbedding(7, 2, plan=plan), [IDS], BAD_IDS
    yield bag, [IDS, OFFSETS], BAD_BAGS
    yield bag, [IDS, OFFSETS, WEIGHTS], BAD_WEIGHTS
    yield ShardedEmbeddingBag(7, 2, mode="sum", include_last_offset=True, plan=plan), BAGS[:2], BAD_LAST
    yield ShardedEmbeddingBag(7, 2, mode="mean", plan=plan), [IDS, OFFSETS], BAD_MEAN
    yield EmbeddingCollection(TABLES, plan=plan), [BATCH], BAD_BATCH


def one_rank_is_wrong(plan: str | Layout) -> list[str]:
    rank, size = dist.get_rank(), dist.get_world_size()
    messages = []
    for module, good, bad in modules(plan):
        expected = module(*good)
        for name, (arguments, text) in bad.items():
            kind = IdOutOfRange if " id " in f" {text}" and " at position " in text else MismatchError
            with pytest.raises(kind) as caught:
                module(*(arguments if rank == size - 1 else good))
            message = str(caught.value)
            assert text in message and type(module).__name__ in message, f"{name}: {message}"
            assert f"rank {size - 1}" in message, message
            messages.append(message)
            torch.testing.assert_close(module(*good), expected)
    return messages


@pytest.mark.parametrize("plan", ["row", "column", "table"])
def test_all_ranks_raise_the_same_error(plan, ranks):
    found = ranks(one_rank_is_wrong, plan, world_size=3)
    assert found[0] == found[1] == found[2]


def test_one_rank_alone_raises_the_same():
    for module, good, bad in modules("row"):
        for name, (arguments, text) in bad.items():
            if name not in ("only here not", "only here learned", "some weights"):
                with pytest.raises(MismatchError) as caught:
                    module(*arguments)
                assert text in str(caught.value), f"{name}: {caught.value}"
        module(*good)


def an_id_is_an_index_error() -> None:
    table = ShardedEmbedding(7, 2)
    with pytest.raises(IndexError, match=r"id -3 .* has 7 rows, 0 to 6") as caught:
        table(torch.tensor([1]) if dist.get_rank() == 0 else torch.tensor([0, 2, 1, -3, -2, 9]))
    assert isinstance(caught.value, ValueError) and "rank 1: id -3 at position 3" in str(caught.value), caught.value


def test_an_id_out_of_range_is_an_index_error_that_names_rank_and_place(ranks):
    ranks(an_id_is_an_index_error, world_size=2)


def a_feature_is_a_key_error() -> None:
    """Only ValueError caught it."""
    collection = EmbeddingCollection(TABLES, plan="row")
    for wrong in ({**BATCH, "usr": BAGS}, {"user": BAGS, "word": IDS}):
        with pytest.raises(KeyError) as caught:
            collection(wrong)
        text = str(caught.value)
        assert "the features are user, seen, word" in text and "\\n" not in text, text
        with pytest.raises(KeyError):
            collection(wrong if dist.get_rank() == 1 else BATCH)
    for call in (collection.weight, collection.full_weight, lambda name: collection.reset_rows(name, IDS)):
        with pytest.raises(KeyError, match=r"there is no table 'usr'; the tables are \['user', 'item', 'word'\]"):
            call("usr")


def test_an_unknown_feature_or_table_is_a_key_error_that_names_the_known_ones(ranks):
    ranks(a_feature_is_a_key_error, world_size=2)


def gradients_on_some_ranks() -> None:
    odd = dist.get_rank() == 1
    for plan in ("row", "table", "replicated"):
        table = ShardedEmbedding(7, 2, plan=plan)
        with torch.set_grad_enabled(not odd), pytest.raises(MismatchError, match=r"rank 1: .*gradients: False"):
            table(IDS)
        table.weight.requires_grad_(not odd)
        with pytest.raises(MismatchError, match=r"rank 1: .*gradients: False"):
            table(IDS)
        with torch.no_grad():
            table(IDS)
        table.weight.requires_grad_()
        table(IDS).sum().backward()


def test_all_ranks_differentiate_or_none(ranks):
    ranks(gradients_on_some_ranks, world_size=2)


def copies_differ() -> None:
    torch.manual_seed(dist.get_rank())
    for dense, ours in ((nn.Embedding(4, 2), ShardedEmbedding), (nn.EmbeddingBag(4, 2), ShardedEmbeddingBag)):
        with pytest.raises(MismatchError, match="from_dense: the ranks disagree"):
            ours.from_dense(dense)


def test_different_copies_of_a_dense_table_are_rejected(ranks):
    ranks(copies_differ, world_size=2)


# what the last rank makes instead of ShardedEmbeddingBag(7, 4, mode="sum")
OTHERS = {
    "rows": lambda: ShardedEmbeddingBag(8, 4, mode="sum"),
    "plan": lambda: ShardedEmbeddingBag(7, 4, mode="sum", plan="column"),
    "mode": lambda: ShardedEmbeddingBag(7, 4, mode="max"),
    "max_norm": lambda: ShardedEmbeddingBag(7, 4, mode="sum", max_norm=1.0),
    "sum": lambda: ShardedEmbeddingBag(7, 4, mode="sum", grad_reduce="sum"),
    "grad_reduce": lambda: ShardedEmbeddingBag(7, 4, mode="sum", grad_reduce="avg"),
    "dtype": lambda: ShardedEmbeddingBag(7, 4, mode="sum", dtype=torch.float64),
    "wire": lambda: ShardedEmbeddingBag(7, 4, mode="sum", wire_dtype=torch.bfloat16),
    "optimizer": lambda: ShardedEmbeddingBag(7, 4, mode="sum", optimizer=SGD(lr=0.1)),
    "no rule": lambda: ShardedEmbeddingBag(7, 4, mode="sum", optimizer={"other": SGD(lr=0.1)}),
}


def tables_differ() -> None:
    last = dist.get_rank() == dist.get_world_size() - 1
    for other in OTHERS.values():
        with pytest.raises(MismatchError, match=r"ShardedEmbeddingBag: (the ranks disagree|a bad call on rank 1)"):
            other() if last else ShardedEmbeddingBag(7, 4, mode="sum")


def test_different_tables_on_ranks_are_rejected(ranks):
    ranks(tables_differ, world_size=2)


# what torch.nn rejects: (mode, include_last_offset, arguments)
REJECTED = [
    ("sum", False, [IDS]),
    ("sum", False, [IDS[None], OFFSETS]),
    ("sum", False, [IDS.view(1, 1, 3)]),
    ("sum", False, [IDS.float(), OFFSETS]),
    ("sum", False, [IDS, OFFSETS + 1]),
    ("sum", False, [IDS, OFFSETS * 2]),
    ("sum", False, [IDS, OFFSETS, WEIGHTS[:2]]),
    ("sum", False, [IDS + 2, OFFSETS]),
    ("sum", False, [IDS - 2, OFFSETS]),
    ("mean", False, [IDS, OFFSETS, WEIGHTS]),
    ("sum", True, [IDS, OFFSETS[:0]]),
    (None, False, [IDS.float()]),
    (None, False, [IDS + 2]),
    (None, False, [IDS - 2]),
]


def test_what_torch_rejects_is_rejected():
    for mode, last, arguments in REJECTED:
        dense = nn.EmbeddingBag(7, 2, mode=mode, include_last_offset=last) if mode else nn.Embedding(7, 2)
        ours = (ShardedEmbeddingBag if mode else ShardedEmbedding).from_dense(dense)
        with pytest.raises((ValueError, RuntimeError, IndexError)):
            dense(*arguments)
        with pytest.raises(MismatchError, match=type(ours).__name__):
            ours(*arguments)


A, B = Table("a", 5, 2), Table("b", 5, 2)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: ShardedEmbedding(5, 2, max_norm=1.0, norm_type=0.0), "norm_type=0.0 must be positive"),
        (lambda: ShardedEmbedding(5, 2, grad_reduce="avg"), "ShardedEmbedding: grad_reduce='avg' is neither 'mean' nor 'sum'"),
        (lambda: ShardedEmbedding(5, 2, padding_idx=5), "padding_idx=5 must be within the 5 rows"),
        (lambda: ShardedEmbedding(-1, 2), "rows=-1 and dim=2 must not be negative"),
        (lambda: ShardedEmbedding(5, 2, stochastic_rounding=True), "stochastic_rounding=True is about the steps of"),
        (lambda: ShardedEmbeddingBag(5, 2, mode="min"), "ShardedEmbeddingBag: mode='min' is not one of 'sum', 'mean', 'max'"),
        (
            lambda: ShardedEmbeddingBag(5, 2, mode="max", scale_grad_by_freq=True),
            "scale_grad_by_freq does not go with mode='max'",
        ),
        (lambda: Table("a", 5, 2, mode="min"), "Table 'a': mode='min' is not one of"),
        (lambda: Table("a.b", 5, 2), "Table 'a.b': the name must not be empty or have a dot"),
        (lambda: Table("a", 5, 2, features=["x", "x"]), "Table 'a': features=.* has a name twice"),
        (lambda: EmbeddingCollection([A, A]), "EmbeddingCollection: tables and outputs need different names"),
        (
            lambda: EmbeddingCollection(
                [A, Table("b", 5, 2, features=["c", "c@a"]), Table("a@", 5, 2, ["c@a"]), Table("a", 5, 2, ["c"])]
            ),
            "need different names",
        ),
        (lambda: EmbeddingCollection([A], plan={"a": "row", "c": "row"}), "plan has a layout for 'c', which is no table"),
        (lambda: EmbeddingCollection([A], optimizer=SGD), "optimizer=SGD: expected one of unisono.embedding"),
        (lambda: EmbeddingCollection([A], plan="row", optimizer=torch.optim.SGD), "optimizer=SGD: expected one of"),
        (lambda: Table("a", 5.0, 2), r"Table 'a': rows=5\.0 and dim=2 must be integers"),
        (lambda: Table(3, 5, 2), "Table 3: the name and features="),
        (lambda: SGD(lr=-0.1), r"SGD: lr=-0\.1 must be not negative and finite"),
        (lambda: Adam(lr=float("nan")), "Adam: lr=nan must be not negative and finite"),
        (lambda: Adam(lr=0.1, betas=(0.9, 1.0)), r"Adam: betas=\(0\.9, 1\.0\) must be from 0 to below 1"),
        (lambda: RowwiseAdagrad(lr=0.1, eps=-1), "RowwiseAdagrad: eps=-1 must be"),
        (lambda: Adagrad(lr=0.1, weight_decay=float("inf")), "Adagrad: weight_decay=inf must be"),
        (lambda: EmbeddingCollection([A, Table("items", 5, 2)]), r"tables cannot be called \['items'\]"),
        (lambda: EmbeddingCollection([A, B], plan={"a": "row"}), "plan has no layout for table 'b'; it has"),
        (lambda: EmbeddingCollection([A, B], plan={"a": "row", "b": "rows"}), "EmbeddingCollection: plan='rows' is neither"),
        (lambda: EmbeddingCollection([A], plan="rows"), "EmbeddingCollection: plan='rows' is neither a Layout nor one of"),
        (lambda: EmbeddingCollection([A], optimizer={"b": SGD(lr=0.1)}), "optimizer has no rule for table 'a'; it has .'b'."),
        (lambda: EmbeddingCollection([A], optimizer={"a": SGD(lr=1), "b": SGD(lr=1)}), "a rule for 'b', which is no table"),
        (lambda: EmbeddingCollection([A], optimizer={"a": None}), "table 'a': optimizer=NoneType: expected one of"),
        (
            lambda: EmbeddingCollection([A], plan="row", grad_reduce="none"),
            "EmbeddingCollection: grad_reduce='none' is neither",
        ),
    ],
)
def test_bad_arguments(call, text):
    with pytest.raises(ValueError, match=text):
        call()


def error_has_the_right_numbers() -> None:
    """torch's ShardedTensor named the dim where the rows were meant, DTensor returned zeros."""
    for layout in layouts(dist.get_world_size()).values():
        module = ShardedEmbeddingBag(ROWS, DIM, plan=layout)
        with pytest.raises(IdOutOfRange, match=r"id 11 at position 1 .* has 11 rows, 0 to 10"):
            module(torch.tensor([[10, 11]]))
        with pytest.raises(IdOutOfRange, match=r"id 11 at position 0 .* has 11 rows, 0 to 10"):
            ShardedEmbedding(ROWS, DIM, plan=layout)(torch.tensor([ROWS]))


def no_bad_id_reads_another_row() -> None:
    """TorchRec silently returns other rows."""
    for plan in ("row", "column", "table", "replicated"):
        for number in (999, -5):
            with pytest.raises(IndexError, match=f"id {number} .*feature 'a' .*table 'a' has 11 rows"):
                EmbeddingCollection([Table("a", ROWS, 3)], plan=plan)({"a": torch.tensor([3, number])})


@pytest.mark.parametrize("body", [error_has_the_right_numbers, no_bad_id_reads_another_row], ids=lambda body: body.__name__)
@pytest.mark.parametrize("size", [1, 3])
def test_regression(body, size, ranks):
    ranks(body, world_size=size)


def test_rows_and_dim_may_be_integers_of_numpy():
    """As `ids.max() + 1` of an array is."""
    table = Table("a", np.int64(5), np.int32(2))
    assert (table.rows, table.dim) == (5, 2) and type(table.rows) is type(table.dim) is int

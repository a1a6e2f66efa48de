"""scatter and gather: of anything, without loss, and each other's adjoint."""

from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.utils.rnn import pack_sequence

from tests.dataparallel.device_kinds import KINDS, devices_of
from unisono.dataparallel import Replicate, gather, scatter

CPUS = ["cpu"] * 4
Pair = namedtuple("Pair", ["left", "right"])


class Named(NamedTuple):
    x: Tensor
    flag: bool


@dataclass
class Batch:
    x: Tensor
    name: str
    more: Any = None


@dataclass(frozen=True)
class Frozen:
    x: Tensor
    inner: list[Any] = field(default_factory=list)


class Table(dict):  # of somebody's library: pytree takes it for a leaf
    source = "here"


class Row(list):
    pass


class Point(tuple):
    pass


def trees() -> list[Any]:
    x, y = torch.arange(18).view(9, 2), torch.arange(2.0)
    return [
        x,
        {"x": x, "y": y},
        OrderedDict(b=x, a=[y, (x, None)]),
        defaultdict(list, x=x, n=3),
        Pair(x, y),
        Named(x, True),
        Batch(x, "train", {"deep": [y, Batch(y, "inner")]}),
        Frozen(x, [y, "text"]),
        UserDict(input_ids=x, mask=y),
        Table(x=x, nested=Table(y=y)),
        Row([x, y, 1.5]),
        Point((x, y)),
        deque([x, y]),
        [x, 3, "a", None, 2.5, True, torch.tensor(7.0), {"empty": {}}, ()],
    ]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype == other.dtype and torch.equal(one.cpu(), other.cpu())
    if type(one) is not type(other):
        return False
    if isinstance(one, dict | UserDict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(map(same, one, other))
    return same(vars(one), vars(other)) if isinstance(one, Batch | Frozen) else one == other


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", range(len(trees())), ids=[type(tree).__name__ for tree in trees()])
def test_gather_gives_back_what_scatter_took_apart(number, kind, request):
    """But for tensors without dimensions, which go to every device and come back as a vector."""
    devices, tree = devices_of(kind, request), trees()[number]
    parts = scatter(tree, devices)
    assert len(parts) == 4 and all(type(part) is type(tree) for part in parts)
    back = gather(parts, "cpu")
    if isinstance(tree, list) and len(tree) == 9:
        assert torch.equal(back[6].cpu(), torch.full((4,), 7.0))
        back[6] = tree[6]
    assert same(tree, back)
    if isinstance(tree, Table):
        assert back.source == "here"


def test_transformers_types():
    pytest.importorskip("transformers")
    from transformers import BatchEncoding
    from transformers.modeling_outputs import SequenceClassifierOutput

    parts = scatter(BatchEncoding({"input_ids": torch.arange(5), "n": 1}), CPUS[:2])
    assert [type(part) for part in parts] == [BatchEncoding] * 2 and parts[1]["input_ids"].tolist() == [3, 4]
    outputs = [SequenceClassifierOutput(loss=torch.tensor(k + 0.5), logits=torch.full((2 + k, 3), k)) for k in range(2)]
    whole = gather(outputs, "cpu")
    assert type(whole) is SequenceClassifierOutput and whole.hidden_states is None
    assert whole.logits.shape == (5, 3) and whole["loss"].tolist() == [0.5, 1.5]


@given(
    rows=st.integers(0, 9),
    number=st.integers(1, 5),
    dim=st.sampled_from([0, 1, 2, -1, -2, -3]),
    dtype=st.sampled_from([torch.float32, torch.int64, torch.bool, torch.complex64, torch.bfloat16]),
    strided=st.booleans(),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_any_split_is_lossless(rows, number, dim, dtype, strided, data):
    shape = [2, 3, 2]
    shape[dim] = rows
    x = torch.randint(0, 2, shape).to(dtype)
    x = x.transpose(0, 2).contiguous().transpose(0, 2) if strided else x
    cuts = sorted(data.draw(st.lists(st.integers(0, rows), min_size=number - 1, max_size=number - 1)))
    sizes = [b - a for a, b in zip([0, *cuts], [*cuts, rows], strict=True)] if data.draw(st.booleans()) else None
    parts = scatter({"x": x}, ["cpu"] * number, dim=dim, sizes=sizes)
    lengths = [part["x"].shape[dim] for part in parts]
    assert len(parts) == number and lengths == (sizes or [rows // number + (k < rows % number) for k in range(number)])
    assert torch.equal(gather(parts, "cpu", dim=dim)["x"], x)


@pytest.mark.parametrize("kind", KINDS)
def test_scatter_and_gather_are_adjoint(kind, request):
    """<gather(y), x> = <y, scatter(x)>, and the gradient of one is the other."""
    devices = devices_of(kind, request)
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    ys = [
        torch.randn(3, size, dtype=torch.float64, device=d, requires_grad=True)
        for size, d in zip((3, 0, 1, 2), devices, strict=True)
    ]
    parts = scatter(x, devices, dim=-1, sizes=(3, 0, 1, 2))
    whole = gather(ys, "cpu", dim=-1)
    inner = sum((y.detach().cpu() * part.detach().cpu()).sum() for y, part in zip(ys, parts, strict=True))
    torch.testing.assert_close((whole * x).sum(), inner)
    (gradient,) = torch.autograd.grad(parts, [x], [y.detach() for y in ys])
    torch.testing.assert_close(gradient, whole.detach())
    for slice_, part in zip(torch.autograd.grad(whole, ys, x.detach()), parts, strict=True):
        assert slice_.device == part.device
        torch.testing.assert_close(slice_, part.detach())


@pytest.mark.parametrize("kind", KINDS)
def test_derivatives_of_first_and_second_order(kind, request):
    devices = devices_of(kind, request)

    def there_and_back(x: Tensor, scale: Tensor) -> Tensor:
        parts = scatter({"x": x, "scale": scale, "whole": Replicate(x)}, devices, dim=1)
        outputs = [part["x"].sin() * part["scale"] ** 2 + part["whole"].sum() for part in parts]
        return gather(outputs, "cpu", dim=1)

    x = torch.randn(2, 6, dtype=torch.float64, requires_grad=True)
    scale = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    assert gradcheck(there_and_back, (x, scale))
    assert gradgradcheck(there_and_back, (x, scale))


def test_integers_and_constants_take_no_part_in_the_graph():
    x = torch.ones(4, requires_grad=True)
    parts = scatter({"x": x, "n": torch.arange(4), "c": torch.ones(4)}, CPUS[:2])
    assert parts[0]["x"].requires_grad and not parts[0]["n"].requires_grad and not parts[1]["c"].requires_grad
    whole = gather(parts, "cpu")
    assert whole["x"].requires_grad and not whole["n"].requires_grad and not whole["c"].requires_grad


def test_what_stays_on_its_device_is_not_copied_and_results_are_new():
    x = torch.arange(6.0)
    first, second = scatter(x, CPUS[:2])
    assert first.data_ptr() == x.data_ptr() and second.data_ptr() == x[3:].data_ptr()
    assert gather([x], "cpu").data_ptr() != x.data_ptr()


def test_replicate_goes_everywhere_whole_and_comes_back_once():
    x, table = torch.arange(4), torch.randn(3)
    parts = scatter((x, Replicate({"table": table, "names": ["a"]})), CPUS[:2])
    assert all(torch.equal(part[1]["table"], table) and part[1]["names"] == ["a"] for part in parts)
    back = gather([(part[0], Replicate(part[1])) for part in parts], "cpu")
    assert same(back, (x, {"table": table, "names": ["a"]}))
    assert scatter(Replicate(np.arange(3)), CPUS[:1])[0].tolist() == [0, 1, 2]


def test_dicts_whose_keys_are_attributes():
    class Easy(dict):
        def __init__(self, **given: Any) -> None:
            super().__init__(**given)
            self.__dict__ = self

    class Easier(dict):
        def __init__(self, **given: Any) -> None:
            super().__init__(**given)
            self.__dict__.update(given)

    for kind in (Easy, Easier):
        first, second = scatter(kind(x=torch.arange(4), name="a"), CPUS[:2])
        assert first.x.tolist() == first["x"].tolist() == [0, 1] and second.x.tolist() == [2, 3] and second.name == "a"


def test_numpy_scalars_and_sparse_tensors_go_whole():
    parts = scatter((torch.arange(2), np.float32(1.5), Replicate(torch.eye(2).to_sparse())), CPUS[:2])
    assert all(part[1] == 1.5 and torch.equal(part[2].to_dense(), torch.eye(2)) for part in parts)
    assert gather([part[1] for part in parts], "cpu") == 1.5


def test_values_that_differ_are_all_kept():
    assert gather([{"n": 1, "s": "a"}, {"n": 2, "s": "a"}], "cpu") == {"n": [1, 2], "s": "a"}
    one, other = object(), object()
    assert gather([one, other], "cpu") == [one, other] and gather([one, one], "cpu") is one
    assert gather([1, True], "cpu") == [1, True]  # equal, but not the same
    arrays = gather([np.ones(2), np.ones(2)], "cpu")
    assert isinstance(arrays, list) and len(arrays) == 2


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: scatter(torch.ones(3), []), ValueError, ["scatter", "devices=[]"]),
        (lambda: scatter(torch.ones(3), "cpu"), ValueError, ["scatter", "devices='cpu'", "sequence"]),
        (lambda: scatter(torch.ones(3), ["gpu"]), ValueError, ["scatter", "devices='gpu'"]),
        (lambda: scatter(torch.ones(3), ["cpu"], dim=1), ValueError, ["scatter", "dim=1", "(3,)"]),
        (lambda: scatter({"a": [torch.ones(3)]}, CPUS, dim=-2), ValueError, ["dim=-2", "tree['a'][0]"]),
        (lambda: scatter(torch.ones(3), CPUS, sizes=[1, 2]), ValueError, ["sizes=(1, 2)", "4 devices"]),
        (lambda: scatter(torch.ones(3), CPUS[:2], sizes=[1, 1]), ValueError, ["sizes=(1, 1)", "add up to 2", "has 3"]),
        (lambda: scatter(torch.ones(3), CPUS[:2], sizes=[4, -1]), ValueError, ["sizes=(4, -1)"]),
        (lambda: scatter({"a": np.ones(3)}, CPUS), TypeError, ["tree['a']", "ndarray", "Replicate", "as_tensor"]),
        (lambda: scatter(Batch(torch.ones(3).to_sparse(), ""), CPUS), TypeError, ["tree['x']", "sparse", "Replicate"]),
        (lambda: scatter([pack_sequence([torch.ones(2)])], CPUS), TypeError, ["tree[0]", "PackedSequence", "pad it"]),
        (lambda: gather([], "cpu"), ValueError, ["gather", "trees=[]"]),
        (lambda: gather([torch.ones(1)], "gpu"), ValueError, ["gather", "device='gpu'"]),
        (lambda: gather([{"a": 1}, {"b": 1}], "cpu"), ValueError, ["gather", "tree 1", "'b'", "'a'"]),
        (lambda: gather([[None], [torch.ones(1)]], "cpu"), TypeError, ["gather", "[0]", "NoneType, Tensor"]),
        (lambda: gather([torch.ones(1, 2), torch.ones(1, 3)], "cpu"), ValueError, ["gather", "(1, 2), (1, 3)", "dim=0"]),
        (lambda: gather([torch.ones(1), torch.ones(1).int()], "cpu"), ValueError, ["gather", "torch.float32, torch.int32"]),
        (lambda: gather([torch.ones(1), torch.tensor(1.0)], "cpu"), ValueError, ["gather", "(1,), ()"]),
    ],
)
def test_bad_input_raises_and_names_the_argument(call, error, words):
    with pytest.raises(error) as caught:
        call()
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_no_more_copies_than_there_are_parts(kind, request):
    devices = devices_of(kind, request)
    tree = {"x": torch.randn(8, 3), "y": torch.arange(8), "z": torch.randn(2, 8).T}
    parts = scatter(tree, devices)
    if kind == "pretend":
        pretend = request.getfixturevalue("pretend")
        assert pretend.counters()["h2d"] == 12 and pretend.counters()["d2d"] == 0
        pretend.reset_counters()
        gather(parts, devices[1])
        assert pretend.counters()["d2d"] == 9 and pretend.counters()["d2h"] == 0
        pretend.reset_counters()
        assert same(gather(parts, "cpu"), tree) and pretend.counters()["d2h"] == 12


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="fake CUDA tensors need a torch built with CUDA")
def test_placement_on_cuda_without_cuda():
    """Fake tensors know their devices: every part is where it belongs, and so is what comes back."""
    devices = [f"cuda:{k}" for k in range(4)]
    with FakeTensorMode():
        x = torch.empty(9, 2)
        parts = scatter({"x": x, "n": torch.tensor(1)}, devices)
        assert [str(part["x"].device) for part in parts] == devices == [str(part["n"].device) for part in parts]
        assert [part["x"].shape[0] for part in parts] == [3, 2, 2, 2]
        whole = gather([part["x"] * part["n"] for part in parts], "cuda:2")
        assert str(whole.device) == "cuda:2" and whole.shape == (9, 2)
        assert gather(parts, torch.device("cpu"))["x"].device.type == "cpu"
        assert str(scatter(x, ["cuda"])[0].device) == "cuda:0"


def test_compiles_without_a_graph_break():
    @torch.compile(fullgraph=True, backend="aot_eager")
    def run(x: Tensor, w: Tensor) -> dict[str, Tensor]:
        parts = scatter({"x": x, "w": Replicate(w)}, CPUS[:3])
        return gather([{"y": part["x"] @ part["w"], "n": 3} for part in parts], "cpu")

    x, w = torch.randn(7, 3, dtype=torch.float64), torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    y = run(x, w)
    torch.testing.assert_close(y["y"], x @ w)
    torch.testing.assert_close(torch.autograd.grad(y["y"].sum(), w)[0], x.sum(0)[:, None].expand(3, 2))


def test_cpu_tensors_are_taken():
    """torch.nn.parallel.scatter raised for CPU tensors."""
    x = torch.arange(4.0)
    assert torch.equal(gather(scatter(x, CPUS), "cpu"), x)


def test_from_the_cpu_to_any_accelerator_and_back_to_a_torch_device(pretend):
    """torch.nn.parallel.scatter knew CUDA devices only, and gather took no torch.device."""
    x = torch.arange(9.0)
    parts = scatter(x, [torch.device("pretend", k) for k in range(4)])
    assert torch.equal(gather(parts, torch.device("cpu")), x)


def test_no_rows_vanish_when_leaves_differ_in_length():
    """torch.nn.parallel.scatter gave 9 and 2 rows on 4 devices to 2 replicas: rows 7 to 9 were lost."""
    nine, two = torch.arange(9), torch.arange(2)
    parts = scatter((nine, two), CPUS)
    assert len(parts) == 4 and [len(a) for a, _ in parts] == [3, 2, 2, 2] and [len(b) for _, b in parts] == [1, 1, 0, 0]
    back = gather(parts, "cpu")
    assert torch.equal(back[0], nine) and torch.equal(back[1], two)


def test_nine_rows_use_all_four_devices():
    """torch.nn.parallel.scatter split 9 rows into 3, 3 and 3, and one device had nothing to do."""
    assert [len(part) for part in scatter(torch.arange(9), CPUS)] == [3, 2, 2, 2]


def test_none_beside_a_tensor_is_an_error_and_not_none():
    """torch.nn.parallel.gather returned None if the first output was None."""
    with pytest.raises(TypeError, match="NoneType, Tensor"):
        gather([None, torch.ones(2)], "cpu")


def test_texts_and_numbers_are_gathered():
    """torch.nn.parallel.gather returned '<map object ...>' for strings and raised for numbers."""
    assert gather(["a", "b"], "cpu") == ["a", "b"] and gather([3, 3], "cpu") == 3


@dataclass
class Output:
    logits: Tensor
    loss: Tensor
    cache: Any = None


def test_dataclasses_and_default_dicts_and_scalars():
    """torch.nn.parallel.gather raised for dataclasses, default dicts and tensors without dimensions."""
    parts = [Output(torch.ones(k + 1, 2), torch.tensor(float(k))) for k in range(3)]
    whole = gather(parts, "cpu")
    assert whole.logits.shape == (6, 2) and whole.loss.tolist() == [0, 1, 2] and whole.cache is None
    again = scatter(Output(torch.arange(4), torch.tensor(1.0)), CPUS[:2])
    assert again[1].logits.tolist() == [2, 3] and again[1].loss == 1.0
    table = gather([defaultdict(list, x=torch.ones(1)), defaultdict(list, x=torch.ones(2))], "cpu")
    assert isinstance(table, defaultdict) and table["x"].shape == (3,) and table["new"] == []


def test_complex_along_the_last_dimension():
    """torch.nn.parallel.scatter failed for complex tensors along the last dimension."""
    x = torch.randn(2, 5, dtype=torch.complex64)
    assert torch.equal(gather(scatter(x, CPUS, dim=-1), "cpu", dim=-1), x)

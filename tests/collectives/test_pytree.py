"""all_gather of a tree gives what all_gather of each leaf gives, in one message."""

from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from unisono.collectives import MismatchError, all_gather, all_reduce, checked, count_bytes
from unisono.collectives.testing import gradcheck, gradgradcheck, run_ranks

Pair = namedtuple("Pair", ["left", "right"])


@dataclass(frozen=True)
class Batch:
    image: torch.Tensor
    name: str
    more: Any = None


def tree_of(rank: int) -> Any:
    rows = 2 * rank
    return OrderedDict(
        batch=Batch(torch.full((rows, 3), rank + 0.5), "train", [torch.arange(rows + 1), None]),
        pair=Pair(torch.full((1, 2), rank, dtype=torch.bfloat16), (torch.ones(rows, dtype=torch.bool), 7)),
        scalar=torch.tensor(rank + 0.25, dtype=torch.float64),
    )


def matches_leaf_by_leaf(sizes_given: bool) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    if sizes_given:
        tree = {"a": torch.full((rank, 2), 1.0 * rank), "b": torch.full((rank,), rank)}
        got = all_gather(tree, sizes=range(size))
        for key in tree:
            assert torch.equal(got[key], all_gather(tree[key]))
        return
    got, trees = all_gather(tree_of(rank)), [tree_of(r) for r in range(size)]
    assert type(got) is OrderedDict and type(got["batch"]) is Batch and type(got["pair"]) is Pair
    assert got["batch"].name == "train" and got["batch"].more[1] is None and got["pair"].right[1] == 7
    assert torch.equal(got["batch"].image, torch.cat([t["batch"].image for t in trees]))
    assert torch.equal(got["batch"].more[0], torch.cat([t["batch"].more[0] for t in trees]))
    assert torch.equal(got["pair"].left, torch.cat([t["pair"].left for t in trees]))
    assert torch.equal(got["pair"].right[0], torch.cat([t["pair"].right[0] for t in trees]))
    assert torch.equal(got["scalar"], torch.stack([t["scalar"] for t in trees]))


@pytest.mark.parametrize("sizes_given", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_tree_matches_leaf_by_leaf(world_size, sizes_given):
    run_ranks(matches_leaf_by_leaf, sizes_given, world_size=world_size)


def tree_gradients(grad: str) -> None:
    rank = dist.get_rank()
    torch.manual_seed(rank)
    a = torch.randn(rank, 2, dtype=torch.float64, requires_grad=True)
    b = torch.randn(3, 1 + rank, dtype=torch.float64, requires_grad=True)

    def together(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        got = all_gather({"a": a, "label": torch.arange(rank), "b": [b.T]}, grad=grad)
        return got["a"] ** 2, got["b"][0] ** 3

    def apart(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return all_gather(a, grad=grad) ** 2, all_gather(b.T, grad=grad) ** 3

    for f in (together, apart):
        loss = torch.stack([(y * (rank + 1)).sum() for y in f(a, b)]).sum()
        first = torch.autograd.grad(loss, (a, b), create_graph=True)
        second = torch.autograd.grad(sum((g**3).sum() for g in first), (a, b))
        if f is together:
            kept = *first, *second
        else:
            torch.testing.assert_close(kept, (*first, *second), rtol=1e-13, atol=1e-13)
    if grad == "sum":
        gradcheck(together, a, b, atol=1e-6)
        gradgradcheck(together, a, b, atol=1e-5)


@pytest.mark.parametrize("grad", ["sum", "slice"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_tree_gradients_match_leaf_by_leaf(world_size, grad):
    run_ranks(tree_gradients, grad, world_size=world_size)


def tree_under_func() -> None:
    x = torch.randn(2 + dist.get_rank(), 3, dtype=torch.float64)
    together = torch.func.grad(lambda x: (all_gather({"x": x})["x"] ** 2).sum())(x)
    torch.testing.assert_close(together, 2 * dist.get_world_size() * x)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        tangent = torch.autograd.forward_ad.unpack_dual(all_gather({"x": dual})["x"]).tangent
        alone = torch.autograd.forward_ad.unpack_dual(all_gather(dual)).tangent
    assert tangent.shape == (5, 3) and (tangent == 1).all() and torch.equal(tangent, alone)


def test_tree_under_torch_func():
    run_ranks(tree_under_func, world_size=2)


def communicates_once() -> None:
    """One exchange for sizes, one for the data, whatever the number of leaves; backward one."""
    leaves = {str(k): torch.ones(2, k + 1, requires_grad=True) for k in range(5)}
    with count_bytes() as traffic:
        one = all_gather({"0": leaves["0"]})
    single = traffic.calls
    with count_bytes() as traffic:
        one["0"].sum().backward()
    single_backward = traffic.calls
    with count_bytes() as traffic:
        got = all_gather(leaves)
    assert traffic.calls == single
    with count_bytes() as traffic:
        sum(y.sum() for y in got.values()).backward()
    assert traffic.calls == single_backward
    assert traffic.sent == 4 * 2 * sum(range(1, 6)) * (dist.get_world_size() - 1)


def test_tree_communicates_once():
    run_ranks(communicates_once, world_size=3)


def different_trees() -> str:
    rank = dist.get_rank()
    tree = {"image": torch.ones(2), "text": torch.ones(2)} if rank else {"image": torch.ones(2)}
    with pytest.raises(MismatchError) as caught:
        all_gather(tree)
    with pytest.raises(MismatchError):
        all_gather([torch.ones(2), rank])  # what is not a tensor must be equal
    assert all_gather(torch.ones(1)).shape == (2,)  # and nobody is out of step
    return str(caught.value)


def test_different_trees_raise_on_all_ranks():
    messages = run_ranks(different_trees, world_size=2)
    assert messages[0] == messages[1]
    assert "rank 0: all_gather(a tree of float32[2], dim=0)" in messages[0] and "'text'" in messages[0]


class Setting:
    """Not a tensor; its default repr shows an address."""

    def __init__(self, names: set[str]) -> None:
        self.names = names


def equal_trees_whose_repr_differs() -> str:
    names = {"audio", "image", "label", "text", "video"}
    tree = {
        "x": torch.ones(1),
        "names": names,
        "setting": Setting(names),
        "function": different_trees,
        frozenset(names): torch.ones(1),
        "default": defaultdict(lambda: 0, x=torch.ones(1)),
    }
    assert all_gather(tree)["x"].shape == (2,)
    with pytest.raises(MismatchError, match="rank 1"):
        all_gather({"x": torch.ones(1), "setting": Setting({"audio", str(dist.get_rank())})})
    return repr(names)


def test_equal_trees_match_whatever_the_hash_seed():
    """Ranks compared the repr of what is not a tensor: equal sets differed by hash seed, equal objects by address."""
    texts = run_ranks(equal_trees_whose_repr_differs, world_size=2)
    assert texts[0] != texts[1], "the ranks must have different hash seeds, or this proves nothing"


def mixed_dtypes() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    half = torch.ones(1 + rank, dtype=torch.float16, requires_grad=True)
    double = torch.ones(2, dtype=torch.float64, requires_grad=True)
    eighth = torch.ones(2).to(torch.float8_e5m2)
    got = all_gather({"half": half, "byte": torch.ones(3, dtype=torch.uint8), "eighth": eighth, "double": double})
    (got["half"].sum() + got["double"].sum()).backward()
    assert half.grad.tolist() == [size] * (1 + rank) and double.grad.tolist() == [size] * 2
    assert not all_gather({"x": torch.ones(2)}, sizes=[2] * size)["x"].requires_grad
    all_gather({"double": double, "eighth": eighth}, sizes=[2] * size)["double"].sum().backward()


@pytest.mark.parametrize("world_size", [1, 2])
def test_tree_of_mixed_dtypes(world_size):
    run_ranks(mixed_dtypes, world_size=world_size)


def reduced_tree(op: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()

    def tree_on(r: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(r)
        leaves = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((3, 2), (), (40_000,), (0, 2))]
        batch = Batch(leaves[0].requires_grad_(), "train", [leaves[1].requires_grad_(), None])
        return {"batch": batch, "large": leaves[2].requires_grad_(), "none": leaves[3], "half": leaves[0].bfloat16()}

    mine, everyone = tree_on(rank), [tree_on(r) for r in range(size)]
    got = all_reduce(mine, op)
    reduce = {"sum": torch.sum, "avg": torch.mean, "max": torch.amax}[op]
    expected = {name: reduce(torch.stack([t[name] for t in everyone]), 0) for name in ("large", "none", "half")}
    assert type(got["batch"]) is Batch and got["batch"].name == "train" and got["batch"].more[1] is None
    torch.testing.assert_close({name: got[name] for name in expected}, expected)
    torch.testing.assert_close(got["batch"].image, reduce(torch.stack([t["batch"].image for t in everyone]), 0))

    def losses(tree: dict[str, Any], r: int) -> torch.Tensor:
        return (r + 1) * (tree["batch"].image ** 3).sum() + tree["batch"].more[0] ** 2 + (tree["large"] ** 2).sum()

    def leaves_of(tree: dict[str, Any]) -> list[torch.Tensor]:
        return [tree["batch"].image, tree["batch"].more[0], tree["large"]]

    apart = {**mine, "batch": Batch(all_reduce(mine["batch"].image, op), "", [all_reduce(mine["batch"].more[0], op)])}
    apart["large"] = all_reduce(mine["large"], op)
    for tree in (got, apart):
        first = torch.autograd.grad(losses(tree, rank), leaves_of(mine), create_graph=True)
        second = torch.autograd.grad(sum((g**3).sum() for g in first), leaves_of(mine))
        if tree is got:
            kept = (*first, *second)
    torch.testing.assert_close(kept, (*first, *second), rtol=1e-12, atol=1e-12)
    for leaf in leaves_of(got):
        with torch.no_grad():
            leaf.add_(1)  # a tensor of its own


@pytest.mark.parametrize("op", ["sum", "avg", "max"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_all_reduce_of_a_tree_matches_leaf_by_leaf(world_size, op):
    run_ranks(reduced_tree, op, world_size=world_size)


def reduced_once() -> None:
    leaves = [torch.ones(k + 1) for k in range(5)]
    with count_bytes() as traffic:
        all_reduce(leaves)
    assert traffic.calls == 1
    with pytest.raises(TypeError, match=r"all_reduce: x\['loss'\]: expected a Tensor, got 0.5 of type float"):
        all_reduce({"loss": 0.5})
    with pytest.raises(MismatchError, match="rank 1: all_reduce"), checked(call_sites=False):
        all_reduce({"a": torch.ones(1)} if dist.get_rank() else {"b": torch.ones(1)})


def test_all_reduce_of_a_tree_communicates_once_and_refuses_numbers():
    run_ranks(reduced_once, world_size=2)

"""One process with the whole table and the whole batch: the reference for all layouts and splits."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unisono.embedding import Layout, ShardedEmbedding, ShardedEmbeddingBag

ROWS, DIM = 11, 5
_WRONG_BY_FREQUENCY = tuple(int(x) for x in torch.__version__.split(".")[:2]) < (2, 15)


def embedding_bag(ids: Tensor, weight: Tensor, offsets: Tensor, **options: Any) -> Tensor:
    """torch.nn.functional.embedding_bag, mended: before torch 2.15 its gradient with scale_grad_by_freq is wrong."""
    if not (options.get("scale_grad_by_freq") and _WRONG_BY_FREQUENCY):
        return nn.functional.embedding_bag(ids, weight, offsets, **options)
    mode, padding = options.pop("mode", "mean"), options.get("padding_idx")
    weights, include_last = options.pop("per_sample_weights", None), options.pop("include_last_offset", False)
    ends = offsets[1:] if include_last else torch.cat([offsets[1:], offsets.new_tensor([len(ids)])])
    bags = torch.arange(len(ends)).repeat_interleave(ends - offsets[: len(ends)])
    rows = nn.functional.embedding(ids, weight, **options)
    rows = rows if weights is None else rows * weights[:, None]
    keep = torch.ones_like(ids, dtype=torch.bool) if padding is None else ids != padding % len(weight)
    sums = rows.new_zeros((len(ends), rows.shape[1])).index_add(0, bags[keep], rows[keep])
    return sums if mode == "sum" else sums / torch.bincount(bags[keep], minlength=len(ends)).clamp(min=1)[:, None]


class WholeBag(nn.EmbeddingBag):
    """torch.nn.EmbeddingBag on that function."""

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        if offsets is None:
            return super().forward(input, offsets, per_sample_weights)
        names = ("mode", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse", "include_last_offset")
        options = {name: getattr(self, name) for name in names}
        return embedding_bag(input, self.weight, offsets, per_sample_weights=per_sample_weights, **options)


def layouts(world_size: int) -> dict[str, Layout]:
    """Every kind of layout, with ranks in order and not, on all ranks and on some."""
    everyone = list(range(world_size))
    found = {
        "row": Layout.row(),
        "row, turned": Layout.row(everyone[::-1]),
        "column": Layout.column(),
        "column of rows": Layout.column(everyone[1:] + everyone[:1], answers="rows"),
        "table": Layout.table(world_size - 1),
        "table of rows": Layout.table(world_size // 2, answers="rows"),
        "replicated": Layout.replicated(),
    }
    if world_size > 2:
        found["row on some"] = Layout.row([2, 0])
        found["column on some"] = Layout.column([2, 1])
    return found


def local_gradient(module: ShardedEmbedding | ShardedEmbeddingBag) -> Tensor | None:
    """Gather the gradient of the whole table."""
    grad = module.weight.grad
    if grad is None:
        shard = torch.zeros_like(module.local)
    else:
        shard = grad.to_local() if hasattr(grad, "to_local") else grad
        shard = shard.to_dense() if shard.is_sparse else shard
        shard = shard.reshape(module.box.shape)
    return module._gather(shard)


def draw_case(case: dict[str, Any], rank: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Draw a rank's input, offsets and weights: uneven, on some ranks empty, with empty bags, some with more bags than ids."""
    draw = torch.Generator().manual_seed(100 + rank)
    lengths = case["lengths"][rank % len(case["lengths"])]
    n = sum(lengths)
    ids = torch.randint(ROWS, (n,), generator=draw, dtype=case.get("int", torch.int64))
    offsets = torch.tensor([0, *lengths]).cumsum(0)[:-1].to(ids.dtype)
    weights = torch.randn(n, generator=draw, dtype=torch.float64) if case.get("weights") else None
    return ids, offsets, weights


LENGTHS = [[3, 0, 2, 1], [], [0, 0, 0, 4], [5, 1]]


def run_bag(case: dict[str, Any], layout: str) -> None:
    """Compare one step on this rank with the whole batch in one process."""
    rank, size = dist.get_rank(), dist.get_world_size()
    case = {"lengths": LENGTHS, "mode": "sum", **case}
    options = case.get("options", {})
    torch.manual_seed(0)
    dense = WholeBag(ROWS, DIM, mode=case["mode"], dtype=torch.float64, **options)
    reduce = case.get("grad_reduce", "sum")
    module = ShardedEmbeddingBag.from_dense(dense, layouts(size)[layout], grad_reduce=reduce, sparse=case.get("sparse", False))
    inputs = [draw_case(case, r) for r in range(size)]
    ids = torch.cat([x for x, _, _ in inputs])
    starts = torch.tensor([0, *(len(x) for x, _, _ in inputs)]).cumsum(0)
    offsets = torch.cat([o + starts[r] for r, (_, o, _) in enumerate(inputs)])
    weights = torch.cat([w for _, _, w in inputs]).requires_grad_() if case.get("weights") else None
    bags = [len(o) for _, o, _ in inputs]
    upstream = torch.randn(sum(bags), DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(7))

    expected = dense(ids, offsets.to(ids.dtype), weights)
    (expected * upstream).sum().backward()

    own_ids, own_offsets, own_weights = inputs[rank]
    if own_weights is not None:
        own_weights = own_weights.requires_grad_(case["weights"] == "learned")
    out = module(own_ids, own_offsets, own_weights)
    (out * upstream.split(bags)[rank]).sum().backward()

    torch.testing.assert_close(out, expected.split(bags)[rank])
    scale = 1 / size if reduce == "mean" else 1
    torch.testing.assert_close(local_gradient(module), dense.weight.grad * scale)
    torch.testing.assert_close(module.full_weight(), dense.weight.detach())  # max_norm changes it
    if case.get("weights") == "learned":
        torch.testing.assert_close(own_weights.grad, weights.grad.split([len(x) for x, _, _ in inputs])[rank])
    elif own_weights is not None:
        assert own_weights.grad is None


def run_embedding(case: dict[str, Any], layout: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    options = case.get("options", {})
    torch.manual_seed(0)
    dense = nn.Embedding(ROWS, DIM, dtype=torch.float64, **options)
    module = ShardedEmbedding.from_dense(dense, layouts(size)[layout], grad_reduce="sum", sparse=case.get("sparse", False))
    shapes = [(2, 3), (0, 3), (1, 3), (4, 3)]
    inputs = [
        torch.randint(case.get("low", 0), ROWS, shapes[r % 4], generator=torch.Generator().manual_seed(r)) for r in range(size)
    ]
    upstream = [
        torch.randn(*x.shape, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(50 + r))
        for r, x in enumerate(inputs)
    ]
    expected = dense(torch.cat(inputs))
    (expected * torch.cat(upstream)).sum().backward()
    out = module(inputs[rank])
    (out * upstream[rank]).sum().backward()
    torch.testing.assert_close(out, expected.split([len(x) for x in inputs])[rank])
    torch.testing.assert_close(local_gradient(module), dense.weight.grad)
    torch.testing.assert_close(module.full_weight(), dense.weight.detach())


Bags = list[list[int]]
UPPER_ROWS: list[Bags] = [[[6, 10], [7]], [[9, 9, 8]], [[10], [6, 8, 7]]]
MIXED: list[Bags] = [[[0, 3, 3], [], [10]], [[5, 3]], [[3], [3, 3, 9, 1], []]]


def compare_training(dense: Any, everyones: Sequence[Bags], *, steps: int = 1, sparse: bool = False) -> None:
    """Compare `steps` steps of torch's SGD on all layouts with one process. `everyones`: the bags of each rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    everyones = everyones[:size]
    flat = [[number for bag in bags for number in bag] for bags in everyones]
    pooled = isinstance(dense, nn.EmbeddingBag)
    counts = [len(bags) if pooled else len(ids) for bags, ids in zip(everyones, flat, strict=True)]
    upstream = torch.randn(sum(counts), DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def look_up(module: Any, bags: Bags, ids: list[int]) -> Tensor:
        given = torch.tensor(ids, dtype=torch.int64)
        return module(given, torch.tensor([0, *map(len, bags)]).cumsum(0)[:-1]) if pooled else module(given)

    for layout in layouts(size).values():
        whole = copy.deepcopy(dense)
        ours = (ShardedEmbeddingBag if pooled else ShardedEmbedding).from_dense(whole, layout, grad_reduce="sum", sparse=sparse)
        parameter = ours.weight
        optimizers = [torch.optim.SGD(module.parameters(), lr=0.5) for module in (whole, ours)]
        for _ in range(steps):
            for optimizer in optimizers:
                optimizer.zero_grad()
            expected = look_up(whole, [bag for bags in everyones for bag in bags], [number for ids in flat for number in ids])
            (expected * upstream).sum().backward()
            out = look_up(ours, everyones[rank], flat[rank])
            (out * upstream.split(counts)[rank]).sum().backward()
            torch.testing.assert_close(out, expected.split(counts)[rank])
            torch.testing.assert_close(local_gradient(ours), whole.weight.grad)
            for optimizer in optimizers:
                optimizer.step()
        torch.testing.assert_close(ours.full_weight(), whole.weight.detach())
        assert ours.weight is parameter and parameter.is_leaf and parameter.requires_grad


def make_bag(**options: Any) -> nn.EmbeddingBag:
    torch.manual_seed(0)
    return WholeBag(ROWS, DIM, dtype=torch.float64, **{"mode": "sum", **options})


def make_embedding(**options: Any) -> nn.Embedding:
    torch.manual_seed(0)
    return nn.Embedding(ROWS, DIM, dtype=torch.float64, **options)

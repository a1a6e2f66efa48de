"""Gather a whole tree of tensors in one exchange: all leaves travel as one run of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from unisono.collectives.agreement import agree
from unisono.collectives.checking import call_site, checking, describe, user_frame
from unisono.collectives.groups import Ranks
from unisono.collectives.linear import Linear, apply, run
from unisono.collectives.sizes import complaint, from_rows, join_graph, length_of, refuse, settle_sizes, size_complaint, to_rows
from unisono.collectives.structures import flatten
from unisono.collectives.wire import as_bytes, sum_in_order

Tree = TypeVar("Tree")


def gather_tree(tree: Tree, dim: int, sizes: Sequence[int] | None, kind: str, ranks: Ranks) -> Tree:
    """all_gather for the tensors of `tree`; anything else in it must be equal on all ranks and is kept."""
    leaves, structure = flatten(tree)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    tensors = [leaves[place] for place in places]
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        gathered = [_gather_leaf(x, dim, sizes, kind, ranks) for x in tensors]  # bytes cannot be traced: leaf by leaf
    else:
        others = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
        table = _settle(
            tensors, dim, sizes, (str(structure), repr(others), kind), _tree_complaint(tree, tensors, others), ranks
        )
        rows = [to_rows(join_graph(x, table[place]), dim) for place, x in enumerate(tensors)]
        lengths = tuple(tuple(row[0] for row in leaf) for leaf in table)
        moving = tuple((x.is_floating_point() and x.dtype.itemsize > 1) or x.is_complex() for x in tensors)
        wanted = tuple(moves and any(row[1] for row in leaf) for moves, leaf in zip(moving, table, strict=True))
        layout = _Layout(ranks, lengths, wanted, kind, call_site())
        gathered = [from_rows(y, dim) for y in _GatherTree.apply(layout, *rows)]
    for place, y in zip(places, gathered, strict=True):
        leaves[place] = y
    result: Tree = structure.rebuild(leaves)
    return result


def _tree_complaint(tree: object, tensors: list[Tensor], others: list[Any]) -> str:
    """Values that look as if they were to be gathered, but are not tensors."""
    arrays = [type(leaf).__name__ for leaf in others if hasattr(leaf, "__array__")]
    if arrays or (not tensors and any(leaf is not None for leaf in others)) or tree is None:
        kind = arrays[0] if arrays else type(tree).__name__
        return f"x: expected a Tensor or a tree of tensors, got {kind}{'' if arrays else ' without any tensor'}"
    return ""


def _gather_leaf(x: Tensor, dim: int, sizes: Sequence[int] | None, kind: str, ranks: Ranks) -> Tensor:
    x, lengths = settle_sizes("all_gather", x, dim, sizes, ranks)
    plan = Linear(kind, ranks, send=(lengths[ranks.rank],), receive=lengths, call="all_gather of a tree", site=call_site())
    return from_rows(apply(to_rows(x, dim), plan), dim)


def _settle(
    tensors: list[Tensor], dim: int, sizes: Sequence[int] | None, same: tuple[object, ...], problem: str, ranks: Ranks
) -> list[list[list[int]]]:
    """For every leaf and rank: its length along `dim` and whether a gradient is needed."""
    problem = problem or size_complaint("sizes", sizes, ranks)
    problem = problem or next((bad for x in tensors if (bad := complaint(x, dim))), "")
    if len({x.device for x in tensors}) > 1:
        problem = f"x: the leaves of a tree must be on one device, got {sorted({str(x.device) for x in tensors})}"
    lengths = [0 if problem else length_of(x, dim) for x in tensors]
    if sizes is not None and not problem and any(length != sizes[ranks.rank] for length in lengths):
        problem = f"sizes={tuple(sizes)} promises {sizes[ranks.rank]} along dim {dim}, but the leaves have {lengths}"
    if sizes is not None and not checking():
        refuse("all_gather", problem, ranks)
        return [[[size, x.requires_grad and torch.is_grad_enabled()] for size in sizes] for x in tensors]

    def others(x: Tensor) -> tuple[object, ...]:
        return str(x.dtype), x.ndim, [size for d, size in enumerate(x.shape) if d != dim % x.ndim]

    recording = torch.is_grad_enabled()
    table = agree(
        "all_gather",
        ranks,
        same=("all_gather", dim, same, sizes and tuple(sizes), [] if problem else [others(x) for x in tensors]),
        numbers=[n for x, length in zip(tensors, lengths, strict=True) for n in (length, x.requires_grad and recording)],
        words=lambda: (
            f"all_gather(a tree of {', '.join(map(describe, tensors))}, dim={dim}) at {user_frame()}, "
            f"in {' '.join(str(same[0]).split())} beside {same[1]}"
        ),
        device=tensors[0].device if tensors else None,
        rule=f"The tree, its dtypes, every dimension but {dim}, and all that is not a tensor must be the same on every rank.",
        problem=problem,
    )
    return [[row[2 * leaf : 2 * leaf + 2] for row in table] for leaf in range(len(tensors))]


@dataclass(frozen=True)
class _Layout:
    ranks: Ranks
    lengths: tuple[tuple[int, ...], ...]  # of every leaf, on every rank
    wanted: tuple[bool, ...]  # leaves that some rank wants a gradient for
    kind: str
    site: str

    def row_counts(self, widths: Sequence[int]) -> list[list[int]]:
        """Bytes of each leaf, for every rank."""
        return [[length[r] * width for length, width in zip(self.lengths, widths, strict=True)] for r in range(self.ranks.size)]

    def of_wanted(self) -> _Layout:
        lengths = tuple(length for length, wanted in zip(self.lengths, self.wanted, strict=True) if wanted)
        return _Layout(self.ranks, lengths, (True,) * len(lengths), self.kind, self.site)


def _widths(rows: Sequence[Tensor]) -> list[int]:
    return [x.dtype.itemsize * x.shape[1:].numel() for x in rows]


def _flat(rows: Tensor) -> Tensor:
    return as_bytes(rows.resolve_conj().resolve_neg().contiguous()).view(-1)


class _GatherTree(torch.autograd.Function):
    """Backward: _ScatterTree of the leaves that some rank wants a gradient for, or the own slice of each."""

    @staticmethod
    def forward(ctx: Any, layout: _Layout, *rows: Tensor) -> tuple[Tensor, ...]:
        ctx.layout = layout
        counts = layout.row_counts(_widths(rows))
        totals = tuple(sum(count) for count in counts)
        plan = Linear(
            "all_gather", layout.ranks, (totals[layout.ranks.rank],), totals, call="all_gather of a tree", site=layout.site
        )
        packed = torch.cat([_flat(x) for x in rows]) if rows else torch.empty(0, dtype=torch.uint8)
        by_rank = [part.split(count) for part, count in zip(run(packed, plan).split(totals), counts, strict=True)]
        out = tuple(
            torch.cat([parts[leaf] for parts in by_rank]).view(x.dtype).view(sum(layout.lengths[leaf]), *x.shape[1:])
            for leaf, x in enumerate(rows)
        )
        ctx.mark_non_differentiable(*(y for y, wanted in zip(out, layout.wanted, strict=True) if not wanted))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        layout: _Layout = ctx.layout
        wanted = [grad for grad, wants in zip(grads, layout.wanted, strict=True) if wants]
        if layout.kind == "all_gather_own":
            slices = zip(wanted, layout.of_wanted().lengths, strict=True)
            back = [grad.split(lengths)[layout.ranks.rank] for grad, lengths in slices]
        else:
            back = list(_ScatterTree.apply(layout.of_wanted(), *wanted))
        results = iter(back)
        return None, *(next(results) if wants else None for wants in layout.wanted)


class _ScatterTree(torch.autograd.Function):
    """The adjoint of gathering a tree: each rank gets the sum over ranks of its slice of every leaf. Backward: _GatherTree."""

    @staticmethod
    def forward(ctx: Any, layout: _Layout, *rows: Tensor) -> tuple[Tensor, ...]:
        ctx.layout = layout
        size, rank = layout.ranks.size, layout.ranks.rank
        counts = layout.row_counts(_widths(rows))
        parts = [[_flat(part) for part in x.split(lengths)] for x, lengths in zip(rows, layout.lengths, strict=True)]
        packed = torch.cat([leaf[r] for r in range(size) for leaf in parts])
        own = sum(counts[rank])
        send = tuple(sum(count) for count in counts)
        plan = Linear(
            "all_to_all", layout.ranks, send, (own,) * size, call="backward of all_gather of a tree", site=layout.site
        )
        columns = run(packed, plan).view(size, own).split(counts[rank], dim=1)
        return tuple(
            sum_in_order(column.reshape(-1).clone().view(x.dtype).view(size, lengths[rank], *x.shape[1:]).unbind())
            for column, x, lengths in zip(columns, rows, layout.lengths, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_GatherTree.apply(ctx.layout, *grads)

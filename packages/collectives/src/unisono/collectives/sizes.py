"""Sizes: how a dimension is divided over the ranks. They are exchanged in one small message, or given and validated."""

from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch._library.effects import EffectType

from unisono.collectives.checks import checks_enabled, describe, tensor_error, user_frame, validate_across_ranks
from unisono.collectives.groups import Group, GroupRanks, resolve_group

Sizes: TypeAlias = Sequence[int] | Tensor | Literal["equal"] | None
"""Every rank's length along a dimension: integers, or one tensor of them. "equal": the caller promises that all are the same.

None: not known, or as even as possible.
"""


def exchange_sizes(x: Tensor, dim: int = 0, *, group: Group = None) -> tuple[int, ...]:
    """Return the length of `x` along `dim` on each rank, in rank order.

    Pass the result as `sizes=` to later calls: they then need no exchange of their own. All ranks must have the same dtype
    and the same other dimensions; otherwise all of them raise the same MismatchError.

    Example, 2 ranks holding 3 and 5 rows:
        exchange_sizes(x)  ->  (3, 5) on both
    """
    return metadata_lengths(all_gather_metadata("exchange_sizes", x, dim, resolve_group(group)))


def even_sizes(length: int, parts: int) -> tuple[int, ...]:
    """Divide `length` as evenly as possible, longer parts first, as torch.tensor_split does."""
    return tuple((length + parts - 1 - part) // parts for part in range(parts))  # no branch: torch.compile traces it


def one_rank_sizes(rank: int, rows: int, ranks: GroupRanks) -> tuple[int, ...]:
    """Return sizes with `rows` for one rank and 0 for the others."""
    return tuple(rows if r == rank else 0 for r in range(ranks.size))


def to_rows(x: Tensor, dim: int) -> Tensor:
    """Move `dim` to the front; a scalar becomes one row."""
    if dim == 0 and x.ndim:
        return x
    return x.reshape(1) if x.ndim == 0 else x.movedim(dim, 0)


def from_rows(rows: Tensor, dim: int) -> Tensor:
    """Undo `to_rows`, with the memory layout that torch.cat would give."""
    return rows if dim == 0 or dim == -rows.ndim else rows.movedim(0, dim).contiguous()


def with_shape_of(x: Tensor, rows: Tensor) -> Tensor:
    """Undo to_rows(x, 0) for `rows` that have its shape."""
    return rows.reshape(()) if x.ndim == 0 else rows


def length_of(x: Tensor, dim: int) -> int:
    return x.shape[dim] if x.ndim else 1


def dim_error(x: object, dim: int) -> str:
    """Return what is wrong with `x` and `dim`, or ""."""
    if problem := tensor_error(x):
        return problem
    assert isinstance(x, Tensor)  # said by tensor_error
    if not isinstance(dim, int) or not -max(x.ndim, 1) <= dim < max(x.ndim, 1):
        return f"dim={dim!r} is out of range for x of shape {tuple(x.shape)}"
    return ""


def promises_equal(sizes: object) -> bool:
    """Return whether `sizes` is the word "equal"."""
    return isinstance(sizes, str) and sizes == "equal"


def as_tuple(sizes: Sizes, length: int, ranks: GroupRanks) -> Sequence[int] | None:
    """Return `sizes` as integers, each of them `length` for "equal"; None and what is wrong stay as they are."""
    if isinstance(sizes, Tensor):
        return tuple(sizes.flatten().tolist())
    return (length,) * ranks.size if promises_equal(sizes) else sizes  # type: ignore[return-value]


def gradient_error(x: object) -> str:
    """Return what is wrong if the gradients of `x`, which it requires, will have to be added; otherwise ""."""
    if (
        isinstance(x, Tensor)
        and x.is_floating_point()
        and x.dtype.itemsize == 1
        and x.requires_grad
        and torch.is_grad_enabled()
    ):
        return f"x: the ranks cannot add gradients in {x.dtype}: pass x.detach(), or convert x first, to bfloat16 for instance"
    return ""


def sizes_error(name: str, sizes: Sequence[int] | None, ranks: GroupRanks) -> str:
    if sizes is None:
        return ""
    if not isinstance(sizes, Sequence) or isinstance(sizes, str):
        return f"{name}={sizes!r} must be a sequence of lengths, one for each rank, or 'equal'"
    if any(isinstance(size, (bool, float, str)) for size in sizes):
        return f"{name}={tuple(sizes)} must be integers"
    if len(sizes) != ranks.size or min(sizes) < 0:
        return f"{name}={tuple(sizes)} must have one length for each of {ranks.size} rank{'s' * (ranks.size > 1)}"
    return ""


def split_sizes(name: str, sizes: Sizes, x: Tensor, dim: int, ranks: GroupRanks) -> tuple[tuple[int, ...], str]:
    """Return the length of each rank's part of `x` along `dim`, even if `sizes` is None, and what is wrong, or ""."""
    if problem := dim_error(x, dim):
        return (), problem
    length = length_of(x, dim)
    if promises_equal(sizes) and length % ranks.size:
        return (), f"{name}='equal': {ranks.size} ranks cannot have equal parts along dim {dim} of x of shape {tuple(x.shape)}"
    sizes = as_tuple(sizes, length // ranks.size, ranks)
    if problem := sizes_error(name, sizes, ranks):
        return (), problem
    if sizes is None:
        return even_sizes(length, ranks.size), ""
    if sum(sizes) != length:
        problem = f"{name}={tuple(sizes)} do not add up to the length along dim {dim} of x of shape {tuple(x.shape)}"
    return tuple(sizes), problem


def raise_local_error(function: str, problem: str, ranks: GroupRanks) -> None:
    """Raise for a `problem` that only this rank may know of."""
    if problem and ranks.size == 1:
        raise ValueError(f"{function}: {problem}")
    if problem:
        raise ValueError(
            f"{function}: {problem} (rank {ranks.rank} of {ranks.size}; with sizes given, the ranks do not compare their "
            "calls, so the others may wait for this one: run with UNISONO_CHECK=1 to raise this on all ranks)"
        )


def resolve_sizes(
    function: str, x: Tensor, dim: int, sizes: Sizes, ranks: GroupRanks, same: str = "", problem: str = ""
) -> tuple[Tensor, tuple[int, ...]]:
    """Return `x`, which now requires a gradient if that of any rank does, and every rank's length along `dim`.

    `same`: the other arguments, as a text that must be the same on all ranks. `problem`: what else is wrong on this rank.
    """
    if sizes is None:
        table = all_gather_metadata(function, x, dim, ranks, same=same, problem=problem)
        return join_graph(x, table), metadata_lengths(table)
    problem = problem or dim_error(x, dim)
    lengths = as_tuple(sizes, 0 if problem else length_of(x, dim), ranks)
    assert lengths is not None  # sizes are given
    problem = problem or sizes_error("sizes", lengths, ranks)
    if not problem and length_of(x, dim) != lengths[ranks.rank]:
        problem = f"sizes={tuple(lengths)} promises {lengths[ranks.rank]} along dim {dim}, but x has shape {tuple(x.shape)}"
    if checks_enabled():
        promised = promises_equal(sizes)
        known = "equal" if promised or problem else tuple(lengths)
        same = f"sizes={known!r}{', ' * bool(same)}{same}"
        all_gather_metadata(function, x, dim, ranks, problem=problem, same=same, ragged=not promised)
    raise_local_error(function, problem, ranks)
    return x, tuple(lengths)


def all_gather_metadata(
    function: str,
    x: Tensor,
    dim: int,
    ranks: GroupRanks,
    *,
    extra: Sequence[int] = (),
    same: str = "",
    ragged: bool = True,
    problem: str = "",
) -> list[list[int]]:
    """Return one row for every rank: its length along `dim`, whether it needs a gradient, and `extra`.

    All ranks must have the same `same`, a text that errors show, and the same shape, except along `dim` if `ragged`.
    """
    if torch.compiler.is_compiling():
        raise_local_error(function, problem or dim_error(x, dim), ranks)
        table: list[list[int]] = _op(x, dim, extra, same, ragged, function, *ranks).tolist()
        return table
    return _all_gather_metadata(function, x, dim, ranks, extra, same, ragged, problem)


def _all_gather_metadata(
    function: str, x: Tensor, dim: int, ranks: GroupRanks, extra: Sequence[int], same: str, ragged: bool, problem: str = ""
) -> list[list[int]]:
    """all_gather_metadata in eager mode. is_compiling() cannot decide here: it is also true while another thread compiles."""
    problem = problem or dim_error(x, dim)
    shape: tuple[int, ...] = ()
    metadata = (0, 0)
    if not problem:
        dim = dim % max(x.ndim, 1)
        metadata = (length_of(x, dim), int(x.requires_grad and torch.is_grad_enabled()))
        if x.ndim:
            shape = (*x.shape[:dim], -1 if ragged else x.shape[dim], *x.shape[dim + 1 :])
    return validate_across_ranks(
        function,
        ranks,
        same=(function, dim, str(getattr(x, "dtype", "")), shape, same, getattr(getattr(x, "device", None), "type", "")),
        numbers=(*metadata, *extra),
        words=lambda: f"{function}({describe(x)}, dim={dim}{', ' * bool(same)}{same}) at {user_frame()}",
        device=getattr(x, "device", None),
        rule=f"All ranks must make the same call; dtype and every dimension{f' but {dim}' * ragged} must be the same.",
        problem=problem,
    )


def metadata_lengths(table: list[list[int]]) -> tuple[int, ...]:
    lengths = tuple(row[0] for row in table)
    if torch.compiler.is_compiling():
        for length in lengths:
            torch._check(length >= 0)
    return lengths


def join_graph(x: Tensor, table: list[list[int]]) -> Tensor:
    """Return `x`, requiring a gradient if that of some rank does: without a backward here, that rank would wait in its own."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return x
    if x.requires_grad or not torch.is_grad_enabled():
        return x
    differentiable = x.is_floating_point() or x.is_complex()
    if not differentiable or not any(row[1] for row in table):
        return x
    alias = x.clone() if x.is_inference() else x.detach()  # autograd takes no inference tensor, only a copy
    return alias.requires_grad_()


@torch.library.custom_op("unisono_collectives::exchange", mutates_args=())
def _op(
    x: Tensor, dim: int, extra: Sequence[int], same: str, ragged: bool, function: str, group: str, rank: int, size: int
) -> Tensor:
    ranks = GroupRanks(group, rank, size)
    return torch.tensor(_all_gather_metadata(function, x, dim, ranks, extra, same, ragged), device="cpu")


@_op.register_fake
def _(
    x: Tensor, dim: int, extra: Sequence[int], same: str, ragged: bool, function: str, group: str, rank: int, size: int
) -> Tensor:
    return torch.empty((size, 2 + len(extra)), dtype=torch.int64, device="cpu")


_op.register_effect(EffectType.ORDERED)

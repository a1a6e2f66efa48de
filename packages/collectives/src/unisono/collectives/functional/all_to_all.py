"""all_to_all_single, all_to_all and shift: every rank sends a part to every other rank, or its tensor to one."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from unisono.collectives.autograd import Call, LinearMap, apply, disable_compile
from unisono.collectives.checks import call_site, checks_enabled, describe, tensor_error, user_frame, validate_across_ranks
from unisono.collectives.groups import Group, GroupRanks, is_fake_group, process_group, resolve_group, small_message_device
from unisono.collectives.sizes import (
    Sizes,
    all_gather_metadata,
    as_tuple,
    from_rows,
    join_graph,
    one_rank_sizes,
    raise_local_error,
    resolve_sizes,
    sizes_error,
    split_sizes,
    to_rows,
    with_shape_of,
)
from unisono.collectives.wire import untraced


def all_to_all_single(
    x: Tensor,
    dim: int = 0,
    *,
    send_sizes: Sizes = None,
    receive_sizes: Sizes = None,
    group: Group = None,
) -> Tensor:
    """Split `x` along `dim`, send part r to rank r, and concatenate what arrives, in rank order.

    `send_sizes`: the length of each part, or "equal" for equal parts; otherwise as even as possible. `receive_sizes`: the
    length of what arrives from each rank, if known, or "equal" if every rank sends as much to this one as this rank keeps for
    itself, which is so if all of them pass the same shape and `send_sizes`; otherwise the ranks exchange it in one small
    message.

    Backward: all_to_all_single with the sizes swapped. All ranks must run it.

    Example, 2 ranks holding [1., 2.] and [3., 4.]:
        all_to_all_single(x)  ->  [1., 3.] on rank 0, [2., 4.] on rank 1
    """
    return prepare_all_to_all_single("all_to_all_single", x, dim, send_sizes, receive_sizes, resolve_group(group)).result()


def prepare_all_to_all_single(
    name: str, x: Tensor, dim: int, send_sizes: Sizes, receive_sizes: Sizes, ranks: GroupRanks
) -> Call:
    send, problem = split_sizes("send_sizes", send_sizes, x, dim, ranks)
    receive_sizes = as_tuple(receive_sizes, 0 if problem else send[ranks.rank], ranks)
    problem = problem or sizes_error("receive_sizes", receive_sizes, ranks)
    if not problem and receive_sizes is not None and receive_sizes[ranks.rank] != send[ranks.rank]:
        problem = f"send_sizes={send} and receive_sizes={tuple(receive_sizes)} differ for what stays on rank {ranks.rank}"
    if receive_sizes is not None and not checks_enabled():
        raise_local_error(name, problem, ranks)
        receive = tuple(receive_sizes)
    else:
        x, exchanged = _exchange_sizes(name, x, dim, send, problem, ranks)
        receive = exchanged if receive_sizes is None else tuple(receive_sizes)
    plan = LinearMap("all_to_all", ranks, send, receive, call=name, site=call_site())
    return Call(to_rows(x, dim), plan, lambda rows: from_rows(rows, dim))


def all_to_all(xs: Sequence[Tensor], *, group: Group = None) -> list[Tensor]:
    """Send `xs[r]` to rank r; return what each rank sent here, in rank order. Shapes may differ; the dtype may not.

    The shapes are exchanged first, in two small messages; all_to_all_single with both sizes given needs none.
    torch.compile breaks the graph here.

    Backward: all_to_all. All ranks must run it.

    Example, 2 ranks holding [a, b] and [c, d]:
        all_to_all(xs)  ->  [a, c] on rank 0, [b, d] on rank 1
    """
    ranks = resolve_group(group)
    shapes, table = _exchange_shapes(xs, ranks)
    flat = join_graph(torch.cat([x.reshape(-1) for x in xs]), table)
    receive = tuple(shape.numel() for shape in shapes)
    plan = LinearMap("all_to_all", ranks, tuple(x.numel() for x in xs), receive, call="all_to_all", site=call_site())
    received = apply(flat, plan).split(list(receive))
    # Copies: as views they would not allow changes in place, and each would keep the memory of all.
    return [part.reshape(shape).clone() for part, shape in zip(received, shapes, strict=True)]


def shift(x: Tensor, offset: int = 1, *, sizes: Sizes = None, group: Group = None) -> Tensor:
    """Send `x` to rank + offset, counted in a ring: rank r gets what rank r - offset holds.

    Ranks may differ along the first dimension. `sizes`: every rank's length along it *before* the shift, if known, or "equal"
    if all have the same; otherwise the ranks exchange them in one small message. For many shifts, exchange them once and
    rotate them.

    Backward: shift by -offset. All ranks must run it.

    Example, 3 ranks holding [0.], [1.] and [2.]:
        shift(x)  ->  [2.], [0.], [1.]
    """
    ranks = resolve_group(group)
    if not isinstance(offset, int):
        raise TypeError(f"shift: offset={offset!r} must be an integer")
    x, lengths = resolve_sizes("shift", x, 0, sizes, ranks, same=f"offset={offset}")
    target = (ranks.rank + offset) % ranks.size
    source = (ranks.rank - offset) % ranks.size
    send = one_rank_sizes(target, lengths[ranks.rank], ranks)
    receive = one_rank_sizes(source, lengths[source], ranks)
    plan = LinearMap("point_to_point", ranks, send, receive, call=f"shift(offset={offset})", site=call_site())
    return with_shape_of(x, apply(to_rows(x, 0), plan))


_FEW = 12  # up to so many ranks, all sizes fit into one small message


def _exchange_sizes(
    name: str, x: Tensor, dim: int, send: tuple[int, ...], problem: str, ranks: GroupRanks
) -> tuple[Tensor, tuple[int, ...]]:
    """Return `x`, which now requires a gradient if that of any rank does, and the length of what arrives from each rank."""
    if ranks.size <= _FEW:
        table = all_gather_metadata(name, x, dim, ranks, extra=send, problem=problem)
        receive = [row[2 + ranks.rank] for row in table]
    else:  # gathering all sizes would grow with the square of the ranks: send each rank only its own
        table = all_gather_metadata(name, x, dim, ranks, problem=problem)
        receive = _all_to_all_integers(list(send), name, ranks)
    if torch.compiler.is_compiling():
        for length in receive:
            torch._check(length >= 0)
    return join_graph(x, table), tuple(receive)


def _all_to_all_integers(numbers: list[Any], name: str, ranks: GroupRanks) -> list[Any]:
    """Send entry r, an integer or a list of integers, to rank r; return what arrives from each rank."""
    device = torch.device("cpu")
    if ranks.size > 1 and not torch.compiler.is_compiling():
        pg = process_group(ranks)
        if is_fake_group(pg):
            return [numbers[ranks.rank]] * ranks.size
        device = small_message_device(pg, None)
    each = (1,) * ranks.size
    plan = LinearMap("all_to_all", ranks, each, each, call=f"sizes of {name}", site=call_site())
    with untraced():
        received: list[Any] = apply(torch.tensor(numbers, device=device), plan).tolist()
    return received


@disable_compile
def _exchange_shapes(xs: Sequence[Tensor], ranks: GroupRanks) -> tuple[list[torch.Size], list[list[int]]]:
    """Return the shapes of what each rank sends here, and the table that says which rank needs a gradient."""
    problem = ""
    if len(xs) != ranks.size or not all(isinstance(x, Tensor) for x in xs):
        problem = f"xs: expected {ranks.size} tensors, one for each rank, got {[describe(x) for x in xs]}"
    elif any(map(tensor_error, xs)):
        problem = next(filter(None, map(tensor_error, xs)))
    elif len({(x.dtype, x.device) for x in xs}) > 1:
        problem = f"xs: dtype and device must be the same in the whole list, got {[(describe(x), str(x.device)) for x in xs]}"
    needs_grad = not problem and torch.is_grad_enabled() and any(x.requires_grad for x in xs)
    table = validate_across_ranks(
        "all_to_all",
        ranks,
        same=("all_to_all", "" if problem else str(xs[0].dtype)),
        numbers=(0 if problem else max(x.ndim for x in xs), needs_grad),
        words=lambda: f"all_to_all({[describe(x) for x in xs]}) at {user_frame()}",
        device=None if problem else xs[0].device,
        rule="All ranks must make the same call with the same dtype.",
        problem=problem,
    )
    width = max(row[0] for row in table)
    rows = [[x.ndim, *x.shape, *(0,) * (width - x.ndim)] for x in xs]
    received = _all_to_all_integers(rows, "all_to_all", ranks)
    return [torch.Size(row[1 : 1 + row[0]]) for row in received], table

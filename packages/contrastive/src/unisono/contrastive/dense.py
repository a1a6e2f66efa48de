"""The plain formulas, with all logits of this rank's rows at once: what second derivatives are taken of."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unisono.collectives import Group, all_gather, all_to_all_single
from unisono.collectives.groups import resolve_group
from unisono.contrastive.pairs import select
from unisono.contrastive.tiles import Span, exclude, statistics_dtype, without_autocast
from unisono.contrastive.walk import Pairs


@without_autocast
def all_logits(
    x: Tensor, y: Tensor, scale: Tensor, left_out: tuple[int, ...], sizes: Sequence[int], group: Group
) -> tuple[Tensor, Tensor]:
    """Logits of the own rows with the columns of all ranks, and which pairs take part."""
    wide = statistics_dtype(x.device)
    logits = scale.to(wide) * (x.to(wide) @ all_gather(y.to(wide), sizes=sizes, group=group).T)
    takes_part = torch.ones_like(logits, dtype=torch.bool)
    start = sum(sizes[: resolve_group(group).rank])
    rows, columns = Span(0, x.shape[0]), Span(0, sum(sizes))
    exclude(takes_part, rows, columns, Span(start, start + y.shape[0]), left_out, False)
    return logits, takes_part


@without_autocast
def statistics(
    x: Tensor, y: Tensor, scale: Tensor, keys: tuple[Tensor, Tensor] | None, plan: Pairs, sizes: Sequence[int], group: Group
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, columns and diagonal of pairs.Statistics, differentiable to any order."""
    logits, takes_part = all_logits(x, y, scale, plan.left_out, sizes, group)
    same = torch.zeros_like(takes_part)
    if keys is not None:
        same = (keys[0].unsqueeze(1) == all_gather(keys[1], sizes=sizes, group=group)) & takes_part
    by_row, by_column = [], []
    own = (y.shape[0],) * resolve_group(group).size
    for entry in plan.entries:
        chosen = select(logits.masked_fill(~takes_part, -torch.inf), entry, same)
        by_row.append(_log_sum_exp(chosen, 1))
        if plan.columns:
            partial = _log_sum_exp(chosen, 0)
            everyones = all_to_all_single(partial, send_sizes=sizes, receive_sizes=own, group=group)
            by_column.append(_log_sum_exp(everyones.view(len(own), -1), 0))
    if plan.sums:
        chosen = logits.masked_fill(~same, 0)
        for part in (chosen, same.to(chosen.dtype)):
            by_row.append(part.sum(1))
            if plan.columns:
                everyones = all_to_all_single(part.sum(0), send_sizes=sizes, receive_sizes=own, group=group)
                by_column.append(everyones.view(len(own), -1).sum(0))
    wide = logits.dtype
    diagonal = scale.to(wide) * (x.to(wide) * y[: x.shape[0]].to(wide)).sum(1) if plan.diagonal else logits.new_empty(0)
    return torch.stack(by_row), torch.stack(by_column) if plan.columns else logits.new_empty((plan.width, 0)), diagonal


def _log_sum_exp(x: Tensor, dim: int) -> Tensor:
    """logsumexp whose gradient is zero, not NaN, where there is nothing to sum."""
    if x.shape[dim] == 0:
        return x.sum(dim) - torch.inf
    nothing = (x == -torch.inf).all(dim, keepdim=True)
    return torch.logsumexp(x.masked_fill(nothing, 0), dim).masked_fill(nothing.squeeze(dim), -torch.inf)

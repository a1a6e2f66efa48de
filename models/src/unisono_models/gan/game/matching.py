"""Conditions that do not match: each picture with the condition of another sample of the global batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unisono.collectives import Group, all_gather, exchange_sizes
from unisono.collectives.groups import resolve_group


def mismatched(
    condition: Tensor, *, shift: int, sizes: Sequence[int] | None = None, group: Group = None
) -> tuple[Tensor, Tensor]:
    """For each row the condition `shift` places on in the global batch (which is a circle), and whether it is another one.

    condition: (n,) labels or (n, d) vectors of this rank. The second result is (n,), whether the two differ: a
    picture of a seven is no bad match for "seven" because another sample says so.

    Backward: the condition of a sample gets the gradients of whichever rank used it.

    Example:
        >>> mismatched(torch.tensor([3, 3, 5]), shift=1)
        (tensor([3, 5, 3]), tensor([False,  True,  True]))
    """
    if sizes is None:
        sizes = exchange_sizes(condition, group=group)
    everyone = all_gather(condition, sizes=sizes, group=group)
    first = sum(sizes[: resolve_group(group).rank])
    places = (torch.arange(len(condition), device=condition.device) + first + shift) % max(1, len(everyone))
    found = everyone[places]
    differs = found != condition
    differs = differs.flatten(1).any(1) if differs.ndim > 1 else differs
    return found, differs

"""All ranks agree on a call before any of them computes: what one refuses, all refuse."""

from __future__ import annotations

from unisono.collectives import Group
from unisono_models.training.distributed.object_collectives import all_gather_object, format_by_rank


def settle(function: str, problem: str, *, rows: int, same: str, group: Group = None) -> list[int]:
    """How many rows each rank has, once no rank has a problem and all have the same `same`.

    Raises: ValueError, alike on every rank, that names the function, the ranks and what each of them says.

    Example:
        >>> settle("click_metrics", "", rows=3, same="float32 scores")
        [3]
    """
    heard = all_gather_object([problem, same, rows], group=group)
    if any(theirs for theirs, _, _ in heard):
        raise ValueError(f"{function}: {format_by_rank({rank: theirs for rank, (theirs, _, _) in enumerate(heard)})}")
    if len({theirs for _, theirs, _ in heard}) > 1:
        told = format_by_rank({rank: theirs for rank, (_, theirs, _) in enumerate(heard)})
        raise ValueError(f"{function}: all ranks must have the same; {told}")
    return [theirs for _, _, theirs in heard]

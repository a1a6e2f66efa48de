"""Checks of a metric's arguments that hold on all ranks: if one rank has a bad call, all ranks raise the same error."""

from __future__ import annotations

from unisono.collectives import Group
from unisono_models.training.distributed.object_collectives import all_gather_object, format_by_rank


def validate_on_all_ranks(function: str, problem: str, *, rows: int, same: str, group: Group = None) -> list[int]:
    """Return how many rows each rank has, if no rank has a problem and all ranks have the same `same`.

    Raises: ValueError, the same on every rank, with the function, the ranks and the problem of each.

    Example:
        >>> validate_on_all_ranks("click_metrics", "", rows=3, same="float32 scores")
        [3]
    """
    gathered = all_gather_object([problem, same, rows], group=group)
    problems, descriptions, all_rows = ([entry[place] for entry in gathered] for place in range(3))
    if any(problems):
        raise ValueError(f"{function}: {format_by_rank(dict(enumerate(problems)))}")
    if len(set(descriptions)) > 1:
        raise ValueError(f"{function}: all ranks must have the same; {format_by_rank(dict(enumerate(descriptions)))}")
    return list(all_rows)

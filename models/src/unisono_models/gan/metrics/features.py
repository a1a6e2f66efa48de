"""All ranks agree on a call before any of them computes: what one refuses, all refuse."""

from __future__ import annotations

from torch import Tensor

from unisono.collectives import Group
from unisono_models.training.distributed.object_collectives import all_gather_object, format_by_rank


def settle(function: str, problem: str = "", *, group: Group = None, **features: Tensor) -> dict[str, int]:
    """How many rows all ranks together have of each of the `features`, which must be (n, width), of one width, on all ranks.

    Raises: ValueError, alike on every rank, that names the function, the ranks and what each has: `problem`, if it is not
    empty, or features that do not fit.

    Example:
        >>> import torch
        >>> settle("frechet_distance", real=torch.ones(3, 2), fake=torch.ones(4, 2))
        {'real': 3, 'fake': 4}
    """
    for name, x in features.items():
        if not isinstance(x, Tensor) or x.ndim != 2 or not x.is_floating_point():
            got = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            problem = problem or f"{name}: expected floating point features of shape (n, width), got {got}"
    same = "" if problem else ", ".join(f"{name}: {x.dtype}, width {x.shape[1]}" for name, x in features.items())
    if not problem and len({(x.dtype, x.shape[1]) for x in features.values()}) > 1:
        problem = f"expected features of one dtype and width, got {same}"
    rows = [] if problem else [len(x) for x in features.values()]
    heard = all_gather_object([problem, same, rows], group=group)
    if any(theirs for theirs, _, _ in heard):
        raise ValueError(f"{function}: {format_by_rank({rank: theirs for rank, (theirs, _, _) in enumerate(heard)})}")
    if len({theirs for _, theirs, _ in heard}) > 1:
        told = format_by_rank({rank: theirs for rank, (_, theirs, _) in enumerate(heard)})
        raise ValueError(f"{function}: features must be of one kind on all ranks; {told}")
    return {name: sum(theirs[place] for _, _, theirs in heard) for place, name in enumerate(features)}


def tile_complaint(tile: object) -> str:
    """What is wrong with a number of rows at a time, or nothing."""
    return "" if isinstance(tile, int) and tile > 0 else f"tile={tile!r} must be a positive number of rows"


def tiles_of(x: Tensor, tile: int) -> tuple[Tensor, ...]:
    """Pieces of at most `tile` rows; none of an empty tensor."""
    return x.split(tile) if len(x) else ()

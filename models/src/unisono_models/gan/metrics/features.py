"""Checks of the features that metrics take. All ranks check together, so that an error is raised on all or on none."""

from torch import Tensor

from unisono.collectives import Group
from unisono_models.training.distributed.object_collectives import validate_on_all_ranks


def validate_features(function: str, problem: str = "", *, group: Group = None, **features: Tensor) -> dict[str, int]:
    """Check that `features` are (n, width), of one dtype and width on all ranks; return the number of rows over all ranks.

    function: name of the caller, for errors.
    problem: an error that the caller has found on this rank, or "".

    Raises: ValueError with the same message on all ranks, which says what each rank has.

    Example:
        >>> import torch
        >>> validate_features("frechet_distance", real=torch.ones(3, 2), fake=torch.ones(4, 2))
        {'real': 3, 'fake': 4}
    """
    for name, x in features.items():
        if not isinstance(x, Tensor) or x.ndim != 2 or not x.is_floating_point():
            got = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            problem = problem or f"{name}: expected floating point features of shape (n, width), got {got}"
    layout = "" if problem else ", ".join(f"{name}: {x.dtype}, width {x.shape[1]}" for name, x in features.items())
    if not problem and len({(x.dtype, x.shape[1]) for x in features.values()}) > 1:
        problem = f"expected features of one dtype and width, got {layout}"
    counts = [] if problem else [len(x) for x in features.values()]
    all_counts = validate_on_all_ranks(function, problem, same=layout, value=counts, group=group)
    return {name: sum(counts[index] for counts in all_counts) for index, name in enumerate(features)}


def tile_problem(tile: object) -> str:
    """Return what is wrong with a number of rows per tile, or ""."""
    return "" if isinstance(tile, int) and tile > 0 else f"tile={tile!r} must be a positive number of rows"


def split_tiles(x: Tensor, tile: int) -> tuple[Tensor, ...]:
    """Split `x` into tensors of at most `tile` rows; () if `x` is empty, where Tensor.split would give one empty tensor."""
    return x.split(tile) if len(x) else ()

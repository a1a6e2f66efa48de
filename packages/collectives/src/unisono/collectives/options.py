"""Checks of plain arguments, which are wrong on every rank alike: no need to consult the others."""

from __future__ import annotations

from torch import Tensor

from unisono.collectives.groups import Ranks


def check_tensor(function: str, x: object) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{function}: x: expected a Tensor, got {type(x).__name__}")


def one_of(function: str, argument: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{function}: {argument}={value!r} is not one of {', '.join(map(repr, choices))}")


def rank_of(function: str, argument: str, value: int, ranks: Ranks) -> int:
    """`value` as a rank of the group; negative counts from the end."""
    if not isinstance(value, int) or not -ranks.size <= value < ranks.size:
        raise ValueError(
            f"{function}: {argument}={value!r} is not a rank of this group: it has ranks 0 to {ranks.size - 1}, "
            f"counted within the group (this is rank {ranks.rank})"
        )
    return value % ranks.size

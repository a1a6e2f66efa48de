"""Small values and errors between ranks, as JSON: no pickle travels."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch

from unisono.collectives import all_gather, exchange_sizes
from unisono.collectives.groups import resolve

Json: TypeAlias = Any  # None, bool, int, float, str, and lists and dicts (with str keys) of these


class RanksError(RuntimeError):
    """What went wrong on one or more ranks, raised on every rank."""


def hear(value: Json) -> list[Json]:
    """The value of every rank, on every rank, in rank order.

    Example:
        >>> hear({"rows": 3})
        [{'rows': 3}]
    """
    mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = exchange_sizes(mine)
    return [json.loads(bytes(part.tolist())) for part in all_gather(mine, sizes=sizes).split(list(sizes))]


def tell(value: Json) -> Json:
    """Rank 0's value, on every rank. The others' are ignored.

    Example:
        >>> tell("runs/clip-emoji")
        'runs/clip-emoji'
    """
    return hear(value if resolve(None).rank == 0 else None)[0]


@contextmanager
def together(what: str) -> Iterator[None]:
    """What fails on one rank fails on all: after the block every rank hears of the others' errors, and all raise.

    For work that does not communicate, such as reading files: a rank that leaves early would let the others wait.

    Raises: RanksError that names `what`, the ranks and their errors. On one rank its own error goes through as it is.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    if resolve(None).size == 1:
        if error is not None:
            raise error
        return
    heard = hear(None if error is None else f"{type(error).__name__}: {error}")
    if any(heard):
        texts: dict[str, list[str]] = {}
        for rank, text in enumerate(heard):
            if text:
                texts.setdefault(text, []).append(str(rank))
        raise RanksError(f"{what}: " + "; ".join(f"rank {', '.join(who)}: {text}" for text, who in texts.items())) from error

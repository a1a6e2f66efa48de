"""Collectives on small Python values, sent as JSON. Unlike torch.distributed's, they never unpickle what a peer sends."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch

from unisono.collectives import Group, all_gather, exchange_sizes
from unisono.collectives.groups import resolve_group
from unisono_models.training.errors import UserError

Json: TypeAlias = Any  # None, bool, int, float, str, and lists and dicts (with str keys) of these


class RanksError(RuntimeError):
    """An error of one or more ranks, raised on every rank."""


def all_gather_object(value: Json, *, group: Group = None) -> list[Json]:
    """Return the values of all ranks, in rank order, on every rank.

    Example:
        >>> all_gather_object({"rows": 3})
        [{'rows': 3}]
    """
    mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = exchange_sizes(mine, group=group)
    parts = all_gather(mine, sizes=sizes, group=group).split(list(sizes))
    return [json.loads(bytes(part.tolist())) for part in parts]


def broadcast_object(value: Json, *, group: Group = None) -> Json:
    """Return rank 0's value on every rank. The values of the other ranks are ignored.

    Example:
        >>> broadcast_object("runs/clip-emoji")
        'runs/clip-emoji'
    """
    return all_gather_object(value if resolve_group(group).rank == 0 else None, group=group)[0]


@contextmanager
def raise_together(what: str, *, group: Group = None) -> Iterator[None]:
    """Raise on all ranks if the block raises on any of them. A context manager.

    Use it for work that does not communicate, such as reading files: otherwise the other ranks would wait for the one that
    failed. `what` names the work in the error.

    Raises: UserError if all errors are UserErrors; otherwise RanksError that names the ranks and their errors. With one rank
    its own error is raised as it is.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    size = resolve_group(group).size
    if size == 1:
        if error is not None:
            raise error
        return
    is_mistake = isinstance(error, UserError)
    mine = None if error is None else [is_mistake, str(error) if is_mistake else f"{type(error).__name__}: {error}"]
    found = {rank: entry for rank, entry in enumerate(all_gather_object(mine, group=group)) if entry is not None}
    if not found:
        return
    texts = {rank: text for rank, (_, text) in found.items()}
    if not all(mistake for mistake, _ in found.values()):
        raise RanksError(f"{what}: {format_by_rank(texts)}") from error
    everywhere = len(set(texts.values())) == 1 and (len(texts) == size or set(texts) == {0})  # rank 0 works for all ranks
    text = texts[0] if everywhere else format_by_rank(texts)
    if error is not None and str(error) == text:
        raise error
    raise UserError(text) from None


def validate_on_all_ranks(what: str, problem: str, *, same: str, value: Json = None, group: Group = None) -> list[Json]:
    """Return the values of all ranks, unless a rank has a problem or the ranks do not have the same `same`.

    Args:
        what: Names the caller in errors.
        problem: What is wrong on this rank, or an empty text.
        same: Describes what has to be equal on all ranks, such as the dtype and the width of a tensor.

    Raises: ValueError, the same on every rank, that names the ranks.

    Example:
        >>> validate_on_all_ranks("auc", "", same="float32 scores", value=3)
        [3]
    """
    gathered = all_gather_object([problem, same, value], group=group)
    problems, descriptions, values = ([entry[place] for entry in gathered] for place in range(3))
    if any(problems):
        raise ValueError(f"{what}: {format_by_rank(dict(enumerate(problems)))}")
    if len(set(descriptions)) > 1:
        raise ValueError(f"{what}: this must be equal on all ranks: {format_by_rank(dict(enumerate(descriptions)))}")
    return list(values)


def format_by_rank(texts: Mapping[int, str | None]) -> str:
    """Format the texts of several ranks as one line. Ranks with the same text are listed together.

    Example:
        >>> format_by_rank({0: "disk full", 1: None, 2: "disk full"})
        'rank 0, 2: disk full'
    """
    ranks: dict[str, list[str]] = {}
    for rank, text in texts.items():
        if text:
            ranks.setdefault(text, []).append(str(rank))
    return "; ".join(f"rank {', '.join(who)}: {text}" for text, who in ranks.items())

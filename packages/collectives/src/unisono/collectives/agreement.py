"""All ranks agree before any of them communicates, so that a bad call is one clear error on every rank.

One small all_gather of fixed length carries a fingerprint of what must be equal and the few numbers that may differ. Only
when something is wrong does a second exchange follow, with each rank's own words, and every rank raises the same error.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import ProcessGroup

from unisono.collectives.groups import Ranks, process_group, simulated, small_message_device
from unisono.collectives.wire import small_all_gather

_HEADER = 16  # int64 each: one message, whatever the call
_FIXED = 3  # has a problem, fingerprint, how many numbers
_WORDS = 2048  # bytes of each rank's words in an error


class MismatchError(ValueError):
    """The ranks made calls that do not belong together, or one of them made a bad one. Raised alike on every rank."""


def agree(
    function: str,
    ranks: Ranks,
    *,
    same: object,
    numbers: Sequence[int],
    words: Callable[[], str],
    device: torch.device | None,
    rule: str,
    problem: str = "",
) -> list[list[int]]:
    """Every rank's `numbers`, once all ranks have the same `same` and none has a `problem`.

    `words` says what this rank called; it and `rule` (what would be right) are only used for the error.
    """
    if ranks.size == 1:
        if problem:
            raise MismatchError(f"{function}: {problem}")
        return [list(numbers)]
    pg = process_group(ranks)
    if simulated(pg):
        if problem:
            raise MismatchError(f"{function}: {problem}")
        return [list(numbers)] * ranks.size

    where = small_message_device(pg, device)
    room = _HEADER - _FIXED
    head = [int(bool(problem)), _fingerprint(same), len(numbers), *numbers[:room]]
    head += [0] * (_HEADER - len(head))
    try:
        table = small_all_gather(_int64(head).to(where), pg).tolist()
    except RuntimeError as error:
        raise RuntimeError(f"{function}: no word from the other ranks; rank {ranks.rank}: {problem or words()}") from error
    if any(row[0] for row in table) or any(row[1] != head[1] for row in table):
        faulty = [bool(row[0]) for row in table]
        raise MismatchError(_explain(function, problem or words(), rule, faulty, where, pg))

    longest = max(row[2] for row in table)
    if longest > room:
        rest = [*numbers[room:], *[0] * (longest - max(len(numbers), room))]
        rests = small_all_gather(_int64(rest).to(where), pg).tolist()
        table = [row + more for row, more in zip(table, rests, strict=True)]
    return [row[_FIXED : _FIXED + row[2]] for row in table]


def _int64(numbers: Sequence[int]) -> Tensor:
    return torch.frombuffer(array("q", numbers), dtype=torch.int64)  # a quarter of the time of torch.tensor


def _fingerprint(same: object) -> int:
    digest = hashlib.blake2b(repr(same).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _explain(function: str, words: str, rule: str, faulty: list[bool], where: torch.device, pg: ProcessGroup) -> str:
    """The same text on every rank: each one's words, under the function and the rule of the first rank at fault."""
    encoded = "\n".join([function, rule, words]).encode()[:_WORDS]
    message = torch.zeros(_WORDS, dtype=torch.uint8, device="cpu")
    message[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
    rows = small_all_gather(message.to(where), pg).cpu()
    texts = [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace").split("\n", 2) for row in rows]

    function, rule, _ = texts[faulty.index(True) if any(faulty) else 0]
    what = f"a bad call on {_name([rank for rank, bad in enumerate(faulty) if bad])}" if any(faulty) else "the ranks disagree"
    closing = "" if any(faulty) else f"\n{rule}"
    by_words: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        by_words.setdefault(text[-1], []).append(rank)
    lines = "".join(f"\n  {_name(group)}: {text}" for text, group in by_words.items())
    return f"{function}: {what} (group {pg.group_name!r} of {pg.size()}){lines}{closing}"


def _name(ranks: list[int]) -> str:
    """'rank 3', 'ranks 0-2, 5'."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"

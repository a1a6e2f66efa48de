"""All ranks agree before any of them communicates, so that a bad call is one clear error on every rank.

One small all_gather of fixed length carries a fingerprint of what must be equal and the few numbers that may differ. Only
when something is wrong does a second exchange follow, with each rank's own words, and every rank raises the same error.
"""

from __future__ import annotations

import hashlib
import os
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import ProcessGroup

from unisono.collectives.groups import GroupRanks, is_fake_group, process_group, small_message_device
from unisono.collectives.wire import small_all_gather

_HEADER = 16  # int64 each: one message, whatever the call
_FIXED = 3  # has a problem, fingerprint, how many numbers
_WORDS = 2048  # bytes of each rank's words in an error


class MismatchError(ValueError):
    """The ranks made calls that do not belong together, or one of them made a bad one. Raised alike on every rank."""


def validate_across_ranks(
    function: str,
    ranks: GroupRanks,
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
    if is_fake_group(pg):
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


def validate_tensor(function: str, x: object) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{function}: x: expected a Tensor, got {type(x).__name__}")


def validate_choice(function: str, argument: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{function}: {argument}={value!r} is not one of {', '.join(map(repr, choices))}")


def validate_rank(function: str, argument: str, value: int, ranks: GroupRanks) -> int:
    """`value` as a rank of the group; negative counts from the end."""
    if not isinstance(value, int) or not -ranks.size <= value < ranks.size:
        raise ValueError(
            f"{function}: {argument}={value!r} is not a rank of this group: it has ranks 0 to {ranks.size - 1}, "
            f"counted within the group (this is rank {ranks.rank})"
        )
    return value % ranks.size


if TYPE_CHECKING:
    from unisono.collectives.autograd import LinearMap

_PACKAGES = [f"{os.sep}unisono{os.sep}{name}{os.sep}" for name in ("collectives", "contrastive", "dataparallel", "embedding")]
_mode: ContextVar[str] = ContextVar("unisono_check", default="")  # "", "calls" or "sites"
_calls_made: WeakKeyDictionary[ProcessGroup, int] = WeakKeyDictionary()  # the sequence number finds a skipped call


@contextmanager
def checked(*, call_sites: bool = True) -> Iterator[None]:
    """Inside, every collective of this package first agrees on its sequence number, function, place in the source,
    dtype, shapes, splits and reduction; a mismatch raises the same MismatchError on all ranks instead of giving
    garbage, an abort or a hang. Backward passes of what was called inside are checked too. Enter it on all ranks.

    UNISONO_CHECK=1 in the environment does the same for a whole run. `call_sites=False` (UNISONO_CHECK=calls) leaves the
    place out, for programs whose ranks make one call from different lines.

    Example:
        >>> import torch
        >>> from unisono.collectives import all_reduce, checked
        >>> with checked():
        ...     all_reduce(torch.ones(2))
        tensor([1., 1.])
    """
    token = _mode.set("sites" if call_sites else "calls")
    try:
        yield
    finally:
        _mode.reset(token)


def checks_enabled() -> bool:
    return not torch.compiler.is_compiling() and bool(_current_mode())


def call_site() -> str:
    """Where the user called from, when checking; otherwise empty, which costs nothing."""
    mode = "" if torch.compiler.is_compiling() else _current_mode()
    if not mode:
        return ""
    return user_frame() if mode == "sites" else "(any place)"


def user_frame() -> str:
    """The innermost line outside these packages and torch."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        path = frame.f_code.co_filename
        inside = any(package in path for package in _PACKAGES) and f"{os.sep}testing{os.sep}" not in path
        if not inside and f"{os.sep}torch{os.sep}" not in path:
            break
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"


def validate_linear_map(x: Tensor, plan: LinearMap) -> None:
    """Agree that every rank is about to run `plan`, and that its splits fit those of the others."""
    ranks = plan.ranks
    pg = process_group(ranks)
    number = _calls_made[pg] = _calls_made.get(pg, 0) + 1
    kind = plan.kind.removesuffix("_own")  # a named gradient changes the backward, not what travels now
    by_rows = kind in ("all_gather", "reduce_scatter", "all_to_all")
    common = {"all_gather": plan.receive, "reduce_scatter": plan.send}.get(kind, ())
    shape = tuple(x.shape[1:]) if by_rows else tuple(x.shape)
    expected = sum(plan.send) if by_rows else x.shape[0]
    problem = f"{plan.call}: got {x.shape[0]} rows for splits {plan.send}" if x.shape[0] != expected else ""
    same = (number, plan.call, kind, plan.root, str(x.dtype), shape, common, plan.site)
    splits = [*plan.send, *plan.receive] if kind == "all_to_all" else []

    def words() -> str:
        parts = f", sends rows {plan.send}, receives {plan.receive}" if by_rows else ""
        return f"call #{number}, {plan.call}, {describe(x)}{parts}, at {plan.site}"

    rule = "With checked(), all ranks must make the same calls in the same order with the same dtype and shapes."
    table = validate_across_ranks(
        plan.call, ranks, same=same, numbers=splits, words=words, device=x.device, rule=rule, problem=problem
    )
    if splits:
        size = ranks.size
        wrong = [(a, b) for a in range(size) for b in range(size) if table[a][b] != table[b][size + a]]
        complaint = "; ".join(
            f"rank {a} sends {table[a][b]} rows to rank {b}, which expects {table[b][size + a]}" for a, b in wrong[:8]
        )
        validate_across_ranks(plan.call, ranks, same=(), numbers=(), words=words, device=x.device, rule=rule, problem=complaint)


def describe(x: object) -> str:
    """'float32[4, 8]'."""
    if not isinstance(x, Tensor):
        return type(x).__name__
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"


def _current_mode() -> str:
    return _mode.get() or _environment_mode()


@cache  # read once: it costs more than the rest of a call
def _environment_mode() -> str:
    setting = os.environ.get("UNISONO_CHECK", "")
    return "" if setting in ("", "0") else "calls" if setting == "calls" else "sites"

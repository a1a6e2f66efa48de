"""Validation of arguments, on one rank and over all ranks before they communicate; `checked()` validates every call.

validate_across_ranks sends one small message of fixed length: a fingerprint of what must be equal on all ranks, and a few
integers that may differ. Only when something is wrong does a second message follow, with each rank's description of its
call; then every rank raises the same error.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import ProcessGroup

from unisono.collectives.groups import GroupRanks, is_fake_group, process_group, small_message_device
from unisono.collectives.profiling import profiled
from unisono.collectives.small_messages import small_all_gather, start_small_all_gather

if TYPE_CHECKING:
    from unisono.collectives.autograd import LinearMap

_HEADER = 16  # int64 values in the message, whatever the call
_FIXED = 3  # the first of them: whether there is a problem, the fingerprint, the number of integers
_TEXT_BYTES = 2048  # bytes of each rank's description in an error
_DEEPEST = 8  # levels of objects in objects that stable_repr opens
_PLAIN = {bool, int, float, str, bytes, type(None)}  # types whose repr is the same in every process

_OUR_NAMESPACE = __name__.partition(".")[0]  # holds all our packages, so there is no list of them to keep up to date
_TESTING = f"{__name__.rpartition('.')[0]}.testing"
_NOT_THE_USER = {_OUR_NAMESPACE, "torch", "contextlib", "functools"}

_mode: ContextVar[str] = ContextVar("unisono_check", default="")  # "", "calls" or "sites"
_calls_made: WeakKeyDictionary[ProcessGroup, int] = WeakKeyDictionary()  # the sequence number reveals a skipped call


class MismatchError(ValueError):
    """The ranks made calls that do not belong together, or one rank made a bad call. Every rank raises the same error."""


@contextmanager
def checked(*, call_sites: bool = True) -> Iterator[None]:
    """Validate over all ranks, before it runs, every collective that is called inside the block.

    The ranks compare sequence number, function, line of the source, dtype, shapes, splits and reduction. A mismatch raises
    the same MismatchError on all ranks, instead of garbage, an abort or a hang. Backward passes of what was called inside
    are checked too. All ranks must enter the block. Each call costs one small message more, forward and backward: use it in
    tests and to find a fault.

    UNISONO_CHECK=1 in the environment does the same for a whole run. `call_sites=False` (UNISONO_CHECK=calls) does not
    compare lines of the source, for programs whose ranks make one call from different lines.

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


def checks_enabled_at_run_time() -> bool:
    """checks_enabled() also while torch.compile traces."""
    return bool(_current_mode())


def call_site() -> str:
    """Return the user's line if checks are enabled, otherwise "", which costs nothing."""
    mode = "" if torch.compiler.is_compiling() else _current_mode()
    if not mode:
        return ""
    return user_frame() if mode == "sites" else "(any place)"


def user_frame() -> str:
    """Return the innermost line that is neither in our packages nor in torch: 'train.py:12 in main'."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] not in _NOT_THE_USER or module.startswith(_TESTING):
            break
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"


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
    """Raise the same MismatchError on all ranks unless `same` is equal on all of them and none has a `problem`.

    Returns every rank's `numbers`, in rank order. `words` describes this rank's call and `rule` says what would be right;
    both are used only for the error.
    """
    return Validation(
        function, ranks, same=same, numbers=numbers, words=words, device=device, rule=rule, problem=problem
    ).result()


class Validation:
    """validate_across_ranks in two parts: once made, it is on its way; its result is asked for after other work.

    All ranks must make it, and ask for its result, in the same order as their other calls.
    """

    def __init__(
        self,
        function: str,
        ranks: GroupRanks,
        *,
        same: object,
        numbers: Sequence[int],
        words: Callable[[], str],
        device: torch.device | None,
        rule: str,
        problem: str = "",
    ) -> None:
        self._function, self._rule, self._words, self._problem = function, rule, words, problem
        self._ranks = ranks
        self._numbers = numbers
        self._table: list[list[int]] = []
        if ranks.size == 1 or is_fake_group(process_group(ranks)):
            self._table = [[int(bool(problem)), 0, len(numbers), *numbers]] * ranks.size
            return
        self._pg = process_group(ranks)
        self._device = small_message_device(self._pg, device)
        header = [int(bool(problem)), _fingerprint(same), len(numbers), *numbers[: _HEADER - _FIXED]]
        header += [0] * (_HEADER - len(header))
        try:
            self._wait = profiled(self._name(), start_small_all_gather, _int64(header).to(self._device), self._pg)
        except RuntimeError as error:
            raise self._no_answer() from error

    def agrees(self) -> bool:
        """Wait for the other ranks, and return whether result() will raise no MismatchError: the same on all of them."""
        if not self._table:
            try:
                self._table = profiled(self._name(), self._wait).tolist()
            except RuntimeError as error:
                raise self._no_answer() from error
        fingerprint = self._table[0][1]
        return not any(row[0] or row[1] != fingerprint for row in self._table)

    def result(self) -> list[list[int]]:
        """Return every rank's `numbers`, in rank order, or raise the same error on all ranks."""
        if not self.agrees():
            if self._ranks.size == 1 or is_fake_group(process_group(self._ranks)):
                raise MismatchError(f"{self._function}: {self._problem}")
            faulty = [bool(row[0]) for row in self._table]
            words = self._problem or self._words()
            raise MismatchError(_mismatch_text(self._function, words, self._rule, faulty, self._device, self._pg))
        table, room = self._table, _HEADER - _FIXED
        longest = max(row[2] for row in table)
        if longest > len(table[0]) - _FIXED:
            rest = [*self._numbers[room:], *[0] * (longest - max(len(self._numbers), room))]
            rests = small_all_gather(_int64(rest).to(self._device), self._pg).tolist()
            table = [row + more for row, more in zip(table, rests, strict=True)]
        return [row[_FIXED : _FIXED + row[2]] for row in table]

    def _name(self) -> str:
        return f"metadata of {self._function}"

    def _no_answer(self) -> RuntimeError:
        own = self._problem or self._words()
        return RuntimeError(f"{self._function}: no answer from the other ranks; rank {self._ranks.rank}: {own}")


def validate_linear_map(x: Tensor, plan: LinearMap) -> None:
    """Raise on all ranks unless every rank is about to run the same `plan`, with splits that fit those of the others."""
    ranks = plan.ranks
    pg = process_group(ranks)
    number = _calls_made[pg] = _calls_made.get(pg, 0) + 1
    kind = plan.kind.removesuffix("_own")  # a named gradient changes the backward, not what is sent now
    exchanges = kind in ("all_to_all", "point_to_point")
    by_rows = exchanges or kind in ("all_gather", "reduce_scatter")
    common = {"all_gather": plan.receive, "reduce_scatter": plan.send}.get(kind, ())
    shape = tuple(x.shape[1:]) if by_rows else tuple(x.shape)
    expected = sum(plan.send) if by_rows else x.shape[0]
    problem = f"{plan.call}: got {x.shape[0]} rows for splits {plan.send}" if x.shape[0] != expected else ""
    same = (number, plan.call, kind, plan.root, str(x.dtype), str(plan.reduce_dtype), shape, common, plan.site)
    splits = [*plan.send, *plan.receive] if exchanges else []

    def words() -> str:
        parts = f", sends rows {plan.send}, receives {plan.receive}" if by_rows else ""
        return f"call #{number}, {plan.call}, {describe(x)}{parts}, at {plan.site}"

    def validate(same: object, numbers: Sequence[int], problem: str) -> list[list[int]]:
        rule = "With checked(), all ranks must make the same calls in the same order with the same dtype and shapes."
        return validate_across_ranks(
            plan.call, ranks, same=same, numbers=numbers, words=words, device=x.device, rule=rule, problem=problem
        )

    table = validate(same, splits, problem)
    if splits:
        size = ranks.size
        wrong = [(a, b) for a in range(size) for b in range(size) if table[a][b] != table[b][size + a]]
        differences = (
            f"rank {a} sends {table[a][b]} rows to rank {b}, which expects {table[b][size + a]}" for a, b in wrong[:8]
        )
        validate((), (), "; ".join(differences))


def tensor_error(x: object) -> str:
    """Return what is wrong with an argument that must be a plain tensor, or ""."""
    if not isinstance(x, Tensor):
        return f"x: expected a Tensor, got {type(x).__name__}"
    if type(x) is not Tensor and hasattr(x, "full_tensor"):
        return "x is a DTensor: pass x.to_local(), the part of this rank, or x.full_tensor(), the whole"
    return ""


def validate_tensor(function: str, x: object) -> None:
    if problem := tensor_error(x):
        raise TypeError(f"{function}: {problem}")


def validate_choice(function: str, argument: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{function}: {argument}={value!r} is not one of {', '.join(map(repr, choices))}")


def validate_reduce_dtype(function: str, reduce_dtype: object, x: Tensor) -> None:
    """Raise unless the ranks can add `x` in `reduce_dtype`: a float of at least 16 bits, for a float. None is right always."""
    if reduce_dtype is None:
        return
    if not isinstance(reduce_dtype, torch.dtype) or not reduce_dtype.is_floating_point or reduce_dtype.itemsize == 1:
        raise TypeError(
            f"{function}: reduce_dtype={reduce_dtype!r} must be a floating point dtype of at least 16 bits, as torch.float32"
        )
    if not x.is_floating_point():
        raise TypeError(f"{function}: reduce_dtype={reduce_dtype} needs a floating point tensor, got {x.dtype}")


def validate_rank(function: str, argument: str, value: int, ranks: GroupRanks) -> int:
    """Return `value` as a rank of the group; a negative one counts from the end."""
    if not isinstance(value, int) or not -ranks.size <= value < ranks.size:
        raise ValueError(
            f"{function}: {argument}={value!r} is not a rank of this group: it has ranks 0 to {ranks.size - 1}, "
            f"counted within the group (this is rank {ranks.rank})"
        )
    return value % ranks.size


def describe(x: object) -> str:
    """'float32[4, 8]'."""
    if not isinstance(x, Tensor):
        return type(x).__name__
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"


def stable_repr(value: object, _parents: tuple[int, ...] = ()) -> str:
    """Return a text that is the same in every process for equal values: without addresses, and sets are sorted.

    repr() is not: the order of a set depends on the hash seed of the process, and the default repr shows an address.
    """
    kind = type(value)
    if kind in _PLAIN:
        return repr(value)
    if id(value) in _parents:
        return "..."
    parents = (*_parents, id(value))
    if isinstance(value, (tuple, list)):
        items = ", ".join([repr(item) if type(item) in _PLAIN else stable_repr(item, parents) for item in value])
        return f"[{items}]" if isinstance(value, list) else f"({items})"
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(stable_repr(item, parents) for item in value))}}}"
    if isinstance(value, Mapping):
        pairs = (f"{stable_repr(key, parents)}: {stable_repr(item, parents)}" for key, item in value.items())
        return f"{{{', '.join(sorted(pairs))}}}"
    if hasattr(value, "__qualname__"):  # a class or a function
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, Enum):
        return f"{kind.__qualname__}.{value.name}"
    if isinstance(value, Tensor):  # its values may be on a device that must not be waited for
        return describe(value)
    # Attributes tell more than a repr, but large objects (a tokenizer) have a short repr of their own and no __eq__.
    has_value = kind.__eq__ is not object.__eq__ or kind.__repr__ is object.__repr__
    attributes = getattr(value, "__dict__", None)
    if has_value and attributes and len(parents) < _DEEPEST:
        state = {k: v for k, v in attributes.items() if not isinstance(getattr(kind, k, None), cached_property)}
        return f"{kind.__qualname__}{stable_repr(state, parents)}"
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def _current_mode() -> str:
    return _mode.get() or _environment_mode()


@cache  # read once: it costs more than the rest of a call
def _environment_mode() -> str:
    setting = os.environ.get("UNISONO_CHECK", "")
    if setting in ("", "0"):
        return ""
    return "calls" if setting == "calls" else "sites"


def _int64(numbers: Sequence[int]) -> Tensor:
    return torch.frombuffer(array("q", numbers), dtype=torch.int64)  # takes a quarter of the time of torch.tensor


def _fingerprint(same: object) -> int:
    digest = hashlib.blake2b(stable_repr(same).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _mismatch_text(
    function: str, words: str, rule: str, faulty: list[bool], message_device: torch.device, pg: ProcessGroup
) -> str:
    """Return one text, the same on every rank: each rank's words, under the function and the rule of the first faulty rank."""
    encoded = "\n".join([function, rule, words]).encode()[:_TEXT_BYTES]
    message = torch.zeros(_TEXT_BYTES, dtype=torch.uint8, device="cpu")
    message[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
    rows = small_all_gather(message.to(message_device), pg).cpu()
    texts = [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace").split("\n", 2) for row in rows]

    function, rule, _ = texts[faulty.index(True) if any(faulty) else 0]
    if any(faulty):
        what = f"a bad call on {_rank_list([rank for rank, bad in enumerate(faulty) if bad])}"
        closing = ""
    else:
        what = "the ranks disagree"
        closing = f"\n{rule}"
    ranks_by_words: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        ranks_by_words.setdefault(text[-1], []).append(rank)
    lines = "".join(f"\n  {_rank_list(ranks)}: {text}" for text, ranks in ranks_by_words.items())
    return f"{function}: {what} (group {pg.group_name!r} of {pg.size()}){lines}{closing}"


def _rank_list(ranks: list[int]) -> str:
    """'rank 3', 'ranks 0-2, 5'."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"

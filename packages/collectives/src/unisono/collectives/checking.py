"""`with checked():` every collective first makes sure that all ranks mean the same one.

Costs one small exchange a call, forward and backward: for finding a fault and for tests, not for the long run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import ProcessGroup

from unisono.collectives.agreement import agree
from unisono.collectives.groups import process_group

if TYPE_CHECKING:
    from unisono.collectives.linear import Linear

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


def checking() -> bool:
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


def verify(x: Tensor, plan: Linear) -> None:
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
    table = agree(plan.call, ranks, same=same, numbers=splits, words=words, device=x.device, rule=rule, problem=problem)
    if splits:
        size = ranks.size
        wrong = [(a, b) for a in range(size) for b in range(size) if table[a][b] != table[b][size + a]]
        complaint = "; ".join(
            f"rank {a} sends {table[a][b]} rows to rank {b}, which expects {table[b][size + a]}" for a, b in wrong[:8]
        )
        agree(plan.call, ranks, same=(), numbers=(), words=words, device=x.device, rule=rule, problem=complaint)


def describe(x: object) -> str:
    """'float32[4, 8]'."""
    if not isinstance(x, Tensor):
        return type(x).__name__
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"


def _current_mode() -> str:
    return _mode.get() or _mode_of_the_run()


@cache  # read once: it costs more than the rest of a call
def _mode_of_the_run() -> str:
    setting = os.environ.get("UNISONO_CHECK", "")
    return "" if setting in ("", "0") else "calls" if setting == "calls" else "sites"

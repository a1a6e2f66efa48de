"""What the ranks of every benchmark do alike: take turns, and read the clocks.

(Files with an underscore are parts: ./scripts/bench does not offer them.)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist


def order_of_turns(names: Sequence[str], turn: int) -> list[str]:
    """Rotated from round to round and reversed in every other one, so that none always follows the same."""
    first = turn % len(names)
    order = [*names[first:], *names[:first]]
    return order[::-1] if turn % 2 else order


def time_call(call: Callable[[], Any]) -> tuple[float, float]:
    """Wall and CPU seconds of one call; what it returns is freed after the clocks are read."""
    dist.barrier()
    cpu, wall = time.process_time(), time.perf_counter()
    result = call()
    seconds = time.perf_counter() - wall, time.process_time() - cpu
    del result
    return seconds

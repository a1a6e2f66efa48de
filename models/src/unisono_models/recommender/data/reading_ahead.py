"""Batches that are read while the last one is learned from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")


def read_ahead(read: Callable[[int], Item], first: int, last: int) -> Iterator[tuple[Item, Item | None]]:
    """read(first) to read(last - 1), each with the one that follows, if any. A thread reads the next two.

    What `read` raises is raised in place of the item before.

    Example:
        >>> list(read_ahead(lambda step: step * step, 1, 4))
        [(1, 4), (4, 9), (9, None)]
    """
    with ThreadPoolExecutor(1, thread_name_prefix="reading") as thread:
        waiting = [thread.submit(read, step) for step in range(first, min(first + 2, last))]
        for step in range(first, last):
            now = waiting.pop(0).result()
            if step + 2 < last:
                waiting.append(thread.submit(read, step + 2))
            yield now, waiting[0].result() if waiting else None

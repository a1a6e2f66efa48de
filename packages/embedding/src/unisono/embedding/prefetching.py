"""The row numbers of the next batch travel in a thread, over a group of their own, while this batch is computed."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroup

from unisono.collectives.checks import MismatchError, validate_across_ranks
from unisono.collectives.groups import process_group, resolve_group
from unisono.embedding.engine import Engine, Step
from unisono.embedding.ragged import Ragged


class Prefetcher:
    """Holds at most one batch that has been begun."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.ranks = engine, engine.ranks
        if self.ranks.size > 1:  # nothing may come between the messages of a step
            members = dist.get_process_group_ranks(process_group(self.ranks))
            made = dist.new_group(members, use_local_synchronization=len(members) < dist.get_world_size())
            assert isinstance(made, ProcessGroup)
            self.ranks = resolve_group(made)
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="unisono-prefetch")
        weakref.finalize(self, self.pool.shutdown, wait=False)
        self.ahead: tuple[Mapping[str, Any], Future[Step]] | None = None

    def begin(self, features: Mapping[str, Any], inputs: Mapping[str, Ragged], problem: str) -> None:
        self.drop()
        device = self.engine.options.device
        stream = None if device.type == "cpu" else torch.accelerator.current_stream(device)
        enabled = torch.is_grad_enabled()

        def start() -> Step:
            if stream is not None:  # a new thread has neither the device nor the stream of the one that asks
                torch.accelerator.set_device_index(device)
                torch.accelerator.set_stream(stream)
            with torch.set_grad_enabled(enabled):
                return self.engine.start(inputs, self.ranks, problem)

        self.ahead = features, self.pool.submit(start)

    def take(self, features: Mapping[str, Any]) -> Step | None:
        """The step of these features, if it was begun on all ranks; otherwise what was begun is dropped on all of them."""
        if self.ahead is None:
            return None
        found = _same(self.ahead[0], features)
        try:
            table = validate_across_ranks(
                f"{self.engine.options.function}.prefetch",
                self.engine.ranks,
                same="forward after prefetch",
                numbers=(int(found),),
                words=lambda: "forward after prefetch",
                device=self.engine.options.device,
                rule="All ranks must prefetch, or none.",
            )
        except MismatchError:
            self.ahead = None  # begun on some ranks only: it will never end
            raise
        if not all(row[0] for row in table):
            self.drop()
            return None
        (_, future), self.ahead = self.ahead, None
        return future.result()

    def drop(self) -> None:
        """Let a batch that nobody wants any more end, whatever became of it: all ranks have sent for it."""
        ahead, self.ahead = self.ahead, None
        if ahead is not None:
            ahead[1].exception()


def _same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether both have the very same tensors: DDP hands on a copy of the dict, but not of what is in it."""
    if a is b:
        return True
    if not isinstance(b, Mapping) or a.keys() != b.keys():
        return False
    pairs = [(a[name], b[name]) for name in a]
    return all(
        x is y or (isinstance(x, Ragged) and isinstance(y, Ragged) and all(u is v for u, v in zip(x, y, strict=True)))
        for x, y in pairs
    )

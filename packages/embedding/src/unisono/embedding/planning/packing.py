"""Which of its options each table gets, and on which ranks: such that the busiest rank has little to do and memory suffices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from unisono.embedding.planning.footprints import Option

_ANY = 2**62  # more than any rank has
_NEAR = 1.05  # loads that are as good as equal
_LIMITS = (None, 1.5, 1.2, 1.1, 1.0, 0.0)  # of a rank's load, as parts of the mean: beyond, a table is cut. 0: all are
_EVENNESS = (1.1, 1.2, 1.5)  # of memory, as parts of the mean: worth having if it costs next to nothing
_SMALL = 0.05  # of the mean load and memory: such a table is not worth cutting


class Placed(NamedTuple):
    option: Option
    ranks: Tensor  # of its pieces
    why: str  # it is not the cheapest option; or nothing


class Ledger:
    """What all ranks have so far."""

    def __init__(self, world_size: int, load: int = 0) -> None:
        self.load = torch.full((world_size,), load, dtype=torch.int64, device="cpu")
        self.sent = torch.zeros_like(self.load)
        self.memory = torch.zeros_like(self.load)

    def add(self, option: Option, ranks: Tensor) -> None:
        self.load += option.load_of_all
        self.load[ranks] += option.load
        self.sent += option.sent_by_all
        self.sent[ranks] += option.sent
        self.memory[ranks] += option.memory

    def find_room(self, option: Option, cap: int) -> tuple[int, Tensor] | None:
        """Neighbouring ranks whose load would be the least with this option, and the highest load among them."""
        parts = len(option.load)
        blocks = len(self.load) // parts
        load = (self.load[: blocks * parts].view(blocks, parts) + (option.load + option.load_of_all)).amax(1)
        memory = (self.memory[: blocks * parts].view(blocks, parts) + option.memory).amax(1)
        load = load.masked_fill_(memory > cap, _ANY)
        least = int(load.min())
        if least == _ANY:
            return None
        block = int(memory.masked_fill_(load > least, _ANY).argmin())
        return least, torch.arange(block * parts, (block + 1) * parts, device="cpu")


def pack(
    choices: Sequence[Sequence[Option]], order: Sequence[int], world_size: int, memory_per_rank: int | None
) -> list[Placed]:
    """An option for each table, on ranks. `order`: the tables, ties in the order that shall decide them.

    If memory does not suffice the answer is the one that comes nearest to it.
    """
    mean = max(1, -(-sum(options[0].total_load for options in choices) // world_size))
    whole = [[option for option in options if option.kind == "table"] for options in choices]
    held = [int(options[0].memory.sum()) for options in whole]
    even = max(1, -(-sum(held) // world_size))
    sizes = [max(int(options[0].load.sum()) / mean, h / even) for options, h in zip(whole, held, strict=True)]
    order = sorted(order, key=lambda table: -sizes[table])
    cap = _ANY if memory_per_rank is None else memory_per_rank
    wise = [every if size > _SMALL else uncut for every, uncut, size in zip(choices, whole, sizes, strict=True)]
    tried: list[tuple[int, list[Placed]]] = []
    for room in [*(bound for part in _EVENNESS if (bound := int(part * even)) < cap), cap]:
        short = "no rank has room for it whole" if room == cap else "spreads memory"
        for limit in _LIMITS:
            found = _try(wise, order, world_size, room, short, _ANY if limit is None else int(limit * mean))
            tried += [] if found is None else [found]
            if found is not None and found[0] <= _NEAR * mean:
                return found[1]
    if not tried:
        return _pack_tightly(choices, sorted(order, key=lambda table: -held[table]), world_size)
    least = min(load for load, _ in tried)
    return next(found for load, found in tried if load <= _NEAR * least)


def weigh(placed: Sequence[Placed], world_size: int) -> Ledger:
    ledger = Ledger(world_size)
    for option, ranks, _ in placed:
        ledger.add(option, ranks)
    return ledger


def _try(
    choices: Sequence[Sequence[Option]], order: Sequence[int], world_size: int, cap: int, short: str, limit: int
) -> tuple[int, list[Placed]] | None:
    """Table by table: the cheapest option that leaves its ranks below the limit, or else the one with the least load.

    With the load of the busiest rank; None: memory does not suffice. `short`: the reason to give where a table is cut since
    there is no room.
    """
    ledger = Ledger(world_size, sum(options[0].load_of_all for options in choices))
    placed: dict[int, Placed] = {}
    for table in order:
        options = choices[table]
        ledger.load -= options[0].load_of_all  # until now, all tables counted as if they had their cheapest option
        best: tuple[int, Placed] | None = None
        why = ""
        for option in options:
            found = ledger.find_room(option, cap)
            if found is None:
                why = why or short
            elif best is None or found[0] < best[0]:
                best = found[0], Placed(option, found[1], why)
            if best is not None and best[0] <= limit:
                break
            why = why or "too much work for one rank"
        if best is None:
            return None
        placed[table] = best[1]
        ledger.add(best[1].option, best[1].ranks)
    return int(ledger.load.max()), [placed[table] for table in range(len(choices))]


def _pack_tightly(choices: Sequence[Sequence[Option]], order: Sequence[int], world_size: int) -> list[Placed]:
    """Every table in pieces as small as can be, the largest of them where least is."""
    ledger = Ledger(world_size)
    placed: dict[int, Placed] = {}
    for table in order:
        option = min(choices[table], key=lambda option: int(option.memory.max()))
        ranks = ledger.memory.argsort(stable=True)[: len(option.load)]
        placed[table] = Placed(option, ranks, "memory is short")
        ledger.add(option, ranks)
    return [placed[table] for table in range(len(choices))]

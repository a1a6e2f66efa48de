"""What the ranks tell each other before rows can travel: how much each will ask, then the row numbers, in one exchange.

To every rank goes, for each family of which it holds a stack: the rows that are wanted, each once (and how often, where
gradients are scaled by frequency); then the bags: their ids, their lengths, and the bits of their weights, if they have any.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from unisono.collectives import MismatchError, all_to_all_single
from unisono.collectives.checks import validate_across_ranks
from unisono.collectives.groups import GroupRanks, as_group, is_fake_group, process_group, small_message_device
from unisono.embedding.families import Family
from unisono.embedding.requests import Request

_FEW = 12  # ranks up to which everybody may hear all numbers; beyond, each hears only its own


class IdOutOfRange(MismatchError, IndexError):  # noqa: N818 - what it is called where it is caught
    """An id beyond the rows of its table, on some rank. Raised alike on every rank."""


@dataclass
class Asked:
    """What all ranks ask of this rank's stack of one family, rank after rank: rows, then bags."""

    rows: Tensor  # of the stack
    lengths: Tensor | None  # of the bags, a single row being a bag of one; None: nothing but single rows
    weights: Tensor | None  # one for each of `rows`
    frequencies: Tensor | None  # how often the asking rank looked up each of `rows`
    answers: list[int]  # rows and sums that go back to each rank

    def bags(self) -> Tensor | None:
        """The bag of each of `rows`."""
        if self.lengths is None:
            return None
        return torch.arange(self.lengths.numel(), device=self.rows.device).repeat_interleave(self.lengths)


def consult(
    function: str, requests: Sequence[Request], ranks: GroupRanks, *, same: str, words: str, problem: str, device: torch.device
) -> list[list[int]]:
    """From each rank: the three counts of its request for each family. If any has a problem, all raise the same error."""
    mine = [] if problem else [_counts(requests, rank, ranks) for rank in range(ranks.size)]
    width = 3 * len(requests)
    few = ranks.size <= _FEW
    flat = [number for row in mine for number in row] if few and not problem else []
    try:
        table = validate_across_ranks(
            function,
            ranks,
            same=(function, same),
            numbers=flat,
            words=lambda: f"{function}({words})",
            device=device,
            rule="All ranks must look up the same features, with or without weights, all with gradients or all without.",
            problem=problem,
        )
    except MismatchError as error:
        raise (IdOutOfRange(str(error)) if "is out of range: table" in str(error) else error) from None
    if ranks.size == 1:
        return mine
    if few:
        return [row[ranks.rank * width : (ranks.rank + 1) * width] for row in table]
    if is_fake_group(process_group(ranks)):
        return [mine[ranks.rank]] * ranks.size
    where = small_message_device(process_group(ranks), device)
    each = (1,) * ranks.size
    counts = torch.tensor(mine, device=where)
    traded: list[list[int]] = all_to_all_single(counts, send_sizes=each, receive_sizes=each, group=as_group(ranks)).tolist()
    return traded


def swap_requests(
    requests: Sequence[Request], counts: Sequence[Sequence[int]], ranks: GroupRanks, *, exact: torch.dtype, device: torch.device
) -> list[Asked]:
    """Send every rank what is asked of it; returns what is asked of this rank, for each family.

    `counts`: what `consult` gave. `exact`: the dtype in which weights travel.
    """
    dtype = torch.int32 if all(max(request.family.heights) < 2**31 for request in requests) else torch.int64
    rows = [request.stack_rows().to(dtype) for request in requests]
    plain = len(requests) == 1 and requests[0].plain  # then a message is the rows alone: thousands of ranks cost no loop
    if plain:
        flat, send = rows[0], [end - start for start, end in pairwise(requests[0].cuts)]
        receive = [row[0] for row in counts]
    else:
        leaving = [
            [part for request, own in zip(requests, rows, strict=True) for part in _message(request, own, rank, ranks, exact)]
            for rank in range(ranks.size)
        ]
        parts = [part for message in leaving for part in message]
        flat = torch.cat(parts) if parts else torch.empty(0, dtype=dtype, device=device)
        send = [sum(part.numel() for part in message) for message in leaving]
        receive = [sum(sum(_sizes(request, row, k, exact)) for k, request in enumerate(requests)) for row in counts]
    if ranks.size > 1:
        flat = all_to_all_single(flat, send_sizes=send, receive_sizes=receive, group=as_group(ranks))
        if is_fake_group(process_group(ranks)):  # it moves nothing: row 0 stands for whatever the others would ask for
            flat = torch.zeros_like(flat)
    if plain:
        return [Asked(flat, None, None, None, receive)]
    sizes = [size for row in counts for k, request in enumerate(requests) for size in _sizes(request, row, k, exact)]
    pieces = iter(flat.split_with_sizes(sizes))
    heard = [[[next(pieces) for _ in range(5)] for _ in requests] for _ in counts]
    return [_combine([row[k] for row in heard], request, exact) for k, request in enumerate(requests)]


def _counts(requests: Sequence[Request], rank: int, ranks: GroupRanks) -> list[int]:
    """What this rank asks of `rank`: three counts for each family."""
    found: list[int] = []
    for request in requests:
        stack = _stack(request.family, rank, ranks)
        found += (0, 0, 0) if stack is None else request.counts(stack)
    return found


def _stack(family: Family, rank: int, ranks: GroupRanks) -> int | None:
    """Which stack this rank asks `rank` for; of a copy that every rank has, it asks only its own."""
    if family.replicated and rank != ranks.rank:
        return None
    place = family.place(rank)
    return None if place is None else place[0]


def _message(request: Request, rows: Tensor, rank: int, ranks: GroupRanks, exact: torch.dtype) -> list[Tensor]:
    """What goes to `rank`. `rows`: request.stack_rows(), in the dtype of all numbers of a message."""
    stack = _stack(request.family, rank, ranks)
    if stack is None:
        return []
    wanted = slice(request.cuts[stack], request.cuts[stack + 1])
    parts, dtype = [rows[wanted]], rows.dtype
    if request.family.kin.by_frequency:
        parts.append(request.groups.counts[wanted].to(dtype))
    bags = request.bags[stack]
    parts += [asking.ids.to(dtype) + request.family.starts[asking.table][0][1] for asking in bags]
    parts += [asking.lengths.to(dtype) for asking in bags]
    if request.weighted:
        for asking in bags:
            weights = torch.ones_like(asking.ids, dtype=exact) if asking.weights is None else asking.weights.detach().to(exact)
            parts.append(weights.contiguous().view(torch.int32).to(dtype))
    return parts


def _sizes(request: Request, row: Sequence[int], k: int, exact: torch.dtype) -> tuple[int, int, int, int, int]:
    """How long the parts of a message are: rows, frequencies, ids in bags, lengths of bags, bits of weights."""
    rows, ids, bags = row[3 * k : 3 * k + 3]
    words = exact.itemsize // torch.int32.itemsize
    return rows, rows * request.family.kin.by_frequency, ids, bags, ids * words * request.weighted


def _combine(heard: list[list[Tensor]], request: Request, exact: torch.dtype) -> Asked:
    """`heard`: the five parts of each rank's message."""
    answers = [rows.numel() + lengths.numel() for rows, _, _, lengths, _ in heard]
    rows = torch.cat([part for single, _, ids, _, _ in heard for part in (single, ids)])
    frequencies = torch.cat([part for _, part, _, _, _ in heard]) if request.family.kin.by_frequency else None
    if not any(lengths.numel() for _, _, _, lengths, _ in heard):
        return Asked(rows, None, None, frequencies, answers)
    lengths = torch.cat([part for single, _, _, bags, _ in heard for part in (torch.ones_like(single), bags)])
    weights = None
    if request.weighted:
        bits = [
            (torch.ones_like(single, dtype=exact), part.to(torch.int32).clone().view(exact)) for single, _, _, _, part in heard
        ]
        weights = torch.cat([part for pair in bits for part in pair])
    return Asked(rows, lengths, weights, frequencies, answers)

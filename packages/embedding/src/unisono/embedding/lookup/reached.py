"""Which features a backward has reached: one outside the loss must leave its rows alone, as in one process.

Autograd would give such a feature a gradient of zeros, with which momentum and weight decay still move the rows. A feature
counts as reached if any rank has it in its loss, since one process with the whole batch would have it there.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unisono.collectives import all_to_all_single
from unisono.collectives.checks import validate_across_ranks
from unisono.collectives.groups import as_group
from unisono.embedding.lookup.input_dist import IncomingRequest, OutgoingRequest
from unisono.embedding.lookup.kernels import to_device
from unisono.embedding.lookup.storage import ShardStorage

_BITS = 62  # flags in one int64


@dataclass
class Reached:
    """What the backward of output_dist tells that of lookup."""

    tables: Collection[int]  # those with a feature that was reached
    responses: Tensor | None = None  # for each response of this rank, whether a feature that was reached has it; None: all
    matters: bool = True  # whether it makes a difference to the optimizer

    def find(
        self,
        storage: ShardStorage,
        outgoing: Sequence[OutgoingRequest],
        incoming: Sequence[IncomingRequest],
        local: Sequence[bool],
    ) -> None:
        """Agree with the other ranks. `local`: whether this rank's loss has each feature, in the order of their requests."""
        self.tables, self.responses = range(len(storage.tables)), None
        if not self.matters or len(local) == 1:
            return
        features = [x for request in outgoing for x in request.features]
        reached = _reached_on_any_rank(storage, [x.name for x in features], local)
        self.tables = {x.table for x, flag in zip(features, reached, strict=True) if flag}
        if not all(reached):
            names = {x.name for x, flag in zip(features, reached, strict=True) if flag}
            self.responses = _mark_responses(storage, outgoing, incoming, names)


def place_responses(
    parts: dict[tuple[int, int], list[Tensor]],
    number: int,
    request: OutgoingRequest,
    column: int,
    rank: int,
    rows: Tensor,
    sums: Tensor,
) -> None:
    """Add what belongs to the responses of one chunk of columns to `parts`, by owner and number of the table group.

    `rows`: of the unique rows. `sums`: of the bags that the owners sum.
    """
    for shard in range(len(request.group.shards)):
        own = [rows[request.cuts[shard] : request.cuts[shard + 1]], sums[request.bag_cuts[shard] : request.bag_cuts[shard + 1]]]
        parts.setdefault((request.group.owner(shard, column, rank), number), []).extend(own)


def _reached_on_any_rank(storage: ShardStorage, features: Sequence[str], local: Sequence[bool]) -> list[bool]:
    function = f"{storage.options.function}.backward"
    words = f"{function} of {', '.join(features)}"
    bits = sum(flag << k for k, flag in enumerate(local))
    numbers = [bits >> start & (1 << _BITS) - 1 for start in range(0, len(local), _BITS)]
    table = validate_across_ranks(
        function,
        storage.ranks,
        same=words,
        numbers=numbers,
        words=lambda: words,
        device=storage.options.device,
        rule="All ranks must run the backwards of their look-ups in the same order.",
    )
    return [any(row[k // _BITS] >> k % _BITS & 1 for row in table) for k in range(len(local))]


def _mark_responses(
    storage: ShardStorage, outgoing: Sequence[OutgoingRequest], incoming: Sequence[IncomingRequest], names: Collection[str]
) -> Tensor:
    """Tell the owners which of their responses belong to a feature in `names`: for each, in the order of `lookup`."""
    ranks = storage.ranks
    parts: dict[tuple[int, int], list[Tensor]] = {}
    for number, request in enumerate(outgoing):
        unique = request.dedup.unique
        rows = torch.zeros(unique.numel(), dtype=torch.uint8, device=unique.device)
        if (block := request.by_rows) is not None:
            flags = to_device([x.name in names for x in block.features], unique.device)
            counts = to_device(block.known_id_counts(), unique.device)
            looked_up = flags.repeat_interleave(counts, output_size=block.rows.numel())
            rows[request.dedup.inverse[looked_up]] = 1
        sums = rows[:0]
        if (block := request.by_bags) is not None:
            sums = block.each_bag([x.name in names for x in block.features]).to(torch.uint8)
        for column in range(request.group.columns):
            place_responses(parts, number, request, column, ranks.rank, rows, sums)
    flat = torch.cat([part for place in sorted(parts) for part in parts[place]])
    if ranks.size > 1:
        send = [0] * ranks.size
        for (owner, _), own in parts.items():
            send[owner] += sum(part.numel() for part in own)
        held = [request for request in incoming if request.shard is not None]
        receive = [sum(request.response_counts[rank] for request in held) for rank in range(ranks.size)]
        flat = all_to_all_single(flat, send_sizes=send, receive_sizes=receive, group=as_group(ranks))
    return flat.bool()

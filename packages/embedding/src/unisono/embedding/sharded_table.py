"""One table as a module: its parameter, this rank's shard of it, and both in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from unisono.collectives import all_gather
from unisono.collectives.groups import GroupRanks, as_group
from unisono.embedding.layouts import Box, Layout
from unisono.embedding.meshes import as_dtensor, gather_dtensor
from unisono.embedding.tables import Table


class ShardedTable(nn.Module):
    """`weight`: a DTensor for the row, column and grid layouts; this rank's plain tensor for table and replicated ones, with
    sparse gradients (torch's sparse optimizers know no DTensor), and where no process group is initialised.

    state_dict always has DTensors if there is a group: the weight, and beside it the state of a fused optimizer.
    """

    weight: nn.Parameter

    def __init__(self, table: Table, layout: Layout, ranks: GroupRanks, *, plain: bool) -> None:
        super().__init__()
        self.table, self.layout, self.ranks, self.plain = table, layout, ranks, plain
        self.states: dict[str, Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        """States by their name, too: torch's checkpoint tools look up what state_dict lists."""
        states = self.__dict__.get("states", {})
        return states[name] if name in states else super().__getattr__(name)

    @property
    def box(self) -> Box:
        return self.layout.box(rank=self.ranks.rank, rows=self.table.rows, dim=self.table.dim)

    @property
    def local(self) -> Tensor:
        """This rank's shard, without gradient; changes to it are changes of the table."""
        weight = self.weight.detach()
        shard = weight.to_local() if isinstance(weight, DTensor) else weight
        return shard if shard.ndim == 2 else shard.reshape(self.box.shape)

    def attach(self, shard: Tensor, states: Mapping[str, Tensor]) -> None:
        """Let the parameter and the state be views of `shard` and `states`. A parameter that is there stays the same object."""
        fresh = nn.Parameter(self.shape_as(shard))
        if "weight" in self._parameters:
            fresh.requires_grad_(self.weight.requires_grad)
            torch.utils.swap_tensors(self.weight, fresh)
        else:
            self.weight = fresh
        self.states = dict(states)

    def shape_as(self, shard: Tensor) -> Tensor:
        """A shard, of the weight or of its gradient, in the form of the parameter."""
        if self.plain or not self.ranks.name or self.layout.kind in ("table", "replicated"):
            return shard
        return as_dtensor(shard, self.layout, self.ranks, (self.table.rows, self.table.dim), connected=True)

    def full_weight(self) -> Tensor:
        """The whole table, on every rank. All ranks call."""
        return self._gather(self.local)

    def set_weight(self, full: Tensor) -> None:
        """Take this rank's part of a whole table."""
        self._copy(self.local, full, "weight")

    def _gather(self, shard: Tensor) -> Tensor:
        if self.layout.kind == "replicated" or self.ranks.size == 1:
            return shard.clone()
        rows, dim = self.table.rows, self.table.dim
        boxes = [self.layout.box(rank=rank, rows=rows, dim=dim) for rank in range(self.ranks.size)]
        sizes = [box.shape[0] * box.shape[1] for box in boxes]
        parts = all_gather(shard.reshape(-1), sizes=sizes, group=as_group(self.ranks)).split_with_sizes(sizes)
        full = shard.new_empty((rows, dim))
        for box, part in zip(boxes, parts, strict=True):
            full[box.row : box.row_end, box.column : box.column_end] = part.view(box.shape)
        return full

    def _entries(self) -> dict[str, Tensor]:
        return {"weight": self.local, **self.states}

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        for name, value in self._entries().items():
            if name == "weight" and keep_vars:
                destination[prefix + name] = self.weight
            elif not self.ranks.name or value.ndim == 0:
                destination[prefix + name] = value
            else:
                shape = (self.table.rows, self.table.dim)[: value.ndim]
                destination[prefix + name] = as_dtensor(value, self.layout, self.ranks, shape, connected=False)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        entries = self._entries()
        if strict:
            known = {prefix + name for name in entries}
            unexpected_keys += [key for key in state_dict if key.startswith(prefix) and key not in known]
            stated = any(prefix + name in state_dict for name in self.states)  # weights alone may come without state
            missing_keys += [
                key for name in entries if (key := prefix + name) not in state_dict and (stated or name == "weight")
            ]
        for name, value in entries.items():
            given = state_dict.get(prefix + name)
            if given is None:
                continue
            try:
                self._copy(value, given, name)
            except ValueError as error:
                error_msgs.append(f"{prefix}{name}: {error}")

    @torch.no_grad()
    def _copy(self, own: Tensor, given: Tensor, name: str) -> None:
        shape = (self.table.rows, self.table.dim)[: own.ndim]
        if tuple(given.shape) != shape:
            raise ValueError(f"{name} of table {self.table.name!r} has shape {shape}, got {tuple(given.shape)}")
        if own.is_meta:
            raise ValueError(f"table {self.table.name!r} is on the meta device; call to_empty(device=...) first")
        if own.ndim == 0:
            own.copy_(given)
            return
        if isinstance(given, DTensor):
            mine = as_dtensor(own, self.layout, self.ranks, shape, connected=False)
            if given.device_mesh == mine.device_mesh and given.placements == mine.placements:
                local = given.to_local()
                if local.numel():
                    own.copy_(local.reshape(own.shape))
                return
            given = gather_dtensor(given, self.ranks)
        box = self.box
        rows = given[box.row : box.row_end]
        own.copy_(rows[:, box.column : box.column_end] if own.ndim == 2 else rows)

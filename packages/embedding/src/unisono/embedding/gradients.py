"""Gradients of the parameters, where no fused optimizer takes them: dense, in the parameter's own form, or sparse."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from unisono.embedding.stacks import Stack, split_by_shard


class ParameterSink:
    """Collects the gradient of each table's parameter.

    `shape_as`: gives a dense local gradient the form of the table's parameter (a DTensor, mostly).
    """

    def __init__(self, parameters: Sequence[Tensor], shape_as: Callable[[int, Tensor], Tensor], sparse: bool) -> None:
        self.wanted = [parameter.requires_grad for parameter in parameters]  # a frozen table costs nothing
        self.shape_as, self.sparse = shape_as, sparse
        self.parts: dict[int, list[tuple[Tensor, Tensor, torch.Size]]] = {}

    def begin(self) -> None:
        self.parts = {}

    def needs_square_sums(self) -> bool:
        return False

    def decay(self, stack: Stack, rows: Tensor, grads: Tensor) -> Tensor:
        return grads

    def take(self, stack: Stack, rows: Tensor, grads: Tensor, square_sums: Tensor | None) -> None:
        for shard, own, sums in split_by_shard(stack, rows, grads):
            if not self.wanted[shard.table]:
                continue
            shape = torch.Size((shard.box.shape[0], stack.weight.shape[1]))
            self.parts.setdefault(shard.table, []).append((own.to(torch.int64), sums, shape))

    def results(self) -> Sequence[Tensor | None]:
        parts, self.parts = self.parts, {}
        return [self._gradient(table, parts.get(table)) for table in range(len(self.wanted))]

    def _gradient(self, table: int, parts: list[tuple[Tensor, Tensor, torch.Size]] | None) -> Tensor | None:
        if parts is None:
            return None
        shape = parts[0][2]
        if self.sparse:
            rows, sums = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
            return torch.sparse_coo_tensor(rows[None], sums, shape, is_coalesced=True, check_invariants=False)
        dense = parts[0][1].new_zeros(shape)
        for rows, sums, _ in parts:
            dense.index_copy_(0, rows, sums)
        return self.shape_as(table, dense)

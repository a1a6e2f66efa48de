"""Sparse gradients (COO, as nn.Embedding(sparse=True) makes them) are gathered, not reduced: only touched rows travel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unisono.collectives import all_gather
from unisono.collectives.groups import GroupRanks, as_group
from unisono.dataparallel.buckets import Spec


def add_up_sparse(
    grads: Sequence[Tensor | None], specs: Sequence[Spec], sparse_dims: Sequence[int], scale: float, ranks: GroupRanks
) -> list[Tensor]:
    """For each parameter `scale` times the sum over ranks, coalesced, the same on every rank.

    `sparse_dims`: the number of sparse dimensions of each, which all ranks share; a rank with no gradient adds nothing.
    One exchange for all gradients of a device.
    """
    results: dict[int, Tensor] = {}
    for device in dict.fromkeys(spec.device for spec in specs):
        places = [place for place, spec in enumerate(specs) if spec.device == device]
        parts = [_parts(grads[place], specs[place], sparse_dims[place], scale) for place in places]
        gathered = all_gather(parts, group=as_group(ranks))
        for place, (indices, values) in zip(places, gathered, strict=True):
            size = specs[place].shape
            total = torch.sparse_coo_tensor(indices.t(), values, size, check_invariants=False, is_coalesced=False)
            results[place] = total.coalesce()
    return [results[place] for place in range(len(specs))]


def _parts(grad: Tensor | None, spec: Spec, sparse_dim: int, scale: float) -> tuple[Tensor, Tensor]:
    """Rows of (indices, values), with none twice."""
    if grad is None:
        indices = torch.empty(0, sparse_dim, dtype=torch.int64, device=spec.device)
        return indices, torch.empty(0, *spec.shape[sparse_dim:], dtype=spec.dtype, device=spec.device)
    grad = grad.detach().coalesce()
    values = grad.values()
    return grad.indices().t().contiguous(), values * scale if scale != 1 else values

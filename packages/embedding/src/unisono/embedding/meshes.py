"""A table's shards as one DTensor: what torch's operations, optimizers and checkpoints understand."""

from __future__ import annotations

import math
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import ProcessGroup
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from unisono.collectives import all_gather
from unisono.collectives.groups import GroupRanks, as_group, is_fake_group, process_group
from unisono.embedding.layouts import Layout

# Meshes by group and arrangement: to make one, groups are made, which all their ranks have to do together.
_meshes: WeakKeyDictionary[ProcessGroup, dict[tuple[object, ...], DeviceMesh]] = WeakKeyDictionary()


def as_dtensor(local: Tensor, layout: Layout, ranks: GroupRanks, shape: tuple[int, ...], *, connected: bool) -> DTensor:
    """`local` as a part of a tensor of `shape`: (rows, dim), or (rows,) for what has one number a row.

    `connected`: whether operations that communicate will be asked of it. Without, no groups have to be made.
    """
    mesh = mesh_of(layout, ranks, local.device.type, connected=connected)
    stride = (shape[1], 1) if len(shape) == 2 else (1,)
    if mesh.get_coordinate() is None:
        local = local.reshape(0)
    placements = placements_of(layout, len(shape))
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def gather_dtensor(given: DTensor, ranks: GroupRanks) -> Tensor:
    """The whole of a DTensor that lies on some of `ranks`, on all of them. Its mesh needs no groups. All ranks call."""
    shape, offset = compute_local_shape_and_global_offset(given.shape, given.device_mesh, given.placements)
    local = given.to_local()
    here = local.numel() > 0
    box = [*(offset if here else [0] * given.ndim), *(shape if here else [0] * given.ndim)]
    boxes = all_gather(torch.tensor([box], device=local.device), sizes=[1] * ranks.size, group=as_group(ranks)).tolist()
    sizes = [math.prod(row[given.ndim :]) for row in boxes]
    parts = all_gather(local.reshape(-1), sizes=sizes, group=as_group(ranks)).split_with_sizes(sizes)
    full = local.new_empty(given.shape)
    for row, part in zip(boxes, parts, strict=True):
        starts, lengths = row[: given.ndim], row[given.ndim :]
        full[tuple(slice(a, a + n) for a, n in zip(starts, lengths, strict=True))] = part.view(lengths)
    return full


def placements_of(layout: Layout, ndim: int) -> list[Placement]:
    columns: Placement = Shard(1) if ndim == 2 else Replicate()
    found: dict[str, list[Placement]] = {
        "row": [Shard(0)],
        "table": [Shard(0)],
        "column": [columns],
        "grid": [Shard(0), columns],
        "replicated": [Replicate()],
    }
    return found[layout.kind]


def mesh_of(layout: Layout, ranks: GroupRanks, device_type: str, *, connected: bool) -> DeviceMesh:
    pg = process_group(ranks)
    device_type = "cpu" if device_type == "meta" else device_type
    everyone = list(range(ranks.size))
    if layout.kind == "replicated":
        arrangement: list[int] | list[list[int]] = everyone
    elif layout.kind == "grid":
        arrangement = [list(row) for row in layout.placed]
    else:
        arrangement = [rank for row in layout.placed for rank in row]
    key = (device_type, connected, str(arrangement))
    known = _meshes.setdefault(pg, {})
    if key not in known:
        if arrangement == everyone:
            known[key] = DeviceMesh.from_group(pg, device_type)
        else:
            known[key] = _arrange(arrangement, pg, device_type, connected)
    return known[key]


def _arrange(arrangement: list[int] | list[list[int]], pg: ProcessGroup, device_type: str, connected: bool) -> DeviceMesh:
    """A mesh in any order, with groups in that order: those that DeviceMesh makes by itself are sorted, and gather so.

    Groups can be made by all ranks of the world together only; on a part of it the mesh is left without, and operations
    that communicate raise torch's error.
    """
    mesh = torch.tensor(dist.get_process_group_ranks(pg), device="cpu")[torch.tensor(arrangement, device="cpu")]
    names = ("rows", "columns") if mesh.ndim == 2 else ("shards",)
    found = DeviceMesh(device_type, mesh, mesh_dim_names=names, _init_backend=False)
    if not connected or pg is not dist.group.WORLD or is_fake_group(pg):
        return found
    own = []
    for dim in range(mesh.ndim):
        for line in mesh.movedim(dim, -1).reshape(-1, mesh.shape[dim]).tolist():
            made = dist.new_group(line, sort_ranks=False)
            own += [made.group_name] if isinstance(made, ProcessGroup) else []
    if own:
        found._dim_group_names = own
    return found

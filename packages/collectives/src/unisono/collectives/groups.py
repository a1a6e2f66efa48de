"""Which ranks take part: one argument, `group`, for every function of this package."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group as _by_name  # type: ignore[attr-defined]

Group: TypeAlias = ProcessGroup | DeviceMesh | tuple[DeviceMesh, str] | None
"""None (the default group), a ProcessGroup, a 1-D DeviceMesh, or (mesh, dimension name)."""


class GroupRanks(NamedTuple):
    """The ranks of one call: plain values, so that they survive torch.compile and its caches.

    `rank` counts within the group. `name` is empty when no process group is initialised: then there is one rank.
    """

    name: str
    rank: int
    size: int


def resolve_group(group: Group) -> GroupRanks:
    """The ranks that `group` stands for; one rank where nothing was initialised."""
    if group is None:
        if not dist.is_initialized():
            return GroupRanks("", 0, 1)
        group = dist.group.WORLD
    elif isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group: a DeviceMesh of {group.ndim} dimensions {group.mesh_dim_names} is ambiguous; "
                "pass (mesh, dimension name) or a 1-D mesh"
            )
        group = group.get_group()
    elif isinstance(group, tuple):
        mesh, name = group
        group = mesh.get_group(name)
    if not isinstance(group, ProcessGroup) and group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("group: this rank is not in the group; only its members may call")
    if not isinstance(group, ProcessGroup):
        raise TypeError(f"group: expected None, a ProcessGroup, a 1-D DeviceMesh or (mesh, dimension name), got {group!r}")
    return GroupRanks(group.group_name, group.rank(), group.size())


def process_group(ranks: GroupRanks) -> ProcessGroup:
    return group_by_name(ranks.name)


def as_group(ranks: GroupRanks) -> Group:
    """An argument that resolves to `ranks`: for code that has crossed a compiled graph, where only plain values pass."""
    return process_group(ranks) if ranks.name else None


def group_by_name(name: str) -> ProcessGroup:
    pg: ProcessGroup = _by_name(name)  # type: ignore[arg-type]
    return pg


# The backend for each type of device, by group: asking torch each time costs as much as a tenth of a small collective.
_backends: WeakKeyDictionary[ProcessGroup, dict[str, str]] = WeakKeyDictionary()


def _backends_of(pg: ProcessGroup) -> dict[str, str]:
    found = _backends.get(pg)
    if found is None:
        found = {device.type: str(pg._get_backend(device).name()).lower() for device in pg._device_types}
        _backends[pg] = found
    return found


def backend_for(device: torch.device, pg: ProcessGroup) -> str:
    """The backend that moves tensors of `device`: one group may have one for CPUs and another for GPUs."""
    backends = _backends_of(pg)
    if device.type not in backends:
        raise ValueError(f"group {pg.group_name!r} has backends for {sorted(backends)}, none for a tensor on {device}")
    return backends[device.type]


def is_fake_group(pg: ProcessGroup) -> bool:
    """The fake group: one process plays one rank of many, and every other rank is taken to do as this one does."""
    return "fake" in _backends_of(pg).values()


def small_message_device(pg: ProcessGroup, fallback: torch.device | None) -> torch.device:
    """Where a few integers travel best: the CPU if the group has a CPU backend, for then no GPU has to be waited for."""
    kinds = _backends_of(pg)
    if "cpu" in kinds:
        return torch.device("cpu")
    if fallback is not None and fallback.type in kinds:
        return fallback
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        raise RuntimeError(f"group {pg.group_name}: its backends serve {sorted(kinds)}, none of which is available here")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())

"""The argument `group` of every function: which ranks take part, and which backend serves them."""

from typing import NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group as _by_name  # type: ignore[attr-defined]

Group: TypeAlias = ProcessGroup | DeviceMesh | tuple[DeviceMesh, str] | None
"""None (the default group), a ProcessGroup, a 1-D DeviceMesh, or (mesh, dimension name)."""

_SHARDED_OVER = "_unisono_sharded_over"  # an attribute of parameters


class GroupRanks(NamedTuple):
    """This rank and the size of a group, as plain values, which survive torch.compile and its caches.

    `rank` counts within the group. `name` is the name of the process group; it is empty, with one rank, if
    torch.distributed is not initialised.
    """

    name: str
    rank: int
    size: int


def resolve_group(group: Group) -> GroupRanks:
    """Return the ranks of `group`; one rank if torch.distributed is not initialised."""
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
    """Return a `group` argument that resolves to `ranks`, for code behind a compiled graph, which passes plain values only."""
    return process_group(ranks) if ranks.name else None


def group_by_name(name: str) -> ProcessGroup:
    pg: ProcessGroup = _by_name(name)  # type: ignore[arg-type]
    return pg


def mark_as_sharded(parameter: Tensor, ranks: GroupRanks) -> None:
    """Note that each of the ranks holds another part of this parameter, since a plain tensor does not show it."""
    setattr(parameter, _SHARDED_OVER, ranks.name)


def sharded_over(parameter: object) -> str:
    """The name of the group whose ranks hold parts of this parameter; "" if each rank has the whole of it."""
    return str(getattr(parameter, _SHARDED_OVER, ""))


# For each group, the backend of each device type: asking torch each time costs a tenth of a small collective.
_backends: WeakKeyDictionary[ProcessGroup, dict[str, str]] = WeakKeyDictionary()


def _backends_of(pg: ProcessGroup) -> dict[str, str]:
    found = _backends.get(pg)
    if found is None:
        found = {device.type: str(pg._get_backend(device).name()).lower() for device in pg._device_types}
        _backends[pg] = found
    return found


def backend_for(device: torch.device, pg: ProcessGroup) -> str:
    """Return the backend for tensors on `device`: one group may have one for CPUs and another for GPUs."""
    backends = _backends_of(pg)
    if device.type not in backends:
        raise ValueError(f"group {pg.group_name!r} has backends for {sorted(backends)}, none for a tensor on {device}")
    return backends[device.type]


def is_fake_group(pg: ProcessGroup) -> bool:
    """Return whether this is torch's fake group: one process plays one rank of many, and the others count as its copies."""
    return "fake" in _backends_of(pg).values()


def small_message_device(pg: ProcessGroup, fallback: torch.device | None) -> torch.device:
    """Return the device for messages of a few integers: the CPU if the group has a CPU backend, which spares a GPU wait."""
    backends = _backends_of(pg)
    if "cpu" in backends:
        return torch.device("cpu")
    if fallback is not None and fallback.type in backends:
        return fallback
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        raise RuntimeError(f"group {pg.group_name}: its backends serve {sorted(backends)}, none of which is available here")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())

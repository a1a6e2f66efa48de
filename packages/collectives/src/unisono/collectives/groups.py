"""The argument `group` of every function: which ranks take part, and which backend serves them."""

import os
import warnings
from datetime import timedelta
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import ProcessGroup, _get_process_group_store, default_pg_timeout
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


def backend_or_none(device: torch.device, pg: ProcessGroup) -> str | None:
    """Return the backend for tensors on `device`, or None if the group has none."""
    return _backends_of(pg).get(device.type)


def backend_for(device: torch.device, pg: ProcessGroup) -> str:
    """Return the backend for tensors on `device`: one group may have one for CPUs and another for GPUs."""
    backends = _backends_of(pg)
    if device.type not in backends:
        raise ValueError(f"group {pg.group_name!r} has backends for {sorted(backends)}, none for a tensor on {device}")
    return backends[device.type]


def is_fake_group(pg: ProcessGroup) -> bool:
    """Return whether this is torch's fake group: one process plays one rank of many, and the others count as its copies."""
    return "fake" in _backends_of(pg).values()


def serving_group(device: torch.device, pg: ProcessGroup) -> ProcessGroup:
    """Return the group that takes tensors on `device`: `pg`, or its CPU side group for CPU tensors that `pg` does not serve."""
    if device.type == "cpu" and "cpu" not in _backends_of(pg):
        return cpu_side_group(pg) or pg
    return pg


def small_message_device(pg: ProcessGroup, fallback: torch.device | None) -> torch.device:
    """Return the device for messages of a few integers: the CPU, which spares a GPU wait, wherever gloo can be had.

    All ranks of the group must call it at the same point: the first call on a group without a CPU backend makes one.
    """
    backends = _backends_of(pg)
    if "cpu" in backends or cpu_side_group(pg) is not None:
        return torch.device("cpu")
    if fallback is not None and fallback.type in backends:
        return fallback
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        raise RuntimeError(f"group {pg.group_name}: its backends serve {sorted(backends)}, none of which is available here")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


# For each group without a CPU backend, a gloo group over the same ranks, which lives as long; None where there cannot be one.
_side_groups: WeakKeyDictionary[ProcessGroup, ProcessGroup | None] = WeakKeyDictionary()
_CONNECT_SECONDS = 60  # until ranks that cannot reach each other by gloo give it up


def cpu_side_group(pg: ProcessGroup) -> ProcessGroup | None:
    """Return a gloo group over the ranks of `pg`, which has no CPU backend, or None where gloo cannot connect them.

    The first call makes it: all ranks of `pg`, and only they, take part. It has the timeout of `pg` and ends with it.
    """
    if pg not in _side_groups:
        _side_groups[pg] = _make_side_group(pg) if dist.is_gloo_available() else None
    return _side_groups[pg]


def _make_side_group(pg: ProcessGroup) -> ProcessGroup | None:
    # Not by dist.new_group: if only some ranks call it, the names of later groups differ between the ranks.
    store = PrefixStore("unisono_cpu_side_group", _get_process_group_store(pg))
    rank, size, timeout = pg.rank(), pg.size(), _timeout_of(pg)
    joined = store.add("joined", 1)
    attempt = (joined - 1) // size  # the same on all ranks; a store may outlive its group
    store = PrefixStore(str(attempt), store)
    if joined == (attempt + 1) * size:
        store.set("all are here", "")
    store.wait(["all are here"], timeout)  # a rank that comes late is no reason to do without
    problem = ""
    try:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = min(timeout / 2, timedelta(seconds=_CONNECT_SECONDS))  # the others wait `timeout` for the verdict
        # lazy: a rank connects to the few ranks that it exchanges messages with, not to thousands
        interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
        options._devices = [
            *(dist.ProcessGroupGloo.create_device(interface=name, lazy_init=True) for name in interfaces),
            *([] if interfaces else [dist.ProcessGroupGloo.create_default_device(lazy_init=True)]),
        ]
        backend = dist.ProcessGroupGloo(store, rank, size, options)
        _meet_neighbours(backend)
    except RuntimeError as error:
        problem = str(error)
        store.add("failed", 1)
    # Either all ranks use it or none: one that has failed would leave the others waiting.
    if store.add("tried", 1) == size:
        store.set("verdict", "failed" if store.add("failed", 0) else "made")
    store.wait(["verdict"], timeout)
    if store.get("verdict") != b"made":
        warnings.warn(
            f"group {pg.group_name!r} has no CPU backend, and gloo could not connect its ranks (rank {rank}: "
            f"{problem or 'another rank failed'}): each exchange of sizes waits for the device. GLOO_SOCKET_IFNAME names the "
            "network interface that gloo uses",
            stacklevel=2,
        )
        return None
    backend._set_default_timeout(timeout)
    side = ProcessGroup(store, rank, size)
    side._set_default_backend(ProcessGroup.BackendType.GLOO)
    side._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, backend)
    side._set_group_name(f"{pg.group_name}:cpu")  # type: ignore[arg-type]
    side._set_group_desc(f"unisono: sizes and agreements of group {pg.group_name} ({pg.group_desc})")
    return side


def _meet_neighbours(backend: Any) -> None:
    """Exchange a message with the ranks before and behind this one; raise where gloo cannot reach them."""
    rank, size = backend.rank(), backend.size()
    if size == 1:
        return
    greeting, heard = torch.zeros(1, device="cpu"), torch.zeros(1, device="cpu")
    works = [backend.send([greeting], (rank + 1) % size, 0), backend.recv([heard], (rank - 1) % size, 0)]
    for work in works:
        work.wait()


def _timeout_of(pg: ProcessGroup) -> timedelta:
    for device in pg._device_types:
        timeout = getattr(getattr(pg._get_backend(device), "options", None), "_timeout", None)
        if timeout is not None:
            return timedelta(seconds=timeout.total_seconds())
    return default_pg_timeout

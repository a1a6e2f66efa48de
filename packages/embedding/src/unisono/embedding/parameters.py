"""A table's parameter: a DTensor over the ranks that hold it, the same in a checkpoint; and how DDP and FSDP leave it alone."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.parallel import DistributedDataParallel

from unisono.collectives import all_gather
from unisono.collectives.groups import GroupRanks, as_group, is_fake_group, mark_as_sharded, process_group
from unisono.embedding.sharding.layouts import Box, Layout
from unisono.embedding.table import Table

if TYPE_CHECKING:
    from unisono.embedding.lookup.row_cache import RowCache
    from unisono.embedding.optimizers import Rule

# Meshes by process group, device type and order of ranks: a new mesh makes groups, which all their ranks have to do together.
_meshes: WeakKeyDictionary[ProcessGroup, dict[tuple[object, ...], DeviceMesh]] = WeakKeyDictionary()


def sharded_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Find the parameters of all sharded tables in `model`, by name.

    FSDP2: `fully_shard(model, ignored_params=set(sharded_parameters(model).values()))`.

    Backward: none; it only reads.

    Example:
        >>> from unisono.embedding import ShardedEmbedding
        >>> list(sharded_parameters(nn.Sequential(ShardedEmbedding(9, 4), nn.Linear(4, 2))))
        ['0.weight']
    """
    found = {}
    for prefix, module in model.named_modules():
        if isinstance(module, ShardedTable):
            found[f"{prefix}.weight" if prefix else "weight"] = module.weight
    return found


def exclude_from_ddp(model: nn.Module) -> nn.Module:
    """Mark the tables in `model`, so that DistributedDataParallel(model) neither copies nor averages them. Returns `model`.

    Backward: unchanged. DDP averages the other parameters; tables with grad_reduce="mean" average their own gradients.

    Example:
        >>> from unisono.embedding import ShardedEmbedding
        >>> model = exclude_from_ddp(nn.Sequential(ShardedEmbedding(9, 4), nn.Linear(4, 2)))
    """
    ignored = {*getattr(model, "_ddp_params_and_buffers_to_ignore", ()), *sharded_parameters(model)}
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, sorted(ignored))
    return model


class LocalGradient(Tensor):
    """The gradient of a `weight` that is this rank's part of a table as a plain tensor: a plain tensor itself.

    But torch.nn.utils.clip_grad_norm_ raises: it would take the norm of this part for that of the table, each rank would
    scale by another number, and the weights that the ranks have in common would drift apart.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.linalg.vector_norm, torch._foreach_norm):
            raise TypeError(
                "torch.nn.utils.clip_grad_norm_ sees only this rank's part of a sharded table: call "
                "unisono.embedding.clip_grad_norm_ instead; gradient.detach() is the part as a plain tensor"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _mark_gradient(weight: Tensor) -> None:
    if type(weight.grad) is Tensor:
        weight.grad.__class__ = LocalGradient  # as_subclass does not know sparse tensors


class ShardedTable(nn.Module):
    """A table as a module. `weight` is a DTensor for row and column layouts. It is this rank's plain tensor for table and
    replicated layouts, with sparse gradients (torch's sparse optimizers know no DTensor), and without a process group.

    With a process group, state_dict always has DTensors: the weight, and beside it the state of the optimizer.
    """

    weight: nn.Parameter

    def __init__(self, table: Table, layout: Layout, ranks: GroupRanks, *, plain: bool) -> None:
        super().__init__()
        self.table = table
        self.layout = layout
        self.ranks = ranks
        self.plain = plain  # `weight` is never a DTensor
        self.states: dict[str, Tensor] = {}
        self.rule: Rule | None = None  # of the optimizer, whose state is in `states`
        self.cache: RowCache | None = None  # of a table in host memory, where `weight` and `states` are
        self.first_row = 0  # of this table among the rows of the cache

    def __getattr__(self, name: str) -> Any:
        """Find states by their name, too: torch's checkpoint tools look up what state_dict lists.

        Whoever asks for a weight in host memory may read or change it, so no row may be in the cache.
        """
        states = self.__dict__.get("states", {})
        if (name == "weight" or name in states) and self.__dict__.get("cache") is not None:
            self.__dict__["cache"].release()
        return states[name] if name in states else super().__getattr__(name)

    @property
    def box(self) -> Box:
        """The part of the table that lies on this rank."""
        return self.layout.box(rank=self.ranks.rank, rows=self.table.rows, dim=self.table.dim)

    @property
    def is_trained(self) -> bool:
        """Whether the weight requires a gradient. To ask the weight itself would empty a cache."""
        return self._parameters["weight"].requires_grad  # type: ignore[union-attr]

    @property
    def local(self) -> Tensor:
        """This rank's shard, without gradient. Changes to it are changes of the table."""
        if self.cache is not None:
            self.cache.release()
        return self._shard()

    def _shard(self) -> Tensor:
        """The memory of `local`. In host memory, rows that are in the cache have old values there."""
        weight = self._parameters["weight"].detach()  # type: ignore[union-attr]
        shard = weight.to_local() if isinstance(weight, DTensor) else weight
        return shard if shard.ndim == 2 else shard.reshape(self.box.shape)

    def attach(self, shard: Tensor, states: Mapping[str, Tensor], cache: "RowCache | None" = None, first_row: int = 0) -> None:
        """Let the parameter and the state be views of `shard` and `states`. An existing parameter stays the same object."""
        fresh = nn.Parameter(self.shape_as(shard))
        if self.ranks.size > 1 and not self.layout.is_replicated:
            mark_as_sharded(fresh, self.ranks)
            if not isinstance(fresh, DTensor):
                fresh.register_post_accumulate_grad_hook(_mark_gradient)
        if "weight" in self._parameters:
            fresh.requires_grad_(self.weight.requires_grad)
            torch.utils.swap_tensors(self.weight, fresh)
        else:
            self.weight = fresh
        self.states = dict(states)
        self.cache, self.first_row = cache, first_row

    def reset_states(self, rows: Tensor | None = None) -> None:
        """Set the optimizer's state of `rows`, or of all rows, of this rank's shard to its initial value."""
        for name, first in ({} if self.rule is None else self.rule.states(self._shard()[:1])).items():
            if first.shape[0]:
                self.states[name][slice(None) if rows is None else rows] = first

    def reset_rows(self, rows: Tensor) -> None:
        """Set `rows` of this rank's shard to zero, and the optimizer's state to its initial value."""
        shard = self._shard()
        rows = rows.to(shard.device)
        if self.cache is not None and rows.numel():
            self.cache.drop(rows + self.first_row)
        shard[rows] = 0
        self.reset_states(rows)

    def shape_as(self, shard: Tensor) -> Tensor:
        """Give a shard, of the weight or of its gradient, the form of the parameter."""
        if self.plain or not self.ranks.name or not self.layout.weight_is_dtensor:
            return shard
        return _as_dtensor(shard, self.layout, self.ranks, (self.table.rows, self.table.dim), connected=True)

    def full_weight(self) -> Tensor:
        """Gather the whole table on every rank. All ranks call."""
        return self._gather(self.local)

    def set_weight(self, full: Tensor) -> None:
        """Copy this rank's part of a whole table."""
        self._copy(self.local, full, "weight")

    def _gather(self, shard: Tensor) -> Tensor:
        if self.layout.is_replicated or self.ranks.size == 1:
            return shard.clone()
        shape = (self.table.rows, self.table.dim)[: shard.ndim]
        return _gather_dtensor(_as_dtensor(shard, self.layout, self.ranks, shape, connected=False), self.ranks)

    def raise_for_other_states(self, other: "ShardedTable") -> None:
        """Raise ValueError if a state of the optimizers of both tables has one name and different meanings."""
        for name in self.states.keys() & other.states.keys():
            if self.states[name].ndim != other.states[name].ndim:
                raise ValueError(
                    f"copy_rows: table {self.table.name!r}: the state {name!r} of {other.rule} does not fit that of {self.rule}"
                )

    @torch.no_grad()
    def copy_rows(self, other: "ShardedTable") -> None:
        """Copy the rows of a table with as many or fewer, and the state of its optimizer, if both have one. All ranks call."""
        self.raise_for_other_states(other)
        box = self.box
        end = max(box.row, min(box.row_end, other.table.rows))
        given = other._entries()
        for name, own in self._entries().items():
            if name in given and own.ndim == 0:
                own.copy_(given[name])
            elif name in given:
                rows = other._gather(given[name])[box.row : end]
                own[: end - box.row] = rows[:, box.column : box.column_end] if own.ndim == 2 else rows

    def __getstate__(self) -> dict[str, Any]:
        """A table that is copied without its collection, which would release all caches itself, has all rows in host memory."""
        if self.cache is not None:
            self.cache.release()
        return self.__dict__

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
                destination[prefix + name] = _as_dtensor(value, self.layout, self.ranks, shape, connected=False)

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
            has_state = any(prefix + name in state_dict for name in self.states)  # weights alone may come without state
            required = entries if has_state else ("weight",)
            missing_keys += [prefix + name for name in required if prefix + name not in state_dict]
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
            mine = _as_dtensor(own, self.layout, self.ranks, shape, connected=False)
            if given.device_mesh == mine.device_mesh and given.placements == mine.placements:
                local = given.to_local()
                if local.numel():
                    own.copy_(local.reshape(own.shape))
                return
            given = _gather_dtensor(given, self.ranks)
        box = self.box
        rows = given[box.row : box.row_end]
        own.copy_(rows[:, box.column : box.column_end] if own.ndim == 2 else rows)


def _as_dtensor(local: Tensor, layout: Layout, ranks: GroupRanks, shape: tuple[int, ...], *, connected: bool) -> DTensor:
    """Make `local` a part of a DTensor of `shape`: (rows, dim), or (rows,) for states with one number for each row.

    `connected`: whether operations on it may communicate. Without it no process groups have to be made.
    """
    mesh = _mesh_of(layout, ranks, local.device.type, connected=connected)
    stride = (shape[1], 1) if len(shape) == 2 else (1,)
    if mesh.get_coordinate() is None:
        local = local.reshape(0)
    placements = layout.placements(len(shape))
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def _gather_dtensor(given: DTensor, ranks: GroupRanks) -> Tensor:
    """Gather a DTensor that lies on some of `ranks` on all of them. Its mesh needs no groups. All ranks call."""
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


def _mesh_of(layout: Layout, ranks: GroupRanks, device_type: str, *, connected: bool) -> DeviceMesh:
    pg = process_group(ranks)
    device_type = "cpu" if device_type == "meta" else device_type
    key = (device_type, connected, layout.owners)
    known = _meshes.setdefault(pg, {})
    if key not in known:
        if layout.owners == tuple(range(ranks.size)):
            known[key] = DeviceMesh.from_group(pg, device_type)
        else:
            known[key] = _make_mesh(layout.owners, pg, device_type, connected)
    return known[key]


def _make_mesh(owners: tuple[int, ...], pg: ProcessGroup, device_type: str, connected: bool) -> DeviceMesh:
    """Make a mesh with a group in the order of `owners`: DeviceMesh would sort its ranks, and gather in that order.

    Groups can be made by all ranks of the world together only. On a part of the world the mesh has none, and operations that
    communicate raise torch's error.
    """
    members = dist.get_process_group_ranks(pg)
    mesh_ranks = [members[rank] for rank in owners]
    mesh = DeviceMesh(device_type, torch.tensor(mesh_ranks, device="cpu"), mesh_dim_names=("shards",), _init_backend=False)
    if not connected or pg is not dist.group.WORLD or is_fake_group(pg):
        return mesh
    made = dist.new_group(mesh_ranks, sort_ranks=False, group_desc="unisono: shards of a table")
    if isinstance(made, ProcessGroup):
        mesh._dim_group_names = [made.group_name]
    return mesh

"""What a rank holds of its tables: the memory of its shards, of which the modules' parameters are views."""

import ctypes
import hashlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

from unisono.collectives import Group, broadcast
from unisono.collectives.checks import validate_across_ranks
from unisono.collectives.groups import as_group, process_group, resolve_group, small_message_device
from unisono.embedding.hashing import mix_seed
from unisono.embedding.lookup import compiled
from unisono.embedding.optimizers import FusedOptimizer, Rule, counts_steps, rule_error, state_dtype
from unisono.embedding.parameters import ShardedTable
from unisono.embedding.sharding.layouts import Layout
from unisono.embedding.sharding.table_groups import TableGroup, TableShard, group_tables, number_rows
from unisono.embedding.table import Table, draw_weights

if TYPE_CHECKING:
    from unisono.embedding.lookup.features import FeatureOrder

GradReduce = Literal["mean", "sum"]
_PAGE = 2 << 20
_LARGE = 8 * _PAGE
_MADV_HUGEPAGE = 14


@dataclass(frozen=True)
class LookupOptions:
    """The arguments that all modules of this package share."""

    function: str
    grad_reduce: GradReduce = "mean"
    sparse: bool = False
    wire_dtype: torch.dtype | None = None
    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")  # noqa: RUF009


@dataclass
class GroupShard:
    """A rank's shard of one table group: the shards of its tables, one below the other, and the state of their optimizer."""

    group: TableGroup
    number: int  # of the group's shards
    weight: Tensor  # (rows, width)
    state: dict[str, Tensor] = field(default_factory=dict)  # of a fused optimizer

    @property
    def shards(self) -> list[TableShard]:
        return self.group.shards[self.number]

    def view(self, shard: TableShard, of: Tensor | None = None) -> Tensor:
        """A table's part of the weight, or of a tensor of state."""
        return (self.weight if of is None else of).narrow(0, shard.start, shard.box.shape[0])

    def padding_rows(self) -> Tensor | None:
        """The rows that get no gradient."""
        rows = self.group.padding_rows[self.number]
        return torch.tensor(rows, device=self.weight.device) if rows else None

    def split(self, rows: Tensor) -> list[tuple[TableShard, slice]]:
        """Say which of the sorted rows belong to each table."""
        starts = torch.tensor([shard.start for shard in self.shards], device=rows.device, dtype=rows.dtype)
        cuts = [*torch.searchsorted(rows, starts).tolist(), len(rows)]
        return [(shard, slice(cuts[k], cuts[k + 1])) for k, shard in enumerate(self.shards)]


class ShardStorage:
    """This rank's shards of all tables, in their layouts."""

    def __init__(
        self, tables: Sequence[Table], layouts: Sequence[Layout], options: LookupOptions, rule: Rule | None, group: Group
    ) -> None:
        self.tables = list(tables)
        self.options = options
        self.rule = rule
        self.ranks = resolve_group(group)
        self.is_compiled = (
            False  # whether compiled kernels make the optimizer's steps: on all ranks, or copies would drift apart
        )
        self.why_not_compiled = ""
        self.layouts = self._validate(layouts)
        self.groups = group_tables(self.tables, self.layouts, self.ranks.size)
        self.row_numberings = number_rows(self.groups, self.tables)
        self.feature_orders: dict[tuple[tuple[str, ...], tuple[bool, ...]], FeatureOrder] = {}  # of lookup/features.py
        self.table_of_feature = {name: k for k, table in enumerate(self.tables) for name in table.features}
        # How many steps a fused optimizer has made with each table: the same on all ranks.
        self.steps = [torch.zeros((), dtype=torch.int64, device="cpu") for _ in self.tables]
        self.shards = [self._make_shard(group) for group in self.groups]  # None: this rank holds nothing of the group
        self.modules: list[ShardedTable] = []
        self.optimizer: FusedOptimizer | None = None

    def _validate(self, layouts: Sequence[Layout]) -> list[Layout]:
        """Return the layouts with ranks, once all ranks make the same tables and none has a bad argument."""
        options = self.options
        assigned = list(layouts)
        error = ""
        if options.grad_reduce not in ("mean", "sum"):
            error = f"grad_reduce={options.grad_reduce!r} is neither 'mean' nor 'sum'"
        if options.wire_dtype not in (None, torch.bfloat16, torch.float16):
            error = f"wire_dtype={options.wire_dtype!r} is none of None, torch.bfloat16, torch.float16"
        error = rule_error(self.rule) or compiled.switch_error() or error
        try:
            assigned = [layout.assign_ranks(self.ranks.size) for layout in layouts]
        except ValueError as layout_error:
            error = str(layout_error)
        arguments = (
            f"{self.tables}, {assigned}, {options.grad_reduce}, {options.sparse}, {options.wire_dtype}, {options.dtype}, "
            f"{self.rule}"
        )
        rule = "All ranks must make the same tables with the same plan and options."
        words = f"{options.function}({arguments})"
        found = compiled.load()
        table = validate_across_ranks(
            options.function,
            self.ranks,
            same=words,
            numbers=[found.library is not None],
            words=lambda: words,
            device=options.device,
            rule=rule,
            problem=error,
        )
        self.is_compiled = all(row[0] for row in table)
        without = [rank for rank, row in enumerate(table) if not row[0]]
        self.why_not_compiled = found.why_not or ("" if self.is_compiled else f"rank {without[0]} has no compiled library")
        return assigned

    def _make_shard(self, group: TableGroup) -> GroupShard | None:
        place = group.place(self.ranks.rank)
        if place is None:
            return None
        shard, column = place
        shape = (group.heights[shard], group.key.widths[column])
        weight = _empty_rows(shape, dtype=self.options.dtype, device=self.options.device)
        return GroupShard(group, shard, weight, {} if self.rule is None else self.rule.states(weight))

    def parameters(self) -> list[Tensor]:
        """The weight of each table. Read from the dict of its module, since Module.__getattr__ takes long for many tables."""
        return [module._parameters["weight"] for module in self.modules]  # type: ignore[misc]

    def requires_grad(self) -> bool:
        return any(weight.requires_grad for weight in self.parameters())

    def describe_training(self) -> str:
        """What the backward does, as far as it must be the same on all ranks and may change from step to step."""
        frozen = [table.name for table, x in zip(self.tables, self.parameters(), strict=True) if not x.requires_grad]
        words = f"; frozen: {', '.join(frozen)}" if frozen else ""
        if self.optimizer is not None:
            words += f"; lr={self.optimizer.lr}, weight_decay={self.optimizer.weight_decay}"
        return words

    def describe_kernels(self) -> str:
        """Which kernels make the steps of the optimizer."""
        dtype, device = self.options.dtype, self.options.device
        if not self.is_compiled:
            return f"torch: {self.why_not_compiled}"
        if device.type != "cpu":
            return f"torch: the tables are on {device}"
        return "compiled" if dtype in (torch.float32, torch.float64) else f"torch: the tables are {dtype}"

    def owner_pools(self, number: int, weights: Tensor | None) -> bool:
        """Whether the owner of a table sums the bags. The gradient of a weight needs its row, and so does a maximum."""
        if weights is not None and weights.requires_grad:
            return False
        table, layout = self.tables[number], self.layouts[number]
        return table.owners_can_pool and layout.owners_can_pool and layout.answers != "rows"

    def _table_shards(self) -> Iterator[tuple[GroupShard, TableShard]]:
        """The tables' shards on this rank, each with its group shard."""
        return ((shard, part) for shard in self.shards if shard is not None for part in shard.shards)

    def attach(self, modules: Sequence[ShardedTable]) -> None:
        """Let the modules' parameters be views of the shards; again, after the shards have moved."""
        self.modules = list(modules)
        views: dict[int, tuple[Tensor, dict[str, Tensor]]] = {}
        for shard, part in self._table_shards():
            views[part.table] = shard.view(part), {name: shard.view(part, x) for name, x in shard.state.items()}
        for number, module in enumerate(modules):
            if number not in views:
                empty = torch.empty((0, module.table.dim), dtype=self.options.dtype, device=self.options.device)
                views[number] = empty, {} if self.rule is None else self.rule.states(empty)
            weight, states = views[number]
            module.attach(weight, states | ({"step": self.steps[number]} if counts_steps(self.rule) else {}))
        if self.rule is not None and self.optimizer is None:
            self.optimizer = FusedOptimizer([module.weight for module in modules], self.rule)

    def convert(self, change: Callable[[Tensor], Tensor]) -> None:
        """Implement Module.to and similar calls: move whole group shards, then parameters and their gradients."""
        probe = change(torch.empty(0, dtype=self.options.dtype, device=self.options.device))
        moved = [None if shard is None else change(shard.weight) for shard in self.shards]
        unmoved = all(shard is None or shard.weight is weight for shard, weight in zip(self.shards, moved, strict=True))
        if unmoved and (probe.dtype, probe.device) == (self.options.dtype, self.options.device):
            return
        grads = [_local_part(module.weight.grad) for module in self.modules]
        for shard, weight in zip(self.shards, moved, strict=True):
            if shard is not None and weight is not None:
                shard.weight = weight
                shard.state = {name: _convert_state(x, weight) for name, x in shard.state.items()}
        self.options = replace(self.options, dtype=probe.dtype, device=probe.device)
        for module in self.modules:
            module.rule = None  # a TableOptimizer does not follow: its next step says so
        self.attach(self.modules)
        for module, grad in zip(self.modules, grads, strict=True):
            if grad is not None:
                module.weight.grad = module.shape_as(change(grad))

    @torch.no_grad()
    def follow_parameters(self) -> None:
        """If a parameter was given other memory (`.data =`, pickle, another Parameter), copy its values into the shard."""
        replaced = []
        weights = self.parameters()
        for shard, part in self._table_shards():
            weight = weights[part.table]
            local = _local_part(weight)
            begins_at = shard.weight.data_ptr() + part.start * shard.weight.stride(0) * shard.weight.itemsize
            if isinstance(weight, nn.Parameter) and local is not None and local.data_ptr() == begins_at:
                continue
            view = shard.view(part)
            where = f"{self.options.function}: the weight of table {self.tables[part.table].name!r}"
            if not isinstance(weight, nn.Parameter):
                kind = type(weight).__name__
                raise TypeError(
                    f"{where} is no Parameter but a {kind}: torch.func.functional_call cannot replace a sharded table"
                )
            if local is None or not view.numel():
                continue
            if tuple(local.shape) != tuple(view.shape):
                raise ValueError(f"{where} was replaced by one of shape {tuple(weight.shape)}")
            replaced.append((view, local))
        for view, local in replaced:
            view.copy_(local)
        if replaced:
            self.attach(self.modules)

    @torch.no_grad()
    def reset(self, seed: int | None = None) -> None:
        """Draw initial weights and states, from rank 0's default generator: the same for all layouts and numbers of ranks."""
        if seed is None:
            drawn = torch.randint(2**62, (1,), device="cpu")
            if self.ranks.size > 1:
                drawn = drawn.to(small_message_device(process_group(self.ranks), None))
                drawn = broadcast(drawn, root=0, group=as_group(self.ranks))
            seed = int(drawn)
        for module in self.modules:
            name_hash = int.from_bytes(hashlib.blake2b(module.table.name.encode(), digest_size=7).digest(), "little")
            if _has_values(module.local):
                draw_weights(module.table, module.box, module.local, seed=mix_seed(seed, name_hash))
                module.reset_states(module.rule or self.rule)
        for steps in (*self.steps, *(module.states["step"] for module in self.modules if "step" in module.states)):
            steps.zero_()


def _has_values(x: Tensor) -> bool:
    """Whether there is something to draw: a meta tensor and one of a simulation have no values."""
    return bool(x.numel()) and not x.is_meta and not isinstance(x, FakeTensor)


def _empty_rows(shape: tuple[int, int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """torch.empty; on Linux CPUs in large pages, since rows are read in no order and most reads would miss the page table."""
    rows = torch.empty(shape, dtype=dtype, device=device)
    if device.type == "cpu" and rows.nbytes >= _LARGE and sys.platform == "linux":
        start = -(-rows.data_ptr() // _PAGE) * _PAGE
        length = (rows.data_ptr() + rows.nbytes - start) // _PAGE * _PAGE
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_HUGEPAGE)  # may be refused
    return rows


def _convert_state(state: Tensor, weight: Tensor) -> Tensor:
    """Move an optimizer's state to the device of the weight, in the dtype that it needs there."""
    if state.is_meta:
        return torch.zeros_like(state, device=weight.device, dtype=state_dtype(weight))
    return state.to(weight.device, state_dtype(weight))


def _local_part(x: Tensor | None) -> Tensor | None:
    """This rank's part of a DTensor, outside of autograd."""
    return x._local_tensor if isinstance(x, DTensor) else x

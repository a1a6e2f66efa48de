"""What a rank holds of its tables: the memory of its shards, of which the modules' parameters are views."""

import ctypes
import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

from unisono.collectives import Group, broadcast
from unisono.collectives.checks import validate_across_ranks
from unisono.collectives.groups import as_group, process_group, resolve_group, small_message_device
from unisono.embedding.hashing import mix_seed
from unisono.embedding.lookup import compiled
from unisono.embedding.lookup.row_cache import RowCache, map_rows
from unisono.embedding.lookup.triton_choice import why_not as why_not_triton
from unisono.embedding.optimizers import Adam, Rule, rules_by_table, rules_error, state_dtype
from unisono.embedding.parameters import ShardedTable
from unisono.embedding.sharding.layouts import Layout
from unisono.embedding.sharding.table_groups import TableGroup, TableShard, group_tables, number_rows
from unisono.embedding.table import Table, draw_weights

if TYPE_CHECKING:
    from unisono.embedding.lookup.features import FeatureOrder
    from unisono.embedding.table_optimizer import TableOptimizer

GradReduce = Literal["mean", "sum"]
_PAGE = 2 << 20
_LARGE = 8 * _PAGE
_MADV_HUGEPAGE = 14
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class LookupOptions:
    """The arguments that all modules of this package share."""

    function: str
    grad_reduce: GradReduce = "mean"
    sparse: bool = False
    wire_dtype: torch.dtype | None = None
    stochastic_rounding: bool = False
    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")  # noqa: RUF009
    problem: str = ""  # what is wrong with other arguments, so that all ranks raise


@dataclass
class GroupShard:
    """A rank's shard of one table group: the shards of its tables, one below the other, and the state of their optimizer.

    With a cache, `weight` and `state` have the rows that are in the cache. `places` says where a row lies in them.
    """

    group: TableGroup
    number: int  # of the group's shards
    weight: Tensor  # (rows, width)
    state: dict[str, Tensor] = field(default_factory=dict)
    first_column: int = 0  # of the whole rows
    cache: RowCache | None = None  # of tables in host memory

    @property
    def shards(self) -> list[TableShard]:
        return self.group.shards[self.number]

    def all_rows(self) -> dict[str, Tensor]:
        """The weight, by the name "weight", and the state of all rows: on the device, or in host memory."""
        return {"weight": self.weight, **self.state} if self.cache is None else self.cache.store

    def view(self, shard: TableShard) -> dict[str, Tensor]:
        """A table's part of `all_rows`."""
        return {name: x.narrow(0, shard.start, shard.box.shape[0]) for name, x in self.all_rows().items()}

    def places(self, rows: Tensor) -> Tensor:
        """Where rows lie in `weight` and `state`. With a cache they must have been fetched."""
        return rows if self.cache is None else self.cache.places(rows)

    def fetch(self, rows: Tensor) -> None:
        """Bring rows into the cache. They are sorted and different."""
        assert self.cache is not None
        self.cache.fetch(rows)
        self.weight, self.state = self.cache.weight, self.cache.state  # it may have grown

    def padding_rows(self) -> Tensor | None:
        """The rows that get no gradient."""
        rows = self.group.padding_rows[self.number]
        return torch.tensor(rows, device=self.weight.device) if rows else None

    def split(self, rows: Tensor) -> list[tuple[TableShard, slice]]:
        """Say which of the sorted rows belong to each table."""
        if not len(rows):
            return [(shard, slice(0, 0)) for shard in self.shards]
        starts = torch.tensor([shard.start for shard in self.shards], device=rows.device, dtype=rows.dtype)
        cuts = [*torch.searchsorted(rows, starts).tolist(), len(rows)]
        return [(shard, slice(cuts[k], cuts[k + 1])) for k, shard in enumerate(self.shards)]


class ShardStorage:
    """This rank's shards of all tables, in their layouts."""

    def __init__(
        self,
        tables: Sequence[Table],
        layouts: Sequence[Layout],
        options: LookupOptions,
        optimizer: Rule | Mapping[str, Rule] | None,
        group: Group,
    ) -> None:
        self.tables = list(tables)
        self.options = options
        self.ranks = resolve_group(group)
        # Whether compiled kernels make the optimizer's steps: on all ranks, or copies would drift apart.
        self.is_compiled = False
        self.why_not_compiled = ""
        self.layouts = self._validate(layouts, optimizer)
        by_table = rules_by_table(optimizer, [table.name for table in self.tables])
        self.rules: list[Rule] = []  # different ones; empty: there is no optimizer
        for rule in by_table:
            self.rules += [rule] if rule is not None and rule not in self.rules else []
        self.rule_numbers = [0 if rule is None else self.rules.index(rule) for rule in by_table]  # of the tables
        self.groups = group_tables(self.tables, self.layouts, self.ranks.size, self.rule_numbers)
        self.row_numberings = number_rows(self.groups, self.tables)
        self.feature_orders: dict[tuple[tuple[str, ...], tuple[bool, ...]], FeatureOrder] = {}  # of lookup/features.py
        self.table_of_feature = {name: k for k, table in enumerate(self.tables) for name in table.features}
        # How many steps the optimizer has made with each table, and the seed of its roundings: the same on all ranks.
        self.steps = [torch.zeros((), dtype=torch.int64, device="cpu") for _ in self.tables]
        self.seeds = [torch.zeros((), dtype=torch.int64, device="cpu") for _ in self.tables]
        self.shards = self._make_shards()  # None: this rank holds nothing of the group
        self.modules: list[ShardedTable] = []
        self.optimizer: TableOptimizer | None = None

    def _validate(self, layouts: Sequence[Layout], optimizer: Rule | Mapping[str, Rule] | None) -> list[Layout]:
        """Return the layouts with ranks, once all ranks make the same tables and none has a bad argument."""
        options = self.options
        assigned = list(layouts)
        error = options.problem
        if options.grad_reduce not in ("mean", "sum"):
            error = f"grad_reduce={options.grad_reduce!r} is neither 'mean' nor 'sum'"
        if options.wire_dtype not in (None, torch.bfloat16, torch.float16):
            error = f"wire_dtype={options.wire_dtype!r} is none of None, torch.bfloat16, torch.float16"
        if options.stochastic_rounding and optimizer is None:
            error = "stochastic_rounding=True is about the steps of `optimizer`, which is None"
        names = [table.name for table in self.tables]
        wrong_rules = rules_error(optimizer, names)
        error = wrong_rules or compiled.switch_error() or error
        try:
            assigned = [layout.assign_ranks(self.ranks.size) for layout in layouts]
        except ValueError as layout_error:
            error = str(layout_error)
        arguments = (
            f"{self.tables}, {assigned}, {options.grad_reduce}, {options.sparse}, {options.wire_dtype}, "
            f"{options.stochastic_rounding}, {options.dtype}, {optimizer if wrong_rules else rules_by_table(optimizer, names)}"
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

    def _make_shards(self) -> list[GroupShard | None]:
        if all(group.key.host_memory is None for group in self.groups):
            return [self._make_shard(group) for group in self.groups]
        made, problem = [], ""
        try:
            made = [self._make_shard(group) for group in self.groups]
        except (OSError, MemoryError, RuntimeError) as error:  # torch's allocator raises RuntimeError
            problem = f"no rows in host memory: {error}"
        function, rule = self.options.function, "All ranks need room for their rows."
        validate_across_ranks(
            function, self.ranks, same="", numbers=(), words=lambda: "", device=self.options.device, rule=rule, problem=problem
        )
        return made

    def _make_shard(self, group: TableGroup) -> GroupShard | None:
        place = group.place(self.ranks.rank)
        if place is None:
            return None
        shard, column = place
        shape = (group.heights[shard], group.key.widths[column])
        if group.key.host_memory is not None:
            cache = self._make_cache(group, shard, shape)
            return GroupShard(group, shard, cache.weight, cache.state, sum(group.key.widths[:column]), cache)
        weight = _empty_rows(shape, dtype=self.options.dtype, device=self.options.device)
        state = self.rules[group.key.rule].states(weight) if self.rules else {}
        return GroupShard(group, shard, weight, state, first_column=sum(group.key.widths[:column]))

    def counts_steps(self, table: int) -> bool:
        """Whether the state of a table includes its number of steps."""
        rounds = self.options.stochastic_rounding
        return bool(self.rules) and (rounds or isinstance(self.rules[self.rule_numbers[table]], Adam))

    def _make_cache(self, group: TableGroup, shard: int, shape: tuple[int, int]) -> RowCache:
        """Make room for rows in host memory, without values, and a cache on the device."""
        host_memory = group.key.host_memory
        assert host_memory is not None
        memories = (self.layouts[number].host_memory for number in group.tables)
        directory = next((x.directory for x in memories if x is not None and x.directory is not None), None)
        probe = torch.empty(shape, dtype=self.options.dtype, device="meta")
        shapes = {"weight": probe, **(self.rules[group.key.rule].states(probe) if self.rules else {})}
        if self.options.device.type == "meta":
            store = shapes
        elif directory is None:
            store = {name: _empty_rows(x.shape, dtype=x.dtype, device=_CPU) for name, x in shapes.items()}
        else:
            store = {name: map_rows(x.shape, x.dtype, directory) for name, x in shapes.items()}
        slots = sum(host_memory.slots(part.box.shape[0]) for part in group.shards[shard])
        return RowCache(store, slots, self.options.device)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "feature_orders": {}}  # a copy makes its own

    def parameters(self) -> list[Tensor]:
        """The weight of each table. Read from the dict of its module, since Module.__getattr__ takes long for many tables."""
        return [module._parameters["weight"] for module in self.modules]  # type: ignore[misc]

    def requires_grad(self) -> bool:
        return any(weight.requires_grad for weight in self.parameters())

    def describe_training(self) -> str:
        """What the backward does, as far as it must be the same on all ranks and may change from step to step."""
        frozen = [table.name for table, x in zip(self.tables, self.parameters(), strict=True) if not x.requires_grad]
        words = f"; frozen: {', '.join(frozen)}" if frozen else ""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        for group in groups:
            which = f" for {', '.join(group['tables'])}" if len(groups) > 1 else ""
            words += f"; lr={group['lr']}, weight_decay={group['weight_decay']}{which}"
        return words

    def describe_kernels(self) -> str:
        """Which kernels make the steps of the optimizer."""
        dtype, device = self.options.dtype, self.options.device
        if self.options.stochastic_rounding and dtype.itemsize == 2:
            return "torch: stochastic_rounding=True"
        if device.type != "cpu":
            problem = why_not_triton(device, dtype)
            return f"torch: {problem}" if problem else "triton"
        if not self.is_compiled:
            return f"torch: {self.why_not_compiled}"
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
        views: dict[int, dict[str, Tensor]] = {}
        caches: dict[int, tuple[RowCache, int]] = {}
        for shard, part in self._table_shards():
            views[part.table] = shard.view(part)
            if shard.cache is not None:
                caches[part.table] = shard.cache, part.start
        for number, module in enumerate(modules):
            if number not in views:
                on_device = module.layout.host_memory is None or self.options.device.type == "meta"
                device = self.options.device if on_device else _CPU
                empty = torch.empty((0, module.table.dim), dtype=self.options.dtype, device=device)
                views[number] = {"weight": empty, **(self.rules[self.rule_numbers[number]].states(empty) if self.rules else {})}
            states = dict(views[number])
            weight = states.pop("weight")
            module.attach(weight, states | self._counters(number), *caches.get(number, ()))
            module.rule = self.rules[self.rule_numbers[number]] if self.rules else None

    def attach_states(self) -> None:
        """Let the modules' optimizer states be views of the shards again. Unlike `attach`, this makes no process groups."""
        for shard, part in self._table_shards():
            self.modules[part.table].states.update((name, x) for name, x in shard.view(part).items() if name != "weight")

    def _counters(self, table: int) -> dict[str, Tensor]:
        """The part of a table's state that has one number for the whole table."""
        counters = {"step": self.steps[table]} if self.counts_steps(table) else {}
        return counters | ({"seed": self.seeds[table]} if self.options.stochastic_rounding else {})

    def convert(self, change: Callable[[Tensor], Tensor]) -> None:
        """Implement Module.to and similar calls: move whole group shards, then parameters and their gradients."""
        probe = change(torch.empty(0, dtype=self.options.dtype, device=self.options.device))
        # A cache is made anew.
        moved = [None if shard is None or shard.cache is not None else change(shard.weight) for shard in self.shards]
        unmoved = all(
            shard is None or shard.cache is not None or shard.weight is weight
            for shard, weight in zip(self.shards, moved, strict=True)
        )
        if unmoved and (probe.dtype, probe.device) == (self.options.dtype, self.options.device):
            return
        grads = [_local_part(module.weight.grad) for module in self.modules]
        self.options = replace(self.options, dtype=probe.dtype, device=probe.device)
        for shard, weight in zip(self.shards, moved, strict=True):
            if shard is not None and shard.cache is not None:
                self._convert_cache(shard, shard.cache)
            elif shard is not None and weight is not None:
                shard.weight = weight
                shard.state = {name: _convert_state(x, weight) for name, x in shard.state.items()}
        self.attach(self.modules)
        for module, grad in zip(self.modules, grads, strict=True):
            if grad is not None:
                module.weight.grad = module.shape_as(change(grad))

    def _convert_cache(self, shard: GroupShard, old: RowCache) -> None:
        """Make the cache anew on the device, and the store if its dtype changes; the rows stay in host memory."""
        old.release()
        weight = old.store["weight"]
        if weight.is_meta or self.options.device.type == "meta" or weight.dtype != self.options.dtype:
            new = self._make_cache(shard.group, shard.number, (weight.shape[0], weight.shape[1]))
            for name, x in old.store.items():
                if not (x.is_meta or new.store[name].is_meta):
                    new.store[name].copy_(x)
        else:
            new = RowCache(old.store, old.slots, self.options.device)
        new.follow(old)
        shard.weight, shard.state, shard.cache = new.weight, new.state, new

    def release(self) -> None:
        """Write the rows of all caches back into host memory."""
        for shard in self.shards:
            if shard is not None and shard.cache is not None:
                shard.cache.release()

    def raise_for_gradients_in_host_memory(self) -> None:
        """Only steps in the backward leave no gradients of whole tables, for which the device has no room."""
        for table, layout, weight in zip(self.tables, self.layouts, self.parameters(), strict=True):
            if layout.host_memory is not None and weight.requires_grad:
                raise RuntimeError(
                    f"{self.options.function}: table {table.name!r} is in host memory, where it can only be trained by an "
                    "optimizer in the backward, such as optimizer=RowwiseAdagrad(lr=0.1), without sparse=True. To look up "
                    "without training, call under torch.no_grad(), or freeze the table: weight.requires_grad_(False)"
                )

    @torch.no_grad()
    def follow_parameters(self) -> None:
        """If a parameter was given other memory (`.data =`, pickle, another Parameter), copy its values into the shard."""
        replaced = []
        weights = self.parameters()
        for shard, part in self._table_shards():
            weight = weights[part.table]
            local = _local_part(weight)
            rows = shard.all_rows()["weight"]
            begins_at = rows.data_ptr() + part.start * rows.stride(0) * rows.itemsize
            if isinstance(weight, nn.Parameter) and local is not None and local.data_ptr() == begins_at:
                continue
            view = shard.view(part)["weight"]
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
            if shard.cache is not None:
                shard.cache.release()
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
        for number, module in enumerate(self.modules):
            name_hash = int.from_bytes(hashlib.blake2b(module.table.name.encode(), digest_size=7).digest(), "little")
            own_seed = mix_seed(seed, name_hash)
            self.steps[number].zero_()
            self.seeds[number].fill_(own_seed)
            if not _has_values(module.local):
                continue
            if module.local.numel():
                draw_weights(module.table, module.box, module.local, seed=own_seed, device=self.options.device)
            module.reset_states()  # a shard without columns may have a state for each row


def _has_values(x: Tensor) -> bool:
    """Whether it has values: a meta tensor and one of a simulation have none."""
    return not x.is_meta and not isinstance(x, FakeTensor)


def _empty_rows(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
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

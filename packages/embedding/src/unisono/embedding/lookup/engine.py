"""The order of a look-up: input_dist, lookup, output_dist; and the first of them ahead of time, in a thread (prefetch)."""

import copy
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from operator import is_
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import ProcessGroup
from torch.distributed.tensor import DTensor

from unisono.collectives import Group
from unisono.collectives.autograd import disable_compile
from unisono.collectives.checks import MismatchError, validate_across_ranks
from unisono.collectives.groups import GroupRanks, process_group, resolve_group
from unisono.embedding.lookup.feature_errors import Batch
from unisono.embedding.lookup.input_dist import (
    AgreedRequests,
    IncomingRequest,
    agree_on_requests,
    describe_training,
    send_requests,
)
from unisono.embedding.lookup.kernels import is_on_host
from unisono.embedding.lookup.lookup import lookup
from unisono.embedding.lookup.output_dist import Pooling, output_dist, plan_pooling
from unisono.embedding.lookup.reached import Reached
from unisono.embedding.lookup.row_cache import CacheStats
from unisono.embedding.lookup.storage import LookupOptions, ShardStorage
from unisono.embedding.optimizers import Rule
from unisono.embedding.parameters import ShardedTable
from unisono.embedding.ragged import KeyedRagged, Ragged
from unisono.embedding.sharding.layouts import Layout
from unisono.embedding.table import Table
from unisono.embedding.table_optimizer import TableOptimizer


class DistributedInput(NamedTuple):
    """A look-up after input_dist: the row numbers have travelled, the rows have not. One entry for each table group."""

    incoming: list[IncomingRequest]
    poolings: list[Pooling]


class _OnStream(NamedTuple):
    """The start of a look-up that runs on a stream of its own."""

    requests: AgreedRequests
    done: torch.Event


class LookupEngine:
    """Looks up features in the tables of a ShardStorage. All modules of this package have one."""

    def __init__(
        self,
        tables: Sequence[Table],
        layouts: Sequence[Layout],
        options: LookupOptions,
        optimizer: Rule | Mapping[str, Rule] | None,
        group: Group,
    ) -> None:
        self.storage = ShardStorage(tables, layouts, options, optimizer, group)

    def attach(self, modules: Sequence[ShardedTable]) -> None:
        """Let the modules' parameters be views of the storage, and make their optimizer."""
        self.storage.attach(modules)
        if self.storage.rules:
            self.storage.optimizer = TableOptimizer(self.storage)

    def look_up(self, inputs: Batch, error: str = "") -> dict[str, Tensor]:
        """For each feature its pooled rows, or, without mode, a row for each id."""
        return self.finish(self.start(inputs, self.storage.ranks, error))

    @disable_compile
    def start(self, inputs: Batch, ranks: GroupRanks, error: str = "") -> DistributedInput:
        """Do all that does not need the last values of the tables. `ranks`: those of the storage, perhaps by another group."""
        return self.send(agree_on_requests(self.storage, inputs, ranks, error), ranks)

    @disable_compile
    def send(self, requests: AgreedRequests, ranks: GroupRanks) -> DistributedInput:
        incoming = send_requests(self.storage, requests, ranks)
        return DistributedInput(incoming, [plan_pooling(request) for request in requests.outgoing])

    @disable_compile
    def finish(self, inputs: DistributedInput) -> dict[str, Tensor]:
        names = [x.name for pooling in inputs.poolings for x in pooling.request.features]
        return dict(zip(names, self._output(inputs), strict=True))

    @disable_compile
    def finish_stacked(self, inputs: DistributedInput, features: Sequence[str]) -> Tensor:
        """The pooled rows of `features`, which are all that were looked up, as one tensor (bags, features, dim)."""
        (stacked,) = self._output(inputs, features)
        return stacked

    def _output(self, inputs: DistributedInput, stack: Sequence[str] = ()) -> list[Tensor]:
        reached = Reached(range(len(self.storage.tables)))
        rows = lookup(self.storage, inputs.incoming, reached)
        return output_dist(self.storage, rows, inputs.incoming, inputs.poolings, reached, stack)


class EngineModule(nn.Module):
    """A module that looks up by an engine."""

    engine: LookupEngine

    @property
    def optimizer(self) -> TableOptimizer | None:
        """What makes the steps of `optimizer=`: give it to torch.optim.lr_scheduler; with sparse=True, call its step()."""
        return self.engine.storage.optimizer

    @property
    def kernels(self) -> str:
        """What computes on the rows: "compiled" on CPUs, "triton" on GPUs, or "torch" and why: no compiler, rows of 16 bits."""
        return self.engine.storage.describe_kernels()

    def reset_parameters(self, seed: int | None = None) -> None:
        """Draw initial weights, the same for every plan and number of ranks. All ranks call."""
        self.engine.storage.reset(seed)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.engine.storage.convert(fn)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy the storage, and let the parameters be views of the copy."""
        made = self.__class__.__new__(self.__class__)
        memo[id(self)] = made
        for module in self.engine.storage.modules:  # torch cannot copy a DTensor that begins within its memory
            weight = module.weight
            if isinstance(weight, DTensor):
                memo[id(weight)] = nn.Parameter(weight.detach().clone(), weight.requires_grad)
        made.__dict__.update(copy.deepcopy(self.__getstate__(), memo))
        made.engine.storage.attach(made.engine.storage.modules)
        return made

    def cache_stats(self) -> dict[str, CacheStats]:
        """Hits and misses on this rank, for each table that is in host memory and has rows here."""
        storage = self.engine.storage
        return {module.table.name: module.cache.stats() for module in storage.modules if module.cache is not None}

    def __getstate__(self) -> dict[str, Any]:
        self.engine.storage.release()
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Let the states be views of the storage again: pickle keeps no views. The next look-up does so with parameters."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        storage: Any = getattr(self.engine, "storage", None)
        if hasattr(storage, "modules"):  # not yet, if a pickle of one table begins with its optimizer
            storage.attach_states()


class Prefetcher:
    """Runs the start of the next look-up in a thread, over a process group of its own. It holds at most one batch.

    On a CPU that is all of input_dist. On an accelerator it is all but the message between accelerators, on a stream beside the
    caller's; `take` sends that message, in the caller's thread. So the accelerators' messages have one order on all ranks, that
    of the program, and none can wait for another that comes later.
    """

    def __init__(self, engine: LookupEngine) -> None:
        self.engine = engine
        self.ranks = engine.storage.ranks
        if self.ranks.size > 1:  # no other message may come between those of a look-up
            members = dist.get_process_group_ranks(process_group(self.ranks))
            alone = len(members) < dist.get_world_size()
            made = dist.new_group(members, use_local_synchronization=alone, group_desc="unisono: prefetched look-ups")
            assert isinstance(made, ProcessGroup)
            self.ranks = resolve_group(made)
        device = engine.storage.options.device
        self.stream = None if is_on_host(device) else torch.Stream(device)  # one: memory is reused within a stream only
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="unisono-prefetch")
        weakref.finalize(self, self.pool.shutdown, wait=False)
        self.started: tuple[object, list[int], Future[DistributedInput | _OnStream]] | None = None

    def start(self, features: object, inputs: Batch, error: str) -> None:
        self.drop()
        storage, stream = self.engine.storage, self.stream
        training = describe_training(storage)  # now: a scheduler may change it before the thread runs
        versions = _versions(features, inputs)
        if stream is None:
            inputs = _copy(inputs)  # the thread may read them while the caller changes them
        else:
            stream.wait_stream(torch.accelerator.current_stream(storage.options.device))  # for the batch

        def run() -> DistributedInput | _OnStream:
            if stream is None:
                return self.engine.send(agree_on_requests(storage, inputs, self.ranks, error, training), self.ranks)
            torch.accelerator.set_device_index(
                storage.options.device
            )  # a new thread has neither device nor stream of its caller
            torch.accelerator.set_stream(stream)
            requests = agree_on_requests(storage, inputs, self.ranks, error, training)
            return _OnStream(requests, stream.record_event())

        self.started = features, versions, self.pool.submit(run)

    def take(self, features: object, inputs: Batch, error: str = "") -> DistributedInput | None:
        """Return what was started for these features, if all ranks have it; otherwise drop it on all of them.

        Tensors that were changed in place since then are other features. `error`: what is wrong with them on this rank.
        """
        if self.started is None:
            return None
        started_features, versions, future = self.started
        function, device = f"{self.engine.storage.options.function}.prefetch", self.engine.storage.options.device
        same = "forward after prefetch"
        is_same = not error and _same_tensors(started_features, features) and versions == _versions(features, inputs)
        rule = "All ranks must prefetch, or none."
        try:
            table = validate_across_ranks(
                function,
                self.engine.storage.ranks,
                same=same,
                numbers=[int(is_same)],
                words=lambda: same,
                device=device,
                rule=rule,
            )
        except MismatchError:
            self.started = None  # started on some ranks only: it will never end
            raise
        if not all(row[0] for row in table):
            self.drop()
            return None
        self.started = None
        found = future.result()
        if isinstance(found, DistributedInput):
            return found
        stream = torch.accelerator.current_stream(device)
        stream.wait_event(found.done)
        found.requests.record_stream(stream)
        return self.engine.send(found.requests, self.engine.storage.ranks)

    def drop(self) -> None:
        """Wait for what was started, and forget it and its error: all ranks have sent messages for it."""
        started = self.started
        self.started = None  # first: an interrupt during the wait must not leave an old batch behind
        if started is not None:
            started[-1].exception()


@torch.enable_grad()  # of weights, whose gradient may be wanted though the batch is prefetched without
def _copy(inputs: Batch) -> Batch:
    if isinstance(inputs, KeyedRagged):
        return inputs._replace(**_clones(inputs))
    return {name: bags._replace(**_clones(bags)) for name, bags in inputs.items()}


def _clones(x: Ragged | KeyedRagged) -> dict[str, Any]:
    return {name: tensor.clone() for name, tensor in x._asdict().items() if isinstance(tensor, Tensor)}


def _versions(features: object, inputs: Batch) -> list[int]:
    """How often each tensor was changed in place. Tensors made in inference mode do not count it.

    `inputs`: the features as Ragged, which may have copies of what the user gave.
    """
    given = features.values() if isinstance(features, Mapping) else ()
    read = inputs if isinstance(inputs, KeyedRagged) else (x for bags in inputs.values() for x in bags)
    return [0 if x.is_inference() else x._version for x in (*given, *read) if isinstance(x, Tensor)]


def _same_tensors(a: object, b: object) -> bool:
    """Whether both hold the very same tensors: DDP hands on a copy of the dict, but not of the tensors."""
    if isinstance(a, KeyedRagged) and isinstance(b, KeyedRagged):
        return a.names == b.names and all(map(is_, a[1:], b[1:]))
    if not isinstance(a, Mapping) or not isinstance(b, Mapping) or a.keys() != b.keys():
        return a is b
    pairs = [(x, b[name]) for name, x in a.items()]
    return all(x is y or (isinstance(x, Ragged) and isinstance(y, Ragged) and all(map(is_, x, y))) for x, y in pairs)

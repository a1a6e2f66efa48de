"""count_bytes: how many bytes a piece of code sends, by any collective of torch.distributed, also DDP's and FSDP's."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch.utils._pytree as pytree
from torch import Tensor
from torch.distributed.distributed_c10d import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

from unisono.collectives.groups import group_by_name


@dataclass
class OpTraffic:
    calls: int = 0
    sent: int = 0
    received: int = 0


@dataclass
class Traffic:
    """Bytes that this rank has sent and received, by collective. `count_bytes` fills it while its block runs."""

    by_op: dict[str, OpTraffic] = field(default_factory=dict)

    @property
    def sent(self) -> int:
        return sum(op.sent for op in self.by_op.values())

    @property
    def received(self) -> int:
        return sum(op.received for op in self.by_op.values())

    @property
    def calls(self) -> int:
        return sum(op.calls for op in self.by_op.values())

    def add(self, call: "CollectiveCall") -> None:
        op = self.by_op.setdefault(call.name, OpTraffic())
        op.calls += 1
        op.sent += call.sent
        op.received += call.received

    def __str__(self) -> str:
        rows = [f"{'collective':<24}{'calls':>8}{'bytes sent':>16}{'bytes received':>16}"]
        for name, op in sorted(self.by_op.items()):
            rows.append(f"{name:<24}{op.calls:>8,}{op.sent:>16,}{op.received:>16,}")
        rows.append(f"{'total':<24}{self.calls:>8,}{self.sent:>16,}{self.received:>16,}")
        return "\n".join(rows)


@contextmanager
def count_bytes() -> Iterator[Traffic]:
    """Count the payload of every collective that torch.distributed runs inside, forward and backward.

    It counts what this rank must send to and receive from other ranks if they exchange directly: a gather sends this rank's
    part to every other rank; an all_reduce is a reduce_scatter and an all_gather of 1/size each. Backends may send the same
    payload over more hops. Code under torch.compile is not counted. It works on fake tensors and the fake process group, so
    one process can tell what one rank of 4,096 would send.

    Example:
        >>> import torch
        >>> from unisono.collectives import all_reduce, count_bytes
        >>> with count_bytes() as traffic:
        ...     _ = all_reduce(torch.ones(1000))
        >>> traffic.sent  # there is only one rank here
        0
    """
    traffic = Traffic()
    with _Counter(traffic):
        yield traffic


class _Counter(TorchDispatchMode):
    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch imports its compiler, for seconds, only to keep it away from code that is not compiled

    def __init__(self, traffic: Traffic) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.traffic = traffic

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if call := collective_call(func, args, result):
            self.traffic.add(call)
        return result


class CollectiveCall(NamedTuple):
    """One collective that ran: its name, the bytes that this rank sends and receives, and the group."""

    name: str
    sent: int
    received: int
    group: ProcessGroup


def collective_call(func: Any, args: tuple[Any, ...], result: Any) -> CollectiveCall | None:
    """Return what the op `func(*args)`, which returned `result`, communicates; None if it is not a collective."""
    schema = getattr(func, "_schema", None)  # higher-order operators of compiled code have none
    namespace, _, name = schema.name.partition("::") if schema else ("", "", "")
    if namespace not in ("c10d", "_c10d_functional") or not (rule := _RULES.get(name.strip("_"))):
        return None
    public_name, count = rule
    call = _Call({argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}, result)
    return CollectiveCall(public_name, *count(call), call.group)


class _Call:
    """One call of a c10d op, with what the rules need."""

    def __init__(self, given: dict[str, Any], result: Any) -> None:
        self.given = given
        group = given["group_name"] if "group_name" in given else given["process_group"]
        if isinstance(group, str):
            group = group_by_name(group)
        elif not isinstance(group, ProcessGroup):
            group = ProcessGroup.unbox(group)
        self.group = group
        self.rank = group.rank()
        self.size = group.size()
        self.others = self.size - 1
        self.input: Any = self._first("input", "inputs", "input_tensor", "input_tensors", "input_list", "tensors", "tensor")
        self.output: Any = self._first("output", "outputs", "output_tensor", "output_tensors", "output_lists")
        self.output = result if self.output is None else self.output
        self.is_root = self.rank == given.get("root_rank", given.get("src"))

    def _first(self, *names: str) -> Any:
        return next((self.given[name] for name in names if name in self.given), None)

    @property
    def bytes_in(self) -> int:
        return _bytes(self.input)

    @property
    def bytes_out(self) -> int:
        return _bytes(self.output)


def _bytes(tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in pytree.tree_leaves(tensors) if isinstance(t, Tensor))


def _all_to_all_single(call: _Call) -> tuple[int, int]:
    def without_own(whole: Tensor, splits: list[int]) -> int:
        rows = splits or [whole.shape[0] // call.size] * call.size
        return (sum(rows) - rows[call.rank]) * (_bytes(whole) // max(sum(rows), 1))

    send = without_own(call.input, call.given["input_split_sizes"])
    return send, without_own(call.output, call.given["output_split_sizes"])


def _all_to_all(call: _Call) -> tuple[int, int]:
    own = _bytes(call.input[call.rank])
    return call.bytes_in - own, call.bytes_out - own


def _all_gather(c: _Call) -> tuple[int, int]:
    return c.bytes_in * c.others, c.bytes_out - c.bytes_in


def _reduce_scatter(c: _Call) -> tuple[int, int]:
    return c.bytes_in - c.bytes_out, c.bytes_out * c.others


def _all_reduce(c: _Call) -> tuple[int, int]:
    moved = 2 * c.bytes_in * c.others // c.size
    return moved, moved


# Name shown; bytes sent and received by a call; its c10d ops without underscores around them. Other ops move no payload.
_TABLE: list[tuple[str, Callable[[_Call], tuple[int, int]], str]] = [
    ("all_gather", _all_gather, "allgather allgather_base allgather_coalesced allgather_into_tensor_coalesced"),
    ("all_gather", _all_gather, "all_gather_into_tensor all_gather_into_tensor_out all_gather_into_tensor_coalesced"),
    ("reduce_scatter", _reduce_scatter, "reduce_scatter reduce_scatter_base reduce_scatter_tensor"),
    ("reduce_scatter", _reduce_scatter, "reduce_scatter_tensor_out reduce_scatter_tensor_coalesced"),
    ("all_reduce", _all_reduce, "allreduce allreduce_coalesced all_reduce all_reduce_coalesced"),
    ("broadcast", lambda c: (c.bytes_in * c.others, 0) if c.is_root else (0, c.bytes_in), "broadcast"),
    ("reduce", lambda c: (0, c.bytes_in * c.others) if c.is_root else (c.bytes_in, 0), "reduce"),
    ("gather", lambda c: (0, c.bytes_out - c.bytes_in) if c.is_root else (c.bytes_in, 0), "gather"),
    ("scatter", lambda c: (c.bytes_in - c.bytes_out, 0) if c.is_root else (0, c.bytes_out), "scatter"),
    ("all_to_all", _all_to_all_single, "alltoall_base all_to_all_single"),
    ("all_to_all", _all_to_all, "alltoall"),
    ("send", lambda c: (c.bytes_in, 0), "send"),
    ("recv", lambda c: (0, c.bytes_in), "recv recv_any_source"),
]
_RULES = {op: (name, count) for name, count, ops in _TABLE for op in ops.split()}

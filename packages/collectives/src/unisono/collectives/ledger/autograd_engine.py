"""Autograd's engine in Python, for fake tensors on a device that is not there.

torch's engine asks the driver for a stream before it runs a node of a CUDA tensor, and fails without one, fake tensors or not
(pytorch#92627; a test says when that ends). The nodes of the graph can be called from Python; this engine does what happens
between them: the order, sums, captured gradients, hooks, `.grad`, and it frees saved tensors as soon as a node has run. Hooks
on a node of C++ (`tensor.grad_fn.register_hook`) do not run; those of tensors, modules and Functions in Python do.
"""

import heapq
import itertools
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

from unisono.collectives.ledger.fake_device import HostCalls
from unisono.collectives.ledger.ledger import Ledger

_HOOKS = "unisono_hooks"  # in the metadata of a node: the hooks of its tensors
_NODE_HOOKS = "unisono_node_hooks"  # in the metadata of a Function in Python: hooks before and after its backward
_RETAINED = "_unisono_retained"  # on a tensor that retains its gradient
_task_ids = itertools.count(1 << 40)  # above those of torch's engine


class _Saved:
    """A tensor that a node saved. The node keeps this object, so that the engine can free the tensor and keep the node."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor


@dataclass
class _Task:
    """One call of backward."""

    id: int
    retain_graph: bool
    create_graph: bool
    callbacks: list[Callable[[], None]] = field(default_factory=list)
    unpacked: list[_Saved] = field(default_factory=list)
    executed: set[Any] = field(default_factory=set)


class PythonEngine:
    """Stands in for `torch.autograd.Variable._execution_engine` while `use()` is active."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._tasks: list[_Task] = []

    @contextmanager
    def use(self) -> Iterator[None]:
        def run(outputs: Any, *args: Any, **kwargs: Any) -> tuple[Tensor | None, ...]:
            return self.run_backward(outputs, *args, **kwargs)

        def current_task() -> int:
            return self._tasks[-1].id if self._tasks else -1

        def will_execute(node: Any) -> bool:
            return node in self._tasks[-1].executed

        with (
            saved_tensors_hooks(_Saved, self._unpack),
            mock.patch.object(torch.autograd.graph, "_engine_run_backward", run),
            mock.patch.object(torch.autograd, "_engine_run_backward", run),
            mock.patch.object(torch.autograd.Variable, "_execution_engine", self),
            mock.patch.object(torch._C, "_current_graph_task_id", current_task),
            mock.patch.object(torch._C, "_will_engine_execute_node", will_execute),
            mock.patch.object(torch.Tensor, "register_hook", _register_hook(torch.Tensor.register_hook)),
            mock.patch.object(torch.Tensor, "retain_grad", _retain_grad(torch.Tensor.retain_grad)),
            mock.patch.object(BackwardCFunction, "register_hook", _register_node_hook("after")),  # those of nn.Module, too
            mock.patch.object(BackwardCFunction, "register_prehook", _register_node_hook("before")),
        ):
            yield

    def queue_callback(self, callback: Callable[[], None]) -> None:
        if not self._tasks:
            raise RuntimeError("Final callbacks can only be installed during backward pass.")
        self._tasks[-1].callbacks.append(callback)

    def is_checkpoint_valid(self) -> bool:
        return True

    def run_backward(
        self,
        outputs: Sequence[Tensor | GradientEdge],
        grads: Sequence[Tensor | None],
        retain_graph: bool,
        create_graph: bool,
        inputs: Sequence[Tensor | GradientEdge] = (),
        allow_unreachable: bool = False,
        accumulate_grad: bool = False,
    ) -> tuple[Tensor | None, ...]:
        task = _Task(next(_task_ids), bool(retain_graph), bool(create_graph))
        self._tasks.append(task)
        try:
            # A mode does not see what runs inside its own call, and backward is one; but checkpointed blocks run there again.
            with torch.set_grad_enabled(create_graph), HostCalls(self._ledger):
                captured = self._run(task, outputs, grads, inputs, accumulate_grad)
                for callback in task.callbacks:
                    callback()
        finally:
            self._tasks.pop()
        if not accumulate_grad and not allow_unreachable and any(grad is None for grad in captured):
            raise RuntimeError(
                "One of the differentiated Tensors appears to not have been used in the graph. Set allow_unused=True if "
                "this is the desired behavior."
            )
        return captured

    def _run(
        self,
        task: _Task,
        outputs: Sequence[Tensor | GradientEdge],
        grads: Sequence[Tensor | None],
        inputs: Sequence[Tensor | GradientEdge],
        accumulate_grad: bool,
    ) -> tuple[Tensor | None, ...]:
        roots = [_edge(output) for output in outputs]
        wanted = [_edge(x) for x in inputs]
        if accumulate_grad:  # backward(inputs=...): a leaf has a node that adds to .grad, other tensors retain their gradient
            for x in inputs:
                if isinstance(x, Tensor) and not x.is_leaf:
                    x.retain_grad()
        order = _Order(roots, wanted, run_wanted=accumulate_grad)
        task.executed = order.executed
        arriving: dict[Any, list[Tensor | None]] = {}
        captured: dict[tuple[Any, int], Tensor] = {}
        ready: list[tuple[int, int, Any]] = []
        number = itertools.count()

        def arrive(node: Any, position: int, grad: Tensor) -> None:
            buffer = arriving.setdefault(node, [None] * max(len(node._input_metadata), position + 1))
            grad = _as_expected(node, position, grad)
            old = buffer[position]
            buffer[position] = None
            buffer[position] = grad if old is None else _add(old, grad, task.create_graph)

        for (node, position), grad in zip(roots, grads, strict=True):
            if grad is not None and node in order.dependencies:
                arrive(node, position, grad)
        for node in {node: None for node, _ in roots}:
            if order.dependencies.get(node) == 0:
                heapq.heappush(ready, (-node._sequence_nr(), next(number), node))

        while ready:
            node = heapq.heappop(ready)[2]
            buffer = arriving.pop(node, None) or [None] * len(node._input_metadata)
            _run_tensor_hooks(node, buffer)
            for position in order.captures.get(node, ()):
                if position < len(buffer) and buffer[position] is not None:
                    captured[node, position] = buffer[position]  # type: ignore[assignment]
            # A Function in Python may communicate, so it runs even if no gradient has arrived, as in torch's engine.
            if node in order.executed and (hasattr(node, "apply") or any(grad is not None for grad in buffer)):
                needed = [next_node in order.dependencies for next_node, _ in node.next_functions]
                following = self._call(task, node, buffer, needed)
            else:
                following = [None] * len(node.next_functions)
            del buffer
            for position, (next_node, next_position) in enumerate(node.next_functions):
                if next_node not in order.dependencies:
                    continue
                grad, following[position] = following[position], None
                if grad is not None:
                    arrive(next_node, next_position, grad)
                del grad
                order.dependencies[next_node] -= 1
                if order.dependencies[next_node] == 0:
                    heapq.heappush(ready, (-next_node._sequence_nr(), next(number), next_node))
        return tuple(captured.get(edge) for edge in wanted)

    def _call(self, task: _Task, node: Any, buffer: list[Tensor | None], needed: list[bool]) -> list[Tensor | None]:
        """Run one node. Returns a gradient, or None, for each of its `next_functions`."""
        if hasattr(node, "variable"):
            grad = buffer.pop()
            assert grad is not None
            alone = sys.getrefcount(grad) <= 2  # this variable, and the argument
            _accumulate(node.variable, grad, alone, task.create_graph)
            return []
        if hasattr(node, "apply"):  # a Function in Python: a result for each argument, tensor or not
            if getattr(node, "materialize_grads", True):
                buffer = [_zeros(m) if g is None else g for g, m in zip(buffer, node._input_metadata, strict=True)]
            hooks = node.metadata.get(_NODE_HOOKS, {"before": {}, "after": {}})
            for hook in list(hooks["before"].values()):
                buffer = _replaced(hook(tuple(buffer)), buffer)
            results = node.apply(*buffer)
            results = results if isinstance(results, tuple) else (results,)
            given = iter([r for r, needed in zip(results, node.needs_input_grad, strict=False) if needed])
            following = [None if next_node is None else next(given, None) for next_node, _ in node.next_functions]
            for hook in list(hooks["after"].values()):
                following = _replaced(hook(tuple(following), tuple(buffer)), following)
        else:
            # torch's engine tells a node which gradients are not needed. From Python they are computed; they are not counted.
            partial = any(
                not n and next_node is not None for n, (next_node, _) in zip(needed, node.next_functions, strict=True)
            )
            with self._ledger.tentative() if partial else nullcontext() as counted:
                results = node(*buffer)
                following = list(results) if isinstance(results, tuple) else [results]
                following = [grad if n else None for grad, n in zip(following, needed, strict=True)]
                if counted is not None:
                    counted.needed = [grad for grad in following if grad is not None]
        del results
        buffer.clear()
        if not task.retain_graph:
            for saved in task.unpacked:
                saved.tensor = None
        task.unpacked.clear()
        return following

    def _unpack(self, saved: _Saved) -> Tensor:
        if saved.tensor is None:
            raise RuntimeError(
                "Trying to backward through the graph a second time (or directly access saved tensors after they have already "
                "been freed). Specify retain_graph=True if you need to backward through the graph a second time."
            )
        if self._tasks:
            self._tasks[-1].unpacked.append(saved)
        return saved.tensor


class _Order:
    """Which nodes run, and on how many gradients each waits."""

    def __init__(self, roots: list[tuple[Any, int]], wanted: list[tuple[Any, int]], *, run_wanted: bool) -> None:
        self.captures: dict[Any, list[int]] = {}
        for node, position in wanted:
            self.captures.setdefault(node, []).append(position)
        found = _post_order([node for node, _ in roots])
        if not wanted:
            self.executed = set(found)
            reached = self.executed
        else:
            self.executed = set()
            reached = set()
            for node in found:  # the nodes that follow come first
                if any(following in reached for following, _ in node.next_functions):
                    self.executed.add(node)
                    reached.add(node)
                if node in self.captures:
                    reached.add(node)
                    if run_wanted and hasattr(node, "variable"):
                        self.executed.add(node)
        self.dependencies = dict.fromkeys(reached, 0)
        for node in found:
            if node in self.executed:
                for following, _ in node.next_functions:
                    if following in reached:
                        self.dependencies[following] += 1


def _post_order(roots: list[Any]) -> list[Any]:
    seen: set[Any] = set()
    order: list[Any] = []
    stack = [(node, False) for node in roots]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(following, False) for following, _ in node.next_functions if following is not None]
    return order


def _edge(x: Tensor | GradientEdge) -> tuple[Any, int]:
    edge = x if isinstance(x, GradientEdge) else get_gradient_edge(x)
    return edge.node, edge.output_nr


def _zeros(metadata: Any) -> Tensor:
    return torch.zeros(tuple(metadata.shape), dtype=metadata.dtype, device=metadata.device)


def _as_expected(node: Any, position: int, grad: Tensor) -> Tensor:
    """Sum and cast a gradient to the shape and dtype of the tensor whose gradient it is, as torch's engine does."""
    metadata = node._input_metadata[position]
    shape = tuple(metadata.shape)
    if tuple(grad.shape) != shape:
        grad = grad.sum_to_size(shape)
    return grad if grad.dtype == metadata.dtype else grad.to(metadata.dtype)


def _add(old: Tensor, grad: Tensor, create_graph: bool) -> Tensor:
    # In place if nobody else has the sum so far: the references are the argument, the caller's variable and getrefcount's own.
    alone = sys.getrefcount(old) <= 3 and old._use_count() == 1 and old.is_contiguous() and not old._is_view()
    return old.add_(grad) if alone and not create_graph else old + grad


def _same_layout(x: Tensor, y: Tensor) -> bool:
    """A dimension of one element has a stride and no layout."""
    return all(size == 1 or a == b for size, a, b in zip(x.shape, x.stride(), y.stride(), strict=True))


def _accumulate(variable: Tensor, grad: Tensor, alone: bool, create_graph: bool) -> None:
    """Add to `variable.grad`; if it is the first gradient and nobody else has it, keep it without a copy."""
    if variable.grad is None:
        if create_graph:
            variable.grad = grad.clone()
        elif alone and _same_layout(grad, variable):
            variable.grad = grad.detach()
        else:
            variable.grad = torch.empty_like(variable, dtype=grad.dtype).detach().copy_(grad)
    elif create_graph:
        variable.grad = variable.grad + grad
    else:
        variable.grad += grad
    for hook in (getattr(variable, "_post_accumulate_grad_hooks", None) or {}).values():
        hook(variable)


def _run_tensor_hooks(node: Any, buffer: list[Tensor | None]) -> None:
    if hasattr(node, "variable"):
        hooks = [(0, hook) for hook in (node.variable._backward_hooks or {}).values()]
    else:
        hooks = [(position, hook) for position, found in node.metadata.get(_HOOKS, ()) for hook in list(found.values())]
    for position, hook in hooks:
        if position < len(buffer) and (grad := buffer[position]) is not None:
            result = hook(grad)
            buffer[position] = grad if result is None else result
            del grad, result


def _replaced(returned: Any, grads: list[Tensor | None]) -> list[Tensor | None]:
    """The gradients that a hook of a node returned, or those that it was given."""
    if returned is None:
        return grads
    return list(returned) if isinstance(returned, tuple) else [returned]


def _register_node_hook(when: str) -> Callable[..., RemovableHandle]:
    def register(self: Any, hook: Callable[..., Any]) -> RemovableHandle:
        hooks = self.metadata.setdefault(_NODE_HOOKS, {"before": OrderedDict(), "after": OrderedDict()})[when]
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        return handle

    return register


def _add_hooks(tensor: Tensor, hooks: dict[Any, Any]) -> None:
    """Let the node of `tensor` know its hooks. torch calls a patched method twice, through its modes, so add them once."""
    known: list[tuple[int, dict[Any, Any]]] = tensor.grad_fn.metadata.setdefault(_HOOKS, [])  # type: ignore[union-attr]
    if all(hooks is not other for _, other in known):
        known.append((tensor.output_nr, hooks))


def _register_hook(original: Callable[..., Any]) -> Callable[..., Any]:
    def register_hook(self: Tensor, hook: Callable[[Tensor], Tensor | None]) -> Any:
        handle = original(self, hook)
        if self.grad_fn is not None and self._backward_hooks is not None:
            _add_hooks(self, self._backward_hooks)
        return handle

    return register_hook


def _retain_grad(original: Callable[..., Any]) -> Callable[..., Any]:
    def retain_grad(self: Tensor) -> None:
        original(self)
        if self.is_leaf or hasattr(self, _RETAINED):
            return
        tensor = ref(self)

        def keep(grad: Tensor) -> None:
            if (owner := tensor()) is not None:
                owner.grad = grad if owner.grad is None else owner.grad + grad

        hooks = {0: keep}
        setattr(self, _RETAINED, hooks)
        _add_hooks(self, hooks)

    return retain_grad

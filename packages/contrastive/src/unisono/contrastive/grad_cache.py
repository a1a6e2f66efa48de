"""cached_backward: batches larger than memory, with the gradients of the whole batch (GradCache, Gao et al. 2021)."""

import copy
from collections import UserDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeAlias

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import get_device_states, set_device_states

from unisono.collectives import Group
from unisono.collectives.checks import describe, user_frame, validate_across_ranks
from unisono.collectives.groups import GroupRanks, resolve_group

Encoder: TypeAlias = Callable[[Any], Tensor]
_FSDP_SYNC = "set_requires_gradient_sync"  # FSDP2 modules are found by this method: importing FSDP takes seconds


def cached_backward(
    encoders: Sequence[Encoder],
    batches: Sequence[Any],
    loss: Callable[..., Tensor],
    *,
    micro_batch: int | Sequence[int],
    modules: Sequence[nn.Module] = (),
    scale_loss: Callable[[Tensor], Tensor] | None = None,
    group: Group = None,
) -> Tensor:
    """Run forward and backward of `loss(*features)`, one micro-batch's activations at a time. Return the loss, detached.

    The gradients, added to `.grad`, are those of the whole batch at once. The cost is a second forward of the encoders and
    memory for the features and their gradients. The last backward holds the activations of one micro-batch of each encoder.

    encoders: each takes its batch and returns the features, one tensor with the same number of rows. One encoder may be
        given several times.
    batches: one for each encoder: a tensor or a tree of tensors (dict, list, BatchEncoding), split along dim 0. Leaves without
        rows, such as strings and 0-dim tensors, go to every micro-batch.
    loss: returns a scalar from this rank's features. It may communicate. Its gradients must be right once ranks average them.
    micro_batch: the number of rows of a micro-batch, one number for all encoders or one for each.
    modules: the DDP and FSDP2 modules that the encoders use. Those inside an encoder that is a Module, or a method of one, are
        found without it. A module that is missing here synchronises at every micro-batch.
    scale_loss: applied to the loss before the backward, such as GradScaler.scale. The returned loss is not scaled.

    Ranks: all ranks of `group` must call this together; they may have different numbers of rows, or none. An exchange of 128
    bytes finds the largest number of micro-batches; ranks that need fewer run empty ones, so that forwards that communicate
    (FSDP, SyncBatchNorm) stay in step. Gradients are synchronised once, in a last backward of all encoders together, so one DDP
    may hold all of them. Inside your own no_sync() DDP does not synchronise. FSDP2 keeps unsharded gradients until the last
    backward, synchronises once for each encoder that it serves, and ends with its sync enabled. DDP with static_graph=True
    raises an error.

    Backward: parameters of the loss get their gradient from its one backward. Parameters inside a DDP module of the encoders
    (CLIP's logit_scale) are averaged with the others. Those of this package's loss modules have the same gradient on all ranks
    anyway. Average any others yourself, or wrap `loss` in DDP.

    Random numbers are the same in both forwards, and the generators end as after one forward. Both forwards run under the
    caller's autocast. An encoder whose features need no gradient is frozen: most of its second forwards are skipped. BatchNorm
    is not exact: it sees one micro-batch at a time and updates its running statistics twice.

    Example:
        >>> import torch
        >>> from unisono.contrastive import ClipLoss, cached_backward
        >>> towers = torch.nn.Linear(8, 4), torch.nn.Linear(6, 4)
        >>> images, texts = torch.randn(32, 8), torch.randn(32, 6)
        >>> loss = cached_backward(towers, [images, texts], ClipLoss(), micro_batch=8)
        >>> towers[0].weight.grad.shape
        torch.Size([4, 8])
    """
    ranks = resolve_group(group)
    synced = _synced_modules([*encoders, *modules])
    towers = _build_towers(encoders, batches, micro_batch, synced, ranks)
    with _no_sync(synced):
        with torch.no_grad():
            features = [torch.cat([tower.first_forward(*span) for span in tower.spans]) for tower in towers]
        for x in features:
            x.requires_grad_()
        value = loss(*features)
        if not isinstance(value, Tensor) or value.ndim:
            raise ValueError(f"cached_backward: loss: expected a scalar Tensor, got {describe(value)} on rank {ranks.rank}")
        scaled = value if scale_loss is None else scale_loss(value)
        loss_leaves = _graph_leaves(scaled)
        scaled.backward()
        gradients = [torch.zeros_like(x) if x.grad is None else x.grad for x in features]
        with ExitStack() as stack:
            stack.callback(_save_rng_state([x for tower in towers for x in tower.devices]))
            for tower, gradient in zip(towers, gradients, strict=True):
                tower.backward_all_but_last(gradient)
            last = [tower.second_forward(-1) for tower in towers]
    roots = [(x, gradient[len(gradient) - len(x) :]) for x, gradient in zip(last, gradients, strict=True) if x.requires_grad]
    roots += _prepare_ddp(synced, [x for x, _ in roots], loss_leaves)
    if roots:
        torch.autograd.backward([x for x, _ in roots], [gradient for _, gradient in roots])
    return value.detach()


@dataclass
class _Tower:
    """An encoder and its micro-batches."""

    name: str
    encode: Encoder
    batch: Any
    spans: list[tuple[int, int]]  # rows of each micro-batch
    devices: list[Tensor]  # one tensor on each device that the encoder is known to use
    restore_rng: list[Callable[[], None]] = field(default_factory=list)

    def first_forward(self, start: int, stop: int) -> Tensor:
        self.restore_rng.append(_save_rng_state(self.devices))
        features = self.encode(_rows(self.batch, start, stop))
        if not isinstance(features, Tensor) or features.shape[:1] != (stop - start,):
            raise ValueError(
                f"cached_backward: {self.name}: expected one Tensor of {stop - start} rows, got {describe(features)}"
            )
        return features

    def second_forward(self, i: int) -> Tensor:
        self.restore_rng[i]()
        return self.encode(_rows(self.batch, *self.spans[i]))

    def backward_all_but_last(self, gradient: Tensor) -> None:
        for i, (start, stop) in enumerate(self.spans[:-1]):
            features = self.second_forward(i)
            if not features.requires_grad:
                return
            features.backward(gradient[start:stop])


def _build_towers(
    encoders: Sequence[Encoder],
    batches: Sequence[Any],
    micro_batch: int | Sequence[int],
    synced: list[nn.Module],
    ranks: GroupRanks,
) -> list[_Tower]:
    """Validate the arguments on all ranks together, and give all ranks the same number of micro-batches."""
    steps = list(micro_batch) if isinstance(micro_batch, Sequence) else [micro_batch] * len(encoders)
    tensors = [_tensors(batch) for batch in batches]
    lengths = [sorted({len(x) for x in batch if x.ndim}) for batch in tensors]
    problem = _arguments_error(len(encoders), lengths, steps, synced)
    rows = [] if problem else [length for (length,) in lengths]
    table = validate_across_ranks(
        "cached_backward",
        ranks,
        same=("cached_backward", len(encoders)),
        numbers=[-(-length // step) for length, step in zip(rows, steps, strict=False)],
        words=lambda: f"cached_backward of {len(encoders)} encoders, {rows} rows, at {user_frame()}",
        device=next((x.device for batch in tensors for x in batch), None),
        rule="All ranks must pass the same number of encoders.",
        problem=problem,
    )
    towers = []
    for i, encode in enumerate(encoders):
        count = max(1, *(numbers[i] for numbers in table))
        spans = list(pairwise(min(k * steps[i], rows[i]) for k in range(count + 1)))
        owner = _owner(encode)
        parameters = [] if owner is None else owner.parameters()
        devices = {x.device: x for x in [*tensors[i], *parameters]}
        towers.append(_Tower(f"encoders[{i}] on rank {ranks.rank}", encode, batches[i], spans, list(devices.values())))
    return towers


def _arguments_error(encoders: int, lengths: list[list[int]], steps: list[int], synced: list[nn.Module]) -> str:
    if not 0 < encoders == len(lengths) == len(steps):
        return f"got {encoders} encoders, {len(lengths)} batches and {len(steps)} micro_batch; expected the same number of each"
    for step in steps:
        if not isinstance(step, int) or step < 1:
            return f"micro_batch={step!r} is not a positive number of rows"
    for i, found in enumerate(lengths):
        if len(found) != 1:
            return f"batches[{i}] has tensors of {found or 'no'} rows; expected the same number of rows in all of them"
    if any(isinstance(module, DistributedDataParallel) and module.static_graph for module in synced):
        return "DDP with static_graph=True synchronises in the first backward that it sees; leave static_graph out"
    return ""


def _map(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Apply `function` to the tensors of a tree."""
    if isinstance(tree, UserDict):  # transformers' BatchEncoding
        result = copy.copy(tree)
        result.data = _map(function, tree.data)
        return result
    return pytree.tree_map_only(Tensor, function, tree)


def _tensors(tree: Any) -> list[Tensor]:
    found: list[Tensor] = []
    _map(found.append, tree)
    return found


def _rows(tree: Any, start: int, stop: int) -> Any:
    return _map(lambda x: x[start:stop] if x.ndim else x, tree)


def _save_rng_state(tensors: Sequence[Tensor]) -> Callable[[], None]:
    """Return a function that restores the present state of the generators of the CPU and of the tensors' devices."""
    cpu_state = torch.get_rng_state()
    indices, states = get_device_states(*tensors)
    device_type = next((x.device.type for x in tensors if x.device.type != "cpu"), "cpu")

    def restore() -> None:
        torch.set_rng_state(cpu_state)
        set_device_states(indices, states, device_type=device_type)

    return restore


def _owner(encoder: object) -> nn.Module | None:
    encoder = getattr(encoder, "__self__", encoder)  # the module of a bound method
    return encoder if isinstance(encoder, nn.Module) else None


def _synced_modules(encoders: Sequence[object]) -> list[nn.Module]:
    """Return the DDP and FSDP2 modules in `encoders`, each once."""
    owners = [_owner(encoder) for encoder in encoders]
    inside = dict.fromkeys(module for owner in owners if owner is not None for module in owner.modules())
    return [module for module in inside if isinstance(module, DistributedDataParallel) or hasattr(module, _FSDP_SYNC)]


@contextmanager
def _no_sync(modules: list[nn.Module]) -> Iterator[None]:
    with ExitStack() as stack:
        for module in modules:
            if isinstance(module, DistributedDataParallel):
                stack.enter_context(module.no_sync())
            else:
                stack.callback(getattr(module, _FSDP_SYNC), True, recurse=False)
                getattr(module, _FSDP_SYNC)(False, recurse=False)
        yield


def _graph_leaves(loss: Tensor) -> list[Tensor]:
    """Return the leaves that the backward of `loss` reaches."""
    nodes = [loss.grad_fn]
    seen = set(nodes)
    for node in nodes:
        new = {following for following, _ in node.next_functions} - seen if node else set()
        nodes += new
        seen |= new
    return [node.variable for node in nodes if isinstance(node, torch._C._functions.AccumulateGrad)]  # type: ignore[union-attr]


def _prepare_ddp(modules: list[nn.Module], features: list[Tensor], loss_leaves: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Prepare the DDP modules for the backward that they synchronise.

    DDP's own forward would do so once for each encoder, look for unused parameters in the last encoder only, and broadcast
    buffers in between. DDP waits for the gradients of all its parameters. The parameters among `loss_leaves` already got
    theirs from the loss: they are returned with gradients of zero.
    """
    ddps = [module for module in modules if isinstance(module, DistributedDataParallel) and module.require_backward_grad_sync]
    own = {id(parameter) for module in ddps for parameter in module.parameters()}
    late = [(leaf.view_as(leaf), torch.zeros_like(leaf)) for leaf in loss_leaves if id(leaf) in own]
    for module in ddps:
        module.reducer.prepare_for_forward()
        module.reducer._rebuild_buckets()
        module.reducer.prepare_for_backward([*features, *(x for x, _ in late)] if module.find_unused_parameters else [])
        module.require_forward_param_sync = True
    return late

"""A batch larger than memory, with the gradients of the whole: GradCache (Gao et al. 2021, arXiv 2101.06983)."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import get_device_states, set_device_states

from unisono.collectives import Group
from unisono.collectives.agreement import agree
from unisono.collectives.checking import user_frame
from unisono.collectives.groups import Ranks, resolve

Encoder: TypeAlias = Callable[[Any], Tensor]
Batch: TypeAlias = Any


def cached_backward(
    encoders: Sequence[Encoder],
    batches: Sequence[Batch],
    loss: Callable[..., Tensor],
    *,
    micro_batch: int | Sequence[int],
    modules: Sequence[nn.Module] = (),
    scale_loss: Callable[[Tensor], Tensor] | None = None,
    group: Group = None,
) -> Tensor:
    """Backward of `loss(*[encode(batch) for ...])`, holding the activations of one micro-batch at a time. Returns the loss.

    The gradients, added to `.grad`, are those of the whole batch at once. It costs a second forward of the encoders, two
    copies of the features, and the activations of one micro-batch (of one for each encoder, in the end).

    `encoders`: each takes a batch and returns its features, one tensor with as many rows. One may serve twice.
    `batches`: one for each encoder: a tensor or a tree of them (dict, list, BatchEncoding), cut along dim 0. What has no
    rows, such as 0-dim tensors and strings, goes to every micro-batch.
    `loss`: a scalar of the features of this rank; it may communicate. The loss of unisono.contrastive is right beside DDP.
    `micro_batch`: rows at a time, for all encoders or for each.
    `modules`: what DDP and FSDP2 modules the encoders use; needless for those inside an encoder that is a Module or the
    method of one. Otherwise they synchronise at every micro-batch.
    `scale_loss`: applied before backward, as GradScaler.scale; the result is not scaled.

    Ranks: every rank of `group` calls this together, with rows as it has them, also none. One exchange of 128 bytes tells
    them how many micro-batches the largest needs; the others run empty ones up to that number, so that what communicates in
    a forward (FSDP, SyncBatchNorm) stays in step. DDP and FSDP2 synchronise gradients once, in the last backward, in which
    all encoders take part: one DDP may hold several. Inside a no_sync() of yours, DDP does not. FSDP2 is left with its sync
    switched on, and keeps unsharded gradients until then. DDP with static_graph cannot be held back, and is refused.

    Parameters of the loss get their gradient once. If they live in one of the DDP modules (a logit_scale), they are averaged
    with the others. If not, average them yourself, or make `loss` a DDP module of its own.

    Random numbers are the same in both forwards, and drawn once as far as the generators are concerned. The caller's
    autocast counts in both. An encoder whose first micro-batch needs no gradient is frozen, and forwarded only once more.
    BatchNorm and its like are not exact: they see one micro-batch at a time, and update their running statistics twice.

    Example:
        loss = cached_backward([image_tower, text_tower], [images, texts], ClipLoss(), micro_batch=64)
    """
    ranks = resolve(group)
    held = _synchronising([*encoders, *modules])
    towers = _towers(encoders, batches, micro_batch, held, ranks)
    with _without_sync(held):
        with torch.no_grad():
            features = [torch.cat([tower.first_forward(i) for i in range(tower.count)]).requires_grad_() for tower in towers]
        torch.clear_autocast_cache()  # its copies of the weights were made without a graph
        value = loss(*features)
        if not isinstance(value, Tensor) or value.ndim:
            raise ValueError(f"cached_backward: loss: expected a scalar Tensor, got {_describe(value)} on rank {ranks.rank}")
        scaled = value if scale_loss is None else scale_loss(value)
        parameters = _leaves_of(scaled)
        scaled.backward()
        gradients = [torch.zeros_like(x) if x.grad is None else x.grad for x in features]
        with _same_rng_afterwards(towers):
            for tower, gradient in zip(towers, gradients, strict=True):
                tower.backward_all_but_the_last(gradient)
            last = [tower.second_forward(tower.count - 1) for tower in towers]
    roots = [(x, y[len(y) - len(x) :]) for x, y in zip(last, gradients, strict=True) if x.requires_grad]
    roots += _expect_gradients(held, [x for x, _ in roots], parameters)
    if roots:
        torch.autograd.backward([x for x, _ in roots], [gradient for _, gradient in roots])
    return value.detach()


@dataclass
class _Tower:
    """An encoder and its micro-batches."""

    name: str
    encode: Encoder
    batch: Batch
    bounds: list[tuple[int, int]]
    rng: list[Callable[[], None]] = field(default_factory=list)

    @property
    def count(self) -> int:
        return len(self.bounds)

    @property
    def devices(self) -> list[Tensor]:
        """A tensor on every device that the encoder is known to use."""
        owner = _owner(self.encode)
        parameters = [] if owner is None else list(owner.parameters())
        return list({x.device: x for x in [*_tensors(self.batch), *parameters]}.values())

    def first_forward(self, i: int) -> Tensor:
        start, stop = self.bounds[i]
        self.rng.append(_keep_rng(self.devices))
        features = self.encode(_rows(self.batch, start, stop))
        if not isinstance(features, Tensor) or features.ndim == 0 or len(features) != stop - start:
            raise TypeError(
                f"cached_backward: {self.name} returned {_describe(features)} for {stop - start} rows; "
                "expected one Tensor with a row for each"
            )
        return features

    def second_forward(self, i: int) -> Tensor:
        self.rng[i]()
        return self.encode(_rows(self.batch, *self.bounds[i]))

    def backward_all_but_the_last(self, gradient: Tensor) -> None:
        for i, (start, stop) in enumerate(self.bounds[:-1]):
            features = self.second_forward(i)
            if not features.requires_grad:
                return  # frozen
            features.backward(gradient[start:stop])


def _towers(
    encoders: Sequence[Encoder], batches: Sequence[Batch], micro_batch: int | Sequence[int], held: list[nn.Module], ranks: Ranks
) -> list[_Tower]:
    """Every rank with the same number of micro-batches, once none has anything to complain of."""
    steps = [micro_batch] * len(encoders) if isinstance(micro_batch, int) else list(micro_batch)
    rows, problem = [], ""
    if not len(encoders) == len(batches) == len(steps) or not encoders:
        problem = f"{len(encoders)} encoders, {len(batches)} batches and {len(steps)} of micro_batch; give each encoder one"
    elif bad := [step for step in steps if not isinstance(step, int) or step < 1]:
        problem = f"micro_batch={micro_batch!r}: {bad[0]!r} is not a positive number of rows"
    elif any(isinstance(module, DistributedDataParallel) and module.static_graph for module in held):
        problem = "DDP with static_graph=True synchronises in the first backward it sees; leave static_graph out"
    else:
        lengths = [sorted({len(x) for x in _tensors(batch) if x.ndim}) for batch in batches]
        rows = [length[0] if length else 0 for length in lengths]
        if uneven := [place for place, length in enumerate(lengths) if len(length) != 1]:
            found = f"tensors of {lengths[uneven[0]]} rows" if lengths[uneven[0]] else "no tensor with rows"
            problem = f"batches[{uneven[0]}] has {found}; expected the same number in all its tensors"
    needed = [-(-length // step) for length, step in zip(rows, steps, strict=False)]
    devices = [x.device for batch in batches for x in _tensors(batch)]
    table = agree(
        "cached_backward",
        ranks,
        same=("cached_backward", len(encoders)),
        numbers=needed,
        words=lambda: f"cached_backward of {len(encoders)} encoders and {rows} rows at {user_frame()}",
        device=devices[0] if devices else None,
        rule="All ranks must pass the same encoders.",
        problem=problem,
    )
    counts = [max(1, *column) for column in zip(*table, strict=True)]
    return [
        _Tower(
            f"encoders[{place}] on rank {ranks.rank}",
            encode,
            batch,
            [(min(i * step, length), min((i + 1) * step, length)) for i in range(count)],
        )
        for place, (encode, batch, step, length, count) in enumerate(zip(encoders, batches, steps, rows, counts, strict=True))
    ]


def _map(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """The tree with `function` of its tensors. A UserDict, such as transformers' BatchEncoding, counts as a dict."""

    def of_leaf(leaf: Any) -> Any:
        if isinstance(leaf, UserDict):
            twin = copy.copy(leaf)
            twin.data = _map(function, leaf.data)
            return twin
        return function(leaf) if isinstance(leaf, Tensor) else leaf

    return pytree.tree_map(of_leaf, tree)


def _tensors(tree: Any) -> list[Tensor]:
    found: list[Tensor] = []
    _map(found.append, tree)
    return found


def _rows(tree: Any, start: int, stop: int) -> Any:
    return _map(lambda x: x[start:stop] if x.ndim else x, tree)


def _describe(value: object) -> str:
    return f"a Tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _keep_rng(tensors: Sequence[Tensor]) -> Callable[[], None]:
    """A function that puts the generators of the CPU and of the tensors' devices back to where they are now."""
    on_cpu = torch.get_rng_state()
    indices, states = get_device_states(*tensors)
    kind = next((x.device.type for x in tensors if x.device.type != "cpu"), "cpu")

    def restore() -> None:
        torch.set_rng_state(on_cpu)
        set_device_states(indices, states, device_type=kind)

    return restore


@contextmanager
def _same_rng_afterwards(towers: list[_Tower]) -> Iterator[None]:
    restore = _keep_rng([x for tower in towers for x in tower.devices])
    try:
        yield
    finally:
        restore()


def _owner(encoder: object) -> nn.Module | None:
    encoder = getattr(encoder, "__self__", encoder)  # of a bound method
    return encoder if isinstance(encoder, nn.Module) else None


def _synchronising(encoders: Sequence[object]) -> list[nn.Module]:
    """The DDP and FSDP2 modules in `encoders`, each once."""
    owners = [owner for encoder in encoders if (owner := _owner(encoder)) is not None]
    inside = dict.fromkeys(module for owner in owners for module in owner.modules())
    return [module for module in inside if isinstance(module, DistributedDataParallel | FSDPModule)]


@contextmanager
def _without_sync(modules: list[nn.Module]) -> Iterator[None]:
    with ExitStack() as stack:
        for module in modules:
            if isinstance(module, DistributedDataParallel):
                stack.enter_context(module.no_sync())
            elif isinstance(module, FSDPModule):
                stack.callback(module.set_requires_gradient_sync, True, recurse=False)
                module.set_requires_gradient_sync(False, recurse=False)
        yield


def _leaves_of(loss: Tensor) -> list[Tensor]:
    """The leaves that the backward of `loss` reaches."""
    nodes = [loss.grad_fn]
    seen = set(nodes)
    for node in nodes:
        new = {following for following, _ in node.next_functions} - seen if node else set()
        nodes += new
        seen |= new
    return [node.variable for node in nodes if isinstance(node, torch._C._functions.AccumulateGrad)]


def _expect_gradients(modules: list[nn.Module], features: list[Tensor], leaves: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Prepare DDP for the one backward that it synchronises, as the end of its own forward would do it.

    Its own would do so once for each forward, would look for unused parameters in the last encoder only, and would
    broadcast the buffers between the encoders. DDP waits for every parameter: the result is a gradient of zeros for those
    of `leaves` that are its own, whose true gradient has come from the loss already.
    """
    ddps = [module for module in modules if isinstance(module, DistributedDataParallel) and module.require_backward_grad_sync]
    own = {id(parameter) for module in ddps for parameter in module.parameters()}
    late = [(leaf.view_as(leaf), torch.zeros_like(leaf)) for leaf in leaves if id(leaf) in own]
    for module in ddps:
        module.reducer.prepare_for_forward()
        module.reducer._rebuild_buckets()
        outputs = [*features, *[leaf for leaf, _ in late]] if module.find_unused_parameters else []
        module.reducer.prepare_for_backward(outputs)
        module.require_forward_param_sync = True
    return late

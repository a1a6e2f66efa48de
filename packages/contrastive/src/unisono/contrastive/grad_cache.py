"""A batch larger than memory, with the gradients of the whole: GradCache (Gao et al. 2021, arXiv 2101.06983)."""

from __future__ import annotations

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
from unisono.collectives.agreement import agree
from unisono.collectives.checking import user_frame
from unisono.collectives.groups import Ranks, resolve

Encoder: TypeAlias = Callable[[Any], Tensor]
_FSDP_SYNC = "set_requires_gradient_sync"  # known by this method: importing FSDP takes as long as importing torch


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
    """Forward and backward of `loss(*features)`, one micro-batch's activations at a time. Returns the loss, detached.

    The gradients, added to `.grad`, are those of the whole batch at once. It costs a second forward of the encoders, twice
    the features, and the activations of one micro-batch; of one for each encoder in the end.

    `encoders`: each takes its batch and returns the features, one tensor with as many rows. One may serve twice.
    `batches`: one for each encoder, a tensor or a tree of them (dict, list, BatchEncoding), cut along dim 0. What has no
    rows, such as strings and 0-dim tensors, goes to every micro-batch.
    `loss`: a scalar of this rank's features. It may communicate; averaging the ranks' gradients should be right for it.
    `micro_batch`: rows at a time, for all encoders or for each.
    `modules`: the DDP and FSDP2 modules that the encoders use; needless for those in an encoder that is a Module or a method
    of one. Any left out synchronises at every micro-batch.
    `scale_loss`: applied before backward, such as GradScaler.scale. The loss returned is not scaled.

    Ranks: all of `group` call this together, with rows as they have them, also none. An exchange of 128 bytes tells how many
    micro-batches the largest needs, and the others run empty ones up to that number: what communicates in a forward (FSDP,
    SyncBatchNorm) stays in step. Gradients are synchronised once, in a last backward in which all encoders take part: one
    DDP may hold them all. Within a no_sync() of yours, DDP leaves it out. FSDP2 keeps unsharded gradients until then,
    synchronises once for each encoder that it serves, and ends with its sync switched on. DDP with static_graph is refused.

    Parameters of the loss get their gradient from its one backward. Those that live in a DDP module of the encoders (CLIP's
    logit_scale) are averaged with the rest of it. Those of this package's loss modules are the same on all ranks as they
    are. Otherwise average them yourself, or let `loss` be a DDP module.

    Random numbers are the same in both forwards, and the generators end as if there had been one. The caller's autocast
    serves both. An encoder whose first features need no gradient is frozen: most of its second forwards are left out.
    BatchNorm and the like are not exact: they see a micro-batch at a time, and update their running statistics twice.

    Example:
        >>> import torch
        >>> from unisono.contrastive import ClipLoss, cached_backward
        >>> towers = torch.nn.Linear(8, 4), torch.nn.Linear(6, 4)
        >>> images, texts = torch.randn(32, 8), torch.randn(32, 6)
        >>> loss = cached_backward(towers, [images, texts], ClipLoss(), micro_batch=8)
        >>> towers[0].weight.grad.shape
        torch.Size([4, 8])
    """
    ranks = resolve(group)
    held = _synchronising([*encoders, *modules])
    towers = _towers(encoders, batches, micro_batch, held, ranks)
    with _without_sync(held):
        with torch.no_grad():
            features = [torch.cat([tower.first_forward(*cut) for cut in tower.cuts]).requires_grad_() for tower in towers]
        value = loss(*features)
        if not isinstance(value, Tensor) or value.ndim:
            raise ValueError(f"cached_backward: loss: expected a scalar Tensor, got {_describe(value)} on rank {ranks.rank}")
        scaled = value if scale_loss is None else scale_loss(value)
        leaves = _leaves_of(scaled)
        scaled.backward()
        gradients = [torch.zeros_like(x) if x.grad is None else x.grad for x in features]
        with ExitStack() as afterwards:
            afterwards.callback(_keep_rng([x for tower in towers for x in tower.devices]))
            for tower, gradient in zip(towers, gradients, strict=True):
                tower.backward_all_but_the_last(gradient)
            last = [tower.second_forward(-1) for tower in towers]
    roots = [(x, y[len(y) - len(x) :]) for x, y in zip(last, gradients, strict=True) if x.requires_grad]
    roots += _expect_gradients(held, [x for x, _ in roots], leaves)
    if roots:
        torch.autograd.backward([x for x, _ in roots], [gradient for _, gradient in roots])
    return value.detach()


@dataclass
class _Tower:
    """An encoder and its micro-batches. `devices`: a tensor on each device that it is known to use."""

    name: str
    encode: Encoder
    batch: Any
    cuts: list[tuple[int, int]]
    devices: list[Tensor]
    rng: list[Callable[[], None]] = field(default_factory=list)

    def first_forward(self, start: int, stop: int) -> Tensor:
        self.rng.append(_keep_rng(self.devices))
        features = self.encode(_rows(self.batch, start, stop))
        if not isinstance(features, Tensor) or features.shape[:1] != (stop - start,):
            raise ValueError(f"cached_backward: {self.name}: {_describe(features)}, expected one Tensor of {stop - start} rows")
        return features

    def second_forward(self, i: int) -> Tensor:
        self.rng[i]()
        return self.encode(_rows(self.batch, *self.cuts[i]))

    def backward_all_but_the_last(self, gradient: Tensor) -> None:
        for i, (start, stop) in enumerate(self.cuts[:-1]):
            features = self.second_forward(i)
            if not features.requires_grad:
                return
            features.backward(gradient[start:stop])


def _towers(
    encoders: Sequence[Encoder], batches: Sequence[Any], micro_batch: int | Sequence[int], held: list[nn.Module], ranks: Ranks
) -> list[_Tower]:
    """The same number of micro-batches on all ranks, once none of them has anything to complain of."""
    steps = list(micro_batch) if isinstance(micro_batch, Sequence) else [micro_batch] * len(encoders)
    tensors = [_tensors(batch) for batch in batches]
    lengths = [sorted({len(x) for x in found if x.ndim}) for found in tensors]
    problem = _complaint(len(encoders), lengths, steps, held)
    rows = [] if problem else [length for (length,) in lengths]
    table = agree(
        "cached_backward",
        ranks,
        same=("cached_backward", len(encoders)),
        numbers=[-(-length // step) for length, step in zip(rows, steps, strict=False)],
        words=lambda: f"cached_backward of {len(encoders)} encoders, {rows} rows, at {user_frame()}",
        device=next((x.device for found in tensors for x in found), None),
        rule="All ranks must pass the same number of encoders.",
        problem=problem,
    )
    towers = []
    for place, encode in enumerate(encoders):
        count = max(1, *(needed[place] for needed in table))
        cuts = list(pairwise(min(i * steps[place], rows[place]) for i in range(count + 1)))
        parameters = owner.parameters() if (owner := _owner(encode)) is not None else []
        devices = {x.device: x for x in [*tensors[place], *parameters]}
        towers.append(_Tower(f"encoders[{place}] on rank {ranks.rank}", encode, batches[place], cuts, list(devices.values())))
    return towers


def _complaint(encoders: int, lengths: list[list[int]], steps: list[int], held: list[nn.Module]) -> str:
    if not 0 < encoders == len(lengths) == len(steps):
        return f"{encoders} encoders, {len(lengths)} batches, {len(steps)} of micro_batch: expected as many of each"
    if bad := [step for step in steps if not isinstance(step, int) or step < 1]:
        return f"micro_batch={bad[0]!r} is not a positive number of rows"
    if odd := [(place, found) for place, found in enumerate(lengths) if len(found) != 1]:
        return f"batches[{odd[0][0]}] has tensors of {odd[0][1] or 'no'} rows; expected one number of rows, in all of them"
    if any(isinstance(module, DistributedDataParallel) and module.static_graph for module in held):
        return "DDP with static_graph=True synchronises in the first backward that it sees; leave static_graph out"
    return ""


def _map(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """The tree with `function` of its tensors."""
    if isinstance(tree, UserDict):  # transformers' BatchEncoding
        twin = copy.copy(tree)
        twin.data = _map(function, tree.data)
        return twin
    return pytree.tree_map_only(Tensor, function, tree)


def _tensors(tree: Any) -> list[Tensor]:
    found: list[Tensor] = []
    _map(found.append, tree)
    return found


def _rows(tree: Any, start: int, stop: int) -> Any:
    return _map(lambda x: x[start:stop] if x.ndim else x, tree)


def _describe(value: object) -> str:
    return f"a Tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _keep_rng(tensors: Sequence[Tensor]) -> Callable[[], None]:
    """A function that puts the generators of the CPU and of the tensors' devices back to where they are now."""
    on_cpu, (indices, states) = torch.get_rng_state(), get_device_states(*tensors)
    kind = next((x.device.type for x in tensors if x.device.type != "cpu"), "cpu")

    def restore() -> None:
        torch.set_rng_state(on_cpu)
        set_device_states(indices, states, device_type=kind)

    return restore


def _owner(encoder: object) -> nn.Module | None:
    encoder = getattr(encoder, "__self__", encoder)  # of a bound method
    return encoder if isinstance(encoder, nn.Module) else None


def _synchronising(encoders: Sequence[object]) -> list[nn.Module]:
    """The DDP and FSDP2 modules in `encoders`, each once."""
    owners = [owner for encoder in encoders if (owner := _owner(encoder)) is not None]
    inside = dict.fromkeys(module for owner in owners for module in owner.modules())
    return [module for module in inside if isinstance(module, DistributedDataParallel) or hasattr(module, _FSDP_SYNC)]


@contextmanager
def _without_sync(modules: list[nn.Module]) -> Iterator[None]:
    with ExitStack() as stack:
        for module in modules:
            if isinstance(module, DistributedDataParallel):
                stack.enter_context(module.no_sync())
            else:
                stack.callback(getattr(module, _FSDP_SYNC), True, recurse=False)
                getattr(module, _FSDP_SYNC)(False, recurse=False)
        yield


def _leaves_of(loss: Tensor) -> list[Tensor]:
    """The leaves that the backward of `loss` reaches."""
    nodes = [loss.grad_fn]
    seen = set(nodes)
    for node in nodes:
        new = {following for following, _ in node.next_functions} - seen if node else set()
        nodes += new
        seen |= new
    return [node.variable for node in nodes if isinstance(node, torch._C._functions.AccumulateGrad)]  # type: ignore[union-attr]


def _expect_gradients(modules: list[nn.Module], features: list[Tensor], leaves: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Prepare DDP for the backward that it synchronises. Its own forward would do so for every encoder anew, look for unused
    parameters in the last one only, and broadcast buffers in between.

    DDP waits for all its parameters. Those among `leaves` had their gradient from the loss: they are returned with zeros.
    """
    ddps = [module for module in modules if isinstance(module, DistributedDataParallel) and module.require_backward_grad_sync]
    own = {id(parameter) for module in ddps for parameter in module.parameters()}
    late = [(leaf.view_as(leaf), torch.zeros_like(leaf)) for leaf in leaves if id(leaf) in own]
    for module in ddps:
        module.reducer.prepare_for_forward()
        module.reducer._rebuild_buckets()
        module.reducer.prepare_for_backward([*features, *(x for x, _ in late)] if module.find_unused_parameters else [])
        module.require_forward_param_sync = True
    return late

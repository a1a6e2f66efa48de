"""gradcheck and gradgradcheck for distributed functions: finite differences of the sum over ranks."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.collectives.functional.gather import all_gather
from unisono.collectives.groups import Group, process_group, resolve_group


def gradcheck(
    fn: Callable[..., Any], *inputs: Tensor, group: Group = None, eps: float = 1e-6, atol: float = 1e-7, rtol: float = 1e-6
) -> None:
    """Compare the backward of `fn` with central differences of the sum over ranks of a random projection of its results.

    Call it on all ranks, with each rank's own float64 inputs; ranks may have different sizes. If a gradient is wrong on any
    rank, every rank raises an AssertionError that says where.
    """
    weights: list[Tensor] = []

    def local_total() -> Tensor:
        outputs = [y for y in _tensors(fn(*inputs)) if y.is_floating_point()]
        if not weights:
            generator = torch.Generator().manual_seed(1 + dist.get_rank())
            weights.extend(torch.rand(y.shape, generator=generator, dtype=y.dtype) + 0.5 for y in outputs)
        return torch.stack([(w * y).sum() for w, y in zip(weights, outputs, strict=True)]).sum()

    ranks = resolve_group(group)
    pg = process_group(ranks)
    differentiable = [x for x in inputs if x.requires_grad]
    if not differentiable or any(x.dtype != torch.float64 for x in differentiable):
        raise ValueError(
            f"gradcheck: inputs must be float64, and some must require a gradient; got {[x.dtype for x in inputs]}"
        )
    analytic = torch.autograd.grad(local_total(), differentiable, allow_unused=True)
    counts = all_gather(torch.tensor(sum(x.numel() for x in differentiable)), group=group).tolist()

    def global_total() -> float:
        with torch.no_grad():
            total = local_total().reshape(1)
        dist.all_reduce(total, group=pg)
        return float(total)

    numeric = [torch.zeros_like(x) for x in differentiable]
    elements = [(place, i) for place, x in enumerate(differentiable) for i in range(x.numel())]
    for rank, count in enumerate(counts):
        for number in range(count):  # one rank changes one element, and all ranks evaluate `fn`
            ends = []
            for step in (eps, -eps):
                if rank == ranks.rank:
                    place, i = elements[number]
                    _nudge(differentiable[place], i, step)
                ends.append(global_total())
                if rank == ranks.rank:
                    _nudge(differentiable[place], i, -step)
            if rank == ranks.rank:
                numeric[place].view(-1)[i] = (ends[0] - ends[1]) / (2 * eps)
    _raise_on_all_ranks(analytic, numeric, atol, rtol, group)


def gradgradcheck(
    fn: Callable[..., Any], *inputs: Tensor, group: Group = None, eps: float = 1e-6, atol: float = 1e-7, rtol: float = 1e-6
) -> None:
    """gradcheck the gradient itself, as a function of the inputs and of the incoming gradients."""
    outputs = [y for y in _tensors(fn(*inputs)) if y.requires_grad]
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    incoming = [torch.rand(y.shape, generator=generator, dtype=y.dtype).requires_grad_() for y in outputs]

    def gradient(*arguments: Tensor) -> tuple[Tensor, ...]:
        xs, gradients = arguments[: len(inputs)], arguments[len(inputs) :]
        with torch.enable_grad():
            ys = [y for y in _tensors(fn(*xs)) if y.requires_grad]
            return torch.autograd.grad(ys, [x for x in xs if x.requires_grad], list(gradients), create_graph=True)

    gradcheck(gradient, *inputs, *incoming, group=group, eps=eps, atol=atol, rtol=rtol)


def _tensors(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def _nudge(x: Tensor, index: int, step: float) -> None:
    with torch.no_grad():
        x.view(-1)[index] += step


def _raise_on_all_ranks(
    analytic: Sequence[Tensor | None], numeric: Sequence[Tensor], atol: float, rtol: float, group: Group
) -> None:
    problems = []
    for place, (ours, reference) in enumerate(zip(analytic, numeric, strict=True)):
        ours = torch.zeros_like(reference) if ours is None else ours
        if not torch.allclose(ours, reference, atol=atol, rtol=rtol):
            worst = int((ours - reference).abs().argmax())
            a, n = float(ours.reshape(-1)[worst]), float(reference.reshape(-1)[worst])
            ratio = f" ({a / n:.4g} times)" if n else ""
            problems.append(
                f"\n  rank {resolve_group(group).rank}, input {place} of shape {tuple(ours.shape)}: worst at element {worst}, "
                f"analytic {a:.6g}, numerical {n:.6g}{ratio}"
            )
    text = torch.frombuffer(bytearray("".join(problems).encode() or b" "), dtype=torch.uint8)
    text_of_all_ranks = bytes(all_gather(text, group=group).tolist()).decode().rstrip()
    if text_of_all_ranks.strip():
        raise AssertionError(f"the gradient is not that of the sum over ranks:{text_of_all_ranks}")

"""clip_grad_norm_ for models with sharded tables: one norm over all parameters, the same on every rank."""

import math
import struct
import warnings
from collections.abc import Generator, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from unisono.collectives import MismatchError
from unisono.collectives.checks import validate_across_ranks
from unisono.collectives.groups import group_by_name, resolve_group, sharded_over

_CLOSE = 1e-4  # the relative difference up to which gradients count as equal on all ranks


@torch.no_grad()
def clip_grad_norm_(
    parameters: nn.Module | Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale gradients in place, such that their norm over all parameters is at most `max_norm`. Returns the norm before.

    This is torch.nn.utils.clip_grad_norm_, with its arguments, for models in which tables are sharded over ranks, in any
    mixture of layouts, beside parameters that every rank has (DDP) or that are sharded by FSDP. Norm and gradients are those
    of one process, and the same on all ranks, which all have to call. torch's own function sees only this rank's part of most
    tables; there it raises.

    Args:
        parameters: A module, or its parameters. Those without gradient do not count: so neither do tables whose optimizer
            makes its steps in the backward.
        max_norm: The norm that is allowed.
        norm_type: The order of the norm, above 0; float("inf") or "inf" is the largest absolute value.
        error_if_nonfinite: Raise a RuntimeError, on all ranks, if the norm is infinite or NaN.
        foreach: False handles one gradient after the other; otherwise those of a device together, which is faster.

    Backward: none; call it between the backward and the optimizer's step.

    Example:
        >>> from unisono.embedding import ShardedEmbedding
        >>> model = nn.Sequential(ShardedEmbedding(9, 4, plan="table"), nn.Linear(4, 2))
        >>> model(torch.tensor([3, 5])).sum().backward()
        >>> norm = clip_grad_norm_(model.parameters(), 1.0)
    """
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    found = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if not found and isinstance(parameters, Generator):
        warnings.warn("clip_grad_norm_: parameters is a generator that is used up: no gradient is clipped", stacklevel=3)
    max_norm, norm_type = float(max_norm), float(norm_type)
    whole: list[Tensor] = []  # gradients that are the same on all ranks
    meshes: dict[DeviceMesh, list[Tensor]] = {}  # gradients that FSDP has sharded
    shards: dict[str, list[Tensor]] = {}  # this rank's parts of the gradients of tables, by the name of their group
    for parameter in found:
        group, grad = sharded_over(parameter), getattr(parameter, "grad", None)
        if group:
            shards.setdefault(group, [])  # a rank that holds nothing takes part
        if grad is None:
            continue
        if isinstance(grad, DTensor) and not group:
            meshes.setdefault(grad.device_mesh, []).append(grad)
        else:
            (shards[group] if group else whole).append(_local(grad, coalesce=True))

    problem = _argument_error(found, max_norm, norm_type)
    arguments = f"{len(found)} parameters, {max_norm=}, {norm_type=}, {error_if_nonfinite=}"
    if problem and not shards:
        raise ValueError(f"clip_grad_norm_: {problem}")
    order = 2.0 if problem else norm_type  # the norms of FSDP communicate, so a rank with a bad call computes them, too
    norms = [_combine([_norm(grads, order, foreach) for grads in (whole, *meshes.values())], order)]
    for group, grads in shards.items():
        norms[0], *others = _gather_norms(norms[0], _norm(grads, order, foreach), group, arguments, problem)
        norms += others

    dtype = torch.float32
    for parameter in found:
        dtype = torch.promote_types(dtype, parameter.dtype.to_real())
    norm = _combine(norms, norm_type)
    if error_if_nonfinite and not math.isfinite(norm):
        raise RuntimeError(f"clip_grad_norm_: the norm of the gradients is {norm}, and error_if_nonfinite=True")
    total = torch.tensor(norm, dtype=dtype, device=found[0].device if found else None)
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    by_device: dict[torch.device, list[Tensor]] = {}
    for parameter in found:
        if parameter.grad is not None:
            by_device.setdefault(parameter.grad.device, []).append(_local(parameter.grad))
    for device, scaled in by_device.items():
        if foreach is False:
            for grad in scaled:
                grad.mul_(factor.to(device))
        else:
            torch._foreach_mul_(scaled, factor.to(device))
    return total


def _argument_error(parameters: Sequence[Tensor], max_norm: float, norm_type: float) -> str:
    if wrong := [type(x).__name__ for x in parameters if not isinstance(x, Tensor)]:
        return f"parameters: expected a module or Tensors, got {wrong[0]}"
    if not max_norm >= 0:
        return f"max_norm={max_norm} must be a number that is not negative"
    return "" if norm_type > 0 else f"norm_type={norm_type} must be a number above 0"


def _local(grad: Tensor, *, coalesce: bool = False) -> Tensor:
    """The numbers of this rank's part of a gradient: a plain tensor that shares its memory, unless it has to be coalesced."""
    if isinstance(grad, DTensor):
        grad = grad.to_local()
    plain = grad.detach()
    if not plain.is_sparse:
        return plain
    return plain.coalesce()._values() if coalesce else plain._values()


def _norm(grads: Sequence[Tensor], norm_type: float, foreach: bool | None) -> float:
    norm = nn.utils.get_total_norm([grad for grad in grads if grad.numel()], norm_type, foreach=foreach)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def _combine(norms: Sequence[float], norm_type: float) -> float:
    """The norm of several vectors together, in one order on all ranks."""
    return float(torch.linalg.vector_norm(torch.tensor(norms, dtype=torch.float64), norm_type))


def _gather_norms(whole: float, shard: float, group: str, arguments: str, problem: str) -> list[float]:
    """Return the norm of what all ranks have, as rank 0 has it, and the norm of each rank's shards: the same on all ranks."""
    ranks = resolve_group(group_by_name(group))
    table = validate_across_ranks(
        "clip_grad_norm_",
        ranks,
        same=arguments,
        numbers=struct.unpack("qq", struct.pack("dd", whole, shard)),
        words=lambda: f"clip_grad_norm_({arguments})",
        device=None,
        rule="All ranks must clip the same parameters with the same arguments.",
        problem=problem,
    )
    gathered = [struct.unpack("dd", struct.pack("qq", *row)) for row in table]
    wholes = [row[0] for row in gathered]
    nans = {math.isnan(norm) for norm in wholes}
    if nans != {True} and not all(math.isclose(norm, wholes[0], rel_tol=_CLOSE) for norm in wholes):
        raise MismatchError(
            f"clip_grad_norm_: the gradients of parameters that are no sharded tables must be the same on all ranks, but their "
            f"norms are {wholes}, rank by rank. Reduce them over the ranks first, as DDP does."
        )
    return [wholes[0], *(row[1] for row in gathered)]

"""broadcast_parameters gives all ranks the same weights; raise_if_weights_differ finds ranks that have others."""

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from unisono.collectives import Group, MismatchError, broadcast
from unisono.collectives.checks import describe, user_frame, validate_across_ranks
from unisono.collectives.groups import GroupRanks, is_fake_group, process_group, resolve_group, sharded_over
from unisono.dataparallel.gradient_sync.buckets import GradientSpec, plan_buckets
from unisono.dataparallel.gradient_sync.presence import is_dtensor

_BUCKET_BYTES = 25 * 2**20
_CHUNK = 2**18  # elements of which a checksum is computed at once: int64 copies of a whole table might not fit into memory
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of an element


def broadcast_parameters(module: nn.Module, *, root: int = 0, group: Group = None) -> None:
    """Give every rank the parameters and buffers of rank `root` of the group, as DDP does when it is made.

    Call it on all ranks, with the module on its device, before the first step. Frozen parameters are included. Each tensor
    stays the same object and is written in place; many travel in one message.

    Three kinds of tensors are left as they are, because ranks differ in them by design: DTensors (FSDP), the sharded tables of
    unisono.embedding, and those that DDP was told to ignore (`_set_params_and_buffers_to_ignore_for_model`).

    Raises the same error on all ranks, before anything is written, if their modules have different names, shapes or dtypes.

    Backward: none.

    Example, 2 ranks whose model.weight is [1.] and [2.]:
        broadcast_parameters(model)  ->  model.weight is [1.] on both

    Example:
        >>> import torch
        >>> from unisono.dataparallel import broadcast_parameters
        >>> broadcast_parameters(torch.nn.Linear(2, 1))  # one rank: nothing changes
    """
    ranks = resolve_group(group)
    tensors: dict[str, Tensor] = {}
    if isinstance(module, nn.Module):
        tensors = replicated_tensors(module)
        problem = next(filter(None, (_tensor_error(name, x) for name, x in tensors.items())), "")
    else:
        problem = f"module: expected a Module, got {type(module).__name__}"
    if not isinstance(root, int) or not 0 <= root < ranks.size:
        problem = f"root={root!r} is not a rank of this group, which has ranks 0 to {ranks.size - 1}"
    texts = [] if problem else [f"{name} {describe(x)}" for name, x in tensors.items()]
    validate_across_ranks(
        "broadcast_parameters",
        ranks,
        same=("broadcast_parameters", root, texts),
        numbers=(),
        words=lambda: f"broadcast_parameters(root={root}) at {user_frame()}: {', '.join(texts)}",
        device=next((x.device for x in tensors.values()), None),
        rule="All ranks must have modules with the same names, shapes and dtypes, and the same root.",
        problem=problem,
    )
    if ranks.size == 1:
        return
    values = list(tensors.values())
    specs = [GradientSpec(x.shape, x.dtype, x.device) for x in values]
    with torch.no_grad():
        for bucket in plan_buckets(specs, range(len(specs)), _BUCKET_BYTES):
            members = [values[place] for place in bucket]
            received = broadcast(torch.cat([x.reshape(-1) for x in members]), root=root, group=group)
            if ranks.rank != root:
                for x, part in zip(members, received.split([x.numel() for x in members]), strict=True):
                    x.copy_(part.view(x.shape))


def replicated_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers that all ranks should have alike, by name: not shards, nor what DDP ignores."""
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: x for name, x in named if name not in ignored and not is_dtensor(x) and not sharded_over(x)}


def raise_if_weights_differ(function: str, tensors: Mapping[str, Tensor], ranks: GroupRanks, advice: str) -> None:
    """Raise the same MismatchError on all ranks, naming the first tensor whose bits differ between them.

    One small message compares a checksum of all tensors. Only if it differs does another one send a checksum of each.
    """
    if ranks.size == 1 or is_fake_group(process_group(ranks)):
        return
    sums = _checksums(list(tensors.values()))
    digest = hashlib.blake2b(repr(sums).encode(), digest_size=8).digest()
    device = next((x.device for x in tensors.values()), None)

    def exchange(numbers: list[int]) -> list[list[int]]:
        return validate_across_ranks(
            function,
            ranks,
            same=("weights", len(sums), len(numbers)),
            numbers=numbers,
            words=lambda: f"{len(sums)} parameters at {user_frame()}",
            device=device,
            rule="All ranks must have the same number of parameters.",
        )

    if len({row[0] for row in exchange([int.from_bytes(digest, "big", signed=True)])}) == 1:
        return
    table = exchange(sums)
    places = [place for place in range(len(sums)) if len({row[place] for row in table}) > 1]
    name, first = [*tensors.items()][places[0]]
    others = [str(rank) for rank, row in enumerate(table) if row[places[0]] != table[0][places[0]]]
    raise MismatchError(
        f"{function}: the ranks start from different weights: {name}, {describe(first)}, on rank 0 is not that on "
        f"rank{'s' * (len(others) > 1)} {', '.join(others)}; {len(places)} of {len(sums)} differ. {advice}"
    )


def _checksums(tensors: Sequence[Tensor]) -> list[int]:
    """Return one integer for each tensor, which depends on its bits and on where they are, but on no order of additions."""
    sums = [_checksum(_integers(x).reshape(-1)) for x in tensors]
    found = [0] * len(sums)
    for device in {x.device for x in sums}:  # one wait for each device
        places = [place for place, x in enumerate(sums) if x.device == device]
        for place, value in zip(places, torch.stack([sums[place] for place in places]).tolist(), strict=True):
            found[place] = value
    return found


def _checksum(integers: Tensor) -> Tensor:
    places = torch.arange(min(_CHUNK, len(integers)), device=integers.device) * 2 + 1  # odd: every bit counts
    total = torch.zeros((), dtype=torch.int64, device=integers.device)
    for chunk in integers.split(_CHUNK):
        total = total * 31 + (chunk * places[: len(chunk)]).sum()
    return total


def _integers(x: Tensor) -> Tensor:
    """View the bits of a plain tensor as integers. Others (sparse, quantised) are not compared."""
    x = x.detach()
    if type(x) is not Tensor or x.layout != torch.strided or x.is_quantized:
        return torch.zeros(1, dtype=torch.int64, device="cpu")
    x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    return x.resolve_neg().view(_INTEGERS[x.dtype.itemsize])


def _tensor_error(name: str, x: Tensor) -> str:
    if is_lazy(x):
        return f"{name} has no shape yet: call its lazy module once first"
    if x.device.type == "meta":
        return f"{name} is on the meta device and has no values: give it memory first, with module.to_empty(device=...)"
    if x.layout != torch.strided or x.is_quantized or x.is_inference():
        return f"{name}, {describe(x)}, is sparse, quantised or of inference mode: it cannot be written in place"
    return ""

"""Which gradients exist on this rank and on all ranks: exchanged in one small message, the survey."""

import hashlib
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from unisono.collectives import MismatchError
from unisono.collectives.checks import Validation, describe, user_frame
from unisono.collectives.groups import GroupRanks, backend_for, process_group, sharded_over
from unisono.dataparallel.gradient_sync.buckets import GradientSpec

_BITS = 60  # flags in one int64
_KINDS = 256  # codes for one gradient. 0: it changed after it was sent; otherwise its number of sparse dimensions
_SHARDED = "each rank holds other rows of it, which must not be averaged over ranks; leave it out"
_RULE = (
    "All ranks must make the same call with the same options and parameters: the same number that require a gradient, in the "
    "same order, with the same shapes, dtypes and device types."
)


class LocalGradients(NamedTuple):
    """The gradients of this rank."""

    grads: list[Tensor | None]
    numbers: list[int]  # what the other ranks must know; empty if all gradients exist and are dense
    problem: str  # what is wrong, or ""


class GlobalGradients(NamedTuple):
    """The gradients of all ranks: the same value on each of them."""

    dense: tuple[int, ...]  # parameters with a dense gradient on some rank
    sparse: dict[int, int]  # parameters with sparse gradients only, and the number of sparse dimensions
    late: frozenset[int]  # parameters whose gradient has changed on some rank after it was sent


def validate_parameters(parameters: Tensor | Iterable[Tensor]) -> tuple[list[Tensor], str]:
    """Return each parameter once, and what is wrong with them, or ""."""
    if isinstance(parameters, Tensor):
        parameters = [parameters]
    if not isinstance(parameters, Iterable):
        return [], f"parameters: expected tensors, got {type(parameters).__name__}"
    given = list(parameters)
    for place, p in enumerate(given):
        if not isinstance(p, Tensor):
            return [], f"parameters[{place}]: expected a Tensor, got {type(p).__name__}"
        if is_lazy(p):
            return [], f"parameters[{place}] has no shape yet: call its lazy module once first"
        if is_dtensor(p):
            return [], f"parameters[{place}] is a DTensor, {describe(p)}: {_SHARDED}"
        if p.requires_grad and not p.is_leaf:
            return [], f"parameters[{place}], {describe(p)}, is the result of an operation, not a leaf: it gets no p.grad"
        if p.requires_grad and p.dtype.itemsize == 1:
            return [], f"parameters[{place}] is {describe(p)}: {p.dtype} cannot be reduced"
    return list({id(p): p for p in given}.values()), ""


def find_local_gradients(
    parameters: Sequence[Tensor], specs: Sequence[GradientSpec], *, late: Collection[int] = ()
) -> LocalGradients:
    """Return this rank's gradients. `late`: places of those that have changed after they were sent."""
    grads = [p.grad for p in parameters]
    missing: list[int] = []
    codes = [place * _KINDS for place in late]
    problem = ""
    for place, (grad, spec) in enumerate(zip(grads, specs, strict=True)):
        if grad is None:
            missing.append(place)
            found = parameters[place]
        else:
            found = grad
        if spec.fits(found) and (type(found) is Tensor or not is_dtensor(found)):
            continue
        if found.is_sparse and spec.fits(found, layout=torch.sparse_coo):
            codes.append(place * _KINDS + found.sparse_dim())
        elif not problem:
            what = "its gradient" if grad is not None else "now it"
            problem = (
                f"parameters[{place}] is {_describe(spec)} on {spec.device}, but {what} is {describe(found)} on "
                f"{found.device}, a {type(found).__name__} of {found.layout}"
            )
    if not missing and not codes:
        return LocalGradients(grads, [], problem)
    flags = [0] * _flag_words(len(grads))
    for place in missing:
        flags[place // _BITS] |= 1 << place % _BITS
    return LocalGradients(grads, [*flags, *codes], problem)


class Survey:
    """Which gradients all ranks have: one small message, on its way once this is made; the caller works meanwhile.

    The ranks also compare `call`: step, options and signature of the parameters.
    """

    def __init__(
        self, specs: Sequence[GradientSpec], local: LocalGradients, call: tuple[str, str, str], ranks: GroupRanks
    ) -> None:
        self._number = len(specs)

        def words() -> str:
            elements = sum(spec.shape.numel() for spec in specs)
            listed = ", ".join(map(_describe, specs[:1000]))
            listed = listed if len(listed) < 1200 else f"{listed[:1200]} ..."
            return f"{call[0]} of {len(specs)} parameters, {elements:,} elements, {call[1]}, at {user_frame()}: {listed}"

        self._validation = Validation(
            "sync_gradients",
            ranks,
            same=call,
            numbers=local.numbers,
            words=words,
            device=specs[0].device if specs else None,
            rule=_RULE,
            problem=local.problem,
        )

    def agrees(self) -> bool:
        """Wait for the message of every rank, and return whether result() will raise no MismatchError: the same on all."""
        return self._validation.agrees()

    def result(self) -> GlobalGradients:
        """Return the gradients of all ranks, or raise the same error on all of them."""
        try:
            table = self._validation.result()
        except MismatchError as error:
            if _SHARDED in str(error):
                raise TypeError(str(error)) from None
            raise
        return _decode(table, self._number)


def parameter_signature(specs: Sequence[GradientSpec]) -> str:
    """Return a hash that is equal on ranks with matching parameters. Device numbers may differ between ranks."""
    devices: dict[torch.device, int] = {}
    texts = [f"{_describe(spec)}{spec.device.type}{devices.setdefault(spec.device, len(devices))}" for spec in specs]
    return hashlib.blake2b(";".join(texts).encode(), digest_size=8).hexdigest()


def shard_error(shards: Mapping[int, Tensor], ranks: GroupRanks) -> str:
    """Say which parameter, by place, these ranks hold in parts, as plain tensors; "" if none. Other groups may average it."""
    for place, p in shards.items():
        if sharded_over(p) == ranks.name:
            return f"parameters[{place}] is a shard of a table, {describe(p)}: {_SHARDED}"
    return ""


def device_error(devices: Collection[torch.device], ranks: GroupRanks) -> str:
    for device in devices if ranks.size > 1 else ():
        try:
            backend_for(device, process_group(ranks))
        except ValueError as error:
            return f"parameters: {error}"
    return ""


def _decode(table: list[list[int]], number: int) -> GlobalGradients:
    everything = range(number)
    if not any(table):
        return GlobalGradients(tuple(everything), {}, frozenset())
    dense: set[int] = set()
    dims: dict[int, set[int]] = {}
    late: set[int] = set()
    for row in table:
        flags, codes = row[: _flag_words(number)], row[_flag_words(number) :]
        missing = {place for place in everything if flags and flags[place // _BITS] >> place % _BITS & 1}
        late |= {code // _KINDS for code in codes if code % _KINDS == 0}
        sparse = {code // _KINDS: code % _KINDS for code in codes if code % _KINDS}
        for place, dim in sparse.items():
            dims.setdefault(place, set()).add(dim)
        dense |= set(everything) - missing - sparse.keys()
    dense |= {place for place, found in dims.items() if len(found) > 1}  # ranks with different sparse dimensions
    only_sparse = {place: found.pop() for place, found in sorted(dims.items()) if place not in dense}
    return GlobalGradients(tuple(sorted(dense)), only_sparse, frozenset(late | dims.keys()))


def _flag_words(number: int) -> int:
    return -(-number // _BITS)


def _describe(spec: GradientSpec) -> str:
    return f"{str(spec.dtype).removeprefix('torch.')}{list(spec.shape)}"


def is_dtensor(x: Tensor) -> bool:
    """Return whether `x` is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")  # whoever made a DTensor has imported it; importing it here takes time
    return module is not None and isinstance(x, module.DTensor)

"""Which gradients are there, on this rank and on all: told in one small exchange before anything else travels."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from unisono.collectives import MismatchError
from unisono.collectives.checks import describe, user_frame, validate_across_ranks
from unisono.collectives.groups import GroupRanks, backend_for, process_group
from unisono.dataparallel.buckets import Spec

_BITS = 60  # flags in one int64
_KINDS = 256  # what a rank may say of one gradient: 0, it came late; otherwise how many sparse dimensions it has
_SHARDED = "is a DTensor"
_RULE = (
    "All ranks must make the same call with the same options and parameters: as many that require a gradient, in the same "
    "order, with the same shapes, dtypes and types of device."
)


class Survey(NamedTuple):
    """This rank's gradients, what the others must know of them (nothing, if all are there and dense), and what is wrong."""

    grads: list[Tensor | None]
    numbers: list[int]
    problem: str


class Holdings(NamedTuple):
    """What the ranks have together: the same on each of them."""

    dense: tuple[int, ...]  # parameters with a dense gradient on some rank
    sparse: dict[int, int]  # parameters with sparse ones only, and the number of sparse dimensions
    late: frozenset[int]  # those that some rank has not sent in a bucket as they are now


def collect(parameters: Tensor | Iterable[Tensor]) -> tuple[list[Tensor], str]:
    """Each parameter once, and what is wrong with them."""
    if isinstance(parameters, Tensor):
        parameters = [parameters]
    if not isinstance(parameters, Iterable):
        return [], f"parameters: expected tensors, got {type(parameters).__name__}"
    given = list(parameters)
    for place, p in enumerate(given):
        if not isinstance(p, Tensor):
            return [], f"parameters[{place}]: expected a Tensor, got {type(p).__name__}"
        if is_lazy(p):
            return [], f"parameters[{place}] has no shape yet: run its lazy module once before"
        if _is_dtensor(p):
            return [], (
                f"parameters[{place}] {_SHARDED}, {describe(p)}: each rank holds other rows of it, which must not be averaged "
                "with those of the others; leave it out"
            )
        if p.requires_grad and not p.is_leaf:
            return [], f"parameters[{place}], {describe(p)}, is a result, not a leaf: it gets no p.grad"
        if p.requires_grad and p.dtype.itemsize == 1:
            return [], f"parameters[{place}] is {describe(p)}: {p.dtype} cannot be added up"
    return list({id(p): p for p in given}.values()), ""


def survey_gradients(parameters: Sequence[Tensor], specs: Sequence[Spec], *, late: Collection[int] = ()) -> Survey:
    """`late`: gradients that are no longer what this rank has sent."""
    grads = [p.grad for p in parameters]
    missing: list[int] = []
    codes, problem = [place * _KINDS for place in late], ""
    for place, (grad, spec) in enumerate(zip(grads, specs, strict=True)):
        if grad is None:
            missing.append(place)
            found = parameters[place]
        else:
            found = grad
        if spec.fits(found) and (type(found) is Tensor or not _is_dtensor(found)):
            continue
        if found.is_sparse and spec.fits(found, layout=torch.sparse_coo):
            codes.append(place * _KINDS + found.sparse_dim())
        elif not problem:
            what = "its gradient" if grad is not None else "by now it"
            problem = (
                f"parameters[{place}] is {_describe(spec)} on {spec.device}, but {what} is {describe(found)} on "
                f"{found.device}, a {type(found).__name__} of {found.layout}"
            )
    if not missing and not codes:
        return Survey(grads, [], problem)
    flags = [0] * _words(len(grads))
    for place in missing:
        flags[place // _BITS] |= 1 << place % _BITS
    return Survey(grads, [*flags, *codes], problem)


def exchange_holdings(specs: Sequence[Spec], survey: Survey, call: tuple[str, str, str], ranks: GroupRanks) -> Holdings:
    """What all ranks have, once they agree on the `call`: the step, the options and the signature of the parameters."""

    def words() -> str:
        elements = sum(spec.shape.numel() for spec in specs)
        listed = ", ".join(map(_describe, specs[:1000]))
        listed = listed if len(listed) < 1200 else f"{listed[:1200]} ..."
        return f"{call[0]} of {len(specs)} parameters, {elements:,} elements, {call[1]}, at {user_frame()}: {listed}"

    device = specs[0].device if specs else None
    numbers, problem = survey.numbers, survey.problem
    try:
        table = validate_across_ranks(
            "sync_gradients", ranks, same=call, numbers=numbers, words=words, device=device, rule=_RULE, problem=problem
        )
    except MismatchError as error:
        if _SHARDED in str(error):
            raise TypeError(str(error)) from None
        raise
    return _read(table, len(specs))


def sign(specs: Sequence[Spec]) -> str:
    """Equal on ranks whose parameters belong together: their devices may have other numbers, but are divided alike."""
    devices: dict[torch.device, int] = {}
    texts = [f"{_describe(spec)}{spec.device.type}{devices.setdefault(spec.device, len(devices))}" for spec in specs]
    return hashlib.blake2b(";".join(texts).encode(), digest_size=8).hexdigest()


def device_problem(devices: Collection[torch.device], ranks: GroupRanks) -> str:
    for device in devices if ranks.size > 1 else ():
        try:
            backend_for(device, process_group(ranks))
        except ValueError as error:
            return f"parameters: {error}"
    return ""


def _read(table: list[list[int]], number: int) -> Holdings:
    everything = range(number)
    if not any(table):
        return Holdings(tuple(everything), {}, frozenset())
    dense: set[int] = set()
    dims: dict[int, set[int]] = {}
    late: set[int] = set()
    for row in table:
        flags, codes = row[: _words(number)], row[_words(number) :]
        missing = {place for place in everything if flags and flags[place // _BITS] >> place % _BITS & 1}
        late |= {code // _KINDS for code in codes if code % _KINDS == 0}
        sparse = {code // _KINDS: code % _KINDS for code in codes if code % _KINDS}
        for place, dim in sparse.items():
            dims.setdefault(place, set()).add(dim)
        dense |= set(everything) - missing - sparse.keys()
    dense |= {place for place, found in dims.items() if len(found) > 1}  # no common sparse form
    only_sparse = {place: found.pop() for place, found in sorted(dims.items()) if place not in dense}
    return Holdings(tuple(sorted(dense)), only_sparse, frozenset(late | dims.keys()))


def _words(number: int) -> int:
    return -(-number // _BITS)


def _describe(spec: Spec) -> str:
    return f"{str(spec.dtype).removeprefix('torch.')}{list(spec.shape)}"


def _is_dtensor(x: Tensor) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # imported by whoever has made one: it takes its time
    return module is not None and isinstance(x, module.DTensor)

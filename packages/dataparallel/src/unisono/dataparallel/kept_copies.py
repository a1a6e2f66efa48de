"""Copies of tensors on another device that are made anew only when the originals change."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from unisono.dataparallel.coalescing import broadcast


class KeptCopies:
    """Copies on one device, of tensors that are elsewhere.

    For tensors that nobody trains: of the fused optimizers torch does not know that they write to their parameters.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._originals: dict[int, Tensor] = {}  # by their ids, which are theirs as long as they are kept
        self._copies: dict[int, Tensor] = {}
        self._marks: dict[int, tuple[object, ...]] = {}
        self._storages: list[StorageWeakRef] = []  # as long as they are known, their addresses are theirs as well

    def refresh(self, tensors: Sequence[Tensor], *, bucket_bytes: int) -> dict[int, Tensor]:
        """A copy for each of `tensors`, by its id; itself, if it is on the device."""
        away = [x for x in tensors if x.device != self._device]
        stale = [x for x in away if self._marks.get(id(x)) != _mark(x)]
        if stale or len(away) < len(self._originals):
            # as plain tensors, whatever mode the caller is in: they outlive it
            with torch.inference_mode(False), torch.no_grad():
                (fresh,) = broadcast(stale, [self._device], bucket_bytes=bucket_bytes)
            known = self._copies | {id(x): copy for x, copy in zip(stale, fresh, strict=True)}
            self._originals = {id(x): x for x in away}
            self._copies = {key: known[key] for key in self._originals}
            self._marks = {key: _mark(x) for key, x in self._originals.items()}
            self._storages = [StorageWeakRef(x.untyped_storage()) for x in away if x.layout == torch.strided]
        return {id(x): self._copies.get(id(x), x) for x in tensors}


def _mark(x: Tensor) -> tuple[object, ...]:
    """Another one whenever `x` was written to, or was given other memory. Of tensors of inference mode, which do not count
    their changes, and of sparse ones always another one."""
    if x.is_inference() or x.layout != torch.strided:
        return (object(),)
    return x._version, x.untyped_storage()._cdata, x.storage_offset(), x.stride()

"""Copies of tensors on another device that are made anew only when the originals change."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unisono.dataparallel.coalescing import broadcast


class KeptCopies:
    """Copies on one device.

    `own`: what is on the device already is copied, too, because somebody is going to change the copies. A copy that was
    changed is made anew as well.
    """

    def __init__(self, device: torch.device, *, own: bool) -> None:
        self._device, self._own = device, own
        self._originals: dict[int, Tensor] = {}  # by their ids, which are theirs as long as they are kept
        self._copies: dict[int, Tensor] = {}
        self._marks: dict[int, tuple[object, ...]] = {}

    def refresh(self, tensors: Sequence[Tensor], *, bucket_bytes: int) -> dict[int, Tensor]:
        """A copy for each of `tensors`, by its id."""
        away = [x for x in tensors if self._own or x.device != self._device]
        stale = [x for x in away if id(x) not in self._copies or self._marks[id(x)] != self._mark(x)]
        if stale or len(away) < len(self._originals):
            # as plain tensors, whatever mode the caller is in: they outlive it
            with torch.inference_mode(False), torch.no_grad():
                (fresh,) = broadcast(stale, [self._device], bucket_bytes=bucket_bytes)
            known = self._copies | {id(x): copy for x, copy in zip(stale, fresh, strict=True)}
            self._originals = {id(x): x for x in away}
            self._copies = {key: known[key] for key in self._originals}
            self._marks = {key: self._mark(x) for key, x in self._originals.items()}
        return {id(x): self._copies.get(id(x), x) for x in tensors}

    def changed(self, x: Tensor) -> bool:
        """Whether somebody has written to the copy of `x`, as far as torch knows."""
        return self._marks[id(x)] != self._mark(x)

    def forget(self) -> None:
        self._originals, self._copies, self._marks = {}, {}, {}

    def _mark(self, x: Tensor) -> tuple[object, ...]:
        """Another one whenever the original or the copy was written to, or the original was given other memory."""
        return x.untyped_storage()._cdata, _version(x), _version(self._copies[id(x)])


def _version(x: Tensor) -> object:
    """Tensors of inference mode do not count their changes: they are taken as changed whenever they are looked at."""
    return object() if x.is_inference() else x._version

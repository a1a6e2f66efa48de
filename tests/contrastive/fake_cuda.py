"""Helpers for tests on fake CUDA tensors. They have no data, so reading a value or mixing devices raises."""

import weakref
from collections.abc import Iterator
from itertools import islice

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from unisono.contrastive.tiled.columns import RingColumns

on_fake_cuda = pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="fake CUDA tensors need a torch built with CUDA")
WHOLE_RING = RingColumns.__iter__


def first_blocks(self: RingColumns) -> Iterator:
    """The first 32 blocks of the ring. All blocks are alike, and one of fake tensors takes a twentieth of a second."""
    yield from islice(WHOLE_RING(self), 32)


class LiveBytes(TorchDispatchMode):
    """Counts the largest number of bytes alive at once, over all storages made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for t in tree_leaves(result):
            if isinstance(t, torch.Tensor) and (storage := t.untyped_storage())._cdata not in self.seen:
                size, key = storage.nbytes(), storage._cdata
                self.seen.add(key)
                self.now += size
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._gone, key, size)
        return result

    def _gone(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.now -= size

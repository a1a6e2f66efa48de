"""Memory for tables: on CPUs in large pages, since rows are read in no order and most reads would miss the page table."""

from __future__ import annotations

import ctypes
import sys

import torch
from torch import Tensor

_PAGE = 2 << 20
_LARGE = 8 * _PAGE
_MADV_HUGEPAGE = 14


def empty_rows(shape: tuple[int, int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """torch.empty, advised to be large pages where Linux grants them."""
    rows = torch.empty(shape, dtype=dtype, device=device)
    if device.type == "cpu" and rows.nbytes >= _LARGE and sys.platform == "linux":
        start = -(-rows.data_ptr() // _PAGE) * _PAGE
        length = (rows.data_ptr() + rows.nbytes - start) // _PAGE * _PAGE
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_HUGEPAGE)  # advice: may be refused
    return rows

"""Fingerprints: random projections that stand for a tensor, so that ranks send a few numbers instead of a gradient.

A projection is linear. So the distance of two fingerprints estimates the distance of two tensors, and a tensor that is W times
another has a fingerprint that is W times the other's.
"""

from functools import cache

import torch
from torch import Tensor

WIDTH = 8  # numbers that stand for a tensor
_CHUNK = 1 << 16


@cache
def _directions() -> Tensor:
    return torch.randn(_CHUNK, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(22))


def fingerprint(x: Tensor) -> Tensor:
    """Return WIDTH float64 numbers for the whole tensor. A DTensor is gathered, so all ranks must call it together."""
    return fingerprint_rows(_dense(x).reshape(1, -1))[0]


def fingerprint_rows(x: Tensor) -> Tensor:
    """Return WIDTH float64 numbers for each row: (n, …) → (n, WIDTH)."""
    x = _dense(x)
    rows = x.reshape(len(x), x[:1].numel() if len(x) else 0)
    total = torch.zeros(len(rows), WIDTH, dtype=torch.float64)
    for number, chunk in enumerate(rows.split(_CHUNK, dim=1)):
        total += (chunk.double() @ _directions()[: chunk.shape[1]]) * _directions()[number % _CHUNK]
    return total


def _dense(x: Tensor) -> Tensor:
    x = x.detach()
    if hasattr(x, "full_tensor"):  # a DTensor: importing its class takes seconds
        x = x.full_tensor()
    if x.layout != torch.strided:
        x = x.to_dense()
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def distance(x: Tensor, y: Tensor, *, scale: float = 0.0) -> float:
    """Return how far `x` is from `y`, relative to the length of `y`, or to `scale` if that is larger. NaN is infinite."""
    if x.shape != y.shape:
        return float("inf")
    if torch.equal(x, y):
        return 0.0
    size = max(float(y.norm()), scale)
    found = float((x - y).norm()) / size if size else float("inf")
    return found if found == found else float("inf")

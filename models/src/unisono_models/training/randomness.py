"""Random numbers as a pure function of (seed, stream, step, sample): no state, so neither ranks nor restarts change them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

_WORD = (1 << 64) - 1
_IN_CACHE = 1 << 15  # numbers


def key_of(seed: int, *path: int | str) -> int:
    """64 bits that stand for `seed` and a path of names and numbers below it, the same on every machine.

    Example:
        >>> key_of(0, "order", 3) == key_of(0, "order", 3) != key_of(0, "order", 4)
        True
    """
    text = "/".join(str(part) for part in (seed, *path))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def generator(seed: int, *path: int | str) -> torch.Generator:
    """A CPU generator for `seed` and a path below it, for draws that every rank makes alike, such as the order of an epoch."""
    return torch.Generator().manual_seed(key_of(seed, *path))


def uniform(seed: int, stream: str, step: int, index: Tensor, shape: Sequence[int] = ()) -> Tensor:
    """Numbers in [0, 1), float32, of shape (len(index), *shape): row i depends on (seed, stream, step, index[i]) alone.

    So a sample gets the same numbers on whichever rank and in whichever row it is. `index`: int64, on any device.

    Example:
        >>> a = uniform(0, "noise", 7, torch.tensor([3, 5]), (2,))
        >>> b = uniform(0, "noise", 7, torch.tensor([5]), (2,))
        >>> bool((a[1] == b[0]).all())
        True
    """
    rows = rows_of(seed, stream, step, index)
    return draw(rows, rows.new_zeros(()), shape)


def rows_of(seed: int, stream: str, step: int, index: Tensor) -> Tensor:
    """An int64 for each sample that stands for (seed, stream, step, sample): what `draw` goes by."""
    return _mix(index * _signed(0xD1342543DE82EF95) + _signed(key_of(seed, stream, step)))


def stream_of(name: str) -> int:
    """The number that `draw` knows a stream by."""
    return _signed(key_of(0, name))


def draw(rows: Tensor, stream: Tensor, shape: Sequence[int]) -> Tensor:
    """Numbers in [0, 1), of shape (len(rows), *shape), for `rows_of` samples. `stream` tells draws from the same rows apart.

    A tensor of one `stream_of`: a number would be a constant to torch.compile, which then compiles for each one anew.
    """
    numbers: Tensor = _numbers(rows, stream, math.prod(shape))
    return numbers.view(len(rows), *shape)


# One operation to the compiler: inductor takes products of large constants and positions for indices, and they overflow.
@torch.library.custom_op("unisono_models::numbers", mutates_args=())
def _numbers(rows: Tensor, stream: Tensor, count: int) -> Tensor:
    cells = torch.arange(count, device=rows.device) * _signed(0x9E3779B97F4A7C15)
    keys, found = (rows + stream)[:, None], torch.empty(len(rows), count, device=rows.device)
    # On a CPU, as many at a time as its cache holds: three times as fast.
    step = max(1, _IN_CACHE // max(count, 1)) if rows.device.type == "cpu" else max(1, len(rows))
    for some, into in zip(keys.split(step), found.split(step), strict=True):
        into.copy_(_mix_(some + cells).bitwise_and_(0xFFFFFF))
    return found.mul_(2**-24)


@_numbers.register_fake
def _(rows: Tensor, stream: Tensor, count: int) -> Tensor:
    return rows.new_empty(rows.shape[0], count, dtype=torch.float32)  # len() would make a constant of it


def normal(seed: int, stream: str, step: int, index: Tensor, shape: Sequence[int] = ()) -> Tensor:
    """Standard normal numbers, as `uniform`."""
    pairs = uniform(seed, stream, step, index, (2, *shape))
    radius = torch.sqrt(-2 * torch.log1p(-pairs[:, 0]))
    return radius * torch.cos(2 * math.pi * pairs[:, 1])


def _mix(x: Tensor) -> Tensor:
    """The finaliser of splitmix64 (Steele et al. 2014), in int64 that wraps."""
    return _mix_(x.clone())


def _mix_(x: Tensor) -> Tensor:
    """The same, in place."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        shifted = (x >> shift).bitwise_and_((1 << (64 - shift)) - 1)  # int64 shifts the sign in; the mask takes it out again
        x.bitwise_xor_(shifted)
        if factor != 1:
            x.mul_(_signed(factor))
    return x


def _signed(x: int) -> int:
    x &= _WORD
    return x - (1 << 64) if x >> 63 else x

"""How the sum of a 16-bit row and its change becomes 16 bits again: to the nearest number, or at random with the right mean."""

from typing import Protocol

import torch
from torch import Tensor

from unisono.embedding.hashing import draw_bits, mix_seed

_LANES = 4  # columns that share a hash of 64 bits: 16 are as many as bfloat16 drops of a float32, and float16 drops fewer


class Round(Protocol):
    """Rounds float32 numbers (rows, columns) to `dtype`. `rows`: which rows of a shard they are."""

    def __call__(self, x: Tensor, dtype: torch.dtype, rows: Tensor) -> Tensor: ...


def round_to_nearest(x: Tensor, dtype: torch.dtype, rows: Tensor) -> Tensor:
    return x.to(dtype)


def round_stochastically(
    x: Tensor, dtype: torch.dtype, rows: Tensor, *, seed: int, step: int, first_row: int, first_column: int, dim: int
) -> Tensor:
    """Round up or down, with probabilities that make the mean `x`. So updates far below the spacing of `dtype` add up.

    The random bits are a function of the seed, the step, and the row and column in the whole table, which has `dim` columns:
    rank, layout and other rows do not matter. `first_row`, `first_column`: where the shard begins.
    """
    info = torch.finfo(dtype)
    hashes = torch.arange(first_column // _LANES, -(-(first_column + x.shape[1]) // _LANES), device=x.device)
    hashes_of_row = -(-dim // _LANES)
    bits = draw_bits(mix_seed(seed, step), ((rows + first_row) * hashes_of_row)[:, None] + hashes).view(torch.int16)
    own_bits = bits.narrow(1, first_column % _LANES, x.shape[1])
    if dtype is torch.bfloat16:  # the upper half of a float32: a carry of the lower half rounds up
        carried = (own_bits.to(torch.int32) & 0xFFFF).add_(x.view(torch.int32))
        rounded = carried.bitwise_and_(-0x10000).view(torch.float32)
    else:
        powers = (x.view(torch.int32) & 0x7F800000).view(torch.float32)  # of two: each number without its mantissa
        spacing = powers.clamp_(min=info.smallest_normal).mul_(info.eps)
        scaled = x / spacing  # exact, and so is all that follows
        lower = scaled.floor()
        uniform = own_bits.to(torch.float32).mul_(2.0**-16).add_(0.5)  # in [0, 1)
        rounded = lower.add_(uniform < scaled - lower).mul_(spacing)
    return torch.where(x.abs() <= info.max, rounded, x).to(dtype)  # what is infinite, NaN or too large stays so

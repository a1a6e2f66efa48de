"""Whether the Triton kernels compute the tiles: on CUDA where Triton imports, after they have agreed with the torch tiles once.

The first use of a device, a dtype and a precision computes a small batch with both, which compiles the kernels and makes the
host wait. If the results differ, or if the kernels do not compile, a warning says so, and the torch tiles compute everything
from then on. UNISONO_TRITON=0 in the environment asks for the torch tiles; it is read at every call. Ranks need not choose
alike: both kinds of tiles exchange the same messages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from unisono.collectives.triton_choice import agrees_once, why_no_triton
from unisono.contrastive.tiled.block_kernels import BlockKernels, LogsAndGrads
from unisono.contrastive.tiled.device_tiles import DeviceTiles, tf32_is_allowed
from unisono.contrastive.tiled.tiles import ColumnBlock, LogSumExp, TilePlan

if TYPE_CHECKING:
    from unisono.contrastive.tiled.triton_tiles import TritonTiles

_problems: dict[tuple[torch.device, torch.dtype, str, bool], str] = {}


def triton_tiles(device: torch.device, dtype: torch.dtype, plan: TilePlan, fake: bool) -> type[TritonTiles] | None:
    """Return the class of the Triton tiles if it may compute `plan` with features of `dtype`; None asks for the torch tiles.

    `fake`: the features are fake tensors, with which nothing can be compared.
    """
    if why_no_triton():
        return None
    from unisono.contrastive.tiled.triton_tiles import DTYPES, MOST_DIAGONALS, TritonTiles

    if dtype not in DTYPES or len(plan.excluded_diagonals) > MOST_DIAGONALS:
        return None
    key = device, dtype, plan.precision, dtype == torch.float32 and tf32_is_allowed()
    instead = f"unisono.contrastive: torch computes the tiles of {dtype} on {device}, which is slower and takes more memory"

    def compare() -> str:
        return largest_difference(TritonTiles, device, dtype, plan)

    return TritonTiles if fake or agrees_once(_problems, key, device, compare, instead=instead) else None


def largest_difference(kernels: type[BlockKernels], device: torch.device, dtype: torch.dtype, plan: TilePlan) -> str:
    """Compute a small batch with `kernels` and with the torch tiles. Describe the first result that differs, if any does."""
    found, expected = (_results(each, device, dtype, plan.precision) for each in (kernels, DeviceTiles))
    rounded = dtype == torch.float32 and (plan.precision == "fast" or tf32_is_allowed())
    bits = 7 if rounded else {"fast": 6, "exact": 11}[plan.precision]  # 16-bit slopes of "fast" may be rounded either way
    for name, truth in expected.items():
        finite = truth.isfinite()
        difference = torch.where(finite, (found[name] - truth).abs(), 0).amax()
        size = torch.where(finite, truth.abs(), 0).amax()
        if not bool(found[name].isfinite().eq(finite).all()) or not bool(difference <= size * 2.0**-bits):
            return f"{name} differs by {float(difference):.3g} of {float(size):.3g}"
    return ""


def _results(kind: type[BlockKernels], device: torch.device, dtype: torch.dtype, precision: str) -> dict[str, Tensor]:
    """All that the kernels give for two plans. Plain logits have larger tiles, and features of this width need no mask."""
    with_ids = TilePlan(
        (LogSumExp(1.5, "other"), LogSumExp(1.0, "all")),
        same_id_sums=True,
        sizes=(280,),
        precision=precision,  # type: ignore[arg-type]
    )
    plain = TilePlan(sizes=(280,), precision=precision)  # type: ignore[arg-type]
    results = _results_of_plan(kind, device, dtype, with_ids, width=72)
    return results | {f"{name} (plain)": each for name, each in _results_of_plan(kind, device, dtype, plain, width=128).items()}


def _results_of_plan(
    kind: type[BlockKernels], device: torch.device, dtype: torch.dtype, plan: TilePlan, width: int
) -> dict[str, Tensor]:
    """All that the kernels give for 150 rows and 280 columns, 150 of which are this rank's own."""
    generator = torch.Generator("cpu").manual_seed(0)
    numbers = torch.randn(280, width, generator=generator, device="cpu", dtype=torch.float32)
    columns = torch.nn.functional.normalize(numbers).to(device, dtype)
    x = torch.roll(columns, 1, 0)[:150].contiguous()
    ids = torch.randint(40, (280,), generator=generator, device="cpu").to(device) if plan.needs_ids else None
    scale = torch.tensor(5.0, device=device, dtype=torch.float32)

    def line(start: float, stop: float, size: int) -> Tensor:
        return torch.linspace(start, stop, size, device=device, dtype=torch.float32)

    block = ColumnBlock(columns, ids, 128)
    kernels = kind(x, scale, None if ids is None else ids[128:278], 150, plan)
    found = kernels.statistics(block, keep=False)
    assert found.columns is not None and found.diagonal is not None
    results = {"a log-sum-exp of rows": found.rows, "a log-sum-exp of columns": found.columns, "a logit": found.diagonal}
    results["a sum over ranks"] = kernels.join_ranks(torch.stack([found.columns.T, found.columns.T / 2]))
    if not plan.needs_ids:
        losses = kernels.softmax_losses(found.rows, found.columns[:, 128:278], found.diagonal, wants_slopes=True)
        results["a loss"], results["a slope"], results["a slope of the diagonal"] = losses
    dx, dy = (each.new_zeros(each.shape, dtype=torch.float32) for each in (x, columns))
    known = len(plan.log_sum_exps) + plan.same_id_sums
    grads = [line(-1, 2, each[:known].numel()).view(known, -1) for each in (found.rows, found.columns)]
    diagonal_grads = grads[0][known // 2]
    if plan.same_id_sums:  # the number of pairs has no gradient
        grads = [torch.cat([each, each[:1]]) for each in grads]
    by_row, by_column = map(LogsAndGrads, (found.rows, found.columns), grads)
    kernels.gradients(block, by_row, by_column, diagonal_grads, kept=(), dx=dx, accumulate=True, dy=dy)
    results |= {"the gradient of x": dx.clone(), "the gradient of y": dy.clone(), "a sum": kernels.sum_of_products(dx)}
    weights = (line(0.5, 2, 150), line(0.5, 2, 280)) if plan.needs_ids else None
    sigmoid = kernels.sigmoid(block, -scale, weights, masked=False, dx=dx, accumulate=False, dy=dy)
    names = ("the sum of the sigmoid losses", "the gradient of the bias", "the losses of rows", "the losses of columns")
    results |= {name: each for name, each in zip(names, sigmoid, strict=True) if each is not None}
    return results | {"the sigmoid gradient of x": dx, "the sigmoid gradient of y": dy}

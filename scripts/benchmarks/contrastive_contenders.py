"""What the benchmark of the contrastive losses compares. Made on the ranks; what is ours is called as a user would."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import normalize, softplus
from torch.utils.checkpoint import checkpoint

from unisono.contrastive import clip_loss, sigmoid_loss

Family = Literal["CLIP", "sigmoid"]

WORLD_SIZE = 2
WIDTH = 512  # of the features
CHUNK = 512  # rows, in the chunked SigLIP
LIMIT_ROWS = 4096  # the limit of more rows than these is taken from a matmul of so many: the logits would not fit

LIMIT = "the limit: three matmuls"
CLIP_AUTO = "clip_loss"
CLIP_GATHER = "clip_loss, gather, logits recomputed"
CLIP_RING = "clip_loss, ring, logits recomputed"
SIGMOID = "sigmoid_loss"
OPEN_CLIP_LOCAL = "open_clip local"
OPEN_CLIP_GLOBAL = "open_clip global"
SIGLIP = "open_clip SigLIP"
SIGLIP_CHUNKS = "SigLIP in chunks of 512 (as open_clip PR 1145)"  # autograd keeps the logits of all chunks
SIGLIP_RECOMPUTED = "SigLIP in chunks of 512 (as open_clip PR 1214)"  # the backward forms them once more


class Inputs(NamedTuple):
    """One rank's share of the batch, as leaves: rows of length 1, the partners alike but not the same."""

    x: Tensor
    y: Tensor
    scale: Tensor
    bias: Tensor

    @classmethod
    def make(cls, rows: int, family: Family) -> Inputs:
        draw = torch.Generator().manual_seed(rows * 100 + dist.get_rank())
        x, noise = torch.randn(2, rows, WIDTH, generator=draw)
        features = [normalize(f).requires_grad_() for f in (x, x + 2 * noise)]
        scale, bias = (1 / 0.07, 0.0) if family == "CLIP" else (10.0, -10.0)  # where training starts
        return cls(*features, torch.tensor(scale, requires_grad=True), torch.tensor(bias, requires_grad=True))

    def forget_gradients(self) -> None:
        for leaf in self:
            leaf.grad = None


class Contender(NamedTuple):
    """`make` gives the loss, a function of Inputs. `held` estimates the floats it holds at once, of b rows and N columns."""

    family: Family
    make: Callable[[], Callable[[Inputs], Tensor]]
    is_ours: bool = False
    held: Callable[[int, int], int] = lambda b, n: 0

    def gigabytes(self, rows: int) -> float:
        return 4e-9 * self.held(rows, rows * WORLD_SIZE)


def ours(exchange: Any, logits: Any = "recompute") -> Callable[[], Callable[[Inputs], Tensor]]:
    return lambda: lambda i: clip_loss(i.x, i.y, i.scale, exchange=exchange, logits=logits)


def ours_sigmoid() -> Callable[[Inputs], Tensor]:
    return lambda i: sigmoid_loss(i.x, i.y, i.scale, i.bias)


def open_clip(local: bool) -> Callable[[], Callable[[Inputs], Tensor]]:
    def make() -> Callable[[Inputs], Tensor]:
        loss = open_clip_losses().ClipLoss(
            local_loss=local, gather_with_grad=True, rank=dist.get_rank(), world_size=dist.get_world_size()
        )
        return lambda i: loss(i.x, i.y, i.scale)

    return make


def siglip(kind: Literal["whole", "chunks", "recomputed"]) -> Callable[[], Callable[[Inputs], Tensor]]:
    def make() -> Callable[[Inputs], Tensor]:
        plain = open_clip_losses().SigLipLoss
        made = plain if kind == "whole" else in_chunks(plain, recompute=kind == "recomputed")
        loss = made(rank=dist.get_rank(), world_size=dist.get_world_size())
        return lambda i: loss(i.x, i.y, i.scale, i.bias)

    return make


@cache
def open_clip_losses() -> Any:
    """open_clip's loss.py alone: to import the package takes 15 s, for its models."""
    warnings.simplefilter("ignore", FutureWarning)  # torch.distributed.nn is deprecated
    package = importlib.util.find_spec("open_clip")
    if package is None or not package.submodule_search_locations:
        raise ImportError("open_clip is not installed: ./scripts/setup does it")
    path = Path(package.submodule_search_locations[0]) / "loss.py"
    spec = importlib.util.spec_from_file_location("open_clip_loss", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def in_chunks(plain: Any, recompute: bool) -> Any:
    """open_clip's SigLipLoss with the loss of two ranks' features taken some rows at a time, as its pull requests describe.

    Release 3.3.0 has neither. PR 1145 (merged after it) takes the rows in chunks, and autograd keeps the logits of all; PR
    1214 (open) forms each chunk once more in the backward instead. The exchange between ranks is that of the release.
    """

    def chunk_loss(x: Tensor, partners: Tensor | None, y: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        x = scale * x
        logits = x @ y.T
        logits += bias
        loss = softplus(logits).sum()
        return loss if partners is None else loss - ((x * partners).sum() + bias * x.shape[0])

    class InChunks(plain):  # type: ignore[misc]
        def _loss(self, x: Tensor, y: Tensor, scale: Tensor, bias: Tensor, negative_only: bool = False) -> Tensor:
            total = x.new_zeros(())
            for start in range(0, x.shape[0], CHUNK):
                rows = slice(start, start + CHUNK)
                arguments = (x[rows], None if negative_only else y[rows], y, scale, bias)
                total = total + (
                    checkpoint(chunk_loss, *arguments, use_reentrant=False) if recompute else chunk_loss(*arguments)
                )
            return total / x.shape[0]

    return InChunks


# The first of each family is what the others must agree with and what they are a ratio to.
CONTENDERS: dict[str, Contender] = {
    OPEN_CLIP_LOCAL: Contender("CLIP", open_clip(local=True), held=lambda b, n: 4 * b * n),
    CLIP_AUTO: Contender("CLIP", ours("auto", "auto"), is_ours=True),
    CLIP_GATHER: Contender("CLIP", ours("gather"), is_ours=True),
    CLIP_RING: Contender("CLIP", ours("ring"), is_ours=True),
    OPEN_CLIP_GLOBAL: Contender("CLIP", open_clip(local=False), held=lambda b, n: 4 * n * n),
    SIGLIP: Contender("sigmoid", siglip("whole"), held=lambda b, n: 4 * b * n),
    SIGMOID: Contender("sigmoid", ours_sigmoid, is_ours=True),
    SIGLIP_CHUNKS: Contender("sigmoid", siglip("chunks"), held=lambda b, n: b * n),
    SIGLIP_RECOMPUTED: Contender("sigmoid", siglip("recomputed")),
}
PEERS: dict[Family, str] = {"CLIP": OPEN_CLIP_LOCAL, "sigmoid": SIGLIP}


def limit(rows: int) -> tuple[Callable[[], None], float]:
    """The three matmuls that any exact loss of `rows` on this rank needs, and the factor from their time to that of `rows`.

    The logits, and the gradients of x and of all ranks' y; into outputs that are allocated once.
    """
    b = min(rows, LIMIT_ROWS)
    n = b * WORLD_SIZE
    draw = torch.Generator().manual_seed(0)
    x, y = (normalize(torch.randn(size, WIDTH, generator=draw)) for size in (b, n))
    logits, dx, dy = torch.zeros(b, n), torch.zeros_like(x), torch.zeros_like(y)

    def call() -> None:
        torch.mm(x, y.T, out=logits)
        torch.mm(logits, y, out=dx)
        torch.mm(logits.T, x, out=dy)

    return call, (rows / b) ** 2


def limit_flops(rows: int) -> float:
    return 3.0 * 2 * rows * rows * WORLD_SIZE * WIDTH

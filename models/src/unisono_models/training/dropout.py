"""Dropout whose masks belong to samples: a sample loses the same units on whichever rank it is, and in a restarted run.

torch's own draws from a generator, one call after the other, so that the mask of a sample depends on its row and its rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from unisono_models.training.randomness import draw, rows_of, stream_of


class _Now:
    """The samples of the forward that is running: an attribute, for torch.compile reads such anew at each call."""

    rows: Tensor | None = None


_now = _Now()


def dropout_rows(seed: int, step: int, index: Tensor) -> Tensor:
    """What the masks of these samples are a function of in this step: one number for each."""
    return rows_of(seed, "dropout", step, index)


@contextmanager
def dropout_for(rows: Tensor | None) -> Iterator[None]:
    """Inside, the layers of `own_dropout` draw masks for these `dropout_rows`. Dim 0 of their inputs is the batch.

    The backward of a checkpointed block runs forwards again: see `remembered`.
    """
    before, _now.rows = _now.rows, rows
    try:
        yield
    finally:
        _now.rows = before


def remembered() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The `context_fn` of torch.utils.checkpoint that gives the second forward the samples of the first."""
    rows = _now.rows
    return nullcontext(), dropout_for(rows)


def own_dropout(module: nn.Module) -> nn.Module:
    """Replace dropout and drop-path layers in `module`, in place, by ones whose masks belong to samples. Returns it.

    Known by what they are: nn.Dropout and its kind by class, timm's and transformers' DropPath by name. Dropout that a model
    calls as a function (in scaled_dot_product_attention) has no layer: give such models an attention dropout of 0.
    """
    for name, child in list(module.named_modules()):
        rate = _rate(child)
        if not rate:  # attention layers read the rate of theirs, which stays as it is if it is 0
            continue
        parent = module.get_submodule(name.rpartition(".")[0])
        whole = type(child).__name__.endswith("DropPath")
        parent.register_module(name.rpartition(".")[2], SampleDropout(rate, name, whole=whole).train(child.training))
    return module


def _rate(layer: nn.Module) -> float | None:
    if isinstance(layer, nn.modules.dropout._DropoutNd):
        return layer.p
    if type(layer).__name__.endswith("DropPath"):
        return float(layer.drop_prob)  # type: ignore[arg-type]
    return None


class SampleDropout(nn.Module):
    """Sets units to zero with probability `rate`, or all of a sample's (`whole`), and scales the others by 1 / (1 - rate).

    `stream`: a name that tells this layer from the others.
    """

    def __init__(self, rate: float, stream: str, *, whole: bool = False) -> None:
        super().__init__()
        if not 0 <= rate < 1:
            raise ValueError(f"SampleDropout: rate: {rate} is not in [0, 1)")
        self.rate, self.stream, self.whole = rate, stream, whole
        self.register_buffer("number", torch.tensor(stream_of(stream)), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.rate == 0:
            return x
        rows = _now.rows
        if rows is None:
            raise RuntimeError(
                f"SampleDropout {self.stream!r}: in training mode it needs to know the samples: dropout_for(...)"
            )
        if not len(rows):  # a rank without samples may run on a row of its own, to stay in step
            return x
        if len(x) != len(rows):
            raise ValueError(
                f"SampleDropout {self.stream!r}: an input of {len(x)} rows for {len(rows)} samples: dim 0 is the batch"
            )
        shape = (1,) * (x.ndim - 1) if self.whole else x.shape[1:]
        kept = draw(rows, self.get_buffer("number"), shape) >= self.rate
        return x * (kept / (1 - self.rate)).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.rate}, {self.stream!r}, whole={self.whole}"

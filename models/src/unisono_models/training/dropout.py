"""Dropout whose masks belong to samples: a sample loses the same units on whichever rank it is, and in a restarted run.

torch's own draws from a generator, one call after the other, so that the mask of a sample depends on its row and its rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from torch import Tensor, nn

from unisono_models.training.randomness import uniform


@dataclass(frozen=True)
class Samples:
    """Which samples the rows of a batch are, and in which step: what masks are a function of."""

    seed: int
    step: int
    index: Tensor


_samples: ContextVar[Samples | None] = ContextVar("unisono_samples", default=None)


@contextmanager
def dropout_for(samples: Samples | None) -> Iterator[None]:
    """Inside, the layers of `own_dropout` draw masks for these samples. The first dimension of their inputs is the batch.

    The backward of a checkpointed block runs forwards again: see `remembered`.
    """
    before = _samples.set(samples)
    try:
        yield
    finally:
        _samples.reset(before)


def remembered() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The `context_fn` of torch.utils.checkpoint that gives the second forward the samples of the first."""
    now = _samples.get()
    return dropout_for(now), dropout_for(now)


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
        parent.register_module(name.rpartition(".")[2], SampleDropout(rate, name, whole=whole))
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

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.rate == 0:
            return x
        samples = _samples.get()
        if samples is None:
            raise RuntimeError(
                f"SampleDropout {self.stream!r}: in training mode it needs to know the samples: dropout_for(...)"
            )
        if not len(samples.index):  # a rank without samples may run on a row of its own, to stay in step
            return x
        if len(x) != len(samples.index):
            raise ValueError(
                f"SampleDropout {self.stream!r}: an input of {len(x)} rows for {len(samples.index)} samples: dim 0 is the batch"
            )
        shape = (1,) * (x.ndim - 1) if self.whole else x.shape[1:]
        kept = uniform(samples.seed, self.stream, samples.step, samples.index, shape) >= self.rate
        return x * (kept / (1 - self.rate)).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.rate}, {self.stream!r}, whole={self.whole}"

"""Random numbers as a pure function of (seed, stream, step, sample), and dropout that uses them.

There is no state, so neither the number of ranks nor a restart changes them. torch's own dropout draws from a generator, one
call after the other: there the mask of a sample depends on its row and its rank.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

_WORD = (1 << 64) - 1
_IN_CACHE = 1 << 15  # numbers that fit into a CPU's cache


def derive_seed(seed: int, *path: int | str) -> int:
    """Hash `seed` and a path of names and numbers to 64 bits, the same on every machine.

    Example:
        >>> derive_seed(0, "order", 3) == derive_seed(0, "order", 3) != derive_seed(0, "order", 4)
        True
    """
    text = "/".join(str(part) for part in (seed, *path))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def make_generator(seed: int, *path: int | str) -> torch.Generator:
    """Make a CPU generator for `seed` and a path, for what every rank draws alike, such as the order of an epoch."""
    return torch.Generator().manual_seed(derive_seed(seed, *path))


def uniform(seed: int, stream: str, step: int, index: Tensor, shape: Sequence[int] = ()) -> Tensor:
    """Draw numbers in [0, 1), float32, of shape (len(index), *shape). Row i depends only on (seed, stream, step, index[i]).

    So a sample gets the same numbers on every rank and in every row. `index`: int64, on any device.

    Example:
        >>> a = uniform(0, "noise", 7, torch.tensor([3, 5]), (2,))
        >>> b = uniform(0, "noise", 7, torch.tensor([5]), (2,))
        >>> bool((a[1] == b[0]).all())
        True
    """
    rows = sample_keys(seed, stream, step, index)
    return uniform_from_keys(rows, rows.new_zeros(()), shape)


def sample_keys(seed: int, stream: str, step: int, index: Tensor) -> Tensor:
    """Return a key for each sample: an int64 that depends on (seed, stream, step, sample), for `uniform_from_keys`."""
    return _mix(index * _signed(0xD1342543DE82EF95) + _signed(derive_seed(seed, stream, step)))


def stream_key(name: str) -> int:
    """Return the key of a stream for `uniform_from_keys`."""
    return _signed(derive_seed(0, name))


def uniform_from_keys(rows: Tensor, stream: Tensor, shape: Sequence[int]) -> Tensor:
    """Draw numbers in [0, 1), of shape (len(rows), *shape), for the `sample_keys` in `rows`.

    stream: a tensor with one `stream_key`, which tells draws from the same rows apart. A plain number would be a constant to
    torch.compile, which would then compile once for each stream.
    """
    numbers: Tensor = _numbers(rows, stream, math.prod(shape))
    return numbers.view(len(rows), *shape)


# One opaque operation to the compiler: inductor would treat products of large constants as indices, and they overflow.
@torch.library.custom_op("unisono_models::numbers", mutates_args=())
def _numbers(rows: Tensor, stream: Tensor, count: int) -> Tensor:
    cells = torch.arange(count, device=rows.device) * _signed(0x9E3779B97F4A7C15)
    keys, found = (rows + stream)[:, None], torch.empty(len(rows), count, device=rows.device)
    # On a CPU, as many at a time as fit into its cache: three times as fast.
    step = max(1, _IN_CACHE // max(count, 1)) if rows.device.type == "cpu" else max(1, len(rows))
    for some, into in zip(keys.split(step), found.split(step), strict=True):
        into.copy_(_mix_(some + cells).bitwise_and_(0xFFFFFF))
    return found.mul_(2**-24)


@_numbers.register_fake
def _(rows: Tensor, stream: Tensor, count: int) -> Tensor:
    return rows.new_empty(rows.shape[0], count, dtype=torch.float32)  # len() would make it a constant


def normal(seed: int, stream: str, step: int, index: Tensor, shape: Sequence[int] = ()) -> Tensor:
    """Draw standard normal numbers. The arguments are those of `uniform`."""
    pairs = uniform(seed, stream, step, index, (2, *shape))
    radius = torch.sqrt(-2 * torch.log1p(-pairs[:, 0]))
    return radius * torch.cos(2 * math.pi * pairs[:, 1])


def _mix(x: Tensor) -> Tensor:
    """Apply the finaliser of splitmix64 (Steele et al. 2014), in int64 that wraps."""
    return _mix_(x.clone())


def _mix_(x: Tensor) -> Tensor:
    """Apply it in place."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        shifted = (x >> shift).bitwise_and_(
            (1 << (64 - shift)) - 1
        )  # the mask removes the sign bits that the shift of an int64 adds
        x.bitwise_xor_(shifted)
        if factor != 1:
            x.mul_(_signed(factor))
    return x


def _signed(x: int) -> int:
    x &= _WORD
    return x - (1 << 64) if x >> 63 else x


class _Current:
    """The keys of the samples of the current forward: an attribute, since torch.compile reads attributes at each call."""

    rows: Tensor | None = None


_current = _Current()


def dropout_keys(seed: int, step: int, index: Tensor) -> Tensor:
    """Return the key of the dropout masks of each sample in this step."""
    return sample_keys(seed, "dropout", step, index)


@contextmanager
def use_dropout_keys(rows: Tensor | None) -> Iterator[None]:
    """Make the layers of `replace_dropout` draw masks for these `dropout_keys`. Dim 0 of their inputs is the batch.

    A context manager. The backward of a checkpointed block runs its forward again: see `recompute_with_same_dropout`.
    """
    before = _current.rows
    _current.rows = rows
    try:
        yield
    finally:
        _current.rows = before


def recompute_with_same_dropout() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Give the recomputed forward the dropout keys of the first one: a `context_fn` for torch.utils.checkpoint."""
    rows = _current.rows
    return nullcontext(), use_dropout_keys(rows)


def replace_dropout(module: nn.Module) -> nn.Module:
    """Replace dropout and drop-path layers in `module`, in place, by layers whose masks depend on samples. Return `module`.

    nn.Dropout and its variants are found by class, timm's and transformers' DropPath by name. Dropout that a model calls as a
    function (in scaled_dot_product_attention) is no layer: give such models an attention dropout of 0.
    """
    for name, child in list(module.named_modules()):
        rate = _rate(child)
        if not rate:  # a layer with rate 0 stays: attention layers read its rate
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
    """Sets units to zero with probability `rate`, or all units of a sample (`whole`), and scales the rest by 1 / (1 - rate).

    `stream`: the name of this layer, so that layers draw different masks.
    """

    def __init__(self, rate: float, stream: str, *, whole: bool = False) -> None:
        super().__init__()
        if not 0 <= rate < 1:
            raise ValueError(f"SampleDropout: rate: {rate} is not in [0, 1)")
        self.rate, self.stream, self.whole = rate, stream, whole
        self.register_buffer("number", torch.tensor(stream_key(stream)), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.rate == 0:
            return x
        rows = _current.rows
        if rows is None:
            raise RuntimeError(f"SampleDropout {self.stream!r}: in training mode it needs use_dropout_keys(...)")
        if not len(rows):  # a rank without samples may run a dummy row, for its collectives
            return x
        if len(x) != len(rows):
            raise ValueError(
                f"SampleDropout {self.stream!r}: the input has {len(x)} rows for {len(rows)} samples: dim 0 has to be the batch"
            )
        shape = (1,) * (x.ndim - 1) if self.whole else x.shape[1:]
        kept = uniform_from_keys(rows, self.get_buffer("number"), shape) >= self.rate
        return x * (kept / (1 - self.rate)).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.rate}, {self.stream!r}, whole={self.whole}"

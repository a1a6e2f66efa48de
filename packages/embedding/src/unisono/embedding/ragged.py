"""Bags of ids: the input of a collection, one Ragged for each feature. Other forms of input are read here, too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Ragged(NamedTuple):
    """Bags of different lengths: bag b is values[offsets[b] : offsets[b + 1]]. A batch of n bags has n + 1 offsets.

    `values` are ids, or rows in the output of a table without mode. `weights` has one number for each id, for mode "sum".

    Example:
        >>> Ragged.from_lists([[7, 8], [], [9]])
        Ragged(values=tensor([7, 8, 9]), offsets=tensor([0, 2, 2, 3]), weights=None)
    """

    values: Tensor
    offsets: Tensor
    weights: Tensor | None = None

    def lengths(self) -> Tensor:
        return self.offsets.diff()

    @classmethod
    def from_lists(cls, bags: Sequence[Sequence[int]], weights: Sequence[Sequence[float]] | None = None) -> Ragged:
        values = torch.tensor([number for bag in bags for number in bag], dtype=torch.int64)
        lengths = torch.tensor([0, *(len(bag) for bag in bags)], dtype=torch.int64)
        flat = None if weights is None else torch.tensor([number for bag in weights for number in bag])
        return cls(values, lengths.cumsum(0), flat)

    @classmethod
    def from_lengths(cls, values: Tensor, lengths: Tensor, weights: Tensor | None = None) -> Ragged:
        return cls(values, torch.nn.functional.pad(lengths.to(torch.int64).cumsum(0), (1, 0)), weights)

    @classmethod
    def from_dense(cls, ids: Tensor, weights: Tensor | None = None) -> Ragged:
        """Make bags of equal length from (bags, ids of each), or from (bags,) with one id each."""
        offsets = torch.arange(ids.shape[0] + 1, device=ids.device) * (ids.shape[1] if ids.ndim > 1 else 1)
        return cls(ids.reshape(-1), offsets, None if weights is None else weights.reshape(-1))

    @classmethod
    def from_nested(cls, ids: Tensor, weights: Tensor | None = None) -> Ragged:
        """Make bags from a jagged torch.nested tensor of ids, and one of weights with the same lengths.

        Example:
            >>> nested = torch.nested.nested_tensor([torch.tensor([7, 8]), torch.tensor([9])], layout=torch.jagged)
            >>> Ragged.from_nested(nested).offsets
            tensor([0, 2, 3])
        """
        if ids.layout != torch.jagged:
            raise ValueError(f"Ragged.from_nested: ids: expected a nested tensor with layout=torch.jagged, got {ids.layout}")
        if ids.lengths() is not None:  # type: ignore[attr-defined]  # with holes: torch.nested.narrow
            ids = ids.contiguous()
        offsets: Tensor = ids.offsets()  # type: ignore[attr-defined]
        return cls(ids.values(), offsets, None if weights is None else weights.values())

    @classmethod
    def from_keyed_jagged(cls, features: Any, *, names: Sequence[str] | None = None) -> dict[str, Ragged]:
        """Make a dict of features from TorchRec's KeyedJaggedTensor: of all its keys, or of `names` only."""
        found = features.to_dict()
        if missing := [name for name in names or () if name not in found]:
            raise KeyError(f"Ragged.from_keyed_jagged: names: {missing[0]!r} is no key; the keys are {[*found]}")
        found = found if names is None else {name: found[name] for name in names}
        return {name: cls(x.values(), x.offsets().to(torch.int64), x.weights_or_none()) for name, x in found.items()}


def as_ragged(bags: Ragged | Tensor) -> Ragged:
    """Read a feature in any of the forms that a collection takes. Raises TypeError for other forms."""
    if isinstance(bags, Ragged):
        return bags
    if isinstance(bags, Tensor) and bags.layout == torch.jagged:
        return Ragged.from_nested(bags)
    if isinstance(bags, Tensor) and bags.layout == torch.strided and not bags.is_nested and bags.ndim in (1, 2):
        return Ragged.from_dense(bags)
    got = f"{bags.layout} of shape {tuple(bags.shape)}" if isinstance(bags, Tensor) else type(bags).__name__
    raise TypeError(f"a feature must be a Ragged, a jagged tensor, or a tensor of one or two dimensions, got {got}")


def ragged_error(feature: str, ragged: Ragged) -> str:
    """Say what is wrong with one feature's bags; "" if nothing is. Reads no numbers: on a GPU the host would wait for them."""
    values, offsets, weights = ragged
    for name, x in (("values", values), ("offsets", offsets)):
        if not isinstance(x, Tensor) or x.dtype not in (torch.int32, torch.int64):
            got = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            return f"{feature}: {name}: expected int32 or int64 numbers, got {got}"
        if x.ndim != 1:
            return f"{feature}: {name}: expected one dimension, got shape {tuple(x.shape)}"
    if offsets.numel() == 0:
        return f"{feature}: offsets must have one number more than there are bags, got none"
    if weights is not None and (not isinstance(weights, Tensor) or weights.shape != values.shape):
        shape = tuple(weights.shape) if isinstance(weights, Tensor) else type(weights).__name__
        return f"{feature}: weights: expected {values.numel()}, one for each id, got {shape}"
    if weights is not None and not weights.is_floating_point():
        return f"{feature}: weights: expected floating point numbers, got {weights.dtype}"
    return ""

"""Bags of ids, the input of a collection: a Ragged for each feature, or one KeyedRagged. Other forms are read here, too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
        """Make a dict of features from TorchRec's KeyedJaggedTensor: of all its keys, or of `names` only.

        To look up all keys, give the KeyedJaggedTensor itself to the collection.
        """
        found = features.to_dict()
        if missing := [name for name in names or () if name not in found]:
            raise KeyError(f"Ragged.from_keyed_jagged: names: {missing[0]!r} is no key; the keys are {[*found]}")
        found = found if names is None else {name: found[name] for name in names}
        return {name: cls(x.values(), x.offsets().to(torch.int64), x.weights_or_none()) for name, x in found.items()}


class KeyedRagged(NamedTuple):
    """The bags of several features in one tensor: the form of TorchRec's KeyedJaggedTensor. All have equally many bags.

    `values` has the ids feature after feature, bag after bag; `lengths` those of the bags in the same order, so feature k has
    the lengths from k * bags on; `weights` one number for each id. On a GPU a collection looks them up without a loop over
    features, and copies no ids that are in its order already.

    Example:
        >>> batch = KeyedRagged(("user", "word"), torch.tensor([3, 5, 7, 8, 9]), torch.tensor([1, 1, 0, 3]))
        >>> batch.to_dict()["word"]
        Ragged(values=tensor([7, 8, 9]), offsets=tensor([0, 0, 3]), weights=None)
    """

    names: tuple[str, ...]
    values: Tensor
    lengths: Tensor
    weights: Tensor | None = None

    @property
    def bag_count(self) -> int:
        """How many bags each feature has."""
        return self.lengths.numel() // max(len(self.names), 1)

    @classmethod
    def from_dict(cls, features: Mapping[str, Ragged]) -> KeyedRagged:
        """Join features, which must have equally many bags, and all weights or none."""
        bags = list(features.values())
        weights = [x.weights for x in bags if x.weights is not None]
        if len({x.offsets.numel() for x in bags}) != 1 or len(weights) not in (0, len(bags)):
            raise ValueError("KeyedRagged.from_dict: the features must have equally many bags, and all weights or none")
        values, lengths = torch.cat([x.values for x in bags]), torch.stack([x.offsets for x in bags]).diff().flatten()
        return cls(tuple(features), values, lengths, torch.cat(weights) if weights else None)

    @classmethod
    def from_keyed_jagged(cls, features: Any) -> KeyedRagged:
        """Read TorchRec's KeyedJaggedTensor without a copy. One whose keys have different numbers of bags raises ValueError."""
        if not all(hasattr(features, name) for name in ("keys", "values", "lengths", "weights_or_none")):
            kind = type(features).__name__
            raise TypeError(
                f"features: expected a dict from feature to Ragged or Tensor, a KeyedRagged or a KeyedJaggedTensor, got {kind}"
            )
        if getattr(features, "variable_stride_per_key", lambda: False)():
            raise ValueError(
                "KeyedRagged.from_keyed_jagged: the keys have different numbers of bags: use Ragged.from_keyed_jagged"
            )
        return cls(tuple(features.keys()), features.values(), features.lengths(), features.weights_or_none())

    def to_dict(self) -> dict[str, Ragged]:
        """The features one by one, as views. On a GPU the host waits for their numbers of ids."""
        ends = torch.nn.functional.pad(self.lengths.to(torch.int64).cumsum(0), (1, 0))
        edges: list[int] = ends[:: self.bag_count].tolist() if self.bag_count else [0] * (len(self.names) + 1)
        found = {}
        for k, name in enumerate(self.names):
            ids = slice(edges[k], edges[k + 1])
            offsets = ends[k * self.bag_count : (k + 1) * self.bag_count + 1] - edges[k]
            found[name] = Ragged(self.values[ids], offsets, None if self.weights is None else self.weights[ids])
        return found


def as_keyed(features: object) -> KeyedRagged:
    """Read a KeyedRagged, or TorchRec's KeyedJaggedTensor. Raises TypeError or ValueError for anything else."""
    if isinstance(features, KeyedRagged):
        return features._replace(names=tuple(features.names))
    return KeyedRagged.from_keyed_jagged(features)


def as_dict(features: Any) -> dict[str, Ragged]:
    """Read features in any of the forms that a collection takes, one by one. Raises TypeError or ValueError for others."""
    if isinstance(features, Mapping):
        return {name: as_ragged(x) for name, x in features.items()}
    keyed = as_keyed(features)
    if not torch.compiler.is_compiling() and (error := keyed_ragged_error(keyed) or lengths_error(keyed)):
        raise ValueError(error)
    return keyed.to_dict()


def lengths_error(batch: KeyedRagged) -> str:
    """Say what is wrong with the lengths of the bags; "" if nothing is. On a GPU the host waits for them."""
    count, shortest = int(batch.lengths.sum()), int(batch.lengths.min()) if batch.lengths.numel() else 0
    if count == batch.values.numel() and shortest >= 0:
        return ""
    found = f"they add up to {count}, and the least is {shortest}"
    return f"KeyedRagged: lengths must add up to the number of values, {batch.values.numel()}; {found}"


def keyed_ragged_error(batch: KeyedRagged) -> str:
    """Say what is wrong with the forms of the tensors; "" if nothing is. Reads no numbers."""
    names, values, lengths, weights = batch
    if error := _tensors_error("KeyedRagged", {"values": values, "lengths": lengths}, weights):
        return error
    if lengths.numel() % max(len(names), 1):
        return f"KeyedRagged: lengths: {lengths.numel()} are not the same number for each of {len(names)} features"
    return f"KeyedRagged: names: {list(names)} has a name twice" if len(set(names)) < len(names) else ""


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
    if error := _tensors_error(feature, {"values": values, "offsets": offsets}, weights):
        return error
    return f"{feature}: offsets must have one number more than there are bags, got none" if offsets.numel() == 0 else ""


def _tensors_error(where: str, numbers: Mapping[str, Tensor], weights: Tensor | None) -> str:
    """`numbers`: tensors of integers, of which the first has the ids."""
    for name, x in numbers.items():
        if not isinstance(x, Tensor) or x.dtype not in (torch.int32, torch.int64):
            got = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            return f"{where}: {name}: expected int32 or int64 numbers, got {got}"
        if x.ndim != 1:
            return f"{where}: {name}: expected one dimension, got shape {tuple(x.shape)}"
    values = next(iter(numbers.values()))
    if weights is not None and (not isinstance(weights, Tensor) or weights.shape != values.shape):
        shape = tuple(weights.shape) if isinstance(weights, Tensor) else type(weights).__name__
        return f"{where}: weights: expected {values.numel()}, one for each id, got {shape}"
    if weights is not None and not weights.is_floating_point():
        return f"{where}: weights: expected floating point numbers, got {weights.dtype}"
    return ""

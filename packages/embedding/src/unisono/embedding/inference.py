"""The tables of a trained EmbeddingCollection in one process, for inference: as they are, or with rows of 8 or 4 bits.

These modules do not communicate, and torch.export can export them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unisono.embedding.collection import EmbeddingCollection, Features, outputs_of, stack_error
from unisono.embedding.id_map import IdMap, IdMapCollection
from unisono.embedding.lookup.feature_errors import feature_name_error, number_error
from unisono.embedding.lookup.input_dist import IdOutOfRange, UnknownFeature
from unisono.embedding.ragged import Ragged, as_dict, ragged_error
from unisono.embedding.table import Mode, Table

Bits = Literal[4, 8]


def quantize(collection: EmbeddingCollection, bits: Bits = 8) -> "InferenceCollection":
    """Copy the tables with rows of whole numbers from 0 to 2^bits - 1. Each row has its own scale and lowest value.

    A value differs by at most half of its row's scale, which is about (highest - lowest value of the row) / (2^bits - 1). A row
    of width d takes d * bits / 8 + 4 bytes: d = 64 is 3.8 times (8 bits) and 7.1 times (4 bits) smaller than in float32.

    All ranks call; each gets all tables, gathered one after the other.

    Backward: none; the result is for inference.

    Example:
        >>> collection = EmbeddingCollection([Table("user", 100, 8)])
        >>> small = quantize(collection)
        >>> ids = {"user": torch.tensor([3, 5])}
        >>> torch.allclose(small(ids)["user"], collection(ids)["user"], atol=0.02)
        True
    """
    return _copy_tables(collection, bits)


@overload
def unshard(collection: EmbeddingCollection) -> "InferenceCollection": ...
@overload
def unshard(collection: IdMapCollection) -> "InferenceIdMaps": ...
def unshard(collection: EmbeddingCollection | IdMapCollection) -> "InferenceCollection | InferenceIdMaps":
    """Copy tables as they are, or the rows of all known ids: for inference in one process. All ranks call; each gets all.

    Backward: none; the result is for inference.

    Example:
        >>> collection = EmbeddingCollection([Table("user", 100, 8)])
        >>> ids = {"user": torch.tensor([3, 5])}
        >>> torch.equal(unshard(collection)(ids)["user"], collection(ids)["user"])
        True
    """
    return InferenceIdMaps(collection) if isinstance(collection, IdMapCollection) else _copy_tables(collection, None)


class InferenceCollection(nn.Module):
    """Looks up and pools as EmbeddingCollection does, with the same arguments and results, in one process.

    Make it by `quantize` or `unshard`; or make an empty one for `load_state_dict`. `forward(features, stack=True)` returns one
    tensor (bags, features, dim), with the features in the order of the dict.

    Args:
        tables: Those of the EmbeddingCollection.
        bits: 8 or 4 for quantized rows. None: rows of `dtype`.
        dtype: Of the results.

    torch.export exports it, with any numbers of bags and ids. Ids and offsets are checked in eager mode only.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        *,
        bits: Bits | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if bits not in (4, 8, None):
            raise ValueError(f"InferenceCollection: bits={bits!r} is none of 4, 8, None")
        dtype = dtype or torch.get_default_dtype()
        self.tables = nn.ModuleDict({table.name: InferenceTable(table, bits, dtype, device) for table in tables})
        self._tables, self._outputs = list(tables), outputs_of(tables)
        self._table_of = {
            output: name
            for feature, outputs in self._outputs.items()
            for output, name in zip(outputs, [t.name for t in tables if feature in t.features], strict=True)
        }

    def forward(self, features: Features, *, stack: bool = False) -> dict[str, Tensor | Ragged] | Tensor:
        checks = not torch.compiler.is_compiling()
        inputs = as_dict(features)
        if checks and (error := feature_name_error(inputs, self._outputs)):
            raise UnknownFeature(f"{type(self).__name__}: {error}")
        if stack and (error := stack_error(self._tables, inputs if checks else {})):  # an export leaves the numbers open
            raise ValueError(f"{type(self).__name__}: {error}")
        found: dict[str, Tensor | Ragged] = {}
        for feature, bags in inputs.items():
            for output in self._outputs[feature]:
                table = self.tables[self._table_of[output]]
                assert isinstance(table, InferenceTable)
                if checks:
                    table.validate(feature, bags)
                pooled = table(bags)
                found[output] = pooled if table.table.mode else Ragged(pooled, bags.offsets)
        return torch.stack([x for x in found.values() if isinstance(x, Tensor)], 1) if stack else found


class InferenceTable(nn.Module):
    """One table: its rows as the buffer `weight`, or quantized as `codes` and `scales`."""

    weight: Tensor
    codes: Tensor  # uint8 (rows, dim), or two codes of 4 bits in each byte
    scales: Tensor  # bfloat16 (rows, 2): the scale of a row, and the value of code 0

    def __init__(self, table: Table, bits: Bits | None, dtype: torch.dtype, device: torch.device | str | None) -> None:
        super().__init__()
        self.table, self.bits, self.dtype = table, bits, dtype
        self._wide = torch.promote_types(dtype, torch.float32)  # quantized rows are added up in it, and rounded once
        if bits is None:
            self.register_buffer("weight", torch.empty((table.rows, table.dim), dtype=dtype, device=device))
            return
        width = -(-table.dim * bits // 8)
        self.register_buffer("codes", torch.empty((table.rows, width), dtype=torch.uint8, device=device))
        self.register_buffer("scales", torch.empty((table.rows, 2), dtype=torch.bfloat16, device=device))

    @torch.no_grad()
    def set_weight(self, weight: Tensor) -> None:
        """Copy, and quantize, the whole table. Rows above max_norm are stored as a look-up would return them."""
        table = self.table
        if table.max_norm is not None:
            every = torch.arange(table.rows, device=weight.device)
            weight = torch.embedding_renorm_(weight.clone(), every, table.max_norm, table.norm_type)
        if self.bits is None:
            self.weight.copy_(weight)
            return
        if not bool(weight.isfinite().all()):
            raise ValueError(f"quantize: table {table.name!r} has values that are infinite or NaN")
        codes, scales = _quantize_rows(weight, self.bits)
        if not bool(scales.isfinite().all()):
            span = f"{float(weight.min()):.4g} to {float(weight.max()):.4g}"
            raise ValueError(f"quantize: table {table.name!r} has values from {span}: too large for scales in bfloat16")
        self.codes.copy_(_pack_pairs(codes) if self.bits == 4 else codes)
        self.scales.copy_(scales)

    def validate(self, feature: str, bags: Ragged) -> None:
        function = InferenceCollection.__name__
        if error := ragged_error(f"feature {feature!r}", bags):
            raise ValueError(f"{function}: {error}")
        if bags.weights is not None and self.table.mode != "sum":
            raise ValueError(f"{function}: feature {feature!r}: weights go with mode='sum' only, not with {self.table.mode!r}")
        if error := number_error([self.table], {feature: bags}):
            raise (IdOutOfRange if "is out of range: table" in error else ValueError)(f"{function}: {error}")

    def forward(self, bags: Ragged) -> Tensor:
        """(bags, dim); without mode a row for each id."""
        table, ids, offsets = self.table, bags.values.to(torch.int64), bags.offsets.to(torch.int64)
        dtype = self.weight.dtype if self.bits is None else self._wide
        weights = None if bags.weights is None else bags.weights.to(dtype)
        if self.bits is not None:
            rows = self._rows(ids)
            if table.mode is not None:
                keep = None if table.padding_idx is None else ids != table.padding_idx
                rows = _pool(rows, offsets, mode=table.mode, weights=weights, keep=keep)
            return rows.to(self.dtype)
        if table.mode is None:
            return self.weight.index_select(0, ids)
        return F.embedding_bag(
            ids,
            self.weight,
            offsets,
            mode=table.mode,
            per_sample_weights=weights,
            include_last_offset=True,
            padding_idx=table.padding_idx,
        )

    def _rows(self, ids: Tensor) -> Tensor:
        """Quantized rows, as numbers of the wide dtype."""
        codes = self.codes.index_select(0, ids)
        if self.bits == 4:
            codes = torch.stack((codes & 15, codes >> 4), 2).flatten(1)[:, : self.table.dim]
        scale, lowest = self.scales.index_select(0, ids).to(self._wide).unbind(1)
        rows = codes.to(self._wide) * scale.unsqueeze(1) + lowest.unsqueeze(1)
        if self.dtype != torch.float16:
            return rows
        limit = torch.finfo(self.dtype).max  # the lowest value of a row was rounded down, perhaps to below it
        return rows.clamp(-limit, limit)


class InferenceIdMaps(nn.Module):
    """The rows of the ids that an IdMapCollection knows: looks up as that does in eval mode, with the same arguments.

    Make it by `unshard`.
    """

    def __init__(self, maps: IdMapCollection) -> None:
        super().__init__()
        self.features = dict(maps.features)
        for name, id_map in maps.maps.items():
            assert isinstance(id_map, IdMap)
            ids, rows = id_map.known_ids()
            if not ids.numel():
                ids = rows = ids.new_zeros(1)  # any entry, with the row of unknown ids
            ids, order = ids.sort()
            self.register_buffer(f"ids_{name}", ids)
            self.register_buffer(f"rows_{name}", rows[order])

    def forward(self, features: Mapping[str, Ragged | Tensor]) -> dict[str, Ragged | Tensor]:
        found: dict[str, Ragged | Tensor] = {}
        for feature, given in features.items():
            if isinstance(given, Ragged):
                found[feature] = given._replace(values=self._rows(self.features[feature], given.values))
            else:
                found[feature] = self._rows(self.features[feature], given)
        return found

    def _rows(self, name: str, ids: Tensor) -> Tensor:
        known, rows = self.get_buffer(f"ids_{name}"), self.get_buffer(f"rows_{name}")
        ids = ids.to(torch.int64)
        place = torch.searchsorted(known, ids).clamp(max=known.shape[0] - 1)
        return rows[place].where(known[place] == ids, 0)


def _copy_tables(collection: EmbeddingCollection, bits: Bits | None) -> InferenceCollection:
    storage = collection.engine.storage
    features = {output: feature for feature, outputs in collection._outputs.items() for output in outputs}
    tables = [replace(table, features=[features[output] for output in table.features]) for table in storage.tables]
    copied = InferenceCollection(tables, bits=bits, dtype=storage.options.dtype, device=storage.options.device)
    for name, table in copied.tables.items():
        assert isinstance(table, InferenceTable)
        table.set_weight(collection.full_weight(name).detach())
    return copied.eval()


def _pool(rows: Tensor, offsets: Tensor, *, mode: Mode, weights: Tensor | None, keep: Tensor | None) -> Tensor:
    """Pool rows as embedding_bag does, without those that are not kept. (Export would fix the number of rows given to that.)"""
    bag = torch.searchsorted(offsets[1:], torch.arange(rows.shape[0], device=rows.device), right=True)
    kept = rows.new_ones(rows.shape[0]) if keep is None else keep.to(rows.dtype)
    pooled = rows.new_zeros((offsets.shape[0] - 1, rows.shape[1]))
    if mode == "max":
        rows = rows if keep is None else rows.masked_fill(~keep.unsqueeze(1), float("-inf"))
        pooled = pooled.scatter_reduce(0, bag.unsqueeze(1).expand_as(rows), rows, "amax", include_self=False)
        return pooled.masked_fill(pooled == float("-inf"), 0)  # only padding
    pooled = pooled.index_add(0, bag, rows * (kept if weights is None else kept * weights).unsqueeze(1))
    if mode == "sum":
        return pooled
    counts = rows.new_zeros(pooled.shape[0]).index_add(0, bag, kept)
    return pooled / counts.clamp(min=1).unsqueeze(1)


def _quantize_rows(weight: Tensor, bits: Bits) -> tuple[Tensor, Tensor]:
    """Return codes, uint8 (rows, dim), and scales, bfloat16 (rows, 2), such that the codes reach both ends of each row."""
    most = 2**bits - 1
    if not weight.numel():
        return weight.to(torch.uint8), torch.zeros((weight.shape[0], 2), dtype=torch.bfloat16, device=weight.device)
    weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
    lowest = _round_to_bfloat16(weight.amin(1), up=False)
    above = weight - lowest.to(weight.dtype).unsqueeze(1)
    scale = _round_to_bfloat16(above.amax(1) / most, up=True)
    steps = above / scale.to(weight.dtype).clamp(min=torch.finfo(torch.bfloat16).tiny).unsqueeze(1)
    return steps.round().clamp(0, most).to(torch.uint8), torch.stack((scale, lowest), 1)


def _round_to_bfloat16(x: Tensor, *, up: bool) -> Tensor:
    rounded = x.to(torch.bfloat16)
    wrong = rounded.to(x.dtype) < x if up else rounded.to(x.dtype) > x
    limit = torch.full_like(rounded, float("inf") if up else float("-inf"))
    return torch.where(wrong, torch.nextafter(rounded, limit), rounded)


def _pack_pairs(codes: Tensor) -> Tensor:
    """Put two codes of 4 bits into each byte, the first in the low bits."""
    codes = F.pad(codes, (0, codes.shape[1] % 2))
    return codes[:, ::2] | codes[:, 1::2] << 4

"""What may be wrong with the features of a batch, in words."""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from unisono.embedding.lookup.storage import ShardStorage
from unisono.embedding.ragged import KeyedRagged, Ragged, keyed_ragged_error, lengths_error, ragged_error
from unisono.embedding.table import Table

Batch = Mapping[str, Ragged] | KeyedRagged


def feature_name_error(given: Collection[str], known: Collection[str]) -> str:
    """Say which features are missing or unknown; "" if none is."""
    for name in given:
        if name not in known:
            return f"feature {name!r} looks into no table; the features are {', '.join(known)}"
    missing = [name for name in known if name not in given]
    return f"missing features: {', '.join(missing)}; the features are {', '.join(known)}" if missing else ""


def form_error(storage: ShardStorage, batch: Batch) -> str:
    """Say what is wrong with names, dtypes, shapes and devices; "" if nothing is. Reads no numbers: a GPU's host would wait."""
    features, device = storage.table_of_feature, storage.options.device
    if isinstance(batch, KeyedRagged):
        if error := keyed_ragged_error(batch) or feature_name_error(batch.names, features):
            return error
        tensors: dict[str, tuple[Tensor | None, ...]] = dict.fromkeys(batch.names, batch[1:])
    else:
        if error := feature_name_error(batch, features):
            return error
        for name, bags in batch.items():
            if error := ragged_error(f"feature {name!r}", bags):
                return error
        tensors = {name: tuple(bags) for name, bags in batch.items()}
    for name, given in tensors.items():
        if away := [x for x in given if x is not None and x.device != device]:
            return f"feature {name!r} is on {away[0].device}, its table on {device}"
        mode = storage.tables[features[name]].mode
        if given[-1] is not None and mode != "sum":
            return f"feature {name!r}: weights go with mode='sum' only, not with {mode!r}"
    return ""


def number_error(tables: Sequence[Table], batch: Mapping[str, Ragged] | KeyedRagged) -> str:
    """Say what is wrong with the ids and offsets of features; "" if nothing is. `tables`: the table of each feature.

    The numbers of all features are read at once: a GPU's host waits once.
    """
    if isinstance(batch, KeyedRagged):
        if error := lengths_error(batch):
            return error
        batch = batch.to_dict()
    if not batch:
        return ""
    bags = list(batch.values())
    limits = [x for ids, _, _ in bags for x in (ids.aminmax() if ids.numel() else (ids.new_tensor(0), ids.new_tensor(-1)))]
    edges = [x for _, offsets, _ in bags for x in (offsets[0], offsets[-1])]
    any_falls = torch.cat([offsets[1:] < offsets[:-1] for _, offsets, _ in bags]).any()
    numbers: list[int] = torch.stack([x.to(torch.int64) for x in (*limits, *edges, any_falls)]).tolist()
    pairs = list(zip(numbers[0:-1:2], numbers[1::2], strict=True))
    for k, ((feature, (ids, offsets, _)), table) in enumerate(zip(batch.items(), tables, strict=True)):
        low, high = pairs[k]
        first, last = pairs[len(bags) + k]
        falls = bool(numbers[-1]) and bool((offsets[1:] < offsets[:-1]).any())
        if first != 0 or last != ids.numel() or falls:
            return (
                f"feature {feature!r}: offsets must rise from 0 to the number of ids, {ids.numel()}; "
                f"they go from {first} to {last}{' and fall between' if falls else ''}"
            )
        if low < 0 or high >= table.rows:
            bad = low if low < 0 else high
            position = int((ids == bad).nonzero()[0])
            return (
                f"id {bad} at position {position} of feature {feature!r} is out of range: "
                f"table {table.name!r} has {table.rows} rows, 0 to {table.rows - 1}"
            )
    return ""

"""Columns of parquet as features: ids, bags of ids, numbers and labels from what pyarrow read."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unisono.embedding import Ragged, hash_strings

NO_ID = -1


def is_integers(kind: Any) -> bool:
    """Whether a type of pyarrow's has whole numbers."""
    from pyarrow import types  # type: ignore[import-untyped]

    return bool(types.is_integer(kind) or types.is_boolean(kind))


def is_ids(kind: Any) -> bool:
    """Whether a type of pyarrow's has ids: whole numbers or texts."""
    from pyarrow import types

    if types.is_dictionary(kind):
        kind = kind.value_type
    return is_integers(kind) or bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def is_bags(kind: Any) -> bool:
    """Whether a type of pyarrow's has lists of ids."""
    from pyarrow import types

    lists = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return bool(lists) and is_ids(kind.value_type)


def is_numbers(kind: Any) -> bool:
    """Whether a type of pyarrow's has quantities."""
    from pyarrow import types

    return is_integers(kind) or bool(types.is_floating(kind) or types.is_decimal(kind))


def read_ids(column: Any) -> Tensor:
    """int64 (rows,): numbers as they are, those of uint64 wrapped, texts hashed, -1 for null.

    Example:
        >>> import pyarrow
        >>> read_ids(pyarrow.array([7, None, 9]))
        tensor([ 7, -1,  9])
    """
    import pyarrow.compute as pc  # type: ignore[import-untyped]
    from pyarrow import types

    if is_integers(column.type):
        return torch.from_numpy(_whole(column))
    if not types.is_dictionary(column.type):
        column = pc.dictionary_encode(column)  # each text is hashed once
    distinct = column.dictionary
    if is_integers(distinct.type):
        values = _whole(distinct)
    else:
        # Texts that are not UTF-8 have ids as well: as bytes they do not raise, and the escapes keep them apart.
        texts = distinct.cast("large_string").cast("large_binary").to_pylist()
        values = hash_strings([(text or b"").decode(errors="surrogateescape") for text in texts]).numpy()
        values = np.where(distinct.is_null().to_numpy(zero_copy_only=False), NO_ID, values)
    return torch.from_numpy(np.append(values, NO_ID)[_whole(column.indices)])  # the last one is that of null


def read_bags(column: Any) -> Ragged:
    """The ids of each row's list; none for null.

    Example:
        >>> import pyarrow
        >>> read_bags(pyarrow.array([[7, 8], None, [9]]))
        Ragged(values=tensor([7, 8, 9]), offsets=tensor([0, 2, 2, 3]), weights=None)
    """
    import pyarrow.compute as pc

    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
    return Ragged.from_lengths(read_ids(pc.list_flatten(column)), torch.from_numpy(lengths.astype(np.int64)))


def read_numbers(column: Any, *, null: float) -> NDArray[np.float32]:
    """float32 (rows,), `null` where there is none."""
    import pyarrow.compute as pc

    found = pc.fill_null(column.cast("float64", safe=False), null).to_numpy(zero_copy_only=False)
    with np.errstate(over="ignore"):  # infinite: a bad row
        return found.astype(np.float32)  # type: ignore[no-any-return]


def _whole(column: Any) -> NDArray[np.int64]:
    import pyarrow.compute as pc

    if str(column.type) == "bool":
        column = column.cast("int8")
    found = pc.fill_null(column, 0).to_numpy(zero_copy_only=False).astype(np.int64)  # uint64 wraps around
    return np.where(column.is_null().to_numpy(zero_copy_only=False), NO_ID, found)

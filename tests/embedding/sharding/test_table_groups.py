"""The numbering of a table group's rows."""

import torch

from unisono.embedding.sharding.table_groups import RowNumbering


def test_int32_ids_in_a_group_of_more_rows_than_int32_counts():
    """The sum of an int32 id and its shift overflowed."""
    assert RowNumbering(1, (2**31,)).to_group_rows(torch.tensor([5], dtype=torch.int32), torch.int64).tolist() == [2**31 + 5]

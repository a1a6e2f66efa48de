"""The numbering of a table group's rows."""

import pytest
import torch

from unisono.embedding.sharding.layouts import Layout
from unisono.embedding.sharding.table_groups import RowNumbering, group_tables, number_rows
from unisono.embedding.table import Table


def test_int32_ids_in_a_group_of_more_rows_than_int32_counts():
    """The sum of an int32 id and its shift overflowed."""
    assert RowNumbering(1, (2**31,)).to_group_rows(torch.tensor([5], dtype=torch.int32), torch.int64).tolist() == [2**31 + 5]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_chunks_of_more_rows_than_int32_counts(dtype):
    """int32 ids were divided by a chunk size that had been cut to 32 bits. No rows are allocated here."""
    rows = 3 * 2**31 + 5
    table = Table("a", rows, 4)
    for layout, world_size in ((Layout.row([1, 0]), 2), (Layout.row(), 3), (Layout.table(1), 2)):
        assigned = layout.assign_ranks(world_size)
        groups = group_tables([Table("b", 7, 4), table], [Layout.row().assign_ranks(world_size), assigned], world_size)
        numbering = number_rows(groups, [Table("b", 7, 4), table])[1]
        ids = torch.tensor([0, 1, 2**31 - 1], dtype=dtype)
        if dtype == torch.int64:
            ids = torch.cat([ids, torch.tensor([2**31, 2**32 + 7, rows - 1])])
        (group,) = groups
        found = numbering.to_group_rows(ids, torch.int64).tolist()
        for number, group_row in zip(ids.tolist(), found, strict=True):
            shard = next(k for k in range(world_size) if group_row < group.bases[k + 1])
            part = next(part for part in group.shards[shard] if part.table == 1)
            assert group_row - group.bases[shard] - part.start + part.box.row == number
            assert part.box.row <= number < part.box.row_end

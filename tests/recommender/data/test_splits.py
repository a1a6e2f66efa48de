"""Splits of rows, of each user's rows, and of chunks."""

from dataclasses import dataclass

import pytest
import torch

from unisono_models.recommender.data.splits import split_chunks, split_groups


def recbole_counts(count, parts):
    """RecBole's rounding, step by step."""
    counts = [int(count * part) for part in parts]
    counts[0] = count - sum(counts[1:])
    for number in range(1, len(parts)):
        if counts[0] <= 1:
            break
        if 0 < parts[-number] * count < 1:
            counts[-number] += 1
            counts[0] -= 1
    return counts


@pytest.mark.parametrize("parts", [(0.8, 0.1, 0.1), (0.7, 0.05, 0.25), (1.0, 0.0, 0.0)])
def test_rows_of_each_user_are_split_as_recbole_does(parts):
    sizes = [1, 2, 3, 4, 9, 10, 11, 29, 100, 0, 1]
    groups = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    groups = groups[torch.randperm(len(groups), generator=torch.Generator().manual_seed(0))]
    found = split_groups(groups, parts, seed=3)
    assert sorted(torch.cat(found).tolist()) == list(range(len(groups)))
    for group, size in enumerate(sizes):
        assert [int((groups[part] == group).sum()) for part in found] == recbole_counts(size, parts)
    again, other = split_groups(groups, parts, seed=3), split_groups(groups, parts, seed=4)
    assert all(map(torch.equal, found, again)) and (parts[0] == 1 or not torch.equal(found[2], other[2]))
    with pytest.raises(ValueError, match=r"--data.parts 0.8 0.1 0.2: must be three fractions that add up to 1"):
        split_groups(groups, (0.8, 0.1, 0.2), seed=0)


@dataclass
class Sizes:
    sizes: torch.Tensor
    groups: torch.Tensor | None = None


def test_chunks_are_split_into_disjoint_parts_of_about_the_given_size():
    chunks = Sizes(torch.tensor([5, 3, 0, 8, 4] * 100))
    train, valid, test = split_chunks(chunks, 0.1, seed=0)
    filled = chunks.sizes.nonzero().squeeze(1).tolist()
    assert sorted(torch.cat([train, valid, test]).tolist()) == filled and train.tolist() == sorted(train.tolist())
    assert all(200 <= int(chunks.sizes[part].sum()) < 208 for part in (valid, test))
    assert split_chunks(chunks, 0.1, seed=0)[1].tolist() == valid.tolist() != split_chunks(chunks, 0.1, seed=1)[1].tolist()
    assert [len(part) for part in split_chunks(chunks, 0, seed=0)] == [len(filled), 0, 0]
    groups = torch.arange(500) // 10
    kept = [set(groups[x].tolist()) for x in split_chunks(Sizes(chunks.sizes, groups), 0.1, seed=0)]
    assert [len(x) for x in kept] == [40, 5, 5] and not kept[0] & kept[1] and not kept[1] & kept[2] and not kept[0] & kept[2]
    torn = split_chunks(Sizes(chunks.sizes, groups // 10), 0.1, seed=0)  # of 5 groups half a one: chunks of all of them
    assert [x.tolist() for x in torn] == [x.tolist() for x in (train, valid, test)]
    few = Sizes(torch.tensor([9, 9, 9]))
    assert [len(part) for part in split_chunks(few, 0.01, seed=0)] == [1, 1, 1]
    with pytest.raises(ValueError, match="2 chunks with 18 rows are too few"):
        split_chunks(Sizes(few.sizes[:2]), 0.01, seed=0)
    with pytest.raises(ValueError, match=r"part=0\.5 must"):
        split_chunks(few, 0.5, seed=0)

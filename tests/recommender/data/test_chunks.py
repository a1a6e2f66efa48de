"""Chunks in random order: the same rows for any number of ranks, from any step on."""

import math

import pytest
import torch

from tests.recommender.data.click_files import CLICK_FEATURES, criteo_chunks, line, read_all, rows_of, write_lines
from unisono_models.recommender.data.batch import Batch
from unisono_models.recommender.data.chunks import ChunkOrder, StreamingDataset
from unisono_models.recommender.data.features import Feature

SIZES = torch.tensor([4, 0, 7, 1, 1, 9, 2])


def step_rows(order, step, size):
    """The rows of a step, over all ranks, by (chunk, place)."""
    return [(b, k) for rank in range(size) for b, start, stop in order.slices(step, rank, size) for k in range(start, stop)]


@pytest.mark.parametrize("batch", [1, 5, 24, 100])
@pytest.mark.parametrize("shuffle", [True, False])
def test_order_has_every_row_once_an_epoch_on_any_ranks(batch, shuffle):
    order = ChunkOrder(SIZES, batch=batch, seed=3, shuffle=shuffle)
    every = [(chunk, place) for chunk, size in enumerate(SIZES.tolist()) for place in range(size)]
    steps = order.steps_per_epoch
    assert steps == math.ceil(len(every) / batch) and sum(map(order.size_of, range(steps))) == len(every)
    epochs = [[row for step in range(e * steps, (e + 1) * steps) for row in step_rows(order, step, 1)] for e in range(3)]
    assert all(sorted(epoch) == every for epoch in epochs)
    assert (epochs[0] == every) != shuffle and (epochs[1] != epochs[2]) == shuffle
    for step in reversed(range(2 * steps)):  # from any step on, with no memory of those before
        expected = step_rows(order, step, 1)
        assert len(expected) == min(batch, len(every) - step % steps * batch)
        for size in (2, 3, 4):
            again = ChunkOrder(SIZES, batch=batch, seed=3, shuffle=shuffle)
            assert step_rows(again, step, size) == expected
            counts = [sum(stop - start for _, start, stop in again.slices(step, rank, size)) for rank in range(size)]
            assert counts == [len(x) for x in torch.arange(len(expected)).tensor_split(size)]


def test_order_keeps_groups_together():
    sizes, groups = torch.ones(60, dtype=torch.int64), torch.arange(60) // 5
    order = ChunkOrder(sizes, batch=60, seed=0, groups=groups)
    chunks = torch.tensor([[chunk for chunk, _, _ in order.slices(epoch, 0, 1)] for epoch in range(2)])
    assert (chunks.sort().values == torch.arange(60)).all() and (chunks[0] != chunks[1]).any()
    found = groups[chunks].view(2, 12, 5)
    assert (found == found[:, :, :1]).all() and (found[0, :, 0].diff() != 1).any()
    assert (chunks.view(2, 12, 5).diff() != 1).any(-1).float().mean() > 0.5


def test_order_depends_on_the_seed_and_rejects_bad_arguments():
    assert ChunkOrder(SIZES, batch=24, seed=0).slices(0, 0, 1) != ChunkOrder(SIZES, batch=24, seed=1).slices(0, 0, 1)
    with pytest.raises(ValueError, match="batch=0"):
        ChunkOrder(SIZES, batch=0, seed=0)
    with pytest.raises(ValueError, match="without any row"):
        ChunkOrder(SIZES[1:2], batch=1, seed=0).slices(0, 0, 1)
    with pytest.raises(ValueError, match="rank=2 must be"):
        ChunkOrder(SIZES, batch=3, seed=0).slices(0, 2, 2)


@pytest.fixture
def three_days(tmp_path):
    """23 lines, of which the 8th is bad, in three files, one of them empty."""
    days = [
        [line(str(k % 2), I1=k, C1=f"{k:x}") if k != 7 else "bad" for k in range(15)],
        [],
        [line(C1=f"{k:x}") for k in range(15, 23)],
    ]
    return [write_lines(tmp_path / f"day_{k}", lines, last="") for k, lines in enumerate(days)]


def test_batches_and_scans_do_not_depend_on_ranks(three_days):
    chunks = criteo_chunks(three_days)
    stream = StreamingDataset(chunks, features=CLICK_FEATURES, ids="mapped", batch=6, seed=1)
    assert stream.rows == 23 and [stream.size_of(step) for step in range(5)] == [6, 6, 6, 5, 6]
    steps = [stream.batch(step, 0, 1) for step in range(8)]
    for epoch in (steps[:4], steps[4:]):
        assert sorted(i for batch in epoch for i in batch.index.tolist()) == [k for k in range(23) if k != 7]
        assert [skip.index for batch in epoch for skip in batch.skipped] == [8]
        assert all((batch.ids["C1"] == batch.index).all() for batch in epoch)
    assert torch.cat([b.index for b in steps[:4]]).tolist() != torch.cat([b.index for b in steps[4:]]).tolist()
    whole = rows_of(read_all(chunks))
    for size in (1, 2, 3, 4, 30):
        again = StreamingDataset(chunks, features=CLICK_FEATURES, ids="mapped", batch=6, seed=1)
        for step in (6, 2):
            parts = [again.batch(step, rank, size) for rank in range(size)]
            assert rows_of(Batch.cat(parts)) == rows_of(steps[step])
        scans = [list(again.scan(rank, size, 5)) for rank in range(size)]
        assert len({len(scan) for scan in scans}) == 1 and len(scans[0]) == math.ceil(math.ceil(23 / size) / 5)
        joined = Batch.cat([batch for scan in scans for batch in scan])
        assert rows_of(joined) == whole and [skip.index for skip in joined.skipped] == [8]


def test_chosen_chunks_and_no_rows(three_days):
    chunks = criteo_chunks(three_days)
    chosen = torch.tensor([5, 0, 2])
    stream = StreamingDataset(chunks, chosen, features=CLICK_FEATURES, ids="mapped", batch=100, seed=0)
    expected = [0, 1, 2, 3, 8, 9, 10, 11, 19, 20, 21, 22]
    assert stream.rows == 12 and sorted(stream.batch(0, 0, 1).index.tolist()) == expected
    assert next(stream.scan(0, 1)).index.tolist() == expected
    none = StreamingDataset(chunks, chosen[:0], features=CLICK_FEATURES, ids="mapped", batch=1, seed=0)
    assert none.rows == 0 and [len(batch) for batch in none.scan(0, 1)] == [0]
    assert none.batch is not None and next(none.scan(0, 1)).numbers.shape == (0, 2)
    with pytest.raises(ValueError, match="without any row"):
        none.batch(0, 0, 1)
    with pytest.raises(ValueError, match="expected different numbers from 0 to 5, got"):
        StreamingDataset(chunks, torch.tensor([1, 1]), features=CLICK_FEATURES, ids="mapped", batch=1, seed=0)


def test_hashed_ids_are_rows_of_their_tables(three_days):
    chunks = criteo_chunks(three_days)
    raw = next(StreamingDataset(chunks, features=CLICK_FEATURES, ids="mapped", batch=1, seed=0).scan(0, 1))
    found = next(StreamingDataset(chunks, features=CLICK_FEATURES, ids="hashed", batch=1, seed=0).scan(0, 1))
    rows = found.ids["C1"]
    assert int(rows.min()) >= 1 and int(rows.max()) <= 99 and 15 < len(rows.unique()) <= 22
    assert raw.ids["C26"].unique().tolist() == [-1] and found.ids["C26"].unique().tolist() == [0]  # blank
    with pytest.raises(ValueError, match="C2: ids='hashed' needs the number of rows"):
        StreamingDataset(chunks, features=[Feature("C2")], ids="hashed", batch=1, seed=0)
    with pytest.raises(ValueError, match="ids='hash' must be"):
        StreamingDataset(chunks, features=CLICK_FEATURES, ids="hash", batch=1, seed=0)

"""The datasets that a config describes, shared by any number of ranks; files found by name; prefetching."""

import pytest
import torch

from tests.recommender.data.rating_files import COLUMNS, FEATURES, write_rating_files
from unisono_models.datasets.file_patterns import find_files
from unisono_models.recommender.config import DataConfig
from unisono_models.recommender.data.batch import Batch
from unisono_models.recommender.data.dataset import InMemoryDataset, build_datasets, prefetch, split_for_rank
from unisono_models.recommender.data.files import DATASETS, DatasetFiles
from unisono_models.recommender.data.ratings import read_ratings
from unisono_models.recommender.protocols import apply_protocol
from unisono_models.recommender.recipes import RECIPES
from unisono_models.training.distributed.launch import Ranks

ALONE = Ranks(0, 1, 0, torch.device("cpu"))


@pytest.fixture
def folder(tmp_path):
    return write_rating_files(tmp_path)


def test_small_movielens_is_built_as_the_config_says():
    datasets = build_datasets(apply_protocol(RECIPES["tiny"]).data, seed=0, ranks=ALONE)
    assert (datasets.train.rows, datasets.valid.rows, datasets.test.rows) == (58_285, 7_285, 7_285)
    assert datasets.ratings.read == 100_000
    rows = [datasets.rows_of(dataset) for dataset in (datasets.train, datasets.valid, datasets.test)]
    assert sorted(torch.cat(rows).tolist()) == list(range(72_855))
    other = build_datasets(
        DataConfig("ml-100k", features=("user_id", "class:ids"), keep="[0,3);(3,inf)", split_seed=1), seed=0, ranks=ALONE
    )
    assert not torch.equal(datasets.rows_of(datasets.test), other.rows_of(other.test))


def test_registered_dataset_is_found_by_its_name(folder, monkeypatch):
    """A user's own as a built-in one, with its note."""
    monkeypatch.setattr(DATASETS, "_builders", dict(DATASETS._builders))
    DATASETS.register("movies")(lambda: DatasetFiles(str(folder), notes=("ours",)))
    data = DataConfig("movies", features=("user_id", "genre"), keep="[0,inf)", parts=(1.0, 0.0, 0.0))
    datasets = build_datasets(data, seed=0, ranks=ALONE)
    assert datasets.train.rows == 5 and datasets.notes == ("ours",) and datasets.ratings.path.parent == folder


def test_ranks_share_every_batch_and_every_row(folder):
    ratings = read_ratings(folder, FEATURES, **COLUMNS, threshold=4)
    dataset = InMemoryDataset(ratings, torch.tensor([0, 2, 3]), batch=2, seed=0)
    for step in range(4):
        whole = dataset.batch(step, 0, 1)
        for world_size in (2, 3, 4):
            joined = Batch.cat([dataset.batch(step, rank, world_size) for rank in range(world_size)])
            assert torch.equal(joined.index, whole.index) and torch.equal(joined.ids["genre"].values, whole.ids["genre"].values)
        assert len(whole) == dataset.size_of(step) == (2, 1)[step % 2]
    for world_size in (1, 2, 4):
        scans = [list(dataset.scan(rank, world_size, rows=1)) for rank in range(world_size)]
        assert len({len(scan) for scan in scans}) == 1  # models communicate in each
        assert [int(i) for scan in scans for batch in scan for i in batch.index] == [0, 2, 3]
    assert [len(piece) for piece in split_for_rank(0, 0, 2, 5)] == [0]


def test_too_many_bad_rows_stop_a_run(folder):
    from unisono_models.recommender.train import main

    options = ["--data.source", str(folder), "--data.features", "user_id", "item_id", "--run.dir", str(folder / "run")]
    with pytest.raises(ValueError, match=r"4 of 8 rows skipped(.|\n)*x.inter \(line 6\): 3 fields instead of 4"):
        main(["tiny", *options])


def test_prefetch_raises_errors_in_turn():
    def read(step):
        if step == 3:
            raise OSError("gone")
        return step

    seen = []
    with pytest.raises(OSError, match="gone"):
        seen.extend(now for now, _ in prefetch(read, 0, 9))
    assert seen == [0, 1]  # the third comes with the fourth


def test_days_are_found_by_patterns(tmp_path):
    kinds = {".parquet": "parquet", ".tsv": "text", ".txt": "text", ".csv": "text", "": "text"}
    for name in [*(f"day_{k}" for k in (0, 2, 10)), "x.json", "day_3.gz"]:
        (tmp_path / name).write_text("")
    days = [tmp_path / f"day_{k}" for k in (0, 2, 10)]
    assert find_files(f"{tmp_path}/day_{{0,2,10}}", kinds=kinds, what="f") == ("text", days)
    assert find_files(tmp_path, kinds=kinds, what="f") == ("text", [days[0], days[2], days[1]])
    with pytest.raises(ValueError, match=r"f .*day_3.gz: not a .parquet, .tsv, .txt, .csv or suffixless file. Unpack it"):
        find_files(tmp_path / "day_*", kinds=kinds, what="f")
    (tmp_path / "a.parquet").write_text("")
    assert find_files(tmp_path, kinds=kinds, what="f")[0] == "parquet"

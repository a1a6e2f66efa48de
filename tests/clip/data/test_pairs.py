"""Captions, concepts and skips: what the readers of files share."""

import json

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from unisono.collectives.groups import resolve_group
from unisono_models.clip.data.pairs import PairBatch, clean_text, concept_of_caption, parse_concept, printable
from unisono_models.datasets.skip_report import SkippedSample, SkipReport

fuzz = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@fuzz
@given(st.one_of(st.binary(), st.text(st.characters(codec=None, exclude_categories=()))))
def test_any_caption_becomes_text_that_encodes(value):
    text = clean_text(value)
    text.encode()
    assert "\0" not in text and text == text.strip() and 0 <= concept_of_caption(text) < 2**63
    assert printable(value).isprintable() and len(printable(value)) <= 160


def test_concepts_by_caption_and_by_column():
    assert (
        concept_of_caption("Caf\u00e9  au\nlait")
        == concept_of_caption("CAFE\u0301 au lait")
        != concept_of_caption("cafe au lait")
    )
    assert concept_of_caption("a red heart") == 4820560657803151834  # the same on every machine and in every version
    assert parse_concept(17, "x") == parse_concept("17", "y") == parse_concept(b" 17", "z") == 17
    assert parse_concept(None, "x") == parse_concept("", "x") == concept_of_caption("x")
    assert parse_concept("9" * 30, "x") == concept_of_caption("9" * 30)


def batch_with(kept, skips):
    empty = torch.zeros(kept, dtype=torch.int64)
    return PairBatch(torch.zeros(kept, 3, 2, 2, dtype=torch.uint8), ["x"] * kept, empty, empty, tuple(skips))


def counts_and_raises_alike():
    rank = resolve_group(None).rank
    skipped = SkipReport()
    skipped.add(batch_with(100 - rank, [SkippedSample(k, f"r{rank}", "broken image", "no") for k in range(rank)]))
    summary = skipped.summary()
    assert summary["read"] == 300 and summary["reasons"] == {"broken image": 3}
    assert [name for _, name, _ in summary["examples"]["broken image"]] == ["r1", "r2", "r2"]
    skipped.check(0.01)
    with pytest.raises(ValueError, match=r"3 of 300 pairs skipped. broken image: 3, such as r1 \(row 0\): no;.*\nThis is more"):
        skipped.check(0.009)
    resumed = SkipReport(before=json.loads(json.dumps(summary)))
    resumed.add(batch_with(9, [SkippedSample(1, "late", "empty caption")]))
    return resumed.report()


def test_skips_are_counted_over_ranks_and_stop_all_of_them(ranks):
    reports = ranks(counts_and_raises_alike, world_size=3)
    assert reports == [reports[0]] * 3
    assert "6 of 330 pairs skipped." in reports[0] and "empty caption: 3, such as late (row 1)" in reports[0]


def test_first_broken_pair_does_not_end_a_run():
    skipped = SkipReport()
    skipped.add(batch_with(1, [SkippedSample(0, "a", "broken image")]))
    skipped.check(0.01)
    with pytest.raises(ValueError, match="1 of 2"):
        skipped.check(0.01, at_least=0)
    with pytest.raises(ValueError, match=r"--data.max-broken 1\.5 must be"):
        skipped.check(1.5)


def counts_rows():
    rank = resolve_group(None).rank
    skipped = SkipReport(rows=40)
    for epoch in range(3):  # each rank reads other rows in each epoch
        mine = [SkippedSample(k, f"a.csv, row {k}", "broken image") for k in (3, 17, 30) if (k + epoch) % 2 == rank]
        skipped.add(batch_with(20 - len(mine), mine))
    resumed = SkipReport(before=json.loads(json.dumps(skipped.summary())), rows=40)
    resumed.add(batch_with(19, [SkippedSample(17, "a.csv, row 17", "broken image")]))
    resumed.check(0.03)
    return resumed.report()


def test_row_that_is_skipped_in_several_epochs_counts_once(ranks):
    """Reads were counted: three broken rows were 9 of 120 after three epochs."""
    for report in ranks(counts_rows, world_size=2):
        assert report.startswith("3 of 40 pairs skipped. broken image: 3, such as a.csv, row 3") and "(row" not in report

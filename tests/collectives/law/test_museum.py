"""The check finds every bug of the museum with its cause, and has nothing to say about clean steps."""

import re

import pytest

from tests.collectives.law.bugs import BUGS
from tests.collectives.law.clean import CLEAN
from tests.collectives.law.museum import PAGE, write_entry
from unisono.collectives.law import check


@pytest.mark.parametrize("name", BUGS)
def test_bug_is_found_with_its_cause(name):
    bug = BUGS[name]
    report = check(bug.build, bug.step, bug.batch, **bug.options)
    assert report.causes == [bug.cause], str(report)
    assert bug.where in report.findings[0].where, str(report)
    assert write_entry(name, report.findings[0]) in PAGE.read_text(), "python -m tests.collectives.law.museum writes it again"


def test_page_of_the_museum_has_every_bug_once():
    assert re.findall("^## (.*)", PAGE.read_text(), flags=re.MULTILINE) == list(BUGS)


@pytest.mark.parametrize("name", CLEAN)
def test_clean_step_raises_no_alarm(name):
    piece = CLEAN[name]
    for package in piece.needs:
        pytest.importorskip(package)
    report = check(piece.build, piece.step, piece.batch, **piece.options)
    assert report.ok, str(report)
    assert report.dtype == ("float32" if name == "Float32" else "float64")
    assert not report.not_compared

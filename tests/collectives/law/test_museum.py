"""The check finds every bug of the museum with its cause, and has nothing to say about clean steps."""

import pytest

from tests.collectives.law.bugs import BUGS
from tests.collectives.law.clean import CLEAN
from unisono.collectives.law import check


@pytest.mark.parametrize("name", BUGS)
def test_bug_is_found_with_its_cause(name):
    bug = BUGS[name]
    report = check(bug.build, bug.step, bug.batch, **bug.options)
    assert report.causes == [bug.cause], str(report)
    assert bug.where in report.findings[0].where, str(report)


@pytest.mark.parametrize("name", CLEAN)
def test_clean_step_raises_no_alarm(name):
    piece = CLEAN[name]
    for package in piece.needs:
        pytest.importorskip(package)
    report = check(piece.build, piece.step, piece.batch, **piece.options)
    assert report.ok, str(report)
    assert report.dtype == ("float32" if name == "Float32" else "float64")
    assert not report.not_compared

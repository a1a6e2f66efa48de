"""Runs of a few steps without the curves of their report, which take longer to draw than the run."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock


@contextmanager
def skip_plots() -> Iterator[None]:
    """For tests that look at numbers only. Some run in each file draws them."""
    with (
        mock.patch("unisono_models.training.run.report.write_plots", return_value={}),
        mock.patch("unisono_models.training.run.report.draw_plots", return_value={}),
    ):
        yield

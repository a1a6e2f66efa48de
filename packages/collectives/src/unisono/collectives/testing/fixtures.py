"""pytest fixtures, there once the package is installed: ranks, world_size, law."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from unisono.collectives.law import Report, check
from unisono.collectives.testing.pool import close_pools, run_ranks


class Law:
    """The fixture `law`: check a training step, and fail the test with the report if it depends on the number of ranks."""

    def check(self, build: Callable[[], Any], step: Callable[..., Any], batch: Any, **options: Any) -> Report:
        """Call unisono.collectives.law.check and raise LawBroken unless everything is equal."""
        __tracebackhide__ = True
        report = check(build, step, batch, **options)
        report.raise_if_broken()
        return report


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[..., list[Any]]]:
    """Return `run_ranks`, and end its processes when the session ends."""
    yield run_ranks
    close_pools()


@pytest.fixture(scope="session")
def law(ranks: Callable[..., list[Any]]) -> Law:
    """Check training steps: `def test_step(law): law.check(build, step, batch)`."""
    return Law()


@pytest.fixture(params=[1, 2, 3, 4], ids="world{}".format)
def world_size(request: pytest.FixtureRequest) -> int:
    """Run the test once for each world size from 1 to 4."""
    return int(request.param)

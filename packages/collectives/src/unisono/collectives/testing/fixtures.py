"""pytest fixtures. In conftest.py: pytest_plugins = ["unisono.collectives.testing.fixtures"]"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from unisono.collectives.testing.pool import close_pools, run_ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[..., list[Any]]]:
    """Return `run_ranks`, and end its processes when the session ends."""
    yield run_ranks
    close_pools()


@pytest.fixture(params=[1, 2, 3, 4], ids="world{}".format)
def world_size(request: pytest.FixtureRequest) -> int:
    """Run the test once for each world size from 1 to 4."""
    return int(request.param)

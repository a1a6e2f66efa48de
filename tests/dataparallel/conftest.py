"""The fixture `pretend`: simulated devices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import pytest

from tests.dataparallel import pretend_device

HERE = Path(__file__).parent


def pytest_collection_finish(session: pytest.Session) -> None:
    """Load the simulated devices before the first backward of the process, when autograd counts the devices."""
    # By path, not by fixture names: some tests get the fixture by request.getfixturevalue.
    if any(item.path.is_relative_to(HERE) for item in session.items):
        with suppress(pretend_device.NoCompilerError):  # the fixture skips with this error
            pretend_device.load()


@pytest.fixture
def pretend() -> Iterator[ModuleType]:
    """Provide four asynchronous devices, "pretend:0" to "pretend:3": see tests/dataparallel/pretend_device."""
    try:
        pretend_device.load()
    except pretend_device.NoCompilerError as problem:
        pytest.skip(str(problem))
    pretend_device.set_available(True)
    pretend_device.reset_counters()
    yield pretend_device
    pretend_device.set_available(False)

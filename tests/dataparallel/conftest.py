"""The devices without hardware."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import pytest

from tests.dataparallel import pretend_device

HERE = Path(__file__).parent


def pytest_collection_finish(session: pytest.Session) -> None:
    """Autograd counts the devices at the first backward of the process: be there before."""
    # not by the names of fixtures: tests also ask for this one by request.getfixturevalue
    if any(item.path.is_relative_to(HERE) for item in session.items):
        with suppress(pretend_device.NoCompilerError):  # said by the fixture
            pretend_device.load()


@pytest.fixture
def pretend() -> Iterator[ModuleType]:
    """Four asynchronous devices, "pretend:0" to "pretend:3": see tests/dataparallel/pretend_device."""
    try:
        pretend_device.load()
    except pretend_device.NoCompilerError as problem:
        pytest.skip(str(problem))
    pretend_device.set_available(True)
    pretend_device.reset_counters()
    yield pretend_device
    pretend_device.set_available(False)

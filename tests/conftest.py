"""The fixtures that the harness offers to other repos serve here, too."""

import pytest

from unisono.collectives.testing.fixtures import ranks, world_size

__all__ = ["ranks", "world_size"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with the tests that wait most: the other worker then computes meanwhile, and none is left alone at the end."""
    items.sort(key=lambda item: not item.nodeid.startswith(("tests/training", "tests/repo")))

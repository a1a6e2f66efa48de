"""The order of the tests. The fixtures ranks, world_size and law come with unisono.collectives, by an entry point."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with the tests that wait most: the other worker then computes meanwhile, and none is left alone at the end."""
    items.sort(key=lambda item: not item.nodeid.startswith(("tests/training", "tests/repo")))

"""Ranks are forked from a server that has imported torch. Here it has imported the models, too."""

import multiprocessing
from multiprocessing import forkserver

import pytest


@pytest.fixture(scope="session", autouse=True)
def models_are_imported_once():
    """Else each of the ten ranks of the four worlds does, which takes seconds. A server that runs already is left as it is."""
    modules = ["unisono.collectives.testing.pool", "unisono_models.clip.train"]
    multiprocessing.get_context("forkserver").set_forkserver_preload(modules)
    forkserver.ensure_running()

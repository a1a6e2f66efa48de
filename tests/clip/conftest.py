"""Fixtures of several folders; the models are imported once for all ranks."""

import json
import multiprocessing
from multiprocessing import forkserver

import pytest
import torch
from PIL import Image

from tests.clip.small_clip import small_config, small_tokenizer
from unisono_models.clip.data import emoji
from unisono_models.clip.model import Clip
from unisono_models.datasets.emoji import images as emoji_images

COLOURS = ("red", "green", "blue", "white")


@pytest.fixture(scope="session", autouse=True)
def models_are_imported_once():
    """Import the models in the fork server. Otherwise each of the ten ranks of the four worlds imports them, for seconds.

    A server that runs already is left as it is.
    """
    modules = ["unisono.collectives.testing.pool", "unisono_models.clip.train"]
    multiprocessing.get_context("forkserver").set_forkserver_preload(modules)
    forkserver.ensure_running()


@pytest.fixture(scope="module")
def clip():
    torch.manual_seed(0)
    return Clip(small_config(), small_tokenizer()).eval()


@pytest.fixture
def few_emoji(monkeypatch):
    """Only the first concepts, toned ones among them: all would take a while to render."""
    concepts, drawings = emoji.list_emoji()
    few = concepts[:120], tuple(drawing for drawing in drawings if drawing.concept < 120)
    for module in (emoji, emoji_images):
        monkeypatch.setattr(module, "list_emoji", lambda: few)
    return few


@pytest.fixture
def finished_run(tmp_path, clip):
    """A finished run whose data is a CSV file of five images, one of them broken."""
    path, data = tmp_path / "runs" / "clip-mine", tmp_path / "data"
    data.mkdir()
    for colour in COLOURS:
        Image.new("RGB", (20, 30), colour).save(data / f"{colour}.png")
    (data / "broken.png").write_bytes(b"not an image")
    rows = [f"{name}.png,a {name} wall" for name in (*COLOURS[:2], "broken", *COLOURS[2:])]
    (data / "table.csv").write_text("\n".join(["shot,what", *rows]))
    clip.save_pretrained(path / "export")
    config = {
        "model": "clip",
        "recipe": "mine",
        "config": {"data": {"source": str(data / "table.csv"), "image": "shot", "caption": "what"}},
    }
    (path / "config.json").write_text(json.dumps(config))
    return path

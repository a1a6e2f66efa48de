"""A folder of image files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gan.data.image_files import write_image


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Eleven files of three classes, two of them broken. The shade of an image is ten times its index by name."""
    names = [f"{kind}/{number}.png" for kind in ("ant", "bee", "cow") for number in range(4)][:-1]
    for place, name in enumerate(names):
        write_image(tmp_path / "own" / name, 10 * place, mode=("L", "RGB", "LA", "P")[place % 4])
    (tmp_path / "own/ant/3.png").write_bytes((tmp_path / "own/ant/3.png").read_bytes()[:50])
    (tmp_path / "own/cow/0.png").write_text("no image")
    (tmp_path / "own/.hidden.png").write_text("nor this")
    return tmp_path / "own"

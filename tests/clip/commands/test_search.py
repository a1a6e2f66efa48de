"""The command line of search."""

import pytest
from PIL import Image

from unisono_models.clip.commands.search import main, slug
from unisono_models.training.errors import UserError


def test_command_searches_an_exported_model_of_emoji(finished_run, few_emoji, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    export = (finished_run / "export").rename(tmp_path / "taken-away")
    main([str(export), "Red heart!", "a cat", "--top", "5", "--vendor", "openmoji"])
    path = export / "samples" / "search-red-heart-and-1-more.png"
    printed = capsys.readouterr().out
    assert f"drawn in {path}" in printed and printed.count("openmoji") == 10
    assert "Red heart!" in printed and "a cat" in printed
    with Image.open(path) as image:
        assert image.format == "PNG" and image.width > 900
    assert (export / "gallery.safetensors").exists()


def test_command_searches_by_image(finished_run, tmp_path, capsys):
    image, out = tmp_path / "data" / "green.png", tmp_path / "new" / "g.png"
    main([str(finished_run), "--image", str(image), "--top", "2", "--out", str(out)])
    rows = [line for line in capsys.readouterr().out.splitlines() if "wall" in line]
    assert "a green wall" in rows[0] and "1.000" in rows[0] and len(rows) == 2
    assert out.exists() and not (finished_run / "samples").exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "there is nothing to look for"),
        (["red", " "], "a query is empty"),
        (["red", "--top", "0"], "--top 0 must be between 1 and 100"),
        (["red", "--out", "x.jpg"], "must end in .png"),
        (["red", "--vendor", "noto"], "vendor='noto': the gallery has no vendors"),
        (["--image", "none.png"], "none.png cannot be read as an image: No such file"),
        (["--image", "."], "cannot be read as an image"),
        (["--image", "broken.png"], "broken.png cannot be read as an image"),
    ],
)
def test_command_rejects(finished_run, args, message, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path / "data")
    with pytest.raises(UserError, match=message):
        main([str(finished_run), *args])


def test_slug_is_fit_for_a_file_name():
    assert slug(["Red heart!"]) == "red-heart" and slug(["../../etc/passwd", "x"]) == "etc-passwd-and-1-more"
    assert slug(["❤️"]) == "query" and slug(["漢字"]) == "漢字" and len(slug(["ab " * 99])) <= 40

"""unisono-check on the command line."""

import pytest

from unisono.collectives.law.command import main


def test_example_is_written_and_its_bug_found(tmp_path, capsys):
    file, page = tmp_path / "train_step.py", tmp_path / "report.html"
    assert main([str(file), "--example"]) == 0
    assert main([str(file), "--example"]) == 2  # nothing is overwritten
    capsys.readouterr()
    assert main([str(file), "--world-sizes", "1,2", "--splits", "even,3+9", "--steps", "1", "--html", str(page)]) == 1
    shown = capsys.readouterr().out
    assert "2 ranks, given 3+9" in shown and "local_mean" in shown and "1 step in float64" in shown
    assert "local_mean" in page.read_text()
    assert main([str(file), "--world-sizes", "2", "--splits", "even"]) == 0


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "there is no file"),
        ("batch = 1\n", "has no build and no step"),
        ("import no_such_module\n", "cannot be imported: ModuleNotFoundError"),
    ],
)
def test_bad_file_gets_a_sentence(content, text, tmp_path, capsys):
    file = tmp_path / "train.py"
    if content is not None:
        file.write_text(content)
    assert main([str(file)]) == 2
    assert text in capsys.readouterr().err

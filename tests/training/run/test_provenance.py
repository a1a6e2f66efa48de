"""What a run records about where it comes from."""

import importlib.metadata
import subprocess

from unisono_models.training.run.provenance import git_state, versions


def test_versions_are_those_of_the_distribution_and_all_that_it_needs():
    """The list was written by hand, and lacked two of our own packages."""
    found = versions()
    assert found["torch"] == importlib.metadata.version("torch")
    ours = {"unisono-models", "unisono-collectives", "unisono-contrastive", "unisono-dataparallel", "unisono-embedding"}
    assert ours <= found.keys() and {"timm", "transformers", "numpy"} <= found.keys()


def test_git_state_is_that_of_the_checkout_which_tracks_the_folder(tmp_path):
    def git(*arguments):
        who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
        subprocess.run(["git", "-C", str(tmp_path), *who, *arguments], check=True, capture_output=True)

    assert git_state(tmp_path) is None
    git("init")
    (tmp_path / "package").mkdir()
    (tmp_path / "package/a.py").write_text("1")
    assert git_state(tmp_path / "package") is None, "an environment inside somebody's checkout is not the checkout"
    git("add", ".")
    git("commit", "-m", "one")
    state = git_state(tmp_path / "package")
    assert len(state["commit"]) == 40 and state["dirty"] is False
    (tmp_path / "package/a.py").write_text("2")
    assert git_state(tmp_path / "package") == {"commit": state["commit"], "dirty": True}

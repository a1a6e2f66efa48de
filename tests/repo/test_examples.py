"""What the documents show is run: docstrings as doctests, README blocks as programs, torchrun included."""

import doctest
import importlib
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import unisono.collectives
import unisono.contrastive
import unisono.dataparallel
import unisono.embedding
import unisono_models

ROOT = Path(__file__).parents[2]
READMES = [
    ROOT / "README.md",
    *(path for name in ("packages", "models", "scripts") for path in sorted((ROOT / name).rglob("README.md"))),
]
DOCUMENTS = [*READMES, ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md"]
PACKAGES = [unisono.collectives, unisono.contrastive, unisono.dataparallel, unisono.embedding]
DOCUMENTED = [*PACKAGES, unisono_models]
MODULES = [m.name for package in DOCUMENTED for m in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
NO_BACKWARD = {
    "checked",
    "convert_sync_batchnorm",
    "count_bytes",
    "exchange_sizes",
    "hash_strings",
    "init_distributed",
    "plan_tables",
    "read_launch_env",
}


@pytest.mark.parametrize("name", [*(package.__name__ for package in PACKAGES), *MODULES])
def test_docstring_examples(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_every_public_function_has_a_docstring_with_backward_and_example(package):
    lacking = []
    for name in package.__all__:
        doc = getattr(package, name).__doc__ or ""
        if name.islower() and ("Example" not in doc or (name not in NO_BACKWARD and "ackward" not in doc)):
            lacking.append(name)
    assert lacking == []


def blocks(path: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", path.read_text(), flags=re.DOTALL)


def examples() -> list[tuple[str, str]]:
    return [(f"{path.relative_to(ROOT)}#{k}", code) for path in READMES for k, code in enumerate(blocks(path))]


EXAMPLES = dict(examples())
SCRIPTS = [name for name, code in EXAMPLES.items() if "def test_" not in code]
RANKS = ("alone", "0", "1", "2")


@pytest.fixture(scope="module")
def folder_of_runs(tmp_path_factory):
    """Every script has run alone, and on three ranks by torchrun; run_examples.py says what it leaves in this folder."""
    folder = tmp_path_factory.mktemp("examples")
    scripts = [folder / f"{number}.py" for number in range(len(SCRIPTS))]
    for script, name in zip(scripts, SCRIPTS, strict=True):
        script.write_text(EXAMPLES[name])
    runner = [str(Path(__file__).with_name("run_examples.py")), *map(str, scripts)]
    for torchrun in ([], ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]):
        run_python(*torchrun, *runner, folder=folder)
    return folder


def run_python(*arguments: str, folder: Path) -> None:
    command, environment = [sys.executable, *arguments], os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("name", SCRIPTS)
def test_readme_example_runs(name, folder_of_runs):
    """Alone, and on three ranks by torchrun: the same script, and the same losses and gradients if it prints some."""
    printed = []
    for rank in RANKS:
        start = folder_of_runs / f"{SCRIPTS.index(name)}.py.{rank}"
        output = start.with_name(f"{start.name}.txt").read_text()
        assert start.with_name(f"{start.name}.status").read_text() == "0", f"rank {rank}:\n{output}"
        printed += re.findall(r"loss -?\d+\.\d{5}, gradient -?\d+\.\d{5}", output)
    assert len(set(printed)) <= 1, printed
    assert len(printed) in (0, len(RANKS))


@pytest.mark.parametrize("name", sorted(EXAMPLES.keys() - set(SCRIPTS)))
def test_readme_test_passes(name, tmp_path):
    """Examples of tests, which start ranks of their own."""
    (tmp_path / "test_example.py").write_text(EXAMPLES[name])
    run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", "test_example.py", folder=tmp_path)


@pytest.mark.parametrize("path", DOCUMENTS, ids=[str(path.relative_to(ROOT)) for path in DOCUMENTS])
def test_links_and_images_exist(path):
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        assert target.startswith("http") or (path.parent / target).exists(), target


@pytest.mark.parametrize("path", DOCUMENTS, ids=[str(path.relative_to(ROOT)) for path in DOCUMENTS])
def test_files_that_a_document_names_exist(path):
    """`clip.py`, `planner/`: the end of a path below the document's own folder, or a path from the root."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    files = [ROOT / name for name in tracked if (ROOT / name).is_relative_to(path.parent)]
    known = {str(place) for file in files for place in (file, *(f"{folder}/" for folder in file.parents))}
    named = re.findall(r"`([\w./-]+(?:\.py|\.md|/))`", re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL))
    of_the_reader = {"distributed.py", "example.py", "train.py", "NAME.py", "NAME/"}
    named = [name for name in named if name not in of_the_reader and not (ROOT / name).exists()]
    assert [name for name in named if not any(place.endswith(f"/{name}") for place in known)] == []

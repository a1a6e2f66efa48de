"""Each package builds a wheel that installs alone into an empty environment and works there."""

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
}


def run(*command: object, cwd: Path | None = None) -> str:
    result = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_every_package_has_a_check_here():
    assert sorted(WORKS) == sorted(path.name for path in (ROOT / "packages").iterdir() if path.is_dir())


@pytest.mark.parametrize("name", WORKS)
def test_wheel_installs_alone(name, tmp_path):
    run(
        UV,
        "build",
        "--wheel",
        "--no-build-isolation",
        "--python",
        sys.executable,
        "--out-dir",
        tmp_path,
        ROOT / "packages" / name,
    )
    (wheel,) = tmp_path.glob("*.whl")
    files = zipfile.ZipFile(wheel).namelist()
    assert f"unisono/{name}/py.typed" in files and "unisono/__init__.py" not in files
    environment = tmp_path / "empty"
    run(UV, "venv", "--quiet", "--python", sys.executable, environment)
    run(UV, "pip", "install", "--quiet", "--python", environment, "--constraint", CONSTRAINTS, wheel)
    run(environment / "bin" / "python", "-W", "error::ImportWarning", "-c", WORKS[name], cwd=tmp_path)

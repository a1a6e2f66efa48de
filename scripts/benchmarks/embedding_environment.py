"""The environment of the benchmarks beside TorchRec, which loads on one older torch only: all contenders run on that."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

from rich.console import Console

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".venv-torchrec"
TORCH = "torch==2.13.0"
PEERS = ("torchrec==1.8.0", "fbgemm-gpu-cpu==1.8.0")
# What the peers import. Without what these ask for in turn: some would bring another torch.
IMPORTED = (
    "cloudpickle==3.1.2",
    "mypy-extensions==1.2.0",
    "pyre-extensions==0.0.32",
    "pyvers==0.2.3",
    "tensordict==0.15.3",
    "torchmetrics==1.9.0",
    "typing-inspect==0.9.0",
)
OURS = ("einops", "matplotlib", "numpy", "rich", "tqdm", "tyro")  # of the versions in scripts/constraints.txt
SOURCES = [*sorted((ROOT / "packages").glob("*/src")), ROOT / "models" / "src"]


def enter(console: Console) -> None:
    """Go on in that environment, from the start, with the same arguments; it is made the first time. There, do nothing."""
    if Path(sys.prefix).resolve() == FOLDER:
        return
    make(console)
    python = str(FOLDER / "bin" / "python")
    os.execv(python, [python, *sys.argv])


def make(console: Console) -> None:
    """Make .venv-torchrec, unless it is there and nothing has changed."""
    constraints = (ROOT / "scripts" / "constraints.txt").read_text()
    mark = "\n".join([platform.python_version(), *map(str, SOURCES), Path(__file__).read_text(), constraints])
    made = FOLDER / ".made"
    if made.exists() and made.read_text() == mark:
        return
    with console.status(f"making {FOLDER.name} with {TORCH} and {' '.join(PEERS)} (a GB; a minute or two)"):
        run(sys.executable, "-m", "venv", "--clear", str(FOLDER))
        older = FOLDER / "constraints.txt"
        of_torch = ("torch", "triton", "nvidia-", "cuda-")
        older.write_text("".join(line for line in constraints.splitlines(True) if not line.startswith(of_torch)) + f"{TORCH}\n")
        install = (str(FOLDER / "bin" / "python"), "-m", "pip", "install", "--quiet", "--constraint", str(older))
        run(*install, TORCH)  # pip, which knows local builds that uv does not look for
        run(*install, *OURS)
        run(*install, "--no-deps", *IMPORTED, *PEERS)
        packages = next((FOLDER / "lib").glob("python*")) / "site-packages"
        (packages / "unisono.pth").write_text("".join(f"{source}\n" for source in SOURCES))
        made.write_text(mark)


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"embedding: {' '.join(command)} failed:\n{done.stdout}{done.stderr}")

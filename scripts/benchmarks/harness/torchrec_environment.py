"""A second environment, .venv-torchrec: TorchRec only loads with an older torch, which all contenders beside it use."""

import os
import platform
import subprocess
import sys
from pathlib import Path

from rich.console import Console

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / ".venv-torchrec"
TORCH = "torch==2.13.0"
PEERS = ("torchrec==1.8.0", "fbgemm-gpu-cpu==1.8.0")
# What the peers import. Installed without their own requirements, some of which would bring another torch.
IMPORTED_BY_PEERS = (
    "cloudpickle==3.1.2",
    "mypy-extensions==1.2.0",
    "pyre-extensions==0.0.32",
    "pyvers==0.2.3",
    "tensordict==0.15.3",
    "torchmetrics==1.9.0",
    "typing-inspect==0.9.0",
)
IMPORTED_BY_US = ("einops", "matplotlib", "numpy", "rich", "tqdm", "tyro")  # in the versions of scripts/constraints.txt
SOURCES = [*sorted((ROOT / "packages").glob("*/src")), ROOT / "models" / "src", ROOT / "scripts"]


def enter(console: Console) -> None:
    """Start the same command again in that environment, which is made the first time. Do nothing if it already runs there."""
    if Path(sys.prefix).resolve() == FOLDER:
        return
    make(console)
    python = str(FOLDER / "bin" / "python")
    os.execv(python, [python, "-m", "benchmarks", *sys.argv[1:]])


def make(console: Console) -> None:
    """Make the environment, unless it exists and nothing has changed."""
    constraints = (ROOT / "scripts" / "constraints.txt").read_text()
    mark = "\n".join([platform.python_version(), *map(str, SOURCES), Path(__file__).read_text(), constraints])
    made = FOLDER / ".made"
    if made.exists() and made.read_text() == mark:
        return
    with console.status(f"making {FOLDER.name} with {TORCH} and {' '.join(PEERS)} (1 GB; takes a minute or two)"):
        run(sys.executable, "-m", "venv", "--clear", str(FOLDER))
        own_constraints = FOLDER / "constraints.txt"
        newer_torch = ("torch", "triton", "nvidia-", "cuda-")
        kept = [line for line in constraints.splitlines() if not line.startswith(newer_torch)]
        own_constraints.write_text("\n".join([*kept, TORCH]) + "\n")
        install = (str(FOLDER / "bin" / "python"), "-m", "pip", "install", "--quiet", "--constraint", str(own_constraints))
        run(*install, TORCH)  # by pip: it finds local builds of torch that uv does not look for
        run(*install, *IMPORTED_BY_US)
        run(*install, "--no-deps", *IMPORTED_BY_PEERS, *PEERS)
        packages = next((FOLDER / "lib").glob("python*")) / "site-packages"
        (packages / "unisono.pth").write_text("".join(f"{source}\n" for source in SOURCES))
        made.write_text(mark)


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{FOLDER.name}: {' '.join(command)} failed:\n{done.stdout}{done.stderr}")

"""Start torchrun from a test, watch what it prints, and leave nothing behind."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

SCRIPT = Path(__file__).with_name("fault_script.py")
LAUNCH = "import sys; from unisono_models.training.distributed.torchrun import launch; sys.exit(launch(sys.argv[1:]))"
PATIENCE = 240.0  # seconds for anything: only a test that fails waits that long, and machines are slow at times


class Launch:
    """A command under way, with fault_script.py as its program: `torchrun(...)` and `alone(...)` make one."""

    def __init__(self, command: list[str], directory: Path, *, name: str = "output", env: dict[str, str] | None = None) -> None:
        (directory / "tmp").mkdir(parents=True, exist_ok=True)
        self.directory, self.log = directory, directory / f"{name}.txt"
        settings = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "TMPDIR": str(directory / "tmp")} | (env or {})
        with self.log.open("a") as log:
            self.start = self.log.stat().st_size
            self.process = subprocess.Popen(
                command, env=os.environ | settings, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    @property
    def output(self) -> str:
        return self.log.read_bytes()[self.start :].decode(errors="replace")

    def wait_for(self, text: str) -> None:
        """Until `text` is in the output."""
        self.wait_until(lambda: text in self.output or self.process.poll() is not None, repr(text))
        assert text in self.output, f"ended with {self.process.returncode} without {text!r}:\n{self.output}"

    def wait_for_step(self, step: int) -> None:
        """Until a loss of `step` or a later one is written."""
        self.wait_until(lambda: any(line["step"] >= step for line in losses(self.directory)), f"step {step}")

    def end(self) -> int:
        """Its exit status, once it has ended."""
        self.wait_until(lambda: self.process.poll() is not None, "its end")
        return self.process.returncode

    def kill(self) -> None:
        """It and all that it started, at once, as if the machine had lost power."""
        for pid in [self.process.pid, *_children(self.process.pid)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def wait_until(self, done: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not done():
            if time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"waited in vain for {what}; output:\n{self.output}")
            time.sleep(0.05)

    def __enter__(self) -> "Launch":
        return self

    def __exit__(self, *_) -> None:
        if self.process.poll() is None:
            self.kill()


def torchrun(directory: Path, *arguments: str, options: list[str], **settings) -> Launch:
    """`torchrun OPTIONS fault_script.py --dir DIRECTORY ARGUMENTS`, or by the `program` that is given in its place."""
    prefix, program = settings.pop("prefix", []), settings.pop("program", ["-m", "torch.distributed.run"])
    command = [
        *prefix,
        sys.executable,
        *program,
        *options,
        str(SCRIPT),
        "--dir",
        str(directory),
        *arguments,
    ]
    return Launch(command, directory, **settings)


def on_one_host(directory: Path, *arguments: str, ranks: int = 2, restarts: int = 0) -> Launch:
    options = ["--standalone", f"--nproc-per-node={ranks}", f"--max-restarts={restarts}"]
    return torchrun(directory, *arguments, options=options)


def alone(directory: Path, *arguments: str) -> Launch:
    """Without torchrun."""
    return Launch([sys.executable, str(SCRIPT), "--dir", str(directory), *arguments], directory)


def losses(directory: Path) -> list[dict]:
    """Every line that a run wrote, those of steps that were done again too."""
    path = directory / "losses.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _children(pid: int) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (folder / "stat").read_text().rpartition(")")[2].split()[1] == str(pid):
                found += [int(folder.name), *_children(int(folder.name))]
    return found

"""How a training by several ranks ends: after a mistake, a fault of the program, and Ctrl-C. The model is the README's."""

import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import unisono_models.training
from tests.training.torchrun import LAUNCH, free_port
from unisono_models.training.run.run_directory import read_provenance

README = Path(unisono_models.training.__file__).with_name("README.md")
RANKS = ["--standalone", "--nproc-per-node", "2"]
STEP = "                loss.backward()\n"


def model(folder: Path, name: str, step: str = STEP) -> str:
    """Write the README's model as a program, with another line instead of its backward."""
    code = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[1]
    assert STEP in code
    (folder / f"{name}.py").write_text(code.replace(STEP, step))
    return str(folder / f"{name}.py")


def run(*command: str, stop_at: Path | None = None, **variables: str) -> tuple[int, list[str]]:
    """The exit status, and what was printed. Ctrl-C is pressed when the file `stop_at` exists."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    env = os.environ | {"OMP_NUM_THREADS": "1"} | variables
    with subprocess.Popen(command, env=env, start_new_session=True, **pipes) as process:
        deadline = time.monotonic() + 100
        while stop_at is not None and not stop_at.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        if stop_at is not None:
            os.killpg(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=120)
    return process.returncode, output.splitlines()


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    folder = tmp_path_factory.mktemp("line")
    raises = "                raise __import__('unisono_models').training.errors.UserError('--lr: no')\n"
    slow = (
        f"                (session.directory.path / 'started').touch()\n                __import__('time').sleep(0.05)\n{STEP}"
    )
    (folder / "fault.py").write_text("raise KeyError('a fault of ours')\n")
    launch = [sys.executable, "-c", LAUNCH, *RANKS]
    stopped = [model(folder, "line", slow), "--run.steps", "10000", "--run.dir"]
    with ThreadPoolExecutor(2) as pool:
        jobs = {
            "mistake": pool.submit(run, *launch, model(folder, "mistake", raises), "--run.dir", str(folder / "mistake")),
            "fault": pool.submit(run, *launch, str(folder / "fault.py")),
            "ctrl-c": pool.submit(run, *launch, *stopped, str(folder / "c"), stop_at=folder / "c/started"),
            "alone": pool.submit(run, sys.executable, *stopped, str(folder / "a"), stop_at=folder / "a/started"),
        }
        yield {name: job.result() for name, job in jobs.items()} | {"folder": folder}


def test_processes_of_any_launcher_are_ranks_of_one_run(tmp_path):
    """As srun starts them: the ranks are known, and MASTER_ADDR and MASTER_PORT are derived."""
    slurm = {"SLURM_JOB_ID": str(free_port()), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    slurm |= {"SLURM_STEP_NODELIST": "localhost"}
    command = [sys.executable, model(tmp_path, "line"), "--run.dir", str(tmp_path / "run")]
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(run, *command, **slurm, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank)) for rank in range(2)]
        (first, printed), (second, silent) = (job.result() for job in jobs)
    assert first == second == 0 and any("step 20/20" in line for line in printed), printed
    assert all("waiting for rank 0" in line for line in silent), silent  # a loaded machine starts slowly, and then that is said
    (start,) = read_provenance(tmp_path / "run")["starts"]
    assert start["world_size"] == 2 and not start["torchrun"] and (tmp_path / "run/summary.json").exists()


def test_a_mistake_of_all_ranks_is_one_message(ended):
    status, lines = ended["mistake"]
    assert status == 2 and lines[-1] == "line: --lr: no" and len(lines) <= 10, lines
    assert sum("--lr: no" in line for line in lines) == 1 and not any("Traceback" in line for line in lines)
    log = (ended["folder"] / "mistake/errors.log").read_text()
    assert log.count("UserError: --lr: no") == 1 and 'mistake.py", line' in log


def test_a_fault_of_the_program_keeps_its_traceback(ended):
    status, lines = ended["fault"]
    assert status == 1 and sum("KeyError: 'a fault of ours'" in line for line in lines) >= 1
    assert any("failed (exitcode: 1)" in line for line in lines)  # what torchrun logs
    assert "fault.py FAILED" in "".join(lines) and lines[-1] == "=" * 60


@pytest.mark.parametrize(("how", "expected"), [("ctrl-c", 128 + signal.SIGINT), ("alone", 0)])
def test_ctrl_c_ends_with_the_step_that_was_saved(ended, how, expected):
    status, lines = ended[how]
    assert status == expected
    assert re.fullmatch(r"stopped after step [\d,]+ of 10,000; the same command continues the run", lines[-1]), lines
    assert not any("Traceback" in line or "SIG" in line for line in lines)

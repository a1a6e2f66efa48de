"""The Triton tiles: right in Triton's interpreter, small enough for the registers of a GPU, and chosen with care."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="this torch comes without Triton")


def test_in_the_interpreter():
    """The interpreter must be chosen before Triton is imported, hence another process."""
    tests = Path(__file__).with_name("interpreted_triton.py")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(tests)]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]

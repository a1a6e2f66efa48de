"""Compile Triton kernels for GPUs that are not there, and read what they take of the GPU."""

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


class Usage(NamedTuple):
    kernel: str
    registers: int
    spilled: int  # bytes of the stack of a thread
    shared: int  # bytes
    ptx: str


class _Driver:
    """Answers what Triton's JIT asks before it compiles."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_device(self) -> int:
        return self.arch

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)


class _Compiler:
    """Stands in for a kernel: a launch binds the arguments and compiles, as ever, and then does nothing."""

    def __init__(self, kernel: Any, add: Callable[[Usage], None]) -> None:
        self.kernel, self.add = kernel, add

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def compile_only(*args: Any, **options: Any) -> None:
            self.add(_usage(self.kernel.__name__, self.kernel.run(*args, grid=grid, warmup=True, **options)))

        return compile_only


def _usage(name: str, compiled: Any) -> Usage:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        report = subprocess.run([CUOBJDUMP, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", report.stdout)
    assert found is not None, report.stdout
    return Usage(name, int(found[1]), int(found[2]), compiled.metadata.shared, compiled.asm["ptx"])


@contextmanager
def compiled_for(arch: int, kernels: ModuleType) -> Iterator[list[Usage]]:
    """Launches of `kernels` on CPU tensors compile for sm_`arch` and compute nothing; the list says what each takes."""
    usages: list[Usage] = []
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(driver, "_active", _Driver(arch)))
        for name, kernel in list(vars(kernels).items()):
            if name.endswith("_kernel"):
                stack.enter_context(mock.patch.object(kernels, name, _Compiler(kernel, usages.append)))
        yield usages

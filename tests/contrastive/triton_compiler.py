"""Compile Triton kernels for GPUs that are not there, and read what they take of the GPU."""

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from unisono.contrastive.tiled import triton_kernels, triton_tiles

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int64: "*i64",
}


class Usage(NamedTuple):
    kernel: str
    registers: int
    spilled: int  # bytes of the stack of a thread
    shared: int  # bytes
    ptx: str


class _Compiler:
    """Stands in for a kernel: a launch compiles it for the types of the arguments, as Triton's JIT would."""

    def __init__(self, kernel: Any, arch: int, add: Callable[[Usage], None]) -> None:
        self.kernel, self.arch, self.add = kernel, arch, add

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert grid[0] > 0
        return self.compile

    def compile(self, *args: Any, **options: Any) -> None:
        names = self.kernel.arg_names
        given = dict(zip(names, args, strict=False)) | {name: options.pop(name) for name in names if name in options}
        types, constants, attributes = {}, {}, {}
        for i, parameter in enumerate(self.kernel.params):
            value = given[parameter.name]
            special = not parameter.do_not_specialize
            if isinstance(value, torch.Tensor):
                types[parameter.name] = POINTERS[value.dtype]
                attributes[i,] = [["tt.divisibility", 16]]
            elif parameter.is_constexpr or value is None or (special and type(value) is int and value == 1):
                types[parameter.name] = "constexpr"
                constants[i,] = value
            elif isinstance(value, float):
                types[parameter.name] = "fp32"
            else:
                types[parameter.name] = "i32"
                if special and value % 16 == 0:
                    attributes[i,] = [["tt.divisibility", 16]]
        source = ASTSource(self.kernel, types, constants, attributes)
        compiled = triton.compile(source, target=GPUTarget("cuda", self.arch, 32), options=options)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            command = [CUOBJDUMP, "--dump-resource-usage", file.name]
            report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found = re.search(r"REG:(\d+) STACK:(\d+)", report)
        assert found is not None, report
        shared = compiled.metadata.shared
        self.add(Usage(self.kernel.__name__, int(found[1]), int(found[2]), shared, compiled.asm["ptx"]))


@contextmanager
def compiled_for(arch: int) -> Iterator[list[Usage]]:
    """Launches of the Triton tiles on CPU tensors compile for sm_`arch` and compute nothing; the list says what each takes."""
    usages: list[Usage] = []
    blocks = triton_tiles.tile_blocks
    with ExitStack() as stack:
        for name, kernel in list(vars(triton_kernels).items()):
            if name.endswith("_kernel"):
                stack.enter_context(mock.patch.object(triton_kernels, name, _Compiler(kernel, arch, usages.append)))
        here = lambda dtype, rows, wide, *_: blocks(dtype, rows, wide, (arch // 10, 0))  # noqa: E731
        stack.enter_context(mock.patch.object(triton_tiles, "tile_blocks", here))
        yield usages

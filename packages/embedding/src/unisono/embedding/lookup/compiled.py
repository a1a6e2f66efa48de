"""The operations of kernels.py compiled from compiled.cpp, which holds them for float32 and float64 rows on CPUs.

The source is compiled on first use into the user's cache directory, once for each compiler. Without a compiler, without a cache
directory of one's own, or with UNISONO_EMBEDDING_KERNELS=torch in the environment, there is no library, and `why_not` says why.
"""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from unisono.embedding.ragged import Ragged
    from unisono.embedding.sharding.table_groups import RowNumbering

_SWITCH = "UNISONO_EMBEDDING_KERNELS"
_SOURCE = Path(__file__).with_suffix(".cpp")
_FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-pthread", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
_COMPILERS = ("c++", "g++", "clang++")
_TIMEOUT = 120.0
_NO_MEMORY = -2
_NAMES = {torch.float32: "float32", torch.float64: "float64", torch.int32: "int32", torch.int64: "int64"}


class Loaded(NamedTuple):
    library: ctypes.CDLL | None
    why_not: str = ""


class NoLibrary(Exception):  # noqa: N818 - no error: torch's operations do the same
    """Says why there is no compiled library."""


@cache
def load() -> Loaded:
    """Compile the library, unless the cache has it, and load it."""
    try:
        return Loaded(_declare(ctypes.CDLL(str(_build()))))
    except NoLibrary as reason:
        return Loaded(None, str(reason))
    except (OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:  # also: no home, words of no encoding
        return Loaded(None, f"{type(error).__name__}: {error}")


def switch_error() -> str:
    """Say what is wrong with the environment variable; "" if nothing is."""
    choice = os.environ.get(_SWITCH, "compiled")
    return "" if choice in ("compiled", "torch") else f"{_SWITCH}={choice!r} is neither 'compiled' nor 'torch'"


def handles(*tensors: Tensor | None, copied: bool = False) -> bool:
    """Whether the library takes these tensors. It does not while a mode of torch, such as FlopCounterMode, sees operations.

    `copied`: other ranks compute the same and must get the same bits. They may be in other modes, so modes do not matter.
    """
    return (
        load().library is not None
        and all(
            x is None
            or (type(x) in (Tensor, nn.Parameter) and x.device.type == "cpu" and x.dtype in _NAMES and x.is_contiguous())
            for x in tensors
        )
        and (copied or torch._C._len_torch_dispatch_stack() == 0)
    )


def join(
    bags: Sequence["Ragged"],
    last_ids: Sequence[int],
    numberings: Sequence["RowNumbering"],
    dropped: Sequence[int],
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, list[int]] | None:
    """Make rows of the ids of all features: the rows, the lengths of bags, and how many ids each feature has.

    Ids that are `dropped` are left out (-1: none). None if an id is out of range, or offsets do not rise
    from 0 to the number of ids.
    """
    rows = torch.empty(sum(x.values.numel() for x in bags), dtype=dtype, device="cpu")
    lengths = torch.empty(sum(x.offsets.numel() - 1 for x in bags), dtype=dtype, device="cpu")
    features = (_Feature * len(bags))()
    shifts, at = [], lengths.data_ptr()
    for k, (ids, offsets, _) in enumerate(bags):
        numbering = numberings[k]
        count = len(numbering.shifts)
        shifts.append((ctypes.c_int64 * count)(*numbering.shifts))
        features[k] = _Feature(
            ids.data_ptr(),
            ids.numel(),
            ids.itemsize,
            offsets.data_ptr(),
            offsets.numel(),
            offsets.itemsize,
            last_ids[k],
            numbering.chunk_size,
            ctypes.addressof(shifts[k]),
            count,
            dropped[k],
            at,
        )
        at += (offsets.numel() - 1) * lengths.itemsize
    if not _function("join")(features, len(bags), rows.data_ptr(), rows.itemsize):
        return None
    id_counts = [feature.kept for feature in features]
    return rows[: sum(id_counts)], lengths, id_counts


def deduplicate(numbers: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """The fields of kernels.Deduplicated; None if a number is negative."""
    n = numbers.numel()
    unique = torch.empty_like(numbers)
    order, starts, counts = (torch.empty(n, dtype=torch.int64, device="cpu") for _ in range(3))
    function = _function("deduplicate", numbers)
    pointers = (x.data_ptr() for x in (unique, order, starts, counts))
    found = _unless_no_memory("deduplicate", function(numbers.data_ptr(), n, *pointers, torch.get_num_threads()))
    return None if found < 0 else (unique[:found], order, starts[:found], counts[:found])


def sum_bags(rows: Tensor, index: Tensor, starts: Tensor, weights: Tensor | None) -> Tensor:
    """What kernels.sum_bags returns."""
    out = rows.new_empty((starts.numel(), rows.shape[1]))
    starts = starts.to(torch.int64)
    bags = _Bags(
        rows.data_ptr(),
        rows.shape[1],
        index.data_ptr(),
        index.numel(),
        starts.data_ptr(),
        starts.numel(),
        _pointer(weights),
        out.data_ptr(),
    )
    _unless_no_memory("sum_bags", _function("sum_bags", rows, index)(ctypes.byref(bags), torch.get_num_threads()))
    return out


class Step(NamedTuple):
    """What an optimizer does to a row: the numbers of its rule."""

    rule: int  # in the order of compiled.cpp: SGD, RowwiseAdagrad, Adagrad, Adam
    rate: float
    weight_decay: float = 0.0
    eps: float = 0.0
    betas: tuple[float, float] = (0.0, 0.0)
    columns: int = 1  # of a whole row


def update(
    step: Step,
    weight: Tensor,
    states: Sequence[Tensor],
    rows: Tensor,
    part: slice,
    grads: Tensor,
    *,
    index: Tensor | None = None,
    starts: Tensor | None = None,
    counts: Tensor | None = None,
    weights: Tensor | None = None,
    divisors: Tensor | None = None,
    squares: Tensor | None = None,
    factor: float = 1.0,
) -> None:
    """Sum the gradients of each of rows[part] and make the optimizer's step, in place.

    The gradient of rows[k] is the sum of grads[index[p]] * weights[p] for p from starts[k] to starts[k] + counts[k], divided by
    divisors[k] and times `factor`; without `index`, it is grads[k]. `squares`: the sums of squares of whole rows.
    """
    first, second = [*(state.data_ptr() for state in states), None, None][:2]
    arguments = _Update(
        weight.data_ptr(),
        first,
        second,
        weight.shape[1],
        rows.data_ptr(),
        part.start,
        part.stop,
        grads.data_ptr(),
        _pointer(index),
        0 if index is None else index.numel(),
        _pointer(starts),
        _pointer(counts),
        _pointer(weights),
        _pointer(divisors),
        _pointer(squares),
        step.rule,
        factor,
        step.weight_decay,
        step.rate,
        step.eps,
        *step.betas,
        step.columns,
    )
    _unless_no_memory("update", _function("update", weight, rows)(ctypes.byref(arguments), torch.get_num_threads()))
    # Autograd must notice, as it does with torch's operations, if a graph that was saved before needs the old values.
    torch.autograd.graph.increment_version([x for x in (weight, *states) if not x.is_inference()])


def _pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _function(name: str, *tensors: Tensor) -> Any:
    return getattr(load().library, "_".join([name, *(_NAMES[x.dtype] for x in tensors)]))


def _unless_no_memory(name: str, returned: int) -> int:
    if returned == _NO_MEMORY:
        raise MemoryError(f"unisono.embedding: {name}: the system gave no memory")
    return returned


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    pointer = ctypes.c_void_p
    library.join.argtypes = (pointer, ctypes.c_int64, pointer, ctypes.c_int64)
    for number in ("int32", "int64"):
        function = getattr(library, f"deduplicate_{number}")
        function.restype = ctypes.c_int64
        function.argtypes = (pointer, ctypes.c_int64, pointer, pointer, pointer, pointer, ctypes.c_int)
        for values in ("float32", "float64"):
            for name in ("sum_bags", "update"):
                getattr(library, f"{name}_{values}_{number}").restype = ctypes.c_int64
    return library


def _build() -> Path:
    """Return the path of the library. Ranks that compile it at the same time write the same bytes, each under its own name."""
    if os.environ.get(_SWITCH) == "torch":
        raise NoLibrary(f"{_SWITCH}=torch")
    if os.name != "posix":
        raise NoLibrary(f"not built on {sys.platform}")
    chosen = shlex.split(os.environ.get("CXX", ""))  # may be "ccache g++"
    commands = [chosen] if chosen else [[name] for name in _COMPILERS]
    compiler = next(([where, *words[1:]] for words in commands if (where := shutil.which(words[0]))), None)
    if compiler is None:
        raise NoLibrary(f"found no C++ compiler ({', '.join(words[0] for words in commands)})")
    version = _run(*compiler, "--version")
    made_of = [_SOURCE.read_text(), version, platform.machine(), *compiler, *_FLAGS]
    key = hashlib.sha256("\0".join(made_of).encode()).hexdigest()
    folder = _cache_folder()
    path = folder / f"embedding-{key[:32]}.so"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=folder) as made_in:
            made = Path(made_in) / path.name
            _run(*compiler, *_FLAGS, str(_SOURCE), "-o", str(made))
            made.chmod(0o700)
            made.replace(path)
    if not _is_only_ours(path):
        raise NoLibrary(f"{path} may have been written by others")
    return path


def _cache_folder() -> Path:
    """A folder of this user that nobody else can write into, since code is loaded from it."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "unisono"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = folder.resolve()  # what is checked is what is used, even if a link on the way is changed afterwards
    if not _is_only_ours(folder):
        raise NoLibrary(f"{folder} may be written by others")
    return folder


def _is_only_ours(path: Path) -> bool:
    found = path.stat()
    return found.st_uid == os.getuid() and not found.st_mode & 0o022


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
    if done.returncode:
        raise NoLibrary(f"{command[0]} failed: {(done.stderr.strip() or 'no message').splitlines()[-1]}")
    return done.stdout


class _Feature(ctypes.Structure):
    _fields_ = (
        ("ids", ctypes.c_void_p),
        ("id_count", ctypes.c_int64),
        ("id_bytes", ctypes.c_int64),
        ("offsets", ctypes.c_void_p),
        ("offset_count", ctypes.c_int64),
        ("offset_bytes", ctypes.c_int64),
        ("last_id", ctypes.c_int64),
        ("chunk_size", ctypes.c_int64),
        ("shifts", ctypes.c_void_p),
        ("chunks", ctypes.c_int64),
        ("dropped", ctypes.c_int64),
        ("lengths", ctypes.c_void_p),
        ("kept", ctypes.c_int64),
    )


class _Bags(ctypes.Structure):
    _fields_ = (
        ("rows", ctypes.c_void_p),
        ("width", ctypes.c_int64),
        ("index", ctypes.c_void_p),
        ("positions", ctypes.c_int64),
        ("starts", ctypes.c_void_p),
        ("bags", ctypes.c_int64),
        ("weights", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
    )


class _Update(ctypes.Structure):
    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("state0", ctypes.c_void_p),
        ("state1", ctypes.c_void_p),
        ("width", ctypes.c_int64),
        ("rows", ctypes.c_void_p),
        ("begin", ctypes.c_int64),
        ("end", ctypes.c_int64),
        ("grads", ctypes.c_void_p),
        ("index", ctypes.c_void_p),
        ("positions", ctypes.c_int64),
        ("starts", ctypes.c_void_p),
        ("counts", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("divisors", ctypes.c_void_p),
        ("squares", ctypes.c_void_p),
        ("rule", ctypes.c_int64),
        ("factor", ctypes.c_double),
        ("weight_decay", ctypes.c_double),
        ("rate", ctypes.c_double),
        ("eps", ctypes.c_double),
        ("beta1", ctypes.c_double),
        ("beta2", ctypes.c_double),
        ("columns", ctypes.c_double),
    )

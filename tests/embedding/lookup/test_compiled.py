"""The compiled kernels give what torch's operations give, are built safely, and are used only where they can be."""

import contextlib
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from unisono.collectives import MismatchError
from unisono.embedding import SGD, Adagrad, Adam, EmbeddingCollection, Layout, Ragged, RowwiseAdagrad, Table
from unisono.embedding.lookup import compiled
from unisono.embedding.lookup.kernels import Deduplicated, deduplicate, sum_bags

needs_compiler = pytest.mark.skipif(compiled.load().library is None, reason=f"torch's operations: {compiled.load().why_not}")
RULES = [SGD(lr=0.1), RowwiseAdagrad(lr=0.1), Adagrad(lr=0.1), Adam(lr=0.1), Adam(lr=0.1, betas=(0.3, 0.6))]
DECAYED = [type(rule)(lr=0.1, weight_decay=0.2) for rule in RULES[:4]]


def without_library():
    return mock.patch.object(compiled, "load", return_value=compiled.Loaded(None, "a test"))


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def fields(x: Deduplicated) -> list[torch.Tensor]:
    return [x.unique, x.order, x.starts, x.counts, x.inverse]


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("n", "limit"), [(0, 1), (1, 1), (7, 3), (3000, 2000), (200_000, 60_000), (5000, 2**31 - 1)])
def test_deduplicate_equals_torch(dtype, n, limit, threads):
    numbers = torch.randint(limit, (n,), dtype=dtype)
    with without_library():
        expected = deduplicate(numbers)
    for count in (1, 3):
        threads(count)
        found = deduplicate(numbers)
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(fields(found), fields(expected), strict=True))


@needs_compiler
def test_deduplicate_takes_any_int64():
    for numbers in (torch.randint(2**62, (4000,)) >> torch.randint(60, (4000,)), torch.tensor([3, -1, 3, -5])):
        with without_library():
            expected = deduplicate(numbers)
        assert all(torch.equal(a, b) for a, b in zip(fields(deduplicate(numbers)), fields(expected), strict=True))


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("width", [1, 5, 16, 24, 64, 131])
def test_sum_bags_equals_torch(dtype, index_dtype, width, threads):
    rows = torch.randn(50, width, dtype=dtype)
    lengths = torch.randint(5, (700,))
    lengths[[0, -1]] = 0
    index = torch.randint(50, (int(lengths.sum()),), dtype=index_dtype)
    starts = lengths.cumsum(0) - lengths
    for weights in (None, torch.randn(len(index), dtype=torch.float64)):
        with without_library():
            expected = sum_bags(rows, index, starts, weights)
        threads(1)
        found = sum_bags(rows, index, starts, weights)
        torch.testing.assert_close(found, expected, rtol=4 * torch.finfo(dtype).eps, atol=20 * torch.finfo(dtype).eps)
        threads(3)
        assert torch.equal(sum_bags(rows, index, starts, weights), found)


def train(rule, dtype, plan="row") -> dict[str, torch.Tensor]:
    """Three steps of tables with all options, one of them frozen in the second; weights and states afterwards."""
    torch.manual_seed(0)
    tables = [
        Table("plain", 40, 67, features=["a", "b"]),
        Table("mean", 30, 67, mode="mean", padding_idx=3),
        Table("rows", 30, 8, mode=None, padding_idx=0),
        Table("max", 30, 8, mode="max"),
        Table("frequent", 20, 16, scale_grad_by_freq=True),
        Table("frozen", 20, 67),
    ]
    collection = EmbeddingCollection(tables, plan=plan, optimizer=rule, dtype=dtype, grad_reduce="mean")
    draw = torch.Generator().manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    for step in range(3):
        lengths = torch.randint(6, (12,), generator=draw)
        n = int(lengths.sum())
        features = {
            name: Ragged.from_lengths(torch.randint(20, (n,), generator=draw), lengths)
            for name in ("a", "b", "mean", "rows", "max", "frequent", "frozen")
        }
        features["b"] = features["b"]._replace(weights=torch.rand(n, generator=draw, dtype=dtype))
        collection.weight("frozen").requires_grad_(step != 1)
        found = collection(features)
        loss = sum((x.values if isinstance(x, Ragged) else x).square().sum() for x in found.values())
        loss.backward()
    state = collection.state_dict()
    return {name: getattr(x, "_local_tensor", x).clone() for name, x in state.items()}


def assert_same_training(rule, dtype, plan) -> None:
    with mock.patch.object(compiled, "update", wraps=compiled.update) as update:
        found = train(rule, dtype, plan)
        assert update.call_count
        with without_library():
            update.reset_mock()
            expected = train(rule, dtype, plan)
            assert not update.call_count
    tolerance = {torch.float32: 2e-5, torch.float64: 1e-12}[dtype]
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rule", [*RULES, *DECAYED], ids=str)
def test_update_equals_torch(rule, dtype):
    assert_same_training(rule, dtype, "row")


def update_on_ranks() -> None:
    column = {name: Layout.column() for name in ("plain", "mean", "rows", "max", "frequent", "frozen")}
    for plan in ("row", "replicated", column):
        for rule in (RowwiseAdagrad(lr=0.1, weight_decay=0.2), Adam(lr=0.1)):
            assert_same_training(rule, torch.float64, plan)


@needs_compiler
def test_update_on_ranks_equals_torch(ranks):
    ranks(update_on_ranks, world_size=3)


@needs_compiler
def test_update_does_not_depend_on_threads(threads):
    """Each row is summed by one thread."""
    found = []
    for count in (1, 3):
        threads(count)
        torch.manual_seed(0)
        collection = EmbeddingCollection([Table("t", 5000, 64)], optimizer=RowwiseAdagrad(lr=0.1))
        collection({"t": torch.randint(5000, (4000, 3), generator=torch.Generator().manual_seed(1))})[
            "t"
        ].square().sum().backward()
        found.append(collection.full_weight("t"))
    assert torch.equal(*found)


@needs_compiler
def test_kernels_says_what_computes(monkeypatch):
    def kernels(**options) -> str:
        return EmbeddingCollection([Table("t", 4, 2)], plan="row", **options).kernels

    assert kernels() == kernels(dtype=torch.float64) == "compiled"
    assert kernels(dtype=torch.bfloat16) == "torch: the tables are torch.bfloat16"
    assert kernels(device="meta") == "torch: the tables are on meta"
    with without_library():
        assert kernels() == "torch: a test"
    monkeypatch.setenv("UNISONO_EMBEDDING_KERNELS", "fast")
    with pytest.raises(MismatchError, match="UNISONO_EMBEDDING_KERNELS='fast' is neither 'compiled' nor 'torch'"):
        kernels()


def one_rank_without() -> None:
    loaded = compiled.load() if dist.get_rank() != 1 else compiled.Loaded(None, "no compiler")
    with mock.patch.object(compiled, "load", return_value=loaded):
        collection = EmbeddingCollection([Table("t", 4, 2)], plan="replicated", optimizer=SGD(lr=0.1))
    assert collection.kernels == ("torch: no compiler" if dist.get_rank() == 1 else "torch: rank 1 has no compiled library")


@needs_compiler
def test_all_ranks_use_the_same_kernels(ranks):
    """Copies of a replicated table would drift apart by their roundings."""
    ranks(one_rank_without, world_size=2)


def train_watched(options) -> torch.Tensor:
    """Train copies of a table while a mode of torch counts the operations of one rank."""
    torch.manual_seed(0)
    collection = EmbeddingCollection([Table("t", 40, 24)], plan="replicated", dtype=torch.float32, **options)
    optimizer = None if collection.optimizer else torch.optim.SGD(collection.parameters(), lr=0.1)
    draw = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(4):
        with FlopCounterMode(display=False) if dist.get_rank() == 1 else contextlib.nullcontext():
            found = collection({"t": torch.randint(40, (300, 4), generator=draw)})["t"]
            (found * torch.randn(300, 24, generator=draw)).sum().backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    return collection.full_weight("t")


def train_all_watched() -> list[torch.Tensor]:
    return [train_watched(options) for options in [*({"optimizer": rule} for rule in RULES[:4]), {}]]


@needs_compiler
def test_copies_are_the_same_if_one_rank_counts_operations(ranks):
    for one, other in zip(*ranks(train_all_watched, world_size=2), strict=True):
        assert torch.equal(one, other)


@needs_compiler
@pytest.mark.parametrize("rule", RULES[:4], ids=str)
def test_autograd_notices_a_step(rule):
    collection = EmbeddingCollection([Table("t", 10, 4)], optimizer=rule, plan="row")
    penalty = collection.weight("t").square().sum()
    collection({"t": torch.tensor([1, 2])})["t"].sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        penalty.backward()


WITHOUT_MEMORY = """
import resource, torch
from unisono.embedding.lookup import compiled

torch.set_num_threads(1)
numbers = torch.arange(1 << 23)
compiled.deduplicate(numbers[:10])
pages = int(open("/proc/self/statm").read().split()[0])
tensors = 4 * numbers.nbytes  # the results; the sort needs half as much again
limit = pages * resource.getpagesize() + tensors + (32 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    compiled.deduplicate(numbers)
except MemoryError as error:
    print(error)
"""


@needs_compiler
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_memory_is_an_error():
    done = subprocess.run([sys.executable, "-c", WITHOUT_MEMORY], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "unisono.embedding: deduplicate: the system gave no memory\n", (done.returncode, done.stderr)


COMPILER = """#!/bin/sh
[ "$1" = --version ] && { echo "a test {version}"; exit; }
echo compiled >> {log}
while [ "$1" != -o ]; do shift; done
sleep 0.1
echo library > "$2"
"""


@pytest.fixture
def build(tmp_path, monkeypatch):
    """Build with a compiler that only writes down its calls."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("UNISONO_EMBEDDING_KERNELS", raising=False)
    log = tmp_path / "log"
    log.touch()

    def choose(version: int) -> None:
        script = tmp_path / f"compiler{version}"
        script.write_text(COMPILER.replace("{version}", str(version)).replace("{log}", str(log)))
        script.chmod(0o700)
        monkeypatch.setenv("CXX", str(script))

    def build(version: int = 1) -> Path:
        choose(version)
        return compiled._build()

    build.choose = choose
    build.calls = lambda: len(log.read_text().splitlines())
    return build


def test_library_is_built_once_for_each_compiler(build):
    path = build()
    assert build() == path and path.read_text() == "library\n" and build.calls() == 1
    assert build(version=2) != path and build.calls() == 2
    assert (path.parent.stat().st_mode & 0o777, path.stat().st_mode & 0o777) == (0o700, 0o700)


def test_many_builds_at_once_leave_one_library(build):
    build.choose(version=1)
    with ThreadPoolExecutor(4) as pool:
        (path,) = set(pool.map(lambda _: compiled._build(), range(4)))
    assert build.calls() > 1
    assert [x.name for x in path.parent.iterdir()] == [path.name] and path.read_text() == "library\n"


@pytest.mark.parametrize("where", ["folder", "library"])
def test_library_that_others_may_write_is_not_loaded(build, where):
    path = build()
    (path if where == "library" else path.parent).chmod(0o770)
    with pytest.raises(compiled.NoLibrary, match="others"):
        build()


def test_no_library_has_a_reason(build, monkeypatch, tmp_path):
    def reason() -> str:
        found = compiled.load.__wrapped__()
        assert found.library is None
        return found.why_not

    build()
    assert "OSError" in reason()  # what this compiler made is no library
    monkeypatch.setenv("CXX", "false")
    assert reason().endswith("failed: no message")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert reason() == "found no C++ compiler (no-such-compiler)"
    build(version=3)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert "NotADirectoryError" in reason()
    monkeypatch.setenv("UNISONO_EMBEDDING_KERNELS", "torch")
    assert reason() == "UNISONO_EMBEDDING_KERNELS=torch"


def test_no_home_and_strange_compilers_have_a_reason(build, monkeypatch, tmp_path):
    build.choose(version=4)
    monkeypatch.delenv("XDG_CACHE_HOME")
    with mock.patch.object(Path, "home", side_effect=RuntimeError("Could not determine home directory.")):
        assert compiled.load.__wrapped__().why_not == "RuntimeError: Could not determine home directory."
    script = tmp_path / "latin"
    script.write_bytes(b"#!/bin/sh\nprintf '\\377'\n")
    script.chmod(0o700)
    monkeypatch.setenv("CXX", str(script))
    assert compiled.load.__wrapped__().why_not.startswith("UnicodeDecodeError")
    monkeypatch.setenv("CXX", "'g++")
    assert compiled.load.__wrapped__().why_not == "ValueError: No closing quotation"


def test_compiler_may_have_words_before_it(build, monkeypatch):
    path = build()
    compiler = os.environ["CXX"]
    monkeypatch.setenv("CXX", f"env {compiler}")
    other = compiled._build()
    assert other != path and other.read_text() == "library\n" and build.calls() == 2
    assert compiled._build() == other and build.calls() == 2


def test_links_of_the_cache_are_followed_once(build, tmp_path, monkeypatch):
    """A link that others may change must not decide, after the check, what is loaded."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "link"))
    assert build().parent == (tmp_path / "real" / "unisono").resolve()


def test_read_only_cache_has_a_reason(build):
    build.choose(version=2)
    with mock.patch.object(compiled.tempfile, "TemporaryDirectory", side_effect=PermissionError(13, "read-only")):
        assert compiled.load.__wrapped__().why_not.startswith("PermissionError")

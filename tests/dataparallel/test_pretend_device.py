"""The pretend device itself: asynchronous as CUDA, and a mistake in the order of streams shows every time."""

from __future__ import annotations

import copy
import ctypes
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from tests.dataparallel import pretend_device

TIMES = 20


def current(device: str) -> torch.Stream:
    return torch.accelerator.current_stream(device)


def values(n: int = 6) -> Tensor:
    return torch.arange(1.0, n + 1, dtype=torch.float64)


def test_devices_are_there_for_this_test_only(pretend: ModuleType) -> None:
    assert torch.accelerator.is_available() and torch.accelerator.device_count() == 4
    assert torch.accelerator.current_accelerator() == torch.device("pretend")
    pretend.set_available(False)
    assert not torch.accelerator.is_available() and torch.accelerator.device_count() == 0


@pytest.mark.parametrize("waits", [False, True])
def test_missing_wait_stream_reads_nan_every_time(pretend: ModuleType, waits: bool) -> None:
    x, side = values().pin_memory(), torch.Stream(device="pretend:1")
    for _ in range(TIMES):
        with pretend.hold_async_copies():
            with side:
                y = x.to("pretend:1", non_blocking=True)
            if waits:
                current("pretend:1").wait_stream(side)
                y.record_stream(current("pretend:1"))
            z = (y * 2).cpu()
        assert z.equal(x * 2) if waits else z.isnan().all()
    assert len(pretend.races()) == (0 if waits else TIMES)


@pytest.mark.parametrize("waits", [False, True])
def test_missing_wait_for_the_producer_is_a_race(pretend: ModuleType, waits: bool) -> None:
    side = torch.Stream(device="pretend:0")
    x = values().to("pretend:0") + 1
    if waits:
        side.wait_stream(current("pretend:0"))
    with side:
        x.to("cpu", non_blocking=True)
    side.synchronize()
    assert ["reads what pretend:0 stream 0 writes" in race for race in pretend.races()] == ([] if waits else [True])


@pytest.mark.parametrize("records", [False, True])
def test_missing_record_stream_gives_nan_every_time(pretend: ModuleType, records: bool) -> None:
    side = torch.Stream(device="pretend:2")
    for _ in range(TIMES):
        with pretend.hold_async_copies():
            x = values().to("pretend:2") * 2
            side.wait_stream(current("pretend:2"))
            with side:
                y = x.to("cpu", non_blocking=True)
            if records:
                x.record_stream(side)
            del x
            side.synchronize()
            assert y.equal(values() * 2) if records else y.isnan().all()
    assert len(pretend.races()) == (0 if records else TIMES)


@pytest.mark.parametrize("records", [False, True])
def test_missing_record_stream_is_a_race_where_a_kernel_used_the_memory(pretend: ModuleType, records: bool) -> None:
    side = torch.Stream(device="pretend:2")
    with side:
        x = values().pin_memory().to("pretend:2", non_blocking=True)
    current("pretend:2").wait_stream(side)
    x.sin()
    if records:
        x.record_stream(current("pretend:2"))
    del x
    assert ["record_stream is missing" in race for race in pretend.races()] == ([] if records else [True])


def test_free_after_the_home_stream_waited_is_safe(pretend: ModuleType) -> None:
    side = torch.Stream(device="pretend:0")
    x = values().to("pretend:0")
    side.wait_stream(current("pretend:0"))
    with side:
        y = x.to("cpu", non_blocking=True)
    current("pretend:0").wait_stream(side)
    del x
    side.synchronize()
    assert y.equal(values()) and not pretend.races()


def test_new_memory_is_nan_and_reused(pretend: ModuleType) -> None:
    x = torch.zeros(5, device="pretend:0")
    address = x.data_ptr()
    del x
    y = torch.empty(5, device="pretend:0")
    assert y.data_ptr() == address and y.cpu().isnan().all()


def test_copies_between_devices_order_both_sides(pretend: ModuleType) -> None:
    with pretend.hold_async_copies():
        x = values().to("pretend:0")
        y = x.to("pretend:1") + 1  # waits for the copy, which is work of pretend:0
        x.zero_()  # comes after the copy
        assert y.cpu().equal(values() + 1)
    assert not pretend.races()


def test_pinned_memory_outlives_queued_copies_and_is_nan_after(pretend: ModuleType) -> None:
    x, side = values().pin_memory(), torch.Stream(device="pretend:0")
    alias = torch.frombuffer((ctypes.c_double * 6).from_address(x.data_ptr()), dtype=torch.float64)
    with pretend.hold_async_copies():
        with side:
            y = x[1:].to("pretend:0", non_blocking=True)
        del x
        assert alias.equal(values())
        side.synchronize()
    assert alias.isnan().all() and y.cpu().equal(values()[1:])


def test_results_on_the_host_are_pinned_and_nan_until_waited_for(pretend: ModuleType) -> None:
    x = values().to("pretend:3")
    with pretend.hold_async_copies():
        y = x.to("cpu", non_blocking=True)
        assert y.is_pinned() and y[2:].is_pinned() and y.isnan().all()
        torch.accelerator.synchronize("pretend:3")
        assert y.equal(values())
        assert x.cpu().equal(values()) and not x.cpu().is_pinned()
        z = torch.empty(6, dtype=torch.float64)
        assert z.copy_(x, non_blocking=True).equal(values())  # not pinned: the copy blocks


def test_events_order_streams(pretend: ModuleType) -> None:
    first, second = torch.Stream(device="pretend:0"), torch.Stream(device="pretend:0")
    a, b = values().pin_memory(), (values() + 10).pin_memory()
    x = torch.zeros(6, dtype=torch.float64, device="pretend:0")
    torch.accelerator.synchronize("pretend:0")
    with pretend.hold_async_copies():
        with first:
            x.copy_(a, non_blocking=True)
        event = first.record_event()
        with first:
            x.copy_(b, non_blocking=True)
        second.wait_event(event)
        assert not event.query()
        with second:
            y = x.to("cpu", non_blocking=True)  # sees a: the event stands before b; to write b here is a race
        second.synchronize()
        assert event.query() and y.equal(values()) and not first.query()
        event.record(first)
        event.synchronize()
        assert x.cpu().equal(b)
    assert len(pretend.races()) == 1


def test_polling_ends_while_copies_are_held(pretend: ModuleType) -> None:
    x, side = values().pin_memory(), torch.Stream(device="pretend:0")
    with pretend.hold_async_copies(), side:
        y = x.to("pretend:0", non_blocking=True)
        asked = 0
        while not side.query():
            asked += 1
        assert asked == 1 and y.cpu().equal(x)


def test_held_copies_run_by_themselves_afterwards(pretend: ModuleType) -> None:
    side = torch.Stream(device="pretend:0")
    with pretend.hold_async_copies(), side:
        values().pin_memory().to("pretend:0", non_blocking=True)
        event = side.record_event()
    while not event.query():
        pass


def test_device_and_stream_belong_to_the_thread(pretend: ModuleType) -> None:
    side = torch.Stream(device="pretend:2")
    seen = {}

    def look() -> None:
        seen["new"] = torch.accelerator.current_device_index(), current("pretend:2")
        torch.accelerator.set_device_index(1)
        seen["set"] = torch.accelerator.current_device_index()

    with torch.accelerator.device_index(3), side:
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        assert torch.accelerator.current_device_index() == 2 and current("pretend:2") == side
    assert seen["new"][0] == 0 and seen["new"][1] != side and seen["set"] == 1
    assert torch.accelerator.current_device_index() == 0 and torch.empty(1, device="pretend").device.index == 0


def test_counters(pretend: ModuleType) -> None:
    x = values().to("pretend:0")
    y = x.to("pretend:1")
    y.clone()
    assert (y + 1)[:2].cpu().equal(torch.tensor([2.0, 3.0], dtype=torch.float64))
    got = pretend.counters()
    assert [got[way] for way in ("h2d", "d2h", "d2d", "local")] == [1, 1, 1, 1]
    assert [got[way + "_bytes"] for way in ("h2d", "d2h", "d2d", "local")] == [48, 16, 48, 48]
    assert (got["kernels"], got["allocations"], got["host_waits"]) == (1, 4, 2)
    assert got["peak_bytes"] >= got["live_bytes"] + 512
    pretend.reset_counters()
    assert pretend.counters()["h2d"] == 0 and pretend.counters()["live_bytes"] == got["live_bytes"]


def test_derivatives_across_devices(pretend: ModuleType) -> None:
    def function(a: Tensor, b: Tensor) -> Tensor:
        product = a.to("pretend:0").sin() @ b.to("pretend:1").exp().to("pretend:0")
        return product.to("pretend:1").cos().cpu()

    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 3), (3, 2))]
    with pretend.hold_async_copies():
        assert torch.autograd.gradcheck(function, inputs) and torch.autograd.gradgradcheck(function, inputs)
    assert not pretend.races()


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lower = nn.Sequential(
            nn.Embedding(11, 16), nn.Unflatten(-1, (4, 2, 2)), nn.Flatten(0, 1), nn.Conv2d(4, 4, 3, padding=1)
        )
        self.lower.extend([nn.BatchNorm2d(4), nn.GELU(), nn.Flatten(1), nn.Unflatten(0, (3, 5))])
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.upper = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 7), nn.Softmax(-1), nn.Flatten(0, 1))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.lower(tokens).to(targets.device)
        return nn.functional.cross_entropy(self.upper(self.attention(x, x, x)[0]), targets)


def test_modules_on_two_devices_match_the_host(pretend: ModuleType) -> None:
    torch.manual_seed(0)
    here = Network().double()
    there = copy.deepcopy(here)
    there.lower.to("pretend:0"), there.attention.to("pretend:2"), there.upper.to("pretend:2")
    tokens, targets = torch.randint(11, (3, 5)), torch.randint(7, (15,))
    for _ in range(2):
        loss = here(tokens, targets)
        loss.backward()
        with pretend.hold_async_copies():
            other = there(tokens.to("pretend:0"), targets.to("pretend:2"))
            other.backward()
        torch.testing.assert_close(other.cpu(), loss)
        for p, q in zip(here.parameters(), there.parameters(), strict=True):
            torch.testing.assert_close(q.grad.cpu(), p.grad)
            assert q.grad.device == q.device
        for network in (here, there):
            torch.optim.SGD(network.parameters(), lr=0.1).step()
    for name, value in there.state_dict().items():
        torch.testing.assert_close(value.cpu(), here.state_dict()[name])
    assert not pretend.races()


def test_backward_of_work_on_a_side_stream(pretend: ModuleType) -> None:
    x, side = torch.randn(3, 4, dtype=torch.float64).pin_memory(), torch.Stream(device="pretend:1")
    weight = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    main, there = current("pretend:1"), weight.detach().to("pretend:1").requires_grad_()
    for _ in range(TIMES):
        with pretend.hold_async_copies():
            with side:
                hidden = (x.to("pretend:1", non_blocking=True) @ there).tanh()
            main.wait_stream(side)
            hidden.record_stream(main)
            (got,) = torch.autograd.grad((hidden * 3).sum() + hidden.to("pretend:2").sin().sum().to("pretend:1"), there)
            expected = (x @ weight).tanh()
            (wanted,) = torch.autograd.grad((expected * 3).sum() + expected.sin().sum(), weight)
            torch.testing.assert_close(got.cpu(), wanted)
    assert not pretend.races()


def test_layouts_and_dtypes_survive_copies(pretend: ModuleType) -> None:
    x = torch.randn(3, 4, dtype=torch.complex128)
    for y in (x.t(), x[:, ::2], x.conj(), x.imag, x[:0], x[0, 0], x.real.to(torch.bfloat16), x.real > 0, x[:1].expand(5, 4)):
        there = y.to("pretend:0").to("pretend:1")
        assert there.cpu().equal(y) and there.stride() == y.to("cpu", copy=True).stride()


def test_mixed_devices_are_rejected(pretend: ModuleType) -> None:
    x, y = torch.ones(2, device="pretend:0"), torch.ones(2, device="pretend:1")
    for call in (lambda: x + y, lambda: torch.mm(x[None], y[:, None]), lambda: x + torch.ones(2), lambda: torch.dot(x, y)):
        with pytest.raises(RuntimeError, match="same device"):
            call()
    assert (x + torch.tensor(1.0)).device == x.device
    with pytest.raises(RuntimeError, match="pretend:4 does not exist"):
        torch.empty(1, device="pretend:4")


def test_autocast(pretend: ModuleType) -> None:
    x = torch.randn(2, 3, device="pretend:1", requires_grad=True)
    with torch.autocast("pretend", dtype=torch.bfloat16):
        y = nn.Linear(3, 3).to("pretend:1")(x)
    assert y.dtype == torch.bfloat16 and torch.autograd.grad(y.sum(), x)[0].dtype == torch.float32


def test_no_compiler_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pretend_device, "CACHE", tmp_path)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(pretend_device.NoCompilerError, match="needs a C\\+\\+ compiler"):
        pretend_device._built()


START = """
import torch
from tests.dataparallel import pretend_device
pretend_device.load()
pretend_device.set_available(True)
x, side = torch.ones(9).pin_memory(), torch.Stream(device="pretend:1")
kept = [x.to(f"pretend:{d}", non_blocking=True).requires_grad_() for d in range(4)]
(kept[1] @ kept[0].to("pretend:1")).backward()
pretend_device.hold_async_copies().__enter__()
with side:
    kept += [x.to("pretend:1", non_blocking=True), kept[1].detach().to("cpu", non_blocking=True)]
"""
LATE = """
import torch
torch.ones(1, requires_grad=True).backward()
from tests.dataparallel import pretend_device
pretend_device.load()
"""


def test_processes_exit_cleanly(pretend: ModuleType) -> None:
    programs = {START: "", START + "raise ValueError('ours')": "ValueError: ours", LATE: "before the first backward"}
    root = Path(__file__).parents[2]
    started = [
        subprocess.Popen([sys.executable, "-c", program], cwd=root, stderr=subprocess.PIPE, text=True) for program in programs
    ]
    for process, said in zip(started, programs.values(), strict=True):
        _, errors = process.communicate(timeout=120)
        assert process.returncode == bool(said) and said in errors and (said or not errors)

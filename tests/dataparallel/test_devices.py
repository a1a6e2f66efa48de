"""The order of copies and computation on asynchronous devices: right every time, and a mistake shows every time.

Copies that run ahead of nobody (`hold_async_copies`) make whoever does not wait for them read NaN, and the devices name every
use of memory that nothing orders (`races`).
"""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from unisono.dataparallel import ReplicaSet, broadcast, gather, reduce_add, scatter
from unisono.dataparallel.replicas.devices import Copies, copy_stream

DEVICES = [f"pretend:{k}" for k in range(4)]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.BatchNorm1d(8), nn.Linear(8, 3)).eval()


def there_and_back() -> torch.Tensor:
    parts = scatter({"x": torch.arange(22.0).view(11, 2), "scale": torch.tensor(2.0)}, DEVICES)
    return gather([part["x"] * part["scale"] for part in parts], "cpu")


def spread_and_add() -> torch.Tensor:
    rows = broadcast([torch.arange(6.0), torch.ones(3)], DEVICES)
    return torch.cat(reduce_add([[x * 2 for x in row] for row in rows], "cpu"))


def add_on_a_device() -> torch.Tensor:
    rows = broadcast([torch.arange(6.0), torch.ones(3)], DEVICES)
    return torch.cat(reduce_add(rows, "pretend:3")).cpu()


def pass_on() -> torch.Tensor:
    """What came from the host is on its way to the next device when it is freed."""
    return torch.cat([scatter(torch.arange(8.0), DEVICES)[k].to(DEVICES[3 - k], non_blocking=True).cpu() for k in range(4)])


def infer() -> torch.Tensor:
    with torch.inference_mode():
        return ReplicaSet(network(), DEVICES, output_device="cpu")(torch.linspace(-1, 1, 35).view(7, 5))


def evaluate() -> torch.Tensor:
    return torch.cat(
        list(ReplicaSet(network(), DEVICES, output_device="cpu").map(torch.linspace(-1, 1, 35).view(7, 5).split(2)))
    )


def train() -> torch.Tensor:
    module = network()
    ReplicaSet(module, DEVICES)(torch.linspace(-1, 1, 35).view(7, 5)).square().sum().backward()
    return torch.cat([x.grad.flatten() for x in module.parameters()])


def train_from_a_device() -> torch.Tensor:
    """The module and the batch on devices already: copies from device to device, in the backward too."""
    module = network().to("pretend:1")
    x = torch.linspace(-1, 1, 35).view(7, 5).to("pretend:2").requires_grad_()
    ReplicaSet(module, DEVICES)(x).square().sum().backward()
    return torch.cat([x.grad.flatten().cpu() for x in [*module.parameters(), x]])


CASES = [there_and_back, pass_on, spread_and_add, add_on_a_device, infer, evaluate, train, train_from_a_device]


def expected_of(case: Callable[[], torch.Tensor]) -> torch.Tensor:
    x = torch.linspace(-1, 1, 35).view(7, 5)
    if case is there_and_back:
        return torch.arange(22.0).view(11, 2) * 2
    if case is pass_on:
        return torch.arange(8.0)
    if case in (spread_and_add, add_on_a_device):
        return torch.cat([torch.arange(6.0), torch.ones(3)]) * (8 if case is spread_and_add else 4)
    module = network()
    if case in (infer, evaluate):
        return module(x).detach()
    x.requires_grad_()
    module(x).square().sum().backward()
    return torch.cat([x.grad.flatten() for x in [*module.parameters(), *([x] if case is train_from_a_device else [])]])


@pytest.mark.parametrize("case", CASES)
def test_everything_is_ordered(case, pretend):
    for _ in range(5):
        with pretend.hold_async_copies():
            torch.testing.assert_close(case(), expected_of(case))
        torch.testing.assert_close(case(), expected_of(case))
    assert pretend.races() == []


@pytest.mark.parametrize("case", CASES)
def test_everything_is_ordered_on_streams_of_the_caller(case, pretend):
    with torch.Stream(device=DEVICES[0]), torch.Stream(device=DEVICES[2]), pretend.hold_async_copies():
        torch.testing.assert_close(case(), expected_of(case))
    assert pretend.races() == []


@pytest.mark.parametrize("case", [there_and_back, spread_and_add, infer, evaluate, train])
def test_a_missing_wait_shows_every_time(case, pretend, monkeypatch):
    monkeypatch.setattr(Copies, "join", lambda self: None)
    for _ in range(10):
        with pretend.hold_async_copies():
            assert not torch.allclose(case(), expected_of(case))


def test_a_missing_record_stream_shows(pretend, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
    with pretend.hold_async_copies():
        pass_on()
    assert pretend.races() != []


def test_the_host_does_not_wait_for_what_it_sends(pretend):
    """Scatter is done when the copies are queued; only results on the host are waited for."""
    with pretend.hold_async_copies():
        before = pretend.counters()["host_waits"]
        parts = scatter(torch.randn(8, 3), DEVICES)
        broadcast([torch.randn(3), torch.randn(4)], DEVICES)
        assert pretend.counters()["host_waits"] == before
        gather(parts, "cpu")
        assert before < pretend.counters()["host_waits"] <= before + len(DEVICES)


def test_what_is_pinned_already_is_not_staged_again(pretend):
    x = torch.randn(8, 3).pin_memory()
    pretend.reset_counters()
    scatter(x, DEVICES)
    assert pretend.counters()["pinned_allocations"] == 0
    scatter(x.clone(), DEVICES)
    assert pretend.counters()["pinned_allocations"] == len(DEVICES)


def test_one_copy_stream_for_each_device_whoever_asks(pretend):
    streams: list[Any] = []
    threads = [threading.Thread(target=lambda d=d: streams.append((d, copy_stream(torch.device(d))))) for d in DEVICES * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(streams)) == len(DEVICES) and all(str(stream.device) == device for device, stream in streams)
    assert copy_stream(torch.device("cpu")) is None


def test_many_threads_at_once(pretend):
    """Each scatters and gathers on the same devices, over the same copy streams."""
    wrong: list[Any] = []

    def work(seed: int) -> None:
        x = torch.full((9, 2), float(seed))
        for _ in range(10):
            y = gather([part * 2 for part in scatter(x, DEVICES)], "cpu")
            if not torch.equal(y, 2 * x):
                wrong.append((seed, y))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [] and pretend.races() == []

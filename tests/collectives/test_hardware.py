"""The time model: parts by hand, a lower bound and an estimate, constants that are shown and can be replaced."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from unisono.collectives import A100_SXM, H100_SXM, count_costs
from unisono.collectives.ledger.hardware import Hardware, KernelGroup, Message, time_parts

SIMPLE = replace(
    H100_SXM,
    flops={"float32": 1e9},
    memory_bandwidth=1e9,
    link_bandwidth=1e9,
    network_bandwidth=1e8,
    gpus_per_host=4,
    launch_seconds=1e-3,
    host_sync_seconds=1.0,
    link_latency=0.0,
    network_latency=0.0,
    message_seconds=0.0,
)


def test_kernels_take_the_longest_of_compute_memory_and_launch() -> None:
    kernels = Counter(
        {
            KernelGroup(1, 5 * 10**6, 10**6, "float32"): 2,  # 5 ms of compute
            KernelGroup(1, 0, 3 * 10**6, ""): 1,  # 3 ms of memory
            KernelGroup(4, 0, 10, ""): 1,  # 4 ms of launches
        }
    )
    parts = time_parts(kernels, Counter(), 2, SIMPLE)
    assert parts.compute == pytest.approx(10e-3)
    assert parts.memory == pytest.approx(5e-3 + 1e-8)
    assert parts.launches == pytest.approx(7e-3)
    assert parts.estimate == pytest.approx(2 * 5e-3 + 3e-3 + 4e-3 + 2.0)
    assert parts.lower_bound == pytest.approx(10e-3 + 2.0)


@pytest.mark.parametrize(
    ("name", "ranks", "sent", "received", "seconds"),
    [
        ("all_gather", 4, 3_000_000, 3_000_000, 3e-3),  # one host: 3 MB over the links
        ("all_gather", 8, 7_000_000, 7_000_000, 4e6 / 4 / 1e8),  # two hosts: 4 MB come over four NICs
        ("all_reduce", 8, 7_000_000, 7_000_000, 4e6 / 4 / 1e8),
        ("all_to_all", 8, 7_000_000, 7_000_000, 4e6 / 1e8),  # every GPU sends its own 4 MB over its own NIC
        ("broadcast", 4, 3_000_000, 0, 1e-3),  # the root hands 1 MB to the next
        ("broadcast", 4, 0, 1_000_000, 1e-3),
        ("reduce", 4, 0, 3_000_000, 1e-3),
        ("send", 8, 1_000_000, 0, 1e6 / 1e8),
        ("all_gather", 1, 0, 0, -1e-3),
    ],
)
def test_collectives_take_the_slower_of_links_and_network(
    name: str, ranks: int, sent: int, received: int, seconds: float
) -> None:
    message = Message(name, tuple(range(ranks)), 0, sent, received)
    assert SIMPLE.collective_seconds(message) == pytest.approx(seconds + 1e-3)  # and one launch


def test_latency_grows_with_the_hops() -> None:
    slow = replace(SIMPLE, link_latency=1e-3, network_latency=1e-2)

    def seconds(name: str, size: int) -> float:
        return slow.collective_seconds(Message(name, tuple(range(size)), 0, 0, 0)) - 1e-3

    assert seconds("all_gather", 4) == pytest.approx(3e-3)
    assert seconds("all_gather", 16) == pytest.approx(3e-3 + 3e-2)
    assert seconds("all_reduce", 16) == pytest.approx(2 * (2e-3 + 2e-2))


def test_a_send_and_a_recv_share_the_time_of_the_link() -> None:
    sent, received = (Message(name, (0, 1), 0, *both) for name, both in (("send", (10**6, 0)), ("recv", (0, 10**6))))
    one = time_parts(Counter(), Counter({sent: 3}), 0, SIMPLE).links
    assert time_parts(Counter(), Counter({sent: 3, received: 3}), 0, SIMPLE).links == one == 3 * SIMPLE.collective_seconds(sent)


def test_ledger_time_by_phase_shows_its_constants() -> None:
    x = torch.ones(64, 64, requires_grad=True)
    with count_costs(device="cpu") as ledger:
        (x @ x).sum().backward()
    time = ledger.time(H100_SXM)
    assert set(time.phases) == {"forward", "backward"}
    assert time.total.compute == pytest.approx(3 * 2 * 64**3 / 50e12)
    assert 0 < time.lower_bound <= time.estimate
    text = str(time)
    assert "model of H100 SXM" in text and "TFLOP/s: float64 50 of 67, float32 50 of 67" in text
    assert "TB/s: memory bandwidth 2.6 of 3.35" in text and "microseconds: launch 5," in text
    before = torch.backends.cuda.matmul.fp32_precision
    for setting, allow in (
        ("torch.set_float32_matmul_precision", lambda: torch.set_float32_matmul_precision("high")),
        ("fp32_precision", lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32")),
    ):
        try:
            allow()
            with count_costs(device="cpu") as faster:
                (x @ x).sum().backward()
        finally:
            torch.set_float32_matmul_precision("highest")
            torch.backends.cuda.matmul.fp32_precision = before
        assert faster.time(H100_SXM).total.compute == pytest.approx(3 * 2 * 64**3 / 350e12), setting


@pytest.mark.parametrize("hardware", [H100_SXM, A100_SXM], ids=lambda hardware: hardware.name)
def test_sustained_rates_are_below_the_datasheet(hardware: Hardware) -> None:
    assert all(rate < hardware.peak_flops[name] for name, rate in hardware.flops.items())
    assert hardware.memory_bandwidth < hardware.peak_memory_bandwidth
    assert hardware.link_bandwidth < hardware.peak_link_bandwidth


@pytest.mark.parametrize("hardware", [H100_SXM, A100_SXM], ids=lambda hardware: hardware.name)
def test_each_constant_can_be_replaced_in_the_unit_that_is_shown(hardware: Hardware) -> None:
    for constant in hardware.constants():
        changed = hardware.with_constant(constant.name, 2 * constant.value)
        assert changed.with_constant(constant.name, constant.value) == hardware != changed
    with pytest.raises(KeyError, match=r"A100 SXM 80 GB has no constant 'lunch'; it has float64"):
        A100_SXM.with_constant("lunch", 1)


def test_a_dtype_without_a_rate_is_named() -> None:
    with pytest.raises(KeyError, match=r"A100 SXM 80 GB: no rate for matmuls of float8_e4m3fn"):
        A100_SXM.compute_seconds(KernelGroup(1, 1, 1, "float8_e4m3fn"))

"""What the losses cost on one GPU of many, counted by the ledger: kernels, collectives, host syncs, matmuls, memory."""

from importlib.util import find_spec

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.contrastive.fake_cuda import on_fake_cuda
from unisono.collectives import Ledger, simulate_rank
from unisono.contrastive import clip_loss, ntxent_loss, sigmoid_loss, supcon_loss
from unisono.contrastive.tiled.columns import GatheredColumns, RingColumns, exchange_columns

pytestmark = on_fake_cuda
without_triton = pytest.mark.skipif(find_spec("triton") is None, reason="this torch comes without Triton")


@pytest.fixture(params=["torch", pytest.param("triton", marks=without_triton)])
def tiles(request, monkeypatch) -> str:
    """Which tiles compute the losses."""
    monkeypatch.setenv("UNISONO_TRITON", "0" if request.param == "torch" else "")
    return request.param


@pytest.fixture
def torch_tiles(monkeypatch) -> None:
    monkeypatch.setenv("UNISONO_TRITON", "0")


def features(rows: int, width: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.empty(rows, width, device="cuda", dtype=dtype, requires_grad=True) for _ in "xy"]


def scalar() -> torch.Tensor:
    return torch.ones((), device="cuda", requires_grad=True)


LOSSES = {
    "clip": lambda x, y, ids: clip_loss(x, y, scalar()),
    "clip with a number": lambda x, y, ids: clip_loss(x, y, 10.0, direction="x_to_y"),
    "clip with ids": lambda x, y, ids: clip_loss(x, y, scalar(), ids=ids),
    "clip with hardness": lambda x, y, ids: clip_loss(x, y, scalar(), hardness=0.5),
    "clip with everything": lambda x, y, ids: clip_loss(
        x, y, scalar(), ids=ids, hardness=0.5, label_smoothing=0.1, negatives=y.detach(), negative_ids=ids
    ),
    "clip masked": lambda x, y, ids: clip_loss(x, y, scalar(), ids=ids, same_id="masked"),
    "clip weights": lambda x, y, ids: clip_loss(x, y, scalar(), weights=torch.ones(len(x), device="cuda")),
    "clip fast": lambda x, y, ids: clip_loss(x, y, scalar(), precision="fast"),
    "sigmoid": lambda x, y, ids: sigmoid_loss(x, y, scalar(), scalar()),
    "sigmoid fast": lambda x, y, ids: sigmoid_loss(x, y, scalar(), scalar(), precision="fast"),
    "ntxent": lambda x, y, ids: ntxent_loss(x, y, scalar()),
    "supcon": lambda x, y, ids: supcon_loss(x, ids, scalar()),
}


def costs(loss: str, world_size: int, rows: int, width: int, dtype: torch.dtype = torch.bfloat16) -> Ledger:
    """Of a forward and a backward on one rank."""
    with simulate_rank(world_size=world_size, rank=1, device="cuda") as ledger:
        x, y = features(rows, width, dtype)
        ids = torch.zeros(rows, dtype=torch.int64, device="cuda")
        ledger.reset()
        LOSSES[loss](x, y, ids).backward()
    return ledger


MOST_KERNELS_OF_CLIP = {"torch": 76, "triton": 35}  # 35 are open_clip's, and one of ours makes the scale
MOST_MEMORY = {"torch": 1.4e9, "triton": 0.3e9}


def test_a_large_batch_on_8_ranks(tiles):
    ledger = costs("clip", 8, 4096, 1024)
    assert ledger.kernels <= MOST_KERNELS_OF_CLIP[tiles] and len(ledger.host_syncs) == 0
    assert sum(each.calls for each in ledger.collectives.values()) == 6
    assert set(ledger.flops) == {torch.bfloat16}, "16-bit features are multiplied as they are"
    assert ledger.peak_memory - 2 * 4096 * 1024 * 2 < MOST_MEMORY[tiles]


@without_triton
def test_a_large_batch_in_time():
    assert costs("clip", 8, 4096, 1024).time().estimate < 5e-3  # of the model, for an H100


def test_a_small_batch_on_256_ranks(tiles):
    ledger = costs("clip", 256, 64, 512)
    assert ledger.kernels <= {"torch": 76, "triton": 25}[tiles] and len(ledger.host_syncs) == 0
    assert sum(each.calls for each in ledger.collectives.values()) == 6


@pytest.mark.parametrize("loss", LOSSES)
def test_kernels_do_not_grow_with_the_number_of_ranks_and_nothing_waits(loss, tiles):
    some = {"torch": 4, "triton": 256}[tiles]  # fewer columns take one kernel less, which adds parts of dx up
    few, many = (costs(loss, world_size, 8, 64) for world_size in (some, 1024))
    assert few.kernels == many.kernels <= 400
    assert not few.host_syncs and not many.host_syncs


# Kernels forward and backward at W = 256, 64 rows. What the losses without options need is pinned above.
MOST_KERNELS = {
    "clip with ids": 160,
    "clip masked": 135,
    "clip weights": 110,
    "clip with hardness": 155,
    "sigmoid": 65,
    "sigmoid fast": 62,
    "ntxent": 70,
    "supcon": 105,
}


@pytest.mark.parametrize("loss", MOST_KERNELS)
def test_kernels_of_options(loss, torch_tiles):
    ledger = costs(loss, 256, 64, 512)
    assert ledger.kernels <= MOST_KERNELS[loss] and not ledger.host_syncs


class Devices(TorchDispatchMode):
    """Collects ops with a tensor on the CPU: none can be in a CUDA graph."""

    def __init__(self):
        super().__init__()
        self.on_cpu = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, torch.Tensor)]
        if any(t.device.type == "cpu" for t in tensors):
            self.on_cpu.append(str(func))
        return result


@pytest.mark.parametrize("loss", [clip_loss, ntxent_loss, sigmoid_loss, supcon_loss])
def test_with_sizes_a_call_can_be_captured(loss, tiles):
    with simulate_rank(world_size=8, rank=1, device="cuda", host_syncs="raise") as ledger:
        x, y = features(16, 32, torch.bfloat16)
        others = {sigmoid_loss: [scalar(), scalar()], supcon_loss: [scalar()]}.get(loss, [scalar()])
        second = torch.zeros(16, dtype=torch.int64, device="cuda") if loss is supcon_loss else y
        loss(x, second, *others, sizes=(16,) * 8).backward()  # the ranks agree once on the memory for exchange="auto"
        with Devices() as devices:
            loss(x, second, *others, sizes=(16,) * 8).backward()
    assert not ledger.host_syncs and not devices.on_cpu


def test_fast_saves_half_of_the_matmuls_of_the_backward(tiles):
    flops = {}
    for precision in ("exact", "fast"):
        with simulate_rank(world_size=8, rank=1, device="cuda") as ledger:
            x, y = features(64, 32, torch.bfloat16)
            loss = clip_loss(x, y, 10.0, precision=precision, logits="keep")
            with ledger.phase("backward"):
                loss.backward()
        flops[precision] = ledger.phases["backward"].flops[torch.bfloat16]
    again = {"torch": 0, "triton": 1}[tiles]  # the Triton tiles keep no logits
    assert flops["exact"] * (2 + again) == flops["fast"] * (4 + again) > 0


def test_auto_takes_the_ring_for_what_does_not_fit():
    with simulate_rank(world_size=4096, rank=1, device="cuda"):
        for rows, kind in ((64, GatheredColumns), (4096, RingColumns)):
            y = torch.empty(rows, 512, device="cuda")
            assert type(exchange_columns([y], "auto", (rows,) * 4096, 4, None)) is kind

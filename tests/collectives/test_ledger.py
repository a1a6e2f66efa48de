"""The ledger: counts of hand-computed cases, forward and backward, on fake CUDA tensors and on real CPU tensors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from unisono.collectives import HostSyncError, all_gather, count_costs, register_cost, simulate_rank

on_fake_cuda = pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="fake CUDA tensors need a torch built with CUDA")


@on_fake_cuda
def test_matmul_chain_forward_and_backward() -> None:
    with simulate_rank(8) as ledger:
        x = torch.randn(16, 32, device="cuda")
        v = torch.randn(32, 64, device="cuda", requires_grad=True)
        w = torch.randn(64, 8, device="cuda", requires_grad=True)
        ledger.reset()
        (x @ v @ w).sum().backward()
    forward, backward = ledger.phases["forward"], ledger.phases["backward"]
    products = 2 * 16 * 32 * 64, 2 * 16 * 64 * 8
    assert dict(forward.by_op) == {"mm": 2, "sum": 1, "ones_like": 1}
    assert forward.flops == {torch.float32: sum(products)}
    assert dict(backward.by_op) == {"mm": 3}  # the gradient of x is not needed
    assert backward.flops == {torch.float32: products[0] + 2 * products[1]}
    floats = (16 * 32 + 32 * 64 + 16 * 64) + (16 * 64 + 64 * 8 + 16 * 8) + (16 * 8 + 1) + 1
    assert forward.bytes_touched == 4 * floats
    assert v.grad is not None and v.grad.shape == v.shape and v.grad.device.type == "cuda"
    assert ledger.host_syncs == []


@on_fake_cuda
@pytest.mark.parametrize(
    ("run", "kernels", "touched"),
    [
        (lambda x: x.t().view(3, 2, 2).transpose(0, 1)[1], 0, 0),
        (lambda x: x + x[:1], 1, 4 * (12 + 3 + 12)),
        (lambda x: x.add_(1), 1, 4 * 24),
        (lambda x: x[:1].expand(4, 3) * x, 1, 4 * (3 + 12 + 12)),  # an expanded row is read once
        (lambda x: x.zero_(), 1, 4 * 12),
        (lambda x: torch.empty_like(x), 0, 0),
        (lambda x: torch._foreach_add([x, x, x], 1), 1, 3 * 4 * 24),
        (lambda x: x.bfloat16(), 1, 12 * 6),
        (lambda x: x.index_select(0, torch.zeros(2, dtype=torch.long, device="cuda")), 2, 2 * 2 * 12 + 16 + 16),
        (lambda x: torch.ones(3, device="cpu") + 1, 0, 0),
    ],
)
def test_kernels_and_bytes(run: Callable[[torch.Tensor], Any], kernels: int, touched: int) -> None:
    with simulate_rank(2) as ledger:
        x = torch.empty(4, 3, device="cuda")
        run(x)
    assert (ledger.kernels, ledger.bytes_touched) == (kernels, touched)


@on_fake_cuda
@pytest.mark.parametrize(
    ("run", "op"),
    [
        (lambda x: x.sum().item(), "item"),
        (lambda x: float(x.sum()), "item"),
        (lambda x: bool((x > 0).any()), "item"),
        (lambda x: f"loss {x.sum():.3f}", "item"),
        (lambda x: x.tolist(), "tolist"),
        (lambda x: x.cpu(), "copy to the CPU"),
        (lambda x: torch.tensor(3.0, device="cuda"), "copy from pageable memory to the device"),
        (lambda x: torch.as_tensor([1, 2], device="cuda"), "copy from pageable memory to the device"),
        (lambda x: x[torch.tensor([0, 1])], "index on the CPU, copied to the device"),
        (lambda x: x[x > 0], "boolean index"),
        (lambda x: x.nonzero(), "nonzero"),
        (lambda x: x.masked_select(x > 0), "masked_select"),
        (lambda x: x.unique(), "unique"),
        (
            lambda x: x.repeat_interleave(torch.ones(4, dtype=torch.long, device="cuda"), 0),
            "repeat_interleave without output_size",
        ),
        (lambda x: torch.equal(x, x), "equal"),
        (lambda x: torch.cuda.synchronize(), "synchronize"),
        (lambda x: torch.cuda.current_stream().synchronize(), "Stream.synchronize"),
    ],
)
def test_each_host_sync_is_found_with_its_line(run: Callable[[torch.Tensor], Any], op: str) -> None:
    with simulate_rank(2) as ledger:
        x = torch.empty(4, 3, device="cuda")
        run(x)
    (sync,) = ledger.host_syncs
    line = f"test_ledger.py:{run.__code__.co_firstlineno} in <lambda>"
    assert (sync.op, sync.line, sync.user_line) == (op, line, line)
    with pytest.raises(HostSyncError, match=r"test_ledger\.py"), simulate_rank(2, host_syncs="raise"):
        run(torch.empty(4, 3, device="cuda"))


@on_fake_cuda
def test_code_that_does_not_wait_has_no_host_sync() -> None:
    with simulate_rank(2, host_syncs="raise") as ledger:
        x = torch.zeros(4, 3).pin_memory().to("cuda", non_blocking=True).requires_grad_()
        repeats = torch.ones(4, dtype=torch.long, device="cuda")
        y = x.repeat_interleave(repeats, 0, output_size=4) + 1
        y.masked_fill(y > 0, 0.0).logsumexp(1).sum().backward()
    assert ledger.host_syncs == []


@on_fake_cuda
def test_collectives_and_peak_memory_of_one_rank_of_many() -> None:
    with simulate_rank(256, rank=3) as ledger:
        x = torch.randn(64, 512, device="cuda", requires_grad=True)
        all_gather(x, sizes=[64] * 256).sum().backward()
    assert {name: op.calls for name, op in ledger.collectives.items()} == {"all_gather": 1, "reduce_scatter": 1}
    assert ledger.collectives["all_gather"].sent == 255 * 64 * 512 * 4
    whole = 256 * 64 * 512 * 4
    assert whole <= ledger.peak_memory <= 2 * whole + 3 * whole // 256 + 64
    assert not dist.is_initialized()


@on_fake_cuda
def test_code_that_asks_for_the_backend_goes_the_way_of_nccl() -> None:
    from torch.distributed.nn.functional import all_gather as torch_all_gather

    with simulate_rank(8) as ledger:
        x = torch.randn(4, 4, device="cuda", requires_grad=True)
        torch.cat(torch_all_gather(x, dist.group.WORLD)).sum().backward()
    assert {name: op.calls for name, op in ledger.collectives.items()} == {"all_gather": 1, "reduce_scatter": 1}


@on_fake_cuda
def test_compiled_code_runs_as_it_was_written() -> None:
    model = torch.nn.Linear(4, 4)
    with simulate_rank(2) as ledger:
        model.cuda()
        ledger.reset()
        with pytest.warns(UserWarning, match=r"simulate_rank: torch.compile is left out"):
            compiled = torch.compile(model)
        compiled(torch.empty(2, 4, device="cuda")).sum().backward()
    assert ledger.phases["forward"].by_op["addmm"] == 1 and model.weight.grad is not None


@on_fake_cuda
def test_fsdp2_gathers_and_scatters_while_memory_holds_the_shards() -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.debug import CommDebugMode

    size = 8
    with simulate_rank(size, 3) as ledger:
        blocks = [torch.nn.Linear(64, 64, bias=False) for _ in range(4)]
        model = torch.nn.Sequential(*blocks).cuda()
        whole = 4 * sum(p.numel() for p in model.parameters())
        for block in blocks:
            fully_shard(block)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            ledger.reset()
            with CommDebugMode() as torchs:
                model(torch.randn(2, 64, device="cuda")).sum().backward()
            optimizer.step()
        calls = {name: op.calls for name, op in ledger.collectives.items()}
        assert calls == {"all_gather": 8, "reduce_scatter": 4}  # each block before its forward, and before its backward
        assert sum(torchs.get_comm_counts().values()) == 12
        moved = whole * (size - 1) // size
        assert ledger.collectives["all_gather"].sent == 2 * moved and ledger.collectives["reduce_scatter"].sent == moved
        at_end = ledger.memory_at_end
        assert at_end["parameters"] == at_end["gradients"] == whole // size
        assert at_end["optimizer"] == pytest.approx(2 * whole / size, rel=0.01)
        assert "gathered parameters" not in at_end
        assert whole // 4 <= ledger.memory_at_peak["gathered parameters"] <= whole // 2  # one block, and the one that arrives
    assert ledger.flops == {torch.float32: 11 * 2 * 2 * 64 * 64}  # 4 forward, 7 backward: the input needs no gradient
    optimizer_bytes = ledger.phases["optimizer"].bytes_touched
    assert optimizer_bytes < 4 * whole  # that of a shard, not of the model


def test_register_cost_counts_what_an_op_hides() -> None:
    @torch.library.custom_op("test_ledger::gram", mutates_args=())
    def gram(x: torch.Tensor) -> torch.Tensor:
        return x @ x.T

    register_cost(torch.ops.test_ledger.gram, kernels=2, flops=lambda x, out: 2 * out.numel() * x.shape[1], bytes_touched=7)
    x = torch.ones(4, 8)
    with count_costs(device="cpu") as ledger:
        gram(x)
    assert (ledger.kernels, ledger.flops, ledger.bytes_touched) == (2, {torch.float32: 2 * 16 * 8}, 7)


def test_simulate_rank_rejects_bad_arguments() -> None:
    with pytest.raises(ValueError, match=r"simulate_rank: rank=8 is not one of 8 ranks"), simulate_rank(8, 8):
        pass
    with pytest.raises(ValueError, match=r"simulate_rank: device='mps'"), simulate_rank(8, device="mps"):  # type: ignore[arg-type]
        pass

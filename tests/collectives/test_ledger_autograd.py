"""The autograd engine in Python, on fake CUDA tensors, against torch's own on fake CPU tensors: gradients, ops, memory."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from unisono.collectives import Ledger, simulate_rank
from unisono.collectives.ledger.ledger import Costs

pytestmark = pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="fake CUDA tensors need a torch built with CUDA")
Described = list[tuple[tuple[int, ...], torch.dtype] | None]


class Scale(torch.autograd.Function):
    """A Function with an argument that is no tensor, one without gradient, and two outputs, of which one may stay unused."""

    @staticmethod
    def forward(ctx: Any, factor: float, x: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(shift)
        ctx.factor = factor
        return factor * x + shift, x - shift

    @staticmethod
    def backward(ctx: Any, grad: Tensor, other: Tensor) -> tuple[None, Tensor, None]:  # type: ignore[override]
        assert other is not None  # zeros, materialised
        (shift,) = ctx.saved_tensors
        return None, ctx.factor * grad + other * shift, None


def mlp(device: str) -> tuple[list[Tensor], Callable[[], Tensor]]:
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 16)).to(device)
    x = torch.randn(8, 16, device=device)
    return list(model.parameters()), lambda: (model(x) + x).square().mean()


def convolutions(device: str) -> tuple[list[Tensor], Callable[[], Tensor]]:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, bias=False), nn.AvgPool2d(2)).to(device)
    x = torch.randn(2, 3, 12, 12, device=device, requires_grad=True)
    return [x, *model.parameters()], lambda: model(x).pow(2).sum()


def embedding_and_views(device: str) -> tuple[list[Tensor], Callable[[], Tensor]]:
    table = torch.randn(10, 8, device=device, requires_grad=True)
    w = torch.randn(8, 8, device=device, requires_grad=True)
    ids = torch.zeros(5, dtype=torch.long, device=device)

    def loss() -> Tensor:
        a, b = F.embedding(ids, table).chunk(2, dim=1)
        rows = torch.cat([a, b.sigmoid()], 1) @ w
        return (rows[1:3].t().contiguous() * w[:, :2].expand(8, 2)).logsumexp(0).sum() + table.double().sum()

    return [table, w], loss


def own_function(device: str) -> tuple[list[Tensor], Callable[[], Tensor]]:
    x = torch.randn(4, 4, device=device, requires_grad=True)
    shift = torch.randn(4, 4, device=device)
    return [x], lambda: Scale.apply(2.0, x, shift)[0].sum() + x.mean()  # type: ignore[no-untyped-call]


def checkpointed(reentrant: bool) -> Callable[[str], tuple[list[Tensor], Callable[[], Tensor]]]:
    def make(device: str) -> tuple[list[Tensor], Callable[[], Tensor]]:
        blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)) for _ in range(3)).to(device)
        x = torch.randn(8, 16, device=device, requires_grad=True)

        def loss() -> Tensor:
            y = x
            for block in blocks:
                y = checkpoint(block, y, use_reentrant=reentrant, preserve_rng_state=False)  # type: ignore[assignment]
            return y.sum()

        return [x, *blocks.parameters()], loss

    return make


def gradient_penalty(device: str) -> tuple[list[Tensor], Callable[[], Tensor]]:
    model = nn.Sequential(nn.Linear(16, 32), nn.Softplus(), nn.LayerNorm(32), nn.Linear(32, 1)).to(device)
    x = torch.randn(8, 1, 16, device=device, requires_grad=True)

    def loss() -> Tensor:
        (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return grad.square().sum()

    return [w for name, w in model.named_parameters() if name not in ("2.bias", "3.bias")], loss  # these have no part in it


MODELS = {
    "mlp": mlp,
    "convolutions": convolutions,
    "embedding and views": embedding_and_views,
    "Function": own_function,
    "checkpoint": checkpointed(False),
    "checkpoint, reentrant": checkpointed(True),
    "gradient penalty": gradient_penalty,
}


def run(device: str, make: Callable[[str], tuple[list[Tensor], Callable[[], Tensor]]]) -> tuple[Ledger, Described]:
    with simulate_rank(2, device=device) as ledger:  # type: ignore[arg-type]
        leaves, loss = make(device)
        ledger.reset()
        for _ in range(2):  # the second backward adds to the gradients
            loss().backward()
        return ledger, [None if x.grad is None else (tuple(x.grad.shape), x.grad.dtype) for x in leaves]


def ops(costs: Costs) -> Counter[str]:
    """Kernels by op. torch's engine adds gradients in place, but not under a dispatch mode; ours does so under one, too."""
    return Counter({name: n for name, n in costs.by_op.items() if name != "add_"}) + Counter(add=costs.by_op["add_"])


@pytest.mark.parametrize("name", MODELS)
def test_gradients_ops_and_memory_are_those_of_torchs_engine(name: str) -> None:
    expected, expected_grads = run("cpu", MODELS[name])
    found, grads = run("cuda", MODELS[name])
    assert grads == expected_grads
    assert None not in grads
    for phase in ("forward", "backward"):
        assert ops(found.phases[phase]) == ops(expected.phases[phase]), phase
        assert found.phases[phase].flops == expected.phases[phase].flops, phase
        assert found.phases[phase].bytes_touched == expected.phases[phase].bytes_touched, phase
    assert found.memory.now == expected.memory.now
    assert found.peak_memory == pytest.approx(expected.peak_memory, rel=0.03)
    assert found.host_syncs == []


def test_the_first_gradient_is_copied_only_if_its_layout_is_not_that_of_the_parameter() -> None:
    with simulate_rank(2) as ledger:
        w = torch.randn(2, 1, 3, device="cuda", requires_grad=True)
        other = torch.ones(1, 2, 3, device="cuda")
        ledger.reset()
        (w.transpose(0, 1) * other).sum().backward()  # strides (3, 6, 1) and (3, 3, 1): one element has a stride, no layout
        assert ledger.phases["backward"].by_op == {"mul": 1}
        w = torch.randn(2, 3, device="cuda", requires_grad=True)
        ledger.reset()
        (w.t() * other[0].t().contiguous()).sum().backward()
        assert ledger.phases["backward"].by_op == {"mul": 1, "copy_": 1}
    assert w.grad is not None and w.grad.is_contiguous()


def test_grad_of_chosen_inputs_leaves_the_others_alone() -> None:
    with simulate_rank(2):
        x = torch.randn(4, 4, device="cuda", requires_grad=True)
        w = torch.randn(4, 4, device="cuda", requires_grad=True)
        unused = torch.randn(4, device="cuda", requires_grad=True)
        y = x @ w
        z = y.exp().sum()
        for_y, for_w = torch.autograd.grad(z, (y, w), retain_graph=True)
        assert for_y.shape == y.shape and for_w.shape == w.shape
        assert x.grad is None and w.grad is None
        assert torch.autograd.grad(z, (x, unused), allow_unused=True, retain_graph=True)[1] is None
        with pytest.raises(RuntimeError, match="allow_unused=True"):
            torch.autograd.grad(z, (x, unused), retain_graph=True)
        z.backward(inputs=[w])
        assert w.grad is not None and x.grad is None
        with pytest.raises(RuntimeError, match="a second time"):
            z.backward()


def test_hooks_retained_gradients_and_callbacks_run() -> None:
    seen: list[str] = []
    with simulate_rank(2):
        x = torch.randn(4, 4, device="cuda", requires_grad=True)
        y = x * 2
        y.retain_grad()
        x.register_hook(lambda grad: seen.append("leaf"))
        x.register_post_accumulate_grad_hook(lambda p: seen.append(f"accumulated {tuple(p.grad.shape)}"))

        def on_y(grad: Tensor) -> Tensor:
            seen.append("tensor")
            torch.autograd.Variable._execution_engine.queue_callback(lambda: seen.append("end"))
            return grad * 2

        handle = y.register_hook(on_y)
        both = torch.autograd.graph.register_multi_grad_hook((x, y), lambda grads: seen.append(f"all {len(grads)}"))
        y.sum().backward()
        assert seen == ["tensor", "leaf", "all 2", "accumulated (4, 4)", "end"]
        assert y.grad is not None and y.grad.shape == y.shape
        handle.remove()
        both.remove()
        (x * 2).sum().backward()
        assert seen[5:] == ["leaf", "accumulated (4, 4)"]


def test_hooks_of_modules_run() -> None:
    seen: list[Any] = []
    with simulate_rank(2) as ledger:
        model = nn.Linear(4, 3).cuda()
        x = torch.randn(2, 4, device="cuda", requires_grad=True)
        model.register_full_backward_pre_hook(lambda module, grads: seen.append([tuple(g.shape) for g in grads]))
        handle = model.register_full_backward_hook(lambda module, grads, _: tuple(2 * g for g in grads))
        model(x).sum().backward()
        assert seen == [[(2, 3)]] and ledger.phases["backward"].by_op["mul"] == 1
        handle.remove()
        model(x).sum().backward()
        assert ledger.phases["backward"].by_op["mul"] == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU torch's own engine runs")
def test_torchs_own_engine_still_fails_without_a_device() -> None:
    """The day this test fails, autograd_engine.py can go."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.empty(2, device="cuda", requires_grad=True)
        with pytest.raises(RuntimeError):
            (2 * x).backward(torch.empty(2, device="cuda"))


def test_saved_tensors_are_freed_while_the_backward_runs() -> None:
    def peak(retain_graph: bool) -> int:
        with simulate_rank(2) as ledger:
            x = torch.zeros(1024, device="cuda", requires_grad=True)
            y = x
            for _ in range(16):
                y = y.exp()
            loss = y.sum()
            del y
            ledger.reset()
            loss.backward(retain_graph=retain_graph)
            return ledger.memory.now

    assert peak(False) < 4 * 4096 < 16 * 4096 < peak(True)


def test_optimizers_autocast_and_grad_scaler_take_the_paths_of_cuda() -> None:
    with simulate_rank(2) as ledger:
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(8))).cuda()
        for optimizer in (torch.optim.AdamW(model.parameters()), torch.optim.AdamW(model.parameters(), fused=True)):
            ledger.reset()
            scaler = torch.amp.GradScaler("cuda")
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(torch.randn(4, 16, device="cuda")).float().sum()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            steps = [op for op in ledger.phases["optimizer"].by_op if not op.startswith(("_foreach", "_fused", "zeros"))]
            # GradScaler reads whether the gradients are finite; a fused optimizer does that on the device.
            assert [sync.op for sync in ledger.host_syncs] == ([] if optimizer.defaults["fused"] else ["item"])
            assert ledger.flops.keys() == {torch.bfloat16}
            assert ledger.by_op["_foreach_norm"] > 0 and ledger.by_op["linalg_vector_norm"] == 1
            assert steps in ([], ["copy_"]), steps
    assert ledger.by_op["_fused_adamw_"] == 1


def test_attention_takes_flash_for_16_bits_and_the_efficient_kernel_otherwise() -> None:
    with simulate_rank(2) as ledger:
        q = torch.randn(2, 4, 8, 16, device="cuda", requires_grad=True)
        F.scaled_dot_product_attention(q.bfloat16(), q.bfloat16(), q.bfloat16()).sum().backward()
        F.scaled_dot_product_attention(q, q, q, attn_mask=torch.ones(8, 8, dtype=torch.bool, device="cuda")).sum().backward()
    assert ledger.by_op["_scaled_dot_product_flash_attention"] == ledger.by_op["_scaled_dot_product_efficient_attention"] == 1
    product = 2 * 2 * 4 * 8 * 8 * 16
    assert ledger.flops == {torch.bfloat16: 7 * product, torch.float32: 7 * product}  # 2 products forward, 5 backward
    assert q.grad is not None and q.grad.shape == q.shape


def test_models_of_timm_and_transformers_train() -> None:
    import timm
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(num_hidden_layers=2, hidden_size=32, num_attention_heads=2, intermediate_size=64, vocab_size=100)
    bert = BertForMaskedLM(config)  # built before: real weights, of which two are tied
    parameters = sum(p.numel() for p in bert.parameters())
    with simulate_rank(8, 1) as ledger:
        vit = timm.create_model("vit_tiny_patch16_224", depth=2, drop_path_rate=0.1).cuda()
        images, ids = torch.randn(4, 3, 224, 224, device="cuda"), torch.zeros(4, 16, dtype=torch.long, device="cuda")
        bert.cuda()
        assert sum(p.numel() for p in bert.parameters()) == parameters
        models = DistributedDataParallel(vit), DistributedDataParallel(bert, find_unused_parameters=True)
        optimizer = torch.optim.AdamW([p for model in models for p in model.parameters()])
        ledger.reset()
        with torch.autocast("cuda", torch.bfloat16):
            loss = models[0](images).float().square().mean()
            loss = loss + models[1](input_ids=ids, labels=ids, attention_mask=torch.ones_like(ids)).loss
        loss.backward()
        optimizer.step()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in vit.parameters())
    blocks = [block.drop_path1 for block in vit.blocks]
    assert isinstance(blocks[0], nn.Identity) and blocks[1].drop_prob == pytest.approx(0.1)  # torch.linspace has its values
    assert ledger.host_syncs == []
    assert ledger.flops.keys() == {torch.bfloat16}
    gradients = 4 * (sum(p.numel() for p in vit.parameters()) + parameters)
    assert ledger.memory_at_end["parameters"] == gradients
    assert ledger.memory_at_end["optimizer"] == pytest.approx(2 * gradients, rel=0.01)
    assert ledger.collectives["all_reduce"].sent == pytest.approx(gradients * 2 * 7 / 8, rel=0.01)

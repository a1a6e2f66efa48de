"""cached_backward gives the gradients of the whole batch for any micro-batches, and synchronises once."""

import copy
from collections import UserDict
from contextlib import nullcontext
from weakref import finalize

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout
from torch.nn.parallel import DistributedDataParallel

from unisono.collectives import MismatchError, all_gather, all_reduce, count_bytes
from unisono.contrastive.grad_cache import cached_backward

ROWS = {1: [7], 2: [5, 2], 3: [4, 0, 7]}  # of each rank, by world size


def tower(seed: int, drop: float = 0.0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Dropout(drop), nn.Linear(5, 4)).double()


class Both(nn.Module):
    """Two towers and a temperature that neither uses, as people wrap them in one DDP."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = tower(0), tower(1)
        self.log_scale = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))

    def forward(self, kind: str, x: Tensor) -> Tensor:
        return getattr(self, kind)(x)


def whole_batch(step: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    rows = sum(ROWS[dist.get_world_size()] if dist.is_initialized() else ROWS[1])
    return [torch.randn(rows, 3, dtype=torch.float64, generator=generator) for _ in range(2)]


def own(batch: list[Tensor]) -> list[Tensor]:
    return [x.split(ROWS[dist.get_world_size()])[dist.get_rank()] for x in batch]


def plain_loss(images: Tensor, texts: Tensor, log_scale: Tensor | float = 0.3) -> Tensor:
    logits = images @ texts.T * torch.as_tensor(log_scale).exp()
    target = torch.arange(len(logits))
    return (cross_entropy(logits, target) + cross_entropy(logits.T, target)) / 2


def global_loss(images: Tensor, texts: Tensor, log_scale: Tensor | float = 0.3) -> Tensor:
    """The same value on every rank. all_gather adds the gradients of all ranks, so they are right after DDP's average."""
    return plain_loss(all_gather(images), all_gather(texts), log_scale)


def close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14)


def same_gradients(got: nn.Module, expected: nn.Module, factor: float = 1.0) -> None:
    for parameter, reference in zip(got.parameters(), expected.parameters(), strict=True):
        gradient = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
        close(gradient, reference.grad * factor)


def sharded(module: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard  # imported here because it takes seconds

    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for child in module.children():
        if isinstance(child, nn.Linear):
            fully_shard(child, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def trains(wrap, micro_batch) -> None:
    """Several steps, because state that one step leaves behind must not spoil the next."""
    reference = [tower(0), tower(1)]
    towers = [wrap(copy.deepcopy(module)) for module in reference]
    for step in range(3):
        batch = whole_batch(step)
        expected = plain_loss(reference[0](batch[0]), reference[1](batch[1]))
        expected.backward()
        with count_bytes() as traffic:
            close(cached_backward(towers, own(batch), global_loss, micro_batch=micro_batch), expected.detach())
        reductions = sum(traffic.by_op[name].calls for name in ("all_reduce", "reduce_scatter") if name in traffic.by_op)
        assert reductions == {nn.Sequential: 0, DistributedDataParallel: 2, sharded: 4}[wrap]
        if wrap is nn.Sequential:  # without DDP the test takes the average
            for parameter in [p for module in towers for p in module.parameters()]:
                parameter.grad = all_reduce(parameter.grad, "avg")
        for got, wanted in zip(towers, reference, strict=True):
            same_gradients(got, wanted)
        for parameter in [p for module in [*towers, *reference] for p in module.parameters()]:
            with torch.no_grad():
                parameter -= 0.1 * parameter.grad
            parameter.grad = None


@pytest.mark.parametrize("micro_batch", [1, [2, 3], 100])
@pytest.mark.parametrize(
    ("world_size", "wrap"),
    [(1, nn.Sequential), (2, nn.Sequential), (3, DistributedDataParallel), (3, sharded)],  # DDP takes seconds to import
)
def test_gradients_match_the_whole_batch(ranks, world_size, wrap, micro_batch):
    ranks(trains, wrap, micro_batch, world_size=world_size)


def counted(calls: list[int], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    calls.append(bucket.buffer().numel())
    work = dist.all_reduce(bucket.buffer() / dist.get_world_size(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def one_ddp(options, bypass: bool) -> None:
    reference = Both()
    ddp, calls = DistributedDataParallel(copy.deepcopy(reference), **options), []
    ddp.register_comm_hook(calls, counted)
    model = ddp.module if bypass else ddp
    for step in range(3):
        batch = whole_batch(step)
        reference.zero_grad()
        ddp.zero_grad()
        plain_loss(reference("image", batch[0]), reference("text", batch[1]), reference.log_scale).backward()
        for repeat in range(2):  # the first accumulates its gradients in no_sync()
            with ddp.no_sync() if repeat == 0 else nullcontext():
                cached_backward(
                    [lambda x: model("image", x), lambda x: model("text", x)],
                    own(batch),
                    lambda x, y: global_loss(x, y, ddp.module.log_scale),
                    micro_batch=2,
                    modules=[ddp],
                )
        same_gradients(ddp, reference, factor=2)
    assert calls == [sum(p.numel() for p in reference.parameters())] * 3


@pytest.mark.parametrize("bypass", [False, True])
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}])
def test_one_ddp_with_the_temperature_inside_communicates_once(ranks, options, bypass):
    ranks(one_ddp, options, bypass, world_size=3)


def one_tower_twice(wrap) -> None:
    reference = tower(0)
    model = wrap(copy.deepcopy(reference))
    for step in range(2):
        batch = whole_batch(step)
        reference.zero_grad()
        model.zero_grad()
        plain_loss(reference(batch[0]), reference(batch[1])).backward()
        with count_bytes() as traffic:
            cached_backward([model, model], own(batch), global_loss, micro_batch=[3, 2])
        same_gradients(model, reference)
        if wrap is sharded:
            assert traffic.by_op["reduce_scatter"].calls <= 4  # two layers, and FSDP2 may reduce once for each use
        else:
            assert traffic.by_op["all_reduce"].calls == 1


@pytest.mark.parametrize("wrap", [DistributedDataParallel, sharded])
def test_one_tower_twice(ranks, wrap):
    ranks(one_tower_twice, wrap, world_size=3)


class Routed(nn.Module):
    """A layer that only some rows use, and a buffer, which DDP broadcasts in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.seldom = tower(0), tower(1)
        self.register_buffer("shift", torch.zeros(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y = self.always(x) + self.shift
        return y + self.seldom(x) if (x > 10).any() else y


def layers_used_by_early_micro_batches_only() -> None:
    reference, other = Routed(), tower(2)
    model = DistributedDataParallel(copy.deepcopy(reference), find_unused_parameters=True)
    images, texts = whole_batch()
    images[0, 0] = images[6, 0] = 20.0
    for _ in range(2):
        reference.zero_grad()
        model.zero_grad()
        plain_loss(torch.cat([reference(x) for x in images.split(1)]), other(texts)).backward()
        model.module.shift += dist.get_rank()  # the broadcast of the first forward undoes this
        cached_backward([model, other], own([images, texts]), global_loss, micro_batch=1)
        same_gradients(model, reference)


def test_unused_parameters_and_buffers(ranks):
    ranks(layers_used_by_early_micro_batches_only, world_size=3)


def leaves_sync_on(wrap) -> None:
    model = wrap(tower(0))

    def fails(*_: Tensor) -> Tensor:
        raise KeyError("the loss fails")

    with pytest.raises(KeyError):
        cached_backward([model], own(whole_batch())[:1], fails, micro_batch=2)
    with count_bytes() as traffic:
        model(torch.ones(2, 3, dtype=torch.float64)).sum().backward()
    assert {"all_reduce", "reduce_scatter"} & set(traffic.by_op)


@pytest.mark.parametrize("wrap", [DistributedDataParallel, sharded])
def test_an_error_leaves_the_sync_switched_on(ranks, wrap):
    ranks(leaves_sync_on, wrap, world_size=3)


# The tests below need one rank only, and run without a process group.


def noisy_loss(images: Tensor, texts: Tensor) -> Tensor:
    return plain_loss(dropout(images), texts)


def test_dropout_matches_the_uncached_run_and_leaves_the_generator_there():
    towers, references = [tower(0, 0.5), tower(1, 0.5)], [tower(0, 0.5), tower(1, 0.5)]
    batch = whole_batch()
    torch.manual_seed(5)
    features = [torch.cat([module(x) for x in xs.split(3)]) for module, xs in zip(references, batch, strict=True)]
    noisy_loss(*features).backward()
    expected = torch.rand(3)
    torch.manual_seed(5)
    cached_backward(towers, batch, noisy_loss, micro_batch=3)
    assert torch.equal(torch.rand(3), expected)
    for got, wanted in zip(towers, references, strict=True):
        same_gradients(got, wanted)


def test_scaled_loss_and_parameters_of_the_loss():
    model, reference, batch = Both(), Both(), whole_batch()
    expected = plain_loss(reference.image(batch[0]), reference.text(batch[1]), reference.log_scale)
    expected.backward()
    value = cached_backward(
        [model.image, model.text],
        batch,
        lambda x, y: plain_loss(x, y, model.log_scale),
        micro_batch=4,
        scale_loss=lambda loss: loss * 1024,
    )
    close(value, expected.detach())
    assert not value.requires_grad
    same_gradients(model, reference, factor=1024)


@pytest.mark.parametrize("kind", [dict, UserDict])  # transformers' BatchEncoding is a UserDict
def test_tree_of_tensors(kind):
    model, reference, (images, texts) = tower(0), tower(0), whole_batch()
    seen = []

    def encode(batch):
        seen.append((type(batch), batch["language"], len(batch["more"][0])))
        return model(batch["x"]) * batch["factor"] + batch["more"][0]

    tree = kind({"x": images, "more": [texts[:, :1]], "factor": torch.tensor(3.0), "language": "en"})
    plain_loss(reference(images) * 3 + texts[:, :1], reference(texts)).backward()
    cached_backward([encode, model], [tree, texts], plain_loss, micro_batch=4)
    same_gradients(model, reference)
    assert seen == [(kind, "en", 4), (kind, "en", 3)] * 2
    assert len(tree["x"]) == 7  # the caller's batch is unchanged


def test_frozen_tower_and_inputs_with_gradients():
    frozen, model = tower(0).requires_grad_(False), tower(1)
    reference, (images, texts) = copy.deepcopy(model), whole_batch()
    plain, cached = texts.clone().requires_grad_(), texts.clone().requires_grad_()
    plain_loss(frozen(images), reference(plain)).backward()
    cached_backward([frozen, model], [images, cached], plain_loss, micro_batch=2)
    same_gradients(model, reference)
    close(cached.grad, plain.grad)


def test_autocast_of_the_caller_serves_both_passes():
    model, batch, dtypes = tower(0).float(), [x.float() for x in whole_batch()], []
    reference = copy.deepcopy(model)

    def encode(x: Tensor) -> Tensor:
        dtypes.append(model(x).dtype)
        return model(x).float()

    with torch.autocast("cpu", torch.bfloat16):
        plain_loss(*(reference(x).float() for x in batch)).backward()
        cached_backward([encode, encode], batch, plain_loss, micro_batch=2)
    assert set(dtypes) == {torch.bfloat16} and len(dtypes) == 16
    for got, wanted in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(got.grad, wanted.grad, rtol=0.05, atol=0.005)


def test_memory_does_not_grow_with_the_number_of_micro_batches():
    model = tower(0)
    live, peak = set(), []

    class Saved:
        def __init__(self, x: Tensor) -> None:
            self.x = x

    def pack(x: Tensor) -> Saved:
        saved = Saved(x)
        live.add(id(saved))
        finalize(saved, live.discard, id(saved))
        peak.append(len(live))
        return saved

    def encode(x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.x):
            return model(x)

    peaks = []
    for count in (1, 2, 10):
        peak.clear()
        batch = [torch.randn(2 * count, 3, dtype=torch.float64) for _ in range(2)]
        cached_backward([encode, encode], batch, plain_loss, micro_batch=2)
        peaks.append(max(peak))
        assert not live
    assert peaks[0] == peaks[1] == peaks[2] > 0


def too_many_rows(x: Tensor) -> Tensor:
    return torch.cat([x, x])


@pytest.mark.parametrize(
    ("encoders", "batches", "loss", "micro_batch", "message"),
    [
        ([tower(0)], [], plain_loss, 1, "1 encoders, 0 batches and 1 micro_batch"),
        ([tower(0)], [torch.ones(2, 3)], plain_loss, [1, 1], "1 encoders, 1 batches and 2 micro_batch"),
        ([], [], plain_loss, 1, "0 encoders"),
        ([tower(0)], [torch.ones(2, 3)], plain_loss, 0, "micro_batch=0 is not a positive"),
        ([tower(0)], [torch.ones(2, 3)], plain_loss, 2.0, "micro_batch=2.0 is not a positive"),
        (
            [tower(0)],
            [{"x": torch.ones(2, 3), "y": torch.ones(3)}],
            plain_loss,
            1,
            r"batches\[0\] has tensors of \[2, 3\] rows",
        ),
        ([tower(0)], [["a photo", "a cat"]], plain_loss, 1, r"batches\[0\] has tensors of no rows"),
        (
            [too_many_rows],
            [torch.ones(2, 3)],
            torch.sum,
            1,
            r"encoders\[0\] on rank 0: expected one Tensor of 1 rows, got float32\[2, 3\]",
        ),
        (
            [lambda x: (x, x)],
            [torch.ones(2, 3)],
            torch.sum,
            1,
            r"encoders\[0\] on rank 0: expected one Tensor of 1 rows, got tuple",
        ),
        ([torch.tanh], [torch.ones(2, 3)], torch.tanh, 1, r"loss: expected a scalar Tensor, got float32\[2, 3\]"),
        ([torch.tanh], [torch.ones(2, 3)], lambda x: 1.0, 1, "loss: expected a scalar Tensor, got float"),
    ],
)
def test_rejects(encoders, batches, loss, micro_batch, message):
    with pytest.raises(ValueError, match=f"cached_backward: .*{message}"):
        cached_backward(encoders, batches, loss, micro_batch=micro_batch)


def one_rank_is_wrong() -> str:
    micro_batch = 1 - dist.get_rank() // 2
    with pytest.raises(MismatchError) as caught:
        cached_backward([tower(0)], own(whole_batch())[:1], global_loss, micro_batch=micro_batch)
    model = DistributedDataParallel(tower(0), static_graph=True)
    with pytest.raises(MismatchError, match="static_graph"):
        cached_backward([model], own(whole_batch())[:1], global_loss, micro_batch=1)
    return str(caught.value)


def test_rejects_on_all_ranks_what_one_has_wrong(ranks):
    messages = ranks(one_rank_is_wrong, world_size=3)
    assert len(set(messages)) == 1
    assert "a bad call on rank 2" in messages[0] and "rank 2: micro_batch=0 is not a positive" in messages[0]

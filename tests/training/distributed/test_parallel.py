"""Models over ranks: the blocks that are found, how they are sharded, and bfloat16, checkpointed and compiled ones."""

import os
import shutil
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from unisono.collectives import count_bytes
from unisono_models.training.config import ParallelConfig
from unisono_models.training.distributed.launch import Ranks, start_ranks
from unisono_models.training.distributed.parallel import autocast_context, find_repeated_blocks, parallelize, parameter_dtype
from unisono_models.training.randomness import SampleDropout, dropout_keys, use_dropout_keys

ONE = Ranks(0, 1, 0, torch.device("cpu"))
SIZES = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 20}


# What takes long to import is imported where it is used: every rank imports this file, and few of them need it.


def image_trunk(name, **kwargs):
    import timm

    return timm.create_model(name, num_classes=0, **kwargs)


def text_trunk(kind):
    import transformers

    return transformers.AutoModel.from_config(transformers.AutoConfig.for_model(kind, **SIZES))


# find_repeated_blocks


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: image_trunk("test_vit", img_size=32, depth=4), {"Block": 4}),
        (lambda: image_trunk("vit_base_patch16_224"), {"Block": 12}),
        (lambda: image_trunk("test_convnext", depths=[1, 2, 1, 3]), {"ConvNeXtBlock": 7}),
        (lambda: image_trunk("tf_efficientnet_lite0"), {"DepthwiseSeparableConv": 1, "InvertedResidual": 15}),
        (lambda: image_trunk("resnet18"), {"BasicBlock": 8}),
        (lambda: text_trunk("bert"), {"BertLayer": 3}),
        (lambda: text_trunk("roberta"), {"RobertaLayer": 3}),
        (lambda: nn.ModuleDict({"a": image_trunk("test_vit"), "b": text_trunk("bert")}), {"Block": 6, "BertLayer": 3}),
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), {}),  # torch's own layers are no blocks
        (lambda: nn.Sequential(), {}),
    ],
)
def test_blocks_are_the_layers_that_a_model_is_stacked_from(make, expected):
    with torch.device("meta"):
        model = make()
    blocks = list(find_repeated_blocks(model))
    kinds = [type(block).__name__ for block in blocks]
    assert {kind: kinds.count(kind) for kind in kinds} == expected
    inner = [id(parameter) for block in blocks for parameter in block.parameters()]
    assert len(inner) == len(set(inner)), "one block within another"


class Block(nn.Module):
    def __init__(self, name: str, width: int = 64) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, width), nn.Linear(width, 16)
        self.dropout = SampleDropout(0.3, name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.dropout(torch.relu(self.up(x))))


class Stack(nn.Module):
    """A stem, four blocks in two stages, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.head = nn.Linear(4, 16), nn.Linear(16, 2)
        self.stages = nn.Sequential(*(nn.Sequential(Block(f"{i}a"), Block(f"{i}b")) for i in range(2)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.stages(self.stem(x)))


def step(model: nn.Module, rows: int = 6) -> torch.Tensor:
    """Forward and backward. The backward comes when the samples of the forward are not known any more."""
    x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(1), dtype=next(model.parameters()).dtype)
    with use_dropout_keys(dropout_keys(0, 0, torch.arange(rows))):
        loss = model(x).square().sum()
    loss.backward()
    return loss.detach()


def count_forwards(model: nn.Module) -> list[str]:
    """A list to which each block of `model` adds its name at each forward."""
    seen: list[str] = []
    for block in (module for module in model.modules() if isinstance(module, Block)):
        block.register_forward_pre_hook(lambda block, _: seen.append(block.dropout.stream))
    return seen


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters()]


# FSDP2


def with_sharded_blocks(config):
    with start_ranks() as ranks:
        whole = Stack()
        model = parallelize(Stack(), config, ranks)
        blocks = [module for module in model.modules() if isinstance(module, Block)]
        assert len(blocks) == 4 and all(isinstance(module, FSDPModule) for module in [*blocks, model])
        assert not isinstance(model.stages, FSDPModule)
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        mine = sum(parameter.to_local().numel() for parameter in model.parameters())
        everything = sum(parameter.numel() for parameter in whole.parameters())
        with count_bytes() as traffic:
            step(model)
        step(whole)
        for one, other in zip(model.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(one.grad.full_tensor(), other.grad)
        calls = {name: op.calls for name, op in traffic.by_op.items()}
    return mine / everything, calls


@pytest.mark.parametrize(
    ("world", "config"),
    [
        (2, ParallelConfig(kind="fsdp")),
        (3, ParallelConfig(kind="fsdp")),
        (2, ParallelConfig(kind="fsdp", checkpoint_activations=True)),
        (2, ParallelConfig(kind="hybrid", checkpoint_activations=True, compile=True)),
    ],
)
def test_fsdp_shards_every_block_by_itself(ranks, world, config):
    results = ranks(with_sharded_blocks, config, world_size=world, timeout=120)
    assert all(share < 1.4 / world for share, _ in results)
    # Forward: the root's own parameters and each block's; backward: each block's again. Never all of them at once, and not
    # once more for blocks that are computed again.
    expected = {"all_gather": 9, "reduce_scatter": 5} | ({"all_reduce": 5} if config.kind == "hybrid" else {})  # of copies
    assert [calls for _, calls in results] == [expected] * world


def with_hybrid(shard, local_sizes):
    """How many ranks share a copy, and how many copies there are; or the error."""
    with start_ranks() as ranks, mock.patch.dict(os.environ):
        os.environ.pop("LOCAL_WORLD_SIZE", None)
        if local_sizes:
            os.environ["LOCAL_WORLD_SIZE"] = str(local_sizes[ranks.rank])
        try:
            model = parallelize(Stack(), ParallelConfig(kind="hybrid", shard=shard), ranks)
        except ValueError as error:
            return str(error)
        whole = Stack()
        step(model), step(whole)
        for one, other in zip(model.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(one.grad.full_tensor(), other.grad)
        weight = model.head.weight
        return dict(zip(weight.device_mesh.mesh_dim_names, weight.device_mesh.shape, strict=True)), weight.to_local().shape[0]


@pytest.mark.parametrize(
    ("world", "shard", "local_sizes", "expected"),
    [
        (2, None, None, ({"replicate": 1, "shard": 2}, 1)),  # one host
        (4, None, [2, 2, 2, 2], ({"replicate": 2, "shard": 2}, 1)),  # two hosts
        (4, 2, [4, 4, 4, 4], ({"replicate": 2, "shard": 2}, 1)),
        (2, 1, None, ({"replicate": 2, "shard": 1}, 2)),  # copies only, as in DDP
    ],
)
def test_hybrid_shards_within_hosts_and_copies_across(ranks, world, shard, local_sizes, expected):
    assert ranks(with_hybrid, shard, local_sizes, world_size=world) == [expected] * world


@pytest.mark.parametrize(
    ("shard", "local_sizes", "message"),
    [
        (2, None, "--parallel.shard 2: it does not divide the number of ranks, 3"),
        (0, None, "--parallel.shard 0: must be at least 1, or None"),
        (-3, None, "--parallel.shard -3: must be at least 1, or None"),
        (None, [2, 2, 1], "--parallel.shard: the hosts have different numbers of ranks, [1, 2]: give a number"),
    ],
)
def test_hybrid_rejects_numbers_that_do_not_divide_on_all_ranks(ranks, shard, local_sizes, message):
    assert ranks(with_hybrid, shard, local_sizes, world_size=3) == [message] * 3


def from_different_weights(config):
    with start_ranks() as ranks:
        model = Stack()
        nn.init.constant_(model.head.weight, ranks.rank)
        model = parallelize(model, config, ranks)
        weight = next(parameter for name, parameter in model.named_parameters() if name.endswith("head.weight"))
        weight = weight.full_tensor() if isinstance(weight, DTensor) else weight
        return weight.tolist()


@pytest.mark.parametrize("config", [ParallelConfig(), ParallelConfig(kind="fsdp"), ParallelConfig(kind="hybrid", shard=1)])
def test_all_ranks_start_from_the_weights_of_rank_0(ranks, config):
    assert ranks(from_different_weights, config, world_size=2) == [[[0.0] * 16] * 2] * 2


# Precision


def test_dtypes_of_parameters():
    assert [parameter_dtype(ParallelConfig(precision=name)) for name in ("float32", "bfloat16", "float64")] == [
        torch.float32,
        torch.float32,
        torch.float64,
    ]


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "hybrid"])
def test_precision_is_that_of_the_computation(kind):
    x, weight = torch.ones(2, 2), nn.Parameter(torch.ones(2, 2))
    for precision, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16), ("float64", torch.float32)):
        with autocast_context(ParallelConfig(kind=kind, precision=precision), ONE):
            assert (x @ weight).dtype == dtype
            assert torch.is_autocast_cache_enabled() or (kind != "ddp" and precision == "bfloat16")
    assert (x @ weight).dtype == torch.float32


def losses_of(kind, precision, micro_batch):
    """Of five steps of the small learner, in float32 or bfloat16."""
    from tests.clip.small_clip import small_batch, small_training_module
    from unisono_models.clip.config import LossConfig
    from unisono_models.clip.loss import backward

    with start_ranks() as ranks:
        config = ParallelConfig(kind=kind, precision=precision)
        learner = small_training_module(LossConfig(micro_batch=micro_batch)).to(parameter_dtype(config))
        whole = small_batch(learner, slice(0, 7))
        rows = torch.arange(7).tensor_split(ranks.world_size)[ranks.rank]
        batch = {k: v[rows] if isinstance(v, torch.Tensor) else v for k, v in whole.items()}
        batch["images"] = batch["images"].float()
        model = parallelize(learner, config, ranks)
        optimizer = torch.optim.AdamW(learner.parameters(), lr=0.01)
        losses = []
        for number in range(5):
            with autocast_context(config, ranks):
                losses.append(backward(model, learner, batch | {"step": number})["loss"].item())
            assert {p.grad.dtype for p in learner.parameters()} == {torch.float32}
            optimizer.step()
            optimizer.zero_grad()
        assert {p.dtype for p in learner.parameters()} == {torch.float32}
        assert {v.dtype for state in optimizer.state.values() for v in state.values()} == {torch.float32}
    return losses


@pytest.fixture(scope="module")
def in_float32(ranks):
    return torch.tensor(ranks(losses_of, "ddp", "float32", None, world_size=2)[0])


@pytest.mark.parametrize("micro_batch", [None, 2])
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_bfloat16_comes_close_to_float32_and_parameters_stay(ranks, in_float32, kind, micro_batch):
    torch.testing.assert_close(
        torch.tensor(ranks(losses_of, kind, "float32", micro_batch, world_size=2)[0]), in_float32, rtol=1e-5, atol=0
    )
    results = ranks(losses_of, kind, "bfloat16", micro_batch, world_size=2)
    assert results[0] == results[1]
    rounded = torch.tensor(results[0])
    error = ((rounded - in_float32) / in_float32).abs()
    assert 1e-6 < error.max() < 0.02, error
    assert in_float32[-1] < 0.8 * in_float32[0], "nothing was learned, so there is nothing to compare"


# Checkpointed activations


def saved_bytes(model: nn.Module) -> int:
    """Bytes that autograd keeps from the forward for the backward."""
    storages = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        step(model, rows=512)
    return sum(size for place, size in storages.items() if place not in own)


def test_checkpointed_blocks_run_again_with_the_same_dropout():
    plain, checkpointed = Stack(), parallelize(Stack(), ParallelConfig(checkpoint_activations=True), ONE)
    seen = count_forwards(checkpointed)
    assert torch.equal(step(plain), step(checkpointed))
    assert seen == ["0a", "0b", "1a", "1b", "1b", "1a", "0b", "0a"]
    for one, other in zip(gradients(plain), gradients(checkpointed), strict=True):
        assert torch.equal(one, other)


def test_checkpointed_blocks_keep_their_inputs_only():
    plain, checkpointed = (
        saved_bytes(parallelize(Stack(), ParallelConfig(checkpoint_activations=kept), ONE)) for kept in (False, True)
    )
    assert checkpointed < plain / 4


def with_checkpointed_blocks(kind):
    with start_ranks() as ranks:
        model = parallelize(Stack(), ParallelConfig(kind=kind, checkpoint_activations=True), ranks)
        seen = count_forwards(model)
        step(model)
        names = [name.replace("_checkpoint_wrapped_module.", "") for name, _ in model.named_parameters()]
        assert [name.removeprefix("module.") for name in names] == [name for name, _ in Stack().named_parameters()]
    return seen


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_ranks_take_checkpointed_blocks(ranks, kind):
    assert ranks(with_checkpointed_blocks, kind, world_size=2) == [["0a", "0b", "1a", "1b", "1b", "1a", "0b", "0a"]] * 2


# Compiled blocks


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_compiled_blocks_match_plain_ones_whatever_the_number_of_rows():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    plain, compiled = (parallelize(Stack().double(), ParallelConfig(compile=c), ONE) for c in (False, True))
    made = []
    for rows in (6, 3, 11, 2):
        plain.zero_grad(), compiled.zero_grad()
        torch.testing.assert_close(step(compiled, rows), step(plain, rows), rtol=1e-12, atol=0)
        for one, other in zip(gradients(compiled), gradients(plain), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
        made.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert made == [1] * 4, "compiled again for another block or another number of rows"
    assert not torch._dynamo.utils.counters["graph_break"]
    assert list(compiled.state_dict()) == list(plain.state_dict())


def test_blocks_that_are_all_different_are_all_compiled():
    """Each has a graph of its own, for training and for evaluation: torch would give up after eight of them."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.compiler.set_default_backend("eager")  # takes the graphs as they are
    try:
        model = parallelize(nn.Sequential(*(Block(str(i), 8 + i) for i in range(12))), ParallelConfig(compile=True), ONE)
        for rows in (4, 3):
            with use_dropout_keys(dropout_keys(0, 0, torch.arange(rows))):
                model.train()(torch.randn(rows, 16)).sum().backward()
            with torch.no_grad():
                model.eval()(torch.randn(rows, 16))
    finally:
        torch.compiler.set_default_backend(None)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2 * 12

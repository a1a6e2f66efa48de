"""The parameter groups and the learning rate: which parameters decay and how fast they learn, on any number of ranks."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.clip.small_clip import BERT, small_training_module
from unisono_models.clip.config import ImageConfig, LossConfig, OptimizerConfig, TextConfig
from unisono_models.clip.model.towers import ImageTower, TextTower
from unisono_models.clip.optimizer import make_optimizer, set_learning_rate
from unisono_models.training.config import ParallelConfig
from unisono_models.training.distributed.launch import Ranks
from unisono_models.training.distributed.parallel import parallelize

CONFIG = OptimizerConfig(lr=0.01, weight_decay=0.2, layer_decay=0.5)


def settings_of(model, config=CONFIG):
    """By name, the factor of the learning rate and the weight decay of each parameter."""
    groups = make_optimizer(model, config).param_groups
    found = {id(p): (group["scale"], group["weight_decay"]) for group in groups for p in group["params"]}
    assert len(found) == sum(len(group["params"]) for group in groups)  # none is in two
    named = {name: found.pop(id(p)) for name, p in model.named_parameters() if id(p) in found}
    assert not found
    return named


def depth_of(name, layers, places):
    """The number of layers above a parameter by its name: `places` gives the layer of a prefix, -1 for the stem."""
    for prefix, place in places.items():
        if name.startswith(prefix):
            return layers - place
    raise AssertionError(f"{name} was not thought of")


def layers_below(prefix, count):
    return {f"{prefix}.{place}.": place for place in range(count)}


class Towers(nn.Module):
    """A module with towers of other kinds."""

    def __init__(self, image=None, text=None):
        super().__init__()
        self.image = ImageTower(image or ImageConfig("test_vit", {"img_size": 16, "patch_size": 8}, size=16), 8)
        self.text = TextTower(TextConfig(config=text or BERT), 8, vocabulary=20)


def test_vectors_and_scalars_do_not_decay():
    module = small_training_module(LossConfig(kind="sigmoid"))
    found = settings_of(module, OptimizerConfig(weight_decay=0.2))
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    assert found.keys() == shapes.keys()
    for name, (scale, decay) in found.items():
        assert scale == 1 and decay == (0.2 if len(shapes[name]) > 1 else 0.0), name
    assert {found[name][1] for name in ("pairs.log_scale", "pairs.bias", "clip.image.trunk.norm.weight")} == {0.0}
    assert {found[name][1] for name in ("clip.text.head.4.weight", "clip.image.trunk.patch_embed.proj.weight")} == {0.2}


def test_layers_of_a_vit_and_a_bert_learn_by_their_depth():
    module = small_training_module(LossConfig())
    blocks, layers = len(module.clip.image.trunk.blocks), len(module.clip.text.trunk.encoder.layer)
    assert (blocks, layers) == (6, 2)
    image = {"cls_token": -1, "pos_embed": -1, "patch_embed.": -1, "norm.": blocks, "fc_norm.": blocks}
    text = {"embeddings.": -1} | layers_below("encoder.layer", layers)
    for name, (scale, _) in settings_of(module).items():
        tower, _, inner = name.removeprefix("clip.").partition(".trunk.")
        depth = 0  # of heads and losses: the full rate
        if inner:
            places = image | layers_below("blocks", blocks) if tower == "image" else text
            depth = depth_of(inner, blocks if tower == "image" else layers, places)
        assert scale == 0.5**depth, name
    assert settings_of(module)["clip.text.trunk.embeddings.word_embeddings.weight"][0] == 0.125
    assert settings_of(module)["clip.image.trunk.cls_token"][0] == 0.5**7


def test_layers_of_a_convnext_and_a_llama_learn_by_their_depth():
    """Layers between two stages belong to the block after them; a last norm belongs to the head."""
    llama = {"model_type": "llama", **{key: value for key, value in BERT.items() if key != "model_type"}}
    model = Towers(ImageConfig("test_convnext", {"depths": [1, 2, 1, 2]}, size=32), llama)
    image = {"stem.": -1, "norm_pre.": 6, "head.": 6}
    block = 0
    for stage, depth in enumerate((1, 2, 1, 2)):
        image |= {f"stages.{stage}.downsample.": block} | {f"stages.{stage}.blocks.{i}.": block + i for i in range(depth)}
        block += depth
    text = {"embed_tokens.": -1, "norm.": 2} | layers_below("layers", 2)
    for name, (scale, _) in settings_of(model).items():
        tower, _, inner = name.partition(".trunk.")
        expected = depth_of(inner, 6 if tower == "image" else 2, image if tower == "image" else text) if inner else 0
        assert scale == 0.5**expected, name
    assert settings_of(model)["image.trunk.stages.3.downsample.1.weight"][0] == 0.25


def test_frozen_parameters_are_absent():
    module = small_training_module(LossConfig(), frozen=True)
    module.clip.image.trunk.patch_embed.requires_grad_(False)
    found = settings_of(module)
    assert found.keys() == {name for name, p in module.named_parameters() if p.requires_grad}
    assert not any(name.startswith(("clip.text.trunk.", "clip.image.trunk.patch_embed")) for name in found)
    assert found["clip.image.trunk.blocks.0.norm1.weight"] == (0.5**6, 0.0)  # as deep as if none were frozen
    with pytest.raises(ValueError, match=r"every parameter is frozen, so there is nothing to train: --model.image.no-frozen"):
        make_optimizer(module.requires_grad_(False), CONFIG)


def test_optimizer_is_adamw_with_these_settings():
    """One step by the formula: first the decay, then an update as large as the learning rate."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = make_optimizer(model, OptimizerConfig(lr=0.1, weight_decay=0.3, beta1=0.8, beta2=0.95))
    assert {group["betas"] for group in optimizer.param_groups} == {(0.8, 0.95)}
    model(torch.rand(4, 3, dtype=torch.float64)).square().sum().backward()
    optimizer.step()
    for p, was, decay in zip(model.parameters(), before, (0.3, 0.0), strict=True):
        torch.testing.assert_close(p.detach(), was * (1 - 0.1 * decay) - 0.1 * p.grad.sign(), rtol=1e-6, atol=1e-6)


def rate(step, steps=100, **options):
    model = nn.Linear(2, 2)
    config = OptimizerConfig(**{"lr": 2.0, "warmup": 0.1} | options)
    optimizer = make_optimizer(model, config)
    found = set_learning_rate(optimizer, config, step, steps)
    assert {group["lr"] for group in optimizer.param_groups} == {found}
    return found / config.lr


def test_learning_rate_rises_in_a_line_and_falls_in_a_cosine():
    assert [rate(step) for step in range(11)] == pytest.approx([(step + 1) / 11 for step in range(11)])
    assert rate(10) == 1.0
    for step in (11, 32, 55, 77, 99):
        assert rate(step) == pytest.approx(0.5 + 0.5 * math.cos(math.pi * (step - 10) / 90))
    assert rate(55) == pytest.approx(0.5) and 0 < rate(99) < 0.001 and rate(100) == pytest.approx(0)


def test_learning_rate_ends_at_what_is_left():
    assert rate(100, final=0.2) == pytest.approx(0.2) and rate(55, final=0.2) == pytest.approx(0.6)
    falling = [rate(step, final=0.2) for step in range(10, 101)]
    assert falling == sorted(falling, reverse=True) and falling[0] == 1.0
    assert {rate(step, final=1.0) for step in range(10, 100)} == {1.0}


def test_learning_rate_of_short_runs():
    assert [rate(step, 4, warmup=0.0) for step in range(4)] == pytest.approx(
        [1, 0.5 + 0.5 * math.sqrt(0.5), 0.5, 0.5 - 0.5 * math.sqrt(0.5)]
    )
    assert rate(0, 1) == pytest.approx(1 / 1.1) and rate(0, 1, warmup=0.0) == 1.0
    assert [rate(step, 4, warmup=1.0) for step in range(4)] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert all(0 < rate(step, 12, warmup=0.05) <= 1 for step in range(12))


def test_lower_layers_keep_their_part_of_the_learning_rate():
    module = small_training_module(LossConfig())
    optimizer = make_optimizer(module, CONFIG)
    for step in (0, 5, 50):
        top = set_learning_rate(optimizer, CONFIG, step, 100)
        assert {group["lr"] / top for group in optimizer.param_groups} == {group["scale"] for group in optimizer.param_groups}
    assert min(group["scale"] for group in optimizer.param_groups) == 0.5**7


def groups_after(kind, options):
    """Settings by names without what wrappers add to them, and the learning rate of a step."""
    module = small_training_module(LossConfig())
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), dist.get_rank(), torch.device("cpu"))
    parallelize(module, ParallelConfig(kind, **options), ranks)
    found = {name.replace("._checkpoint_wrapped_module", ""): value for name, value in settings_of(module).items()}
    return found, set_learning_rate(make_optimizer(module, CONFIG), CONFIG, 3, 10)


@pytest.mark.parametrize(("kind", "options"), [("ddp", {"checkpoint_activations": True}), ("fsdp", {})])
def test_groups_do_not_depend_on_ranks(ranks, kind, options):
    module = small_training_module(LossConfig())
    expected = settings_of(module), set_learning_rate(make_optimizer(module, CONFIG), CONFIG, 3, 10)
    assert ranks(groups_after, kind, options, world_size=2) == [expected] * 2

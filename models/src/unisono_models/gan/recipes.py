"""The recipes: what is trained, on what, for how long. Any field can be changed on the command line."""

from __future__ import annotations

from dataclasses import replace

from unisono_models.gan.config import Config, DataConfig, EvaluationConfig, LossConfig, ModelConfig, OptimizerConfig
from unisono_models.training.config import CheckpointConfig, RunConfig
from unisono_models.training.config.recipes import Recipes

RECIPES: Recipes[Config] = Recipes("gan", Config)


@RECIPES.add
def digits() -> Config:
    """Handwritten digits by class (MNIST-5k), as they were scanned, 28 pixels: five minutes on two cores."""
    return Config(
        run=RunConfig(steps=2000, evaluate_every=500, log_every=20),
        optimizer=OptimizerConfig(warmup=0.05),
        checkpoint=CheckpointConfig(every=500),
    )


@RECIPES.add
def digits16() -> Config:
    """As digits, reduced to 16 pixels, for twice as many steps."""
    config = digits()
    return replace(config, run=replace(config.run, steps=4000), data=replace(config.data, size=16))


@RECIPES.add
def digits_unconditional() -> Config:
    """As digits, without telling the networks which digit."""
    return replace(digits(), model=replace(digits().model, condition="none"))


@RECIPES.add
def fashion() -> Config:
    """Clothes by class, 28 pixels: --data.source with the folder of Fashion-MNIST's idx files."""
    config = digits()
    data = DataConfig("/usr/share/datasets/fashion-mnist", batch=256)
    return replace(config, run=replace(config.run, steps=20_000, evaluate_every=2000), data=data)


@RECIPES.add
def emoji() -> Config:
    """Emoji drawings of 32 pixels in colour, by the nine groups of Unicode: for an hour on two cores."""
    return Config(
        run=RunConfig(steps=12_000, evaluate_every=2000, log_every=20),
        data=DataConfig("emoji", size=32, colour=True),
        model=ModelConfig(generator=(96, 64, 32), discriminator=(96, 64, 32), noise=128),
        optimizer=OptimizerConfig(lr=1e-3, warmup=0.05),
        evaluation=EvaluationConfig(pictures_every=500),
        checkpoint=CheckpointConfig(every=500),
    )


@RECIPES.add
def emoji_text() -> Config:
    """As emoji, by their names: conditions that do not match count as fakes, and pictures find their names."""
    config = emoji()
    loss = LossConfig(matching=0.5, contrast=0.1)
    return replace(config, model=replace(config.model, condition="text"), loss=loss)


@RECIPES.add
def pictures64() -> Config:
    """A folder of pictures at 64 pixels in colour, for GPUs: --data.source FOLDER [--model.condition class]"""
    widths = (512, 384, 256, 128)
    return Config(
        run=RunConfig(steps=100_000, evaluate_every=10_000, log_every=50, timeout=1800),
        data=DataConfig("/data/pictures", size=64, colour=True, batch=512),
        model=ModelConfig("none", generator=widths, discriminator=widths, blocks=2, noise=128, embedding=256),
        optimizer=OptimizerConfig(lr=2e-4, half_life=500_000, warmup=0.01),
        evaluation=EvaluationConfig(samples=20_000, judge_steps=5000, judge_batch=512, pictures_every=2000),
        checkpoint=CheckpointConfig(every=5000),
    )


@RECIPES.add
def tiny() -> Config:
    """Digits of 16 pixels for seconds, to see that everything works."""
    return Config(
        run=RunConfig(steps=60, evaluate_every=30, timeout=60),
        data=DataConfig(size=16),
        model=ModelConfig(generator=(16, 8), discriminator=(16, 8), noise=16, embedding=16),
        evaluation=EvaluationConfig(samples=200, judge_steps=40, tile=100, pictures_every=10),
        checkpoint=CheckpointConfig(every=25),
    )

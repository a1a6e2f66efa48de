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
    max_broken: float = 0.01
    """The run stops if a larger part of the pictures is broken."""

    def __post_init__(self) -> None:
        _check("data", self, size=self.size >= 1, batch=self.batch >= 1)
        _check("data", self, test_part=0 < self.test_part < 1, max_broken=0 <= self.max_broken <= 1)


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
        _check("model", self, **{name: getattr(self, name) >= 1 for name in ("noise", "blocks", "patch", "embedding")})
        _check("model", self, generator=min(self.generator, default=0) >= 1, stddev_group=self.stddev_group >= 0)
        _check("model", self, discriminator=min(self.discriminator, default=0) >= 1)

    def lowest(self, widths: tuple[int, ...], size: int) -> int:
        """Pixels a side at the lowest resolution of the network with these `widths`, for pictures of `size`.

        Raises: ValueError if they do not fit.

        Example:
            >>> ModelConfig().lowest((64, 32), 28)
            7
        """
        factor: int = self.patch * 2 ** (len(widths) - 1)
        if size % factor or size < 2 * factor:
            raise ValueError(
                f"data.size={size} with model.patch={self.patch} and the channels {widths}: it must be a multiple of "
                f"{self.patch} * 2**{len(widths) - 1} = {factor}, at least twice as much"
            )
        return size // factor


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
    """Weight of the contrastive term: of all conditions of the global batch, a picture is to find its own."""
    temperature: float = 0.1
    """Of the contrastive term."""

    def __post_init__(self) -> None:
        _check("loss", self, **{x: getattr(self, x) >= 0 for x in ("gamma", "gamma_final", "matching", "contrast")})
        _check("loss", self, penalty_every=self.penalty_every >= 1, temperature=self.temperature > 0)


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
        _check("optimizer", self, lr=self.lr > 0, half_life=self.half_life > 0)
        _check("optimizer", self, beta1=0 <= self.beta1 < 1, beta2=0 <= self.beta2 < 1)


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
        _check("evaluation", self, **{x: getattr(self, x) >= 1 for x in ("judge_batch", "neighbours", "tile")})
        _check("evaluation", self, judge_steps=self.judge_steps >= 0, samples=self.samples > self.neighbours)


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
    rounding: float = 1e-5
    """How far, relatively, the first ten losses may be from those of other ranks or machines, for training.reproduce to call it
    rounding. Ten times as far as elsewhere: Adam without momentum makes whole steps of gradients that are rounding only."""

    def __post_init__(self) -> None:
        for widths in (self.model.generator, self.model.discriminator):
            self.model.lowest(widths, self.data.size)
        if self.model.condition == "none":
            _check("loss", self.loss, "0 where model.condition is none", matching=not self.loss.matching)
            _check("loss", self.loss, "0 where model.condition is none", contrast=not self.loss.contrast)


_RULES = {
    "test_part": "between 0 and 1",
    "max_broken": "from 0 to 1",
    "generator": "one number of channels or more, each at least 1",
    "discriminator": "one number of channels or more, each at least 1",
    "beta1": "from 0 to less than 1",
    "beta2": "from 0 to less than 1",
    "samples": "more than neighbours",
    **dict.fromkeys(("stddev_group", "gamma", "gamma_final", "matching", "contrast", "judge_steps"), "at least 0"),
    **dict.fromkeys(("lr", "half_life", "temperature"), "above 0"),
}


def _check(section: str, config: object, rule: str = "", **holds: bool) -> None:
    """Raises: ValueError that names the first field for which what should hold does not."""
    for name, good in holds.items():
        if not good:
            raise ValueError(f"{section}.{name}={getattr(config, name)!r}: must be {rule or _RULES.get(name, 'at least 1')}")

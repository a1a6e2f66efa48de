"""The config of a GAN run. Every field is an option of the command line, and its docstring is the help text."""

from dataclasses import dataclass, field
from typing import Literal

from unisono_models.training.config import CheckpointConfig, RunConfig

Condition = Literal["class", "vector", "text", "none"]


@dataclass(frozen=True)
class DataConfig:
    """The images to train on."""

    source: str = "mnist-5k"
    """The dataset: mnist-5k or emoji (both come with pip packages), or a folder.
    A folder holds idx files (the format of MNIST and Fashion-MNIST, plain or .gz) or image files in a subfolder per class."""
    size: int = 28
    """Height and width of the images in pixels. Images of another size are scaled."""
    colour: bool = False
    """Use three colour channels. The default is one channel of grey."""
    batch: int = 64
    """Images in the global batch, over all ranks."""
    test_part: float = 0.2
    """Fraction of the images that is held out, to measure what real images score. A dataset with its own test set uses that."""
    vectors: str = ""
    """For --model.condition vector: a .npy file with one row for each image, in the order of the sorted paths."""
    text_model: str = ""
    """For --model.condition text: a folder or Hugging Face name of a text encoder. The default is MiniLM from a pip package."""
    max_broken: float = 0.01
    """The run stops if a larger fraction of the image files cannot be read."""

    def __post_init__(self) -> None:
        _check("data", self, size=self.size >= 1, batch=self.batch >= 1)
        _check("data", self, test_part=0 < self.test_part < 1, max_broken=0 <= self.max_broken <= 1)


@dataclass(frozen=True)
class ModelConfig:
    """The generator and the discriminator. Their image size is data.size."""

    condition: Condition = "class"
    """What the generator is conditioned on: a class, a vector, a text, or nothing (none)."""
    noise: int = 64
    """Dimension of the noise vector."""
    generator: tuple[int, ...] = (64, 32)
    """Channels of the generator at each resolution. The lowest resolution comes first, and each is twice the one before."""
    discriminator: tuple[int, ...] = (64, 32)
    """Channels of the discriminator at each resolution. The lowest resolution comes first, as for the generator."""
    blocks: int = 1
    """Number of residual blocks at each resolution."""
    patch: int = 2
    """Patches of this many pixels a side are folded into channels at the highest resolution."""
    embedding: int = 64
    """Dimension of the condition embedding in both networks."""
    stddev_group: int = 4
    """Group size of the minibatch standard deviation: consecutive rows of the global batch. 0 removes that layer."""

    def __post_init__(self) -> None:
        _check("model", self, **{name: getattr(self, name) >= 1 for name in ("noise", "blocks", "patch", "embedding")})
        _check("model", self, generator=min(self.generator, default=0) >= 1, stddev_group=self.stddev_group >= 0)
        _check("model", self, discriminator=min(self.discriminator, default=0) >= 1)

    def lowest_resolution(self, widths: tuple[int, ...], size: int) -> int:
        """Return the height and width in pixels at the lowest resolution of a network with `widths`, for images of `size`.

        Raises: ValueError if `size` is not divisible as often as the network halves it.

        Example:
            >>> ModelConfig().lowest_resolution((64, 32), 28)
            7
        """
        factor: int = self.patch * 2 ** (len(widths) - 1)
        if size % factor or size < 2 * factor:
            raise ValueError(
                f"data.size={size} with model.patch={self.patch} and the channels {widths}: the size must be a multiple of "
                f"{self.patch} * 2**{len(widths) - 1} = {factor}, and at least twice that"
            )
        return size // factor


@dataclass(frozen=True)
class LossConfig:
    """The losses of both networks."""

    kind: Literal["paired", "all_pairs", "non_saturating", "hinge"] = "paired"
    """paired compares each real image with the fake in the same row (RpGAN).
    all_pairs compares it with every fake of the global batch.
    non_saturating and hinge look at each image alone."""
    gamma: float = 3.0
    """Weight of the R1 and R2 penalties at the first step. A penalty is gamma / 2 times the squared gradient of the scores."""
    gamma_final: float = 0.3
    """Weight of the penalties at the last step. It falls from gamma along a cosine."""
    penalty: Literal["r1+r2", "r1", "r2", "none"] = "r1+r2"
    """Which gradients are penalized: those at real images (r1), at fakes (r2), both, or none."""
    penalty_every: int = 2
    """Compute the penalties every N steps, multiplied by N."""
    matching: float = 0.0
    """Weight of the matching loss: real images with the condition of another row of the global batch count as fakes."""
    contrast: float = 0.0
    """Weight of the contrastive loss: each image has to find its own condition among all conditions of the global batch."""
    temperature: float = 0.1
    """Temperature of the contrastive loss."""

    def __post_init__(self) -> None:
        _check("loss", self, **{name: getattr(self, name) >= 0 for name in ("gamma", "gamma_final", "matching", "contrast")})
        _check("loss", self, penalty_every=self.penalty_every >= 1, temperature=self.temperature > 0)


@dataclass(frozen=True)
class OptimizerConfig:
    """Adam for both networks, and the moving average of the generator's weights, which is evaluated and exported."""

    lr: float = 2e-3
    """Highest learning rate of both networks."""
    final: float = 0.15
    """Fraction of the learning rate that is left at the end of the cosine schedule."""
    warmup: float = 0.0
    """Fraction of the steps over which the learning rate rises to lr."""
    beta1: float = 0.0
    """Adam's decay rate of the mean of the gradients."""
    beta2: float = 0.99
    """Adam's decay rate of the mean of their squares."""
    half_life: float = 5000.0
    """Half-life of the moving average, in training images."""

    def __post_init__(self) -> None:
        _check("optimizer", self, lr=self.lr > 0, half_life=self.half_life > 0)
        _check("optimizer", self, beta1=0 <= self.beta1 < 1, beta2=0 <= self.beta2 < 1)


@dataclass(frozen=True)
class EvaluationConfig:
    """The metrics. They use the features of a small classifier, which is trained on the same images before the run."""

    samples: int = 4000
    """Number of images to generate for one evaluation."""
    images_every: int = 100
    """Steps between the sample grids that show how the generator learns. 0 saves one at the end only."""
    feature_extractor_steps: int = 1000
    """Training steps of that classifier, the feature extractor."""
    feature_extractor_batch: int = 128
    """Batch size of its training."""
    neighbours: int = 3
    """k of precision and recall: the ball around an image reaches to its k-th nearest neighbour."""
    tile: int = 500
    """Number of images to process at a time, and number of rows in a tile of distances."""

    def __post_init__(self) -> None:
        positive = ("feature_extractor_batch", "neighbours", "tile")
        _check("evaluation", self, **{name: getattr(self, name) >= 1 for name in positive})
        _check("evaluation", self, feature_extractor_steps=self.feature_extractor_steps >= 0)
        _check("evaluation", self, samples=self.samples > self.neighbours)


@dataclass(frozen=True)
class Config:
    """The config of a GAN run."""

    run: RunConfig
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    precision: Literal["float32", "float64"] = "float32"
    """dtype of weights and activations. float64 helps to tell rounding errors from bugs."""
    rounding: float = 1e-5
    """Largest relative difference of the first ten losses that `training reproduce` accepts.
    It is ten times that of other models: Adam without momentum takes full steps where a gradient is only rounding error."""

    def __post_init__(self) -> None:
        for widths in (self.model.generator, self.model.discriminator):
            self.model.lowest_resolution(widths, self.data.size)
        if self.model.condition == "none":
            _check("loss", self.loss, "0 if model.condition is none", matching=not self.loss.matching)
            _check("loss", self.loss, "0 if model.condition is none", contrast=not self.loss.contrast)


_RULES = {
    "test_part": "between 0 and 1",
    "max_broken": "from 0 to 1",
    "generator": "one or more numbers of channels, each at least 1",
    "discriminator": "one or more numbers of channels, each at least 1",
    "beta1": "from 0 to less than 1",
    "beta2": "from 0 to less than 1",
    "samples": "greater than evaluation.neighbours",
    **dict.fromkeys(("stddev_group", "gamma", "gamma_final", "matching", "contrast", "feature_extractor_steps"), "at least 0"),
    **dict.fromkeys(("lr", "half_life", "temperature"), "above 0"),
}


def _check(section: str, config: object, rule: str = "", **holds: bool) -> None:
    """Raise ValueError for the first field in `holds` whose value is False, and say what the field must be."""
    for name, good in holds.items():
        if not good:
            raise ValueError(f"{section}.{name}={getattr(config, name)!r}: must be {rule or _RULES.get(name, 'at least 1')}")

"""The config of a GAN run. Every field is an option of the command line, and its docstring is the help text."""

from dataclasses import dataclass, field
from typing import Literal

from unisono_models.training.config import CheckpointConfig, RunConfig
from unisono_models.training.config.validate import option_name
from unisono_models.training.errors import UserError

Condition = Literal["class", "vector", "text", "none"]


@dataclass(frozen=True)
class DataConfig:
    """The images to train on."""

    source: str = "mnist-5k"
    """The images to train on: a folder, or the name of a dataset that comes with a pip package (mnist-5k or emoji).
    A folder holds image files, with a subfolder for each class if there are classes; or it holds idx files, the format of
    MNIST and Fashion-MNIST, plain or .gz."""
    size: int = 28
    """The height and width of the images in pixels. The centre square of each image is scaled to this size."""
    colour: bool = False
    """Train on three colour channels. Without it, images are turned to grey and have one channel."""
    batch: int = 64
    """The number of images in a batch, over all ranks together."""
    test_part: float = 0.2
    """The fraction of the images that is kept from training as the test set: the report shows what real images score.
    A dataset with a test set of its own uses that."""
    vectors: str = ""
    """A .npy file with one row for each image, in the order of the sorted paths. --model.condition vector needs it."""
    text_model: str = ""
    """The text encoder for --model.condition text: a folder, or a name on the Hugging Face hub.
    If it is empty, MiniLM from a pip package is used."""
    max_broken: float = 0.01
    """The fraction of the image files that may be broken. They are left out; if more are broken, the run does not start."""

    def __post_init__(self) -> None:
        _check("data", self, size=self.size >= 1, batch=self.batch >= 1)
        _check("data", self, test_part=0 < self.test_part < 1, max_broken=0 <= self.max_broken <= 1)


@dataclass(frozen=True)
class AugmentConfig:
    """Random changes of the images, so that few images last for more steps. By default there are none."""

    mirror: float = 0.0
    """The probability that a real image is mirrored, left to right. 0.5 suits photos; leave 0 for letters and digits.
    The generator learns to make mirrored images, too."""
    shift: float = 0.0
    """Shift all images that the discriminator sees by at most this fraction of their size, real and generated ones alike
    (DiffAugment). It then cannot learn the real images by heart, and generated images are not shifted."""
    colour: float = 0.0
    """Change the brightness, contrast and saturation of all images that the discriminator sees by at most this fraction, real
    and generated ones alike (DiffAugment)."""

    def __post_init__(self) -> None:
        _check("augment", self, mirror=0 <= self.mirror <= 1, shift=0 <= self.shift <= 0.5, colour=0 <= self.colour <= 1)


@dataclass(frozen=True)
class ModelConfig:
    """The generator and the discriminator. --data.size sets the size of their images."""

    condition: Condition = "class"
    """What says which image to make: the class of an image (the name of its subfolder), a text (its caption in metadata.csv), a
    vector (its row in --data.vectors), or nothing (none)."""
    noise: int = 64
    """The number of random numbers that the generator makes an image from."""
    generator: tuple[int, ...] = (64, 32)
    """The number of channels of the generator at each resolution. The lowest resolution comes first; each further one has twice
    the height and width."""
    discriminator: tuple[int, ...] = (64, 32)
    """The number of channels of the discriminator at each resolution. The lowest resolution comes first, as above."""
    blocks: int = 1
    """The number of residual blocks at each resolution."""
    patch: int = 2
    """The side of the square of pixels that the networks handle as one position. 2 makes them four times as fast as 1."""
    embedding: int = 64
    """The dimension of the vector that both networks turn a condition into."""
    stddev_group: int = 4
    """The discriminator sees how much the images in a group of this many differ (minibatch standard deviation). A group is
    consecutive images of the batch over all ranks. 0 removes that layer."""

    def __post_init__(self) -> None:
        _check("model", self, **{name: getattr(self, name) >= 1 for name in ("noise", "blocks", "patch", "embedding")})
        _check("model", self, generator=min(self.generator, default=0) >= 1, stddev_group=self.stddev_group >= 0)
        _check("model", self, discriminator=min(self.discriminator, default=0) >= 1)

    def lowest_resolution(self, widths: tuple[int, ...], size: int) -> int:
        """Return the height and width in pixels at the lowest resolution of a network with `widths`, for images of `size`.

        Raises: UserError that names the nearest sizes if `size` is not divisible as often as the network halves it.

        Example:
            >>> ModelConfig().lowest_resolution((64, 32), 28)
            7
        """
        factor: int = self.patch * 2 ** (len(widths) - 1)
        if size % factor or size < 2 * factor:
            below = max(2, size // factor) * factor
            nearest = f"{below} or {below + factor}" if size > below else f"{below}"
            raise UserError(
                f"--data.size {size}: networks with {len(widths)} resolutions and --model.patch {self.patch} make images whose "
                f"size is a multiple of {factor}, from {2 * factor} on: take {nearest}, or another number of channels in "
                "--model.generator and --model.discriminator"
            )
        return size // factor


@dataclass(frozen=True)
class LossConfig:
    """The losses of the generator and the discriminator."""

    kind: Literal["paired", "all_pairs", "non_saturating", "hinge"] = "paired"
    """The adversarial loss. paired compares each real image with the generated one in the same row of the batch (RpGAN).
    all_pairs compares it with every generated image of all ranks. non_saturating and hinge judge each image alone."""
    gamma: float = 3.0
    """The weight of the R1 and R2 penalties at the first step. A penalty is gamma / 2 times the squared gradient of the scores
    with respect to the images. A higher gamma makes the training more stable."""
    gamma_final: float = 0.3
    """The weight of the penalties at the last step. From step to step it falls from gamma along a cosine."""
    penalty: Literal["r1+r2", "r1", "r2", "none"] = "r1+r2"
    """Which gradients are penalized: those at real images (r1), at generated ones (r2), at both, or none."""
    penalty_every: int = 2
    """Compute the penalties only at every N-th step, and multiply them by N there."""
    matching: float = 0.0
    """The weight of the matching loss: the discriminator learns to reject real images that are shown with the condition of
    another image of the batch."""
    contrast: float = 0.0
    """The weight of the contrastive loss: each image has to find its own condition among the conditions of all ranks."""
    temperature: float = 0.1
    """The temperature of the contrastive loss. Lower values look more at the most similar conditions."""

    def __post_init__(self) -> None:
        _check("loss", self, **{name: getattr(self, name) >= 0 for name in ("gamma", "gamma_final", "matching", "contrast")})
        _check("loss", self, penalty_every=self.penalty_every >= 1, temperature=self.temperature > 0)


@dataclass(frozen=True)
class OptimizerConfig:
    """Adam, for both networks, and the moving average of the generator's weights, which is evaluated and exported."""

    lr: float = 2e-3
    """The highest learning rate of both networks."""
    final: float = 0.15
    """The fraction of the learning rate that is left at the last step. It falls along a cosine."""
    warmup: float = 0.0
    """The fraction of the steps at the beginning in which the learning rate rises from 0 to lr."""
    beta1: float = 0.0
    """How much Adam keeps of the mean of the gradients at each step. 0 is no momentum."""
    beta2: float = 0.99
    """How much Adam keeps of the mean of the squared gradients at each step."""
    half_life: float = 5000.0
    """The half-life of the moving average: the number of training images after which a weight counts half."""

    def __post_init__(self) -> None:
        _check("optimizer", self, lr=self.lr > 0, half_life=self.half_life > 0)
        _check("optimizer", self, beta1=0 <= self.beta1 < 1, beta2=0 <= self.beta2 < 1)


@dataclass(frozen=True)
class EvaluationConfig:
    """The metrics. They use the features of a small classifier (the feature extractor), which is trained on the same images
    before the networks are."""

    samples: int = 4000
    """The number of images to generate for one evaluation."""
    images_every: int = 100
    """The number of steps between two sample grids, the frames of the animation. 0 saves one at the end only."""
    feature_extractor_steps: int = 1000
    """The number of training steps of the feature extractor."""
    feature_extractor_batch: int = 128
    """The number of images in a batch of the feature extractor's training."""
    neighbours: int = 3
    """The number of nearest neighbours of an image that precision and recall take as similar to it."""
    tile: int = 500
    """The number of images that are evaluated at a time. Fewer need less memory, and no metric changes."""

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
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    precision: Literal["float32", "float64"] = "float32"
    """The number format of weights and activations. float64 helps to tell rounding errors from bugs."""
    rounding: float = 1e-5
    """The largest relative difference in the first ten losses that `training reproduce` accepts. It is ten times that of the
    other models, because Adam without momentum takes full steps where a gradient is only rounding error."""

    def __post_init__(self) -> None:
        for widths in (self.model.generator, self.model.discriminator):
            self.model.lowest_resolution(widths, self.data.size)
        if self.model.condition == "none":
            _check("loss", self.loss, "0 with --model.condition none", matching=not self.loss.matching)
            _check("loss", self.loss, "0 with --model.condition none", contrast=not self.loss.contrast)


_RULES = {
    "test_part": "between 0 and 1",
    **dict.fromkeys(("max_broken", "mirror", "colour"), "from 0 to 1"),
    "generator": "one or more numbers of channels, each at least 1",
    "discriminator": "one or more numbers of channels, each at least 1",
    "beta1": "from 0 to less than 1",
    "beta2": "from 0 to less than 1",
    "samples": "greater than --evaluation.neighbours",
    "shift": "from 0 to 0.5",
    **dict.fromkeys(("stddev_group", "gamma", "gamma_final", "matching", "contrast", "feature_extractor_steps"), "at least 0"),
    **dict.fromkeys(("lr", "half_life", "temperature"), "above 0"),
}


def _check(section: str, config: object, rule: str = "", **holds: bool) -> None:
    """Raise UserError for the first field in `holds` whose value is False, and say what the field must be."""
    for name, good in holds.items():
        if not good:
            value = getattr(config, name)
            typed = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
            option = f"{option_name(section, name)} {typed}".rstrip()
            raise UserError(f"{option}: must be {rule or _RULES.get(name, 'at least 1')}")

"""The feature extractor of the metrics: a small classifier that is trained on the run's own images and kept in the run."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam

from unisono.collectives import broadcast
from unisono_models.gan.config import EvaluationConfig
from unisono_models.gan.data.augment import shift_images
from unisono_models.gan.data.dataset import Datasets
from unisono_models.gan.data.images import ImageDataset
from unisono_models.training.checkpoint.atomic_file import atomic_write
from unisono_models.training.distributed.launch import Ranks
from unisono_models.training.distributed.object_collectives import broadcast_object, raise_together
from unisono_models.training.distributed.watchdog import Watchdog
from unisono_models.training.errors import UserError
from unisono_models.training.randomness import make_generator, uniform
from unisono_models.training.sampler import StepSampler
from unisono_models.training.schedule import learning_rate_factor

FILE = "feature_extractor.safetensors"
FEATURES = 64
_ROTATIONS = 4
_CHANNELS = (16, 32, 64)  # of the convolutions; further ones have as many as the last
_LOWEST_RESOLUTION = 4
_SEED = 0  # not the run's seed: runs with different seeds are measured by the same feature extractor
_LR = 4e-3
_WARMUP = 0.1
_MAX_SHIFT = 1 / 16  # of the image size
_TEST_BATCH = 500


class FeatureExtractor(nn.Module):
    """A classifier of images (n, channels, size, size) in [-1, 1]; its hidden layer gives the features.

    It predicts one of `classes`; without classes it predicts the rotation of the image (0, 90, 180 or 270 degrees).
    It has no normalization: the features of an image do not depend on the rest of the batch.

    Example:
        >>> extractor = FeatureExtractor(channels=1, size=16, classes=("cat", "dog"))
        >>> images = torch.zeros(3, 1, 16, 16)
        >>> extractor(images).shape, extractor.features(images).shape
        (torch.Size([3, 2]), torch.Size([3, 64]))
    """

    def __init__(self, *, channels: int, size: int, classes: Sequence[str] = ()) -> None:
        super().__init__()
        if channels < 1 or size < 1:
            raise ValueError(f"FeatureExtractor: channels={channels}, size={size}: both must be at least 1")
        self.channels = channels
        self.size = size
        self.classes = tuple(classes)
        self.accuracy = math.nan
        """Fraction of the test images that it classifies correctly. NaN: not known."""
        halvings = max(0, math.ceil(math.log2(size / _LOWEST_RESOLUTION)))
        width = _CHANNELS[0]
        layers: list[nn.Module] = [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
        for number in range(1, halvings + 1):
            next_width = _CHANNELS[min(number, len(_CHANNELS) - 1)]
            layers += [nn.Conv2d(width, next_width, 3, stride=2, padding=1), nn.ReLU()]
            width = next_width
        last_size = -(-size // 2**halvings)
        self.body = nn.Sequential(*layers, nn.Flatten(), nn.Linear(width * last_size**2, FEATURES), nn.ReLU())
        self.head = nn.Linear(FEATURES, len(self.classes) or _ROTATIONS)

    def features(self, images: Tensor) -> Tensor:
        """Return the features (n, 64), after the ReLU of the hidden layer."""
        features: Tensor = self.body(images.to(self.head.weight.dtype))
        return features

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(images))
        return logits

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Draw the initial weights (He's normal initialization) as a function of `seed` and the parameters' names."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            else:
                # "judge" is a name of the random stream: another one would change all metrics
                draws = torch.randn(parameter.shape, generator=make_generator(seed, "judge", name), dtype=torch.float64)
                parameter.copy_(draws * math.sqrt(2 / parameter[0].numel()))


def load_or_train_feature_extractor(
    path: Path, datasets: Datasets, config: EvaluationConfig, ranks: Ranks, watchdog: Watchdog | None = None
) -> FeatureExtractor:
    """Read the feature extractor from the file `path`; if there is none, train one and write it there.

    All ranks call it. Rank 0 decides whether the file exists, and its weights count; the other ranks train along instead of
    waiting. The seed is not the run's, and the number of ranks does not matter: on one kind of machine, with equally many
    threads, all runs on the same images get the same feature extractor, bit for bit.

    Raises: UserError, on all ranks, if the file is damaged or belongs to other images than those in `datasets`.

    Example:
        extractor = load_or_train_feature_extractor(run.path / FILE, datasets, config.evaluation, ranks, watchdog)
    """
    if broadcast_object(path.exists()):
        with raise_together("load_or_train_feature_extractor"):
            extractor = read_feature_extractor(path, fingerprint=datasets.fingerprint)
            _check_fit(extractor, path, datasets)
        return extractor.to(ranks.device)
    train = datasets.train
    extractor = _build_empty(train.channels, train.size, predicted_classes(datasets)).to(ranks.device)
    with raise_together("load_or_train_feature_extractor"):
        accuracy = train_feature_extractor(extractor, datasets, config, watchdog)
    with torch.no_grad():
        for weight in extractor.parameters():
            weight.copy_(broadcast(weight))
    extractor.accuracy = broadcast_object(accuracy)
    with raise_together("load_or_train_feature_extractor"):
        if ranks.first:
            write_feature_extractor(path, extractor, fingerprint=datasets.fingerprint)
    return extractor


def predicted_classes(datasets: Datasets) -> tuple[str, ...]:
    """Return the classes that a feature extractor tells apart: those of the images if there are two or more, else ()."""
    train = datasets.train
    return train.classes if train.labels is not None and len(train.classes) > 1 else ()


def train_feature_extractor(
    extractor: FeatureExtractor, datasets: Datasets, config: EvaluationConfig, watchdog: Watchdog | None = None
) -> float:
    """Initialize and train on datasets.train; return the accuracy on datasets.test, NaN if that is empty.

    Each rank trains alone on whole batches: the rounding of distributed training, over a thousand steps, would make the metrics
    depend on the number of ranks. Images are shifted at random by up to 1/16 of their size. The scale of the features grows
    with the steps, so metrics after different numbers of steps cannot be compared.
    """
    extractor.initialize(_SEED)
    train = datasets.train
    weight = next(extractor.parameters())
    sampler = StepSampler(len(train), config.feature_extractor_batch, _SEED)
    optimizer = Adam(extractor.parameters(), lr=_LR)
    for step in range(config.feature_extractor_steps):
        indices = sampler.at(step)
        images = train.floats(indices, dtype=weight.dtype, device=weight.device)
        images, targets = _make_task(extractor, images, train, indices, uniform(_SEED, "turn", step, indices))
        parts = uniform(_SEED, "shift", step, indices.to(weight.device), (2,))
        logits = extractor(shift_images(images, parts, limit=round(train.size * _MAX_SHIFT)))
        F.cross_entropy(logits, targets).backward()
        for group in optimizer.param_groups:
            group["lr"] = _LR * learning_rate_factor(step, config.feature_extractor_steps, warmup=_WARMUP)
        optimizer.step()
        optimizer.zero_grad()
        if watchdog is not None:
            watchdog.beat()
    return _accuracy(extractor, datasets.test)


@torch.no_grad()
def _accuracy(extractor: FeatureExtractor, dataset: ImageDataset) -> float:
    weight = next(extractor.parameters())
    correct = total = 0
    for indices in torch.arange(len(dataset)).split(_TEST_BATCH):
        for rotation in (0.0,) if extractor.classes else (0.0, 0.25, 0.5, 0.75):
            images = dataset.floats(indices, dtype=weight.dtype, device=weight.device)
            images, targets = _make_task(extractor, images, dataset, indices, torch.full((len(indices),), rotation))
            correct += int((extractor(images).argmax(1) == targets).sum())
            total += len(indices)
    return correct / total if total else math.nan


def _make_task(
    extractor: FeatureExtractor, images: Tensor, dataset: ImageDataset, indices: Tensor, rotations: Tensor
) -> tuple[Tensor, Tensor]:
    """Return images and targets: the labels, or images that are rotated by `rotations` (full turns, in [0, 1))."""
    if extractor.classes:
        if dataset.labels is None:
            raise ValueError("train_feature_extractor: a classifier needs labels, but the images have none")
        return images, dataset.labels[indices].to(images.device)
    quarters = (rotations * 4).long().to(images.device)
    rotated = torch.stack([images.rot90(quarter, (2, 3)) for quarter in range(4)])
    return rotated[quarters, torch.arange(len(images), device=images.device)], quarters


def write_feature_extractor(path: Path, extractor: FeatureExtractor, *, fingerprint: str = "") -> None:
    """Write a safetensors file. `fingerprint` is that of the images it was trained on. One rank calls it."""
    metadata = {name: getattr(extractor, name) for name in ("channels", "size", "classes", "accuracy")}
    metadata["images"] = fingerprint
    weights = {name: weight.detach().cpu().contiguous() for name, weight in extractor.state_dict().items()}
    atomic_write(path, save(weights, {"feature_extractor": json.dumps(metadata)}))


def read_feature_extractor(path: Path, *, fingerprint: str | None = None) -> FeatureExtractor:
    """Read a feature extractor onto the CPU. Raises: UserError if it was trained on images with another `fingerprint`."""
    try:
        with safe_open(path, "pt") as file:
            metadata = json.loads((file.metadata() or {})["feature_extractor"])
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, file is not a dict
        extractor = _build_empty(metadata["channels"], metadata["size"], metadata["classes"])
        extractor.to(weights["head.weight"].dtype).load_state_dict(weights)
        extractor.accuracy = float(metadata["accuracy"])
        trained_on = str(metadata["images"])
    except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise UserError(
            f"{path} is damaged, or not a feature extractor ({error}): remove it, and another one is trained"
        ) from error
    if fingerprint is not None and trained_on != fingerprint:
        raise UserError(
            f"--data.source has other images now than when the run began: {path} was trained on those. Restore them, or begin "
            "another run in another --run.dir"
        )
    return extractor


def _build_empty(channels: int, size: int, classes: Sequence[str]) -> FeatureExtractor:
    """Build it without drawing weights, which would change the state of torch's global random generator."""
    with torch.device("meta"):
        extractor = FeatureExtractor(channels=channels, size=size, classes=classes)
    return extractor.to_empty(device="cpu")


def _check_fit(extractor: FeatureExtractor, path: Path, datasets: Datasets) -> None:
    found = (extractor.channels, extractor.size, extractor.classes)
    expected = (datasets.train.channels, datasets.train.size, predicted_classes(datasets))
    if found != expected:
        raise UserError(
            f"{path}: this feature extractor is for (channels, size, classes) {found}, but the images have {expected}"
        )

"""The metrics of generated images, exact over the images of all ranks. `train` and the command `evaluate` call it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from unisono_models.gan.config import EvaluationConfig
from unisono_models.gan.data.dataset import Datasets
from unisono_models.gan.data.images import ImageDataset
from unisono_models.gan.feature_extractor import FeatureExtractor
from unisono_models.gan.metrics.features import split_tiles
from unisono_models.gan.metrics.frechet_distance import feature_moments, frechet_distance
from unisono_models.gan.metrics.kernel_distance import kernel_distance, kernel_mean
from unisono_models.gan.metrics.label_accuracy import label_metrics
from unisono_models.gan.metrics.precision_recall import neighbour_radii, precision_recall
from unisono_models.training.distributed.launch import Ranks
from unisono_models.training.distributed.object_collectives import broadcast_object, raise_together
from unisono_models.training.distributed.watchdog import Watchdog
from unisono_models.training.errors import UserError
from unisono_models.training.randomness import make_generator

_FEW = 500  # images: with fewer, metrics vary much by chance
_SEED = 0  # not the run's seed: runs with different seeds generate images for the same conditions


class GenerateImages(Protocol):
    """Generates images (n, channels, size, size) in [-1, 1].

    numbers: (n,) int64 on the CPU, the numbers of the images in the evaluation.
    indices: (n,) int64 on the CPU. Image i gets the condition of the image indices[i] of the training set.

    Each rank calls it for its own images, and not all ranks equally often: it must not communicate.
    """

    def __call__(self, numbers: Tensor, indices: Tensor, /) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class ExtractedFeatures:
    """What the feature extractor gives for this rank's images."""

    features: Tensor
    logits: Tensor
    labels: Tensor | None


class Evaluator:
    """Computes the metrics of generated images against datasets.train: the same values on every rank.

    "frechet_distance", and "relative_kernel_distance", the MMD² of KID divided by the mean kernel of two training images: 0 for
    images like the training images, about 1 for images whose features are all 0. Both use the 64 features of this run's own
    feature extractor: they are not FID and KID. "precision", "recall", "density" and "coverage" (metrics.precision_recall): of
    equally many real and generated images. "label_accuracy" and "class_coverage" (metrics.label_accuracy): if the images have
    classes, the first one only if `conditional`.

    The features of the real images are computed once, in __init__: by all ranks together, each for its share.

    Example:
        evaluator = Evaluator(datasets, extractor, ranks, watchdog, config.evaluation)
        evaluator(lambda numbers, indices: generator(noise[numbers], labels[indices]))  ->  {"frechet_distance": 5.6, …}
    """

    def __init__(
        self,
        datasets: Datasets,
        extractor: FeatureExtractor,
        ranks: Ranks,
        watchdog: Watchdog | None,
        config: EvaluationConfig,
        *,
        conditional: bool = True,
    ) -> None:
        self.datasets = datasets
        self.extractor = extractor
        self.ranks = ranks
        self.watchdog = watchdog
        self.config = config
        self.conditional = conditional
        validate_counts(datasets, config)
        shuffled = torch.randperm(len(datasets.train), generator=make_generator(_SEED, "evaluation"))
        self._indices = shuffled.repeat(-(-config.samples // len(shuffled)))[: config.samples]
        self._real = self._extract_real(datasets.train, shuffled)
        self._moments = feature_moments(self._real.features)
        self._kernel_rows = self._first(self._real.features, min(config.samples, len(shuffled)), len(shuffled))
        self._kernel_mean = kernel_mean(self._kernel_rows, tile=config.tile)
        self._radii: dict[int, Tensor] = {}

    @torch.no_grad()
    def __call__(self, generate: GenerateImages) -> dict[str, float]:
        """Return the metrics of config.samples images, with conditions from a fixed choice of training images.

        All ranks call it.
        """
        labels = self.datasets.train.labels

        def make(numbers: Tensor) -> tuple[Tensor, Tensor | None]:
            indices = self._indices[numbers]
            return generate(numbers, indices), None if labels is None else labels[indices]

        return self._compare(self._extract(make, len(self._indices)), len(self._indices))

    @torch.no_grad()
    def real(self) -> dict[str, float]:
        """Return the metrics of the real images of datasets.test as "real/frechet_distance" etc.; {} if they are too few.

        Fewer images than config.samples give larger distances by chance.
        """
        test = self.datasets.test
        if not _enough(len(test), self.config):
            return {}
        metrics = self._compare(self._extract_real(test, torch.arange(len(test))), len(test))
        return {f"real/{name}": value for name, value in metrics.items()}

    def _compare(self, extracted: ExtractedFeatures, count: int) -> dict[str, float]:
        """Return the metrics of `count` images on all ranks; `extracted` is this rank's share."""
        train = self.datasets.train
        tile = self.config.tile
        k = self.config.neighbours
        metrics = {"frechet_distance": frechet_distance(feature_moments(extracted.features), self._moments)}
        distance = kernel_distance(self._kernel_rows, extracted.features, tile=tile, real_mean=self._kernel_mean)
        metrics["relative_kernel_distance"] = distance / self._kernel_mean
        self._beat()
        equal_count = min(count, len(train))
        real = self._first(self._real.features, equal_count, len(train))
        fake = self._first(extracted.features, equal_count, count)
        if equal_count not in self._radii:
            self._radii[equal_count] = neighbour_radii(real, k=k, tile=tile)
        metrics |= precision_recall(real, fake, k=k, tile=tile, real_radii=self._radii[equal_count])
        self._beat()
        if extracted.labels is not None and train.labels is not None:
            real_counts = torch.bincount(train.labels, minlength=len(self.extractor.classes))
            of_labels = label_metrics(extracted.logits, extracted.labels, real_counts=real_counts)
            metrics |= of_labels if self.conditional else {"class_coverage": of_labels["class_coverage"]}
        from_rank_0: dict[str, float] = broadcast_object(metrics)  # different CPUs may round the last bit differently
        return from_rank_0

    def _extract_real(self, images: ImageDataset, indices: Tensor) -> ExtractedFeatures:
        def read(numbers: Tensor) -> tuple[Tensor, Tensor | None]:
            chosen = indices[numbers]
            return images.floats(chosen, device=self.ranks.device), None if images.labels is None else images.labels[chosen]

        return self._extract(read, len(indices))

    @torch.no_grad()
    def _extract(self, make: Callable[[Tensor], tuple[Tensor, Tensor | None]], count: int) -> ExtractedFeatures:
        """Extract the features of this rank's share of `count` images. `make` gives images and labels by their numbers."""
        weight = self.extractor.head.weight
        features = [weight.new_empty(0, weight.shape[1])]
        logits = [weight.new_empty(0, weight.shape[0])]
        labels = [torch.empty(0, dtype=torch.int64)]
        with raise_together("Evaluator"):
            for numbers in split_tiles(self._share(count), self.config.tile):
                images, given = make(numbers)
                expected = (len(numbers), self.extractor.channels, self.extractor.size, self.extractor.size)
                if tuple(images.shape) != expected:
                    raise ValueError(f"Evaluator: generate returned images of {tuple(images.shape)}, expected {expected}")
                features.append(self.extractor.features(images.to(weight)))
                logits.append(self.extractor.head(features[-1]))
                labels += [] if given is None else [given]
                self._beat()
        all_labels = torch.cat(labels).to(weight.device) if self.extractor.classes else None
        return ExtractedFeatures(torch.cat(features), torch.cat(logits), all_labels)

    def _share(self, count: int) -> Tensor:
        return torch.arange(count).tensor_split(self.ranks.world_size)[self.ranks.rank]

    def _first(self, features: Tensor, wanted: int, count: int) -> Tensor:
        """Return the rows of this rank's share of `count` images that are among the first `wanted` of all ranks."""
        return features[: int((self._share(count) < wanted).sum())]

    def _beat(self) -> None:
        if self.watchdog is not None:
            self.watchdog.beat()


def validate_counts(datasets: Datasets, config: EvaluationConfig) -> None:
    """Raise UserError if there are too few images for an Evaluator. It is cheap: call it before the training."""
    if min(config.samples, len(datasets.train)) <= config.neighbours:
        raise UserError(
            f"--evaluation.neighbours {config.neighbours}: must be less than --evaluation.samples {config.samples} and less "
            f"than the {len(datasets.train):,} images to train on"
        )


def describe_small_sets(datasets: Datasets, config: EvaluationConfig) -> list[str]:
    """Return sentences that say which metrics are unsure because there are few images; [] if there are many."""
    train, test = len(datasets.train), len(datasets.test)
    sentences = []
    if train < _FEW:
        sentences.append(
            f"There are only {train:,} images to train on: the networks may learn them by heart. Compare generated images with "
            "their nearest training images in the report."
        )
    if not _enough(test, config):
        sentences.append(f"The test set has only {test:,} images: too few for the metrics of real images, which are left out.")
    elif test < _FEW:
        sentences.append(f"The test set has only {test:,} images: the metrics of real images are rough, and vary by chance.")
    return sentences


def _enough(count: int, config: EvaluationConfig) -> bool:
    """Return whether metrics can be computed from `count` images."""
    return count >= max(2, config.neighbours + 1)

"""How good generated pictures are, by the features of the judge: exact, over the pictures of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from unisono_models.gan.config import EvaluationConfig
from unisono_models.gan.data.dataset import Datasets
from unisono_models.gan.data.images import Images
from unisono_models.gan.feature_extractor import Judge
from unisono_models.gan.metrics.features import tiles_of
from unisono_models.gan.metrics.frechet_distance import frechet_distance, take_moments
from unisono_models.gan.metrics.kernel_distance import kernel_distance, kernel_mean
from unisono_models.gan.metrics.label_accuracy import label_metrics
from unisono_models.gan.metrics.precision_recall import neighbour_metrics, neighbour_radii
from unisono_models.training.distributed.launch import Ranks
from unisono_models.training.distributed.object_collectives import broadcast_object, raise_together
from unisono_models.training.distributed.watchdog import Watchdog
from unisono_models.training.randomness import make_generator

_SEED = 0  # not the run's: runs with different seeds are asked for the same pictures


class Generate(Protocol):
    """Makes pictures (n, channels, size, size) between -1 and 1.

    Row i is the picture number numbers[i] of the evaluation, under the condition of source.train's picture places[i]; both
    are (n,) int64, on the CPU. Each rank calls it for its own pictures, a tile at a time, and not all equally often: it must
    not communicate.
    """

    def __call__(self, numbers: Tensor, places: Tensor, /) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class Seen:
    """What the judge has seen in this rank's pictures."""

    features: Tensor
    logits: Tensor
    labels: Tensor | None


class Evaluator:
    """Figures of generated pictures beside the real ones of source.train: the same on every rank.

    "frechet_distance": the Fréchet distance, and "kernel_distance": MMD² by the polynomial kernel of KID (not times 1000),
    both on the 64 features of this run's own judge: they are not FID and KID, and compare with no figures on other features.
    "precision" and "recall", "density" and "coverage" (see metrics.neighbours): of equally many real and generated pictures,
    as many as there are of the fewer. "label_accuracy" and "class_coverage" (see metrics.labels): where pictures have classes;
    the first only if `conditional`, as nothing is asked of pictures otherwise.

    The real pictures' features are computed once, when it is made: on all ranks together, each its share.

    Example:
        evaluator = Evaluator(source, judge, ranks, heartbeat, config.evaluation)
        evaluator(lambda numbers, places: generator(noise[numbers], labels[places]))  ->  {"frechet_distance": 5.6, …}
    """

    def __init__(
        self,
        source: Datasets,
        judge: Judge,
        ranks: Ranks,
        heartbeat: Watchdog | None,
        config: EvaluationConfig,
        *,
        conditional: bool = True,
    ) -> None:
        self.source, self.judge, self.ranks, self.heartbeat, self.config = source, judge, ranks, heartbeat, config
        self.conditional = conditional
        validate_counts(source, config)
        shuffled = torch.randperm(len(source.train), generator=make_generator(_SEED, "evaluation"))
        self._places = shuffled.repeat(-(-config.samples // len(shuffled)))[: config.samples]
        self._real = self._see(source.train, shuffled)
        self._moments = take_moments(self._real.features)
        self._kernel_rows = self._first(self._real.features, min(config.samples, len(shuffled)), len(shuffled))
        self._kernel_mean = kernel_mean(self._kernel_rows, tile=config.tile)
        self._radii: dict[int, Tensor] = {}

    @torch.no_grad()
    def __call__(self, generate: Generate) -> dict[str, float]:
        """The figures of config.samples pictures, under the conditions of a fixed choice from source.train. All ranks call."""
        images = self.source.train

        def make(numbers: Tensor) -> tuple[Tensor, Tensor | None]:
            places = self._places[numbers]
            return generate(numbers, places), None if images.labels is None else images.labels[places]

        return self._compare(self._look(make, len(self._places)), len(self._places))

    @torch.no_grad()
    def real(self) -> dict[str, float]:
        """What the real pictures of source.test score, by "real/frechet_distance" and so on; nothing if they are fewer than 2.

        A yardstick, with a grain of salt: if they are fewer than config.samples, chance alone makes their distances larger.
        """
        test = self.source.test
        if len(test) < max(2, self.config.neighbours + 1):
            return {}
        found = self._compare(self._see(test, torch.arange(len(test))), len(test))
        return {f"real/{name}": value for name, value in found.items()}

    def _compare(self, seen: Seen, count: int) -> dict[str, float]:
        """The figures of `count` pictures on all ranks, of which this one has seen its share."""
        tile, k = self.config.tile, self.config.neighbours
        found = {"frechet_distance": frechet_distance(take_moments(seen.features), self._moments)}
        found["kernel_distance"] = kernel_distance(self._kernel_rows, seen.features, tile=tile, real_mean=self._kernel_mean)
        self._beat()
        like = min(count, len(self.source.train))
        real, fake = self._first(self._real.features, like, len(self.source.train)), self._first(seen.features, like, count)
        if like not in self._radii:
            self._radii[like] = neighbour_radii(real, k=k, tile=tile)
        found |= neighbour_metrics(real, fake, k=k, tile=tile, real_radii=self._radii[like])
        self._beat()
        if seen.labels is not None and self.source.train.labels is not None:
            real_counts = torch.bincount(self.source.train.labels, minlength=len(self.judge.classes))
            of_labels = label_metrics(seen.logits, seen.labels, real_counts=real_counts)
            found |= of_labels if self.conditional else {"class_coverage": of_labels["class_coverage"]}
        heard: dict[str, float] = broadcast_object(found)  # hosts of another make may round the last bit differently
        return heard

    def _see(self, images: Images, places: Tensor) -> Seen:
        """Of real pictures."""

        def read(numbers: Tensor) -> tuple[Tensor, Tensor | None]:
            mine = places[numbers]
            return images.floats(mine, device=self.ranks.device), None if images.labels is None else images.labels[mine]

        return self._look(read, len(places))

    @torch.no_grad()
    def _look(self, make: Callable[[Tensor], tuple[Tensor, Tensor | None]], count: int) -> Seen:
        """Have the judge see this rank's share of `count` pictures."""
        weight, labelled = self.judge.head.weight, bool(self.judge.classes)
        features = [weight.new_empty(0, weight.shape[1])]
        logits, labels = [weight.new_empty(0, weight.shape[0])], [torch.empty(0, dtype=torch.int64)]
        with raise_together("Evaluator"):
            for numbers in tiles_of(self._share(count), self.config.tile):
                pictures, asked = make(numbers)
                expected = (len(numbers), self.judge.channels, self.judge.size, self.judge.size)
                if tuple(pictures.shape) != expected:
                    raise ValueError(f"Evaluator: generate gave pictures of {tuple(pictures.shape)}, expected {expected}")
                features.append(self.judge.features(pictures.to(weight)))
                logits.append(self.judge.head(features[-1]))
                labels += [] if asked is None else [asked]
                self._beat()
        asked = torch.cat(labels).to(weight.device) if labelled else None
        return Seen(torch.cat(features), torch.cat(logits), asked)

    def _share(self, count: int) -> Tensor:
        return torch.arange(count).tensor_split(self.ranks.size)[self.ranks.rank]

    def _first(self, features: Tensor, wanted: int, count: int) -> Tensor:
        """Those of this rank's share of `count` pictures that are among the first `wanted`."""
        return features[: int((self._share(count) < wanted).sum())]

    def _beat(self) -> None:
        if self.heartbeat is not None:
            self.heartbeat.beat()


def validate_counts(source: Datasets, config: EvaluationConfig) -> None:
    """Raises: ValueError if there are too few pictures for an Evaluator. Cheap: to be called before anything is trained."""
    if min(config.samples, len(source.train)) <= config.neighbours:
        raise ValueError(
            f"evaluation.neighbours={config.neighbours}: must be fewer than evaluation.samples={config.samples} and than the "
            f"{len(source.train)} pictures to train on"
        )

"""What a dataset is to clip: data to train on, tests, and a gallery to search. Datasets are registered by name.

A built-in dataset is registered exactly like your own:

    @DATASETS.register("mine")
    class MyDataset(ClipDataset):
        def build_datasets(self, *, size, seed, ranks):
            return Datasets(train=..., captions=..., captions_complete=True, tests={"held_out": RetrievalTest(...)})

    main(["emoji", "--data.source", "mine"])  # unisono_models.clip.train.main
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from PIL import Image

from unisono_models.clip.config import DataConfig
from unisono_models.clip.data.pairs import CaptionedPairs, Pairs
from unisono_models.datasets.registry import Registry
from unisono_models.training.distributed.launch import Ranks

_HASHED = 1000  # pairs of each dataset in a fingerprint
_FEW = 100  # pairs in a test, fewer than which make its metrics coarse


@dataclass(frozen=True)
class RetrievalTest:
    """Pairs that were not trained on, and the tasks that they allow."""

    pairs: CaptionedPairs
    """For text to image and image to text."""
    queries: Pairs | None = None
    """For image to image: other images of the same concepts, in the same order as `pairs`."""
    classes: tuple[str, ...] = ()
    """For zero-shot classification: the names of the classes."""
    class_of: Mapping[int, int] = field(default_factory=dict)
    """From each concept to its class, an index into `classes`."""
    description: str = ""
    """What the pairs are and why they are a test, for the report."""


@dataclass(frozen=True)
class Datasets:
    """The datasets of a run."""

    train: CaptionedPairs
    captions: Sequence[str]
    """Captions to train a tokenizer on: those of `train`, or a sample of them."""
    captions_complete: bool
    """Whether `captions` has every caption of `train`, so that their features can be cached."""
    tests: dict[str, RetrievalTest]
    weights: Sequence[float] | None = None
    """How often each pair of `train` comes in an epoch. None: each comes once."""
    notes: tuple[str, ...] = ()
    """Licences and damage, for the report."""

    def fingerprint(self) -> str:
        """Hash the number of pairs, and samples and captions of a thousand of them: a run can only go on with the same data.

        Only captions are read. So a caption that changes among many pairs may not be noticed, nor an image.
        """
        digest = hashlib.sha256()
        for pairs in (self.train, *(test.pairs for test in self.tests.values())):
            chosen = [len(pairs) * i // min(len(pairs), _HASHED) for i in range(min(len(pairs), _HASHED))]
            content = [len(pairs), pairs.sample_ids(chosen).tolist(), pairs.captions(chosen)]
            digest.update(json.dumps(content).encode())
        return digest.hexdigest()


def describe_sizes(config: DataConfig, datasets: Datasets) -> list[str]:
    """List what a user should know about the numbers of pairs: a batch that is too large, and tests that are small."""
    found = []
    if config.batch > len(datasets.train):
        there = f"the {len(datasets.train):,} pairs to train on"
        found.append(f"--data.batch {config.batch:,} is more than {there}: each step takes all of them")
    for name, test in datasets.tests.items():
        if (count := len(test.pairs)) < _FEW:
            found.append(
                f"the test {name} has only {count} pairs: each of them counts {1 / count:.2f} in recall. "
                "--data.held-out holds out more"
            )
    return found


@dataclass(frozen=True)
class GalleryItem:
    """One image of a gallery."""

    label: str
    """Its name or caption."""
    group: int
    """Images with the same number show the same thing. A search finds them together."""
    emoji: str = ""
    """The character that it shows, if it shows one."""
    vendor: str = ""
    """Who drew it, if there are several."""
    toned: bool = False
    """Whether it is a variant by skin tone."""


@dataclass(frozen=True)
class GalleryImages:
    """The images that the search commands look through."""

    pairs: CaptionedPairs
    key: str
    """Identifies the images, so that cached features are not taken for those of other data."""
    items: Callable[[Sequence[int]], Sequence[GalleryItem]]
    """From indices of `pairs` to what is shown of each."""
    draw: Callable[[int, int], Image.Image] | None = None
    """Draws the image at an index in a size. None: it is read from `pairs`."""
    credits: tuple[str, ...] = ()
    """Whose the images are."""
    examples: tuple[str, ...] = ()
    """Words to search for, which the search page offers."""


class ClipDataset(ABC):
    """A dataset that `--data.source` names. `config`: the run's options of the data."""

    example_queries: tuple[str, ...] = ()
    """Searches that the report of a run shows. Without any the report has no search."""

    def __init__(self, config: DataConfig) -> None:
        self.config = config

    @abstractmethod
    def build_datasets(self, *, size: int, seed: int, ranks: Ranks) -> Datasets:
        """Open the data, with images of `size` pixels. All ranks call it together."""

    def choose_example_queries(self) -> tuple[str, ...]:
        """Choose the searches that the report shows. All ranks call it together, after `build_datasets`."""
        return self.example_queries

    def gallery(self, *, size: int, limit: int = 20_000) -> GalleryImages:
        """Open the images to search, at most about `limit` of them. `size`: the pixels that the model sees.

        Raises: ValueError or OSError if they cannot be opened here.
        """
        raise ValueError(f"the dataset {self.config.source!r} has no gallery to search")


DATASETS: Registry[Callable[[DataConfig], ClipDataset]] = Registry("clip")


def open_dataset(config: DataConfig) -> ClipDataset:
    """Make the dataset that is registered as `config.source`, or one of the files at that path."""
    # Here, because these modules need the classes above.
    import unisono_models.clip.data.emoji  # noqa: F401  # registers itself
    from unisono_models.clip.data.files import FileDataset

    if config.source in DATASETS:
        return DATASETS[config.source](config)
    return FileDataset(config)

"""The interface of a dataset of image-caption pairs, and what the readers of files share."""

import hashlib
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unisono_models.clip.data.decode import decode_image
from unisono_models.datasets.images import BrokenImageError
from unisono_models.datasets.skip_report import SkippedSample


@dataclass(frozen=True)
class PairBatch:
    """Some pairs, in the order of the indices that were read. Broken ones are left out, so there may be fewer, or none."""

    images: Tensor
    """uint8, (n, 3, size, size), RGB. (n, 3, 0, 0) from PairsWithoutImages."""
    captions: list[str]
    concepts: Tensor
    """int64, (n,): pairs with the same number show the same thing, and are no negatives of each other."""
    index: Tensor
    """int64, (n,): the sample in the whole dataset. Its random numbers and its cached features depend on this."""
    skipped: tuple[SkippedSample, ...] = ()
    """The pairs that were left out. They are part of the batch, so that whichever process has read it, they are counted."""

    def __len__(self) -> int:
        return len(self.captions)


class Pairs(Protocol):
    """A dataset of pairs with random access, so that every rank can read its share of a global order."""

    def __len__(self) -> int: ...

    def read(self, indices: Sequence[int], size: int) -> PairBatch:
        """Read the pairs at `indices`, with images of `size` pixels square."""
        ...


class CaptionedPairs(Pairs, Protocol):
    """Pairs whose captions and concepts can be read without their images, which splits and tokenizers need."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What was found damaged or odd at opening, one line each."""
        ...

    def captions(self, indices: Sequence[int]) -> list[str]:
        """Read one caption for each of `indices`; empty where `read` would skip the pair for lack of one."""
        ...

    def concepts(self, indices: Sequence[int]) -> NDArray[np.int64]:
        """Read one concept for each of `indices`."""
        ...

    def sample_ids(self, indices: Sequence[int]) -> NDArray[np.int64]:
        """Return the `index` that `read` gives to each of `indices`."""
        ...


@dataclass(frozen=True, eq=False)
class SubsetPairs:
    """Some pairs of a dataset. What is read keeps the `index` that it has in the whole dataset."""

    dataset: CaptionedPairs
    indices: NDArray[np.int64]

    @property
    def notes(self) -> tuple[str, ...]:
        return self.dataset.notes

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, indices: Sequence[int], size: int) -> PairBatch:
        return self.dataset.read(self.dataset_indices(indices), size)

    def captions(self, indices: Sequence[int]) -> list[str]:
        return self.dataset.captions(self.dataset_indices(indices))

    def concepts(self, indices: Sequence[int]) -> NDArray[np.int64]:
        return self.dataset.concepts(self.dataset_indices(indices))

    def sample_ids(self, indices: Sequence[int]) -> NDArray[np.int64]:
        return self.dataset.sample_ids(self.dataset_indices(indices))

    def dataset_indices(self, indices: Sequence[int]) -> list[int]:
        """Translate `indices` of this subset to indices of the whole dataset."""
        return [int(index) for index in self.indices[check_indices(indices, len(self))]]


@dataclass(frozen=True)
class PairsWithoutImages:
    """The captions, concepts and sample ids of pairs whose image features are cached. No image is read or decoded.

    `broken`: the samples that could not be read when their features were computed, by `index`. They are skipped again.
    """

    pairs: CaptionedPairs
    broken: Mapping[int, SkippedSample]

    @property
    def notes(self) -> tuple[str, ...]:
        return self.pairs.notes

    def __len__(self) -> int:
        return len(self.pairs)

    def read(self, indices: Sequence[int], size: int) -> PairBatch:
        """Read what `pairs.read` would give, except for the images: their shape is (n, 3, 0, 0)."""
        samples = [int(sample) for sample in self.pairs.sample_ids(indices)]
        kept = [int(i) for i, sample in zip(indices, samples, strict=True) if sample not in self.broken]
        return PairBatch(
            images=torch.empty((len(kept), 3, 0, 0), dtype=torch.uint8),
            captions=self.pairs.captions(kept),
            concepts=torch.from_numpy(self.pairs.concepts(kept)),
            index=torch.tensor([sample for sample in samples if sample not in self.broken], dtype=torch.int64),
            skipped=tuple(self.broken[sample] for sample in samples if sample in self.broken),
        )

    def captions(self, indices: Sequence[int]) -> list[str]:
        return self.pairs.captions(indices)

    def concepts(self, indices: Sequence[int]) -> NDArray[np.int64]:
        return self.pairs.concepts(indices)

    def sample_ids(self, indices: Sequence[int]) -> NDArray[np.int64]:
        return self.pairs.sample_ids(indices)


@dataclass(frozen=True)
class EncodedPair:
    """A pair as a reader of files finds it: the image is still encoded."""

    index: int
    image: bytes
    caption: str
    concept: int


def make_batch(rows: Iterable[EncodedPair | SkippedSample], size: int, *, name_of: Callable[[int], str]) -> PairBatch:
    """Decode the rows that have a caption, in their order. The others, and those that do not decode, go to `skipped`.

    name_of: from the index of a row to the name that reports print.
    """
    images, captions, concepts, index, skipped = [], [], [], [], []
    for row in rows:
        if isinstance(row, SkippedSample):
            skipped.append(row)
        elif not row.caption:
            skipped.append(make_skip(row.index, name_of(row.index), "empty caption"))
        else:
            try:
                images.append(decode_image(row.image, size))
            except BrokenImageError as error:
                skipped.append(make_skip(row.index, name_of(row.index), "broken image", error))
                continue
            captions.append(row.caption)
            concepts.append(row.concept)
            index.append(row.index)
    return PairBatch(
        images=torch.stack(images) if images else torch.empty((0, 3, size, size), dtype=torch.uint8),
        captions=captions,
        concepts=torch.tensor(concepts, dtype=torch.int64),
        index=torch.tensor(index, dtype=torch.int64),
        skipped=tuple(skipped),
    )


def make_skip(index: int, name: str, reason: str, error: object = "") -> SkippedSample:
    """Make a SkippedSample whose texts are safe to print, whatever the data contains."""
    return SkippedSample(int(index), printable(name), reason, printable(error))


def printable(text: object, length: int = 160) -> str:
    """Put `text` on one line of at most `length` characters. Control characters and invalid Unicode become escapes."""
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(text)[: length + 1])
    return shown if len(shown) <= length else shown[: length - 1] + "…"


def clean_text(value: object) -> str:
    """Convert what a file has for a caption to text. Invalid UTF-8 is replaced, NUL and outer white space are removed.

    Example:
        >>> clean_text(b" a caf\\xe9\\n")
        'a caf�'
        >>> clean_text(None)
        ''
    """
    if value is None:
        return ""
    if isinstance(value, (bytes, bytearray, memoryview)):
        text = bytes(value).decode("utf-8-sig", "replace")
    else:  # JSON may escape halves of surrogate pairs, which no tokenizer takes
        text = str(value).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text.replace("\0", " ").strip()


def concept_of_caption(caption: str) -> int:
    """Hash a caption to 63 bits, the same on every machine. Case and the amount of white space do not matter.

    Example:
        >>> concept_of_caption("A red  Heart") == concept_of_caption("a red heart") != concept_of_caption("a blue heart")
        True
    """
    text = " ".join(unicodedata.normalize("NFC", caption).casefold().split())
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def parse_concept(value: Any, caption: str) -> int:
    """Convert what a file has for a concept: whole numbers stay, other values are hashed, without one the caption is."""
    text = clean_text(value)
    if not text:
        return concept_of_caption(caption)
    if text.isascii() and text.isdecimal() and len(text) < 20 and int(text) < 2**63:
        return int(text)
    return concept_of_caption(text)


def check_indices(indices: Sequence[int], count: int) -> NDArray[np.int64]:
    """Return `indices` as an array. Raises: IndexError unless all of them are within a dataset of `count` pairs."""
    found = np.asarray(indices, dtype=np.int64).reshape(-1)
    if len(found) and not (found.min() >= 0 and found.max() < count):
        raise IndexError(f"read: indices from {found.min()} to {found.max()}: expected them within 0 and {count - 1}")
    return found

"""What the learner asks of a data set: pictures with captions, read by their place in it."""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unisono_models.clip.data.images import BrokenImageError, decode_image
from unisono_models.datasets.skip_report import SkippedSample

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True)
class PairBatch:
    """Some pairs, in the order asked for. Broken ones are left out, so there may be fewer than asked for, or none."""

    images: Tensor
    """uint8, (n, 3, size, size), RGB."""
    captions: list[str]
    concepts: Tensor
    """int64, (n,): pairs with the same number show the same thing, and are no negatives of each other."""
    index: Tensor
    """int64, (n,): the place in the whole data set, which randomness goes by."""
    skipped: tuple[SkippedSample, ...] = ()
    """Those left out. They travel with the batch, so that they are counted whichever process has read it."""

    def __len__(self) -> int:
        return len(self.captions)


class Pairs(Protocol):
    """A data set of pairs with random access, so that every rank can take its share of a global order."""

    def __len__(self) -> int: ...

    def read(self, indices: Sequence[int], size: int) -> PairBatch:
        """The pairs at `indices`, pictures of `size` pixels square."""
        ...


class CaptionedPairs(Pairs, Protocol):
    """Pairs whose captions and concepts can be had without their pictures: what splits and tokenizers need."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What was found damaged or odd at opening, one line each."""
        ...

    def captions(self, indices: Sequence[int]) -> list[str]:
        """The captions at `indices`, one for each; empty where `read` would skip the row for want of one."""
        ...

    def concepts(self, indices: Sequence[int]) -> NDArray[np.int64]:
        """The concepts at `indices`, one for each."""
        ...


@dataclass(frozen=True)
class Record:
    """A row with its picture still encoded."""

    index: int
    image: bytes
    caption: str
    concept: int


def make_batch(rows: Iterable[Record | SkippedSample], size: int, *, name_of: Callable[[int], str]) -> PairBatch:
    """The rows that have a caption and a picture that decodes, in their order; the others in `skipped`, by name."""
    images, captions, concepts, index, skipped = [], [], [], [], []
    for row in rows:
        if isinstance(row, SkippedSample):
            skipped.append(row)
        elif not row.caption:
            skipped.append(skip(row.index, name_of(row.index), "empty caption"))
        else:
            try:
                images.append(decode_image(row.image, size))
            except BrokenImageError as error:
                skipped.append(skip(row.index, name_of(row.index), "broken image", error))
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


def skip(index: int, name: str, reason: str, error: object = "") -> SkippedSample:
    """A Skip whose texts are fit for a terminal and a log, whatever the data put into them."""
    return SkippedSample(int(index), printable(name), reason, printable(error))


def printable(text: object, length: int = 160) -> str:
    """`text` on one line, cut to `length`: control characters and what is no Unicode become escapes."""
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(text)[: length + 1])
    return shown if len(shown) <= length else shown[: length - 1] + "…"


def clean_text(value: object) -> str:
    """A caption from what a file has for one: invalid UTF-8 replaced, NUL and the space around it removed. None is empty.

    Example:
        >>> clean_text(b" a caf\\xe9\\n")
        'a caf�'
    """
    if value is None:
        return ""
    if isinstance(value, (bytes, bytearray, memoryview)):
        text = bytes(value).decode("utf-8-sig", "replace")
    else:  # JSON may escape halves of surrogate pairs, which no tokenizer takes
        text = str(value).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text.replace("\0", " ").strip()


def concept_of(caption: str) -> int:
    """63 bits that stand for the caption, the same on every machine. Case and the amount of white space do not count.

    Example:
        >>> concept_of("A red  Heart") == concept_of("a red heart") != concept_of("a blue heart")
        True
    """
    text = " ".join(unicodedata.normalize("NFC", caption).casefold().split())
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def concept_from(value: Any, caption: str) -> int:
    """The concept that a column names: whole numbers stay as they are, other values are hashed, none is that of the caption."""
    text = clean_text(value)
    if not text:
        return concept_of(caption)
    if text.isascii() and text.isdecimal() and len(text) < 20 and int(text) < 2**63:
        return int(text)
    return concept_of(text)


def check_indices(indices: Sequence[int], rows: int) -> NDArray[np.int64]:
    """`indices` as an array, all of them within a data set of `rows`."""
    found = np.asarray(indices, dtype=np.int64).reshape(-1)
    if len(found) and not (found.min() >= 0 and found.max() < rows):
        raise IndexError(f"read: indices from {found.min()} to {found.max()}: expected them within 0 and {rows - 1}")
    return found

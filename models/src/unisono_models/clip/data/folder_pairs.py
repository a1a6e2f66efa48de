"""Pairs in a folder of images: the caption of cat/1.jpg is the text of cat/1.txt, or else the name of its folder, "cat"."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from unisono_models.clip.data.pairs import (
    EncodedPair,
    PairBatch,
    check_indices,
    clean_text,
    concept_of_caption,
    make_batch,
    make_skip,
)
from unisono_models.datasets.images import IMAGE_SUFFIXES, read_image_bytes
from unisono_models.datasets.skip_report import SkippedSample
from unisono_models.training.errors import UserError


def list_images(folder: Path) -> list[Path]:
    """List the image files in `folder` and below it, sorted by name. Hidden ones are left out."""
    found = (path for path in folder.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES)
    return sorted(path for path in found if not any(part.startswith(".") for part in path.relative_to(folder).parts))


class FolderPairs:
    """The pairs (see CaptionedPairs) of image files with captions. `paths`: the images; `folder`: what contains them all.

    The caption of an image is the text of the .txt file of the same name beside it. Without one it is the name of the folder
    that the image is in, with spaces for _ and -.

    Raises: UserError for images that have neither.
    """

    notes: tuple[str, ...] = ()

    def __init__(self, paths: Sequence[Path], *, folder: Path) -> None:
        self._paths, self._folder = list(paths), folder
        bare = [path for path in self._paths if path.parent == folder and not path.with_suffix(".txt").is_file()]
        if bare:
            raise UserError(
                f"--data.source {folder}: {len(bare)} of {len(self._paths)} images have no caption, such as {bare[0].name}. "
                f"Write it into {bare[0].stem}.txt beside the image, or put images into folders named by what they show, "
                "or give a CSV file with the columns image and caption"
            )

    def __len__(self) -> int:
        return len(self._paths)

    def read(self, indices: Sequence[int], size: int) -> PairBatch:
        return make_batch(self._encoded_pairs(check_indices(indices, len(self))), size, name_of=self._name)

    def captions(self, indices: Sequence[int]) -> list[str]:
        return [self._caption(index) for index in check_indices(indices, len(self)).tolist()]

    def concepts(self, indices: Sequence[int]) -> NDArray[np.int64]:
        return np.array([concept_of_caption(caption) for caption in self.captions(indices)], dtype=np.int64)

    def sample_ids(self, indices: Sequence[int]) -> NDArray[np.int64]:
        return check_indices(indices, len(self))

    def _encoded_pairs(self, indices: NDArray[np.int64]) -> Iterator[EncodedPair | SkippedSample]:
        for index in indices.tolist():
            caption = self._caption(index)
            try:
                image = read_image_bytes(str(self._paths[index]))
            except OSError as error:
                yield make_skip(index, self._name(index), "unreadable file", error)
                continue
            yield EncodedPair(index, image, caption, concept_of_caption(caption))

    def _caption(self, index: int) -> str:
        path = self._paths[index]
        try:
            return clean_text(path.with_suffix(".txt").read_bytes())
        except OSError:
            return " ".join(path.parent.name.replace("_", " ").replace("-", " ").split())

    def _name(self, index: int) -> str:
        return str(self._paths[index].relative_to(self._folder))

"""Loads a rank's pairs of each step, with worker processes, and makes the batches that the training module takes."""

import multiprocessing
import os
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from unisono_models.clip.config import AugmentConfig
from unisono_models.clip.data.augment import augment
from unisono_models.clip.data.pairs import PairBatch, Pairs, SubsetPairs
from unisono_models.training.randomness import derive_seed
from unisono_models.training.to_device import to_device


def load_steps(
    pairs: Pairs,
    indices_of: Callable[[int], Sequence[int]],
    size: int,
    *,
    first: int,
    last: int,
    workers: int = 0,
    ahead: int = 2,
) -> Generator[PairBatch, None, None]:
    """Load this rank's pairs of each step from `first` up to `last`, with images of `size` pixels square.

    indices_of: from a step to the indices that this rank reads, which may be none. It is called in this process, in the order
        of the steps, up to workers x `ahead` steps early.
    workers: processes that read. 0: this process reads when a batch is asked for. The batches are the same.

    Workers are started by a fork server, not by a fork of this process: a fork would hold the connections to the other ranks
    (if this rank were killed, its peers would not notice before their timeout), and locks of threads that it does not have.
    So `pairs` is pickled to the workers, and a script that calls this needs `if __name__ == "__main__"`. Of SubsetPairs only
    the whole dataset is pickled: its `indices`, eight bytes a pair, stay here. Workers end with the iterator, and at once if
    this process is killed.

    Raises: RuntimeError that names the step if a worker dies; what `pairs.read` raises, with its traceback.

    Example:
        for batch in load_steps(pairs, lambda step: sampler.share(step, rank, world_size), 224, first=step, last=steps):
            ...
    """
    if workers < 0 or ahead < 1 or first < 0:
        raise ValueError(f"load_steps: first={first}, workers={workers}, ahead={ahead}: must be at least 0, 0 and 1")
    steps = range(first, last)
    indices: Iterator[list[int]] = (np.asarray(indices_of(step), dtype=np.int64).tolist() for step in steps)
    while isinstance(pairs, SubsetPairs):
        indices = map(pairs.dataset_indices, indices)
        pairs = pairs.dataset
    if workers == 0 or not steps:
        return (pairs.read(chosen, size) for chosen in indices)
    return _read_in_workers(pairs, indices, size, steps, min(workers, len(steps)), ahead)


class _ReadDataset(Dataset[PairBatch]):
    def __init__(self, pairs: Pairs, size: int) -> None:
        self.pairs, self.size = pairs, size

    def __getitem__(self, indices: list[int]) -> PairBatch:
        return self.pairs.read(indices, self.size)


def _read_in_workers(
    pairs: Pairs, indices: Iterator[list[int]], size: int, steps: range, workers: int, ahead: int
) -> Generator[PairBatch, None, None]:
    context = multiprocessing.get_context("forkserver")
    # The fork server imports the reader once for all workers. Not all that a rank imports: the towers take seconds.
    context.set_forkserver_preload([name for name in (__name__, type(pairs).__module__) if name != "__main__"])
    loader: DataLoader[PairBatch] = DataLoader(
        _ReadDataset(pairs, size),
        batch_size=None,
        sampler=indices,  # any iterable of what __getitem__ takes
        num_workers=workers,
        collate_fn=_identity,
        prefetch_factor=ahead,
        worker_init_fn=_end_with_the_rank,
        multiprocessing_context=context,
        generator=torch.Generator(),  # it draws a seed for its workers: not from the run's generator
    )
    batches = iter(loader)
    for step in steps:
        try:
            batch = next(batches)
        except RuntimeError as error:
            if "exited unexpectedly" not in str(error):
                error.add_note(f"load_steps: while reading step {step}")
                raise
            raise RuntimeError(
                f"load_steps: a worker died before step {step} was read: {error}. It was killed (out of memory?) or a decoder "
                "crashed. With workers=0 the same happens in the rank itself, where it can be seen"
            ) from error
        except Exception as error:
            error.add_note(f"load_steps: while reading step {step}")
            raise
        yield batch


def _end_with_the_rank(_: int) -> None:
    """End this worker when its rank dies. torch watches the worker's parent, but that is the fork server here."""

    def wait_and_exit() -> None:
        rank = multiprocessing.parent_process()
        if rank is not None:
            rank.join()
            os._exit(1)

    threading.Thread(target=wait_and_exit, daemon=True).start()


def _identity(batch: Any) -> Any:
    return batch


@dataclass(frozen=True)
class BatchMaker:
    """Makes the batch of a step for the training module: augmented images, and captions as the text tower takes them.

    The result for a sample depends on (seed, epoch, sample) alone.
    """

    prepare_text: Callable[[Sequence[str]], Tensor]
    """From captions to tokens, or to cached features."""
    image_features: Callable[[Tensor, int], Tensor] | None
    """From samples and the epoch to cached image features. None: images are augmented and encoded in each step."""
    augmentation: AugmentConfig
    seed: int
    device: torch.device
    dtype: torch.dtype
    second_view: bool
    """Also make a second view of each image."""

    def make(self, pairs: PairBatch, *, step: int, epoch: int) -> dict[str, Any]:
        images = to_device(pairs.images, self.device)  # without elements if the features are cached
        index = to_device(pairs.index, self.device)
        batch = {
            "images": self._view(images, index, epoch, number=0),
            "text": to_device(self.prepare_text(pairs.captions), self.device),
            "concepts": to_device(pairs.concepts, self.device),
            "index": index,
            "step": step,
            "seed": self.seed,
        }
        if self.second_view:
            batch["views"] = self._view(images, index, epoch, number=1)
        return batch

    def _view(self, images: Tensor, index: Tensor, epoch: int, *, number: int) -> Tensor:
        if self.image_features is not None:
            return self.image_features(index, epoch + number)
        seed = derive_seed(self.seed, "view", number)
        return augment(images, seed=seed, epoch=epoch, index=index, config=self.augmentation).to(self.dtype)

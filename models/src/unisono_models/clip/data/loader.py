"""Batches read ahead by other processes, in order: which ones is a function of the step alone."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from unisono_models.clip.data.augment import AugmentConfig, augment
from unisono_models.clip.data.files import SomePairs
from unisono_models.clip.data.pairs import PairBatch, Pairs
from unisono_models.clip.model.feature_cache import PictureFeatures
from unisono_models.training.randomness import derive_seed


def load_steps(
    pairs: Pairs,
    indices_of: Callable[[int], Sequence[int]],
    size: int,
    *,
    first: int,
    last: int,
    workers: int = 0,
    ahead: int = 2,
) -> Iterator[PairBatch]:
    """This rank's batch of each step from `first` up to `last`, pictures of `size` pixels square.

    indices_of: the rows that this rank reads at a step; none is fine. It is called here, in the order of the steps, up to
    workers x `ahead` of them early.
    workers: processes that read. 0: this one reads, when a batch is asked for. The batches are the same.

    Workers are started by a fork server, not by a fork of this process: a copy of it would hold the connections to the other
    ranks (if this rank is then killed, its peers see no end of them and wait for their timeout), and the locks of threads
    that it does not have. So `pairs` is pickled to them, and a script that calls this needs its `if __name__ == "__main__"`.
    Of SomePairs the whole is: its `rows`, eight bytes for every pair that there is, stay here. Workers end with the iterator,
    and at once if this process is killed.

    Raises: RuntimeError that names the step when a worker dies; what `pairs.read` raises, with its traceback.

    Example:
        for batch in load_steps(pairs, lambda step: order.share(step, rank, size), 224, first=step, last=steps, workers=4):
            ...
    """
    if workers < 0 or ahead < 1 or first < 0:
        raise ValueError(f"load_steps: first={first}, workers={workers}, ahead={ahead}: expected at least 0, 0 and 1")
    steps = range(first, last)
    chosen: Iterator[list[int]] = (np.asarray(indices_of(step), dtype=np.int64).tolist() for step in steps)
    while isinstance(pairs, SomePairs):
        chosen, pairs = map(pairs.places, chosen), pairs.whole
    if workers == 0 or not steps:
        return (pairs.read(indices, size) for indices in chosen)
    return _read_ahead(pairs, chosen, size, steps, min(workers, len(steps)), ahead)


class _Reads(Dataset[PairBatch]):
    def __init__(self, pairs: Pairs, size: int) -> None:
        self.pairs, self.size = pairs, size

    def __getitem__(self, indices: list[int]) -> PairBatch:
        return self.pairs.read(indices, self.size)


def _read_ahead(
    pairs: Pairs, chosen: Iterator[list[int]], size: int, steps: range, workers: int, ahead: int
) -> Iterator[PairBatch]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_readers(pairs))
    loader: DataLoader[PairBatch] = DataLoader(
        _Reads(pairs, size),
        batch_size=None,
        sampler=chosen,  # any iterable of what __getitem__ takes
        num_workers=workers,
        collate_fn=_as_it_is,
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
                "crashed; with workers=0 the same happens in the rank itself, where it can be seen"
            ) from error
        except Exception as error:
            error.add_note(f"load_steps: while reading step {step}")
            raise
        yield batch


def _end_with_the_rank(_: int) -> None:
    """torch's workers look for the death of their parent, which here is the fork server, and that lives as long as they do."""
    threading.Thread(target=_wait_and_end, daemon=True).start()


def _wait_and_end() -> None:
    rank = multiprocessing.parent_process()
    if rank is not None:
        rank.join()
        os._exit(1)


def _as_it_is(batch: Any) -> Any:
    return batch


def _readers(pairs: Pairs) -> list[str]:
    """Modules that the fork server imports once, so that its workers need not: what reads, and with it all that it imports.

    Not all that a rank has imported: towers take seconds, and the first batch would wait for them.
    """
    return [name for name in (__name__, type(pairs).__module__) if name != "__main__"]


@dataclass(frozen=True)
class Batches:
    """Makes the batch of a step from what was read: augmented pictures, captions as the text tower takes them.

    `pictures`: features of pictures, if they are known beforehand. `views`: also make second views of the pictures. What a
    sample becomes depends on (seed, epoch, sample) alone.
    """

    read_text: Callable[[Sequence[str]], Tensor]
    pictures: PictureFeatures | None
    augmentation: AugmentConfig
    seed: int
    device: torch.device
    dtype: torch.dtype
    views: bool

    def make(self, pairs: PairBatch, *, step: int, epoch: int) -> dict[str, Any]:
        images, index = pairs.images.to(self.device, non_blocking=True), pairs.index.to(self.device, non_blocking=True)
        batch = {
            "images": self._view(images, index, epoch, first=True),
            "text": self.read_text(pairs.captions).to(self.device, non_blocking=True),
            "concepts": pairs.concepts.to(self.device, non_blocking=True),
            "index": index,
            "step": step,
            "seed": self.seed,
        }
        if self.views:
            batch["views"] = self._view(images, index, epoch, first=False)
        return batch

    def _view(self, images: Tensor, index: Tensor, epoch: int, *, first: bool) -> Tensor:
        if self.pictures is not None:
            return self.pictures(index, epoch if first else epoch + 1)
        seed = derive_seed(self.seed, "view", 0 if first else 1)
        return augment(images, seed=seed, epoch=epoch, index=index, config=self.augmentation).to(self.dtype)

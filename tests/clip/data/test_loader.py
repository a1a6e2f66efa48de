"""Batches that workers read are those that the rank would read itself."""

import os
import pickle
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from tests.clip.image_files import sample, write_tars
from unisono.collectives import all_reduce
from unisono.collectives.groups import resolve_group
from unisono_models.clip.data import loader
from unisono_models.clip.data.files import open_pairs
from unisono_models.clip.data.loader import load_steps
from unisono_models.clip.data.pairs import PairBatch, SubsetPairs
from unisono_models.datasets.skip_report import SkipReport
from unisono_models.training.sampler import StepSampler


class Numbers:
    """Pairs without files. Row 7 raises, and row 8 ends the process that reads it."""

    def __len__(self):
        return 100

    def read(self, indices, size):
        if 7 in indices:
            raise ValueError("row 7 is cursed")
        if 8 in indices:
            os.kill(os.getpid(), signal.SIGKILL)
        index = torch.tensor(indices, dtype=torch.int64)
        return PairBatch(
            index.to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, size, size), [str(i) for i in indices], index, index
        )


def with_broken(number):
    return {**sample(number), **({"png": b"junk"} if number == 3 else {})}


def same(a, b):
    assert torch.equal(a.images, b.images) and a.captions == b.captions and a.skipped == b.skipped
    assert torch.equal(a.concepts, b.concepts) and torch.equal(a.index, b.index)


def reads_ahead_in_order(folder):
    """Workers next to a gloo group: a collective follows each batch, and the batch has the samples that were skipped."""
    ranks = resolve_group(None)
    pairs = open_pairs(folder, cache=folder)
    order = StepSampler(samples=len(pairs), batch=5, seed=0)

    def rows(step):
        return order.share(step, ranks.rank, ranks.size)

    random = torch.get_rng_state()
    inline = list(load_steps(pairs, rows, 6, first=2, last=8))
    ahead = load_steps(pairs, rows, 6, first=2, last=8, workers=2)
    skipped, total = SkipReport(), torch.zeros(())
    for expected, batch in zip(inline, ahead, strict=True):
        same(batch, expected)
        skipped.add(batch)
        total += all_reduce(torch.tensor(float(len(batch.captions))))
    assert torch.equal(torch.get_rng_state(), random)
    summary = skipped.summary()
    assert summary["read"] == total + sum(summary["reasons"].values())
    return summary["reasons"]


def test_workers_beside_a_process_group_give_the_same_batches(ranks, tmp_path):
    write_tars(tmp_path, (4, 3), with_broken)
    assert ranks(reads_ahead_in_order, tmp_path, world_size=2) == [{"broken image": 3}] * 2


def test_workers_are_not_sent_the_rows_of_a_split(monkeypatch):
    sizes = []

    def measured(dataset, **options):
        sizes.append(len(pickle.dumps(dataset)))
        return DataLoader(dataset, **options)

    monkeypatch.setattr(loader, "DataLoader", measured)
    split = SubsetPairs(SubsetPairs(Numbers(), np.arange(100).repeat(10_000)), np.arange(10, 1_000_000)[::-1])  # of a split
    assert len(pickle.dumps(split)) > 15_000_000

    def rows(step):
        return [step, 999_989 - 10_000 * step]

    inline = list(load_steps(split, rows, 4, first=0, last=3))
    assert [batch.index.tolist() for batch in inline] == [[99, 0], [99, 1], [99, 2]]
    for batch, expected in zip(load_steps(split, rows, 4, first=0, last=3, workers=1), inline, strict=True):
        same(batch, expected)
    for batch, step in zip(inline, range(3), strict=True):
        same(batch, split.read(rows(step), 4))
    assert len(sizes) == 1 and sizes[0] < 1000
    for workers in (0, 1):
        with pytest.raises(IndexError, match=r"indices from 0 to 999990: expected them within 0 and 999989"):
            list(load_steps(split, lambda step: [0, 999_990], 4, first=0, last=1, workers=workers))


def test_steps_without_rows_and_no_steps():
    assert [len(batch.captions) for batch in load_steps(Numbers(), lambda step: range(step % 2), 4, first=0, last=4)] == [
        0,
        1,
        0,
        1,
    ]
    assert list(load_steps(Numbers(), lambda step: [], 4, first=3, last=3, workers=2)) == []
    with pytest.raises(ValueError, match="workers=-1"):
        load_steps(Numbers(), lambda step: [], 4, first=0, last=3, workers=-1)


def test_errors_of_workers_name_the_step(monkeypatch):
    # torch looks every five seconds whether a worker that is not its child lives, which no option changes
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.2,))
    # not up to row 8: reading it ahead would end the worker, perhaps before the error of row 7 has been sent
    batches = load_steps(Numbers(), lambda step: [step], 4, first=5, last=8, workers=1)
    assert [next(batches).captions for _ in range(2)] == [["5"], ["6"]]
    with pytest.raises(ValueError, match="row 7 is cursed") as caught:
        next(batches)
    assert caught.value.__notes__ == ["load_steps: while reading step 7"]
    with pytest.raises(RuntimeError, match="a worker died before step 8 was read"):
        list(load_steps(Numbers(), lambda step: [step], 4, first=8, last=9, workers=1))


SCRIPT = """
import multiprocessing, sys, torch
from unisono_models.clip.data.loader import load_steps
from unisono_models.clip.data.pairs import PairBatch

class Numbers:
    def read(self, indices, size):
        index = torch.tensor(indices)
        return PairBatch(torch.zeros(1, 3, size, size, dtype=torch.uint8), ["x"], index, index)

if __name__ == "__main__":
    batches = load_steps(Numbers(), lambda step: [step], 4, first=0, last=80, workers=1)
    next(batches)
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)
    sys.stdin.read()
"""


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="looks processes up in /proc")
def test_workers_end_with_a_rank_that_is_killed(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(tmp_path / "script.py")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as rank:
        workers = [int(pid) for pid in rank.stdout.readline().split()]
        assert workers and all(map(alive, workers))
        rank.kill()
    limit = time.monotonic() + 30
    while any(map(alive, workers)):
        assert time.monotonic() < limit, f"{workers} are still there"
        time.sleep(0.2)

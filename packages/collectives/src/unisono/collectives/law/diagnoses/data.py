"""The ranks start from other data or other parameters."""

import torch

from unisono.collectives.law.comparison import Comparison
from unisono.collectives.law.diagnoses.finding import Diagnosis, Finding


def same_samples(c: Comparison) -> Finding | None:
    """Every rank reads all samples."""
    expected, found = c.data_counts()
    if c.case.sizes is not None or not all(count == expected for count in found):
        return None
    return Finding(
        "same_samples",
        f"all {c.world_size} ranks read the same {sum(expected.values())} samples, and do the work of one",
        "Give the loader sampler=torch.utils.data.DistributedSampler(dataset), or take rows[rank::world_size]",
    )


def overlapping_samples(c: Comparison) -> Finding | None:
    """Ranks read samples that others read, too, and leave out some."""
    missing, repeated = _wrong_samples(c)
    if not missing or not repeated:
        return None
    return Finding(
        "overlapping_samples",
        f"{repeated} samples are read more than once, and {missing} by no rank: the ranks divide the data in different orders",
        "Shuffle with the same seed on all ranks before the data is divided (DistributedSampler(seed=…) must be equal)",
    )


def repeated_samples(c: Comparison) -> Finding | None:
    """Samples are repeated until all ranks have as many."""
    missing, repeated = _wrong_samples(c)
    if not repeated or missing:
        return None
    return Finding(
        "repeated_samples",
        f"{repeated} samples are read more than once: the sampler repeats samples until all ranks have as many",
        "Let ranks have different numbers of rows, indices[rank::world_size], and take means with "
        "unisono.collectives.global_mean; a metric over repeated samples is wrong",
    )


def dropped_samples(c: Comparison) -> Finding | None:
    """Samples are left out, so that all ranks have as many."""
    missing, repeated = _wrong_samples(c)
    if not missing or repeated:
        return None
    return Finding(
        "dropped_samples",
        f"{missing} samples are read by no rank: drop_last, or a division without rest, leaves out what does not divide",
        "Let ranks have different numbers of rows: drop_last=False, indices[rank::world_size], and "
        "unisono.collectives.global_mean for means",
    )


def other_order(c: Comparison) -> Finding | None:
    """The ranks read the samples of one process in other steps."""
    step = next((k for k in range(c.step_count) if c.case.sizes is None and not c.has_same_samples(k)), None)
    if step is None:
        return None
    return Finding(
        "other_order",
        f"together, the ranks read the samples of one process, but in another order: step {step + 1} has others",
        "Shuffle with the same seed on any number of ranks; with accelerate: DataLoaderConfiguration("
        "use_seedable_sampler=True). If any order will do, check with a whole batch instead of a loader",
    )


def growing_batch(c: Comparison) -> Finding | None:
    """The batch size is for one rank, so that the global batch grows with the ranks."""
    if c.case.sizes is not None:
        return None
    expected, found = len(c.reference.steps[0].data), sum(len(record.steps[0].data) for record in c.ranks)
    if expected == found:
        return None
    return Finding(
        "growing_batch",
        f"a step has {expected} samples in one process and {found} on {c.world_size} ranks: the batch size is that of one rank",
        "Divide it: batch_size // world_size. If the larger batch is meant, the runs are different runs: check with a whole "
        "batch instead of a loader",
    )


def different_start(c: Comparison) -> Finding | None:
    """Ranks start from different parameters."""
    first = c.ranks[0]
    if c.not_compared() or all(_equal_states(record.initial, first.initial) for record in c.ranks):
        return None
    name = next(n for n in first.initial if not all(torch.allclose(r.initial[n], first.initial[n]) for r in c.ranks))
    return Finding(
        "different_start",
        "the ranks start from different parameters, and equal gradients keep them different",
        "Wrap the model in DDP, which broadcasts rank 0's, or call unisono.dataparallel.broadcast_parameters(model) in build; "
        "or seed every rank alike while the model is built",
        where=f"first {name}",
    )


def start_depends_on_world_size(c: Comparison) -> Finding | None:
    """All ranks start alike, but not as one process does."""
    if c.not_compared() or all(_equal_states(record.initial, c.reference.initial) for record in c.ranks):
        return None
    return Finding(
        "start_depends_on_world_size",
        "the model starts from other parameters than in one process: building it depends on the number of ranks",
        "Draw the parameters with the same seed on any number of ranks",
    )


def _wrong_samples(c: Comparison) -> tuple[int, int]:
    """Return how many samples the ranks leave out and read too often, with a loader."""
    if c.case.sizes is not None:
        return 0, 0
    expected, found = c.data_counts()
    together = sum(found, type(expected)())
    return sum((expected - together).values()), sum((together - expected).values())


def _equal_states(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.allclose(a[name], b[name], rtol=1e-9, atol=1e-12) for name in a)


DIAGNOSES: list[Diagnosis] = [
    same_samples,
    overlapping_samples,
    repeated_samples,
    dropped_samples,
    growing_batch,
    other_order,
    different_start,
    start_depends_on_world_size,
]

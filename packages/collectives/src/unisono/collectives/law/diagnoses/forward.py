"""The model computes something else than in one process."""

from unisono.collectives.law.comparison import Comparison
from unisono.collectives.law.diagnoses.finding import Diagnosis, Finding


def random_augmentation(c: Comparison) -> Finding | None:
    """What the model gets is changed at random, in a way that depends on the rank."""
    expected, found, shared = c.entry_rows()
    if c.first_step or expected != found or expected == shared or not any(s.draws_before_model for s in c.of_ranks()):
        return None
    return Finding(
        "random_augmentation",
        "the inputs are changed at random before the model, and the random numbers of a sample depend on its rank",
        "Draw them by (seed, step, number of the sample), not from the rank's own generator; or switch them off for this check",
    )


def dropped_rows(c: Comparison) -> Finding | None:
    """The step gives the model other rows than it got."""
    expected, found, shared = c.entry_rows()
    if c.first_step or not shared or expected == shared == found or found == expected * c.world_size:
        return None
    return Finding(
        "dropped_rows",
        f"the model gets {found} rows on all ranks and {expected} in one process, and only {shared} of them are the "
        "same: the step leaves out rows, or repeats some",
        "Use all rows of this rank, as they are: uneven ranks need no padding with unisono.collectives.global_mean",
    )


def batch_norm(c: Comparison) -> Finding | None:
    """Batch norm takes the mean of this rank's rows."""
    difference = None if c.first_step else c.first_forward_difference()
    if difference is None or "BatchNorm" not in difference.call.module or not difference.call.training:
        return None
    return Finding(
        "batch_norm",
        f"batch norm normalizes with the rows of one rank (outputs are off by {difference.deviation:.1e})",
        "Use unisono.dataparallel.convert_sync_batchnorm(model) before DDP (torch's own needs GPUs, and no empty rank), or a "
        "norm that does not look at other samples",
        where=f"module {difference.name}",
    )


def random_module(c: Comparison) -> Finding | None:
    """A module draws random numbers, such as dropout."""
    difference = None if c.first_step else c.first_forward_difference()
    if difference is None or not difference.call.draws:
        return None
    return Finding(
        "random_module",
        f"{difference.call.module} draws random numbers, and those of a sample depend on its rank",
        'Check with dropout="off", or set its probability to 0 for the check: what remains is a real deviation. To keep it, '
        "draw by (seed, step, number of the sample)",
        where=f"module {difference.name}",
    )


def other_output(c: Comparison) -> Finding | None:
    """A module gives other outputs for the same rows."""
    difference = None if c.first_step else c.first_forward_difference()
    if difference is None:
        return None
    return Finding(
        "other_output",
        f"{difference.call.module} gives other outputs for the same rows (off by {difference.deviation:.1e}): it looks at the "
        "other rows of its rank, or at the rank",
        "Compute statistics of the batch over all ranks: unisono.collectives.all_gather, or all_reduce of sums and counts",
        where=f"module {difference.name}",
    )


DIAGNOSES: list[Diagnosis] = [
    random_augmentation,
    dropped_rows,
    batch_norm,
    random_module,
    other_output,
]

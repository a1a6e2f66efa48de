"""The gradients are right, and something else is not."""

import torch

from unisono.collectives.law.comparison import Comparison
from unisono.collectives.law.diagnoses.finding import Diagnosis, Finding, worst_parameter


def hyperparameters(c: Comparison) -> Finding | None:
    """The optimizer has other settings on other numbers of ranks."""
    for record in c.ranks:
        for mine, its in zip(c.reference.hyperparameters, record.hyperparameters, strict=False):
            for name in mine.keys() & its.keys():
                if mine[name] != its[name]:
                    return Finding(
                        "hyperparameters",
                        f"{name} is {its[name]:.4g} on {c.world_size} ranks and {mine[name]:.4g} in one process",
                        "The global batch is the same, so the settings stay the same; scale them only with the global batch",
                    )
    return None


def other_loss(c: Comparison) -> Finding | None:
    """The gradients are right and the loss is not."""
    if c.deviations["gradients"] > c.precision.tolerance or c.deviations["loss"] <= c.precision.tolerance:
        return None
    expected, losses = c.losses()
    return Finding(
        "other_loss",
        f"gradients are right, but the returned loss is {', '.join(f'{loss:.5g}' for loss in losses if loss is not None)} on "
        f"the ranks, and {expected:.5g} in one process",
        "Return the mean over all ranks' rows: unisono.collectives.global_mean",
    )


def buffer_of_own_rows(c: Comparison) -> Finding | None:
    """A buffer is updated with the rows of one rank."""
    wrong = [name for name, value in c.buffer_deviations.items() if value > c.precision.tolerance]
    if not wrong or c.deviations["gradients"] > c.precision.tolerance:
        return None
    return Finding(
        "buffer_of_own_rows",
        "a buffer (running mean, centre, queue) is updated with the rows of one rank",
        "Update it with the rows of all ranks: all_gather them, or all_reduce their sum and count",
        where=f"buffer {wrong[0]}",
    )


def metric_of_own_rows(c: Comparison) -> Finding | None:
    """A metric is that of one rank's rows, or the mean of such metrics."""
    wrong = [name for name, value in c.metric_deviations.items() if value > 0]
    if not wrong:
        return None
    values = [record.steps[0].metrics.get(wrong[0], float("nan")) for record in c.ranks]
    if not c.close(torch.tensor(values), values[0]):
        what = f"metric {wrong[0]} is that of each rank's own rows: {', '.join(f'{value:.4g}' for value in values)}"
    else:
        what = f"metric {wrong[0]} is averaged over ranks that do not have as many rows each"
    return Finding(
        "metric_of_own_rows",
        f"{what}; in one process it is {c.reference.steps[0].metrics[wrong[0]]:.4g}",
        "Add up numerators and denominators over the ranks (all_reduce), or all_gather what the metric needs, and divide once",
    )


def unexplained(c: Comparison) -> Finding | None:
    """Something deviates, and no cause is known."""
    forward = c.first_forward_difference()
    aspects = [name for name, value in c.deviations.items() if value > c.precision.tolerance]
    where = [f"outputs differ first in module {forward.name}"] if forward else []
    where += [f"gradients differ first at the output of module {name}"] if (name := c.first_backward_difference()) else []
    where += [worst_parameter(c)] if "gradients" in aspects else []
    return Finding(
        "unexplained",
        f"{', '.join(aspects)} deviate in step {c.first_step + 1}, and no known cause fits",
        "Make the step smaller until the deviation goes away",
        where="; ".join(where),
    )


DIAGNOSES: list[Diagnosis] = [
    hyperparameters,
    other_loss,
    buffer_of_own_rows,
    metric_of_own_rows,
    unexplained,
]

"""Diagnoses: from a deviation to its cause in words. Each function knows one cause; the first that applies is reported.

tests/collectives/law/museum.py has a training step for each of them, with a bug from a public repository.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from unisono.collectives.law.comparison import Case, Comparison


@dataclass
class Finding:
    """Why a case deviates."""

    cause: str  # the name of the diagnosis: "local_mean"
    what: str
    fix: str
    where: str = ""  # a line of the user's code, a module or a parameter
    cases: list[Case] = field(default_factory=list)

    def __str__(self) -> str:
        where = f" ({self.where})" if self.where else ""
        return f"{self.what}{where}. {self.fix}"


Diagnosis = Callable[[Comparison], Finding | None]
DIAGNOSES: list[Diagnosis] = []  # in the order in which they are tried: causes before their consequences


def diagnosis(function: Diagnosis) -> Diagnosis:
    DIAGNOSES.append(function)
    return function


def diagnose(comparison: Comparison) -> Finding:
    """Return why the comparison deviates."""
    found = next(finding for function in DIAGNOSES if (finding := function(comparison)) is not None)
    found.cases.append(comparison.case)
    return found


# 1. The case did not end.


@diagnosis
def skipped_collective(c: Comparison) -> Finding | None:
    """One rank calls a collective that another skips, so that it waits for ever."""
    if c.failure is None:
        return None
    waiting = {report.rank: _waiting_line(report.detail) for report in c.failure.reports if report.state == "hung"}
    raised = {r.rank: r.detail for r in c.failure.reports if r.state == "raised" and "Timed out" in r.detail}
    waiting |= {rank: _last_user_line(detail) for rank, detail in raised.items()}
    waiting = {rank: line for rank, line in waiting.items() if line}
    if not waiting or any(report.state == "died" for report in c.failure.reports):
        return None
    if any(report.state == "raised" and report.rank not in raised for report in c.failure.reports):
        return None
    lines = "; ".join(f"rank {rank} waits at {line}" for rank, line in sorted(waiting.items()))
    others = [str(report.rank) for report in c.failure.reports if report.rank not in waiting]
    rest = f", and rank{'s' * (len(others) > 1)} {', '.join(others)} went on without it" if others else ""
    return Finding(
        "skipped_collective",
        f"ranks do not make the same collective calls: {lines}{rest}",
        "Every rank must make every call, in the same order: take it out of the `if`, and let a rank without rows or without "
        "this gradient take part with zeros (unisono.dataparallel.sync_gradients does). UNISONO_CHECK=1 names both lines",
    )


@diagnosis
def unused_parameter(c: Comparison) -> Finding | None:
    """DDP waits for the gradient of a parameter that this rank's loss does not use."""
    text = _raised(c, "Expected to have finished reduction in the prior iteration")
    if text is None:
        return None
    return Finding(
        "unused_parameter",
        "a parameter gets no gradient on some rank, and DDP waits for it: the next forward raises",
        "Use DistributedDataParallel(…, find_unused_parameters=True), or unisono.dataparallel.sync_gradients, which counts a "
        "missing gradient as zeros; or let every rank's loss depend on all parameters (+ 0 * output.sum())",
        where=_last_user_line(text),
    )


@diagnosis
def needs_gpu(c: Comparison) -> Finding | None:
    """The step asks for a device that is not there."""
    text = _raised(c, "Found no NVIDIA driver", "not compiled with CUDA", "No CUDA GPUs", "NCCL")
    return text and Finding(
        "needs_gpu",
        "the step needs a GPU, and the check runs on CPUs",
        "Take the device from the model, next(model.parameters()).device, and the backend from the group that is there",
        where=_last_user_line(text),
    )


@diagnosis
def exits(c: Comparison) -> Finding | None:
    """A rank ends its process."""
    dead = [report for report in c.failure.reports if report.state == "died"] if c.failure else []
    stopped = _raised(c, "SystemExit")
    if not dead and stopped is None:
        return None
    reason = f"rank {dead[0].rank}: {dead[0].detail}" if dead else _last_line(stopped or "")
    return Finding(
        "exits",
        f"the step ends the process ({reason})",
        "Return from the step instead of sys.exit(); a signal is a crash: run the step alone",
    )


@diagnosis
def raises_without_rows(c: Comparison) -> Finding | None:
    """The step cannot work on a rank that has no rows."""
    if c.failure is None or c.case.sizes is None:
        return None
    raised = [report for report in c.failure.reports if report.state == "raised"]
    if not raised or any(c.case.sizes[report.rank] for report in raised if not _is_consequence(report.detail)):
        return None
    return Finding(
        "raises_without_rows",
        f"the step raises on a rank that has no rows: {_last_line(raised[0].detail)}",
        "Let it compute with zero rows, with a loss that still depends on the parameters: unisono.collectives.global_mean "
        'does. If your ranks always have rows, check with splits=("even", "uneven")',
        where=_last_user_line(raised[0].detail),
    )


@diagnosis
def raises(c: Comparison) -> Finding | None:
    """The step raises."""
    if c.failure is None:
        return None
    raised = [report for report in c.failure.reports if report.state == "raised"]
    first = next((report for report in raised if not _is_consequence(report.detail)), raised[0] if raised else None)
    if first is None:
        hung = ", ".join(str(report.rank) for report in c.failure.reports if report.state == "hung")
        return Finding("hangs", f"the step does not end on ranks {hung}", "Give it more time: timeout=…; or look at the stacks")
    return Finding(
        "raises",
        f"the step raises on rank {first.rank}: {_last_line(first.detail)}",
        "It works in one process with the whole batch: look for what depends on the rank or on the number of rows",
        where=_last_user_line(first.detail),
    )


# 2. The ranks start from other data or other parameters.


@diagnosis
def same_samples(c: Comparison) -> Finding | None:
    """Every rank reads all samples."""
    expected, found = c.data_counts()
    if c.case.sizes is not None or not all(count == expected for count in found):
        return None
    return Finding(
        "same_samples",
        f"all {c.world_size} ranks read the same {sum(expected.values())} samples, so that {c.world_size} ranks do the work of one",
        "Give the loader sampler=torch.utils.data.DistributedSampler(dataset), or take rows[rank::world_size]",
    )


@diagnosis
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


@diagnosis
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


@diagnosis
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


@diagnosis
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


@diagnosis
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


@diagnosis
def start_depends_on_world_size(c: Comparison) -> Finding | None:
    """All ranks start alike, but not as one process does."""
    if c.not_compared() or all(_equal_states(record.initial, c.reference.initial) for record in c.ranks):
        return None
    return Finding(
        "start_depends_on_world_size",
        "the model starts from other parameters than in one process: building it depends on the number of ranks",
        "Draw the parameters with the same seed on any number of ranks",
    )


# 3. The model computes something else.


@diagnosis
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


@diagnosis
def dropped_rows(c: Comparison) -> Finding | None:
    """The step gives the model other rows than it got."""
    expected, found, shared = c.entry_rows()
    if c.first_step or not shared or expected == shared == found or found == expected * c.world_size:
        return None
    return Finding(
        "dropped_rows",
        f"the model gets {found} rows on all ranks and {expected} in one process, and only {shared} of them are the same: the step "
        "leaves out rows, or repeats some",
        "Use all rows of this rank, as they are: uneven ranks need no padding with unisono.collectives.global_mean",
    )


@diagnosis
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


@diagnosis
def random_module(c: Comparison) -> Finding | None:
    """A module draws random numbers, such as dropout."""
    difference = None if c.first_step else c.first_forward_difference()
    if difference is None or not difference.call.draws:
        return None
    return Finding(
        "random_module",
        f"{difference.call.module} draws random numbers, and those of a sample depend on its rank",
        "Set its probability to 0 for this check, and check again: what remains is a real deviation. To keep it, draw by (seed, "
        "step, number of the sample)",
        where=f"module {difference.name}",
    )


@diagnosis
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


# 4. The gradients are not those of the whole batch.


@diagnosis
def bypassed_wrapper(c: Comparison) -> Finding | None:
    """The model inside DDP is called, so that DDP does not know of the backward."""
    bypassed = [place for step in c.of_ranks() for place in step.bypassed]
    if c.ranks_agree or not bypassed or any(step.wrapper_calls for step in c.of_ranks()):
        return None
    return Finding(
        "bypassed_wrapper",
        "the model inside DDP was called, not DDP itself, so that no gradient is synced and the ranks drift apart",
        "Call ddp_model(…): give the method that you need a way through forward(); or call "
        "unisono.dataparallel.sync_gradients(model.parameters()) after backward",
        where=bypassed[0],
    )


@diagnosis
def sync_switched_off(c: Comparison) -> Finding | None:
    """The last backward of the step runs in no_sync()."""
    steps = c.of_ranks()
    if c.ranks_agree or not all(step.wrapper_calls and step.wrapper_calls == step.wrapper_calls_without_sync for step in steps):
        return None
    return Finding(
        "sync_switched_off",
        "every forward of DDP was in no_sync(), also the last one, so that gradients are never synced",
        "Leave no_sync() before the forward of the last micro-batch: DDP decides in forward",
    )


@diagnosis
def second_backward(c: Comparison) -> Finding | None:
    """DDP syncs one backward for each forward."""
    if c.ranks_agree or not all(0 < step.wrapper_calls < len(step.local) for step in c.of_ranks()):
        return None
    forwards, backwards = c.of_ranks()[0].wrapper_calls, len(c.of_ranks()[0].local)
    return Finding(
        "second_backward",
        f"{backwards} backward passes for {forwards} forward of DDP: DDP syncs the first, and the gradients of the others stay "
        "on their rank",
        "Add the losses and call backward once, or use unisono.dataparallel.sync_gradients after the last backward",
    )


@diagnosis
def parameter_outside_wrapper(c: Comparison) -> Finding | None:
    """Some parameters are synced and others are not."""
    wrong = [name for name, value in c.gradient_deviations(c.first_step).items() if value > c.precision.loose]
    outside = set(c.ranks[0].unwrapped)
    if c.ranks_agree or not c.ranks[0].has_wrapper or not wrong or not set(wrong) <= outside:
        return None
    return Finding(
        "parameter_outside_wrapper",
        f"{len(wrong)} parameters are not inside DDP, and their gradients stay on their rank",
        "Make them before DDP wraps the model, wrap their module, too, or call unisono.dataparallel.sync_gradients for them",
        where=f"parameter {wrong[0]}",
    )


@diagnosis
def missing_sync(c: Comparison) -> Finding | None:
    """Every rank keeps its own gradients."""
    if c.ranks_agree or not all(map(c.close, c.final_vectors(), c.local_vectors())):
        return None
    return Finding(
        "missing_sync",
        "gradients are not synced: every rank trains on its own rows only, and the ranks drift apart",
        "Wrap the model in DistributedDataParallel, or call unisono.dataparallel.sync_gradients(model.parameters()) after "
        "backward",
    )


@diagnosis
def mean_of_nothing(c: Comparison) -> Finding | None:
    """A rank without rows has the loss NaN."""
    if all(bool(vector.isfinite().all()) for vector in c.final_vectors()) or all(c.shares):
        return None
    return Finding(
        "local_mean",
        "the mean over a rank's own rows is NaN where a rank has no rows, and the sync carries it to all ranks",
        "Use unisono.collectives.global_mean(values_of_rows): the mean over the rows of all ranks",
    )


@diagnosis
def disagreeing_ranks(c: Comparison) -> Finding | None:
    """Ranks end with different gradients, for no known reason."""
    if c.ranks_agree:
        return None
    return Finding(
        "disagreeing_ranks",
        "the ranks give their optimizers different gradients, so that they drift apart",
        "Sync after everything that changes a gradient: unisono.dataparallel.sync_gradients(model.parameters())",
        where=_worst_parameter(c),
    )


@diagnosis
def clipped_before_sync(c: Comparison) -> Finding | None:
    """Each rank's gradient is scaled by its own norm before the sync."""
    right, used = c.right_weights, c.weights_used
    if right is None or not _is_uniform(c, right) or (used is not None and _is_uniform(c, used)):
        return None
    if c.gradient_deviation(c.first_step) <= c.precision.tolerance:
        return None
    factors = "" if used is None else f" (by {', '.join(f'{float(k):.3g}' for k in used / right)})"
    return Finding(
        "clipped_before_sync",
        f"each rank changes its own gradient before the sync{factors}: clipping by the norm of one rank",
        "Sync first, then call torch.nn.utils.clip_grad_norm_; with DDP clip after backward, with your own sync after it",
    )


@diagnosis
def summed_gradients(c: Comparison) -> Finding | None:
    """Gradients are added over ranks where they should be averaged."""
    used = c.weights_used
    if c.factor is None or not c.close(c.factor, c.world_size) or used is None or not c.close(_known(used), 1.0):
        return None
    if c.ranks[0].has_wrapper:
        return Finding(
            "doubled_sync",
            f"gradients are {c.world_size} times too large: DDP has averaged them, and the step adds them over the ranks again",
            "Remove your own all_reduce of gradients",
            where=_own_sync_line(c),
        )
    return Finding(
        "summed_gradients",
        f"gradients are {c.world_size} times too large (W): they are added over the ranks, and the loss is a mean",
        'Average them: unisono.dataparallel.sync_gradients(model.parameters()), or all_reduce(grad, "avg")',
        where=_own_sync_line(c),
    )


@diagnosis
def local_mean(c: Comparison) -> Finding | None:
    """Means over each rank's rows are averaged as if all ranks had as many rows."""
    right, shares = c.right_weights, torch.tensor(c.shares, dtype=torch.float64)
    if right is None or c.weights_used is None or c.close(shares, 1 / c.world_size):
        return None
    known = right.isfinite()
    if not c.close(right[known], shares[known]) or _whole_loss_everywhere(c):
        return None
    return Finding(
        "local_mean",
        f"each rank takes the mean over its own rows, and the means are averaged: each counts 1/{c.world_size} instead of "
        f"{_numbers(shares)}, its share of the rows",
        "Use unisono.collectives.global_mean(values_of_rows): the mean over the rows of all ranks",
    )


@diagnosis
def divided_twice(c: Comparison) -> Finding | None:
    """The loss is divided by the number of ranks, and DDP divides again."""
    expected, losses = c.losses()
    if c.factor is None or not c.close(c.factor, 1 / c.world_size) or expected is None:
        return None
    if any(loss is None for loss in losses) or not c.close(sum(loss or 0.0 for loss in losses), expected):
        return None
    return Finding(
        "divided_twice",
        f"gradients are 1/{c.world_size} of the right ones (1/W): the loss is a rank's part of the whole, and DDP averages again",
        'Do not divide by the number of ranks; with a sum over the batch, say so: global_mean, or sync_gradients(reduce="sum")',
    )


@diagnosis
def own_slice_gradient(c: Comparison) -> Finding | None:
    """Every rank computes the whole loss, and only its own rows carry a gradient."""
    if c.factor is None or not c.close(c.factor, 1 / c.world_size) or not _whole_loss_everywhere(c):
        return None
    return Finding(
        "own_slice_gradient",
        f"gradients are 1/{c.world_size} of the right ones (1/W): every rank computes the whole loss, but of the gathered rows "
        "only its own carry a gradient, and DDP averages",
        "Gather with unisono.collectives.all_gather, whose backward adds the gradients of all ranks",
        where=_cut_line(c),
    )


@diagnosis
def scaled_loss(c: Comparison) -> Finding | None:
    """The loss is multiplied by the number of ranks."""
    if c.factor is None or not c.close(c.factor, c.world_size):
        return None
    return Finding(
        "scaled_loss",
        f"gradients are {c.world_size} times too large (W): the loss, or its gradient through a gather, counts once for each rank",
        'Do not multiply by the number of ranks; with gathered rows and a summing sync use grad_reduce="sum"',
    )


@diagnosis
def squared_factor(c: Comparison) -> Finding | None:
    """A gradient that is taken inside of the loss counts W times, and its square W² times."""
    if c.factor is None or not c.close(c.factor, c.world_size**2):
        return None
    return Finding(
        "squared_factor",
        f"gradients are {c.world_size**2} times too large (W²): a gradient inside of the loss (a penalty) goes through a gather and "
        "counts once for each rank, then is squared",
        "Differentiate loss / world_size there, and only there: see Gradient penalties in the README of unisono.collectives",
    )


@diagnosis
def constant_factor(c: Comparison) -> Finding | None:
    """All gradients are off by one factor that is no power of W."""
    if c.factor is None:
        return None
    return Finding(
        "constant_factor",
        f"all gradients are {c.factor:.4g} times the right ones",
        "Look for a number that the step divides or multiplies by: rows or tokens of one rank, or micro-batches",
    )


@diagnosis
def accumulated_means(c: Comparison) -> Finding | None:
    """Micro-batches with different numbers of rows or tokens are averaged as equals."""
    if not any(len(step.local) > 1 for step in c.of_ranks()) or _rows_are_mixed(c):
        return None
    return Finding(
        "accumulated_means",
        "micro-batches are averaged as if all had as many rows or tokens: a sample's weight depends on the micro-batch it is in",
        "Divide each micro-batch's sum by the count of all micro-batches on all ranks: all_reduce the count first, then "
        "loss = values.sum() * world_size / count with DDP",
    )


@diagnosis
def other_weights(c: Comparison) -> Finding | None:
    """Means over tokens, labels or pairs are averaged as if all ranks had as many."""
    right = c.right_weights
    if right is None or c.weights_used is None or _is_uniform(c, right):
        return None
    return Finding(
        "token_mean",
        f"each rank takes a mean over what it has (tokens, valid labels, pairs), and the means are averaged: ranks count "
        f"{_numbers(c.weights_used)} instead of {_numbers(right)}",
        "Use unisono.collectives.global_mean(values, weights=mask): the mean over what all ranks have",
    )


@diagnosis
def cut_gradient(c: Comparison) -> Finding | None:
    """A collective of torch.distributed returns tensors without a gradient."""
    line = _cut_line(c)
    if not line:
        return None
    return Finding(
        "cut_gradient",
        "a collective cuts the gradient: its result counts as a constant, so that what other ranks computed from these rows gives "
        "them no gradient",
        "Use the function of the same name in unisono.collectives: its backward is the adjoint (all_gather ↔ reduce_scatter)",
        where=line,
    )


@diagnosis
def loss_of_own_rows(c: Comparison) -> Finding | None:
    """The loss compares rows with each other, and each rank has its own only."""
    if not _rows_are_mixed(c) or c.gradient_deviation(c.first_step) <= c.precision.tolerance:
        return None
    return Finding(
        "loss_of_own_rows",
        "the loss compares rows with each other (negatives, ranking, variance), and each rank compares its own rows only",
        "Gather the rows first, unisono.collectives.all_gather(features), or use a loss of unisono.contrastive",
        where=f"first in the gradient of the output of module {name}" if (name := c.first_backward_difference()) else "",
    )


# 5. The gradients are right.


@diagnosis
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


@diagnosis
def other_loss(c: Comparison) -> Finding | None:
    """The gradients are right and the loss is not."""
    if c.deviations["gradients"] > c.precision.tolerance or c.deviations["loss"] <= c.precision.tolerance:
        return None
    expected, losses = c.losses()
    return Finding(
        "other_loss",
        f"gradients are right, but the returned loss is {', '.join(f'{loss:.5g}' for loss in losses if loss is not None)} on the "
        f"ranks, and {expected:.5g} in one process",
        "Return the mean over all ranks' rows: unisono.collectives.global_mean",
    )


@diagnosis
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


@diagnosis
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


@diagnosis
def unexplained(c: Comparison) -> Finding | None:
    """Something deviates, and no cause is known."""
    forward = c.first_forward_difference()
    aspects = [name for name, value in c.deviations.items() if value > c.precision.tolerance]
    where = [f"outputs differ first in module {forward.name}"] if forward else []
    where += [f"gradients differ first at the output of module {name}"] if (name := c.first_backward_difference()) else []
    where += [_worst_parameter(c)] if "gradients" in aspects else []
    return Finding(
        "unexplained",
        f"{', '.join(aspects)} deviate in step {c.first_step + 1}, and no known cause fits",
        "Make the step smaller until the deviation goes away",
        where="; ".join(where),
    )


def _raised(c: Comparison, *texts: str) -> str | None:
    details = [report.detail for report in c.failure.reports if report.state == "raised"] if c.failure else []
    return next((detail for detail in details if any(text in detail for text in texts)), None)


def _is_consequence(detail: str) -> bool:
    """A rank that waits for one that has failed loses its connection."""
    return any(text in detail for text in ("Connection closed by peer", "Connection reset", "Timed out", "Application timeout"))


def _last_line(detail: str) -> str:
    return detail.rstrip().rpartition("\n")[2]


def _last_user_line(detail: str) -> str:
    """Return the innermost line of a traceback that is in none of the libraries: "train.py:12 in step"."""
    lines = re.findall(r'File "([^"]+)", line (\d+), in (\S+)', detail)
    return _user_place(list(reversed(lines)))


def _waiting_line(stack: str) -> str:
    """Return the line of the user's code from which a hung rank waits. The first thread of faulthandler's text is the main one."""
    threads = stack.split("Thread ")
    main = threads[-1]  # faulthandler shows the main thread last
    return _user_place(re.findall(r'File "([^"]+)", line (\d+) in (\S+)', main))


def _user_place(innermost_first: list[tuple[str, str, str]]) -> str:
    libraries = ("/torch/", "/unisono/", "/multiprocessing/", "/unittest/", "<frozen", "contextlib.py", "/concurrent/")
    for path, line, function in innermost_first:
        if not any(part in path for part in libraries):
            return f"{Path(path).name}:{line} in {function}"
    return ""


def _wrong_samples(c: Comparison) -> tuple[int, int]:
    """Return how many samples the ranks leave out and read too often, with a loader."""
    if c.case.sizes is not None:
        return 0, 0
    expected, found = c.data_counts()
    together = sum(found, type(expected)())
    return sum((expected - together).values()), sum((together - expected).values())


def _equal_states(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.allclose(a[name], b[name], rtol=1e-9, atol=1e-12) for name in a)


def _known(weights: torch.Tensor) -> torch.Tensor:
    return weights[weights.isfinite()]


def _is_uniform(c: Comparison, weights: torch.Tensor) -> bool:
    known = _known(weights)
    return bool(len(known)) and c.close(known, known.mean())


def _numbers(weights: torch.Tensor) -> str:
    return " : ".join(f"{float(weight):.3g}" for weight in weights)


def _whole_loss_everywhere(c: Comparison) -> bool:
    expected, losses = c.losses()
    return expected is not None and all(loss is not None and c.close(loss, expected) for loss in losses)


def _cut_line(c: Comparison) -> str:
    return next((call.line for step in c.of_ranks() for call in step.collectives if call.cuts_gradient), "")


def _own_sync_line(c: Comparison) -> str:
    calls = [call for call in c.of_ranks()[0].collectives if call.name == "all_reduce" and call.line]
    return calls[-1].line if calls else ""


def _worst_parameter(c: Comparison) -> str:
    found = c.gradient_deviations(c.first_step)
    return f"parameter {max(found, key=lambda name: found[name])}" if found else ""


def _rows_are_mixed(c: Comparison) -> bool:
    """Return whether the gradient of a row's output is no multiple of that in one process: other rows are in it."""
    entries = [call.name for call in c.of_reference().calls if call.is_entry and call.gradients]
    return any(c.gradient_ratios(name) is None for name in dict.fromkeys(entries))

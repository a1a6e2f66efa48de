"""The gradients are not those of the whole batch."""

import torch

from unisono.collectives.law.comparison import Comparison
from unisono.collectives.law.diagnoses.finding import Diagnosis, Finding, worst_parameter


def mean_of_nothing(c: Comparison) -> Finding | None:
    """A rank takes the mean over no rows or no tokens."""
    bad = [record.rank for record, vector in zip(c.ranks, c.local_vectors(), strict=True) if not vector.isfinite().all()]
    if not bad or not c.right_vector().isfinite().all():
        return None
    return Finding(
        "mean_of_nothing",
        f"the gradient of rank {bad[0]} is not finite, and the sync carries it to all ranks: a mean over no rows, no tokens "
        "or no valid labels",
        "Use unisono.collectives.global_mean(values, weights=mask): the mean over what all ranks have",
    )


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


def disagreeing_ranks(c: Comparison) -> Finding | None:
    """Ranks end with different gradients, for no known reason."""
    if c.ranks_agree:
        return None
    return Finding(
        "disagreeing_ranks",
        "the ranks give their optimizers different gradients, so that they drift apart",
        "Sync after everything that changes a gradient: unisono.dataparallel.sync_gradients(model.parameters())",
        where=worst_parameter(c),
    )


def clipped_before_sync(c: Comparison) -> Finding | None:
    """Each rank's gradient is scaled by its own norm before the sync."""
    right, used = c.right_weights, c.weights_used
    if right is None or used is None or not _is_uniform(c, right) or _is_uniform(c, used):
        return None
    factors = ", ".join(f"{float(k):.3g}" for k in used / right)
    return Finding(
        "clipped_before_sync",
        f"each rank scales its own gradient before the sync (by {factors}): it is clipped by the norm of one rank",
        "Sync first, then call torch.nn.utils.clip_grad_norm_; with DDP clip after backward, with your own sync after it",
    )


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


def divided_twice(c: Comparison) -> Finding | None:
    """The loss is divided by the number of ranks, and DDP divides again."""
    expected, losses = c.losses()
    if c.factor is None or not c.close(c.factor, 1 / c.world_size) or expected is None:
        return None
    if any(loss is None for loss in losses) or not c.close(sum(loss or 0.0 for loss in losses), expected):
        return None
    return Finding(
        "divided_twice",
        f"gradients are 1/{c.world_size} of the right ones (1/W): the loss is a part of the whole, and DDP averages, too",
        'Do not divide by the number of ranks; with a sum over the batch, say so: global_mean, or sync_gradients(reduce="sum")',
    )


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


def scaled_loss(c: Comparison) -> Finding | None:
    """The loss is multiplied by the number of ranks."""
    if c.factor is None or not c.close(c.factor, c.world_size):
        return None
    return Finding(
        "scaled_loss",
        f"gradients are {c.world_size} times too large (W): the loss, or its gradient in a gather, counts once for each rank",
        'Do not multiply by the number of ranks; with gathered rows and a summing sync use grad_reduce="sum"',
    )


def squared_factor(c: Comparison) -> Finding | None:
    """A gradient that is taken inside of the loss counts W times, and its square W² times."""
    if c.factor is None or not c.close(c.factor, c.world_size**2):
        return None
    return Finding(
        "squared_factor",
        f"gradients are {c.world_size**2} times too large (W²): a gradient inside of the loss (a penalty) passes a gather, "
        "counts once for each rank, and is squared",
        "Differentiate loss / world_size there, and only there: see Gradient penalties in the README of unisono.collectives",
    )


def constant_factor(c: Comparison) -> Finding | None:
    """All gradients are off by one factor that is no power of W."""
    if c.factor is None:
        return None
    return Finding(
        "constant_factor",
        f"all gradients are {c.factor:.4g} times the right ones",
        "Look for a number that the step divides or multiplies by: rows or tokens of one rank, or micro-batches",
    )


def accumulated_means(c: Comparison) -> Finding | None:
    """Micro-batches with different numbers of rows or tokens are averaged as equals."""
    if not any(len(step.local) > 1 for step in c.of_ranks()) or _rows_are_mixed(c):
        return None
    return Finding(
        "accumulated_means",
        "micro-batches are averaged as if all had as many rows or tokens: a sample's weight depends on its micro-batch",
        "Divide each micro-batch's sum by the count of all micro-batches on all ranks: all_reduce the count first, then "
        "loss = values.sum() * world_size / count with DDP",
    )


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


def cut_gradient(c: Comparison) -> Finding | None:
    """A collective of torch.distributed returns tensors without a gradient."""
    line = _cut_line(c)
    if not line:
        return None
    return Finding(
        "cut_gradient",
        "a collective cuts the gradient: its result counts as a constant, so that what other ranks computed from these rows "
        "gives them no gradient",
        "Use the function of the same name in unisono.collectives: its backward is the adjoint (all_gather ↔ reduce_scatter)",
        where=line,
    )


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


def _rows_are_mixed(c: Comparison) -> bool:
    """Return whether the gradient of a row's output is no multiple of that in one process: other rows are in it."""
    entries = [call.name for call in c.of_reference().calls if call.is_entry and call.gradients]
    return any(c.gradient_ratios(name) is None for name in dict.fromkeys(entries))


DIAGNOSES: list[Diagnosis] = [
    mean_of_nothing,
    bypassed_wrapper,
    sync_switched_off,
    second_backward,
    parameter_outside_wrapper,
    missing_sync,
    disagreeing_ranks,
    clipped_before_sync,
    summed_gradients,
    local_mean,
    divided_twice,
    own_slice_gradient,
    scaled_loss,
    squared_factor,
    constant_factor,
    accumulated_means,
    other_weights,
    cut_gradient,
    loss_of_own_rows,
]

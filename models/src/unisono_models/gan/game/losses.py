"""What each side of the game loses, picture by picture: means over the global batch are the losses.

`real` and `fake` are scores (n,) of this rank's real and generated pictures; row i of both has the same condition.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import relu, softplus

from unisono.collectives import Group, all_gather, all_reduce

Kind = Literal["paired", "all_pairs", "non_saturating", "hinge"]


def discriminator_losses(
    real: Tensor, fake: Tensor, *, kind: Kind, sizes: Sequence[int] | None = None, group: Group = None
) -> Tensor:
    """What the discriminator loses with each picture, (n,).

    paired: softplus(fake_i - real_i), the relativistic loss of Jolicoeur-Martineau 2018 and R3GAN. all_pairs: the same of
    real_i and every fake of the global batch, on average. non_saturating: softplus(-real) + softplus(fake). hinge:
    relu(1 - real) + relu(1 + fake).

    Backward: scores of all ranks get theirs (all_gather's true adjoint).

    Example:
        >>> discriminator_losses(torch.tensor([2.0]), torch.tensor([-2.0]), kind="hinge")
        tensor([0.])
    """
    if kind == "paired":
        return softplus(fake - real)
    if kind == "all_pairs":
        return softplus(all_gather(fake, sizes=sizes, group=group)[None, :] - real[:, None]).mean(1)
    if kind == "non_saturating":
        return softplus(-real) + softplus(fake)
    return relu(1 - real) + relu(1 + fake)


def generator_losses(
    real: Tensor, fake: Tensor, *, kind: Kind, sizes: Sequence[int] | None = None, group: Group = None
) -> Tensor:
    """What the generator loses with each picture, (n,). Without relativity (`is_relativistic`) `real` does not matter."""
    if kind == "paired":
        return softplus(real - fake)
    if kind == "all_pairs":
        return softplus(all_gather(real, sizes=sizes, group=group)[None, :] - fake[:, None]).mean(1)
    if kind == "non_saturating":
        return softplus(-fake)
    return -fake


def mismatch_losses(right: Tensor, wrong: Tensor, *, kind: Kind) -> Tensor:
    """What the discriminator loses with real pictures that come with a `wrong` condition, (n,): they count as fakes.

    Where losses are relativistic, each is compared with itself under the `right` condition: nothing else is wrong with it.
    """
    if is_relativistic(kind):
        return softplus(wrong - right)
    return softplus(wrong) if kind == "non_saturating" else relu(1 + wrong)


def is_relativistic(kind: Kind) -> bool:
    """Whether the generator's loss depends on real pictures."""
    return kind in ("paired", "all_pairs")


def mean_columns(columns: dict[str, Tensor], *, group: Group = None) -> dict[str, Tensor]:
    """The mean of each (n,) column over the global batch, on every rank, by one collective.

    Backward: call it on every rank; the gradients are right once they are averaged over the ranks.

    Example:
        >>> mean_columns({"loss": torch.tensor([1.0, 3.0])})
        {'loss': tensor(2.)}
    """
    stacked = torch.stack(list(columns.values()))
    wide = torch.float32 if stacked.device.type == "mps" else torch.float64  # which Apple's GPUs do not have
    ends = torch.cat([stacked.sum(1, dtype=wide), stacked.new_full((1,), stacked.shape[1], dtype=wide)])
    added = all_reduce(ends, group=group)
    means = (added[:-1] / added[-1]).to(stacked.dtype)
    return dict(zip(columns, means.unbind(), strict=True))

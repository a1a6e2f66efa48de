"""What each side of the game loses, picture by picture: means over the global batch are the losses.

`real` and `fake` are scores (n,) of this rank's real and generated pictures; row i of both has the same condition.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import relu, softplus

from unisono.collectives import Group, all_gather, all_reduce, exchange_sizes
from unisono.collectives.groups import resolve_group
from unisono.contrastive import clip_loss
from unisono_models.gan.config import LossConfig, ModelConfig
from unisono_models.gan.data.loader import Batch
from unisono_models.gan.model.discriminator import Discriminator
from unisono_models.gan.model.generator import Generator

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


def squared_gradients(scores: Sequence[Tensor], pictures: Sequence[Tensor]) -> list[Tensor]:
    """For each picture the squared length of the gradient of all ranks' scores by it, (n,) for each of `pictures`.

    scores: (n,) tensors computed from `pictures`, which require a gradient. All ranks call it: where the discriminator looks
    at the whole batch, scores of other ranks depend on a picture, too, and its gradient is that of their sum.

    Backward: through the gradient itself, and so a second time through the collectives.

    Example:
        >>> x = torch.tensor([[1.0], [2.0]], requires_grad=True)
        >>> squared_gradients([(x**2).sum(1)], [x])
        [tensor([ 4., 16.], grad_fn=<SumBackward1>)]
    """
    total = torch.stack([score.sum() for score in scores]).sum()
    gradients = torch.autograd.grad(total, list(pictures), create_graph=True)
    return [gradient.square().flatten(1).sum(1) for gradient in gradients]


def mismatched(
    condition: Tensor, *, shift: int, sizes: Sequence[int] | None = None, group: Group = None
) -> tuple[Tensor, Tensor]:
    """For each row the condition `shift` places on in the global batch (which is a circle), and whether it is another one.

    condition: (n,) labels or (n, d) vectors of this rank. The second result is (n,), whether the two differ: a
    picture of a seven is no bad match for "seven" because another sample says so.

    Backward: the condition of a sample gets the gradients of whichever rank used it.

    Example:
        >>> mismatched(torch.tensor([3, 3, 5]), shift=1)
        (tensor([3, 5, 3]), tensor([False,  True,  True]))
    """
    if sizes is None:
        sizes = exchange_sizes(condition, group=group)
    everyone = all_gather(condition, sizes=sizes, group=group)
    first = sum(sizes[: resolve_group(group).rank])
    places = (torch.arange(len(condition), device=condition.device) + first + shift) % max(1, len(everyone))
    found = everyone[places]
    differs = found != condition
    differs = differs.flatten(1).any(1) if differs.ndim > 1 else differs
    return found, differs


class GAN(nn.Module):
    """Generator and discriminator, and their losses. All ranks call, each with its rows of the global batch.

    Losses are the same on every rank; "loss" is the one to call backward on, and its gradients are those of the global loss
    once they are averaged over the ranks (GradientSync does).

    Example:
        game = Game(ModelConfig(), LossConfig(), size=16, channels=1, conditions=10)
        fakes = game.generator(batch.noise, batch.condition)
        game.discriminator_step(batch, fakes.detach(), gamma=1.0)["loss"].backward()
        game.generator_step(batch, fakes)["loss"].backward()
    """

    def __init__(self, model: ModelConfig, loss: LossConfig, *, size: int, channels: int, conditions: int = 0) -> None:
        super().__init__()
        if model.condition == "none" and (loss.matching or loss.contrast):
            raise ValueError(f"loss: matching={loss.matching}, contrast={loss.contrast}: both need a condition, not 'none'")
        self.loss = loss
        self.generator = Generator(model, size=size, channels=channels, conditions=conditions)
        self.discriminator = Discriminator(model, size=size, channels=channels, conditions=conditions)

    def discriminator_step(self, batch: Batch, fakes: Tensor, *, gamma: float = 0.0) -> dict[str, Tensor]:
        """What the discriminator loses. `gamma`: the weight of the penalties in this step; 0 leaves them out.

        Backward: to the discriminator's parameters, with gamma through its gradient.
        """
        real, fake = batch.images.detach(), fakes.detach()
        penalized = [x for name, x in (("r1", real), ("r2", fake)) if gamma and name in self.loss.penalty]
        for pictures in penalized:
            pictures.requires_grad_()
        features = self.discriminator.features(real, sizes=batch.sizes)
        scores = self.discriminator.score(features, batch.condition)
        fake_scores = self.discriminator(fake, batch.condition, sizes=batch.sizes)
        columns = {"play": discriminator_losses(scores, fake_scores, kind=self.loss.kind, sizes=batch.sizes)}
        if penalized:
            found = squared_gradients([scores, fake_scores], penalized)
            columns["penalty"] = torch.stack(found).sum(0) / 2
        if self.loss.matching and batch.condition is not None:
            wrong, differs = mismatched(batch.condition, shift=batch.shift, sizes=batch.sizes)
            wrong_scores = self.discriminator.score(features, wrong)
            columns["matching"] = differs.to(scores.dtype) * mismatch_losses(scores, wrong_scores, kind=self.loss.kind)
        columns["real score"], columns["fake score"] = scores.detach(), fake_scores.detach()
        means = mean_columns(columns)
        loss = means["play"] + gamma * means.get("penalty", 0.0) + self.loss.matching * means.get("matching", 0.0)
        if self.loss.contrast:
            means["contrast"] = self._contrast(features, batch)
            loss = loss + self.loss.contrast * means["contrast"]
        return {"loss": loss, **{name: mean.detach() for name, mean in means.items()}}

    def generator_step(self, batch: Batch, fakes: Tensor) -> dict[str, Tensor]:
        """What the generator loses. Backward: to `fakes`, and to the generator's parameters if they come from there."""
        with frozen(self.discriminator):
            with torch.no_grad():
                if is_relativistic(self.loss.kind):
                    scores = self.discriminator(batch.images, batch.condition, sizes=batch.sizes)
                else:
                    scores = batch.images.new_zeros(len(batch.images))
            features = self.discriminator.features(fakes, sizes=batch.sizes)
            fake_scores = self.discriminator.score(features, batch.condition)
            losses = generator_losses(scores, fake_scores, kind=self.loss.kind, sizes=batch.sizes)
            means = mean_columns({"play": losses})
            loss = means["play"]
            if self.loss.contrast:
                means["contrast"] = self._contrast(features, batch)
                loss = loss + self.loss.contrast * means["contrast"]
        return {"loss": loss, **{name: mean.detach() for name, mean in means.items()}}

    def _contrast(self, features: Tensor, batch: Batch) -> Tensor:
        """Each picture belongs to its condition among all of the global batch: a class, as embedded, or a vector."""
        assert batch.condition is not None and batch.ids is not None  # __init__ saw to it
        pictures, conditions = self.discriminator.pairs(features, batch.condition)
        return clip_loss(pictures, conditions, 1 / self.loss.temperature, ids=batch.ids, sizes=batch.sizes)


@contextmanager
def frozen(network: nn.Module) -> Iterator[None]:
    """Inside, what is computed has no gradient for the parameters of `network`: only for what goes through it."""
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_()

"""The game of the two networks: what each loses in a step, over the global batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from unisono.contrastive import clip_loss
from unisono_models.gan.config import LossConfig, ModelConfig
from unisono_models.gan.game.batches import Batch
from unisono_models.gan.game.losses import (
    discriminator_losses,
    generator_losses,
    is_relativistic,
    mean_columns,
    mismatch_losses,
)
from unisono_models.gan.game.matching import mismatched
from unisono_models.gan.game.penalties import squared_gradients
from unisono_models.gan.networks.discriminator import Discriminator
from unisono_models.gan.networks.generator import Generator


class Game(nn.Module):
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

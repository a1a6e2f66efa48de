"""The losses of both networks over the global batch: adversarial, R1 and R2 penalties, matching and contrastive.

In all functions, `real` and `fake` are the scores (n,) of this rank's real and generated images; row i of both has the same
condition. A loss is the mean of the per-row losses over the global batch.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import relu, softplus

from unisono.collectives import Group, all_gather, all_reduce, exchange_sizes
from unisono.collectives.groups import resolve_group
from unisono.contrastive import clip_loss
from unisono_models.gan.config import AugmentConfig, LossConfig, ModelConfig
from unisono_models.gan.data.augment import change_images
from unisono_models.gan.data.loader import Batch
from unisono_models.gan.model.discriminator import Discriminator
from unisono_models.gan.model.generator import Generator

LossKind = Literal["paired", "all_pairs", "non_saturating", "hinge"]


class GAN(nn.Module):
    """The generator, the discriminator and their losses. All ranks call it, each with its rows of the global batch.

    The losses are the same on every rank. Call backward on "loss"; after the gradients are averaged over the ranks
    (GradientSync does that), they are those of the global loss. The other losses are detached, for the log.

    Example:
        gan = GAN(ModelConfig(), LossConfig(), size=16, channels=1, conditions=10)
        fakes = gan.generator(batch.noise, batch.condition)
        gan.discriminator_loss(batch, fakes.detach(), gamma=1.0)["loss"].backward()
        gan.generator_loss(batch, fakes)["loss"].backward()
    """

    def __init__(
        self,
        model: ModelConfig,
        loss: LossConfig,
        *,
        size: int,
        channels: int,
        conditions: int = 0,
        augment: AugmentConfig | None = None,
    ) -> None:
        super().__init__()
        if model.condition == "none" and (loss.matching or loss.contrast):
            raise ValueError(f"loss: matching={loss.matching}, contrast={loss.contrast}: both need a condition, not 'none'")
        self.loss = loss
        self.augment = augment or AugmentConfig()
        self.generator = Generator(model, size=size, channels=channels, conditions=conditions)
        self.discriminator = Discriminator(model, size=size, channels=channels, conditions=conditions)

    def discriminator_loss(self, batch: Batch, fakes: Tensor, *, gamma: float = 0.0) -> dict[str, Tensor]:
        """Return the losses of the discriminator. `gamma` is the weight of the penalties; 0 leaves them out.

        Backward: to the parameters of the discriminator; for the penalties through the gradient of its scores.
        """
        real = batch.images.detach()
        fake = fakes.detach()
        penalized = [images for name, images in (("r1", real), ("r2", fake)) if gamma and name in self.loss.penalty]
        for images in penalized:
            images.requires_grad_()
        features = self.discriminator.features(self._change(real, batch.real_changes), sizes=batch.sizes)
        scores = self.discriminator.score(features, batch.condition)
        fake_scores = self.discriminator(self._change(fake, batch.fake_changes), batch.condition, sizes=batch.sizes)
        rows = {"adversarial": discriminator_losses(scores, fake_scores, kind=self.loss.kind, sizes=batch.sizes)}
        if penalized:
            rows["penalty"] = torch.stack(squared_gradients([scores, fake_scores], penalized)).sum(0) / 2
        if self.loss.matching and batch.condition is not None:
            wrong, differs = mismatched_conditions(batch.condition, shift=batch.shift, sizes=batch.sizes)
            wrong_scores = self.discriminator.score(features, wrong)
            rows["matching"] = differs.to(scores.dtype) * mismatch_losses(scores, wrong_scores, kind=self.loss.kind)
        rows["real score"] = scores.detach()
        rows["fake score"] = fake_scores.detach()
        means = global_means(rows)
        loss = means["adversarial"] + gamma * means.get("penalty", 0.0) + self.loss.matching * means.get("matching", 0.0)
        if self.loss.contrast:
            means["contrast"] = self._contrastive_loss(features, batch)
            loss = loss + self.loss.contrast * means["contrast"]
        return {"loss": loss, **{name: mean.detach() for name, mean in means.items()}}

    def generator_loss(self, batch: Batch, fakes: Tensor) -> dict[str, Tensor]:
        """Return the losses of the generator.

        Backward: to `fakes`, and through them to the parameters of the generator; not to the discriminator.
        """
        with frozen(self.discriminator):
            with torch.no_grad():
                if is_relativistic(self.loss.kind):
                    real = self._change(batch.images, batch.real_changes)
                    scores = self.discriminator(real, batch.condition, sizes=batch.sizes)
                else:
                    scores = batch.images.new_zeros(len(batch.images))
            features = self.discriminator.features(self._change(fakes, batch.fake_changes), sizes=batch.sizes)
            fake_scores = self.discriminator.score(features, batch.condition)
            losses = generator_losses(scores, fake_scores, kind=self.loss.kind, sizes=batch.sizes)
            means = global_means({"adversarial": losses})
            loss = means["adversarial"]
            if self.loss.contrast:
                means["contrast"] = self._contrastive_loss(features, batch)
                loss = loss + self.loss.contrast * means["contrast"]
        return {"loss": loss, **{name: mean.detach() for name, mean in means.items()}}

    def _change(self, images: Tensor, numbers: Tensor | None) -> Tensor:
        return images if numbers is None else change_images(images, numbers, self.augment)

    def _contrastive_loss(self, features: Tensor, batch: Batch) -> Tensor:
        assert batch.condition is not None and batch.ids is not None  # __init__ rejects condition "none"
        images, conditions = self.discriminator.contrastive_pairs(features, batch.condition)
        return clip_loss(images, conditions, 1 / self.loss.temperature, ids=batch.ids, sizes=batch.sizes)


def discriminator_losses(
    real: Tensor, fake: Tensor, *, kind: LossKind, sizes: Sequence[int] | None = None, group: Group = None
) -> Tensor:
    """Return the adversarial loss of the discriminator for each row, (n,).

    paired: softplus(fake_i - real_i), the relativistic loss of Jolicoeur-Martineau 2018 and R3GAN. all_pairs: the mean of
    softplus(fake_j - real_i) over all fakes j of the global batch. non_saturating: softplus(-real) + softplus(fake). hinge:
    relu(1 - real) + relu(1 + fake).

    Backward: to the scores of all ranks (the true adjoint of all_gather).

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
    real: Tensor, fake: Tensor, *, kind: LossKind, sizes: Sequence[int] | None = None, group: Group = None
) -> Tensor:
    """Return the adversarial loss of the generator for each row, (n,). It uses `real` only if `is_relativistic(kind)`."""
    if kind == "paired":
        return softplus(real - fake)
    if kind == "all_pairs":
        return softplus(all_gather(real, sizes=sizes, group=group)[None, :] - fake[:, None]).mean(1)
    if kind == "non_saturating":
        return softplus(-fake)
    return -fake


def is_relativistic(kind: LossKind) -> bool:
    """Return whether the loss of the generator depends on the scores of real images."""
    return kind in ("paired", "all_pairs")


def mismatch_losses(right: Tensor, wrong: Tensor, *, kind: LossKind) -> Tensor:
    """Return the loss of the discriminator for real images with a wrong condition, (n,): they count as fakes.

    right, wrong: scores of the same images with the right and the wrong condition. Relativistic losses compare the two.
    """
    if is_relativistic(kind):
        return softplus(wrong - right)
    return softplus(wrong) if kind == "non_saturating" else relu(1 + wrong)


def mismatched_conditions(
    condition: Tensor, *, shift: int, sizes: Sequence[int] | None = None, group: Group = None
) -> tuple[Tensor, Tensor]:
    """Return for each row the condition `shift` rows further in the global batch, and whether it differs from the row's own.

    After the last row of the global batch comes the first. Rows whose two conditions are equal are no mismatch: the second
    result, bool (n,), is False there.

    condition: (n,) labels or (n, d) vectors of this rank.

    Backward: the gradient of a condition goes to the rank that holds it.

    Example:
        >>> mismatched_conditions(torch.tensor([3, 3, 5]), shift=1)
        (tensor([3, 5, 3]), tensor([False,  True,  True]))
    """
    if sizes is None:
        sizes = exchange_sizes(condition, group=group)
    all_conditions = all_gather(condition, sizes=sizes, group=group)
    first = sum(sizes[: resolve_group(group).rank])
    rows = (torch.arange(len(condition), device=condition.device) + first + shift) % max(1, len(all_conditions))
    shifted = all_conditions[rows]
    differs = shifted != condition
    return shifted, differs.flatten(1).any(1) if differs.ndim > 1 else differs


def squared_gradients(scores: Sequence[Tensor], images: Sequence[Tensor]) -> list[Tensor]:
    """Return for each image the squared norm of the gradient of all ranks' scores, (n,) for each tensor in `images`.

    At real images this is the R1 penalty (Mescheder et al. 2018), at fakes R2. All ranks call it: with the minibatch standard
    deviation, the scores of other ranks depend on an image, too. Each rank gives its own scores, so that each counts once. A
    loss that all ranks compute alike would count W times on W ranks, and its squared gradients W² times: divide it by W before.

    scores: (n,) tensors that were computed from `images`, which require gradients.

    Backward: through the gradient, and so a second time through the collectives.

    Example:
        >>> x = torch.tensor([[1.0], [2.0]], requires_grad=True)
        >>> squared_gradients([(x**2).sum(1)], [x])
        [tensor([ 4., 16.], grad_fn=<SumBackward1>)]
    """
    total = torch.stack([score.sum() for score in scores]).sum()
    gradients = torch.autograd.grad(total, list(images), create_graph=True)
    return [gradient.square().flatten(1).sum(1) for gradient in gradients]


def global_means(rows: dict[str, Tensor], *, group: Group = None) -> dict[str, Tensor]:
    """Return the mean of each (n,) tensor over the global batch, on every rank, with one collective.

    Backward: all ranks call it; the gradients are right once they are averaged over the ranks.

    Example:
        >>> global_means({"loss": torch.tensor([1.0, 3.0])})
        {'loss': tensor(2.)}
    """
    stacked = torch.stack(list(rows.values()))
    wide = torch.float32 if stacked.device.type == "mps" else torch.float64  # mps has no float64
    sums_and_count = torch.cat([stacked.sum(1, dtype=wide), stacked.new_full((1,), stacked.shape[1], dtype=wide)])
    totals = all_reduce(sums_and_count, group=group)
    means = (totals[:-1] / totals[-1]).to(stacked.dtype)
    return dict(zip(rows, means.unbind(), strict=True))


@contextmanager
def frozen(network: nn.Module) -> Iterator[None]:
    """Compute without gradients for the parameters of `network`; its inputs still get theirs."""
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_()

"""The training module: the model and its losses in one module, which DDP or FSDP2 can wrap."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unisono.collectives import global_mean
from unisono.contrastive import ClipLoss, NTXentLoss, SigmoidLoss, SupConLoss, cached_backward
from unisono_models.clip.config import LossConfig
from unisono_models.clip.model import Clip
from unisono_models.training.errors import UserError
from unisono_models.training.phases import phase
from unisono_models.training.randomness import dropout_keys, uniform, use_dropout_keys

BatchPart = Literal["all", "images", "views", "text"]


class ClipTrainingModule(nn.Module):
    """The model and its losses. Every loss is that of the global batch, however it is split over ranks.

    A batch is a dict: images (and views, the second views, if view_weight is set), text as the text tower takes it, concepts,
    index (the samples), step and seed.
    """

    def __init__(self, clip: Clip, config: LossConfig) -> None:
        super().__init__()
        self.clip, self.config = clip, config
        self.pairs = _make_pair_loss(config)
        self.images = SupConLoss(temperature=config.temperature, exchange=config.exchange)
        self.views = NTXentLoss(temperature=config.temperature, exchange=config.exchange)
        self.language = nn.Linear(clip.text.features, clip.tokenizer.vocabulary) if config.language_weight else None
        if config.language_weight and (config.micro_batch or clip.config.text.frozen):
            raise UserError("--loss.language-weight works neither with --loss.micro-batch nor with --model.text.frozen")
        if config.micro_batch and clip.image.syncs_batch_norm:
            raise UserError(
                f"--loss.micro-batch {config.micro_batch}: batch norm, which {clip.config.image.model} has, needs the whole "
                "batch at once. Use --model.image.batch-norm frozen, or another tower"
            )

    def forward(self, batch: Mapping[str, Any], part: BatchPart = "all") -> Tensor | dict[str, Tensor]:
        """Return the losses of a batch by name, with their weighted sum as "loss"; or the unit features of one part of it."""
        if part != "all":
            return self._encode(batch, part)
        features = [self._encode(batch, each) for each in self.parts]
        with phase("loss"):
            losses = self.losses(*features, concepts=batch["concepts"])
        if self.language is not None:
            losses["language"] = self._masked_language_loss(batch)
            losses["loss"] = losses["loss"] + self.config.language_weight * losses["language"]
        return losses

    @property
    def parts(self) -> tuple[BatchPart, ...]:
        """The parts of a batch that the losses need."""
        return ("images", "text", "views") if self.config.view_weight else ("images", "text")

    def losses(self, images: Tensor, text: Tensor, views: Tensor | None = None, *, concepts: Tensor) -> dict[str, Tensor]:
        """Compute the losses of features, by name."""
        ids = None if self.config.same_concept == "negative" else concepts
        total = self.pairs(images, text, ids=ids)
        losses = {"pairs": total}
        if self.config.image_weight:
            # If no concept occurs twice in the batch, supcon_loss is NaN, with zero gradients.
            losses["images"] = torch.nan_to_num(self.images(images, concepts))
            total = total + self.config.image_weight * losses["images"]
        if views is not None:
            losses["views"] = self.views(images, views)
            total = total + self.config.view_weight * losses["views"]
        return {"loss": total} | losses

    def _encode(self, batch: Mapping[str, Any], part: BatchPart) -> Tensor:
        with use_dropout_keys(dropout_keys(batch["seed"], batch["step"], batch["index"])):
            tower = self.clip.text if part == "text" else self.clip.image
            features = tower(batch[part])
        return F.normalize(features if features.dtype == torch.float64 else features.float(), dim=1)

    def _masked_language_loss(self, batch: Mapping[str, Any]) -> Tensor:
        """Compute the cross entropy of masked tokens, 15 of 100, over the global batch."""
        assert self.language is not None
        tokens, index, step, seed = batch["text"], batch["index"], batch["step"], batch["seed"]
        masked = (uniform(seed, "masked", step, index, tokens.shape[1:]) < 0.15) & (tokens >= 0)
        seen = torch.where(masked, self.clip.tokenizer.mask_token, tokens)
        with use_dropout_keys(dropout_keys(seed, step, index)):
            states, _ = self.clip.text.states(seen)
        logits = self.language(states[masked])
        logits = logits.float() if logits.dtype == torch.bfloat16 else logits
        return global_mean(F.cross_entropy(logits, tokens[masked], reduction="none"))


def backward(model: nn.Module, module: ClipTrainingModule, batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """Run forward and backward of one batch, and return the detached losses. `model`: `module` as DDP or FSDP2 wraps it.

    With loss.micro_batch the activations of that number of rows are in memory at a time (see cached_backward).
    """
    if not module.config.micro_batch:
        with phase("forward"):
            losses: dict[str, Tensor] = model(batch)
        with phase("backward"):
            losses["loss"].backward()
        return {name: value.detach() for name, value in losses.items()}

    found: dict[str, Tensor] = {}

    def loss(*features: Tensor) -> Tensor:
        with phase("loss"):
            found.update(module.losses(*features, concepts=batch["concepts"]))
        return found["loss"]

    def encoder(part: BatchPart) -> Callable[[Any], Any]:
        def encode(rows: Any) -> Any:
            with phase("forward"):
                return model(rows, part)

        return encode

    encoders = [encoder(part) for part in module.parts]
    batches = [{key: batch[key] for key in (part, "index", "step", "seed")} for part in module.parts]
    with phase("backward"):
        cached_backward(encoders, batches, loss, micro_batch=module.config.micro_batch, modules=[model])
    return {name: value.detach() for name, value in found.items()}


def _make_pair_loss(config: LossConfig) -> ClipLoss | SigmoidLoss:
    options: dict[str, Any] = {"exchange": config.exchange}
    if config.init_scale is not None:
        options["init_scale"] = config.init_scale
    if config.same_concept != "negative":
        options["same_id"] = config.same_concept
    if config.kind == "clip":
        if config.micro_batch:  # micro batches are used if memory is scarce: logits must not take it either
            options["logits"] = "recompute"
        return ClipLoss(label_smoothing=config.label_smoothing, decoupled=config.decoupled, **options)
    if config.decoupled or config.label_smoothing:
        raise UserError("--loss.kind sigmoid has neither --loss.decoupled nor --loss.label-smoothing")
    return SigmoidLoss(**options)

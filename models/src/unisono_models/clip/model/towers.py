"""The two towers: a timm model and a transformers encoder, each with a head that maps to the common feature space."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import grad

from unisono.dataparallel import SyncBatchNorm
from unisono_models.clip.config import ImageConfig, TextConfig
from unisono_models.clip.model.trunks import describe_text_model, handle_batch_norm, make_image_trunk, make_text_trunk
from unisono_models.training.errors import UserError
from unisono_models.training.randomness import dropout_keys, replace_dropout, use_dropout_keys


class ImageTower(nn.Module):
    """Maps images, or the trunk's features of them, to features (n, width)."""

    def __init__(self, config: ImageConfig, width: int) -> None:
        super().__init__()
        made = make_image_trunk(config)
        self.config = replace(config, kwargs=made.kwargs)
        self.trunk = made.model if config.batch_norm == "sync" else handle_batch_norm(made.model, config)
        mean, std = (torch.tensor(made.model.pretrained_cfg[key]).view(3, 1, 1) for key in ("mean", "std"))
        self.register_buffer("mean", mean, persistent=False)
        self.register_buffer("std", std, persistent=False)
        self.maps, self.grid, self.size = made.maps, config.grid, made.size
        self.frozen = config.frozen
        self.features = self._count_features(config.size)
        """The width of the trunk's features."""
        self.head = make_head(self.features, config.hidden, width, config.dropout)
        if config.frozen:
            self.trunk.requires_grad_(False).eval()
        images = next(self.trunk.parameters()).new_zeros(2, 3, config.size, config.size)
        _check_randomness(self, images, f"--model.image.model {config.model} with --model.image.kwargs {made.kwargs}")
        self._without_rows = False
        if config.batch_norm == "sync":  # after the tries above, which one rank may make alone
            self.trunk = handle_batch_norm(self.trunk, config)
            for norm in self._sync_batch_norms():
                norm.register_forward_pre_hook(self._drop_dummy_row)
                norm.register_forward_hook(self._restore_dummy_row)

    @property
    def syncs_batch_norm(self) -> bool:
        """Whether the ranks exchange the statistics of batch norm in training."""
        return any(True for _ in self._sync_batch_norms())

    @property
    def standardize(self) -> Standardize:
        """The first layer of the head."""
        layer: Standardize = self.head[0]  # type: ignore[assignment]
        return layer

    def forward(self, images: Tensor) -> Tensor:
        """`images`: (n, 3, size, size) in [0, 1], or features of the trunk, (n, features)."""
        features: Tensor = self.head(images if images.ndim == 2 else self.encode(images))
        return features

    def encode(self, images: Tensor) -> Tensor:
        """Compute the trunk's features of images, (n, features)."""
        some = images if len(images) else images.new_zeros(1, *images.shape[1:])  # a trunk needs a row
        self._without_rows = not len(images)
        x = (some - self.get_buffer("mean")) / self.get_buffer("std")
        if x.shape[2:] != self.size:
            x = F.interpolate(x, self.size, mode="bilinear", antialias=True)
        x = x.contiguous(memory_format=torch.channels_last)
        trunk = cast(Any, self.trunk)
        if not self.maps:
            features: Tensor = trunk(x)
            return features[: len(images)]
        maps = trunk.forward_intermediates(x, indices=self.maps, intermediates_only=True)
        return torch.cat([F.adaptive_avg_pool2d(each, self.grid).flatten(1) for each in maps], 1)[: len(images)]

    def _count_features(self, size: int) -> int:
        """Encode one image. Also freeze parameters that the features do not depend on: DDP would wait for their gradients."""
        was_training = self.trunk.training
        self.trunk.eval()
        with torch.set_grad_enabled(not self.frozen):
            features = self.encode(next(self.trunk.parameters()).new_zeros(1, 3, size, size))
        self.trunk.train(was_training)
        if features.ndim != 2:
            raise UserError(
                f"--model.image.kwargs: with {self.config.kwargs} {self.config.model} gives {tuple(features.shape)} for one "
                "image, must be (1, features): do not change its pooling"
            )
        if not self.frozen:
            _freeze_unused(self.trunk, features)
        return features.shape[1]

    def _sync_batch_norms(self) -> Iterator[SyncBatchNorm]:
        return (layer for layer in self.trunk.modules() if isinstance(layer, SyncBatchNorm))

    def _drop_dummy_row(self, norm: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """Keep the row that `encode` adds on a rank without images out of the statistics of all ranks."""
        if not (self._without_rows and norm.training):
            return None
        self._dummy_row = inputs[0]
        return (inputs[0][:0],)

    def _restore_dummy_row(self, norm: nn.Module, _: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        if not (self._without_rows and norm.training):
            return None
        return self._dummy_row + output.sum()  # the sum of nothing is 0, and its backward takes part in that of the other ranks

    def train(self, mode: bool = True) -> ImageTower:
        super().train(mode)
        if self.frozen:
            self.trunk.eval()
        return self


class TextTower(nn.Module):
    """Maps tokens, or the trunk's features of them, to features (n, width)."""

    def __init__(self, config: TextConfig, width: int, *, vocabulary: int) -> None:
        super().__init__()
        trunk = make_text_trunk(config, vocabulary=vocabulary)
        if getattr(trunk, "pooler", None) is not None:
            trunk.pooler = None  # BERT's. We pool ourselves, and DDP would wait for gradients of unused parameters
        self.trunk = trunk
        self.head = make_head(self.features, config.hidden, width, config.dropout)
        self.pooling, self.frozen = config.pooling, config.frozen
        if config.frozen:
            self.trunk.requires_grad_(False).eval()
        tokens = next(self.trunk.parameters()).new_zeros(2, 1, dtype=torch.int64)
        name = describe_text_model(config, trunk.config)
        if tokens.device.type == "cpu":  # transformers looks into the tokens, and others have no content yet
            self._try(tokens, name)
        _check_randomness(self, tokens, name)

    def _try(self, tokens: Tensor, name: str) -> None:
        """Encode some tokens. Also freeze parameters that the features do not depend on, as in the image tower."""
        was_training = self.trunk.training
        self.trunk.eval()
        try:
            with torch.set_grad_enabled(not self.frozen):
                features = self.encode(tokens)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UserError(f"{name}: it is no encoder of text: {error}. Choose another, such as bert") from error
        if not self.frozen:
            _freeze_unused(self.trunk, features)
        self.trunk.train(was_training)

    @property
    def features(self) -> int:
        """The width of the trunk's features."""
        width: int = self.trunk.config.hidden_size
        return width

    @property
    def standardize(self) -> Standardize:
        """The first layer of the head."""
        layer: Standardize = self.head[0]  # type: ignore[assignment]
        return layer

    def forward(self, text: Tensor) -> Tensor:
        """`text`: tokens, int64 (n, length) padded with -1, or features of the trunk, (n, features)."""
        features: Tensor = self.head(text if text.is_floating_point() else self.encode(text))
        return features

    def encode(self, tokens: Tensor) -> Tensor:
        """Compute the trunk's features of captions, (n, features)."""
        states, mask = self.states(tokens)
        if self.pooling == "mean":
            pooled = (states * mask).sum(1) / mask.sum(1).clamp(min=1)
        elif self.pooling == "first":
            pooled = states[:, 0]
        else:
            last = mask.squeeze(2).long().sum(1).clamp(min=1) - 1
            pooled = states[torch.arange(len(states), device=states.device), last]
        return pooled

    def states(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the trunk's features of each token, and a mask (n, length, 1) of tokens that are not padding."""
        some = tokens if len(tokens) else tokens.new_zeros(1, tokens.shape[1])  # an encoder needs a row
        output: Any = self.trunk(input_ids=some.clamp(min=0), attention_mask=(some >= 0).long())
        states: Tensor = output.last_hidden_state[: len(tokens)]
        return states, (tokens >= 0).unsqueeze(2).to(states.dtype)

    def train(self, mode: bool = True) -> TextTower:
        super().train(mode)
        if self.frozen:
            self.trunk.eval()
        return self


class Standardize(nn.Module):
    """Subtracts a fixed mean and divides by a fixed deviation, those of the data given to `fit`; before it 0 and 1."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("deviation", torch.ones(features))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.get_buffer("mean")) / self.get_buffer("deviation")

    @torch.no_grad()
    def fit(self, x: Tensor) -> None:
        """Set the mean and the deviation to those of the rows of `x`, which must be the same on every rank."""
        self.get_buffer("mean").copy_(x.mean(0))
        self.get_buffer("deviation").copy_(x.std(0, correction=0) + 1e-3)


def make_head(features: int, hidden: int, width: int, dropout: float) -> nn.Sequential:
    """Make the head from a trunk's features to the common space: a linear layer, or two with a hidden layer between."""
    layers: list[nn.Module] = [nn.Linear(features, width, bias=False)]
    if hidden:
        layers = [nn.Linear(features, hidden), nn.GELU(), nn.Linear(hidden, width)]
    return nn.Sequential(Standardize(features), nn.Dropout(dropout), *layers)


def _freeze_unused(trunk: nn.Module, features: Tensor) -> None:
    """Freeze the parameters that `features` do not depend on."""
    parameters = [parameter for parameter in trunk.parameters() if parameter.requires_grad]
    with torch.enable_grad():
        found_gradients = grad(features.sum(), parameters, allow_unused=True)
    for parameter, found in zip(parameters, found_gradients, strict=True):
        parameter.requires_grad_(found is not None)


def _check_randomness(tower: ImageTower | TextTower, rows: Tensor, what: str) -> None:
    """Raise an error if the trunk draws from torch's generator in training: this would depend on the split over ranks.

    It runs a copy that shares the parameters: replace_dropout is for the whole model, and batch norm changes buffers.
    """
    first = next(tower.parameters())
    if tower.frozen or first.device.type != "cpu" or type(first) is not nn.Parameter:  # meta and fake tensors draw nothing
        return
    tried = replace_dropout(deepcopy(tower, {id(parameter): parameter for parameter in tower.parameters()})).train()
    samples = dropout_keys(0, 0, torch.arange(len(rows)))
    with torch.random.fork_rng(devices=[]), torch.no_grad(), use_dropout_keys(samples):
        before = torch.get_rng_state()
        try:
            tried(rows)
        except Exception as error:  # of the model's own code: it is not made for this use
            raise UserError(f"{what}: it cannot be trained as a tower: {type(error).__name__}: {error}") from error
        drawn = not torch.equal(torch.get_rng_state(), before)
    if drawn:
        raise UserError(
            f"{what}: it draws random numbers in training that do not depend on the sample: a step would depend on the split "
            "over ranks. Set its dropout rates to 0, or choose a model whose dropout is layers (nn.Dropout, DropPath)"
        )

"""The two towers: a timm model and a transformers encoder, each with a head into the common space."""

from __future__ import annotations

from typing import Any

import timm
import torch
import transformers
from timm.layers.norm_act import freeze_batch_norm_2d
from torch import Tensor, nn

from unisono_models.clip.config import ImageConfig, TextConfig
from unisono_models.clip.weights import load_in_order, text_folder
from unisono_models.training.dropout import own_dropout


class ImageTower(nn.Module):
    """Pictures, (n, 3, size, size) in [0, 1], to features (n, width)."""

    def __init__(self, config: ImageConfig, width: int) -> None:
        super().__init__()
        trunk = _image_trunk(config)
        self.trunk = _without_batch_statistics(own_dropout(trunk), config)
        mean, std = (torch.tensor(trunk.pretrained_cfg[key]).view(3, 1, 1) for key in ("mean", "std"))
        self.register_buffer("mean", mean, persistent=False)
        self.register_buffer("std", std, persistent=False)
        self.head = make_head(trunk.num_features, config.hidden, width)
        self.frozen = config.frozen
        if config.frozen:
            self.trunk.requires_grad_(False).eval()

    def forward(self, images: Tensor) -> Tensor:
        mean, std = self.get_buffer("mean"), self.get_buffer("std")
        x = (images if len(images) else images.new_zeros(1, *images.shape[1:])).sub(mean).div(std)
        features: Tensor = self.head(self.trunk(x))
        return features[: len(images)]

    def train(self, mode: bool = True) -> ImageTower:
        super().train(mode)
        if self.frozen:
            self.trunk.eval()
        return self


class TextTower(nn.Module):
    """Tokens, or the trunk's features of them, to features (n, width)."""

    def __init__(self, config: TextConfig, width: int, *, vocabulary: int) -> None:
        super().__init__()
        trunk = _text_trunk(config, vocabulary)
        if getattr(trunk, "pooler", None) is not None:
            trunk.pooler = None  # of BERT: pooling is ours, and parameters without a gradient would stall DDP
        self.trunk = own_dropout(trunk)
        self.head = own_dropout(nn.Sequential(nn.Dropout(config.dropout), make_head(self.features, config.hidden, width)))
        self.pooling, self.frozen = config.pooling, config.frozen
        if config.frozen:
            self.trunk.requires_grad_(False).eval()

    @property
    def features(self) -> int:
        """How wide the trunk's features are."""
        width: int = self.trunk.config.hidden_size  # type: ignore[union-attr, assignment]
        return width

    def forward(self, text: Tensor) -> Tensor:
        """`text`: tokens, int64 (n, length) padded with -1, or features of the trunk, (n, features)."""
        features: Tensor = self.head(text if text.is_floating_point() else self.encode(text))
        return features

    def encode(self, tokens: Tensor) -> Tensor:
        """The trunk's features of captions, one row each."""
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
        """The trunk's features of each token, and a mask (n, length, 1) of the tokens that are there."""
        some = tokens if len(tokens) else tokens.new_zeros(1, tokens.shape[1])  # an encoder has to have a row
        output: Any = self.trunk(input_ids=some.clamp(min=0), attention_mask=(some >= 0).long())
        states: Tensor = output.last_hidden_state[: len(tokens)]
        return states, (tokens >= 0).unsqueeze(2).to(states.dtype)

    def train(self, mode: bool = True) -> TextTower:
        super().train(mode)
        if self.frozen:
            self.trunk.eval()
        return self


def make_head(features: int, hidden: int, width: int) -> nn.Module:
    """A linear map, or one with a hidden layer."""
    if not hidden:
        return nn.Linear(features, width, bias=False)
    return nn.Sequential(nn.Linear(features, hidden), nn.GELU(), nn.Linear(hidden, width))


def _text_trunk(config: TextConfig, vocabulary: int) -> Any:
    if config.model:
        settings = transformers.AutoConfig.from_pretrained(text_folder(config.model))
    elif "model_type" in config.config:
        fields: dict[str, Any] = {"vocab_size": vocabulary} | config.config
        settings = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    else:
        raise ValueError(f"text.config: {config.config} has no model_type, such as bert; or give text.model")
    for name in ("attention_probs_dropout_prob", "attention_dropout"):
        if hasattr(settings, name):
            setattr(settings, name, 0.0)  # it is drawn inside a fused function, where no mask of ours reaches
    if config.model:
        return transformers.AutoModel.from_pretrained(text_folder(config.model), config=settings)
    return transformers.AutoModel.from_config(settings)  # type: ignore[no-untyped-call]


def _image_trunk(config: ImageConfig) -> Any:
    packaged = config.pretrained.startswith("package:")
    from_file = config.pretrained not in ("", "timm") and not packaged
    overlay: dict[str, Any] = {"pretrained_cfg_overlay": {"file": config.pretrained}} if from_file else {}
    loads = from_file or config.pretrained == "timm"
    trunk = timm.create_model(config.model, pretrained=loads, num_classes=0, **overlay, **config.kwargs)
    if packaged:
        load_in_order(trunk, config.pretrained)
    return trunk


def _without_batch_statistics(trunk: nn.Module, config: ImageConfig) -> nn.Module:
    """The trunk with batch norm dealt with as asked."""
    found = [name for name, layer in trunk.named_modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]
    if not found or config.batch_norm == "local":
        return trunk
    if config.batch_norm == "frozen":
        frozen: nn.Module = freeze_batch_norm_2d(trunk)  # type: ignore[no-untyped-call]
        return frozen
    raise ValueError(
        f"image.model {config.model}: {len(found)} layers of batch norm, the first one {found[0]}: a step would depend on the "
        "split over ranks. Choose another norm (image.kwargs) or model, or image.batch_norm=frozen (pretrained) or local"
    )

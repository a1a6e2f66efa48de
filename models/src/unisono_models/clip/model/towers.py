"""The two towers: a timm model and a transformers encoder, each with a head that maps to the common feature space."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any, cast

import timm
import torch
import torch.nn.functional as F
import transformers
from timm.layers.norm_act import freeze_batch_norm_2d
from torch import Tensor, nn
from torch.autograd import grad

from unisono_models.clip.config import ImageConfig, TextConfig
from unisono_models.datasets.package_files import find_transformers_folder, locate_package
from unisono_models.training.randomness import dropout_keys, replace_dropout, use_dropout_keys


def load_package_weights(model: nn.Module, name: str) -> None:
    """Load the only .pth or .safetensors file of package:NAME into `model`: tensor by tensor in order, as their names differ.

    The number of tensors and every shape must agree. No code in the file is executed.
    """
    files = sorted(x for x in Path(locate_package(name)).rglob("*") if x.suffix in (".pth", ".safetensors"))
    if len(files) != 1:
        raise FileNotFoundError(f"{name}: the package must have one file of weights, found {[x.name for x in files]}")
    if files[0].suffix == ".pth":
        theirs = torch.load(files[0], map_location="cpu", weights_only=True)
    else:
        from safetensors.torch import load_file

        theirs = load_file(files[0])
    ours = {k: v for k, v in model.state_dict().items() if not k.endswith("num_batches_tracked")}
    theirs = {k: v for k, v in theirs.items() if not k.endswith("num_batches_tracked")}
    if not 0 <= len(theirs) - len(ours) <= 2:  # the last two may be a classifier, which a tower does not have
        raise ValueError(f"{name}: {len(theirs)} tensors, but the model has {len(ours)}: they are of different models")
    values = list(theirs.values())[: len(ours)]
    for (key, own), (other, value) in zip(ours.items(), theirs.items(), strict=False):
        if own.shape != value.shape:
            raise ValueError(f"{name}: {other} of shape {tuple(value.shape)} does not fit {key} of shape {tuple(own.shape)}")
    model.load_state_dict(dict(zip(ours, values, strict=True)), strict=False)


class ImageTower(nn.Module):
    """Maps images, or the trunk's features of them, to features (n, width)."""

    def __init__(self, config: ImageConfig, width: int) -> None:
        super().__init__()
        self.config = config
        trunk, stages = _image_trunk(config)
        self.trunk = _handle_batch_norm(trunk, config)
        mean, std = (torch.tensor(trunk.pretrained_cfg[key]).view(3, 1, 1) for key in ("mean", "std"))
        self.register_buffer("mean", mean, persistent=False)
        self.register_buffer("std", std, persistent=False)
        self.maps, self.grid = stages, config.grid
        self.features = self._count_features(config.size)
        """The width of the trunk's features."""
        self.head = make_head(self.features, config.hidden, width, config.dropout)
        self.frozen = config.frozen
        if config.frozen:
            self.trunk.requires_grad_(False).eval()
        images = next(self.trunk.parameters()).new_zeros(2, 3, config.size, config.size)
        _check_randomness(self, images, f"image.model {config.model} with image.kwargs {config.kwargs}")

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
        x = (some - self.get_buffer("mean")) / self.get_buffer("std")
        x = x.contiguous(memory_format=torch.channels_last)
        trunk = cast(Any, self.trunk)
        if not self.maps:
            features: Tensor = trunk(x)
            return features[: len(images)]
        maps = trunk.forward_intermediates(x, indices=self.maps, intermediates_only=True)
        return torch.cat([F.adaptive_avg_pool2d(each, self.grid).flatten(1) for each in maps], 1)[: len(images)]

    def _count_features(self, size: int) -> int:
        """Encode one image. Also freeze parameters that `maps` do not depend on: DDP would wait for their gradients."""
        was_training = self.trunk.training
        parameters = [p for p in self.trunk.parameters() if p.requires_grad]
        self.trunk.eval()
        with torch.set_grad_enabled(bool(self.maps)):
            features = self.encode(next(self.trunk.parameters()).new_zeros(1, 3, size, size))
        self.trunk.train(was_training)
        if features.ndim != 2:
            raise ValueError(
                f"image.kwargs: with {self.config.kwargs} {self.config.model} gives {tuple(features.shape)} for one image, "
                "must be (1, features): do not change its pooling"
            )
        found = grad(features.sum(), parameters, allow_unused=True) if self.maps else parameters
        for parameter, value in zip(parameters, found, strict=True):
            parameter.requires_grad_(value is not None)
        return features.shape[1]

    def train(self, mode: bool = True) -> ImageTower:
        super().train(mode)
        if self.frozen:
            self.trunk.eval()
        return self


class TextTower(nn.Module):
    """Maps tokens, or the trunk's features of them, to features (n, width)."""

    def __init__(self, config: TextConfig, width: int, *, vocabulary: int) -> None:
        super().__init__()
        trunk = _text_trunk(config, vocabulary)
        if getattr(trunk, "pooler", None) is not None:
            trunk.pooler = None  # BERT's. We pool ourselves, and DDP would wait for gradients of unused parameters
        self.trunk = trunk
        self.head = make_head(self.features, config.hidden, width, config.dropout)
        self.pooling, self.frozen = config.pooling, config.frozen
        if config.frozen:
            self.trunk.requires_grad_(False).eval()
        tokens = next(self.trunk.parameters()).new_zeros(2, 1, dtype=torch.int64)
        _check_randomness(self, tokens, _text_name(config, trunk.config))

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


def _text_trunk(config: TextConfig, vocabulary: int) -> Any:
    if config.model:
        settings = transformers.AutoConfig.from_pretrained(find_transformers_folder(config.model))
    elif "model_type" in config.config:
        fields: dict[str, Any] = {"vocab_size": vocabulary} | config.config
        settings = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    else:
        raise ValueError(f"text.config: {config.config} has no model_type, such as bert. Or use text.model")
    _check_text(settings, config, vocabulary)
    for name in settings.to_dict():
        if "drop" in name and ("attention" in name or "attn" in name):
            setattr(settings, name, 0.0)  # drawn inside a fused kernel, where we cannot make it depend on the sample
    if config.model:
        return transformers.AutoModel.from_pretrained(find_transformers_folder(config.model), config=settings)
    return transformers.AutoModel.from_config(settings)  # type: ignore[no-untyped-call]


def _check_text(settings: Any, config: TextConfig, vocabulary: int) -> None:
    name = _text_name(config, settings)
    if settings.is_encoder_decoder:
        raise ValueError(f"{name}: it has a decoder, too. Choose a model with a single stack, such as bert")
    if settings.vocab_size < vocabulary:
        raise ValueError(f"{name}: it has {settings.vocab_size} tokens, fewer than the {vocabulary} of the tokenizer")
    places = getattr(settings, "max_position_embeddings", None)
    if places and 0 < places < config.tokens:
        raise ValueError(f"text.tokens: {config.tokens} is more than the {places} positions of {name}")


def _text_name(config: TextConfig, settings: Any) -> str:
    return f"text.model {config.model}" if config.model else f"text.config of type {settings.model_type}"


def _image_trunk(config: ImageConfig) -> tuple[Any, list[int]]:
    """Make the timm model; returns it and the indices of the stages in `config.maps`."""
    for name in ("attn_drop_rate", "patch_drop_rate"):
        if config.kwargs.get(name):
            raise ValueError(
                f"image.kwargs: {name}: {config.kwargs[name]} must be 0: its random numbers would depend on the "
                "split over ranks. Use drop_path_rate or image.dropout"
            )
    packaged = config.pretrained.startswith("package:")
    from_file = config.pretrained not in ("", "timm") and not packaged
    if from_file and not Path(config.pretrained).is_file():
        raise FileNotFoundError(
            f"image.pretrained: {config.pretrained}: no such file. For timm's weights use image.pretrained=timm"
        )
    overlay: dict[str, Any] = {"pretrained_cfg_overlay": {"file": config.pretrained}} if from_file else {}
    pretrained = from_file or config.pretrained == "timm"
    trunk: Any = timm.create_model(config.model, pretrained=pretrained, num_classes=0, **overlay, **config.kwargs)
    if packaged:
        load_package_weights(trunk, config.pretrained)
    if config.maps:
        # Layers after the last stage are unused, and DDP would wait for their gradients. The indices that are returned count
        # from the front, because the stages after the last one are gone.
        return trunk, list(trunk.prune_intermediate_layers(list(config.maps), prune_norm=True, prune_head=True))
    return trunk, []


def _handle_batch_norm(trunk: nn.Module, config: ImageConfig) -> nn.Module:
    """Treat batch norm as `config.batch_norm` says."""
    found = [name for name, layer in trunk.named_modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]
    if not found or config.batch_norm == "local":
        return trunk
    if config.batch_norm == "frozen":
        trunk = freeze_batch_norm_2d(trunk)  # type: ignore[no-untyped-call]
        left = [name for name, layer in trunk.named_modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]
        if not left:
            return trunk
        raise ValueError(
            f"image.model {config.model}: image.batch_norm=frozen cannot freeze {left[0]}, which is another kind of batch norm"
        )
    raise ValueError(
        f"image.model {config.model}: {len(found)} layers are batch norm, such as {found[0]}: a step would depend on the "
        "split over ranks. Choose another norm (image.kwargs) or model, or image.batch_norm=frozen (pretrained) or local"
    )


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
        tried(rows)
        drawn = not torch.equal(torch.get_rng_state(), before)
    if drawn:
        raise ValueError(
            f"{what}: it draws random numbers in training that do not depend on the sample: a step would depend on the split "
            "over ranks. Set its dropout rates to 0, or choose a model whose dropout is layers (nn.Dropout, DropPath)"
        )

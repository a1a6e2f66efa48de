"""The trunks of the towers: timm models and transformers encoders, made as a config says. A user's mistake is a UserError."""

from __future__ import annotations

import difflib
import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import timm
import torch
import transformers
from timm.layers.norm_act import freeze_batch_norm_2d
from torch import nn

from unisono.dataparallel import convert_sync_batchnorm
from unisono_models.clip.config import ClipConfig, ImageConfig, TextConfig
from unisono_models.datasets.package_files import find_transformers_folder, locate_package
from unisono_models.training.errors import UserError

# A config may come from a folder or a hub. So it sets numbers, and of texts only these, which timm looks up in its own tables.
TEXT_KWARGS = ("act_layer", "global_pool", "norm_layer", "pool_type", "pos_embed", "stem_type", "weight_init")
OURS = {
    "pretrained": "--model.image.pretrained",
    "checkpoint_path": "--model.image.pretrained FILE",
    "pretrained_cfg": "--model.image.pretrained",
    "pretrained_cfg_overlay": "--model.image.pretrained",
    "num_classes": "--model.width",
    "features_only": "--model.image.maps",
}
_CODE_FIELDS = ("auto_map", "attn_implementation", "custom_pipelines", "quantization_config")  # they name code to load


@dataclass(frozen=True)
class ImageTrunk:
    """A timm model without classifier."""

    model: Any
    kwargs: dict[str, Any]
    """The arguments of timm.create_model that it was made with: those of the config, and img_size where it needs it."""
    size: tuple[int, int]
    """The height and width of the images that it takes. The tower resizes others."""
    maps: list[int]
    """The indices of the stages whose feature maps are used."""


def check_pretrained_towers(config: ClipConfig) -> None:
    """Raise a UserError for a frozen tower without weights: it would give random features for ever."""
    if config.image.frozen and not config.image.pretrained:
        raise UserError(
            f"--model.image.frozen: the tower {config.image.model} has random weights, and would keep them. Give it weights by "
            "--model.image.pretrained (timm, package:NAME or a file), or train it: --model.image.no-frozen"
        )
    if config.text.frozen and not config.text.model:
        raise UserError(
            "--model.text.frozen: the text tower has random weights, and would keep them. Give it weights by "
            "--model.text.model (a folder, package:NAME or a name on the hub), or train it: --model.text.no-frozen"
        )
    if config.image.views and not config.image.frozen:
        raise UserError(
            f"--model.image.views {config.image.views} is for a frozen tower, whose features are cached: add "
            "--model.image.frozen, or leave it 0"
        )


def describe_towers(config: ClipConfig) -> str:
    """Describe the towers in one line: which models, with which weights, and what is trained."""
    image, text = config.image, config.text
    weights = f"weights of {image.pretrained}" if image.pretrained else "random weights"
    kwargs = f" {json.dumps(image.kwargs)}" if image.kwargs else ""
    words = f"{text.model}" if text.model else f"{text.config.get('model_type')} with random weights"
    return (
        f"image tower: {image.model}{kwargs} at {image.size} pixels, {weights}, {'frozen' if image.frozen else 'trained'}; "
        f"text tower: {words}, {'frozen' if text.frozen else 'trained'}"
    )


def make_image_trunk(config: ImageConfig) -> ImageTrunk:
    """Make the timm model of `config`, so that it takes images of `config.size` if it can.

    Models are tried in this order: as the config says; made for this size by img_size; as the config says, for images that the
    tower resizes to the size that the model was designed for. Weights and random numbers are those of the last try alone.
    """
    check_image_kwargs(config.kwargs)
    square = (config.size, config.size)
    random = torch.get_rng_state()
    model = _create(config, config.kwargs)
    kwargs, size = config.kwargs, square
    problem = _try_size(model, square)
    if problem and "img_size" not in kwargs:
        torch.set_rng_state(random)
        sized = _create_sized(config)
        if sized is not None and not _try_size(sized, square):
            model, problem, kwargs = sized, "", config.kwargs | {"img_size": config.size}
    if problem:
        torch.set_rng_state(random)
        model = _create(config, config.kwargs)
        height, width = model.pretrained_cfg.get("input_size", (3, *square))[1:]
        size = height, width
        if size == square or _try_size(model, size):
            raise UserError(
                f"--model.image.model {config.model}: it does not take images of --model.image.size {config.size} ({problem}). "
                f"It was designed for {height}. Set --model.image.size, or --model.image.kwargs such as patch_size"
            )
    _remove_dropout(model, kwargs)
    return ImageTrunk(model, dict(kwargs), size, _prune_to_maps(model, config))


def _remove_dropout(model: Any, kwargs: Mapping[str, Any]) -> None:
    """Remove the dropout that cannot be a function of the sample, where it is a default of the model.

    A few models call F.dropout before their classifier, and some drop out entries of a table of relative positions.
    """
    if "drop_rate" not in kwargs and getattr(model, "drop_rate", None):
        model.drop_rate = 0.0
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Dropout) and {"rel_pos", "meta_mlp"} & set(name.split(".")):
            layer.p = 0.0


def check_image_kwargs(kwargs: Mapping[str, Any]) -> None:
    """Raise a UserError unless `kwargs` are numbers, or texts that timm looks up in its own tables: no files, no code."""
    for name in ("attn_drop_rate", "patch_drop_rate"):
        if kwargs.get(name):
            raise UserError(
                f"--model.image.kwargs: {name}: {kwargs[name]} must be 0: its random numbers would depend on the split over "
                "ranks. Use drop_path_rate or --model.image.dropout"
            )
    for name, value in kwargs.items():
        if name in OURS:
            raise UserError(f"--model.image.kwargs: {name} cannot be set here. Use {OURS[name]}")
        if not _is_plain(value) and not (isinstance(value, str) and name in TEXT_KWARGS):
            raise UserError(
                f"--model.image.kwargs: {name}: {value!r} must be a number, true, false, null, or a list of these. Texts are "
                f"allowed for {', '.join(TEXT_KWARGS)}"
            )


def check_text_config(config: Mapping[str, Any]) -> None:
    """Raise a UserError if `config` has a field that names code to load."""
    found = [name for name in config if not is_text_field(name)]
    if found:
        raise UserError(f"--model.text.config: {found[0]} cannot be set here")


def is_text_field(name: str) -> bool:
    """Return whether a config of transformers may have this field: it describes the model and names no code."""
    return name not in _CODE_FIELDS and not name.startswith("_")


def _is_plain(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(each) for each in value)
    return value is None or isinstance(value, (bool, int, float))


def _create(config: ImageConfig, kwargs: Mapping[str, Any]) -> Any:
    """Make the timm model with its weights."""
    name, given = config.model, config.pretrained
    _check_name(name)
    packaged = given.startswith("package:")
    from_file = given not in ("", "timm") and not packaged
    if from_file and not Path(given).is_file():
        raise UserError(
            f"--model.image.pretrained {given}: there is no such file. For the weights that timm downloads, use "
            "--model.image.pretrained timm"
        )
    overlay: dict[str, Any] = {"pretrained_cfg_overlay": {"file": given}} if from_file else {}
    try:
        with _quiet_downloads(), _collect_missing_tensors() as missing:
            model: Any = timm.create_model(name, pretrained=from_file or given == "timm", num_classes=0, **overlay, **kwargs)
    except TypeError as error:
        if not kwargs:
            raise
        raise UserError(f"--model.image.kwargs {json.dumps(kwargs)}: {name} does not take them: {error}") from error
    except Exception as error:  # timm, torch and the hub's client each have their own
        if from_file:
            raise UserError(
                f"--model.image.pretrained {given}: these weights do not fit --model.image.model {name}: {_first_line(error)}"
            ) from error
        if given != "timm" and ":" not in name:
            raise
        option = "--model.image.pretrained timm" if given == "timm" else f"--model.image.model {name}"
        raise UserError(
            f"{option}: the weights of {name} cannot be loaded from the Hugging Face hub: {_first_line(error)} Without a "
            "network, give a file by --model.image.pretrained FILE, or train from random weights: --model.image.pretrained ''"
        ) from error
    if packaged:
        load_package_weights(model, given, name=name)
    if 2 * len(missing) > len(model.state_dict()):  # timm itself would only log it, and leave random weights
        raise UserError(
            f"--model.image.pretrained {given}: these weights do not fit --model.image.model {name}: "
            f"{len(missing)} of its {len(model.state_dict())} tensors are not there, such as {missing[0]}"
        )
    return model


def _create_sized(config: ImageConfig) -> Any | None:
    """Make the model for images of `config.size`, or return None if it has no such option."""
    try:
        return _create(config, config.kwargs | {"img_size": config.size})
    except (UserError, RuntimeError, ValueError, AssertionError):
        return None


def _check_name(name: str) -> None:
    known = name.partition(".")[0]
    if ":" in name or timm.is_model(known):  # hf-hub:… and local-dir:… are found by timm itself
        return
    close = difflib.get_close_matches(known, timm.list_models(), 3)
    hint = f" Did you mean {' or '.join(close)}?" if close else " timm.list_models() lists the names."
    raise UserError(f"--model.image.model {name}: timm has no such model.{hint}")


def _try_size(model: Any, size: tuple[int, int]) -> str:
    """Return why the model does not take images of this size, or an empty text."""
    was_training = model.training
    try:
        with torch.no_grad():
            model.eval()(next(model.parameters()).new_zeros(1, 3, *size))
    except Exception as error:  # models check their inputs by assertions, shapes and the errors of torch
        return _first_line(error)
    finally:
        model.train(was_training)
    return ""


def _prune_to_maps(model: Any, config: ImageConfig) -> list[int]:
    if not config.maps:
        return []
    # Layers after the last stage are unused, and DDP would wait for their gradients. The indices that are returned count
    # from the front, because the stages after the last one are gone.
    try:
        return list(model.prune_intermediate_layers(list(config.maps), prune_norm=True, prune_head=True))
    except (AttributeError, AssertionError, IndexError) as error:
        raise UserError(
            f"--model.image.maps {' '.join(map(str, config.maps))}: {config.model} does not have these stages "
            f"({_first_line(error)}). Choose others, or none: --model.image.maps"
        ) from error


def load_package_weights(model: nn.Module, package: str, *, name: str = "the model") -> None:
    """Load the only .pth or .safetensors file of package:NAME into `model`: tensor by tensor in order, as their names differ.

    The number of tensors and every shape must agree. No code in the file is executed. `name`: that of the model, for errors.
    """
    option = f"--model.image.pretrained {package}"
    try:
        files = sorted(x for x in Path(locate_package(package)).rglob("*") if x.suffix in (".pth", ".safetensors"))
    except FileNotFoundError as error:
        raise UserError(f"--model.image.pretrained {error}") from error
    if len(files) != 1:
        raise UserError(f"{option}: the package must have one file of weights, found {[x.name for x in files]}")
    if files[0].suffix == ".pth":
        theirs = torch.load(files[0], map_location="cpu", weights_only=True)
    else:
        from safetensors.torch import load_file

        theirs = load_file(files[0])
    ours = {k: v for k, v in model.state_dict().items() if not k.endswith("num_batches_tracked")}
    theirs = {k: v for k, v in theirs.items() if not k.endswith("num_batches_tracked")}
    advice = "Set --model.image.pretrained to weights of this model, to timm, or to '' for random weights"
    if not 0 <= len(theirs) - len(ours) <= 2:  # the last two may be a classifier, which a tower does not have
        raise UserError(
            f"{option}: these weights are of another model than {name}: they are {len(theirs)} tensors, but the model has "
            f"{len(ours)}. {advice}"
        )
    values = list(theirs.values())[: len(ours)]
    for (key, own), (other, value) in zip(ours.items(), theirs.items(), strict=False):
        if own.shape != value.shape:
            raise UserError(
                f"{option}: these weights are of another model than {name}: {other} of shape {tuple(value.shape)} does not fit "
                f"{key} of shape {tuple(own.shape)}. {advice}"
            )
    model.load_state_dict(dict(zip(ours, values, strict=True)), strict=False)


def find_batch_norm(model: nn.Module) -> list[str]:
    """List the names of the batch norms whose statistics a step computes."""
    return [name for name, layer in model.named_modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]


def handle_batch_norm(model: nn.Module, config: ImageConfig) -> nn.Module:
    """Treat batch norm as `config.batch_norm` says. A frozen tower keeps its statistics anyway."""
    found = find_batch_norm(model)
    if not found or config.batch_norm == "local" or (config.frozen and config.batch_norm == "sync"):
        return model
    which = f"--model.image.model {config.model}"
    if config.batch_norm == "frozen":
        model = freeze_batch_norm_2d(model)  # type: ignore[no-untyped-call]
        if left := find_batch_norm(model):
            raise UserError(
                f"{which}: --model.image.batch-norm frozen cannot freeze {left[0]}, which is another kind of batch norm. "
                "Use sync"
            )
        return model
    if config.batch_norm == "sync":
        try:
            return convert_sync_batchnorm(model)
        except TypeError as error:
            raise UserError(
                f"{which}: --model.image.batch-norm sync: {error}. Use --model.image.batch-norm frozen (pretrained) or local"
            ) from error
    raise UserError(
        f"{which}: {len(found)} layers are batch norm, such as {found[0]}: a step would depend on the split over ranks. "
        "Use --model.image.batch-norm sync, frozen (for pretrained weights) or local, or another model"
    )


def make_text_trunk(config: TextConfig, *, vocabulary: int) -> Any:
    """Make the transformers encoder of `config`, for a tokenizer with `vocabulary` tokens."""
    settings = _text_settings(config, vocabulary)
    _check_text(settings, config, vocabulary)
    for name in settings.to_dict():
        if "drop" in name and ("attention" in name or "attn" in name):
            setattr(settings, name, 0.0)  # drawn inside a fused kernel, where we cannot make it depend on the sample
    if not config.model:
        try:
            return transformers.AutoModel.from_config(settings)  # type: ignore[no-untyped-call]
        except ValueError as error:
            raise UserError(f"--model.text.config: {_first_line(error)}") from error
    with loading_text_model(config.model):
        return transformers.AutoModel.from_pretrained(find_transformers_folder(config.model), config=settings)


def without_weights(config: ClipConfig) -> tuple[ClipConfig, int]:
    """Return the config of the same towers with random weights, and the vocabulary size of their tokenizer.

    Of `text.model` only the config is read. The towers then have the right shapes, for a simulation.
    """
    text, image = config.text, replace(config.image, pretrained="")
    if not text.model:
        return replace(config, image=image), text.vocabulary
    settings = _text_settings(text, 0)
    fields = {key: value for key, value in settings.to_dict().items() if is_text_field(key)}
    vocabulary = int(settings.vocab_size) if text.tokenizer == "model" else text.vocabulary
    return replace(config, image=image, text=replace(text, model="", config=fields)), vocabulary


def describe_text_model(config: TextConfig, settings: Any) -> str:
    """Name a text model by its option."""
    return f"--model.text.model {config.model}" if config.model else f"--model.text.config of type {settings.model_type}"


@contextmanager
def loading_text_model(name: str) -> Iterator[None]:
    """Turn what transformers raises for a model that cannot be found or loaded into a UserError."""
    try:
        with _quiet_downloads():
            yield
    except UserError:
        raise
    except FileNotFoundError as error:
        raise UserError(f"--model.text.model {error}") from error
    except (OSError, ValueError) as error:
        place = "" if Path(name).is_dir() or name.startswith("package:") else "there is no such folder, and "
        raise UserError(
            f"--model.text.model {name}: {place}it cannot be loaded: {_first_line(error)} Without a network, give a folder or "
            "package:NAME"
        ) from error


def _text_settings(config: TextConfig, vocabulary: int) -> Any:
    check_text_config(config.config)
    fields: dict[str, Any] = dict(config.config)
    if config.model:
        with loading_text_model(config.model):
            settings: Any = transformers.AutoConfig.from_pretrained(find_transformers_folder(config.model))
        fields.pop("model_type", None)
        for name, value in fields.items():
            setattr(settings, name, value)
        return settings
    if "model_type" not in fields:
        raise UserError(
            f"--model.text.config {json.dumps(fields)}: it has no model_type, such as bert. Or give --model.text.model"
        )
    kind = fields.pop("model_type")
    if kind not in transformers.CONFIG_MAPPING:
        close = difflib.get_close_matches(str(kind), list(transformers.CONFIG_MAPPING), 3)
        hint = f" Did you mean {' or '.join(close)}?" if close else ""
        raise UserError(f"--model.text.config: transformers has no model_type {kind!r}.{hint}")
    fields = {"vocab_size": vocabulary} | fields
    usual = transformers.CONFIG_MAPPING[
        kind
    ]().to_dict()  # its special tokens may have numbers that our vocabulary does not have
    for name, value in usual.items():
        if name.endswith("_token_id") and isinstance(value, int) and value >= fields["vocab_size"]:
            fields.setdefault(name, None if name == "pad_token_id" else 0)
    return transformers.AutoConfig.for_model(kind, **fields)


def _check_text(settings: Any, config: TextConfig, vocabulary: int) -> None:
    name = describe_text_model(config, settings)
    if settings.is_encoder_decoder:
        raise UserError(f"{name}: it has a decoder, too. Choose a model with a single stack, such as bert")
    if not isinstance(getattr(settings, "hidden_size", None), int):
        raise UserError(f"{name}: it is no encoder of text: its config has no hidden_size. Choose another, such as bert")
    if settings.vocab_size < vocabulary:
        raise UserError(
            f"{name}: it has {settings.vocab_size} tokens, fewer than the {vocabulary} of the tokenizer. Use "
            f"--model.text.tokenizer model, or --model.text.vocabulary {settings.vocab_size}"
        )
    places = getattr(settings, "max_position_embeddings", None)
    if places and 0 < places < config.tokens:
        raise UserError(f"--model.text.tokens {config.tokens} is more than the {places} positions of {name}")


@contextmanager
def _quiet_downloads() -> Iterator[None]:
    """Silence the lines about each retry: the error at the end says what failed."""
    log = logging.getLogger("huggingface_hub")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


@contextmanager
def _collect_missing_tensors() -> Iterator[list[str]]:
    """List the tensors of a model that timm finds in no file of weights. It tells only its log."""
    missing: list[str] = []

    class Collect(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            if record.getMessage().startswith("Missing keys ("):
                missing.extend(record.getMessage().partition("(")[2].partition(")")[0].split(", "))
            return record.levelno >= logging.ERROR

    log, collect = logging.getLogger("timm.models._builder"), Collect()
    before = log.level
    log.setLevel(logging.INFO)
    log.addFilter(collect)
    try:
        yield missing
    finally:
        log.removeFilter(collect)
        log.setLevel(before)


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return text if len(text) <= 200 else text[:199] + "…"

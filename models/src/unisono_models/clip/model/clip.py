"""The model: two towers that map to one feature space. Saved as files of weights, of the config and of the tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from shutil import copymode
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from unisono_models.clip.config import ClipConfig
from unisono_models.clip.data.decode import crop_square
from unisono_models.clip.model.tokenizer import CaptionTokenizer
from unisono_models.clip.model.towers import ImageTower, TextTower
from unisono_models.clip.model.trunks import check_image_kwargs, check_text_config, is_text_field
from unisono_models.training.config.serialization import config_from_json, config_to_json, read_json
from unisono_models.training.randomness import replace_dropout

FILES = ("config.json", "model.safetensors", "tokenizer.json")


class Clip(nn.Module):
    """Maps images and captions to unit features. Their dot products say how well an image and a caption match.

    Example:
        clip = Clip.from_pretrained("runs/clip-emoji/export")
        images = clip.encode_images([Image.open("heart.png"), Image.open("dog.png")])
        (clip.encode_texts(["a red heart"]) @ images.T).softmax(1)
    """

    def __init__(self, config: ClipConfig, tokenizer: CaptionTokenizer) -> None:
        super().__init__()
        self.config, self.tokenizer = config, tokenizer
        self.image = ImageTower(config.image, config.width)
        self.text = TextTower(config.text, config.width, vocabulary=tokenizer.vocabulary)
        replace_dropout(self)  # once for both towers: the masks of a layer depend on its full name
        self.scale = 1.0  # the learned scale and bias of the logits, set when the model is exported
        self.bias = 0.0

    @torch.inference_mode()
    def encode_images(self, images: Tensor | Sequence[Image.Image]) -> Tensor:
        """Encode images: uint8 (n, 3, height, width), or a list of Pillow images. They are cropped to squares and scaled."""
        size = self.config.image.size
        if isinstance(images, Image.Image):
            raise TypeError("encode_images: images: got one image, must be a list of images")
        if not isinstance(images, Tensor):
            images = _crop_squares(images, size)
        if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] != 3:
            raise ValueError(
                f"encode_images: images: expected uint8 of shape (n, 3, h, w), got {images.dtype} {tuple(images.shape)}"
            )
        if images.shape[2:] != (size, size):
            images = _crop_squares([Image.fromarray(x.permute(1, 2, 0).cpu().numpy()) for x in images], size)
        parameter = next(self.parameters())
        return F.normalize(self.image(images.to(parameter.device, parameter.dtype) / 255), dim=1)

    @torch.inference_mode()
    def encode_texts(self, captions: Sequence[str]) -> Tensor:
        """Encode captions."""
        if isinstance(captions, str):
            raise TypeError(f"encode_texts: captions: got one string, {captions!r}, must be a list of strings")
        return F.normalize(self.text(self.tokenizer(captions).to(next(self.parameters()).device)), dim=1)

    def save_pretrained(self, folder: Path | str) -> None:
        """Write the weights (safetensors), the config and the tokenizer: all that from_pretrained needs."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        save_file({k: v.contiguous() for k, v in self.state_dict().items()}, folder / "model.safetensors")
        settings = {"model": config_to_json(self.portable_config()), "scale": self.scale, "bias": self.bias}
        (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
        (folder / "tokenizer.json").write_text(self.tokenizer.to_json(), encoding="utf-8")
        copymode(folder / "config.json", folder / "model.safetensors")  # safetensors makes it readable for its owner only

    def portable_config(self) -> ClipConfig:
        """Return the config without the paths and packages that the initial weights came from."""
        trunk: Any = self.text.trunk
        fields = json.loads(trunk.config.to_json_string(use_diff=False))
        # Not where the initial weights came from, and nothing that names code.
        fields = {key: value for key, value in fields.items() if key != "dtype" and is_text_field(key)}
        text = replace(self.config.text, model="", config=fields)
        return replace(self.config, image=replace(self.image.config, pretrained=""), text=text)

    @classmethod
    def from_pretrained(cls, name: Path | str, *, revision: str | None = None) -> Clip:
        """Load a model from a folder, or from a repository of the Hugging Face hub if there is no such folder.

        The model is in eval mode and in float32, whatever its dtype was when it was saved.
        """
        folder = Path(name)
        if not folder.is_dir():
            folder = _download(str(name), revision)
        missing = [file for file in FILES if not (folder / file).is_file()]
        if missing:
            raise FileNotFoundError(
                f"Clip.from_pretrained: {folder}: there is no {', '.join(missing)}; save_pretrained writes {FILES}"
            )
        settings = read_json(folder / "config.json")
        if not isinstance(settings, dict) or not {"model", "scale", "bias"} <= settings.keys():
            raise ValueError(
                f"Clip.from_pretrained: {folder / 'config.json'}: this is the config of another model, not of a Clip"
            )
        with _reading(folder / "config.json"):
            config = config_from_json(ClipConfig, settings["model"])
            _check_portable(config)
        with _reading(folder / "tokenizer.json") as file:
            tokenizer = CaptionTokenizer.from_json(file.read_text(encoding="utf-8"), tokens=config.text.tokens)
        clip = cls(config, tokenizer)
        with _reading(folder / "model.safetensors") as file:
            clip.load_state_dict(load_file(file))
        clip.scale, clip.bias = settings["scale"], settings["bias"]
        return clip.eval()

    def push_to_hub(self, repository: str, *, private: bool = True) -> None:
        """Upload the files of save_pretrained to the Hugging Face hub. from_pretrained(repository) loads them."""
        from tempfile import TemporaryDirectory

        from huggingface_hub import HfApi

        with TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            api = HfApi()
            try:
                api.create_repo(repository, private=private, exist_ok=True)
                api.upload_folder(repo_id=repository, folder_path=folder)
            except Exception as error:  # as in _download
                raise OSError(f"Clip.push_to_hub: {repository}: the upload to the hub failed: {error}") from error


def _crop_squares(images: Sequence[Image.Image], size: int) -> Tensor:
    for image in images:
        if not isinstance(image, Image.Image):
            raise TypeError(f"encode_images: images: one is a {type(image).__name__}, must be Pillow images")
    squares = [crop_square(image, size) for image in images]
    return torch.stack(squares) if squares else torch.zeros(0, 3, size, size, dtype=torch.uint8)


@contextmanager
def _reading(file: Path) -> Iterator[Path]:
    try:
        yield file
    except (ValueError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"Clip.from_pretrained: {file}: damaged, or the file of another model: {error}") from error


def _check_portable(config: ClipConfig) -> None:
    """Refuse a config that would load more than this folder: it may come from anyone."""
    if config.image.pretrained or config.text.model or ":" in config.image.model:
        raise ValueError("image.pretrained and text.model must be empty, and image.model a plain name of timm")
    check_image_kwargs(config.image.kwargs)
    check_text_config(config.text.config)


def _download(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(FILES)))
    except HFValidationError as error:
        raise FileNotFoundError(
            f"Clip.from_pretrained: {name}: there is no such folder, and it is not a name on the hub ({error})"
        ) from error
    except Exception as error:  # the client's errors for "no such" and "cannot reach" have no common class
        raise FileNotFoundError(
            f"Clip.from_pretrained: {name}: there is no such folder, and it cannot be downloaded from the hub: {error}"
        ) from error

"""The model: two towers into one space, as one file of weights, one of settings and one of the tokenizer."""

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
from unisono_models.clip.data.images import fit_picture
from unisono_models.clip.model.tokenizer import CaptionTokenizer
from unisono_models.clip.model.towers import ImageTower, TextTower
from unisono_models.training.config.serialization import config_from_json, config_to_json, read_json
from unisono_models.training.randomness import replace_dropout

FILES = ("config.json", "model.safetensors", "tokenizer.json")


class Clip(nn.Module):
    """Pictures and captions to features of unit length, whose dot products say how well they fit.

    Example:
        clip = Clip.from_pretrained("runs/clip-emoji/export")
        pictures = clip.encode_images([Image.open("heart.png"), Image.open("dog.png")])
        (clip.encode_texts(["a red heart"]) @ pictures.T).softmax(1)
    """

    def __init__(self, config: ClipConfig, tokenizer: CaptionTokenizer) -> None:
        super().__init__()
        self.config, self.tokenizer = config, tokenizer
        self.image = ImageTower(config.image, config.width)
        self.text = TextTower(config.text, config.width, vocabulary=tokenizer.vocabulary)
        replace_dropout(self)  # once for both towers: a layer's masks go by its full name
        self.scale, self.bias = 1.0, 0.0  # of the logits, as learned: set when the model is exported

    @torch.inference_mode()
    def encode_images(self, images: Tensor | Sequence[Image.Image]) -> Tensor:
        """Features of pictures: uint8 of shape (n, 3, height, width), or of Pillow. Of any size; cropped to a square."""
        size = self.config.image.size
        if isinstance(images, Image.Image):
            raise TypeError("encode_images: images: got one picture, must be a list of pictures")
        if not isinstance(images, Tensor):
            images = _squares(images, size)
        if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] != 3:
            raise ValueError(
                f"encode_images: images: expected uint8 of shape (n, 3, h, w), got {images.dtype} {tuple(images.shape)}"
            )
        if images.shape[2:] != (size, size):
            images = _squares([Image.fromarray(x.permute(1, 2, 0).cpu().numpy()) for x in images], size)
        parameter = next(self.parameters())
        return F.normalize(self.image(images.to(parameter.device, parameter.dtype) / 255), dim=1)

    @torch.inference_mode()
    def encode_texts(self, captions: Sequence[str]) -> Tensor:
        """Features of captions."""
        if isinstance(captions, str):
            raise TypeError(f"encode_texts: captions: got one string, {captions!r}, must be a list of strings")
        return F.normalize(self.text(self.tokenizer(captions).to(next(self.parameters()).device)), dim=1)

    def save_pretrained(self, folder: Path | str) -> None:
        """Write the weights (safetensors), the settings and the tokenizer: all that from_pretrained needs."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        save_file({k: v.contiguous() for k, v in self.state_dict().items()}, folder / "model.safetensors")
        settings = {"model": config_to_json(self.portable_config()), "scale": self.scale, "bias": self.bias}
        (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
        (folder / "tokenizer.json").write_text(self.tokenizer.to_json(), encoding="utf-8")
        copymode(folder / "config.json", folder / "model.safetensors")  # safetensors writes it for nobody else to read

    def portable_config(self) -> ClipConfig:
        """The config of the same model without the places that its first weights came from."""
        trunk: Any = self.text.trunk
        fields = json.loads(trunk.config.to_json_string(use_diff=False))
        fields = {key: value for key, value in fields.items() if key not in ("_name_or_path", "dtype")}  # those of the first
        text = replace(self.config.text, model="", config=fields)
        return replace(self.config, image=replace(self.config.image, pretrained=""), text=text)

    @classmethod
    def from_pretrained(cls, name: Path | str, *, revision: str | None = None) -> Clip:
        """A model from a folder, or from a repository of the Hugging Face hub if there is no such folder.

        In eval mode, and in float32 whatever it was saved in.
        """
        folder = Path(name)
        if not folder.is_dir():
            folder = _downloaded(str(name), revision)
        missing = [file for file in FILES if not (folder / file).is_file()]
        if missing:
            raise FileNotFoundError(f"Clip.from_pretrained: {folder}: no {', '.join(missing)}; save_pretrained writes {FILES}")
        settings = read_json(folder / "config.json")
        if not isinstance(settings, dict) or not {"model", "scale", "bias"} <= settings.keys():
            raise ValueError(f"Clip.from_pretrained: {folder / 'config.json'}: not of a Clip, but of another model")
        with _reading(folder / "config.json"):
            config = config_from_json(ClipConfig, settings["model"])
        with _reading(folder / "tokenizer.json") as file:
            tokenizer = CaptionTokenizer.from_json(file.read_text(encoding="utf-8"), tokens=config.text.tokens)
        clip = cls(config, tokenizer)
        with _reading(folder / "model.safetensors") as file:
            clip.load_state_dict(load_file(file))
        clip.scale, clip.bias = settings["scale"], settings["bias"]
        return clip.eval()

    def push_to_hub(self, repository: str, *, private: bool = True) -> None:
        """Upload the files of save_pretrained to the Hugging Face hub. from_pretrained(repository) brings them back."""
        from tempfile import TemporaryDirectory

        from huggingface_hub import HfApi

        with TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            api = HfApi()
            try:
                api.create_repo(repository, private=private, exist_ok=True)
                api.upload_folder(repo_id=repository, folder_path=folder)
            except Exception as error:  # as in _downloaded
                raise OSError(f"Clip.push_to_hub: {repository}: the hub does not take it: {error}") from error


def _squares(pictures: Sequence[Image.Image], size: int) -> Tensor:
    for picture in pictures:
        if not isinstance(picture, Image.Image):
            raise TypeError(f"encode_images: images: {type(picture).__name__} among them, must be pictures of Pillow")
    squares = [fit_picture(picture, size) for picture in pictures]
    return torch.stack(squares) if squares else torch.zeros(0, 3, size, size, dtype=torch.uint8)


@contextmanager
def _reading(file: Path) -> Iterator[Path]:
    try:
        yield file
    except (ValueError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"Clip.from_pretrained: {file}: damaged, or not its own: {error}") from error


def _downloaded(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(FILES)))
    except HFValidationError as error:
        raise FileNotFoundError(f"Clip.from_pretrained: {name}: no such folder, nor a name of the hub ({error})") from error
    except Exception as error:  # the client's errors for "no such" and "cannot reach" have no common class
        raise FileNotFoundError(
            f"Clip.from_pretrained: {name}: no such folder, and the hub does not give it: {error}"
        ) from error

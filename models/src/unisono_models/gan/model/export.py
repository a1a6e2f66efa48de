"""A trained generator as a folder: weights as safetensors, all else as JSON; and back."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save

from unisono_models.gan.config import Condition, DataConfig, ModelConfig
from unisono_models.gan.data.images import Images
from unisono_models.gan.model.generator import Generator
from unisono_models.training.checkpoint.atomic_file import atomic_write
from unisono_models.training.config.serialization import config_from_json, config_to_json, read_json

FILES = ("model.safetensors", "config.json")


@dataclass(frozen=True)
class Exported:
    """A generator, and what it needs to be used."""

    generator: Generator
    """The moving average, for evaluation, without gradients."""
    classes: tuple[str, ...]
    """Their names, in the order of the labels; () if there are none."""
    size: int
    """Of its pictures: pixels a side."""
    channels: int
    text_model: str
    """Condition text: what its texts were encoded by, as DataConfig.text_model has it."""

    @property
    def condition(self) -> Condition:
        return self.generator.config.condition


def write_export(folder: Path, generator: Generator, *, data: DataConfig, images: Images) -> None:
    """Write what `read_export` reads, of a generator that was trained on `images`. One rank calls."""
    weights = {name: weight.detach().cpu().contiguous() for name, weight in generator.state_dict().items()}
    atomic_write(folder / FILES[0], save(weights, metadata={"format": "pt"}))
    table, linear = generator.condition.table, generator.condition.linear
    about = {
        "model": config_to_json(generator.config),
        "size": images.size,
        "channels": images.channels,
        "conditions": table.num_embeddings if table is not None else linear.in_features if linear is not None else 0,
        "classes": list(images.classes),
        "text_model": data.text_model,
    }
    atomic_write(folder / FILES[1], json.dumps(about, indent=2, ensure_ascii=False) + "\n")


def read_export(folder: Path | str) -> Exported:
    """The generator in a folder that a run has exported, on the CPU.

    Raises: ValueError that says what to do if it is of another model, or damaged; FileNotFoundError if it is not there.

    Example:
        exported = read_export("runs/gan-digits/export")
        pictures = generate(exported.generator, torch.tensor([7, 7, 7]), torch.arange(3), seed=0)    # three sevens
    """
    folder = Path(folder)
    try:
        about = read_json(folder / FILES[1])
        config = config_from_json(ModelConfig, about["model"])
        weights = load_file(folder / FILES[0])
        generator = Generator(config, size=about["size"], channels=about["channels"], conditions=about["conditions"])
        generator.to(next(iter(weights.values())).dtype).load_state_dict(weights)
        classes, text_model = tuple(str(name) for name in about["classes"]), str(about["text_model"])
    except (SafetensorError, LookupError, TypeError, ValueError, RuntimeError, StopIteration) as error:
        raise ValueError(
            f"{folder} is not the export of a GAN, or damaged ({type(error).__name__}: {error}): start its training again with "
            "the same options, and a run that has finished writes it anew"
        ) from error
    return Exported(generator.eval().requires_grad_(False), classes, about["size"], about["channels"], text_model)

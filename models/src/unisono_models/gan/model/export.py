"""A trained generator as a folder: the weights as safetensors, the config as JSON."""

import json
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save

from unisono_models.gan.config import Condition, DataConfig, ModelConfig
from unisono_models.gan.data.images import ImageDataset
from unisono_models.gan.model.generator import Generator
from unisono_models.training.checkpoint.atomic_file import atomic_write
from unisono_models.training.config.serialization import config_from_json, config_to_json, read_json
from unisono_models.training.errors import UserError

WEIGHTS_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
FILES = (WEIGHTS_FILE, CONFIG_FILE)


@dataclass(frozen=True)
class ExportedGenerator:
    """A generator, and what is needed to use it."""

    generator: Generator
    """The moving average, in evaluation mode and without gradients."""
    classes: tuple[str, ...]
    """Names of the classes, in the order of the labels; () if there are none."""
    size: int
    """Height and width of its images in pixels."""
    channels: int
    text_model: str
    """The text encoder of a generator with condition "text", as in DataConfig.text_model."""

    @property
    def condition(self) -> Condition:
        return self.generator.config.condition


def write_export(folder: Path, generator: Generator, *, data: DataConfig, images: ImageDataset) -> None:
    """Write the files that `read_export` reads. `images` is the training set. One rank calls it."""
    weights = {name: weight.detach().cpu().contiguous() for name, weight in generator.state_dict().items()}
    atomic_write(folder / WEIGHTS_FILE, save(weights, metadata={"format": "pt"}))
    embedding = generator.condition
    conditions = 0
    if embedding.table is not None:
        conditions = embedding.table.num_embeddings
    elif embedding.linear is not None:
        conditions = embedding.linear.in_features
    config = {
        "model": config_to_json(generator.config),
        "size": images.size,
        "channels": images.channels,
        "conditions": conditions,
        "classes": list(images.classes),
        "text_model": data.text_model,
    }
    atomic_write(folder / CONFIG_FILE, json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def read_export(folder: Path | str) -> ExportedGenerator:
    """Read the generator that a run has exported into `folder`, onto the CPU.

    Raises: UserError if the folder is damaged or holds another model; FileNotFoundError if a file is missing.

    Example:
        exported = read_export("runs/gan-digits/export")
        images = generate(exported.generator, torch.tensor([7, 7, 7]), torch.arange(3), seed=0)    # three sevens
    """
    folder = Path(folder)
    try:
        config = read_json(folder / CONFIG_FILE)
        model = config_from_json(ModelConfig, config["model"])
        weights = load_file(folder / WEIGHTS_FILE)
        generator = Generator(model, size=config["size"], channels=config["channels"], conditions=config["conditions"])
        generator.to(next(iter(weights.values())).dtype).load_state_dict(weights)
        classes = tuple(str(name) for name in config["classes"])
        text_model = str(config["text_model"])
    except (SafetensorError, LookupError, TypeError, ValueError, RuntimeError, StopIteration) as error:
        raise UserError(
            f"{folder} is damaged, or not the export of a GAN ({type(error).__name__}: {error}). Start the training again with "
            "the same options: a run that has finished writes the export again"
        ) from error
    return ExportedGenerator(generator.eval().requires_grad_(False), classes, config["size"], config["channels"], text_model)

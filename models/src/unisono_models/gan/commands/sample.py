"""Generate images with a finished run: python -m unisono_models.gan sample RUN_DIR --labels 3 1 4 1 5 --out grid.png"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro
from einops import rearrange
from PIL import Image

from unisono_models.gan.config import Config
from unisono_models.gan.data.conditions import TextEncoder, read_vectors
from unisono_models.gan.figures import draw_grid, save_png
from unisono_models.gan.model.export import FILES, ExportedGenerator, read_export
from unisono_models.gan.model.sampling import (
    SampleConditions,
    draw_noise,
    generate_from_noise,
    generate_interpolations,
    select_classes,
)
from unisono_models.training.run.run_directory import RunError, find_run

_COUNT = 8  # default number of images for each condition
_INTERPOLATIONS = 10  # default number of interpolations without a condition
_MAX_CLASSES = 20  # unless --labels names them
_COLUMN_NAME_LENGTH = 6  # letters that fit above an image


@dataclass(frozen=True)
class SampleOptions:
    """Generate images with the generator that a run has exported, as a grid in one PNG file."""

    run: Annotated[Path, tyro.conf.Positional]
    """The directory of the run."""
    labels: tuple[str, ...] = ()
    """The names or numbers of the classes to generate, for a run with --model.condition class. Without it all classes are
    generated, at most 20. Each gets a column, or a row if their names are long."""
    texts: tuple[str, ...] = ()
    """The texts to generate images for, for a run with --model.condition text. Each gets a row."""
    vectors: Path | None = None
    """A .npy file of vectors to generate images for, for a run with --model.condition vector. Each of its rows gets a row."""
    count: int | None = None
    """The number of images for each label, text or vector (8 if it is not given); with --interpolate, the number of rows for
    each (1). For a run without a condition it is the number of all images (64), or of all rows (10)."""
    interpolate: int | None = None
    """Show rows of this many images that go from one noise vector to another by spherical interpolation."""
    seed: int = 0
    """The seed of the noise. The same seed gives the same images."""
    truncation: float = 1.0
    """The noise is multiplied by this factor. Below 1 the images are more alike and more typical."""
    out: Path = Path("samples.png")
    """The PNG file to write."""


def sample(exported: ExportedGenerator, options: SampleOptions) -> Image.Image:
    """Return the grid that `options` describe. Raises: ValueError if the generator cannot make it."""
    conditions = choose_conditions(exported, options)
    generator = exported.generator
    seed = options.seed
    scale = options.truncation
    if options.interpolate is not None:
        columns = options.interpolate
        conditions = _repeat(conditions, options.count or (1 if conditions.condition is not None else _INTERPOLATIONS))
        images = generate_interpolations(generator, conditions, seed=seed, columns=columns, scale=scale)
        return draw_grid(images, columns=columns, row_names=conditions.names)
    if conditions.condition is None:
        count = options.count or _COUNT**2
        noise = draw_noise(generator, torch.arange(count), seed=seed, scale=scale)
        return draw_grid(generate_from_noise(generator, noise, None), columns=math.ceil(count**0.5))
    count = options.count or _COUNT
    noise = draw_noise(generator, torch.arange(conditions.count * count), seed=seed, scale=scale)
    images = generate_from_noise(generator, noise, conditions.condition.repeat_interleave(count, 0))
    if exported.condition != "class" or any(len(name) > _COLUMN_NAME_LENGTH for name in conditions.names):
        return draw_grid(images, columns=count, row_names=conditions.names)
    images = rearrange(images, "(label each) c h w -> (each label) c h w", each=count)
    return draw_grid(images, columns=conditions.count, column_names=conditions.names)


def choose_conditions(exported: ExportedGenerator, options: SampleOptions) -> SampleConditions:
    """Return the conditions that `options` name."""
    kind = exported.condition
    given = {"class": options.labels, "text": options.texts, "vector": options.vectors}
    option_names = {"class": "--labels", "text": "--texts", "vector": "--vectors"}
    for other, value in given.items():
        if value and other != kind:
            advice = f"use {option_names[kind]}" if kind in option_names else "it takes no conditions"
            raise RunError(f"{option_names[other]}: the generator was trained with --model.condition {kind}: {advice}")
    if kind == "none":
        return SampleConditions(None, (), 1)
    if kind == "class":
        try:
            return select_classes(exported.classes, options.labels or exported.classes[:_MAX_CLASSES])
        except ValueError as error:
            raise RunError(f"--labels: {error}") from None
    if kind == "text":
        if not options.texts:
            raise RunError(
                "the generator was trained with --model.condition text: say what to generate, in words like those of your "
                'captions: --texts "SOME WORDS" "OTHER WORDS"'
            )
        vectors = TextEncoder(exported.text_model, device=torch.device("cpu"))(options.texts)
        return SampleConditions(vectors, options.texts, len(vectors))
    if options.vectors is None:
        raise RunError("the generator was trained with --model.condition vector: set --vectors to a .npy file")
    return _read_conditions(options.vectors, exported)


def _read_conditions(path: Path, exported: ExportedGenerator) -> SampleConditions:
    linear = exported.generator.condition.linear
    width = linear.in_features if linear is not None else 0
    vectors = read_vectors(path, option="--vectors")
    if vectors.shape[1] != width:
        raise RunError(f"--vectors {path}: the table is {tuple(vectors.shape)}, but the generator takes {width} columns")
    return SampleConditions(vectors, tuple(str(row) for row in range(len(vectors))), len(vectors))


def _repeat(conditions: SampleConditions, count: int) -> SampleConditions:
    """Return each condition `count` times."""
    condition = None if conditions.condition is None else conditions.condition.repeat_interleave(count, 0)
    names = tuple(name for name in conditions.names for _ in range(count))
    return SampleConditions(condition, names, conditions.count * count)


def _validate(options: SampleOptions) -> None:
    if options.count is not None and options.count < 1:
        raise RunError(f"--count {options.count}: must be at least 1")
    if options.interpolate is not None and options.interpolate < 2:
        raise RunError(f"--interpolate {options.interpolate}: must be at least 2 images")
    if not math.isfinite(options.truncation) or options.truncation < 0:
        raise RunError(f"--truncation {options.truncation}: must be 0 or greater; 1 leaves the noise as it is")
    if options.out.suffix.lower() != ".png":
        raise RunError(f"--out {options.out}: must end in .png")


def main(args: Sequence[str] | None = None) -> None:
    options = tyro.cli(SampleOptions, prog="python -m unisono_models.gan sample", args=args)
    _validate(options)
    find_run(options.run, model="gan", kind=Config, files=FILES)
    image = sample(read_export(options.run / "export"), options)
    try:
        save_png(image, options.out)
    except OSError as error:
        raise RunError(f"--out {options.out}: cannot be written: {error}") from error
    print(options.out)

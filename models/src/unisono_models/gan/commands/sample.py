"""Pictures by a trained generator: python -m unisono_models.gan.commands.sample RUN_DIR --labels 3 1 4 1 5 --out grid.png"""

from __future__ import annotations

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
from unisono_models.gan.data.conditions import read_vectors
from unisono_models.gan.figures import draw_grid, save_picture
from unisono_models.gan.model.export import FILES, Exported, read_export
from unisono_models.gan.model.sampling import Shown, draw_noise, make_paths, make_pictures, show_classes
from unisono_models.training.run.run_directory import RunError, find_run

_COUNT, _ROWS = 8, 10  # pictures of each condition; rows of an interpolation without any
_MOST = 20  # classes, unless they are named
_SHORT = 6  # letters that fit above a picture


@dataclass(frozen=True)
class Options:
    """Make pictures with the generator that a run has exported, all in one picture file."""

    run: Annotated[Path, tyro.conf.Positional]
    """The directory of a run."""
    labels: tuple[str, ...] = ()
    """Classes, by name or number: a column for each, in this order, or a row, if their names are long. None: all classes, or
    the first 20."""
    texts: tuple[str, ...] = ()
    """For a run with model.condition text: what to show, a row for each."""
    vectors: Path | None = None
    """For a run with model.condition vector: a .npy file with a row for each."""
    count: int | None = None
    """Pictures of each label, text or vector, 8 if not given; with --interpolate rows of each, 1 if not given; of a generator
    without conditions all pictures, or rows."""
    interpolate: int | None = None
    """Instead: rows that go from one noise to another in this many steps, on the arc between them."""
    seed: int = 0
    """Another one gives other pictures; the same one the same."""
    truncation: float = 1.0
    """Noise is multiplied by it: below 1, pictures are more alike and more typical."""
    out: Path = Path("samples.png")
    """The picture file, a PNG."""


def sample(exported: Exported, options: Options) -> Image.Image:
    """The picture that `options` ask for. Raises: ValueError if the generator cannot make it; it says what it can make."""
    shown = choose(exported, options)
    if options.interpolate is not None:
        shown = _repeat(shown, options.count or (1 if shown.condition is not None else _ROWS))
        made = make_paths(exported.generator, shown, seed=options.seed, columns=options.interpolate, scale=options.truncation)
        return draw_grid(made, columns=options.interpolate, row_names=shown.names)
    if shown.condition is None:
        count = options.count or _COUNT**2
        noise = draw_noise(exported.generator, torch.arange(count), seed=options.seed, scale=options.truncation)
        return draw_grid(make_pictures(exported.generator, noise, None), columns=math.ceil(count**0.5))
    each = options.count or _COUNT
    noise = draw_noise(exported.generator, torch.arange(shown.count * each), seed=options.seed, scale=options.truncation)
    made = make_pictures(exported.generator, noise, shown.condition.repeat_interleave(each, 0))
    if exported.condition != "class" or any(len(name) > _SHORT for name in shown.names):  # names stand beside their pictures
        return draw_grid(made, columns=each, row_names=shown.names)
    made = rearrange(made, "(label each) c h w -> (each label) c h w", each=each)
    return draw_grid(made, columns=shown.count, column_names=shown.names)


def choose(exported: Exported, options: Options) -> Shown:
    """The conditions that were asked for."""
    kind = exported.condition
    given = {"class": options.labels, "text": options.texts, "vector": options.vectors}
    fits = {"class": "--labels", "text": "--texts", "vector": "--vectors"}
    for other, value in given.items():
        if value and other != kind:
            able = f"give it {fits[kind]}" if kind in fits else "it takes no conditions"
            raise RunError(f"{fits[other]}: the generator was trained with model.condition={kind}: {able}")
    if kind == "none":
        return Shown(None, (), 1)
    if kind == "class":
        try:
            return show_classes(exported.classes, options.labels or exported.classes[:_MOST])
        except ValueError as error:
            raise RunError(f"--labels: {error}") from None
    if kind == "text":
        if not options.texts:
            raise RunError(
                'the generator was trained with model.condition=text: say what to show, as --texts "red heart" "a cat"'
            )
        from unisono_models.gan.data.conditions import TextEncoder  # not at the top: brings transformers

        vectors = TextEncoder(exported.text_model, device=torch.device("cpu"))(options.texts)
        return Shown(vectors, options.texts, len(vectors))
    if options.vectors is None:
        raise RunError(
            "the generator was trained with model.condition=vector: name a .npy file with a row for each by --vectors"
        )
    return _read_vectors(options.vectors, exported)


def _read_vectors(path: Path, exported: Exported) -> Shown:
    linear = exported.generator.condition.linear
    width = linear.in_features if linear is not None else 0
    table = read_vectors(path, option="--vectors")
    if table.shape[1] != width:
        raise RunError(f"--vectors {path}: a table of {tuple(table.shape)}: must have a row for each, and {width} columns")
    return Shown(table, tuple(str(row) for row in range(len(table))), len(table))


def _repeat(shown: Shown, count: int) -> Shown:
    """Each condition `count` times."""
    condition = None if shown.condition is None else shown.condition.repeat_interleave(count, 0)
    return Shown(condition, tuple(name for name in shown.names for _ in range(count)), shown.count * count)


def _check(options: Options) -> None:
    if options.count is not None and options.count < 1:
        raise RunError(f"--count {options.count}: at least 1")
    if options.interpolate is not None and options.interpolate < 2:
        raise RunError(f"--interpolate {options.interpolate}: at least 2 steps, from one noise to another")
    if not math.isfinite(options.truncation) or options.truncation < 0:
        raise RunError(f"--truncation {options.truncation}: must be 0 or above; 1 leaves the noise as it is")
    if options.out.suffix.lower() != ".png":
        raise RunError(f"--out {options.out}: the picture is a PNG: let its name end in .png")


def main(args: Sequence[str] | None = None) -> None:
    options = tyro.cli(Options, prog="python -m unisono_models.gan.commands.sample", args=args)
    try:
        _check(options)
        find_run(options.run, model="gan", kind=Config, files=FILES)
        save_picture(sample(read_export(options.run / "export"), options), options.out)
    except (ValueError, OSError) as error:
        raise SystemExit(str(error)) from None
    print(options.out)


if __name__ == "__main__":
    main()

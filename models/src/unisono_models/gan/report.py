"""What a run writes: sample grids during the training; at the end the export, figures and the report."""

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unisono_models.gan.config import Config
from unisono_models.gan.data.dataset import Datasets
from unisono_models.gan.data.images import DATASETS, ImageDataset
from unisono_models.gan.evaluate import Evaluator, describe_small_sets
from unisono_models.gan.feature_extractor import FeatureExtractor
from unisono_models.gan.figures import draw_grid, find_frames, frame_path, save_png, write_animation
from unisono_models.gan.model.export import write_export
from unisono_models.gan.model.generator import Generator
from unisono_models.gan.model.sampling import (
    COLUMNS,
    draw_conditions,
    generate_interpolations,
    generate_rows,
    select_real_images,
)
from unisono_models.training.distributed.object_collectives import raise_together
from unisono_models.training.run.plots import readable_name
from unisono_models.training.run.report import ReportImage, print_next_commands, print_table, write_report
from unisono_models.training.run.run_directory import RunDirectory

HIGHLIGHTS = ("frechet_distance", "label_accuracy", "precision", "recall")
_TABLE_TITLE = "Generated images beside real ones"
_IMAGES_PER_TILE = 1000


def save_sample_grid(run: RunDirectory, average: Generator, datasets: Datasets, *, step: int, seed: int) -> None:
    """Save a grid of generated images, with the same noise and conditions at every step, as samples/step-00000100.png.

    Every rank calls it; rank 0 writes. If the disk is full, the run continues without the grid.
    """
    with raise_together("save_sample_grid"):
        if run.first:
            conditions = draw_conditions(datasets.train, kind=average.config.condition, seed=seed)
            images = generate_rows(average, conditions, seed=seed)
            grid = draw_grid(images, columns=COLUMNS, row_names=conditions.names)
            try:
                save_png(grid, frame_path(run.samples, step))
            except OSError as error:
                print(f"the sample grid of step {step:,} cannot be written ({error}). The run continues", file=sys.stderr)


def write_run_report(
    run: RunDirectory,
    config: Config,
    average: Generator,
    datasets: Datasets,
    evaluator: Evaluator,
    metrics: Mapping[str, float],
) -> None:
    """Write the export, the figures, the report and the summary of a run, and print where they are.

    Every rank calls it; rank 0 writes.
    """
    real = evaluator.real()
    rows = metric_rows(metrics, real)
    kind = config.model.condition
    images: list[ReportImage] = []
    with raise_together("write_run_report"):
        if run.first:
            write_export(run.export, average, data=config.data, images=datasets.train)
            images = draw_report_images(run, average, datasets, evaluator.extractor, seed=config.run.seed)
    write_report(
        run,
        title=f"Images like those of {_source_name(config)}",
        intro=_introduction(config, datasets),
        images=images,
        tables={_TABLE_TITLE: rows},
        notes=[*datasets.notes, *_notes(evaluator)],
        summary={**metrics, **real},
        highlights=[name for name in HIGHLIGHTS if name in metrics],
    )
    if run.first:
        print_table(rows, title=_TABLE_TITLE)
        names = draw_conditions(datasets.train, kind=kind, seed=config.run.seed, count=2).names
        shown = " ".join(shlex.quote(name) for name in names)
        options = {"class": f" --labels {shown}", "none": "", "text": f" --texts {shown}", "vector": " --vectors FILE.npy"}
        print_next_commands(
            run,
            {
                "Generate images": f"unisono_models.gan sample {run.path}{options[kind]} --out grid.png",
                "Evaluate again": f"unisono_models.gan evaluate {run.path}",
            },
        )
    run.finish({**metrics, **real})  # last: a finished run is not started again


def draw_report_images(
    run: RunDirectory, average: Generator, datasets: Datasets, extractor: FeatureExtractor, *, seed: int
) -> list[ReportImage]:
    """Write the images of the report into samples/. One rank calls it."""
    report_images: list[ReportImage] = []

    def add_grid(name: str, caption: str, images: Tensor, row_names: Sequence[str] = ()) -> None:
        save_png(draw_grid(images, columns=COLUMNS, row_names=row_names), run.samples / name)
        report_images.append(ReportImage(run.samples / name, caption))

    kind = average.config.condition
    conditions = draw_conditions(datasets.train, kind=kind, seed=seed)
    fakes = generate_rows(average, conditions, seed=seed)
    same_noise = "" if kind == "none" else " A column has the same noise in every row."
    add_grid("samples.png", f"Generated images.{same_noise} They were not selected", fakes, conditions.names)
    frames = find_frames(run.samples)
    if len(frames) > 1:
        path = run.samples / "training.webp"
        write_animation(frames, path)
        report_images.append(ReportImage(path, f"The same noise at {len(frames)} steps of the training, the last one first"))
    indices, row_names = select_real_images(datasets.test, conditions, kind=kind)
    real = datasets.test.floats(indices, dtype=fakes.dtype)
    if len(real):
        add_grid("real.png", "Real images of the test set, as the networks see them", real, row_names)
    interpolations = generate_interpolations(average, conditions, seed=seed)
    add_grid("interpolation.png", "Each row goes from one noise vector to another", interpolations, conditions.names)
    nearest, caption = draw_nearest_images(fakes, real, datasets.train, extractor)
    add_grid("nearest.png", caption, nearest, ("generated", "nearest by pixels", "by features"))
    return report_images


def draw_nearest_images(fakes: Tensor, real: Tensor, train: ImageDataset, extractor: FeatureExtractor) -> tuple[Tensor, str]:
    """Return three rows of images and a caption: some fakes, and the training images nearest by pixels and by features."""
    chosen = torch.linspace(0, len(fakes) - 1, COLUMNS).long()
    by_pixels, distances = find_nearest_images(fakes, train)
    device = extractor.head.weight.device
    by_features, _ = find_nearest_images(fakes[chosen].to(device), train, describe=extractor.features)
    nearest = [train.floats(indices, dtype=fakes.dtype) for indices in (by_pixels[chosen], by_features)]
    caption = (
        "Some generated images, and the training images that are nearest to them. The median distance to the nearest by pixels "
        f"(root mean square; black and white are 2 apart) is {distances.median():.3f} for the generated images above"
    )
    if len(real):
        caption += f", and {find_nearest_images(real, train)[1].median():.3f} for the real ones"
    return torch.cat([fakes[chosen], *nearest]), caption


@torch.no_grad()
def find_nearest_images(
    images: Tensor, dataset: ImageDataset, *, describe: Callable[[Tensor], Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Return for each of `images` (n, c, s, s) the index (n,) of the nearest image of `dataset`, and its distance (n,).

    It shows whether the generator copies training images.

    describe: images to features (m, d), whose distance is Euclidean. None: the root mean square distance of the pixels.

    Example:
        >>> dataset = ImageDataset(torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1))
        >>> find_nearest_images(torch.full((1, 1, 1, 1), 0.5), dataset)
        (tensor([1]), tensor([0.5000]))
    """
    describe = describe or _normalized_pixels
    queries = describe(images)
    best = queries.new_full((len(queries),), torch.inf)
    best_indices = torch.zeros(len(queries), dtype=torch.int64)
    for tile in torch.arange(len(dataset)).split(_IMAGES_PER_TILE):
        keys = describe(dataset.floats(tile, dtype=images.dtype, device=images.device))
        nearest = torch.cdist(queries, keys).argmin(1)  # fast, but inexact for very small distances
        distances = (queries - keys[nearest]).norm(dim=1)
        closer = distances < best
        best = torch.where(closer, distances, best)
        best_indices = torch.where(closer.cpu(), tile[nearest.cpu()], best_indices)
    return best_indices, best.cpu()


def _normalized_pixels(images: Tensor) -> Tensor:
    flat: Tensor = images.flatten(1)
    return flat.div(flat.shape[1] ** 0.5)


def metric_rows(metrics: Mapping[str, float], real: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return a table row for each metric: its value for generated images, and "real/NAME", that for real ones."""
    return [
        {"metric": readable_name(name), "generated": value, "real": real.get(f"real/{name}", "")}
        for name, value in metrics.items()
    ]


def _source_name(config: Config) -> str:
    """Return the name of the dataset, or of the folder."""
    source = config.data.source
    return source if source in DATASETS else Path(source).expanduser().resolve().name


def _introduction(config: Config, datasets: Datasets) -> str:
    conditions = {"class": "by class", "vector": "by vector", "text": "by text", "none": "without conditions"}
    return (
        f"A generator of images of {datasets.train.size} pixels, {conditions[config.model.condition]}, was trained on "
        f"{len(datasets.train):,} images of {_source_name(config)} for {config.run.steps:,} steps with a global batch of "
        f"{config.data.batch:,}, the {config.loss.kind} loss and the penalties {config.loss.penalty}. All losses see the "
        "global batch: on any number of ranks it is the same training.\n\n"
        "The report shows the moving average of the generator's weights after the last step. No checkpoint was selected."
    )


def _notes(evaluator: Evaluator) -> list[str]:
    extractor = evaluator.extractor
    task = f"the {len(extractor.classes)} classes" if extractor.classes else "the rotation of an image"
    return [
        "The Fréchet distance is not FID and cannot be compared with published ones: its features are those of a small "
        f"classifier of {task}, which was trained on the same images and has an accuracy of {extractor.accuracy:.1%} on the "
        "test set. The other metrics use the same classifier.",
        "The relative kernel distance is 0 if the generated images cannot be told from the training images, and about 1 if "
        "their features are all 0. It is the kernel distance (MMD², as in KID) divided by the mean kernel of two training "
        "images. With few images it may be below 0 by chance.",
        f"“Real” is the score of the {len(evaluator.datasets.test):,} images of the test set, which was kept from training. "
        f"{evaluator.config.samples:,} images were generated. Fewer images give larger distances by chance; precision and "
        "recall use as many real images, so wider balls. The two columns can be compared only roughly.",
        *describe_small_sets(evaluator.datasets, evaluator.config),
    ]

"""The training pictures that are nearest to generated ones: what was copied would be seen."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from unisono_models.gan.config import Condition, Config
from unisono_models.gan.data.dataset import Datasets
from unisono_models.gan.data.images import Images
from unisono_models.gan.evaluate import Evaluator
from unisono_models.gan.feature_extractor import Judge
from unisono_models.gan.figures import draw_grid, find_frames, frame_path, save_picture, write_animation
from unisono_models.gan.model.export import write_export
from unisono_models.gan.model.generator import Generator
from unisono_models.gan.model.sampling import COLUMNS, find_real, make_paths, make_rows, show_some
from unisono_models.training.distributed.object_collectives import raise_together
from unisono_models.training.run.plots import readable_name
from unisono_models.training.run.report import ReportImage, format_number, write_report
from unisono_models.training.run.run_directory import RunDirectory

_TILE = 1000  # pictures at a time


@torch.no_grad()
def find_nearest(
    pictures: Tensor, images: Images, *, describe: Callable[[Tensor], Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """For each of `pictures` (n, c, s, s): the place (n,) of the nearest of `images`, and its distance (n,).

    describe: pictures to features (m, d), between which the distance is Euclidean. None: the root mean square of pixels.

    Example:
        >>> images = Images(torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1))
        >>> find_nearest(torch.full((1, 1, 1, 1), 0.5), images)
        (tensor([1]), tensor([0.5000]))
    """
    describe = describe or _pixels
    wanted = describe(pictures)
    best, places = wanted.new_full((len(wanted),), torch.inf), torch.zeros(len(wanted), dtype=torch.int64)
    for tile in torch.arange(len(images)).split(_TILE):
        found = describe(images.floats(tile, dtype=pictures.dtype, device=pictures.device))
        nearest = torch.cdist(wanted, found).argmin(1)  # by products, which is fast, and inexact for what is very near
        distances = (wanted - found[nearest]).norm(dim=1)
        closer = distances < best
        best = torch.where(closer, distances, best)
        places = torch.where(closer.cpu(), tile[nearest.cpu()], places)
    return places, best.cpu()


def _pixels(pictures: Tensor) -> Tensor:
    flat: Tensor = pictures.flatten(1)
    return flat.div(flat.shape[1] ** 0.5)


HIGHLIGHTS = ("frechet_distance", "label_accuracy", "precision", "recall")


def save_sample_grid(run: RunDirectory, average: Generator, source: Datasets, *, step: int, seed: int) -> None:
    """Keep a picture of what the generator makes after `step`: of the same noise and conditions each time.

    Every rank calls this; rank 0 writes samples/step-00000100.png. A disk that is full does not end the run for it.
    """
    with raise_together("write_frame"):
        if run.first:
            shown = show_some(source.train, kind=average.config.condition, seed=seed)
            sheet = draw_grid(make_rows(average, shown, seed=seed), columns=COLUMNS, row_names=shown.names)
            try:
                save_picture(sheet, frame_path(run.samples, step))
            except OSError as error:
                print(f"the picture of step {step:,} cannot be written ({error}). The run goes on", file=sys.stderr)


def write_run_report(
    run: RunDirectory, config: Config, average: Generator, source: Datasets, evaluator: Evaluator, figures: Mapping[str, float]
) -> None:
    """Write what the run leaves behind, and say where it is. Every rank calls this; rank 0 writes."""
    real = evaluator.real()
    rows = figure_rows(figures, real)
    pictures: list[ReportImage] = []
    with raise_together("conclude"):
        if run.first:
            write_export(run.export, average, data=config.data, images=source.train)
            pictures = draw_pictures(run, average, source, evaluator, seed=config.run.seed)
    write_report(
        run,
        title="A GAN that sees the global batch",
        intro=_intro(config, source),
        pictures=pictures,
        tables={"Generated pictures beside real ones": rows},
        notes=[*source.notes, *_notes(evaluator)],
        summary={**figures, **real},
        highlights=[name for name in HIGHLIGHTS if name in figures],
    )
    if run.first:
        print_table(rows, title="Generated pictures beside real ones")
        _say_where(run, config.model.condition)
    run.finish({**figures, **real})  # last: from here on, whatever happens, it is not run again


def draw_pictures(
    run: RunDirectory, average: Generator, source: Datasets, evaluator: Evaluator, *, seed: int
) -> list[ReportImage]:
    """The pictures of the report, in samples/. One rank calls."""
    kind, found = average.config.condition, []

    def keep(name: str, caption: str, sheet: Tensor, names: Sequence[str] = ()) -> None:
        save_picture(draw_grid(sheet, columns=COLUMNS, row_names=names), run.samples / name)
        found.append(ReportImage(run.samples / name, caption))

    shown = show_some(source.train, kind=kind, seed=seed)
    made = make_rows(average, shown, seed=seed)
    same = "" if kind == "none" else ": a column has the same noise in every row"
    keep("samples.png", f"Generated{same}. None was chosen", made, shown.names)
    if len(frames := find_frames(run.samples)) > 1:
        path = run.samples / "training.webp"
        write_animation(frames, path)
        found.append(ReportImage(path, "The same noise as the generator learns"))
    places, names = find_real(source.test, shown, kind=kind)
    real = source.test.floats(places, dtype=made.dtype)
    if len(real):
        keep("real.png", "Real pictures, of those that were kept from training", real, names)
    keep("interpolation.png", "In each row from one noise to another", make_paths(average, shown, seed=seed), shown.names)
    sheet, caption = draw_nearest(made, real, source.train, evaluator.judge)
    keep("nearest.png", caption, sheet, ("generated", "nearest by pixels", "by features"))
    return found


def draw_nearest(made: Tensor, real: Tensor, train: Images, judge: Judge) -> tuple[Tensor, str]:
    """Three rows: some of the pictures `made`, and the nearest of `train` to each, by pixels and by the judge's features."""
    chosen = torch.linspace(0, len(made) - 1, COLUMNS).long()
    near, distances = find_nearest(made, train)
    near_features, _ = find_nearest(made[chosen].to(judge.head.weight.device), train, describe=judge.features)
    rows = [made[chosen], *(train.floats(places, dtype=made.dtype) for places in (near[chosen], near_features))]
    caption = (
        "Some generated pictures, and those of the training that are nearest. The median distance to the nearest by pixels "
        f"(root mean square; black and white are 2 apart) is {distances.median():.3f} for the generated pictures above"
    )
    if len(real):
        caption += f", and {find_nearest(real, train)[1].median():.3f} for the real ones"
    return torch.cat(rows), caption


def figure_rows(figures: Mapping[str, float], real: Mapping[str, float]) -> list[dict[str, Any]]:
    """A row for each figure: what generated pictures score, and what real ones do, by "real/frechet_distance" and so on."""
    return [
        {"figure": readable_name(name), "generated": value, "real": real.get(f"real/{name}", "")}
        for name, value in figures.items()
    ]


def _intro(config: Config, source: Datasets) -> str:
    told = {"class": "by class", "vector": "by vector", "text": "by text", "none": "without conditions"}[config.model.condition]
    return (
        f"A generator of pictures of {source.train.size} pixels, {told}, was trained on {len(source.train):,} pictures, "
        f"{config.run.steps:,} steps of {config.data.batch:,}, with the {config.loss.kind} loss and the penalties "
        f"{config.loss.penalty}. All of it sees the global batch: on any number of ranks it is the same training.\n\n"
        "What is shown and measured is the moving average of the generator after the last step; nothing was chosen by a test."
    )


def _notes(evaluator: Evaluator) -> list[str]:
    judge = evaluator.judge
    task = f"the {len(judge.classes)} classes" if judge.classes else "how far pictures were turned"
    return [
        "The Fréchet distance is not FID, and compares to no published one: its features are those of a small classifier of "
        f"{task}, which was trained on the same pictures and is right about {judge.accuracy:.1%} of those that were kept from "
        "training. The other figures go by the same classifier.",
        f"“Real” is what the {len(evaluator.source.test):,} pictures score that were kept from training. "
        f"{evaluator.config.samples:,} were generated. Of fewer pictures chance alone makes the distances larger; precision "
        "and recall go by as many real pictures, so by wider balls: the two columns compare roughly.",
    ]


def print_table(rows: Sequence[Mapping[str, Any]], *, title: str) -> None:
    """On the terminal."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    for name in rows[0] if rows else ():
        table.add_column(name, justify="left" if name == "figure" else "right")
    for row in rows:
        table.add_row(*(format_number(cell) for cell in row.values()))
    Console(width=None if Console().is_terminal else 110).print(table)


def _say_where(run: RunDirectory, kind: Condition) -> None:
    from rich.console import Console

    console = Console()
    python = "python" if shutil.which("python") == sys.executable else sys.executable  # of a checkout: not on the path
    asked = {"class": "", "none": "", "text": ' --texts "red heart"', "vector": " --vectors FILE.npy"}[kind]
    for what, command in (
        ("Report", str(run.path / "report.html")),
        ("Make more", f"{python} -m unisono_models.gan.commands.sample {run.path}{asked} --out grid.png"),
        ("Measure again", f"{python} -m unisono_models.gan.evaluate {run.path}"),
    ):
        console.print(f"{what}:  {command}", soft_wrap=True, highlight=False)

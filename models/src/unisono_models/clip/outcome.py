"""The end of a run: the model exported, pictures of what it finds, a table, a report."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from unisono_models.clip.config import Config
from unisono_models.clip.data.emoji import emoji_pairs
from unisono_models.clip.evaluate import Encoder, pixel_floor
from unisono_models.clip.gallery import Gallery
from unisono_models.clip.model import Clip
from unisono_models.clip.objective import Learner
from unisono_models.clip.picture import draw_searches
from unisono_models.clip.source import Source
from unisono_models.datasets.skip_report import SkipReport
from unisono_models.training.distributed.object_collectives import raise_together
from unisono_models.training.run.report import ReportImage, write_report
from unisono_models.training.run.run_directory import RunDirectory

QUERIES = ("red heart", "happy dog", "fruit", "rain and thunder", "I am so tired", "fish in the sea", "let's party")
FIGURES = ("recall@1", "recall@5", "recall@10", "median_rank")


def conclude(
    run: RunDirectory,
    config: Config,
    learner: Learner,
    encoder: Encoder,
    source: Source,
    figures: Mapping[str, float],
    skipped: SkipReport,
) -> None:
    """Write what the run leaves behind, and say where it is. Every rank calls this; rank 0 writes."""
    ranks, is_emoji = encoder.ranks, config.data.source == "emoji"
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(encoder.model, options=options)  # whole, on rank 0
    floor = pixel_floor(source.tests, ranks, size=encoder.size)
    broken = skipped.report()
    features = encoder.all_pictures(emoji_pairs()).float().cpu() if is_emoji else None
    pictures = []
    with raise_together("conclude"):
        if ranks.first:
            clip = _whole(learner, weights)
            clip.save_pretrained(run.export)
            if is_emoji:
                path = run.samples / "search.png"
                gallery = Gallery.from_emoji(clip, cache=run.path / "gallery.safetensors", features=features)
                draw_searches(gallery, QUERIES, path)
                pictures.append(ReportImage(path, "Typed words, and the emoji that the model finds for them"))
    rows = table_rows({**figures, **floor})
    write_report(
        run,
        title="A contrastive learner of pictures and captions",
        intro=_intro(config, source),
        pictures=pictures,
        tables={"Retrieval on held-out data": rows},
        notes=[broken, *source.notes],
        summary={**figures, **floor},
        highlights=[name for name in figures if name.endswith(("text_to_image/recall@1", "text_to_image/recall@10"))],
    )
    if ranks.first:
        _show(rows, run)
    run.finish({**figures, **floor})  # last: from here on, whatever happens, it is not run again


def table_rows(figures: Mapping[str, float]) -> list[dict[str, Any]]:
    """A row for each task of each test, for the report and the terminal."""
    tasks = dict.fromkeys(name.rpartition("/")[0] for name in figures if name.endswith("recall@1"))
    return [
        {"test": task.partition("/")[0], "task": task.partition("/")[2].replace("_", " ")}
        | {name: figures[f"{task}/{name}"] for name in FIGURES}
        for task in sorted(tasks)
    ] + [
        {"test": name.partition("/")[0], "task": "zero-shot by group", "recall@1": value}
        for name, value in figures.items()
        if name.endswith("zero_shot/accuracy")
    ]


def _whole(learner: Learner, weights: Mapping[str, Any]) -> Clip:
    """The model with all its weights, on the CPU and in float32, however it was spread."""
    clip = Clip(learner.clip.portable_config(), learner.clip.tokenizer)
    own = {name.removeprefix("clip."): value for name, value in weights.items() if name.startswith("clip.")}
    clip.load_state_dict(own)
    clip.scale = min(float(weights["pairs.log_scale"].exp()), learner.pairs.max_scale or math.inf)
    if "pairs.bias" in weights:
        clip.bias = float(weights["pairs.bias"])
    return clip.eval()


def _intro(config: Config, source: Source) -> str:
    image, text = config.model.image, config.model.text
    tests = ", ".join(f"{name} ({len(test.pairs):,} pairs)" for name, test in source.tests.items())
    return (
        f"An image tower ({image.model} at {image.size} pixels) and a text tower ({text.model or text.config.get('model_type')}"
        f"{', frozen' if text.frozen else ''}) were trained on {len(source.train):,} pairs, {config.run.steps:,} steps of "
        f"{config.data.batch:,}, with the {config.objective.loss} loss over the global batch.\n\nTests: {tests}."
    )


def _show(rows: Sequence[Mapping[str, Any]], run: RunDirectory) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Retrieval on held-out data")
    for name in ("test", "task", *FIGURES):
        table.add_column(name.replace("_", " "), justify="left" if name in ("test", "task") else "right")
    for row in rows:
        cells = [row.get(name, "") for name in ("test", "task", *FIGURES)]
        table.add_row(*(f"{cell:.3g}" if isinstance(cell, float) else cell for cell in cells))
    console = Console(width=None if Console().is_terminal else 110)
    console.print(table)
    python = "python" if shutil.which("python") == sys.executable else sys.executable  # of a checkout: not on the path
    for what, command in (
        ("Report", str(run.path / "report.html")),
        ("Search", f'{python} -m unisono_models.clip.search {run.path} "red heart"'),
        ("Type and see", f"{python} -m unisono_models.clip.serve {run.path}"),
    ):
        console.print(f"{what}:  {command}", soft_wrap=True, highlight=False)

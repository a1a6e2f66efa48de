"""The end of a run: the exported model, an image of example searches, a table of metrics, and the report."""

import math
import shlex
from collections.abc import Mapping
from typing import Any

from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from unisono_models.clip.config import Config
from unisono_models.clip.data.dataset import ClipDataset, Datasets, describe_sizes
from unisono_models.clip.evaluate import Encoder, pixel_baseline
from unisono_models.clip.figures import draw_searches
from unisono_models.clip.gallery import Gallery
from unisono_models.clip.loss import ClipTrainingModule
from unisono_models.clip.model import Clip
from unisono_models.datasets.skip_report import SkipReport
from unisono_models.training.distributed.object_collectives import raise_together
from unisono_models.training.run.report import ReportImage, format_number, print_next_commands, print_table, write_report
from unisono_models.training.run.run_directory import RunDirectory

SEARCHED = 2000  # images of a user's files that the searches of the report look through
METRICS = ("recall@1", "recall@5", "recall@10", "median_rank")


def write_run_report(
    run: RunDirectory,
    config: Config,
    module: ClipTrainingModule,
    encoder: Encoder,
    dataset: ClipDataset,
    datasets: Datasets,
    metrics: Mapping[str, float],
    skipped: SkipReport,
) -> None:
    """Export the model, write the report, and print the metrics. All ranks call it; rank 0 writes."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(encoder.model, options=options)  # complete on rank 0
    metrics = {**metrics, **pixel_baseline(datasets.tests, encoder.ranks, size=encoder.size)}
    skip_report = skipped.report()
    notes = [skip_report, *unread_tests(metrics, datasets), *describe_sizes(config.data, datasets)]
    images = features = None
    queries = dataset.choose_example_queries()
    if queries:
        images = dataset.gallery(size=encoder.size, limit=SEARCHED)
        features = encoder.encode_all_images(images.pairs).float().cpu()
        if len(features) < len(images.pairs):  # some cannot be read: rank 0 encodes the others by itself
            features = None
    with raise_together("write_run_report"):
        if run.first:
            clip = _exported_model(module, weights)
            clip.save_pretrained(run.export)
            if images is not None:
                gallery = Gallery.build(clip, images, cache=run.path / "gallery.safetensors", features=features)
                draw_searches(gallery, queries, run.samples / "search.png")
    samples = [ReportImage(run.samples / "search.png", "Queries, and the images that the model finds for them")]
    rows = metric_rows(metrics)
    write_report(
        run,
        title=f"{run.path.name}: a contrastive model of images and captions",
        intro=_introduction(config, datasets),
        images=samples if images is not None else [],
        tables={"Retrieval on held-out data": rows},
        notes=[*notes, *datasets.notes],
        summary=metrics,
        highlights=[name for name in metrics if name.endswith(("text_to_image/recall@1", "text_to_image/recall@10"))],
    )
    if run.first:
        print_table(rows, title="Retrieval on held-out data", format_cell=_format_cell)
        for note in notes:
            if not note.startswith("0 of "):  # nothing was skipped
                print(note)
        folder, query = shlex.quote(str(run.path)), shlex.quote(next(iter(queries), "words"))
        search, serve = f"unisono_models.clip search {folder} {query}", f"unisono_models.clip serve {folder}"
        print_next_commands(run, {"Search": search, "Search page": serve})
    run.finish(metrics)  # last: a finished run is never run again


def metric_rows(metrics: Mapping[str, float]) -> list[dict[str, Any]]:
    """Make a row for each task of each test, for the report and the terminal."""
    tasks = sorted({name.rpartition("/")[0] for name in metrics if name.endswith("recall@1")})
    rows: list[dict[str, Any]] = []
    for task in tasks:
        test, _, name = task.partition("/")
        found: dict[str, float] = {each: metrics[f"{task}/{each}"] for each in METRICS}
        found["median_rank"] = int(rank) if (rank := found["median_rank"]) == int(rank) else rank
        rows.append({"test": test, "task": name.replace("_", " ")} | found | {"pairs": int(metrics[f"{test}/rows"])})
    for name, value in metrics.items():
        if name.endswith("zero_shot/accuracy"):
            rows.append({"test": name.partition("/")[0], "task": "zero-shot by group", "recall@1": value})
    return rows


def unread_tests(metrics: Mapping[str, float], datasets: Datasets) -> list[str]:
    """Say how many pairs of each test could not be read, if any."""
    found = {name: (len(test.pairs), int(metrics[f"{name}/rows"])) for name, test in datasets.tests.items()}
    return [
        f"{count - read:,} of {count:,} pairs of the test {name} skipped."
        for name, (count, read) in found.items()
        if read < count
    ]


def _format_cell(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) and value <= 1 else format_number(value)


def _exported_model(module: ClipTrainingModule, weights: Mapping[str, Any]) -> Clip:
    """Make the model with all its weights, on the CPU and in float32, even if it was sharded."""
    clip = Clip(module.clip.portable_config(), module.clip.tokenizer)
    clip.load_state_dict({name.removeprefix("clip."): value for name, value in weights.items() if name.startswith("clip.")})
    clip.scale = min(float(weights["pairs.log_scale"].exp()), module.pairs.max_scale or math.inf)
    if "pairs.bias" in weights:
        clip.bias = float(weights["pairs.bias"])
    return clip.eval()


def _introduction(config: Config, datasets: Datasets) -> str:
    image, text = config.model.image, config.model.text
    tests = "\n\n".join(
        f"Test {name}, {len(test.pairs):,} pairs: {test.description or 'pairs that were not trained on'}."
        for name, test in datasets.tests.items()
    )
    batch = min(config.data.batch, len(datasets.train))
    frozen = [", frozen" if tower.frozen else "" for tower in (image, text)]
    return (
        f"An image tower ({image.model} at {image.size} pixels{frozen[0]}) and a text tower "
        f"({text.model or text.config.get('model_type')}{frozen[1]}) were trained on {len(datasets.train):,} pairs of "
        f"{config.data.source}, in {config.run.steps:,} steps of {batch:,} pairs, with the "
        f"{config.loss.kind} loss over the global batch.\n\n{tests}"
    )

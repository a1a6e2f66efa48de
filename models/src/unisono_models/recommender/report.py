"""The scores that others have published under the same protocols, to compare a run with."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from unisono.embedding import Ragged
from unisono_models.datasets.skip_report import SkipReport
from unisono_models.recommender.config import Config, DataConfig, ModelConfig
from unisono_models.recommender.data.ratings import Ratings, read_titles
from unisono_models.recommender.evaluate import Evaluator
from unisono_models.recommender.export import full_weights, write_export
from unisono_models.recommender.model.click_model import HEADS
from unisono_models.training.distributed.object_collectives import raise_together
from unisono_models.training.run.plots import COLOURS, INKS
from unisono_models.training.run.report import ReportImage, write_report
from unisono_models.training.run.run_directory import RunDirectory

# RecBole 1.2, benchmark/md/ml-1m_context.md and its results: embeddings of 16, random 8:1:1, best of a search by validation.
CONTEXT = {
    "lr": {"auc": 0.8699, "log_loss": 0.3488},
    "fm": {"auc": 0.8935, "log_loss": 0.3262},
    "dcn": {"auc": 0.8994, "log_loss": 0.3164},
    "deepfm": {"auc": 0.8997, "log_loss": 0.3150},
}
# RecBole-GNN, results/general/ml-1m.md: embeddings of 64, 8:1:1 of each user, full sort.
GENERAL = {
    "BPR": {"ndcg@10": 0.2407, "recall@10": 0.1725},
    "LightGCN": {"ndcg@10": 0.2538, "recall@10": 0.1861, "hit@10": 0.7330, "mrr@10": 0.4388, "precision@10": 0.1863},
}
CLICKS = ("auc", "log_loss", "accuracy", "rate", "predicted_rate", "rows", "bad_rows")
RANKING = ("ndcg@10", "recall@10", "hit@10", "mrr@10", "precision@10", "recall@50", "users")


def published_rows(config: Config, figures: Mapping[str, float]) -> list[dict[str, Any]]:
    """A row for each figure of the test, beside what is published for it, where the protocol is the same."""
    columns: dict[str, Mapping[str, float]] = {}
    if protocol_of(config.data) == "context" and config.model.kind in CONTEXT:
        columns = {f"published ({config.model.kind})": CONTEXT[config.model.kind]}
    elif protocol_of(config.data) == "general" and config.model.kind == "two_tower":
        columns = {f"published ({name})": scores for name, scores in GENERAL.items()}
    rows = []
    for name in RANKING if config.model.kind == "two_tower" else CLICKS:
        if f"test/{name}" in figures:
            others = {column: scores.get(name, "") for column, scores in columns.items()}
            rows.append({"figure": name, "this run": figures[f"test/{name}"], **others})
    return rows


def protocol_of(data: DataConfig) -> str:
    """ "context" or "general" if the data is that of RecBole's protocol of this name on ml-1m, or nothing."""
    if data.source != "ml-1m" or data.parts != (0.8, 0.1, 0.1):
        return ""
    if (data.keep, data.threshold, data.split) == ("[0,3);(3,inf)", 4.0, "rows"):
        return "context"
    return "general" if (data.keep, data.split) == ("[3,inf)", "per_user") else ""


NEAREST = 4


def item_vectors(model: ModelConfig, ratings: Ratings, weights: Mapping[str, Tensor]) -> Tensor | None:
    """The embedding of each item by its row, of unit length; None if the model has none."""
    name = f"tables.collection.tables.table_{ratings.item}.weight"
    if name not in weights or model.kind == "lr":
        return None
    linear = model.kind != "two_tower" and HEADS[model.kind].linear
    vectors = weights[name].float()
    return F.normalize(vectors[:, 1:] if linear else vectors, dim=1)


def most_rated(ratings: Ratings, count: int) -> Tensor:
    """The rows of the items with the most interactions, and at least ten."""
    counts = ratings.items.bincount(minlength=len(ratings.vocabularies[ratings.item]))
    chosen = counts.argsort(descending=True, stable=True)[:count]
    return chosen[counts[chosen] >= 10]


def title_of(row: int, ratings: Ratings, titles: Mapping[str, str]) -> str:
    """What to call the item of a row."""
    name = ratings.vocabularies[ratings.item].value(row)
    return titles.get(name, name)


def nearest_items(vectors: Tensor, ratings: Ratings, titles: Mapping[str, str], *, count: int = 10) -> list[dict[str, Any]]:
    """For the most rated items, those that are nearest to them among the thousand most rated: rows of a table."""
    known = most_rated(ratings, 1000)
    rows = []
    for item in known[:count].tolist():
        near = (vectors[known] @ vectors[item]).masked_fill(known == item, -torch.inf)
        found = known[near.topk(min(NEAREST, max(len(known) - 1, 0))).indices].tolist()
        names = [title_of(row, ratings, titles) for row in (item, *found)]
        rows.append({"item": names[0]} | {f"{place}": name for place, name in enumerate(names[1:], 1)})
    return rows


SHOWN, NAMED, GROUPS, LETTERS = 400, 34, 6, 34


def draw_map(vectors: Tensor, ratings: Ratings, titles: Mapping[str, str], path: Path) -> None:
    """Draw the most rated items as a PNG, in the colours of the most frequent values of their first bag of ids (genres)."""
    from matplotlib.figure import Figure

    rows = most_rated(ratings, SHOWN)
    points = _flatten(vectors[rows])
    background, ink, faint, _ = INKS["light"]
    figure = Figure(figsize=(10, 7), dpi=120, facecolor=background)
    axes = figure.add_axes((0.02, 0.02, 0.96, 0.96))
    axes.axis("off")
    groups, names = _group(ratings, rows)
    for number, name in enumerate(names):
        chosen = groups == number
        colour = COLOURS["light"][number] if number < len(names) - 1 else faint
        x, y = points[chosen].T.tolist()
        axes.scatter(x, y, s=26, color=colour, alpha=0.75, linewidths=0, label=name)
    taken: list[tuple[float, float]] = []
    for place, row in enumerate(rows.tolist()):
        at = (float(points[place, 0]), float(points[place, 1]))
        if len(taken) < NAMED and all(abs(at[0] - a) > 0.34 or abs(at[1] - b) > 0.055 for a, b in taken):
            taken.append(at)
            text = shorten(title_of(row, ratings, titles), LETTERS, placeholder=" …")
            axes.annotate(text, at, xytext=(4, 3), textcoords="offset points", fontsize=7.5, color=ink)
    if len(names) > 1:
        axes.legend(loc="lower left", frameon=False, fontsize=9, labelcolor=ink)
    figure.savefig(path)


def _flatten(vectors: Tensor) -> Tensor:
    """(items, 2), within -1 and 1, by principal components; signs are those that make the largest weight positive."""
    if not len(vectors):
        return torch.zeros(0, 2)
    centred = (vectors - vectors.mean(0)).double()
    _, _, directions = torch.linalg.svd(centred, full_matrices=False)
    directions = directions[:2]
    directions = directions * directions.gather(1, directions.abs().argmax(1, keepdim=True)).sign()
    points = centred @ directions.T
    points = torch.nn.functional.pad(points, (0, 2 - points.shape[1]))
    return points / points.abs().amax(0).clamp(min=1e-9)


def _group(ratings: Ratings, rows: Tensor) -> tuple[Tensor, list[str]]:
    """The group of each item, by number, and the names of the groups, "other" last."""
    for feature in ratings.features:
        side, column = ratings.columns[feature.name]
        if side == "item" and isinstance(column, Ragged):
            bags = [column.values[a:b].tolist() for a, b in zip(column.offsets[rows], column.offsets[rows + 1], strict=True)]
            flat = torch.tensor([value for bag in bags for value in bag], dtype=torch.int64)
            frequent = flat.bincount().argsort(descending=True, stable=True)[: GROUPS - 1].tolist()
            # The rarest of an item's frequent values says most about it: of "Comedy Drama Sci-Fi", the last.
            groups = [max((frequent.index(v) for v in bag if v in frequent), default=len(frequent)) for bag in bags]
            names = [ratings.vocabularies[feature.name].value(value) for value in frequent]
            return torch.tensor(groups), [*names, "other"]
    return torch.zeros(len(rows), dtype=torch.int64), ["items"]


HIGHLIGHTS = ("test/auc", "test/log_loss", "test/ndcg@10", "test/recall@10", "test/hit@10")


def write_run_report(
    run: RunDirectory, config: Config, evaluator: Evaluator, figures: Mapping[str, float], skipped: SkipReport
) -> None:
    """Write what the run leaves behind, and say where it is. Every rank calls this; rank 0 writes."""
    learner, source, ranks = evaluator.learner, evaluator.source, evaluator.ranks
    weights = full_weights(learner.model, keep=ranks.first)
    bad = skipped.report()
    pictures, tables = [], {"Test": published_rows(config, figures)}
    with raise_together("conclude"):
        if ranks.first:
            vocabularies = source.ratings.vocabularies if source.ratings is not None else {}
            write_export(
                run.export,
                weights,
                model=config.model,
                data=config.data,
                features=source.features,
                vocabularies=vocabularies,
            )
            if source.ratings is not None and (vectors := item_vectors(config.model, source.ratings, weights)) is not None:
                titles = read_titles(config.data)
                tables["Items, and those that are nearest to them"] = nearest_items(vectors, source.ratings, titles)
                path = run.samples / "items.png"
                draw_map(vectors, source.ratings, titles, path)
                pictures.append(ReportImage(path, "The most rated items, by the two main directions of their embeddings"))
    plan = learner.tables.collection.plan
    if plan is not None:
        tables["Where the tables lie"], tables["What ranks hold and send"] = plan.to_rows()
    write_report(
        run,
        title="A recommender on sharded tables",
        intro=_intro(config, evaluator),
        images=pictures,
        tables=tables,
        notes=[bad, *source.notes],
        summary=figures,
        highlights=[name for name in HIGHLIGHTS if name in figures],
    )
    if ranks.first:
        _show(tables["Test"], run, source.ratings is not None)
    run.finish(figures)  # last: from here on, whatever happens, it is not run again


def _intro(config: Config, evaluator: Evaluator) -> str:
    source, model = evaluator.source, config.model
    sizes = f"{source.train.rows:,} rows, and tested on {source.test.rows:,}"
    features = ", ".join(feature.name for feature in source.features)
    return (
        f"A model of kind {model.kind}, with embeddings of {model.dim}, was trained on {sizes}, {config.run.steps:,} steps of "
        f"{config.data.batch:,}. It sees {features}.\n\nIts tables lie on {evaluator.ranks.size} ranks; the test is one "
        "of the last step, and nothing was chosen by it."
    )


def _text(cell: object) -> str:
    if not isinstance(cell, float):
        return str(cell)
    return f"{cell:,.0f}" if cell > 1 and cell.is_integer() else f"{cell:.4f}"


def _show(rows: list[dict[str, Any]], run: RunDirectory, users: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Test")
    for name in rows[0]:
        table.add_column(name, justify="left" if name == "figure" else "right")
    for row in rows:
        table.add_row(*(_text(cell) for cell in row.values()))
    console = Console(width=None if Console().is_terminal else 110)
    console.print(table)
    python = "python" if shutil.which("python") == sys.executable else sys.executable  # of a checkout: not on the path
    commands = [("Report", str(run.path / "report.html"))]
    if users:
        commands.append(("Recommend", f"{python} -m unisono_models.recommender.commands.recommend {run.path}"))
    for what, command in commands:
        console.print(f"{what}:  {command}", soft_wrap=True, highlight=False)

"""The end of a run: the exported model, a map of the items, tables and report.html."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from unisono.embedding import Ragged
from unisono_models.datasets.skip_report import SkipReport
from unisono_models.recommender.config import Config, ModelConfig
from unisono_models.recommender.data.ratings import Ratings, read_titles
from unisono_models.recommender.evaluate import Evaluator
from unisono_models.recommender.model.export import full_weights, write_export
from unisono_models.recommender.model.heads import HEADS
from unisono_models.training.distributed.object_collectives import raise_together
from unisono_models.training.run.plots import COLOURS, INKS
from unisono_models.training.run.report import ReportImage, print_next_commands, print_table, write_report
from unisono_models.training.run.run_directory import RunDirectory

HIGHLIGHTS = ("test/auc", "test/log_loss", "test/ndcg@10", "test/recall@10", "test/hit@10")
CLICK_METRICS = ("auc", "log_loss", "accuracy", "rate", "predicted_rate", "rows", "bad_rows")
RANKING_METRICS = ("ndcg@10", "recall@10", "hit@10", "mrr@10", "precision@10", "recall@50", "users")
COUNTS = ("rows", "bad_rows", "users")
# RecBole 1.2, benchmark/md/ml-1m_context.md and its results: embeddings of 16, random 8:1:1, best of a search by validation.
PUBLISHED_CONTEXT = {
    "lr": {"auc": 0.8699, "log_loss": 0.3488},
    "fm": {"auc": 0.8935, "log_loss": 0.3262},
    "dcn": {"auc": 0.8994, "log_loss": 0.3164},
    "deepfm": {"auc": 0.8997, "log_loss": 0.3150},
}
# RecBole-GNN, results/general/ml-1m.md: embeddings of 64, 8:1:1 of each user, full sort.
PUBLISHED_GENERAL = {
    "BPR": {"ndcg@10": 0.2407, "recall@10": 0.1725},
    "LightGCN": {"ndcg@10": 0.2538, "recall@10": 0.1861, "hit@10": 0.7330, "mrr@10": 0.4388, "precision@10": 0.1863},
}
# RecBole 1.2, benchmark/md/ml-1m_seq.md and benchmark/hyper/sequential: embeddings of 64, the last 50 items, leave one out,
# full sort, best of a search by validation.
PUBLISHED_SEQUENTIAL = {
    "SASRec": {"ndcg@10": 0.1286, "recall@10": 0.2468, "hit@10": 0.2468, "mrr@10": 0.0929, "precision@10": 0.0247},
    "GRU4Rec": {"ndcg@10": 0.1545, "recall@10": 0.2776, "hit@10": 0.2776, "mrr@10": 0.1171, "precision@10": 0.0278},
}
_NEAREST = 4
_MAP_ITEMS, _MAP_TITLES, _MAP_GROUPS, _TITLE_LETTERS = 400, 34, 6, 34


def write_run_report(
    run: RunDirectory,
    config: Config,
    evaluator: Evaluator,
    metrics: Mapping[str, float],
    skipped: SkipReport,
    notes: Sequence[str] = (),
) -> None:
    """Export the model, write the report, and print the test metrics. All ranks call; rank 0 writes.

    notes: What the report should say about the data.
    """
    module, datasets, ranks = evaluator.module, evaluator.datasets, evaluator.ranks
    ratings = datasets.ratings
    weights = full_weights(module.model, keep=ranks.first)
    skip_note = skipped.report()
    images = []
    test_rows = metric_rows(config, metrics)
    tables = {"Test": [row for row in test_rows if row["metric"] not in COUNTS]}  # the same decimals in a column
    with raise_together("write_run_report"):
        if ranks.first:
            write_export(
                run.export,
                weights,
                model=config.model,
                data=config.data,
                features=datasets.features,
                vocabularies=ratings.vocabularies if ratings is not None else {},
            )
            vectors = None if ratings is None else item_vectors(config.model, ratings, weights)
            if ratings is not None and vectors is not None:
                titles = read_titles(ratings)
                tables["Items and their nearest neighbours"] = nearest_items(vectors, ratings, titles)
                path = run.samples / "items.png"
                draw_item_map(vectors, ratings, titles, path)
                images.append(ReportImage(path, "The most rated items, by the first two principal components"))
    plan = module.tables.collection.plan
    if plan is not None:
        tables["The layout of the tables"], tables["Memory and traffic of each rank"] = plan.to_rows()
    write_report(
        run,
        title="A recommender on sharded tables",
        intro=_introduction(config, evaluator, metrics, run.remarks.get("ended_early")),
        images=images,
        tables=tables,
        notes=[skip_note, *notes],
        summary=metrics,
        highlights=[name for name in HIGHLIGHTS if name in metrics],
    )
    if ranks.first:
        print_table(test_rows, title="Test", format_cell=_format_cell)
        recommend = {"Recommend": f"unisono_models.recommender recommend {run.path}"} if ratings is not None else {}
        print_next_commands(run, recommend)
    run.finish(metrics)  # last: a run that is marked as finished is not started again


def _introduction(config: Config, evaluator: Evaluator, metrics: Mapping[str, float], ended_early: str | None) -> str:
    datasets, model = evaluator.datasets, config.model
    features = ", ".join(feature.name for feature in datasets.features)
    rows = min(config.data.batch, datasets.train.rows)
    tested = "after the last step"
    if "best_step" in metrics:
        tested = f"with the weights after step {metrics['best_step']:,.0f}, which were the best by validation"
    return (
        f"A model of kind {model.kind}, with embeddings of {model.dim}, was trained on {datasets.train.rows:,} rows of "
        f"{config.data.source}, in {config.run.steps:,} steps of {rows:,}, and tested on {datasets.test.rows:,} other rows. "
        f"Its features are {features}.{f' The run ended early {ended_early}.' if ended_early else ''}\n\n"
        f"Its tables are sharded over {evaluator.ranks.described}. It was tested once, {tested}. The test did not "
        "influence the training."
    )


def metric_rows(config: Config, metrics: Mapping[str, float]) -> list[dict[str, Any]]:
    """One row for each metric of the test, beside the published values, where the protocol is the same."""
    columns: dict[str, Mapping[str, float]] = {}
    protocol = recbole_protocol(config)
    if protocol == "context" and config.model.kind in PUBLISHED_CONTEXT:
        columns = {f"published ({config.model.kind})": PUBLISHED_CONTEXT[config.model.kind]}
    elif protocol == "general" and config.model.kind == "two_tower":
        columns = {f"published ({name})": scores for name, scores in PUBLISHED_GENERAL.items()}
    elif protocol == "sequential" and config.model.kind == "sasrec":
        columns = {f"published ({name})": scores for name, scores in PUBLISHED_SEQUENTIAL.items()}
    rows = []
    for name in RANKING_METRICS if config.model.retrieves else CLICK_METRICS:
        if f"test/{name}" in metrics:
            published = {column: scores.get(name, "") for column, scores in columns.items()}
            rows.append({"metric": name, "this run": metrics[f"test/{name}"], **published})
    return rows


def recbole_protocol(config: Config) -> str:
    """ "context", "general" or "sequential" if this is RecBole's protocol of this name on ml-1m, else the empty string."""
    data = config.data
    if data.source != "ml-1m":
        return ""
    if (data.keep, data.k_core, data.split, config.evaluation.repeats) == ("[3,inf)", 10, "leave_one_out", True):
        return "sequential"
    if data.parts != (0.8, 0.1, 0.1) or data.k_core or config.evaluation.repeats:
        return ""
    if (data.keep, data.threshold, data.split) == ("[0,3);(3,inf)", 4.0, "rows"):
        return "context"
    return "general" if (data.keep, data.split) == ("[3,inf)", "per_user") else ""


def item_vectors(model: ModelConfig, ratings: Ratings, weights: Mapping[str, Tensor]) -> Tensor | None:
    """The embedding of each item by its row, of unit length; None if the model has none."""
    name = f"tables.collection.tables.table_{ratings.item}.weight"
    if name not in weights or model.kind == "lr":
        return None
    linear = not model.retrieves and HEADS[model.kind].linear
    vectors = weights[name].float()
    return F.normalize(vectors[:, 1:] if linear else vectors, dim=1)


def most_rated(ratings: Ratings, count: int) -> Tensor:
    """The rows of the items with the most interactions, of those that have at least ten."""
    counts = ratings.items.bincount(minlength=len(ratings.vocabularies[ratings.item]))
    chosen = counts.argsort(descending=True, stable=True)[:count]
    return chosen[counts[chosen] >= 10]


def nearest_items(vectors: Tensor, ratings: Ratings, titles: Mapping[str, str], *, count: int = 10) -> list[dict[str, Any]]:
    """A table of the most rated items, each with its nearest neighbours among the thousand most rated."""
    known = most_rated(ratings, 1000)
    rows = []
    for item in known[:count].tolist():
        scores = (vectors[known] @ vectors[item]).masked_fill(known == item, -torch.inf)
        nearest = known[scores.topk(min(_NEAREST, max(len(known) - 1, 0))).indices].tolist()
        row = {"item": _title(item, ratings, titles)}
        row |= {f"{place}": _title(other, ratings, titles) for place, other in enumerate(nearest, 1)}
        rows.append(row)
    return rows


def _title(row: int, ratings: Ratings, titles: Mapping[str, str]) -> str:
    item = ratings.vocabularies[ratings.item].value(row)
    return titles.get(item, item)


def draw_item_map(vectors: Tensor, ratings: Ratings, titles: Mapping[str, str], path: Path) -> None:
    """Draw the most rated items as a PNG, coloured by the most frequent values of their first bag of ids (genres)."""
    from matplotlib.figure import Figure

    rows = most_rated(ratings, _MAP_ITEMS)
    points = _principal_components(vectors[rows])
    background, ink, faint, _ = INKS["light"]
    figure = Figure(figsize=(10, 7), dpi=120, facecolor=background)
    axes = figure.add_axes((0.02, 0.02, 0.96, 0.96))
    axes.axis("off")
    groups, names = _group_items(ratings, rows)
    for number, name in enumerate(names):
        colour = COLOURS["light"][number] if number < len(names) - 1 else faint
        x, y = points[groups == number].T.tolist()
        axes.scatter(x, y, s=26, color=colour, alpha=0.75, linewidths=0, label=name)
    labelled: list[tuple[float, float]] = []
    for row, (x, y) in zip(rows.tolist(), points.tolist(), strict=True):
        if len(labelled) < _MAP_TITLES and all(abs(x - a) > 0.34 or abs(y - b) > 0.055 for a, b in labelled):
            labelled.append((x, y))
            text = shorten(_title(row, ratings, titles), _TITLE_LETTERS, placeholder=" …")
            axes.annotate(text, (x, y), xytext=(4, 3), textcoords="offset points", fontsize=7.5, color=ink)
    if len(names) > 1:
        axes.legend(loc="lower left", frameon=False, fontsize=9, labelcolor=ink)
    figure.savefig(path)


def _principal_components(vectors: Tensor) -> Tensor:
    """The first two components of each vector, scaled to -1 to 1. Signs make the largest weight of a component positive."""
    if not len(vectors):
        return torch.zeros(0, 2)
    centred = (vectors - vectors.mean(0)).double()
    _, _, directions = torch.linalg.svd(centred, full_matrices=False)
    directions = directions[:2]
    directions = directions * directions.gather(1, directions.abs().argmax(1, keepdim=True)).sign()
    points = centred @ directions.T
    points = torch.nn.functional.pad(points, (0, 2 - points.shape[1]))
    return points / points.abs().amax(0).clamp(min=1e-9)


def _group_items(ratings: Ratings, rows: Tensor) -> tuple[Tensor, list[str]]:
    """The number of each item's group, and the names of the groups, "other" last."""
    for feature in ratings.features:
        side, column = ratings.columns[feature.name]
        if side == "item" and isinstance(column, Ragged):
            bags = [column.values[a:b].tolist() for a, b in zip(column.offsets[rows], column.offsets[rows + 1], strict=True)]
            flat = torch.tensor([value for bag in bags for value in bag], dtype=torch.int64)
            frequent = flat.bincount().argsort(descending=True, stable=True)[: _MAP_GROUPS - 1].tolist()
            # The rarest of an item's frequent values says most about it: of "Comedy Drama Sci-Fi", the last.
            groups = [max((frequent.index(v) for v in bag if v in frequent), default=len(frequent)) for bag in bags]
            names = [ratings.vocabularies[feature.name].value(value) for value in frequent]
            return torch.tensor(groups), [*names, "other"]
    return torch.zeros(len(rows), dtype=torch.int64), ["items"]


def _format_cell(cell: object) -> str:
    if not isinstance(cell, float):
        return str(cell)
    return f"{cell:,.0f}" if cell > 1 and cell.is_integer() else f"{cell:.4f}"

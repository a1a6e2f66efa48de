"""The end of a run: the model exported, a picture, tables, a report."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from typing import Any

from unisono_models.datasets.skip_report import SkipReport
from unisono_models.recommender.config import Config
from unisono_models.recommender.evaluation import Evaluator
from unisono_models.recommender.export import full_weights, write_export
from unisono_models.recommender.neighbours import item_vectors, nearest_items
from unisono_models.recommender.picture import draw_map
from unisono_models.recommender.published import published_rows
from unisono_models.recommender.titles import read_titles
from unisono_models.training.distributed.object_collectives import raise_together
from unisono_models.training.run.report import ReportImage, write_report
from unisono_models.training.run.run_directory import RunDirectory

HIGHLIGHTS = ("test/auc", "test/log_loss", "test/ndcg@10", "test/recall@10", "test/hit@10")


def conclude(
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
        pictures=pictures,
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
        commands.append(("Recommend", f"{python} -m unisono_models.recommender.recommend {run.path}"))
    for what, command in commands:
        console.print(f"{what}:  {command}", soft_wrap=True, highlight=False)

"""What items are called, where the data says."""

from __future__ import annotations

from pathlib import Path

from unisono_models.recommender.config import DataConfig
from unisono_models.recommender.data.atomic import read_atomic
from unisono_models.recommender.data.movielens import PACKAGES, movielens_folder

TITLES = ("movie_title", "title", "name")


def read_titles(config: DataConfig) -> dict[str, str]:
    """The titles of items by their ids, with the year if that is not in the title; none if there are no such columns."""
    folder = movielens_folder(config.source) if config.source in PACKAGES else Path(config.source)
    paths = [folder.with_suffix(".item")] if folder.is_file() else sorted(folder.glob("*.item"))
    if not paths or not paths[0].is_file():
        return {}
    table = read_atomic(paths[0])
    column = next((name for name in TITLES if name in table.columns), None)
    if column is None or config.item not in table.columns:
        return {}
    years = table.column("release_year") if "release_year" in table.columns else [""] * len(table)
    rows = zip(table.column(config.item), table.column(column), years, strict=True)
    return {key: title if not year or year in title else f"{title} ({year})" for key, title, year in rows}

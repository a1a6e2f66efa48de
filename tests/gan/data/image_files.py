"""Image files for tests, and the datasets that are built from them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from unisono_models.gan.config import Condition, DataConfig
from unisono_models.gan.data.dataset import Datasets, build_datasets
from unisono_models.training.distributed.launch import start_ranks


def build(config: DataConfig, condition: Condition = "none") -> Datasets:
    with start_ranks() as ranks:
        return build_datasets(config, condition=condition, ranks=ranks)


def build_error(configs: Sequence[DataConfig], condition: Condition) -> str:
    """Return the error that this rank gets from configs[rank], or ""."""
    with start_ranks() as ranks:
        try:
            build_datasets(configs[ranks.rank], condition=condition, ranks=ranks)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


def write_image(path: Path, shade: int, *, mode: str = "L", size: tuple[int, int] = (6, 6)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", size, shade).convert(mode).save(path)

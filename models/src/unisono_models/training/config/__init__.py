"""Configs: the sections that every model has, recipes, the command line, and JSON."""

from unisono_models.training.config.sections import CheckpointConfig, ParallelConfig, RunConfig

__all__ = ["CheckpointConfig", "ParallelConfig", "RunConfig"]

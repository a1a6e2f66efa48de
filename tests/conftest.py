"""The fixtures that the harness offers to other repos serve here too."""

from unisono.collectives.testing.fixtures import ranks, world_size

__all__ = ["ranks", "world_size"]

"""The model: an image tower and a text tower that map to one feature space."""

from unisono_models.clip.model.clip import Clip

__all__ = ["Clip"]

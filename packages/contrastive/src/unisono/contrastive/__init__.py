"""Exact contrastive losses over the global batch: any split over ranks, never more than a tile of logits."""

from unisono.contrastive.clip import clip_loss, multi_tower_loss

__all__ = ["clip_loss", "multi_tower_loss"]

"""Exact contrastive losses over the global batch: any split over ranks, never more than a tile of logits."""

from unisono.contrastive.caching import cached_backward
from unisono.contrastive.clip import clip_loss, multi_tower_loss
from unisono.contrastive.modules import ClipLoss, NTXentLoss, SigmoidLoss, SupConLoss
from unisono.contrastive.negatives import NegativeQueue
from unisono.contrastive.retrieval import retrieval_metrics
from unisono.contrastive.sigmoid import sigmoid_loss
from unisono.contrastive.views import ntxent_loss, supcon_loss

__all__ = [
    "ClipLoss",
    "NTXentLoss",
    "NegativeQueue",
    "SigmoidLoss",
    "SupConLoss",
    "cached_backward",
    "clip_loss",
    "multi_tower_loss",
    "ntxent_loss",
    "retrieval_metrics",
    "sigmoid_loss",
    "supcon_loss",
]

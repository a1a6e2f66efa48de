"""Exact contrastive losses over the global batch: any split over ranks, never more than a tile of logits."""

from unisono.contrastive.clip import clip_loss, multi_tower_loss
from unisono.contrastive.grad_cache import cached_backward
from unisono.contrastive.hints import ContrastiveWarning
from unisono.contrastive.modules import ClipLoss, NTXentLoss, SigmoidLoss, SupConLoss
from unisono.contrastive.negative_queue import NegativeQueue
from unisono.contrastive.retrieval import retrieval_metrics
from unisono.contrastive.sigmoid import sigmoid_loss
from unisono.contrastive.simclr import ntxent_loss
from unisono.contrastive.supcon import supcon_loss

__all__ = [
    "ClipLoss",
    "ContrastiveWarning",
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

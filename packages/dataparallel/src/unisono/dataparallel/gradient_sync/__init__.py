"""Gradients averaged or added over ranks, when the training loop says so."""

from unisono.dataparallel.gradient_sync.sync import GradientSync, sync_gradients

__all__ = ["GradientSync", "sync_gradients"]

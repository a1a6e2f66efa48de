"""One process, several devices; and gradients and batch statistics over ranks."""

from unisono.dataparallel.batch_norm import SyncBatchNorm, convert_sync_batchnorm
from unisono.dataparallel.batch_normalization import sync_batch_norm
from unisono.dataparallel.coalescing import broadcast, reduce_add
from unisono.dataparallel.gathering import gather
from unisono.dataparallel.gradient_sync import GradientSync, sync_gradients
from unisono.dataparallel.replica_set import ReplicaSet
from unisono.dataparallel.scattering import Replicate, scatter
from unisono.dataparallel.threads import parallel_apply

__all__ = [
    "GradientSync",
    "ReplicaSet",
    "Replicate",
    "SyncBatchNorm",
    "broadcast",
    "convert_sync_batchnorm",
    "gather",
    "parallel_apply",
    "reduce_add",
    "scatter",
    "sync_batch_norm",
    "sync_gradients",
]

"""Data parallelism: one process with several devices; gradients and batch norm over ranks."""

from unisono.dataparallel.batch_norm import SyncBatchNorm, convert_sync_batchnorm, sync_batch_norm
from unisono.dataparallel.gradient_sync.sync import GradientSync, sync_gradients
from unisono.dataparallel.replicas.broadcast import broadcast, reduce_add
from unisono.dataparallel.replicas.parallel_apply import parallel_apply
from unisono.dataparallel.replicas.replica_set import ReplicaSet
from unisono.dataparallel.replicas.scatter_gather import Replicate, gather, scatter
from unisono.dataparallel.weights import broadcast_parameters

__all__ = [
    "GradientSync",
    "ReplicaSet",
    "Replicate",
    "SyncBatchNorm",
    "broadcast",
    "broadcast_parameters",
    "convert_sync_batchnorm",
    "gather",
    "parallel_apply",
    "reduce_add",
    "scatter",
    "sync_batch_norm",
    "sync_gradients",
]

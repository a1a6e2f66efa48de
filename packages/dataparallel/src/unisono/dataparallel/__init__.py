"""One process, several devices; and gradients and batch statistics over ranks."""

from unisono.dataparallel.coalescing import broadcast, reduce_add
from unisono.dataparallel.gathering import gather
from unisono.dataparallel.replica_set import ReplicaSet
from unisono.dataparallel.scattering import Replicate, scatter
from unisono.dataparallel.threads import parallel_apply

__all__ = ["ReplicaSet", "Replicate", "broadcast", "gather", "parallel_apply", "reduce_add", "scatter"]

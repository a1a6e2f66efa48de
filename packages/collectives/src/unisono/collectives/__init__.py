"""Differentiable collectives: their values and gradients are those of one process with the whole batch.

The backward of every function is the true adjoint for the sum over ranks of the local losses, unless the caller names
another gradient.
"""

from unisono.collectives.checks import MismatchError, checked
from unisono.collectives.functional.all_to_all import all_to_all, all_to_all_single, shift
from unisono.collectives.functional.gather import all_gather, gather
from unisono.collectives.functional.reduce import all_reduce, average_gradient, global_mean, reduce, reduce_scatter
from unisono.collectives.functional.scatter import broadcast, scatter
from unisono.collectives.groups import Group
from unisono.collectives.launch import LaunchEnv, init_distributed, read_launch_env
from unisono.collectives.ring import Ring
from unisono.collectives.sizes import exchange_sizes
from unisono.collectives.traffic import Traffic, count_bytes

__all__ = [
    "Group",
    "LaunchEnv",
    "MismatchError",
    "Ring",
    "Traffic",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "average_gradient",
    "broadcast",
    "checked",
    "count_bytes",
    "exchange_sizes",
    "gather",
    "global_mean",
    "init_distributed",
    "read_launch_env",
    "reduce",
    "reduce_scatter",
    "scatter",
    "shift",
]

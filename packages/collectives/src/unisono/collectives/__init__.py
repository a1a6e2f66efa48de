"""Differentiable collectives: their values and gradients are those of one process with the whole batch.

The backward of every function is the true adjoint for the sum over ranks of the local losses, unless the caller names
another gradient.
"""

from unisono.collectives.checks import MismatchError, checked
from unisono.collectives.functional.all_to_all import all_to_all, all_to_all_single, shift
from unisono.collectives.functional.gather import all_gather, gather
from unisono.collectives.functional.pending import (
    PendingTensor,
    start_all_gather,
    start_all_reduce,
    start_all_to_all_single,
    start_reduce_scatter,
)
from unisono.collectives.functional.reduce import (
    all_reduce,
    average_gradient,
    global_mean,
    reduce,
    reduce_scatter,
    sum_gradient,
)
from unisono.collectives.functional.scatter import broadcast, scatter, split
from unisono.collectives.groups import Group
from unisono.collectives.launch import LaunchEnv, init_distributed, read_launch_env
from unisono.collectives.ledger.cost_rules import register_cost
from unisono.collectives.ledger.hardware import A100_SXM, H100_SXM, Hardware, ModelledTime
from unisono.collectives.ledger.host_syncs import HostSync, HostSyncError
from unisono.collectives.ledger.ledger import Costs, Ledger, count_costs
from unisono.collectives.ledger.simulate_rank import simulate_rank
from unisono.collectives.ring import Ring
from unisono.collectives.sizes import exchange_sizes
from unisono.collectives.traffic import Traffic, count_bytes

__all__ = [
    "A100_SXM",
    "H100_SXM",
    "Costs",
    "Group",
    "Hardware",
    "HostSync",
    "HostSyncError",
    "LaunchEnv",
    "Ledger",
    "MismatchError",
    "ModelledTime",
    "PendingTensor",
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
    "count_costs",
    "exchange_sizes",
    "gather",
    "global_mean",
    "init_distributed",
    "read_launch_env",
    "reduce",
    "reduce_scatter",
    "register_cost",
    "scatter",
    "shift",
    "simulate_rank",
    "split",
    "start_all_gather",
    "start_all_reduce",
    "start_all_to_all_single",
    "start_reduce_scatter",
    "sum_gradient",
]

"""Differentiable collectives whose gradients are those of one process with the whole batch.

The unit is the sum over ranks of the local losses; the backward of every function is its true adjoint under it, unless
another is asked for by name.
"""

from unisono.collectives.agreement import MismatchError
from unisono.collectives.checking import checked
from unisono.collectives.exchanges import all_to_all, all_to_all_single, shift
from unisono.collectives.gathers import all_gather, gather
from unisono.collectives.groups import Group
from unisono.collectives.reductions import all_reduce, average_gradient, global_mean, reduce, reduce_scatter
from unisono.collectives.rings import Ring
from unisono.collectives.scatters import broadcast, scatter
from unisono.collectives.sizes import exchange_sizes
from unisono.collectives.traffic import Traffic, count_bytes

__all__ = [
    "Group",
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
    "reduce",
    "reduce_scatter",
    "scatter",
    "shift",
]

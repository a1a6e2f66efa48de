"""all_gather and gather: concatenate the tensors of all ranks, on every rank or on one."""

from typing import Literal, TypeVar, overload

import torch
from torch import Tensor

from unisono.collectives.autograd import Call, LinearMap, apply
from unisono.collectives.checks import call_site, validate_choice, validate_rank, validate_reduce_dtype
from unisono.collectives.groups import Group, GroupRanks, resolve_group
from unisono.collectives.pytree import all_gather_tree
from unisono.collectives.sizes import Sizes, from_rows, gradient_error, one_rank_sizes, resolve_sizes, to_rows

Tree = TypeVar("Tree")
GatherGrad = Literal["sum", "slice"]


@overload
def all_gather(
    x: Tensor,
    dim: int = 0,
    *,
    sizes: Sizes = None,
    grad: GatherGrad = "sum",
    reduce_dtype: torch.dtype | None = None,
    group: Group = None,
) -> Tensor: ...
@overload
def all_gather(
    x: Tree,
    dim: int = 0,
    *,
    sizes: Sizes = None,
    grad: GatherGrad = "sum",
    reduce_dtype: torch.dtype | None = None,
    group: Group = None,
) -> Tree: ...
def all_gather(
    x: Tensor | Tree,
    dim: int = 0,
    *,
    sizes: Sizes = None,
    grad: GatherGrad = "sum",
    reduce_dtype: torch.dtype | None = None,
    group: Group = None,
) -> Tensor | Tree:
    """Concatenate `x` from every rank along `dim`, in rank order. Ranks may differ along `dim`, zero included.

    `sizes`: every rank's length along `dim`, if known, or "equal": you promise that all ranks have the same length, which
    only checked() checks. Otherwise the ranks exchange them in one small message between CPUs, which does not wait for a GPU
    but for the slowest rank. A scalar counts as one row. A dict, list, tuple or dataclass of tensors is gathered
    leaf by leaf, and all leaves travel together.

    Backward: grad="sum" adds the gradients of all ranks (a reduce_scatter), the true adjoint: use it when each rank
    computes its own part of the loss. grad="slice" keeps this rank's slice without communication: use it when every rank
    computes the same loss and the gradients are then added, or for tensor parallelism (split is its counterpart). With DDP
    and FSDP, which average, keep "sum" (packages/README.md). `reduce_dtype`: the dtype in which the gradients are added,
    and sent where the backend adds on the wire (NCCL); None: that of `x`. All ranks must run the backward.

    Example, 2 ranks holding [1.] and [2., 3.]:
        all_gather(x)  ->  [1., 2., 3.] on both
    """
    validate_choice("all_gather", "grad", grad, ("sum", "slice"))
    ranks = resolve_group(group)
    kind = "all_gather_own" if grad == "slice" else "all_gather"
    if not isinstance(x, Tensor):
        return all_gather_tree(x, dim, sizes, kind, ranks, reduce_dtype)
    return prepare_all_gather("all_gather", x, dim, sizes, grad, reduce_dtype, ranks).result()


def prepare_all_gather(
    name: str, x: Tensor, dim: int, sizes: Sizes, grad: GatherGrad, reduce_dtype: torch.dtype | None, ranks: GroupRanks
) -> Call:
    validate_reduce_dtype(name, reduce_dtype, x)
    problem = gradient_error(x) if grad == "sum" else ""
    x, lengths = resolve_sizes(name, x, dim, sizes, ranks, same=f"grad={grad!r}", problem=problem)
    kind = "all_gather_own" if grad == "slice" else "all_gather"
    own = (lengths[ranks.rank],)
    call = f"{name}(grad={grad!r})"
    plan = LinearMap(kind, ranks, send=own, receive=lengths, reduce_dtype=reduce_dtype, call=call, site=call_site())
    return Call(to_rows(x, dim), plan, lambda rows: from_rows(rows, dim))


def gather(x: Tensor, dim: int = 0, *, root: int = 0, sizes: Sizes = None, group: Group = None) -> Tensor:
    """Concatenate `x` from every rank along `dim` on rank `root` of the group; the other ranks get length zero there.

    `sizes`: as in all_gather.

    Backward: scatter. Every rank must run it, through the empty result on ranks other than `root`.

    Example, 2 ranks holding [1.] and [2., 3.]:
        gather(x)  ->  [1., 2., 3.] on rank 0, [] on rank 1
    """
    ranks = resolve_group(group)
    root = validate_rank("gather", "root", root, ranks)
    x, lengths = resolve_sizes("gather", x, dim, sizes, ranks, same=f"root={root}")
    send = one_rank_sizes(root, lengths[ranks.rank], ranks)
    receive = lengths if ranks.rank == root else (0,) * ranks.size
    plan = LinearMap("point_to_point", ranks, send, receive, call=f"gather(root={root})", site=call_site())
    return from_rows(apply(to_rows(x, dim), plan), dim)

"""all_reduce, reduce, reduce_scatter, global_mean and average_gradient: sums, means, extremes and products over ranks."""

from collections.abc import Callable
from typing import Literal, cast

import torch
import torch.distributed as dist
from einops import rearrange
from torch import Tensor

from unisono.collectives.autograd import LinearMap, apply
from unisono.collectives.checks import call_site, checks_enabled, validate_choice, validate_rank, validate_tensor
from unisono.collectives.functional.gather import gather
from unisono.collectives.groups import Group, GroupRanks, resolve_group
from unisono.collectives.sizes import (
    Sizes,
    all_gather_metadata,
    even_sizes,
    from_rows,
    join_graph,
    raise_local_error,
    split_sizes,
    to_rows,
)

OpName = Literal["sum", "avg", "max", "min", "product"]
ReduceOp = OpName | dist.ReduceOp.RedOpType  # torch's own: ReduceOp.SUM and so on
ReduceGrad = Literal["sum", "identity"]
GradReduce = Literal["mean", "sum"]


def all_reduce(x: Tensor, op: ReduceOp = "sum", *, grad: ReduceGrad = "sum", group: Group = None) -> Tensor:
    """Reduce `x` elementwise over the ranks; every rank gets the result. All ranks pass the same shape and dtype.

    Backward: grad="sum" gives the true adjoint. The gradients of all ranks are added and then pass through the derivative
    of `op` as torch has it for one tensor: ties of max and min share, zeros in a product are exact. grad="identity" (for
    op="sum") hands each rank its own gradient without communication, as if the other ranks' data were constants: for
    tensor parallelism, where every rank computes the same loss and gradients are not averaged. All ranks must run the
    backward. Only checked() compares shape, dtype and op.

    `op` is a name, or torch's own ReduceOp.SUM and so on.

    Example, 2 ranks holding [1.] and [2.]:
        all_reduce(x)  ->  [3.] on both;  all_reduce(x, "max")  ->  [2.] on both
    """
    ranks = resolve_group(group)
    op = validate_op("all_reduce", op, x)
    validate_choice("all_reduce", "grad", grad, ("sum", "identity"))
    if grad == "identity" and op != "sum":
        raise ValueError(f"all_reduce: grad='identity' goes with op='sum', not with op={op!r}")
    call = f"all_reduce(op={op!r}, grad={grad!r})"
    rows = x.reshape(1) if x.ndim == 0 else x
    if op in ("sum", "avg"):
        plan = LinearMap("all_reduce_own" if grad == "identity" else "all_reduce", ranks, call=call, site=call_site())
        return _averaged(rows, op, ranks, lambda rows: apply(rows, plan)).reshape(x.shape)
    # Each rank reduces its share of the elements, then all ranks gather the shares. That sends as much as an all_reduce,
    # and gives torch's own derivative of `op`, to any order.
    shares = even_sizes(x.numel(), ranks.size)
    own = _reduce_rows(rows.reshape(-1), shares, op, ranks, call)
    plan = LinearMap("all_gather", ranks, send=(shares[ranks.rank],), receive=shares, call=call, site=call_site())
    return apply(own, plan).reshape(x.shape)


def reduce(x: Tensor, op: ReduceOp = "sum", *, root: int = 0, group: Group = None) -> Tensor:
    """Reduce `x` elementwise over the ranks onto rank `root` of the group; the other ranks get zeros.

    Backward: the gradient of `root` goes to all ranks and through the derivative of `op`, as in all_reduce. Every rank
    must run it, through the zeros on ranks other than `root`.

    Example, 2 ranks holding [1.] and [2.]:
        reduce(x)  ->  [3.] on rank 0, [0.] on rank 1
    """
    ranks = resolve_group(group)
    op = validate_op("reduce", op, x)
    root = validate_rank("reduce", "root", root, ranks)
    call = f"reduce(op={op!r}, root={root})"
    rows = x.reshape(1) if x.ndim == 0 else x
    if op in ("sum", "avg"):
        plan = LinearMap("reduce", ranks, root=root, call=call, site=call_site())
        return _averaged(rows, op, ranks, lambda rows: apply(rows, plan)).reshape(x.shape)
    shares = even_sizes(x.numel(), ranks.size)
    result = gather(_reduce_rows(rows.reshape(-1), shares, op, ranks, call), root=root, sizes=shares, group=group)
    if ranks.rank != root:
        nothing = result.sum(dtype=x.dtype)  # of an empty tensor: a zero that is in the graph
        result = x.new_zeros(x.shape) + nothing
    return result.reshape(x.shape)


def reduce_scatter(x: Tensor, dim: int = 0, *, sizes: Sizes = None, op: ReduceOp = "sum", group: Group = None) -> Tensor:
    """Reduce `x` elementwise over the ranks, split the result along `dim`, and give every rank its part.

    `sizes`: the length of each rank's part, which may be uneven; otherwise as even as possible, and one small message
    makes sure that all ranks pass the same shape and dtype.

    Backward: all_gather, then the derivative of `op`, as in all_reduce. All ranks must run it.

    Example, 2 ranks holding [1., 2.] and [3., 4.]:
        reduce_scatter(x)  ->  [4.] on rank 0, [6.] on rank 1
    """
    name = "reduce_scatter"
    ranks = resolve_group(group)
    op = validate_op(name, op, x)
    shares, problem = split_sizes("sizes", sizes, x, dim, ranks)
    problem = problem or ("x: a scalar cannot be split" if x.ndim == 0 else "")
    if sizes is None or checks_enabled():
        table = all_gather_metadata(name, x, dim, ranks, same=f"op={op!r}", ragged=False, problem=problem)
        x = join_graph(x, table)
    raise_local_error(name, problem, ranks)
    return from_rows(_reduce_rows(to_rows(x, dim), shares, op, ranks, f"{name}(op={op!r})"), dim)


def global_mean(x: Tensor, *, weights: Tensor | None = None, grad_reduce: GradReduce = "mean", group: Group = None) -> Tensor:
    """Return the mean of `x` over the whole global batch, the same on every rank, however unevenly the batch is split.

    `x` has one or more values for each local sample, samples first. `weights` has the same shape, or one value for each
    sample; with them the result is sum(weights * x) / sum(weights) over all ranks. A batch that is empty on all ranks gives
    NaN, as torch's mean does.

    Backward: call it on the result on every rank. With grad_reduce="mean" the gradients are right after they are averaged
    over the ranks, as DDP and FSDP do; with "sum", after they are added.

    Example, 2 ranks holding [1.] and [2., 6.]:
        global_mean(x)  ->  3. on both (the mean of the local means would be 2.5)

    Example, the mean of cross_entropy(ignore_index=-100) over the labels of all ranks that are not ignored:
        >>> import torch
        >>> from torch.nn.functional import cross_entropy
        >>> from unisono.collectives import global_mean
        >>> logits, labels = torch.eye(3), torch.tensor([0, 1, -100])
        >>> losses = cross_entropy(logits, labels, ignore_index=-100, reduction="none")
        >>> global_mean(losses, weights=labels != -100), cross_entropy(logits, labels)
        (tensor(0.5514), tensor(0.5514))
    """
    validate_choice("global_mean", "grad_reduce", grad_reduce, ("mean", "sum"))
    validate_tensor("global_mean", x)
    if not (x.is_floating_point() or x.is_complex()):
        raise TypeError(f"global_mean: x must be floating point or complex, got {x.dtype}")
    wide = torch.complex128 if x.is_complex() else torch.float64
    if weights is None:
        total = x.sum(dtype=wide)
        count = x.new_full((), x.numel(), dtype=wide)
    else:
        if weights.shape not in (x.shape, x.shape[:1]):
            raise ValueError(
                f"global_mean: weights of shape {tuple(weights.shape)} fit neither x of shape {tuple(x.shape)} nor its samples"
            )
        weights = weights.reshape(*weights.shape, *(1,) * (x.ndim - weights.ndim)).expand_as(x)
        total = (x.to(wide) * weights).sum()
        count = weights.sum(dtype=wide)
    both = all_reduce(torch.stack([total, count]), group=group)
    return scale_loss_gradient((both[0] / both[1]).to(x.dtype), grad_reduce, group)


def scale_loss_gradient(loss: Tensor, grad_reduce: GradReduce, group: Group) -> Tensor:
    """Return `loss`, which all ranks have computed alike from exchanged values, with the right gradient for `grad_reduce`.

    The true adjoints count each gradient once for every rank; averaging undoes that. Where gradients will be added, the
    gradient is divided by the number of ranks. (all_reduce(grad="identity") would leave the other ranks out of the second
    derivatives.)
    """
    return loss if grad_reduce == "mean" else _divide_gradient(loss, resolve_group(group).size)


def average_gradient(x: Tensor, *, group: Group = None) -> Tensor:
    """Return `x`, whose gradient will be the average of all ranks' gradients: what DDP does to a parameter, for one tensor.

    Use it for a tensor that is the same on every rank and not inside DDP or FSDP, for example a learned temperature. For
    one inside, averaging once more changes nothing.

    Backward: all_reduce, divided by the number of ranks. All ranks must run it.

    Example, 2 ranks whose losses are 1 * x and 3 * x:
        average_gradient(x)  ->  x on both;  x.grad  ->  2. on both
    """
    validate_tensor("average_gradient", x)
    ranks = resolve_group(group)
    if ranks.size == 1 or not (x.is_floating_point() or x.is_complex()):  # integers have no gradient
        return x
    plan = LinearMap("copy", ranks, call="average_gradient", site=call_site())
    copied = apply(x.reshape(1) if x.ndim == 0 else x, plan).reshape(x.shape)
    return _divide_gradient(copied, ranks.size)


def _divide_gradient(x: Tensor, number: int) -> Tensor:
    if number == 1:
        return x
    share = x / number
    divided = x.detach() + (share - share.detach())  # the value of x to the bit
    return torch.where(x.isfinite(), divided, x)  # infinities have no difference


_OPS = {"SUM": "sum", "AVG": "avg", "MAX": "max", "MIN": "min", "PRODUCT": "product"}  # torch's names


def validate_op(function: str, op: ReduceOp, x: Tensor) -> OpName:
    """Return the name of `op`, which fits `x`."""
    validate_tensor(function, x)
    if isinstance(op, int):
        raise TypeError(f"{function}: op={op!r} is not a reduction; the rank that gets the result is root={op}")
    name = op if isinstance(op, str) else _OPS.get(str(op).rpartition(".")[2], str(op))
    validate_choice(function, "op", name, tuple(_OPS.values()))
    floating = x.is_floating_point() or x.is_complex()
    if name == "avg" and not floating:
        raise TypeError(f"{function}: op='avg' needs a floating point or complex tensor, got {x.dtype}")
    if name in ("max", "min") and x.is_complex():
        raise TypeError(f"{function}: op={name!r} needs an ordered dtype, got {x.dtype}")
    if x.is_floating_point() and x.dtype.itemsize == 1:
        raise TypeError(f"{function}: {x.dtype} can be moved but not reduced; convert it first, to bfloat16 for instance")
    return cast(OpName, name)


def _averaged(rows: Tensor, op: str, ranks: GroupRanks, add_up: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the sum, or for op="avg" the mean. For "avg", 16-bit floats are sent as float32: their sum may overflow."""
    if op == "avg" and rows.dtype in (torch.float16, torch.bfloat16):
        return (add_up(rows.float()) / ranks.size).to(rows.dtype)
    total = add_up(rows)
    return total / ranks.size if op == "avg" else total


def _reduce_rows(rows: Tensor, shares: tuple[int, ...], op: str, ranks: GroupRanks, call: str) -> Tensor:
    """Return this rank's share of the rows, reduced over the ranks."""
    own = shares[ranks.rank]
    if op in ("sum", "avg"):
        plan = LinearMap("reduce_scatter", ranks, send=shares, receive=(own,), call=call, site=call_site())
        return _averaged(rows, op, ranks, lambda rows: apply(rows, plan))
    from_each = (own,) * ranks.size
    blocks = apply(rows, LinearMap("all_to_all", ranks, send=shares, receive=from_each, call=call, site=call_site()))
    blocks = rearrange(blocks, "(r n) ... -> r n ...", r=ranks.size)
    if op == "product":
        return blocks.prod(0, dtype=rows.dtype)
    return blocks.amax(0) if op == "max" else blocks.amin(0)

"""all_reduce, reduce, reduce_scatter, global_mean, average_gradient and sum_gradient: reductions over ranks."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar, cast, overload

import torch
import torch.distributed as dist
from einops import rearrange
from torch import Tensor

from unisono.collectives.autograd import Call, LinearMap, apply, has_functional_form, is_transformed
from unisono.collectives.checks import (
    call_site,
    checks_enabled,
    describe,
    user_frame,
    validate_across_ranks,
    validate_choice,
    validate_rank,
    validate_reduce_dtype,
    validate_tensor,
)
from unisono.collectives.coalesced import apply_coalesced
from unisono.collectives.functional.gather import gather
from unisono.collectives.groups import Group, GroupRanks, process_group, resolve_group
from unisono.collectives.pytree import tree_flatten
from unisono.collectives.sizes import (
    Sizes,
    all_gather_metadata,
    even_sizes,
    from_rows,
    join_graph,
    raise_local_error,
    split_sizes,
    to_rows,
    with_shape_of,
)
from unisono.collectives.wire import reduces_natively

Tree = TypeVar("Tree")
OpName = Literal["sum", "avg", "max", "min", "product"]
ReduceOp = OpName | dist.ReduceOp.RedOpType  # torch's own: ReduceOp.SUM and so on
ReduceGrad = Literal["sum", "identity"]
GradReduce = Literal["mean", "sum"]


@overload
def all_reduce(
    x: Tensor,
    op: ReduceOp = "sum",
    *,
    grad: ReduceGrad = "sum",
    reduce_dtype: torch.dtype | None = None,
    group: Group = None,
) -> Tensor: ...
@overload
def all_reduce(
    x: Tree,
    op: ReduceOp = "sum",
    *,
    grad: ReduceGrad = "sum",
    reduce_dtype: torch.dtype | None = None,
    group: Group = None,
) -> Tree: ...
def all_reduce(
    x: Tensor | Tree,
    op: ReduceOp = "sum",
    *,
    grad: ReduceGrad = "sum",
    reduce_dtype: torch.dtype | None = None,
    group: Group = None,
) -> Tensor | Tree:
    """Reduce `x` elementwise over the ranks; every rank gets the result. All ranks pass the same shape and dtype.

    `op` is a name, or torch's own ReduceOp.SUM and so on. A dict, list, tuple or dataclass of tensors is reduced leaf by
    leaf; sums and means of all leaves travel together. `reduce_dtype`, for sum and avg: the dtype in which the ranks add,
    and send where the backend adds on the wire (NCCL); the result has the dtype of `x`. None: the dtype of `x`; means of
    16-bit floats are added in float32.

    Backward: grad="sum" gives the true adjoint. The gradients of all ranks are added and then pass through the derivative
    of `op` as torch has it for one tensor: ties of max and min share, zeros in a product are exact. grad="identity" (for
    op="sum") hands each rank its own gradient without communication: for tensor parallelism, where every rank computes the
    same loss and gradients are not averaged; sum_gradient is its counterpart. All ranks must run the backward. Only
    checked() compares shape, dtype and op.

    Example, 2 ranks holding [1.] and [2.]:
        all_reduce(x)  ->  [3.] on both;  all_reduce(x, "max")  ->  [2.] on both
    """
    name = "all_reduce"
    ranks = resolve_group(group)
    validate_choice(name, "grad", grad, ("sum", "identity"))
    if not isinstance(x, Tensor):
        return _all_reduce_tree(x, op, grad, reduce_dtype, ranks, group)
    op = validate_op(name, op, x, reduce_dtype)
    if grad == "identity" and op != "sum":
        raise ValueError(f"{name}: grad='identity' goes with op='sum', not with op={op!r}")
    if op in ("sum", "avg"):
        return prepare_all_reduce(name, x, op, grad, reduce_dtype, ranks).result()
    call = f"{name}(op={op!r}, grad={grad!r})"
    rows = to_rows(x, 0)
    needs_grad = x.requires_grad and torch.is_grad_enabled()
    plan = LinearMap(f"all_reduce_{op}", ranks, call=call, site=call_site())
    if _is_native(x, plan, op) and not (needs_grad and op == "product"):
        return with_shape_of(x, apply(rows, plan))
    # Each rank reduces its share of the elements, then all ranks gather the shares. That sends as much as an all_reduce,
    # and gives torch's own derivative of `op`, to any order and under all transforms.
    shares = even_sizes(x.numel(), ranks.size)
    own = _prepare_reduced_rows(rows.reshape(-1), shares, op, None, ranks, call).result()
    plan = LinearMap("all_gather", ranks, send=(shares[ranks.rank],), receive=shares, call=call, site=call_site())
    return apply(own, plan).reshape(x.shape)


def prepare_all_reduce(
    name: str, x: Tensor, op: str, grad: ReduceGrad, reduce_dtype: torch.dtype | None, ranks: GroupRanks
) -> Call:
    """Prepare the sum or the mean."""
    kind = "all_reduce_own" if grad == "identity" else "all_reduce"
    call = f"{name}(op={op!r}, grad={grad!r})"
    plan = LinearMap(kind, ranks, reduce_dtype=reduce_dtype, call=call, site=call_site())
    rows, finish = _summands(to_rows(x, 0), op, reduce_dtype, ranks)
    return Call(rows, plan, lambda total: with_shape_of(x, finish(total)))


def _all_reduce_tree(
    tree: Tree, op: ReduceOp, grad: ReduceGrad, reduce_dtype: torch.dtype | None, ranks: GroupRanks, group: Group
) -> Tree:
    """all_reduce the tensors of `tree`; None and texts in it stay as they are."""
    leaves, structure = tree_flatten(tree)
    for leaf, path in zip(leaves, structure.paths(), strict=True):
        if not isinstance(leaf, (Tensor, str, type(None))):
            raise TypeError(f"all_reduce: x{path}: expected a Tensor, got {leaf!r} of type {type(leaf).__name__}")
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    if not places and any(leaf is not None for leaf in leaves):
        raise TypeError(f"all_reduce: x: expected a Tensor or a tree of tensors, got {type(tree).__name__} without any tensor")
    tensors = [leaves[place] for place in places]
    names = [validate_op("all_reduce", op, x, reduce_dtype) for x in tensors]
    if checks_enabled():
        _validate_tree(str(structure), tensors, ranks)
    if len({x.device for x in tensors}) > 1 or names[:1] not in ([], ["sum"], ["avg"]):
        results = [all_reduce(x, op, grad=grad, reduce_dtype=reduce_dtype, group=group) for x in tensors]
    else:
        if grad == "identity" and names[:1] == ["avg"]:
            raise ValueError("all_reduce: grad='identity' goes with op='sum', not with op='avg'")
        calls = [prepare_all_reduce("all_reduce", x, names[0], grad, reduce_dtype, ranks) for x in tensors]
        totals = apply_coalesced([call.rows for call in calls], [call.plan for call in calls])
        results = [call.finish(total) for call, total in zip(calls, totals, strict=True)]
    for place, result in zip(places, results, strict=True):
        leaves[place] = result
    reduced: Tree = structure.unflatten(leaves)
    return reduced


def _validate_tree(structure: str, tensors: Sequence[Tensor], ranks: GroupRanks) -> None:
    shapes = ", ".join(map(describe, tensors))
    validate_across_ranks(
        "all_reduce",
        ranks,
        same=("all_reduce of a tree", structure, shapes),
        numbers=(),
        words=lambda: f"all_reduce(a tree of {shapes}) at {user_frame()}, in {structure}",
        device=tensors[0].device if tensors else None,
        rule="The tree, its dtypes and shapes must be the same on every rank.",
    )


def _is_native(x: Tensor, plan: LinearMap, op: str) -> bool:
    """Return whether the backend itself may reduce `x`, which no other transform of torch than torch.compile watches."""
    if plan.ranks.size == 1:
        return False
    if torch.compiler.is_compiling():
        return has_functional_form(x, plan)
    return not is_transformed(x) and reduces_natively(x, process_group(plan.ranks), op)


def reduce(
    x: Tensor, op: ReduceOp = "sum", *, root: int = 0, reduce_dtype: torch.dtype | None = None, group: Group = None
) -> Tensor:
    """Reduce `x` elementwise over the ranks onto rank `root` of the group; the other ranks get zeros.

    `op` and `reduce_dtype`: as in all_reduce.

    Backward: the gradient of `root` goes to all ranks and through the derivative of `op`, as in all_reduce. Every rank
    must run it, through the zeros on ranks other than `root`.

    Example, 2 ranks holding [1.] and [2.]:
        reduce(x)  ->  [3.] on rank 0, [0.] on rank 1
    """
    ranks = resolve_group(group)
    op = validate_op("reduce", op, x, reduce_dtype)
    root = validate_rank("reduce", "root", root, ranks)
    call = f"reduce(op={op!r}, root={root})"
    if op in ("sum", "avg"):
        plan = LinearMap("reduce", ranks, root=root, reduce_dtype=reduce_dtype, call=call, site=call_site())
        rows, finish = _summands(to_rows(x, 0), op, reduce_dtype, ranks)
        return with_shape_of(x, finish(apply(rows, plan)))
    shares = even_sizes(x.numel(), ranks.size)
    own = _prepare_reduced_rows(x.reshape(-1), shares, op, None, ranks, call).result()
    result = gather(own, root=root, sizes=shares, group=group)
    if ranks.rank != root:
        nothing = result.sum(dtype=x.dtype)  # of an empty tensor: a zero that is in the graph
        result = x.new_zeros(x.shape) + nothing
    return result.reshape(x.shape)


def reduce_scatter(
    x: Tensor,
    dim: int = 0,
    *,
    sizes: Sizes = None,
    op: ReduceOp = "sum",
    reduce_dtype: torch.dtype | None = None,
    group: Group = None,
) -> Tensor:
    """Reduce `x` elementwise over the ranks, split the result along `dim`, and give every rank its part.

    `sizes`: the length of each rank's part, which may be uneven, or "equal" for equal parts. Otherwise they are as even as
    possible, and one small message makes sure that all ranks pass the same shape and dtype. `op` and `reduce_dtype`: as in
    all_reduce. On gloo 16-bit floats are added in float32 anyway.

    Backward: all_gather, then the derivative of `op`, as in all_reduce. All ranks must run it.

    Example, 2 ranks holding [1., 2.] and [3., 4.]:
        reduce_scatter(x)  ->  [4.] on rank 0, [6.] on rank 1
    """
    ranks = resolve_group(group)
    op = validate_op("reduce_scatter", op, x, reduce_dtype)
    return prepare_reduce_scatter("reduce_scatter", x, dim, sizes, op, reduce_dtype, ranks).result()


def prepare_reduce_scatter(
    name: str, x: Tensor, dim: int, sizes: Sizes, op: str, reduce_dtype: torch.dtype | None, ranks: GroupRanks
) -> Call:
    shares, problem = split_sizes("sizes", sizes, x, dim, ranks)
    problem = problem or ("x: a scalar cannot be split" if x.ndim == 0 else "")
    if sizes is None or checks_enabled():
        table = all_gather_metadata(
            name, x, dim, ranks, same=f"op={op!r}, reduce_dtype={reduce_dtype}", ragged=False, problem=problem
        )
        x = join_graph(x, table)
    raise_local_error(name, problem, ranks)
    rows, plan, finish = _prepare_reduced_rows(to_rows(x, dim), shares, op, reduce_dtype, ranks, f"{name}(op={op!r})")
    return Call(rows, plan, lambda reduced: from_rows(finish(reduced), dim))


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
    wide = _widest_dtype(x)
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
    return scale_loss_gradient((both.select(0, 0) / both.select(0, 1)).to(x.dtype), grad_reduce, group)


def _widest_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which sums of `x` are exact enough for any batch; mps has no 64 bits."""
    if x.device.type == "mps":
        return torch.complex64 if x.is_complex() else torch.float32
    return torch.complex128 if x.is_complex() else torch.float64


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
    copied = with_shape_of(x, apply(to_rows(x, 0), plan))
    return _divide_gradient(copied, ranks.size)


def sum_gradient(x: Tensor, *, group: Group = None) -> Tensor:
    """Return `x`, whose gradient will be the sum of all ranks' gradients.

    Tensor parallelism: every rank has the same `x` and uses it in its own part of a layer, and all ranks compute the same
    loss, which counts once. This stands before the parts, and all_reduce(grad="identity") or all_gather(grad="slice")
    behind them. Megatron calls it copy_to_tensor_model_parallel_region.

    Backward: all_reduce; its own backward is the identity. All ranks must run it.

    Example, 2 ranks whose parts of the loss are 1 * x and 3 * x:
        sum_gradient(x)  ->  x on both;  x.grad  ->  4. on both
    """
    validate_tensor("sum_gradient", x)
    ranks = resolve_group(group)
    if ranks.size == 1 or not (x.is_floating_point() or x.is_complex()):  # integers have no gradient
        return x
    plan = LinearMap("replicate", ranks, call="sum_gradient", site=call_site())
    return with_shape_of(x, apply(to_rows(x, 0), plan))


def _divide_gradient(x: Tensor, number: int) -> Tensor:
    if number == 1:
        return x
    if not is_transformed(x):
        divided: Tensor = _DivideGradient.apply(x, number)
        return divided
    share = x / number
    divided = x.detach() + (share - share.detach())  # the value of x to the bit
    return torch.where(x.isfinite(), divided, x)  # infinities have no difference


class _DivideGradient(torch.autograd.Function):
    """One kernel in each direction. torch.compile, torch.func and forward mode take the formula above."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, number: int) -> Tensor:
        ctx.number = number
        return x.clone()  # not a view, which could not be changed in place

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad / ctx.number, None


_OPS = {"SUM": "sum", "AVG": "avg", "MAX": "max", "MIN": "min", "PRODUCT": "product"}  # torch's names


def validate_op(function: str, op: ReduceOp, x: Tensor, reduce_dtype: torch.dtype | None = None) -> OpName:
    """Return the name of `op`, which fits `x` and `reduce_dtype`."""
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
    validate_reduce_dtype(function, reduce_dtype, x)
    if reduce_dtype is not None and name not in ("sum", "avg"):
        raise ValueError(f"{function}: reduce_dtype={reduce_dtype} goes with op='sum' and op='avg', not with op={name!r}")
    return cast(OpName, name)


def _summands(
    rows: Tensor, op: str, reduce_dtype: torch.dtype | None, ranks: GroupRanks
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return the rows that the ranks add up, and what makes the result of their sum.

    For "avg", 16-bit floats are sent as float32: their sum may overflow.
    """
    if op == "sum":
        return rows, lambda total: total
    dtype = rows.dtype
    if dtype in (torch.float16, torch.bfloat16):
        rows = rows.to(reduce_dtype or torch.float32)
    return rows, lambda total: (total / ranks.size).to(dtype)


def _prepare_reduced_rows(
    rows: Tensor, shares: tuple[int, ...], op: str, reduce_dtype: torch.dtype | None, ranks: GroupRanks, call: str
) -> Call:
    """Prepare this rank's share of the rows, reduced over the ranks."""
    own = shares[ranks.rank]
    if op in ("sum", "avg"):
        plan = LinearMap(
            "reduce_scatter", ranks, send=shares, receive=(own,), reduce_dtype=reduce_dtype, call=call, site=call_site()
        )
        rows, finish = _summands(rows, op, reduce_dtype, ranks)
        return Call(rows, plan, finish)
    plan = LinearMap("all_to_all", ranks, send=shares, receive=(own,) * ranks.size, call=call, site=call_site())

    def reduced(rows: Tensor) -> Tensor:
        blocks = rearrange(rows, "(r n) ... -> r n ...", r=ranks.size)
        if op == "product":
            return blocks.prod(0, dtype=rows.dtype)
        return blocks.amax(0) if op == "max" else blocks.amin(0)

    return Call(rows, plan, reduced)

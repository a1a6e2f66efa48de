"""broadcast and scatter: send the tensor of one rank to all ranks, whole or in parts. split: take a part without sending."""

import torch
from torch import Tensor

from unisono.collectives.autograd import LinearMap, apply, disable_compile
from unisono.collectives.checks import (
    call_site,
    describe,
    tensor_error,
    user_frame,
    validate_across_ranks,
    validate_rank,
    validate_tensor,
)
from unisono.collectives.groups import Group, GroupRanks, resolve_group
from unisono.collectives.sizes import (
    Sizes,
    from_rows,
    gradient_error,
    join_graph,
    one_rank_sizes,
    raise_local_error,
    split_sizes,
    to_rows,
    with_shape_of,
)

_DTYPES = sorted((d for d in vars(torch).values() if isinstance(d, torch.dtype)), key=str)  # the same on every rank


def broadcast(x: Tensor, *, root: int = 0, group: Group = None) -> Tensor:
    """Return `x` of rank `root` of the group, on every rank.

    All ranks pass a tensor of the same shape and dtype; only checked() compares them.

    Backward: the gradients of all ranks are added on `root`; the `x` of the other ranks has no influence, so its gradient
    is zero. All ranks must run it.

    Example, 2 ranks holding [1.] and [2.]:
        broadcast(x)  ->  [1.] on both
    """
    ranks = resolve_group(group)
    validate_tensor("broadcast", x)
    if problem := gradient_error(x):
        raise TypeError(f"broadcast: {problem}")
    root = validate_rank("broadcast", "root", root, ranks)
    plan = LinearMap("broadcast", ranks, root=root, call=f"broadcast(root={root})", site=call_site())
    return with_shape_of(x, apply(to_rows(x, 0), plan))


@disable_compile  # the receivers know shape and dtype only at run time
def scatter(x: Tensor | None, dim: int = 0, *, root: int = 0, sizes: Sizes = None, group: Group = None) -> Tensor:
    """Split `x` of rank `root` of the group along `dim` and give every rank its part.

    On the other ranks `x` is not used. Pass None, or any tensor: its gradient is zero, and second derivatives can be taken
    through it. `sizes`: the length of each part, given on `root`, or "equal" for equal parts; otherwise as even as possible.
    The receivers get sizes, shape and dtype in one small message, always. torch.compile breaks the graph here.

    Backward: gather to `root`. All ranks must run it.

    Example, 2 ranks, rank 0 holding [1., 2., 3.]:
        scatter(x)  ->  [1., 2.] on rank 0, [3.] on rank 1
    """
    ranks = resolve_group(group)
    root = validate_rank("scatter", "root", root, ranks)
    metadata = _broadcast_metadata(x, dim, root, sizes, ranks)
    dtype = _DTYPES[metadata[0]]
    needs_grad, on_cpu = bool(metadata[1]), bool(metadata[2])
    ndim = metadata[3]
    shape = metadata[4 : 4 + ndim]
    lengths = tuple(metadata[4 + ndim :])
    if ranks.rank != root:
        shape[dim] = 0
        device = torch.device("cpu") if on_cpu else torch.accelerator.current_accelerator()
        if x is None:
            x = torch.empty(shape, dtype=dtype, device=device)
        else:
            x = x.reshape(-1)[:0].to(device=device, dtype=dtype).reshape(shape)
        if not needs_grad and not torch._C._are_functorch_transforms_active():
            x = x.detach()  # otherwise this rank would wait in backward for the root, which has none
    assert x is not None  # validated by _broadcast_metadata
    x = join_graph(x, [metadata])
    send = lengths if ranks.rank == root else (0,) * ranks.size
    receive = one_rank_sizes(root, lengths[ranks.rank], ranks)
    plan = LinearMap("point_to_point", ranks, send, receive, call=f"scatter(root={root})", site=call_site())
    return from_rows(apply(to_rows(x, dim), plan), dim)


def split(x: Tensor, dim: int = 0, *, sizes: Sizes = None, group: Group = None) -> Tensor:
    """Return this rank's part of `x`, which all ranks have, along `dim`. Nothing is sent.

    `sizes`: the length of each rank's part, or "equal" for equal parts; otherwise as even as possible. For tensor
    parallelism, where all ranks compute the same loss, which counts once; all_gather(grad="slice") is its counterpart.
    Megatron calls it scatter_to_tensor_model_parallel_region.

    Backward: all_gather: every rank gets the whole gradient of `x`. All ranks must run it.

    Example, 2 ranks holding [1., 2., 3.]:
        split(x)  ->  [1., 2.] on rank 0, [3.] on rank 1
    """
    ranks = resolve_group(group)
    shares, problem = split_sizes("sizes", sizes, x, dim, ranks)
    problem = problem or ("x: a scalar cannot be split" if x.ndim == 0 else "")
    raise_local_error("split", problem, ranks)
    plan = LinearMap("split", ranks, send=shares, receive=(shares[ranks.rank],), call="split", site=call_site())
    return from_rows(apply(to_rows(x, dim), plan), dim)


def _broadcast_metadata(x: Tensor | None, dim: int, root: int, sizes: Sizes, ranks: GroupRanks) -> list[int]:
    """Return, on every rank, of the root's `x`: dtype, whether it needs a gradient and is on the CPU, ndim, shape, sizes."""
    metadata: list[int] = []
    if ranks.rank != root:
        problem = "" if x is None else tensor_error(x)
    elif not isinstance(x, Tensor) or x.ndim == 0:
        problem = f"x: expected a Tensor of at least one dimension on root={root}, got {describe(x)}"
    else:
        lengths, problem = split_sizes("sizes", sizes, x, dim, ranks)
        needs_grad = x.requires_grad and torch.is_grad_enabled()
        metadata = [_DTYPES.index(x.dtype), needs_grad, x.device.type == "cpu", x.ndim, *x.shape, *lengths]
    return validate_across_ranks(
        "scatter",
        ranks,
        same=("scatter", dim, root),
        numbers=metadata,
        words=lambda: f"scatter({describe(x)}, dim={dim}, root={root}) at {user_frame()}",
        device=getattr(x, "device", None),
        rule="All ranks must make the same call.",
        problem=problem,
    )[root]

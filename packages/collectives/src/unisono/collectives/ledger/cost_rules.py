"""What one op costs: kernels launched, matmul FLOPs, bytes touched. `register_cost` adds the costs of an op of yours."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten

Formula = Callable[..., int]
"""Called with the arguments of the op and `out=` its result."""

_CHUNK = 65_536  # elements that one block of a multi-tensor kernel serves
_BLOCKS = 320  # blocks of one launch of a multi-tensor kernel
_TENSORS = (110, 64, 48, 36, 30)  # tensors of one launch, by the number of tensor lists: ATen's MultiTensorApply.cuh


@dataclass(frozen=True)
class OpCost:
    """What one call of an op costs. `dtype` is the dtype in which its matmuls multiply."""

    kernels: int
    flops: int
    bytes_touched: int
    dtype: torch.dtype | None


@dataclass(frozen=True)
class _Registered:
    kernels: int | Formula | None
    flops: int | Formula | None
    bytes_touched: int | Formula | None


_registered: dict[Any, _Registered] = {}


def register_cost(
    op: Any,
    *,
    kernels: int | Formula | None = None,
    flops: int | Formula | None = None,
    bytes_touched: int | Formula | None = None,
) -> None:
    """Say what an op costs that hides several kernels or matmuls, such as a custom op around Triton kernels.

    `op` is an op or one of its overloads: `torch.ops.mylib.myop` or `torch.ops.mylib.myop.default`. Each cost is an integer
    or a function that is called with the op's arguments and `out=` its result. A cost that is left out is counted as for any
    other op: one kernel, no FLOPs, each input read once and each output written once. If the backward is an op of its own,
    register that, too.

    Example:
        >>> import torch
        >>> from unisono.collectives import count_costs, register_cost
        >>> @torch.library.custom_op("readme::gram", mutates_args=())
        ... def gram(x: torch.Tensor) -> torch.Tensor:
        ...     return x @ x.T
        >>> register_cost(torch.ops.readme.gram, kernels=2, flops=lambda x, out: 2 * out.numel() * x.shape[1])
        >>> x = torch.ones(4, 8)
        >>> with count_costs(device="cpu") as ledger:
        ...     _ = gram(x)
        >>> ledger.kernels, ledger.flops
        (2, {torch.float32: 256})
    """
    _registered[op] = _Registered(kernels, flops, bytes_touched)


def registered_cost(func: Any) -> _Registered | None:
    return _registered.get(func) or _registered.get(getattr(func, "_overloadpacket", None))


def op_cost(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> OpCost:
    """Return what the call `func(*args, **kwargs)`, which returned `out`, costs on an accelerator."""
    packet = func._overloadpacket
    own = registered_cost(func)

    def evaluate(cost: int | Formula) -> int:
        return cost if isinstance(cost, int) else int(cost(*args, **kwargs, out=out))

    if own is not None and own.flops is not None:
        flops = evaluate(own.flops)
    elif packet in flop_registry:
        flops = int(flop_registry[packet](*args, **kwargs, out_val=out))
    elif packet in _MORE_FLOPS:
        flops = _MORE_FLOPS[packet](*args)
    else:
        flops = 0
    kernels = evaluate(own.kernels) if own is not None and own.kernels is not None else _kernels(func, args, kwargs, out)
    if own is not None and own.bytes_touched is not None:
        touched = evaluate(own.bytes_touched)
    else:
        touched = _bytes_touched(func, args, kwargs, out) if kernels else 0
    return OpCost(kernels, flops, touched, _matmul_dtype(func, args) if flops else None)


def launches_nothing(func: Any) -> bool:
    """Return whether the op only makes a view, allocates, or asks something that the host knows."""
    if registered_cost(func) is not None:
        return False
    known = _launches_nothing.get(func)
    if known is None:
        packet = func._overloadpacket
        known = func.namespace in ("prim", "prims", "profiler", "inductor") or packet in _NO_KERNEL or bool(func.is_view)
        _launches_nothing[func] = known
    return known


def read_bytes(x: Tensor) -> int:
    """Return the bytes of the elements that a kernel reads: an expanded dimension is read once."""
    elements = 1
    for size, stride in zip(x.shape, x.stride(), strict=True) if x.layout == torch.strided else ((n, 1) for n in x.shape):
        if stride != 0 or size == 0:
            elements *= size
    return elements * x.element_size()


def tensors_in(*trees: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(trees) if isinstance(leaf, Tensor)]


def multi_tensor_launches(tensors: Iterable[Tensor], depth: int) -> int:
    """Return how many kernels ATen's multi_tensor_apply launches for lists of these tensors, `depth` lists at once."""
    limit = _TENSORS[min(depth, len(_TENSORS)) - 1]
    launches, filled, blocks = 0, 0, 0
    for tensor in tensors:
        chunks = -(-tensor.numel() // _CHUNK)
        if not chunks:
            continue
        filled += 1
        while chunks:
            room = _BLOCKS - blocks
            taken = min(chunks, room)
            chunks -= taken
            blocks += taken
            if blocks == _BLOCKS or (filled == limit and not chunks):
                launches += 1
                blocks, filled = 0, int(bool(chunks))
    return launches + bool(blocks)


def _kernels(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    packet = func._overloadpacket
    name = packet.__name__
    if name.startswith(("_foreach_", "_fused_", "_amp_foreach_")):
        lists = [value for value in (*args, *kwargs.values()) if _is_tensor_list(value)]
        depth = len(lists) + (0 if name.endswith("_") else 1)  # an op that is not in place writes one list more
        launches = multi_tensor_launches(lists[0], depth) if lists else 1
        return launches + 1 if name.startswith("_foreach_norm") else launches
    rule = _SEVERAL_KERNELS.get(packet, 1)
    return rule if isinstance(rule, int) else rule(args, kwargs, out)


def _bytes_touched(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    packet = func._overloadpacket
    written = sum(map(read_bytes, tensors_in(out)))
    if packet in _READS_ROWS:  # the rows that the index names, and the index
        return 2 * written + sum(map(read_bytes, tensors_in(args[1:])))
    if packet in _WRITES_ROWS:  # read and add, or write, the rows that the index names
        values = tensors_in(args[1:], kwargs)
        return sum(map(read_bytes, values)) + 2 * max(map(read_bytes, values), default=0)
    if packet in _WRITES_ONLY:
        return written + sum(map(read_bytes, tensors_in(args[1:])))
    outputs = {argument.name for argument in func._schema.arguments if argument.is_out}
    inputs = tensors_in(args, {name: value for name, value in kwargs.items() if name not in outputs})
    read = sum(map(read_bytes, inputs))
    if not func._schema.returns:  # foreach in place: the first list is written
        written = sum(map(read_bytes, tensors_in(args[0]))) if args else 0
    return read + written


def _is_tensor_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(item, Tensor) for item in value)


def _matmul_dtype(func: Any, args: Sequence[Any]) -> torch.dtype:
    floating = [x.dtype for x in tensors_in(args) if x.dtype.is_floating_point or x.dtype.is_complex]
    has_bias = func._overloadpacket.__name__.lstrip("_").startswith(("add", "badd"))  # a bias comes before the factors
    return floating[1 if has_bias and len(floating) > 1 else 0] if floating else torch.float32


def _convolution_backward(args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    mask = kwargs.get("output_mask", args[10] if len(args) > 10 else (True, True, True))
    return sum(map(bool, mask))


def _index_put(args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    accumulate = kwargs.get("accumulate", args[3] if len(args) > 3 else False)
    return 6 if accumulate else 1  # duplicates are sorted first, so that the sum has one order


_NO_KERNEL = {
    aten.empty, aten.empty_like, aten.empty_strided, aten.empty_permuted, aten.new_empty, aten.new_empty_strided,
    aten._unsafe_view, aten.detach_, aten.lift, aten.lift_fresh, aten.lift_fresh_copy, aten.resize_, aten.set_,
    aten.record_stream, aten._local_scalar_dense, aten.is_same_size, aten.is_pinned, aten._pin_memory, aten.sym_size,
    aten.sym_stride, aten.sym_numel, aten.sym_storage_offset, aten._version, aten.squeeze_,
    aten.unsqueeze_, aten.t_, aten.transpose_, aten.as_strided_,
}  # fmt: skip

# Approximations of what ATen launches on CUDA. All other ops count as one kernel.
_SEVERAL_KERNELS: dict[Any, int | Callable[..., int]] = {
    aten.native_layer_norm_backward: 3,  # the input; partial sums of weight and bias; their sum
    aten._fused_rms_norm_backward: 3,
    aten.native_group_norm_backward: 3,
    aten.native_batch_norm: 2,
    aten.native_batch_norm_backward: 2,
    aten.convolution_backward: _convolution_backward,
    aten.embedding_dense_backward: 5,  # sort the ids, find the runs, add up
    aten.index_put: _index_put,
    aten.index_put_: _index_put,
    aten._scaled_dot_product_flash_attention_backward: 3,
    aten._scaled_dot_product_efficient_attention_backward: 2,
    aten.sort: 4,
    aten.argsort: 4,
    aten.topk: 4,
    aten.nonzero: 3,
    aten.masked_select: 4,
    aten._unique2: 8,
    aten.unique_dim: 8,
    aten.unique_consecutive: 4,
    aten.cumsum: 2,
    aten.repeat_interleave: 2,
    aten.randperm: 5,
    # Ops that ATen composes of several kernels where no mode sees them.
    aten.logsumexp: 9,  # amax; abs, eq, masked_fill of infinite maxima; sub, exp, sum; log, add
    aten.binary_cross_entropy_with_logits: 5,  # log_sigmoid, rsub, mul, sub, and the reduction
    aten.select_backward: 2,  # zeros, copy
    aten.slice_backward: 2,
    aten.constant_pad_nd: 2,
    aten.masked_fill: 2,  # a copy, and the op in place
    aten.index_add: 2,
    aten.scatter: 2,
    aten.scatter_add: 2,
    aten.cat: lambda args, kwargs, out: -(-len(args[0]) // 128),  # 128 tensors a launch
    aten.stack: lambda args, kwargs, out: -(-len(args[0]) // 128),
}
_MORE_FLOPS: dict[Any, Callable[..., int]] = {  # torch's registry has the matrix products, not those with a vector
    aten.mv: lambda matrix, *_: 2 * matrix.numel(),
    aten.addmv: lambda bias, matrix, *_: 2 * matrix.numel(),
    aten.addmv_: lambda bias, matrix, *_: 2 * matrix.numel(),
    aten.dot: lambda x, *_: 2 * x.numel(),
    aten.addbmm: lambda bias, x, y: 2 * x.numel() * y.shape[-1],
}
_READS_ROWS = {aten.index_select, aten.embedding, aten.index, aten.gather, aten.take}
_WRITES_ROWS = {aten.index_add_, aten.scatter_add_, aten.index_put_, aten.index_copy_, aten.scatter_, aten.scatter_reduce_}
_WRITES_ONLY = {
    aten.copy_, aten.fill_, aten.zero_, aten.uniform_, aten.normal_, aten.bernoulli_, aten.random_, aten.exponential_,
    aten.zeros_like, aten.ones_like, aten.full_like, aten.rand_like, aten.randn_like, aten.randint_like, aten.new_zeros,
    aten.new_ones, aten.new_full,
}  # fmt: skip
_launches_nothing: dict[Any, bool] = {}

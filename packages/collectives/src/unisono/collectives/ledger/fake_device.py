"""A CUDA device that is not there: what torch.cuda answers inside `simulate_rank`, and which attention kernel runs."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

from unisono.collectives.ledger.fake_values import plausible_list, plausible_number
from unisono.collectives.ledger.ledger import Ledger

aten = torch.ops.aten
clip_grad: Any = sys.modules["torch.nn.utils.clip_grad"]
optimizer: Any = sys.modules["torch.optim.optimizer"]  # torch.optim has no attribute of that name


@contextmanager
def fake_cuda(ledger: Ledger, *, rank: int, devices: int, memory: int, capability: tuple[int, int]) -> Iterator[None]:
    """Let torch.cuda answer as if there were a device, and count the calls that wait for it."""
    current = [rank % devices]

    def set_device(device: Any) -> None:
        index = device if isinstance(device, int) else torch.device(device).index
        current[0] = current[0] if index is None else index

    class Stream(_Stream):
        def synchronize(self) -> None:
            ledger.add_host_sync("Stream.synchronize")

    class Event(_Event):
        def synchronize(self) -> None:
            ledger.add_host_sync("Event.synchronize")

    def synchronize(device: Any = None) -> None:
        ledger.add_host_sync("synchronize")

    stream = Stream()
    properties = SimpleNamespace(
        name="simulated GPU", major=capability[0], minor=capability[1], total_memory=memory, multi_processor_count=132,
        max_threads_per_multi_processor=2048, warp_size=32, L2_cache_size=50 << 20, shared_memory_per_block_optin=232_448,
        regs_per_multiprocessor=65_536, gcnArchName="",
    )  # fmt: skip
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: False,
        "_lazy_init": lambda: None,
        "init": lambda: None,
        "device_count": lambda: devices,
        "current_device": lambda: current[0],
        "set_device": set_device,
        "device": lambda device=None: nullcontext(),
        "get_device_capability": lambda device=None: capability,
        "get_device_name": lambda device=None: properties.name,
        "get_device_properties": lambda device=None: properties,
        "get_arch_list": lambda: [f"sm_{capability[0]}{capability[1]}"],
        "mem_get_info": lambda device=None: (memory - ledger.memory.now, memory),
        "memory_allocated": lambda device=None: ledger.memory.now,
        "memory_reserved": lambda device=None: ledger.memory.now,
        "max_memory_allocated": lambda device=None: ledger.memory.peak,
        "max_memory_reserved": lambda device=None: ledger.memory.peak,
        "memory_stats": lambda device=None: {},
        "reset_peak_memory_stats": lambda device=None: ledger.memory.reset_peak(),
        "empty_cache": lambda: None,
        "is_bf16_supported": lambda including_emulation=True: True,
        "is_current_stream_capturing": lambda: False,
        "get_rng_state": lambda device="cuda": torch.empty(16, dtype=torch.uint8),
        "set_rng_state": lambda state, device="cuda": None,
        "Stream": Stream,
        "Event": Event,
        "stream": lambda given: nullcontext(),
        "set_stream": lambda given: None,
        "current_stream": lambda device=None: stream,
        "default_stream": lambda device=None: stream,
        "synchronize": synchronize,
    }
    accelerator = torch.device("cuda")
    answers_of_accelerator: dict[str, Any] = {
        "is_available": lambda: True,
        "current_accelerator": lambda check_available=False: accelerator,
        "device_count": lambda: devices,
        "current_device_index": lambda: current[0],
        "current_stream": lambda device=None: stream,
        "synchronize": synchronize,
    }
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch._C, "_get_accelerator", answers_of_accelerator["current_accelerator"]))
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        for name, answer in answers_of_accelerator.items():
            stack.enter_context(mock.patch.object(torch.accelerator, name, answer))
        stack.enter_context(mock.patch.object(optimizer, "_foreach_supported_types", _types_with_foreach()))
        stack.enter_context(mock.patch.object(clip_grad, "_has_foreach_support", lambda tensors, device: device.type == "cuda"))
        stack.enter_context(mock.patch.object(torch.amp.GradScaler, "_maybe_opt_step", _step_with_finite_gradients))
        yield


@contextmanager
def fake_tensor_mode() -> Iterator[FakeTensorMode]:
    """FakeTensorMode that never asks for a real device, not even on a machine that has one."""
    from torch._subclasses import fake_tensor

    def no_context(device: torch.device) -> None: ...

    with (
        mock.patch.object(FakeTensorMode, "avoid_device_init", True),
        mock.patch.object(fake_tensor, "init_gpu_context", no_context),
        mock.patch.object(torch.nn.Module, "_apply", _apply_by_swapping),
        FakeTensorMode(allow_non_fake_inputs=True) as mode,
    ):
        yield mode


class HostCalls(TorchFunctionMode):
    """Methods of tensors that a dispatch mode sees too late: they read data, or choose a kernel by asking the driver."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self.ledger = ledger

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        own = self._answers.get(func)
        if own is not None:
            return own(self, func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _numpy(self, func: Any, x: Tensor, **kwargs: Any) -> Any:
        if not isinstance(x, FakeTensor):
            return func(x, **kwargs)
        if x.device.type != "cpu":
            raise TypeError(f"can't convert {x.device} device type tensor to numpy. Use Tensor.cpu() first.")
        import numpy as np  # torch itself works without numpy

        number = plausible_number(x.dtype)
        return np.full(tuple(x.shape), number, dtype=str(x.dtype).removeprefix("torch."))

    def _format(self, func: Any, x: Tensor, spec: str) -> str:
        if isinstance(x, FakeTensor) and x.ndim == 0:  # as for a tensor with data: f"{loss:.3f}"
            return format(x.item(), spec)
        return str(func(x, spec))

    def _record_stream(self, func: Any, x: Tensor, stream: Any) -> None:
        if not isinstance(x, FakeTensor):
            func(x, stream)

    def _pin_memory(self, func: Any, x: Tensor, *args: Any) -> Tensor:
        if isinstance(x, FakeTensor):
            x = x.clone()
        x._unisono_pinned = True  # type: ignore[attr-defined]
        return x

    def _is_pinned(self, func: Any, x: Tensor, *args: Any) -> bool:
        return getattr(x, "_unisono_pinned", False)

    def _attention(
        self,
        func: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        """The kernel that CUDA would choose: flash attention for 16 bits without a mask, otherwise the memory-efficient one."""
        short = query.dtype in (torch.bfloat16, torch.float16)
        cuda = torch.backends.cuda
        efficient = cuda.mem_efficient_sdp_enabled() and (short or query.dtype == torch.float32)
        flash = cuda.flash_sdp_enabled() and short and attn_mask is None and query.shape[-1] <= 256
        if query.device.type != "cuda" or query.ndim != 4 or not (flash or efficient):
            return func(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        if enable_gqa and key.shape[-3] != query.shape[-3]:
            groups = query.shape[-3] // key.shape[-3]
            key, value = (x.repeat_interleave(groups, dim=-3) for x in (key, value))
        if flash:
            return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
        if attn_mask is not None:
            if attn_mask.dtype == torch.bool:
                attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, float("-inf"))
            attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
        differentiable = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
        return aten._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, differentiable, dropout_p, is_causal, scale=scale
        )[0]

    _answers: ClassVar[dict[Any, Callable[..., Any]]] = {
        Tensor.numpy: _numpy,
        Tensor.__format__: _format,
        Tensor.record_stream: _record_stream,
        Tensor.pin_memory: _pin_memory,
        Tensor.is_pinned: _is_pinned,
        F.scaled_dot_product_attention: _attention,
    }


def tolist_of(ledger: Ledger) -> Callable[[FakeTensor], Any]:
    """FakeTensor.tolist reads element by element, a sync each; a real tensor is copied once."""
    original = FakeTensor.tolist

    def tolist(self: FakeTensor) -> Any:
        if self.constant is not None:
            return original(self)
        if self.device.type == ledger.device != "cpu":
            ledger.add_host_sync("tolist")
        return plausible_list(self)

    return tolist


class _Stream:
    """A stream: everything runs in order here, so that only a wait of the host has a meaning."""

    cuda_stream = stream_id = device_index = priority = 0
    device_type = 1  # of c10::DeviceType: CUDA
    device = torch.device("cuda", 0)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        return torch.cuda.Event() if event is None else event

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *exc: object) -> None:
        pass


class _Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Any) -> float:
        raise RuntimeError("simulate_rank: a simulated device has no clock; Ledger.time() has a model of the time")


def _types_with_foreach() -> list[type]:
    """The types of parameters for which optimizers take their multi-tensor path: fake parameters, too."""
    return [*optimizer._foreach_supported_types, FakeTensor]


def _step_with_finite_gradients(self: Any, stepped: Any, optimizer_state: Any, *args: Any, **kwargs: Any) -> Any:
    """GradScaler reads whether a gradient is not finite, which is a host sync, and steps: here gradients are finite."""
    for found in optimizer_state["found_inf_per_device"].values():
        found.item()
    return stepped.step(*args, **kwargs)


def _apply_by_swapping(self: torch.nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> torch.nn.Module:
    """Module._apply for parameters that are, or become, fake. The objects stay, so that tied weights stay tied."""
    if recurse:
        for module in self.children():
            module._apply(fn)
    for parameter in self._parameters.values():
        if parameter is not None:
            _swap(parameter, fn)
    for name, buffer in self._buffers.items():
        if buffer is not None:
            self._buffers[name] = fn(buffer)
    return self


def _swap(parameter: torch.nn.Parameter, fn: Callable[[Tensor], Tensor]) -> None:
    with torch.no_grad():
        new = fn(parameter)
        grad = None if parameter.grad is None else fn(parameter.grad)
    if new is parameter:
        return
    new = torch.nn.Parameter(new, requires_grad=parameter.requires_grad)
    parameter.grad = None
    own, given = vars(parameter), vars(new)
    for name in set(own) - set(given):
        given[name] = own[name]  # marks that someone has set on the parameter
    parameter.__class__, new.__class__ = new.__class__, parameter.__class__
    parameter.__dict__, new.__dict__ = given, own
    torch._C._swap_tensor_impl(parameter, new)
    parameter.grad = grad

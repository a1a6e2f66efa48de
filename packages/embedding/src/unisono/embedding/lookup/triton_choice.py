"""Whether Triton computes on the rows of a device: on CUDA where Triton imports, after its kernels have agreed with torch once.

The first use of a device, a dtype and an optimizer's rule computes a small example, which compiles the kernels and makes the
host wait. If it differs from what torch's operations give in float64, or if the kernels do not compile, a warning says so, and
torch's operations are used from then on. UNISONO_TRITON=0 in the environment asks for them.
"""

from types import ModuleType

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from unisono.collectives.triton_choice import agrees_once, why_no_triton
from unisono.embedding.lookup.compiled import Step

_DEVICE_TYPES = ("cuda",)  # ROCm's, too
_INTEGERS = (torch.int32, torch.int64)
_RATE, _DECAY = 0.1, 0.01  # of the example
_BITS = {torch.float64: 40, torch.float32: 17, torch.float16: 9, torch.bfloat16: 6}  # on which results agree
_problems: dict[tuple[torch.device, torch.dtype, int | None], str] = {}


def triton_rows(*tensors: Tensor | None, dtype: torch.dtype, rule: int | None = None) -> ModuleType | None:
    """Return the module of Triton's operations if it takes these tensors; None asks for torch's operations.

    `dtype`: of the rows. `rule`: that of a Step, if an optimizer's step is made.
    """
    given = [x for x in tensors if x is not None]
    device = given[0].device
    if device.type not in _DEVICE_TYPES or why_no_triton():
        return None
    from unisono.embedding.lookup import triton_rows as found

    if not all(
        type(x) in (Tensor, nn.Parameter, FakeTensor)
        and x.device == device
        and x.is_contiguous()
        and x.dtype in (*found.DTYPES, *_INTEGERS)
        for x in given
    ):
        return None
    is_fake = any(isinstance(x, FakeTensor) for x in given)  # nothing can be compared
    return found if dtype in found.DTYPES and (is_fake or _agrees(device, dtype, rule)) else None


def why_not(device: torch.device, dtype: torch.dtype) -> str:
    """Say why torch's operations compute on rows of this dtype and device; "" if Triton's do, as far as is known."""
    if device.type not in _DEVICE_TYPES:
        return f"the tables are on {device}"
    if not dtype.is_floating_point or dtype.itemsize < 2:
        return f"the tables are {dtype}"
    found = [problem for key, problem in _problems.items() if key[:2] == (device, dtype) and problem]
    return why_no_triton() or (found[0] if found else "")


def _agrees(device: torch.device, dtype: torch.dtype, rule: int | None) -> bool:
    instead = f"unisono.embedding: torch computes on rows of {dtype} on {device}, which is slower and takes more memory"
    return agrees_once(
        _problems, (device, dtype, rule), device, lambda: largest_difference(device, dtype, rule), instead=instead
    )


def largest_difference(device: torch.device, dtype: torch.dtype, rule: int | None) -> str:
    """Compute a small example by Triton and by torch in float64. Describe the first result that differs, if any does."""
    from unisono.embedding.lookup import triton_rows as triton

    generator = torch.Generator("cpu").manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32).to(device, dtype)

    n, width = 3000, 72
    numbers = torch.randint(40, (n,), generator=generator, device="cpu") * 3
    numbers = torch.where(torch.arange(n, device="cpu") % 3 > 0, 60, numbers).to(device)  # one of them has several chunks
    bags = torch.randint(70, (n,), generator=generator, device="cpu").to(device)
    grads, weights, weight = draw(70, width), draw(n), draw(120, width)
    unique, order, starts, count = triton.deduplicate(numbers)
    expected, sizes = torch.unique(numbers, return_counts=True)
    found = int(count)
    if not (torch.equal(unique[:found], expected) and torch.equal(starts[:found], sizes.cumsum(0) - sizes)):
        return "other unique numbers"
    by_row = torch.zeros(120, n, device=device, dtype=torch.float64)
    by_row[numbers, torch.arange(n, device=device)] = weights.double()
    sums = (by_row @ grads.double().index_select(0, bags))[expected]
    if rule is None:
        return _difference("a sum", triton.sum_bags(grads, bags, order, starts[:found], weights), sums, dtype)
    step, states, truth, true_states = _steps(rule, weight, expected, sums)
    triton.update(
        step, weight, states, unique, slice(0, n), grads, bags=bags, order=order, starts=starts, count=count, weights=weights
    )
    pairs = [("a weight", weight, truth), *(("a state", *pair) for pair in zip(states, true_states, strict=True))]
    return next((problem for pair in pairs if (problem := _difference(*pair, dtype))), "")


def _steps(number: int, weight: Tensor, rows: Tensor, sums: Tensor) -> tuple[Step, list[Tensor], Tensor, list[Tensor]]:
    """The step of a rule and its first states, and weight and states after torch has made it in float64."""
    from unisono.embedding.optimizers import _COMPILED_RULES, Adam

    rule = _COMPILED_RULES[number](lr=_RATE, weight_decay=_DECAY)
    rate = rule.rate(_RATE, 1) if isinstance(rule, Adam) else _RATE
    betas = rule.betas if isinstance(rule, Adam) else (0.0, 0.0)
    step = Step(number, rate, _DECAY, getattr(rule, "eps", 0.0), betas, weight.shape[1])
    truth, states = weight.to(torch.float64, copy=True), rule.states(weight)
    true_states = rule.states(truth)
    grads = sums + _DECAY * truth.index_select(0, rows)
    steps = {"step": torch.ones((), dtype=torch.int64, device="cpu")}
    truth.index_add_(0, rows, rule.step(rows, grads, true_states | steps, _RATE, grads.square().mean(1)))
    return step, list(states.values()), truth, list(true_states.values())


def _difference(name: str, found: Tensor, truth: Tensor, dtype: torch.dtype) -> str:
    difference, size = (found.double() - truth).abs().amax(), truth.abs().amax()
    if bool(difference <= size * 2.0 ** -_BITS[dtype]):
        return ""
    return f"{name} differs by {float(difference):.3g} of {float(size):.3g}"

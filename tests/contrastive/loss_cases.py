"""Losses with options and inputs, and the check that all of them pass: N ranks give what the reference gives in one process."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.collectives.one_process import group_named
from unisono import contrastive
from unisono.collectives.groups import resolve_group
from unisono.contrastive import reference

SPLITS = {1: (9,), 2: (6, 3), 3: (5, 0, 4), 4: (3, 0, 5, 1)}  # rows of each rank
WIDTH = 5


@dataclass(frozen=True)
class Case:
    """One loss with some options. The tensors named in `inputs` are split over the ranks; the others are the same on all."""

    function: str
    inputs: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def reference(self) -> Callable[..., Tensor]:
        return getattr(reference, self.function)

    def __call__(self, given: dict[str, Tensor], function: Callable[..., Tensor], **more: Any) -> Tensor:
        positional = {
            "clip_loss": ("x", "y", "scale"),
            "sigmoid_loss": ("x", "y", "scale", "bias"),
            "ntxent_loss": ("x", "y", "temperature"),
            "supcon_loss": ("x", "ids", "temperature"),
            "multi_tower_loss": ("scale",),
        }[self.function]
        arguments = [given[name] for name in positional]
        if self.function == "multi_tower_loss":
            arguments = [[given["x"], given["y"], given["third"]], *arguments]
        keywords = {name: given[name] for name in self.inputs if name not in (*positional, "x", "y", "third")}
        return function(*arguments, **keywords, **self.options, **more)


XY = ("x", "y")
CASES = {
    "clip": Case("clip_loss", XY),
    "clip_weights": Case("clip_loss", (*XY, "weights")),
    "clip_ids": Case("clip_loss", (*XY, "ids")),
    "clip_ids_masked": Case("clip_loss", (*XY, "ids"), {"same_id": "masked"}),
    "clip_smooth": Case("clip_loss", XY, {"label_smoothing": 0.1}),
    "clip_smooth_ids_masked": Case("clip_loss", (*XY, "ids"), {"label_smoothing": 0.1, "same_id": "masked"}),
    "clip_decoupled": Case("clip_loss", XY, {"decoupled": True}),
    "clip_hard": Case("clip_loss", XY, {"hardness": 0.5}),
    "clip_one_way": Case("clip_loss", XY, {"direction": "x_to_y"}),
    "clip_negatives": Case("clip_loss", (*XY, "negatives")),
    "clip_everything": Case(
        "clip_loss", (*XY, "ids", "weights", "negatives", "negative_ids"), {"label_smoothing": 0.2, "hardness": 0.3}
    ),
    "clip_everything_decoupled_masked": Case(
        "clip_loss",
        (*XY, "ids", "weights", "negatives", "negative_ids"),
        {"label_smoothing": 0.2, "hardness": 0.3, "decoupled": True, "same_id": "masked"},
    ),
    "sigmoid": Case("sigmoid_loss", XY),
    "sigmoid_ids": Case("sigmoid_loss", (*XY, "ids")),
    "sigmoid_ids_masked_weights": Case("sigmoid_loss", (*XY, "ids", "weights"), {"same_id": "masked"}),
    "sigmoid_weights": Case("sigmoid_loss", (*XY, "weights")),
    "ntxent": Case("ntxent_loss", XY),
    "ntxent_weights": Case("ntxent_loss", (*XY, "weights")),
    "supcon": Case("supcon_loss", ("x", "ids")),
    "supcon_weights": Case("supcon_loss", ("x", "ids", "weights")),
    "multi_tower": Case("multi_tower_loss", ("x", "y", "third", "ids")),
}


def global_batch(rows: int, scale: float = 4.0, seed: int = 0) -> dict[str, Tensor]:
    """The global batch: the same on every rank."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    features = {name: F.normalize(normal(rows, WIDTH), dim=1) for name in ("x", "y", "third")}
    return features | {
        "ids": torch.randint(-2, max(2, rows // 2), (rows,), generator=generator),
        "weights": torch.rand(rows, generator=generator, dtype=torch.float64) + 0.1,
        "negatives": normal(rows, WIDTH) / 2,
        "negative_ids": torch.randint(-2, rows, (rows,), generator=generator),
        "scale": torch.tensor(scale, dtype=torch.float64),
        "temperature": torch.tensor(1 / scale, dtype=torch.float64),
        "bias": torch.tensor(-1.5, dtype=torch.float64),
    }


FEATURES = ("x", "y", "third", "negatives")
SHARED = ("scale", "temperature", "bias")
CONSTANT = ("ids", "negative_ids")


def differentiable(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.clone() if name in CONSTANT else t.clone().requires_grad_() for name, t in batch.items()}


def local_batch(batch: dict[str, Tensor], sizes: tuple[int, ...], rank: int) -> dict[str, Tensor]:
    """One rank's part of the global batch."""
    return {name: t if name in SHARED else t.split_with_sizes(list(sizes))[rank] for name, t in batch.items()}


def gradients(loss: Tensor, batch: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
    names = [name for name, t in batch.items() if t.requires_grad]
    found = torch.autograd.grad(loss, [batch[name] for name in names], materialize_grads=True, **options)
    return dict(zip(names, found, strict=True))


def matches_one_process(
    case_name: str,
    options: dict[str, Any],
    group_name: str = "world",
    tolerance: float = 1e-12,
    scale: float = 4.0,
    sizes: tuple[int, ...] | None = None,
    dtype: torch.dtype = torch.float64,
) -> None:
    """Runs on every rank. Compares value and gradients with those of the reference on the whole batch.

    `dtype`: of the features; the reference computes with the same numbers in float64.
    """
    case = CASES[case_name]
    group, members = group_named(group_name)
    if not members:
        return
    sizes, rank = sizes or SPLITS[len(members)], resolve_group(group).rank
    assert members[rank] == dist.get_rank()
    whole = global_batch(sum(sizes), scale)
    features = {name: whole[name].to(dtype) for name in FEATURES}
    batch = differentiable(whole | {name: t.double() for name, t in features.items()})
    expected = case(batch, case.reference)
    expected_grads = gradients(expected, batch)

    mine = differentiable(local_batch(whole | features, sizes, rank))
    loss = case(mine, getattr(contrastive, case.function), group=group, **options)
    close(loss.double(), expected, tolerance, case_name)
    copies = len(members) if options.get("grad_reduce", "mean") == "mean" else 1  # averaging over ranks divides by as many
    for name, grad in gradients(loss, mine).items():
        whole_grad = expected_grads[name]
        if name in SHARED:
            truth = whole_grad * copies / len(members)
        else:
            truth = whole_grad.split_with_sizes(list(sizes))[rank] * copies
        close(grad.double(), truth, tolerance, f"{case_name}: gradient of {name}", size=float(whole_grad.abs().max()) * copies)


def close(found: Tensor, expected: Tensor, tolerance: float, what: str, size: float | None = None) -> None:
    """Compare relative to the largest element of the whole tensor, or to `size`."""
    if size is None:
        size = float(expected.detach().abs().max()) if expected.numel() else 0.0
    difference = float((found - expected).detach().abs().max()) if found.numel() else 0.0
    assert found.shape == expected.shape, f"{what}: {tuple(found.shape)} instead of {tuple(expected.shape)}"
    assert difference <= tolerance * max(size, 1e-300), f"{what}: off by {difference / max(size, 1e-300):.3g} of {size:.6g}"


# The losses without options, for tests of how they round.
LOSSES: dict[str, Callable[..., Tensor]] = {
    "clip": lambda x, y, precision="exact": contrastive.clip_loss(x, y, 20.0, precision=precision),
    "hard": lambda x, y, precision="exact": contrastive.clip_loss(x, y, 20.0, hardness=0.3, precision=precision),
    "sigmoid": lambda x, y, precision="exact": contrastive.sigmoid_loss(x, y, 20.0, -5.0, precision=precision),
    "ntxent": lambda x, y, precision="exact": contrastive.ntxent_loss(x, y, 0.05, precision=precision),
}


def far_apart_and_not_a_number() -> None:
    """Logits hundreds of bits apart give what float64 gives, and a NaN reaches the loss and the gradient."""
    x = torch.tensor([[110.0, 0.0], [-300.0, 0.0], [0.0, 0.001]], requires_grad=True)
    y = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    wide, target = x.detach().double().requires_grad_(), torch.arange(3)
    logits = wide @ y.double().T
    expected = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
    loss = contrastive.clip_loss(x, y, 1.0)
    close(loss.double(), expected, 1e-5, "loss")
    close(*(torch.autograd.grad(each, leaf)[0].double() for each, leaf in ((loss, x), (expected, wide))), 1e-5, "gradient")
    broken = x.detach().clone()
    broken[1, 1] = torch.nan
    broken.requires_grad_()
    for each in LOSSES.values():
        loss = each(broken, y)
        assert loss.isnan() and torch.autograd.grad(loss, broken)[0].isnan().any()

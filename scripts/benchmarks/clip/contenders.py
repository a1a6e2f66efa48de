"""The training steps that the benchmark compares, built and measured on the ranks. open_clip's is its own train_one_epoch."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.harness.measure import Seconds, deviations_from_peer, peak_of_call, return_freed_memory, take_turns
from benchmarks.harness.results import MIB

if TYPE_CHECKING:  # timm and transformers, which the process that starts the ranks does not need
    from benchmarks.clip.towers import Batch

Family = Literal["CLIP", "sigmoid"]

WORLD_SIZE = 2
MICRO_BATCH = 128  # rows on a rank at a time, for contenders that cut their batch
ROW_BYTES = 420_000  # of activations, as measured
CHECK_ROWS = 2 * MICRO_BATCH  # on each rank, in the step whose loss and gradients are compared
LR = 1e-3
WEIGHT_DECAY = 0.1
BETAS = (0.9, 0.98)
CLIP_NORM = 1.0

OPEN_CLIP = "open_clip, local loss"
OPEN_CLIP_CUT = f"open_clip, {MICRO_BATCH} rows at a time"
OURS = "unisono"
OURS_CONCEPTS = "unisono, positives by concept"
OURS_CUT = f"unisono, {MICRO_BATCH} rows at a time"
SIGLIP = "open_clip SigLIP"
OURS_SIGMOID = "unisono sigmoid"
PEERS: dict[Family, str] = {"CLIP": OPEN_CLIP, "sigmoid": SIGLIP}


class Step(Protocol):
    """A model on this rank, with its loss and optimizer."""

    optimizer: torch.optim.Optimizer
    clip_norm: float

    def __call__(self, batch: Batch) -> Tensor:
        """Train one step. Returns the loss, detached: of all rows, or of this rank's rows."""
        ...

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters by open_clip's names."""
        ...


class Contender(NamedTuple):
    """`towers` and `scale`: by which factors a contender's gradients of CHECK_ROWS differ from the true ones."""

    family: Family
    make: Callable[[], Step]
    is_ours: bool = False
    cuts: bool = False
    towers: float = 1.0
    scale: float = 1.0
    logits: float = 0.0  # how many times it holds a matrix of logits, of this rank's rows

    def gigabytes(self, rows: int) -> float:
        """Estimate what a step takes on a rank."""
        return 1e-9 * (ROW_BYTES * (MICRO_BATCH if self.cuts else rows) + 4 * self.logits * rows * rows * WORLD_SIZE)

    def can_take(self, rows: int) -> bool:
        return self.is_ours or not self.cuts or (rows > MICRO_BATCH and rows % MICRO_BATCH == 0)


class OurStep:
    """The body of the loop of unisono_models.clip.train."""

    def __init__(self, **loss: Any) -> None:
        from benchmarks.clip.towers import make_clip
        from unisono_models.clip.config import LossConfig, OptimizerConfig
        from unisono_models.clip.loss import ClipTrainingModule
        from unisono_models.clip.optimizer import make_optimizer
        from unisono_models.training.config import ParallelConfig
        from unisono_models.training.distributed.launch import Ranks
        from unisono_models.training.distributed.parallel import parallelize

        self.ranks = Ranks(dist.get_rank(), dist.get_world_size(), dist.get_rank(), torch.device("cpu"))
        self.module = ClipTrainingModule(make_clip(), LossConfig(**({"same_concept": "negative"} | loss)))
        self.parallel = ParallelConfig()
        self.model = parallelize(self.module, self.parallel, self.ranks)
        self.settings = OptimizerConfig(LR, WEIGHT_DECAY, *BETAS, warmup=0)
        self.optimizer: torch.optim.Optimizer = make_optimizer(self.module, self.settings)
        self.clip_norm = CLIP_NORM

    def __call__(self, batch: Batch) -> Tensor:
        from unisono_models.clip.loss import backward
        from unisono_models.clip.optimizer import set_learning_rate
        from unisono_models.training.distributed.parallel import autocast_context

        made = {"images": batch.images, "text": batch.tokens, "concepts": batch.places, "index": batch.places}
        self.model.train()
        set_learning_rate(self.optimizer, self.settings, 0, 1000)
        with autocast_context(self.parallel, self.ranks):
            losses = backward(self.model, self.module, {**made, "step": 0, "seed": 0})
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return losses["loss"]

    def parameters(self) -> dict[str, nn.Parameter]:
        from benchmarks.clip.towers import open_clip_name

        return {open_clip_name(name): parameter for name, parameter in self.module.named_parameters()}


class OpenClipStep:
    """One step of open_clip_train's train_one_epoch, with model, DDP, loss and optimizer as its main builds them."""

    def __init__(self, *, local: bool = True, sigmoid: bool = False, cut: bool = False) -> None:
        warnings.simplefilter("ignore", FutureWarning)  # torch.distributed.nn is deprecated
        warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")  # as parallelize does
        from open_clip import create_loss

        from benchmarks.clip.towers import make_open_clip

        self.model = make_open_clip(math.log(10), -10.0) if sigmoid else make_open_clip(math.log(1 / 0.07), None)
        self.parallel = nn.parallel.DistributedDataParallel(self.model)
        off = dict.fromkeys(("distill", "horovod", "wandb"), False)
        loss = {"local_loss": local, "gather_with_grad": local, "siglip": sigmoid, "loss_dist_impl": None, "model": ""}
        rest = {"device": "cpu", "precision": "fp32", "skip_scheduler": True, "log_every_n_steps": 100, "batch_size": 0}
        self.args = SimpleNamespace(rank=dist.get_rank(), world_size=dist.get_world_size(), **off, **loss, **rest)
        self.loss = RecordedLoss(create_loss(self.args))
        self.optimizer: torch.optim.Optimizer = self._make_optimizer()
        self.clip_norm = CLIP_NORM
        self.cut = cut

    def _make_optimizer(self) -> torch.optim.AdamW:
        decays: dict[bool, list[nn.Parameter]] = {False: [], True: []}
        for name, parameter in self.parallel.named_parameters():
            is_excluded = parameter.ndim < 2 or any(part in name for part in ("bn", "ln", "bias", "logit_scale"))
            decays[not is_excluded].append(parameter)
        groups = [{"params": held, "weight_decay": WEIGHT_DECAY if decay else 0.0} for decay, held in decays.items()]
        return torch.optim.AdamW(groups, lr=LR, betas=BETAS)

    def __call__(self, batch: Batch) -> Tensor:
        from open_clip_train.train import train_one_epoch

        parts = len(batch.images) // MICRO_BATCH if self.cut else 1
        self.args.accum_freq = parts
        self.args.grad_clip_norm = self.clip_norm
        data = {"train": OneStepData(batch, parts)}
        train_one_epoch(self.parallel, data, self.loss, 0, self.optimizer, None, None, None, self.args)
        return self.loss.last

    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.model.named_parameters())


class RecordedLoss:
    """A loss of open_clip that keeps its last value, which train_one_epoch only logs."""

    def __init__(self, loss: nn.Module) -> None:
        self.loss = loss
        self.last = torch.tensor(math.nan)

    def __call__(self, **arguments: Any) -> dict[str, Tensor]:
        losses: dict[str, Tensor] = self.loss(**arguments)
        self.last = losses["contrastive_loss"].detach()
        return losses


class OneStepData:
    """The data of an epoch of one step, as open_clip_train expects it: the batch in equal parts."""

    def __init__(self, batch: Batch, parts: int) -> None:
        self.batches = list(zip(batch.normalised.chunk(parts), batch.padded.chunk(parts), strict=True))
        self.dataloader = self
        self.num_batches = parts
        self.num_samples = len(batch.images) * WORLD_SIZE

    def set_epoch(self, epoch: int) -> None: ...

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self.batches)


# The first of each family is the peer: the others must agree with it and are compared with it.
CONTENDERS: dict[str, Contender] = {
    OPEN_CLIP: Contender("CLIP", OpenClipStep, logits=4),
    OURS: Contender("CLIP", OurStep, is_ours=True, logits=1),
    OURS_CONCEPTS: Contender("CLIP", lambda: OurStep(same_concept="positive"), is_ours=True, logits=1),
    # Each rank has the gradient of its own features only, and DDP takes the mean: the towers' gradient is too small.
    "open_clip, its default": Contender(
        "CLIP", lambda: OpenClipStep(local=False), towers=1 / WORLD_SIZE, logits=4 * WORLD_SIZE
    ),
    OURS_CUT: Contender("CLIP", lambda: OurStep(micro_batch=MICRO_BATCH), is_ours=True, cuts=True, logits=1),
    # It computes the loss of the whole batch once for each part, and adds the whole gradient of the scale each time.
    OPEN_CLIP_CUT: Contender("CLIP", lambda: OpenClipStep(cut=True), cuts=True, scale=CHECK_ROWS / MICRO_BATCH, logits=4),
    SIGLIP: Contender("sigmoid", lambda: OpenClipStep(sigmoid=True), logits=4),
    OURS_SIGMOID: Contender("sigmoid", lambda: OurStep(kind="sigmoid"), is_ours=True),
}


@cache
def step_of(name: str) -> Step:
    return CONTENDERS[name].make()


def measure(name: str, sizes: Sequence[int], folder: Path, plain_malloc: bool) -> dict[int, dict[str, float]]:
    """Check a contender, then measure its memory with each of `sizes`, once its optimizer has its state."""
    if not plain_malloc:
        return_freed_memory()
    from benchmarks.clip.towers import Batch

    step = step_of(name)
    deviations = check_first_step(name, step, folder)
    loss_deviation = deviations.pop("loss")
    numbers = {}
    for rows in sizes:
        batch = Batch.make(rows)
        step.optimizer.zero_grad()  # open_clip keeps the gradients until the next step, ours does not: count them for both
        extra = peak_of_call(partial(step, batch))[1]
        numbers[rows] = {
            "extra_mib": extra / MIB,
            "loss_deviation": loss_deviation,
            "gradient_deviation": max(deviations.values()),  # of the image tower, the text tower, or scale and bias
        }
    return numbers


def check_first_step(name: str, step: Step, folder: Path) -> dict[str, float]:
    """Compare loss and gradients of the first step, before gradients are clipped, with those of the peer."""
    from benchmarks.clip.towers import Batch

    gradients: dict[str, Tensor] = {}

    def keep_gradients(*_: Any) -> None:
        for key, parameter in step.parameters().items():
            assert parameter.grad is not None, key
            gradients[key] = parameter.grad.double().clone()

    hook = step.optimizer.register_step_pre_hook(keep_gradients)
    step.clip_norm = math.inf
    loss = step(Batch.make(CHECK_ROWS)).double().reshape(())
    step.clip_norm = CLIP_NORM
    hook.remove()
    dist.all_reduce(loss)
    contender = CONTENDERS[name]
    results = {"loss": loss / dist.get_world_size()}
    for part, factor in {"visual.": contender.towers, "text.": contender.towers, "logit_": contender.scale}.items():
        flat = [gradients[key].flatten() for key in sorted(gradients) if key.startswith(part)]
        results[part] = torch.cat(flat) / factor
    path = folder / f"{contender.family}-{dist.get_rank()}.pt"
    return deviations_from_peer(results, path, is_peer=name == PEERS[contender.family])


def time_round(names: Sequence[str], rows: int, turn: int) -> dict[str, list[Seconds]]:
    from benchmarks.clip.towers import Batch

    batch = Batch.make(rows)
    return take_turns({name: partial(step_of(name), batch) for name in names}, range(turn, turn + 1))


def warm_up(names: Sequence[str]) -> None:
    """Build every contender, in the same order on all ranks, and load its code."""
    from benchmarks.clip.towers import Batch

    for name in names:
        step_of(name)(Batch.make(CHECK_ROWS))

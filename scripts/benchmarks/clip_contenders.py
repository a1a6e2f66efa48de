"""What the benchmark of the training step compares. Made on the ranks: open_clip's step is its own train_one_epoch."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

if TYPE_CHECKING:  # timm and transformers, which the process that starts the ranks can do without
    from clip_towers import Batch

Family = Literal["CLIP", "sigmoid"]

WORLD_SIZE = 2
MICRO_BATCH = 128  # rows on a rank at a time, where a contender cuts its batch
ROW_BYTES = 420_000  # of activations, as measured
CHECK_ROWS = 2 * MICRO_BATCH  # on each rank, of the step whose loss and gradients are compared
LR, WEIGHT_DECAY, BETAS, CLIP_NORM = 1e-3, 0.1, (0.9, 0.98), 1.0

OPEN_CLIP = "open_clip, local loss"
OPEN_CLIP_DEFAULT = "open_clip, its default"
OPEN_CLIP_CUT = f"open_clip, {MICRO_BATCH} rows at a time"
OURS = "unisono"
OURS_CONCEPTS = "unisono, positives by concept"
OURS_CUT = f"unisono, {MICRO_BATCH} rows at a time"
SIGLIP = "open_clip SigLIP"
OURS_SIGMOID = "unisono sigmoid"


class Step(Protocol):
    """A model on this rank, with its loss and optimizer. `clip_norm` may be set."""

    optimizer: torch.optim.Optimizer
    clip_norm: float

    def __call__(self, batch: Batch) -> Tensor:
        """One step of training. The loss, detached: of this rank's rows for some, whose mean over ranks is the global one."""
        ...

    def parameters(self) -> dict[str, nn.Parameter]:
        """By open_clip's names."""
        ...


class Contender(NamedTuple):
    """`towers` and `scale`: what a contender's gradients of CHECK_ROWS are multiples of the true ones by."""

    family: Family
    make: Callable[[], Step]
    is_ours: bool = False
    cuts: bool = False
    towers: float = 1.0
    scale: float = 1.0
    logits: float = 0.0  # how many times it holds a matrix of logits, of this rank's rows

    def gigabytes(self, rows: int) -> float:
        """About what a step takes on a rank."""
        return 1e-9 * (ROW_BYTES * (MICRO_BATCH if self.cuts else rows) + 4 * self.logits * rows * rows * WORLD_SIZE)

    def can_take(self, rows: int) -> bool:
        return self.is_ours or not self.cuts or (rows > MICRO_BATCH and rows % MICRO_BATCH == 0)


class OurStep:
    """The body of the loop of unisono_models.clip.train."""

    def __init__(self, **objective: Any) -> None:
        from clip_towers import make_clip

        from unisono_models.clip.config import ObjectiveConfig, OptimizerConfig
        from unisono_models.clip.loss import ClipTrainingModule
        from unisono_models.clip.optimizer import make_optimizer
        from unisono_models.training.config import ParallelConfig
        from unisono_models.training.distributed.launch import Ranks
        from unisono_models.training.distributed.parallel import parallelize

        self.ranks = Ranks(dist.get_rank(), dist.get_world_size(), dist.get_rank(), torch.device("cpu"))
        self.learner = ClipTrainingModule(make_clip(), ObjectiveConfig(**objective))
        self.parallel = ParallelConfig()
        self.model = parallelize(self.learner, self.parallel, self.ranks)
        self.settings = OptimizerConfig(LR, WEIGHT_DECAY, *BETAS, warmup=0)
        self.optimizer: torch.optim.Optimizer = make_optimizer(self.learner, self.settings)
        self.clip_norm = CLIP_NORM

    def __call__(self, batch: Batch) -> Tensor:
        from unisono_models.clip.loss import backward
        from unisono_models.clip.optimizer import set_learning_rate
        from unisono_models.training.distributed.parallel import autocast_context

        made = {"images": batch.images, "text": batch.tokens, "concepts": batch.places, "index": batch.places}
        self.model.train()
        set_learning_rate(self.optimizer, self.settings, 0, 1000)
        with autocast_context(self.parallel, self.ranks):
            losses = backward(self.model, self.learner, {**made, "step": 0, "seed": 0})
        torch.nn.utils.clip_grad_norm_(self.learner.parameters(), self.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return losses["loss"]

    def parameters(self) -> dict[str, nn.Parameter]:
        from clip_towers import their_name

        return {their_name(name): parameter for name, parameter in self.learner.named_parameters()}


class OpenClipStep:
    """One step of open_clip_train's train_one_epoch, with model, DDP, loss and optimizer as its main makes them."""

    def __init__(self, *, local: bool = True, sigmoid: bool = False, cut: bool = False) -> None:
        warnings.simplefilter("ignore", FutureWarning)  # torch.distributed.nn is deprecated
        warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")  # as parallelize does
        from clip_towers import make_open_clip
        from open_clip import create_loss

        self.model = make_open_clip(*((math.log(10), -10.0) if sigmoid else (math.log(1 / 0.07), None)))
        self.parallel = nn.parallel.DistributedDataParallel(self.model)
        rank, size = dist.get_rank(), dist.get_world_size()
        off = dict.fromkeys(("distill", "horovod", "wandb"), False)
        loss = {"local_loss": local, "gather_with_grad": local, "siglip": sigmoid, "loss_dist_impl": None, "model": ""}
        rest = {"device": "cpu", "precision": "fp32", "skip_scheduler": True, "log_every_n_steps": 100, "batch_size": 0}
        self.args = SimpleNamespace(rank=rank, world_size=size, **off, **loss, **rest)
        self.loss = Recorded(create_loss(self.args))
        self.optimizer: torch.optim.Optimizer = self._make_optimizer()
        self.clip_norm, self.cut = CLIP_NORM, cut

    def _make_optimizer(self) -> torch.optim.AdamW:
        decays: dict[bool, list[nn.Parameter]] = {False: [], True: []}
        for name, parameter in self.parallel.named_parameters():
            spared = parameter.ndim < 2 or any(part in name for part in ("bn", "ln", "bias", "logit_scale"))
            decays[not spared].append(parameter)
        groups = [{"params": held, "weight_decay": WEIGHT_DECAY if decay else 0.0} for decay, held in decays.items()]
        return torch.optim.AdamW(groups, lr=LR, betas=BETAS)

    def __call__(self, batch: Batch) -> Tensor:
        from open_clip_train.train import train_one_epoch

        parts = len(batch.images) // MICRO_BATCH if self.cut else 1
        self.args.accum_freq, self.args.grad_clip_norm = parts, self.clip_norm
        data = {"train": OneStep(batch, parts)}
        train_one_epoch(self.parallel, data, self.loss, 0, self.optimizer, None, None, None, self.args)
        return self.loss.last

    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.model.named_parameters())


class Recorded:
    """A loss of open_clip that keeps its last value: train_one_epoch only logs it."""

    def __init__(self, loss: nn.Module) -> None:
        self.loss, self.last = loss, torch.tensor(math.nan)

    def __call__(self, **arguments: Any) -> dict[str, Tensor]:
        losses: dict[str, Tensor] = self.loss(**arguments)
        self.last = losses["contrastive_loss"].detach()
        return losses


class OneStep:
    """The data of an epoch of one step, as open_clip_train wants it: the batch in equal parts."""

    def __init__(self, batch: Batch, parts: int) -> None:
        self.batches = list(zip(batch.normalised.chunk(parts), batch.padded.chunk(parts), strict=True))
        self.dataloader, self.num_batches, self.num_samples = self, parts, len(batch.images) * WORLD_SIZE

    def set_epoch(self, epoch: int) -> None: ...

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self.batches)


def ours(**objective: Any) -> Callable[[], Step]:
    return lambda: OurStep(**({"same_concept": "negative"} | objective))


def theirs(**options: Any) -> Callable[[], Step]:
    return lambda: OpenClipStep(**options)


# The first of each family is what the others must agree with and what they are a ratio to.
CONTENDERS: dict[str, Contender] = {
    OPEN_CLIP: Contender("CLIP", theirs(), logits=4),
    OURS: Contender("CLIP", ours(), is_ours=True, logits=1),
    OURS_CONCEPTS: Contender("CLIP", ours(same_concept="positive"), is_ours=True, logits=1),
    # Each rank has the gradient of its own features only, of which DDP takes the mean: the towers' is too small.
    OPEN_CLIP_DEFAULT: Contender("CLIP", theirs(local=False), towers=1 / WORLD_SIZE, logits=4 * WORLD_SIZE),
    OURS_CUT: Contender("CLIP", ours(micro_batch=MICRO_BATCH), is_ours=True, cuts=True, logits=1),
    # The loss of the whole batch is taken for each part, and each time adds the whole gradient of the scale.
    OPEN_CLIP_CUT: Contender("CLIP", theirs(cut=True), cuts=True, scale=CHECK_ROWS / MICRO_BATCH, logits=4),
    SIGLIP: Contender("sigmoid", theirs(sigmoid=True), logits=4),
    OURS_SIGMOID: Contender("sigmoid", ours(loss="sigmoid"), is_ours=True),
}
PEERS: dict[Family, str] = {"CLIP": OPEN_CLIP, "sigmoid": SIGLIP}

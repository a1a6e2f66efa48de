"""The network of the judge."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam

from unisono.collectives import broadcast
from unisono_models.gan.config import EvaluationConfig
from unisono_models.gan.data.dataset import Datasets
from unisono_models.gan.data.images import Images
from unisono_models.training.checkpoint.atomic_file import atomic_write
from unisono_models.training.distributed.launch import Ranks
from unisono_models.training.distributed.object_collectives import broadcast_object, raise_together
from unisono_models.training.distributed.watchdog import Watchdog
from unisono_models.training.randomness import make_generator, uniform
from unisono_models.training.sampler import StepSampler
from unisono_models.training.schedule import learning_rate_factor

FEATURES = 64
_TURNS = 4
_CHANNELS = (16, 32, 64)  # of the convolutions, the last of all further ones
_SMALLEST = 4  # pixels a side that the convolutions end at


class Judge(nn.Module):
    """Logits of pictures (n, channels, size, size) between -1 and 1: of `classes`, or else of their four quarter-turns.

    Unlabelled pictures have no classes that it could tell apart: then it tells how far a picture was turned, by 0, 90, 180 or
    270 degrees, for which it has to know what an upright one looks like. Convolutions down to 4 pixels a side, a
    hidden layer, no normalization: what it says of a picture does not depend on the others in the batch.

    Example:
        >>> judge = Judge(channels=1, size=16, classes=("cat", "dog"))
        >>> pictures = torch.zeros(3, 1, 16, 16)
        >>> judge(pictures).shape, judge.features(pictures).shape
        (torch.Size([3, 2]), torch.Size([3, 64]))
    """

    def __init__(self, *, channels: int, size: int, classes: Sequence[str] = ()) -> None:
        super().__init__()
        if channels < 1 or size < 1:
            raise ValueError(f"Judge: channels={channels}, size={size}: both must be at least 1")
        self.channels, self.size, self.classes = channels, size, tuple(classes)
        self.accuracy = math.nan
        """Part of the test pictures that it takes for what they are. NaN: not known."""
        width, halvings = _CHANNELS[0], max(0, math.ceil(math.log2(size / _SMALLEST)))
        layers: list[nn.Module] = [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
        for number in range(1, halvings + 1):
            wider = _CHANNELS[min(number, len(_CHANNELS) - 1)]
            layers += [nn.Conv2d(width, wider, 3, stride=2, padding=1), nn.ReLU()]
            width = wider
        side = -(-size // 2**halvings)
        self.body = nn.Sequential(*layers, nn.Flatten(), nn.Linear(width * side**2, FEATURES), nn.ReLU())
        self.head = nn.Linear(FEATURES, len(self.classes) or _TURNS)

    def features(self, pictures: Tensor) -> Tensor:
        """(n, 64), after the activation of the last layer but one: none is below 0."""
        found: Tensor = self.body(pictures.to(self.head.weight.dtype))
        return found

    def forward(self, pictures: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(pictures))
        return logits

    @torch.no_grad()
    def start(self, seed: int) -> None:
        """Draw the weights that training begins with: He's normal ones, as a function of `seed` and their names."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            else:
                drawn = torch.randn(parameter.shape, generator=make_generator(seed, "judge", name), dtype=torch.float64)
                parameter.copy_(drawn * math.sqrt(2 / parameter[0].numel()))


SEED = 0  # not the run's: figures of runs with different seeds are by one judge
_RATE = 4e-3
_WARMUP = 0.1
_SHIFT = 1 / 16  # of the side, at most
_TILE = 500  # test pictures at a time


def train_judge(judge: Judge, source: Datasets, config: EvaluationConfig, heartbeat: Watchdog | None = None) -> float:
    """Draw the judge's weights and train them on source.train; returns its accuracy on source.test, NaN if that is empty.

    By one process alone, and not by shares: a thousand steps make another judge of another rounding, and figures are to be the
    same on any number of ranks. Pictures are shifted at random by up to a sixteenth of their side, with their edges drawn out.
    The scale of the features, and so of distances between them, grows with the steps: figures of judges that were trained
    for different numbers of steps do not compare.
    """
    judge.start(SEED)
    weight = next(judge.parameters())
    order = StepSampler(len(source.train), config.judge_batch, SEED)
    optimizer = Adam(judge.parameters(), lr=_RATE)
    for step in range(config.judge_steps):
        places = order.at(step)
        pictures = source.train.floats(places, dtype=weight.dtype, device=weight.device)
        pictures, targets = _pose(judge, pictures, source.train, places, uniform(SEED, "turn", step, places))
        logits = judge(_shift(pictures, uniform(SEED, "shift", step, places.to(weight.device), (2,))))
        F.cross_entropy(logits, targets).backward()
        for group in optimizer.param_groups:
            group["lr"] = _RATE * learning_rate_factor(step, config.judge_steps, warmup=_WARMUP)
        optimizer.step()
        optimizer.zero_grad()
        if heartbeat is not None:
            heartbeat.beat()
    return _measure(judge, source.test)


@torch.no_grad()
def _measure(judge: Judge, images: Images) -> float:
    """Part of the pictures that are taken for what they are, or of all quarter-turns of them."""
    weight = next(judge.parameters())
    right = total = 0
    for places in torch.arange(len(images)).split(_TILE):
        for turn in (0.0,) if judge.classes else (0.0, 0.25, 0.5, 0.75):
            pictures = images.floats(places, dtype=weight.dtype, device=weight.device)
            pictures, targets = _pose(judge, pictures, images, places, torch.full((len(places),), turn))
            right += int((judge(pictures).argmax(1) == targets).sum())
            total += len(places)
    return right / total if total else math.nan


def _pose(judge: Judge, pictures: Tensor, images: Images, places: Tensor, turns: Tensor) -> tuple[Tensor, Tensor]:
    """The pictures as the judge sees them, and what it is to say: their labels, or the quarters in `turns`, from 0 to 1."""
    if judge.classes:
        if images.labels is None:
            raise ValueError("train_judge: a judge of classes needs labels, these pictures have none")
        return pictures, images.labels[places].to(pictures.device)
    quarters = (turns * 4).long().to(pictures.device)
    turned = torch.stack([pictures.rot90(quarter, (2, 3)) for quarter in range(4)])
    return turned[quarters, torch.arange(len(pictures), device=pictures.device)], quarters


def _shift(pictures: Tensor, parts: Tensor) -> Tensor:
    """Pictures moved by whole pixels, down and across as `parts` (n, 2) from 0 to 1 say; edges are drawn out."""
    size, rows = pictures.shape[2], torch.arange(len(pictures), device=pictures.device)
    most = round(size * _SHIFT)
    if not most or not len(pictures):
        return pictures
    padded = F.pad(pictures, (most,) * 4, mode="replicate")
    first = (parts * (2 * most + 1)).long()
    cells = first[:, :, None] + torch.arange(size, device=pictures.device)
    moved = padded[rows[:, None, None], :, cells[:, 0, :, None], cells[:, 1, None, :]]
    return moved.movedim(3, 1)


def load_or_train_feature_extractor(
    path: Path, source: Datasets, config: EvaluationConfig, ranks: Ranks, heartbeat: Watchdog | None = None
) -> Judge:
    """The judge of a run: the one in the file `path`, or if there is none a newly trained one, which is kept there.

    All ranks call. Whether it is there is rank 0's to say, and what counts is the one that rank 0 has trained; the others train
    along instead of waiting for it. Its seed is not the run's, and it does not depend on the number of ranks: on one kind of
    machine and with as many threads (torchrun: one), all runs on the same pictures have the same judge, bit by bit.

    Raises, on all ranks: ValueError if the file is damaged, or the judge in it is of other pictures than those of `source`.

    Example:
        judge = ready_judge(run.path / "judge.safetensors", source, config.evaluation, ranks, heartbeat)
    """
    if broadcast_object(path.exists()):
        with raise_together("ready_judge"):
            judge = read_judge(path, fingerprint=source.fingerprint)
            _check_fit(judge, path, source)
        return judge.to(ranks.device)
    judge = _blank(source.train.channels, source.train.size, classes_of(source)).to(ranks.device)
    with raise_together("ready_judge"):
        accuracy = train_judge(judge, source, config, heartbeat)
    with torch.no_grad():
        for weight in judge.parameters():
            weight.copy_(broadcast(weight))
    judge.accuracy = broadcast_object(accuracy)
    with raise_together("ready_judge"):
        if ranks.first:
            write_judge(path, judge, fingerprint=source.fingerprint)
    return judge


def classes_of(source: Datasets) -> tuple[str, ...]:
    """What a judge of these pictures tells apart: their classes, if there are two or more; (): their quarter-turns."""
    return source.train.classes if source.train.labels is not None and len(source.train.classes) > 1 else ()


def write_judge(path: Path, judge: Judge, *, fingerprint: str = "") -> None:
    """Keep a judge as safetensors. `fingerprint`: of the pictures it was trained on. One rank calls."""
    about = {name: getattr(judge, name) for name in ("channels", "size", "classes", "accuracy")} | {"pictures": fingerprint}
    weights = {name: weight.detach().cpu().contiguous() for name, weight in judge.state_dict().items()}
    atomic_write(path, save(weights, {"judge": json.dumps(about)}))


def read_judge(path: Path, *, fingerprint: str | None = None) -> Judge:
    """The judge in a file, on the CPU. Raises: ValueError if it was trained on pictures that have another `fingerprint`."""
    try:
        with safe_open(path, "pt") as file:
            about = json.loads((file.metadata() or {})["judge"])
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, no dictionary
        judge = _blank(about["channels"], about["size"], about["classes"])
        judge.to(weights["head.weight"].dtype).load_state_dict(weights)
        judge.accuracy, pictures = float(about["accuracy"]), str(about["pictures"])
    except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{path} is not a judge, or damaged ({error}): remove it, and another one is trained") from error
    if fingerprint is not None and pictures != fingerprint:
        raise ValueError(
            f"{path}: this judge was trained on other pictures ({pictures}) than there are now ({fingerprint}): figures would "
            "not compare. Go back to those pictures, or remove it, and another one is trained"
        )
    return judge


def _blank(channels: int, size: int, classes: Sequence[str]) -> Judge:
    """With weights yet to come: none are drawn from torch's global generator, which is the caller's."""
    with torch.device("meta"):
        judge = Judge(channels=channels, size=size, classes=classes)
    return judge.to_empty(device="cpu")


def _check_fit(judge: Judge, path: Path, source: Datasets) -> None:
    found = (judge.channels, judge.size, judge.classes)
    wanted = (source.train.channels, source.train.size, classes_of(source))
    if found != wanted:
        raise ValueError(f"{path}: this judge is for (channels, size, classes) {found}, the pictures are of {wanted}")

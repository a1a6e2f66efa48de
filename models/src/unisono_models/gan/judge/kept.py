"""The judge of a run: a small classifier, trained on the run's own pictures, by whose features generated ones are measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from unisono.collectives import broadcast
from unisono_models.gan.config import EvaluationConfig
from unisono_models.gan.judge.network import Judge
from unisono_models.gan.judge.training import train_judge
from unisono_models.gan.source import Source
from unisono_models.training.checkpoint.atomic_file import atomic_write
from unisono_models.training.distributed.launch import Ranks
from unisono_models.training.distributed.object_collectives import broadcast_object, raise_together
from unisono_models.training.distributed.watchdog import Watchdog


def ready_judge(path: Path, source: Source, config: EvaluationConfig, ranks: Ranks, heartbeat: Watchdog | None = None) -> Judge:
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


def classes_of(source: Source) -> tuple[str, ...]:
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


def _check_fit(judge: Judge, path: Path, source: Source) -> None:
    found = (judge.channels, judge.size, judge.classes)
    wanted = (source.train.channels, source.train.size, classes_of(source))
    if found != wanted:
        raise ValueError(f"{path}: this judge is for (channels, size, classes) {found}, the pictures are of {wanted}")

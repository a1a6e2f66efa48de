"""The law for the training module: three steps on any split give the result of one process with the whole batch."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from tests.clip.small_clip import small_batch, small_training_module
from unisono_models.clip.config import LossConfig, OptimizerConfig
from unisono_models.clip.loss import backward
from unisono_models.clip.optimizer import make_optimizer, set_learning_rate
from unisono_models.training.config import ParallelConfig
from unisono_models.training.distributed.launch import Ranks
from unisono_models.training.distributed.parallel import parallelize

SPLITS = {1: (7,), 2: (5, 2), 3: (3, 0, 4), 4: (2, 0, 4, 1)}
LOSSES = {
    "clip": LossConfig(),
    "sigmoid": LossConfig(kind="sigmoid", same_concept="masked"),
    "decoupled": LossConfig(same_concept="negative", decoupled=True, label_smoothing=0.1),
    "ring": LossConfig(exchange="ring"),
    "views": LossConfig(view_weight=0.5, image_weight=0.3),
    "language": LossConfig(language_weight=0.5),
    "cached": LossConfig(view_weight=0.5, micro_batch=2),
}
OPTIMIZER = OptimizerConfig(lr=0.01, layer_decay=0.8)
PARALLEL = {
    "ddp": ParallelConfig(),
    "fsdp": ParallelConfig(kind="fsdp"),
    "hybrid": ParallelConfig(kind="hybrid", shard=1),
    "checkpointed": ParallelConfig(checkpoint_activations=True),
    "compiled": ParallelConfig(checkpoint_activations=True, compile=True),
}


def train(loss_name, parallel, rows, ranks, text):
    """Train three steps; returns the losses of each, and the parameters at the end."""
    module = small_training_module(LOSSES[loss_name], **text)
    batches = [small_batch(module, rows, step=step) for step in range(3)]
    model = parallelize(module, PARALLEL[parallel], ranks)
    optimizer = make_optimizer(module, OPTIMIZER)
    losses = []
    for step, batch in enumerate(batches):
        set_learning_rate(optimizer, OPTIMIZER, step, 3)
        losses.append(backward(model, module, batch))
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    whole = {name: p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for name, p in module.named_parameters()}
    return losses, {name.replace("._checkpoint_wrapped_module", ""): p for name, p in whole.items()}


def trains_alike(loss_name, parallel, text, expected):
    rank, size = dist.get_rank(), dist.get_world_size()
    sizes = SPLITS[size]
    start = sum(sizes[:rank])
    ranks = Ranks(rank, size, rank, torch.device("cpu"))
    losses, parameters = train(loss_name, parallel, slice(start, start + sizes[rank]), ranks, text)
    for mine, whole in zip(losses, expected[0], strict=True):
        assert mine.keys() == whole.keys()
        for name in whole:
            torch.testing.assert_close(mine[name], whole[name], rtol=1e-9, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")
    assert parameters.keys() == expected[1].keys()
    for name, value in parameters.items():
        torch.testing.assert_close(value, expected[1][name], rtol=1e-8, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


@pytest.fixture(scope="module")
def alone():
    """The result of one process with the whole batch, computed once for each loss."""
    kept = {}

    def get(loss_name, text):
        key = (loss_name, str(text))
        if key not in kept:
            one = Ranks(0, 1, 0, torch.device("cpu"))
            kept[key] = train(loss_name, "ddp", slice(0, 7), one, text)
        return kept[key]

    return get


def build(loss_name):
    module = small_training_module(LOSSES[loss_name])
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), dist.get_rank(), torch.device("cpu"))
    return parallelize(module, ParallelConfig(), ranks), make_optimizer(module, OPTIMIZER)


def step(model, optimizer, batch):
    set_learning_rate(optimizer, OPTIMIZER, batch["step"], 3)
    losses = backward(model, model.module, batch)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return losses.pop("loss"), losses


def batches():
    """This rank's rows of three batches."""
    sizes, rank = SPLITS[dist.get_world_size()], dist.get_rank()
    rows = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    module = small_training_module(LossConfig())
    return [small_batch(module, rows, step=number) for number in range(3)]


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("loss_name", LOSSES)
def test_training_module_matches_one_process(ranks, alone, loss_name, world):
    ranks(trains_alike, loss_name, "ddp", {}, alone(loss_name, {}), world_size=world)


def test_check_has_nothing_to_say_and_training_resumes(law):
    law.check(partial(build, "clip"), step, batches, world_sizes=(1, 2), resume=True)


@pytest.mark.parametrize("loss_name", ["clip", "cached"])
@pytest.mark.parametrize("parallel", ["fsdp", "hybrid", "checkpointed"])
def test_every_parallelism_matches_one_process(ranks, alone, parallel, loss_name):
    ranks(trains_alike, loss_name, parallel, {}, alone(loss_name, {}), world_size=2)


def test_frozen_text_tower_matches_one_process(ranks, alone):
    for parallel in ("ddp", "fsdp"):
        ranks(trains_alike, "clip", parallel, {"frozen": True}, alone("clip", {"frozen": True}), world_size=3)


def test_compiled_blocks_match_plain_ones(alone):
    losses, parameters = train("clip", "compiled", slice(0, 7), Ranks(0, 1, 0, torch.device("cpu")), {})
    torch.testing.assert_close(losses, alone("clip", {})[0], rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(parameters, alone("clip", {})[1], rtol=1e-8, atol=1e-9)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0 and not torch._dynamo.utils.counters["graph_break"]

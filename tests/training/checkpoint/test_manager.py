"""What is saved comes back to the bit, on any number of ranks, however the model is spread."""

import json

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from unisono_models.training.checkpoint.manager import Checkpoints
from unisono_models.training.checkpoint.manifest import list_steps, read_manifest


class Model(nn.Module):
    """Layers that do not divide by 2 or 3, a tied weight, buffers of other dtypes, a parameter that never has a gradient."""

    def __init__(self, seed=0, dtype=torch.float32, width=7):
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(5, width, dtype=dtype)
        self.norm = nn.LayerNorm(width, dtype=dtype)
        self.last = nn.Linear(width, 5, dtype=dtype)
        self.again = nn.Linear(5, width, bias=False, dtype=dtype)
        self.again.weight = self.first.weight
        self.scale = nn.Parameter(torch.rand(1, dtype=dtype))
        self.unused = nn.Parameter(torch.rand(3))
        self.frozen = nn.Parameter(torch.rand(2, 2), requires_grad=False)
        self.register_buffer("count", torch.tensor(seed))
        self.register_buffer("narrow", torch.rand(3, 2).to(torch.bfloat16))
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("nothing", torch.zeros(0, 3))

    def forward(self, x):
        return self.last(self.norm(self.first(x)).relu() + self.again(x)) * self.scale


def spread(model, kind):
    if kind == "ddp":
        return DistributedDataParallel(model, find_unused_parameters=True)
    if kind == "fsdp":
        fully_shard(model.last)
        return fully_shard(model)
    if kind == "hybrid":
        return fully_shard(
            model, mesh=init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("copies", "shards"))
        )
    return model


def optimizer_of(model):
    decayed = [p for p in model.parameters() if p.ndim > 1 and p.requires_grad]
    others = [p for p in model.parameters() if p.ndim < 2 and p.requires_grad]
    return torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=1e-2, betas=(0.8, 0.95))


def train(model, optimizer, steps):
    """Each rank has its own batch, a function of the step."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    for step in steps:
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + rank), dtype=next(model.parameters()).dtype)
        model(x).square().sum().backward()
        if not isinstance(optimizer.param_groups[0]["lr"], torch.Tensor):
            optimizer.param_groups[0]["lr"] = 1e-2 / (step + 1)
        optimizer.step()
        optimizer.zero_grad()


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def plain(name):
    return name.removeprefix("module.")


def everything(model, optimizer):
    """Every tensor and number of the two, whole, by name, read without the code under test."""
    held = {f"model {plain(name)}": whole(value) for name, value in model.state_dict().items()}
    names = {parameter: plain(name) for name, parameter in model.named_parameters()}
    for parameter, state in optimizer.state.items():
        held |= {f"state {names[parameter]} {key}": whole(value) for key, value in state.items()}
    for number, group in enumerate(optimizer.param_groups):
        held |= {f"group {number} {key}": value for key, value in group.items() if key != "params"}
    return held


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert found[name].dtype == value.dtype and torch.equal(found[name], value), name
        else:
            assert type(found[name]) is type(value) and found[name] == value, name


def resume_gives_the_same_bits(folder, kind):
    model = spread(Model(), kind)
    optimizer = optimizer_of(model)
    with Checkpoints(folder) as checkpoints:
        train(model, optimizer, range(3))
        checkpoints.save(3, model, optimizer, {"seen": [12, 0.1]})
        train(model, optimizer, range(3, 6))  # while it is written

    again = spread(Model(seed=1), kind)
    optimizer_again = optimizer_of(again)
    with Checkpoints(folder) as checkpoints:
        assert checkpoints.load(again, optimizer_again) == (3, {"seen": [12, 0.1]})
    train(again, optimizer_again, range(3, 6))
    assert_equal(everything(again, optimizer_again), everything(model, optimizer))


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_resume_gives_the_same_bits(ranks, tmp_path, kind):
    ranks(resume_gives_the_same_bits, tmp_path, kind, world_size=2)


def test_resume_gives_the_same_bits_when_hybrid(ranks, tmp_path):
    ranks(resume_gives_the_same_bits, tmp_path, "hybrid", world_size=4)


def test_resume_gives_the_same_bits_without_a_process_group(tmp_path):
    resume_gives_the_same_bits(tmp_path, "plain")


def trained_and_saved(folder, kind, step):
    model = spread(Model(), kind)
    optimizer = optimizer_of(model)
    train(model, optimizer, range(2))
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(step, model, optimizer, {})
    return everything(model, optimizer)


def loaded_and_saved(folder, kind, step):
    model = spread(Model(seed=1), kind)
    optimizer = optimizer_of(model)
    with Checkpoints(folder) as checkpoints:
        assert checkpoints.load(model, optimizer) == (step - 1, {})
        checkpoints.save(step, model, optimizer, {})
    return everything(model, optimizer)


def test_ranks_and_kinds_may_change(ranks, tmp_path):
    expected = ranks(trained_and_saved, tmp_path, "ddp", 1, world_size=2)[0]
    for step, (world_size, kind) in enumerate([(3, "fsdp"), (1, "ddp"), (2, "fsdp")], start=2):
        for found in ranks(loaded_and_saved, tmp_path, kind, step, world_size=world_size):
            assert_equal(found, expected)
    assert_equal(loaded_and_saved(tmp_path, "plain", 5), expected)  # no process group


def save_wide(folder):
    model = spread(Model(width=1000), "hybrid")
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(1, model, {}, {})


def test_copies_are_written_once(ranks, tmp_path):
    ranks(save_wide, tmp_path, world_size=4)
    expected, found = Model(width=1000).state_dict(), Model(width=1000, seed=1)
    limit = sum(tensor.nbytes for tensor in expected.values()) + 4 * 64 * len(expected)  # a tied weight counts twice
    assert sum(file.stat().st_size for file in tmp_path.rglob("*.bin")) < limit
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.load(found, {})
    assert_equal(dict(found.state_dict()), dict(expected))


def test_saving_before_the_first_step_changes_nothing(tmp_path):
    models = [Model(), Model()]
    optimizers = [optimizer_of(model) for model in models]
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, models[0], optimizers[0], None)
        checkpoints.wait()
        fresh = Model(seed=1)
        assert checkpoints.load(fresh, optimizer_of(fresh)) == (0, None)
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, range(2))
    assert_equal(everything(models[0], optimizers[0]), everything(models[1], optimizers[1]))


def test_several_optimizers_and_extra_tensors(tmp_path):
    def make(seed):
        model = Model(seed)
        optimizers = {
            "first": torch.optim.SGD(model.first.parameters(), lr=0.1, momentum=0.9),
            "last": torch.optim.Adam(model.last.parameters(), lr=torch.tensor(0.1 + seed)),
        }
        return model, optimizers, {"average": Model(seed + 10), "noise": torch.rand(4, 1) + seed}

    model, optimizers, extra = make(0)
    for optimizer in optimizers.values():
        train(model, optimizer, range(2))
    again, optimizers_again, extra_again = make(1)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, model, optimizers, {}, extra=extra)
        checkpoints.load(again, optimizers_again, extra=extra_again)
    for name in optimizers:
        assert_equal(everything(again, optimizers_again[name]), everything(model, optimizers[name]))
    assert torch.equal(extra_again["noise"], extra["noise"])
    assert_equal(dict(extra_again["average"].state_dict()), dict(extra["average"].state_dict()))


@pytest.mark.parametrize("wrap", [torch.compile, checkpoint_wrapper, lambda model: torch.compile(checkpoint_wrapper(model))])
def test_wrappers_do_not_change_names(tmp_path, wrap):
    model = Model()
    optimizer = optimizer_of(model)
    train(model, optimizer, range(2))
    again = Model(seed=1)
    optimizer_again = optimizer_of(again)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, model, optimizer, {})
        checkpoints.load(wrap(again), optimizer_again)
        checkpoints.save(2, wrap(again), optimizer_again, {})
    assert_equal(everything(again, optimizer_again), everything(model, optimizer))
    first, second = ((path / "tensors.json").read_text() for path in list_steps(tmp_path))
    assert json.loads(first).keys() == json.loads(second).keys()


def test_other_layouts_in_memory(tmp_path):
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    again = nn.Conv2d(3, 4, 3)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, model, {}, {})
        checkpoints.load(again, {})
    assert torch.equal(again.weight, model.weight)


def steps_in(folder):
    return [int(path.name.removeprefix("step-")) for path in list_steps(folder)]


@pytest.mark.parametrize(("best", "expected"), [("max", [6, 5, 2]), ("min", [6, 5, 3])])
def test_the_newest_and_the_best_are_kept(tmp_path, best, expected):
    model = nn.Linear(2, 2)
    with Checkpoints(tmp_path, keep=2, best=best) as checkpoints:
        for step, score in enumerate([0.5, 0.9, 0.1, float("nan"), None, 0.4], start=1):
            checkpoints.save(step, model, {}, {}, score=score)
    assert steps_in(tmp_path) == expected
    assert read_manifest(tmp_path / "step-00000006").score == 0.4


def test_a_step_saved_again_replaces_the_first(tmp_path):
    model = nn.Linear(2, 2)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, model, {}, "first")
        checkpoints.save(1, model, {}, "second")
        assert checkpoints.load(model, {}) == (1, "second")
        assert checkpoints.failures == []
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_nothing_there(tmp_path):
    said = []
    with Checkpoints(tmp_path / "not yet", report=said.append) as checkpoints:
        assert checkpoints.load(nn.Linear(2, 2), {}) is None
    assert said == []


@pytest.mark.parametrize("state", [{"a": object()}, torch.ones(1), {1, 2}])
def test_state_that_is_not_json_is_refused_at_once(tmp_path, state):
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(TypeError, match="JSON"):
        checkpoints.save(1, nn.Linear(2, 2), {}, state)


def test_numbers_survive_json(tmp_path):
    state = {"x": 0.1 + 0.2, "big": 2**70, "inf": float("inf"), "text": "é"}
    model = nn.Linear(2, 2)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, model, {}, state)
        assert checkpoints.load(model, {}) == (1, state)


def test_files_are_what_the_commit_says(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, nn.Linear(2, 2), {}, {})
    commit = json.loads((tmp_path / "step-00000001" / "COMMIT").read_text())
    assert sorted(commit["files"]) == ["rank-00000.bin", "state.json", "tensors.json"]
    assert {path.name for path in (tmp_path / "step-00000001").iterdir()} == {*commit["files"], "COMMIT"}
    assert commit["world_size"] == 1 and commit["step"] == 1 and commit["format"] == 1

"""ReplicaSet: one module on several devices gives what it gives on one."""

import copy
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.func import functional_call
from torch.nn.utils import parametrizations, weight_norm
from torch.utils.checkpoint import checkpoint

from tests.dataparallel.device_kinds import KINDS, devices_of
from unisono.collectives import count_bytes
from unisono.dataparallel import ReplicaSet, Replicate, SyncBatchNorm, convert_sync_batchnorm, parallel_apply
from unisono.dataparallel.replicas.replicate import ModuleTemplate


class Tied(nn.Module):
    """Shared parameters, one of them under two names, a buffer, a frozen part, and a reference to a part beside."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.register_buffer("scale", torch.tensor([2.0] * 6))
        self.steps = [self.frozen, torch.tanh]  # not registered: a copy must still find its own

    def forward(self, ids: Tensor, *, times: float = 1.0, mask: Tensor | None = None) -> dict[str, Any]:
        x = self.embed(ids)
        for step in self.steps:
            x = step(x * self.scale)
        x = x if mask is None else x * mask[..., None]
        return {"logits": self.head(x) * times, "mean": x.mean(), "none": None, "times": times}


def regression() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 3))


def images() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 4, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


def attention() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)


def normed() -> nn.Module:
    return nn.Sequential(weight_norm(nn.Linear(5, 4)), parametrizations.weight_norm(nn.Linear(4, 3)))


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "regression": (regression, (7, 5)),
    "images": (images, (7, 3, 8, 8)),
    "recurrent": (Recurrent, (7, 3, 5)),
    "attention": (attention, (7, 3, 8)),
    "normed": (normed, (7, 5)),
}


def made(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(1)
    make, shape = MODULES[name]
    return make().double(), torch.randn(shape, dtype=torch.float64)


def on_host(x: Tensor) -> Tensor:
    return x.detach().cpu()


@pytest.mark.filterwarnings("ignore:.*weight_norm.*")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODULES)
def test_values_and_gradients_are_those_of_one_device(name, kind, request):
    """Three steps of training, then inference with what was learned: copies are made anew when parameters change."""
    if (name, kind) == ("recurrent", "pretend"):
        kind = "cpu"  # torch has no fused LSTM for a device it does not know
    devices = devices_of(kind, request)
    (module, x), (twin, _) = made(name), made(name)
    replicas = ReplicaSet(twin, devices)
    ours, theirs = (torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (replicas, module))
    for _ in range(3):
        for optimizer, forward in ((ours, replicas), (theirs, module)):
            optimizer.zero_grad()
            forward(x).square().mean().backward()
            optimizer.step()
        torch.testing.assert_close([on_host(p) for p in twin.parameters()], [on_host(p) for p in module.parameters()])
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                torch.testing.assert_close(on_host(replicas(x)), on_host(module(x)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5, 9])
def test_any_number_of_rows(rows, kind, request):
    devices = devices_of(kind, request)
    module = regression().double()
    x = torch.randn(rows, 5, dtype=torch.float64, requires_grad=True)
    y = ReplicaSet(module, devices)(x)
    assert y.shape == (rows, 3) and y.device == devices[0]
    torch.testing.assert_close(on_host(y), module(x).detach())
    expected = torch.autograd.grad(module(x).sin().sum(), [x, *module.parameters()])
    torch.testing.assert_close(torch.autograd.grad(y.sin().sum(), [x, *module.parameters()]), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_trees_in_and_out_shared_and_frozen_parameters(kind, request):
    devices = devices_of(kind, request)
    module = Tied().double()
    replicas = ReplicaSet(module, devices, output_device="cpu")
    ids, mask = torch.arange(10).view(5, 2), torch.rand(5, 2, dtype=torch.float64)
    expected, found = module(ids, times=3.0, mask=mask), replicas(ids, times=3.0, mask=mask)
    torch.testing.assert_close(found["logits"], expected["logits"])
    assert found["none"] is None and found["times"] == 3.0 and found["mean"].shape == (4,)  # one for each replica
    parameters = [p for p in module.parameters() if p.requires_grad]
    (gradient,) = torch.autograd.grad(found["logits"].square().sum(), parameters)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected["logits"].square().sum(), parameters)[0])
    assert replicas(ids, mask=Replicate(torch.ones(1, 2, dtype=torch.float64)))["logits"].shape == (5, 2, 11)


@pytest.mark.parametrize("kind", KINDS)
def test_second_derivatives(kind, request):
    devices = devices_of(kind, request)
    module = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    x = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)

    def penalty(forward: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        (slope,) = torch.autograd.grad(forward(x).sum(), x, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), list(module.parameters())[:3])

    torch.testing.assert_close(penalty(ReplicaSet(module, devices)), penalty(module))


def test_changes_of_the_module_are_noticed():
    """Values, modes, plain attributes, hooks and parts; and what sync() is for."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0), nn.Linear(4, 4)).double()
    replicas, x = ReplicaSet(module, ["cpu"] * 3), torch.randn(7, 4, dtype=torch.float64)

    def agree() -> None:
        torch.testing.assert_close(replicas(x), module(x))

    with torch.no_grad():
        agree()
        module[0].weight.mul_(2)
        agree()
        module[1].p = 1.0
        assert torch.equal(replicas(x), module[2].bias.expand(7, 4))  # all dropped
        replicas.eval()
        assert not module[0].training
        agree()
        module[0] = nn.Linear(4, 4).double()
        agree()
        module[2].weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.float64))
        agree()
        handle = module[2].register_forward_hook(lambda _module, _args, y: y + 10)
        assert replicas(x).min() > 5
        agree()
        handle.remove()
        agree()
        module.extra = [1]
        replicas.sync()
        agree()
        module.to(torch.float32)
        assert replicas(x.float()).dtype == torch.float32


def test_frozen_parameters_are_copied_only_when_they_change(pretend):
    module = nn.Sequential(nn.Linear(4, 4), nn.GELU()).requires_grad_(False)
    replicas, x = ReplicaSet(module, ["pretend:0", "pretend:1"]), torch.randn(6, 4)

    def copies() -> int:
        pretend.reset_counters()
        y = replicas(x)
        count = pretend.counters()["h2d"]
        torch.testing.assert_close(y.cpu(), module(x))
        return count

    assert copies() == 4  # the batch, and the parameters in one
    assert copies() == 2  # the batch, nothing else
    module[0].weight.add_(1)
    assert copies() == 4
    bank = torch.randn(2, 4, 4)
    for k in (0, 1):
        module[0].weight.data = bank[k]  # other memory, of one storage
        assert copies() == 4
    for _ in range(10):
        module[0].weight.data = torch.randn(4, 4)  # maybe at the place of the one before
        assert copies() == 4


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_after_a_fused_step_of_the_module_itself(kind, request):
    """Fused optimizers and batch norms write to tensors without saying so."""
    devices = devices_of(kind, request)
    module, x = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), torch.randn(8, 3)
    replicas = ReplicaSet(module, devices)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.5, fused=True)
    for _ in range(3):
        module.train()(x).square().sum().backward()
        optimizer.step()
        module.eval()
        with torch.no_grad():
            torch.testing.assert_close(replicas(x).cpu(), module(x))
        torch.testing.assert_close(next(replicas.map([x])).cpu(), module(x).detach())


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_checkpointed_parts_run_again_in_backward(kind, reentrant, request):
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = regression()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=reentrant)

    module = Checkpointed().double()
    x = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    replicas = ReplicaSet(module, devices_of(kind, request))
    (replicas(x).square().sum() + replicas(2 * x).sum()).backward()
    found = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    (module(x).square().sum() + module(2 * x).sum()).backward()
    torch.testing.assert_close(found, [p.grad for p in module.parameters()])


def test_replicas_at_home_use_the_parameters_themselves():
    module = nn.Linear(3, 2)
    seen: list[int] = []
    module.register_forward_pre_hook(lambda m, _args: seen.append(m.weight.data_ptr()))
    for mode in (torch.enable_grad, torch.no_grad):
        with mode():
            ReplicaSet(module, ["cpu", "cpu"])(torch.ones(4, 3))
    assert seen == [module.weight.data_ptr()] * 4


@pytest.mark.parametrize("kind", KINDS)
def test_running_statistics_are_the_mean_over_replicas_by_rows(kind, request):
    devices = devices_of(kind, request)
    module = nn.BatchNorm1d(3, momentum=0.5).double()
    x = torch.randn(7, 3, dtype=torch.float64)
    replicas = ReplicaSet(module, devices[:2])
    replicas(x)
    parts = x.split([4, 3])
    torch.testing.assert_close(module.running_mean, 0.5 * x.mean(0))  # that of the whole batch
    variance = (4 * parts[0].var(0) + 3 * parts[1].var(0)) / 7
    torch.testing.assert_close(module.running_var, 0.5 + 0.5 * variance)
    assert module.num_batches_tracked == 1
    replicas(x)
    assert module.num_batches_tracked == 2
    before = module.running_mean.clone()
    replicas.eval()(x)
    assert torch.equal(module.running_mean, before)


class Counting(nn.Module):
    """Buffers changed in every way: in place, replaced, unsaid by torch, and not at all beside those."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("total", torch.zeros(3))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("variance", torch.ones(3))
        self.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))
        self.register_buffer("cache", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(1)
        self.cache = torch.arange(3.0)  # of another shape: made by every call that needs it
        self.total = self.total + x.mean(0)
        return F.batch_norm(x, self.mean, self.variance, training=self.training, momentum=1.0) + self.mask.exp().sum()


def test_what_a_call_changes_in_buffers_is_written_back():
    module, x = Counting(), torch.randn(7, 3)
    mask = module.mask.clone()
    ReplicaSet(module, ["cpu"] * 2)(x)
    assert module.seen == 1 and torch.equal(module.mask, mask) and module.cache.shape == (0,)
    torch.testing.assert_close(module.total, x.mean(0))
    torch.testing.assert_close(module.mean, x.mean(0))
    ReplicaSet(module.eval(), ["cpu"] * 2)(x)
    assert module.seen == 2 and torch.equal(module.mask, mask)
    torch.testing.assert_close(module.mean, x.mean(0))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("training", [True, False])
def test_a_buffer_that_requires_a_gradient_gets_it(training, kind, request):
    devices = devices_of(kind, request)
    module = Tied().double().train(training)
    module.scale.requires_grad_()
    before, ids = module.scale.detach().clone(), torch.arange(10).view(5, 2)
    wanted = [module.scale, module.embed.weight]
    (expected, found) = (
        torch.autograd.grad(m(ids)["logits"].square().sum(), wanted) for m in (module, ReplicaSet(module, devices))
    )
    torch.testing.assert_close(found, expected)
    assert torch.equal(module.scale, before) and module.scale.is_leaf
    with torch.no_grad():
        assert not ReplicaSet(module, devices)(ids)["logits"].requires_grad


def test_hooks_of_others_see_every_replica_and_new_attributes_are_followed():
    class Recorder:
        def __init__(self) -> None:
            self.rows: list[int] = []

        def hook(self, _module: nn.Module, args: tuple[Tensor, ...], _y: Tensor) -> None:
            self.rows.append(len(args[0]))

    recorder, module, x = Recorder(), nn.Sequential(nn.Conv1d(2, 2, 3, padding=0), nn.BatchNorm1d(2)), torch.randn(5, 2, 6)
    module.register_forward_hook(recorder.hook)
    replicas = ReplicaSet(module.eval(), ["cpu"] * 2)
    assert replicas(x).shape == (5, 2, 4) and sorted(recorder.rows) == [2, 3]
    module[0].padding = (1,)
    assert replicas(x).shape == (5, 2, 6)
    module[0].forward = lambda x: x[..., :1]
    assert replicas(x).shape == (5, 2, 1)
    types: list[type] = []
    convert_sync_batchnorm(module)
    module[1].register_forward_pre_hook(lambda m, _args: types.append(type(m)))
    replicas(x)
    assert types == [SyncBatchNorm] * 2


def test_replicas_in_threads_do_not_mix_up():
    """One module shared by threads gives wrong results nearly every time: the race test below."""
    module = nn.Sequential(*[nn.Linear(16, 16) for _ in range(6)])
    replicas, x = ReplicaSet(module, ["cpu"] * 4), torch.randn(64, 16)
    with torch.no_grad():
        expected = module(x)
        for _ in range(20):
            torch.testing.assert_close(replicas(x), expected)
    wrong: list[Any] = []

    def work(scale: float) -> None:
        with torch.no_grad():
            for _ in range(5):
                if not torch.allclose(replicas(x * scale), module(x * scale), atol=1e-5):
                    wrong.append(scale)

    threads = [threading.Thread(target=work, args=(scale,)) for scale in (1.0, 2.0, 3.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_modes_of_the_caller():
    module, x = regression(), torch.randn(6, 5)
    replicas = ReplicaSet(module, ["cpu"] * 2)
    with torch.autocast("cpu", torch.bfloat16):
        assert replicas(x).dtype == torch.bfloat16
    with torch.inference_mode():
        assert replicas(x).is_inference()
    replicas(x).sum().backward()  # copies made in inference mode would not do
    with count_bytes():
        torch.testing.assert_close(replicas(x), module(x))
    torch.testing.assert_close(torch.func.vmap(lambda x: replicas(x))(x[None])[0], module(x))


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="fake CUDA tensors need a torch built with CUDA")
def test_placement_on_cuda_without_cuda():
    with FakeTensorMode():
        module = regression()
        replicas = ReplicaSet(module, [f"cuda:{k}" for k in range(3)], output_device="cuda:1")
        y = replicas(torch.empty(8, 5))
        assert str(y.device) == "cuda:1" and y.shape == (8, 3)
        assert {str(y.device) for y in replicas.map(torch.empty(8, 5).split(2))} == {"cuda:1"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_map_gives_results_in_order(kind, ahead, request):
    devices = devices_of(kind, request, number=3)
    module = regression().double()
    batches = [torch.full((1 + k % 4, 5), k / 10, dtype=torch.float64) for k in range(11)]
    results = list(ReplicaSet(module, devices, output_device="cpu").map(batches, ahead=ahead))
    assert len(results) == 11 and not any(y.requires_grad for y in results)
    for x, y in zip(batches, results, strict=True):
        torch.testing.assert_close(y, module(x).detach())
    assert list(ReplicaSet(module, devices).map([])) == []


def test_map_takes_batches_as_loaders_give_them():
    module = Tied()
    replicas, ids = ReplicaSet(module, ["cpu"] * 2), torch.arange(4).view(2, 2)
    for batch in (ids, (ids,), [ids], {"ids": ids, "times": 1.0}):
        (found,) = replicas.map([batch])
        torch.testing.assert_close(found["logits"], module(ids)["logits"].detach())
        assert found["mean"].ndim == 0  # of one replica: as the module gave it


def test_map_holds_few_batches_and_results_at_a_time():
    alive, most = 0, 0

    def batches() -> Iterator[Tensor]:
        nonlocal alive, most
        for k in range(40):
            alive += 1
            most = max(most, alive)
            yield torch.full((2, 5), float(k))

    for _ in ReplicaSet(regression(), ["cpu"] * 3).map(batches(), ahead=2):
        alive -= 1
    assert most == 9 and alive == 0


def test_map_ends_cleanly_when_left_early_and_allows_other_calls_meanwhile():
    replicas, x = ReplicaSet(regression(), ["cpu"] * 2), torch.ones(2, 5)
    before = threading.active_count()
    for k, y in enumerate(replicas.map([x] * 50)):
        torch.testing.assert_close(replicas(x).detach(), y)
        if k == 3:
            break
    del y
    assert threading.active_count() == before
    assert len(list(replicas.map([x] * 3))) == 3


def fail_at(x: Tensor, *, number: float) -> Tensor:
    if x[0, 0] == number:
        raise ValueError(f"refused {number}")
    return x


class FailsAt(nn.Module):
    def __init__(self, number: float) -> None:
        super().__init__()
        self.check = partial(fail_at, number=number)

    def forward(self, x: Tensor) -> Tensor:
        return self.check(x) * 2


def taken(results: Iterator[Tensor], into: list[float]) -> None:
    for y in results:
        into.append(y.item())


def test_an_error_in_map_comes_at_its_place_and_says_which():
    before_it: list[float] = []
    results = ReplicaSet(FailsAt(5.0), ["cpu"] * 3).map(torch.full((1, 1), float(k)) for k in range(20))
    with pytest.raises(ValueError, match="refused 5") as caught:
        taken(results, before_it)
    assert before_it == [0, 2, 4, 6, 8]
    assert "in batch 5 of ReplicaSet.map, in replica 2 on cpu" in caught.value.__notes__


def test_an_error_of_the_loader_comes_after_all_results():
    def broken() -> Iterator[Tensor]:
        yield from (torch.full((1, 1), float(k)) for k in range(4))
        raise OSError("disk")

    before_it: list[float] = []
    with pytest.raises(OSError, match="disk"):
        taken(ReplicaSet(FailsAt(99.0), ["cpu"] * 3).map(broken()), before_it)
    assert before_it == [0, 2, 4, 6]


def test_errors_of_replicas_and_of_arguments():
    with pytest.raises(ExceptionGroup, match="ReplicaSet: 1 of 2 replicas failed: replica 1 on cpu") as caught:
        ReplicaSet(FailsAt(2.0), ["cpu"] * 2)(torch.tensor([[1.0], [2.0]]))
    assert isinstance(caught.value.exceptions[0], ValueError)
    with pytest.raises(ValueError, match=r"ReplicaSet: devices=\[\]"):
        ReplicaSet(regression(), [])
    with pytest.raises(ValueError, match="output_device='gpu'"):
        ReplicaSet(regression(), ["cpu"], output_device="gpu")
    with pytest.raises(ValueError, match=r"ReplicaSet\.map: ahead=-1"):
        ReplicaSet(regression(), ["cpu"]).map([], ahead=-1)
    with pytest.raises(ValueError, match="without a shape"):
        ReplicaSet(nn.LazyLinear(2), ["cpu"] * 2)(torch.ones(2, 3))
    stubborn = regression()
    stubborn.lock = threading.Lock()
    with pytest.raises(TypeError, match="ReplicaSet: module: cannot copy this Sequential"):
        ReplicaSet(stubborn, ["cpu"] * 2)(torch.ones(2, 5))


def test_progress_bar(capsys):
    assert len(list(ReplicaSet(regression(), ["cpu"] * 2).map([torch.ones(1, 5)] * 4, progress="test set"))) == 4
    shown = capsys.readouterr().err
    assert "test set" in shown and "4/4" in shown


def test_drop_in_for_data_parallel():
    """state_dict, copies, parts by name, and a compiled module."""
    module, x = regression(), torch.randn(5, 5)
    replicas = ReplicaSet(module, ["cpu"] * 2)
    y = replicas(x)
    nn.DataParallel(regression()).load_state_dict(replicas.state_dict())
    torch.testing.assert_close(copy.deepcopy(replicas)(x), y)
    assert replicas.module is module and sum(p.numel() for p in replicas.parameters()) == sum(
        p.numel() for p in module.parameters()
    )
    compiled = ReplicaSet(torch.compile(module, backend="eager"), ["cpu"] * 2)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), F.linear(F.gelu(F.linear(x, *module[0].parameters())), *module[2].parameters()))


class Flagged(nn.Module):
    def forward(self, x: Tensor, flag: bool, *, scale: Tensor | None = None) -> Tensor:
        y = x if flag else -x
        return y if scale is None else y * scale


def test_one_row_and_a_flag_give_no_replica_without_input():
    """nn.DataParallel ran replicas that had got no tensor, only the flag."""
    replicas = ReplicaSet(Flagged(), ["cpu"] * 4)
    assert replicas(torch.ones(1), True).tolist() == [1]
    # arguments and keyword arguments are split alike
    assert replicas(torch.ones(3), False, scale=torch.arange(3.0)).tolist() == [0, -1, -2]


def test_threads_that_share_a_module_race_and_templates_do_not():
    """functional_call puts tensors into the one module: threads overwrite each other's. Every replica has its own."""
    module, x = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), torch.randn(5, 3)
    states = [{name: p.detach() * (k + 1) for name, p in module.named_parameters()} for k in range(4)]
    expected = [functional_call(module, state, (x,)) for state in states]
    templates = [ModuleTemplate(module) for _ in states]
    barrier = threading.Barrier(4, timeout=30)  # all have put theirs in before any goes on

    def call(module: nn.Module) -> Tensor:
        barrier.wait()
        return module(x)

    def fill(template: ModuleTemplate, state: dict[str, Tensor]) -> Tensor:
        return template.call({id(p): state[name] for name, p in module.named_parameters()}, call)

    found = parallel_apply([partial(fill, t) for t in templates], states, ["cpu"] * 4)
    torch.testing.assert_close(found, expected)
    shared = copy.deepcopy(module)

    def wait(*_: object) -> None:
        barrier.wait()

    shared.register_forward_pre_hook(wait)
    shared.register_forward_hook(wait)
    found = parallel_apply([partial(functional_call, shared)] * 4, [(state, (x,)) for state in states], ["cpu"] * 4)
    assert sum(map(torch.allclose, found, expected)) <= 1  # what was put in last served all

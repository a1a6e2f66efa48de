"""check: what it says about steps that it cannot check, and about causes that no public bug shows."""

import os
import re
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from tests.collectives.law.bugs import BUGS, Piece, WithoutDDP, average_gradients
from tests.collectives.law.clean import CLEAN
from unisono.collectives import all_gather
from unisono.collectives.law import CheckError, LawBroken, check, diagnoses
from unisono.collectives.law.record import read_result
from unisono.collectives.law.splits import count_rows, split_sizes, take_rows

BATCH = Piece.batch
TWO = {"world_sizes": (1, 2), "splits": ("even",)}
calls = []


def count_calls(model, batch):
    calls.append(0)
    return F.mse_loss(model(batch["x"]), batch["y"]) * len(calls)


def raise_always(model, batch):
    raise KeyError("no such key")


def return_nothing(model, batch):
    model(batch["x"]).mean().backward()


def return_rows(model, batch):
    return model(batch["x"])


def use_cuda(model, batch):
    return model(batch["x"].to("cuda:99")).mean()


def init_again():
    dist.init_process_group("gloo", init_method="tcp://localhost:1")


def build_nothing():
    return {"lr": 0.1}


@pytest.mark.parametrize(
    ("build", "step", "text"),
    [
        (
            Piece.build,
            count_calls,
            "not deterministic by itself: two runs in one process, after the same seeds, differ in their loss",
        ),
        (Piece.build, raise_always, r"raises on rank 0: KeyError: 'no such key' \(test_check.py:\d+ in raise_always\)"),
        (Piece.build, return_nothing, "must return its loss .* it returned NoneType"),
        (Piece.build, return_rows, r"it returned a tensor of shape \(12, 1\)"),
        (Piece.build, use_cuda, "the step needs a GPU, and the check runs on CPUs"),
        (init_again, Piece.step, "The ranks are in a group already"),
        (build_nothing, Piece.step, r"build\(\) must return a Module, or \(model, optimizer\); it returned dict"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_step_that_cannot_be_checked_gets_a_sentence(build, step, text):
    with pytest.raises(CheckError, match=text) as caught:
        check(build, step, BATCH, **TWO)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        ({"x": torch.zeros(4, 6), "y": torch.zeros(3)}, r"cannot be split: .* \{\"\['x'\]\": 4, \"\['y'\]\": 3\}"),
        ({"lr": 0.1}, "batch has no tensor with rows"),
    ],
)
def test_batch_that_cannot_be_split_is_rejected(batch, text):
    with pytest.raises(ValueError, match=text):
        check(Piece.build, Piece.step, batch)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"world_sizes": (1,)}, "one of them above 1"),
        ({"world_sizes": (2,), "splits": [(5, 5)]}, r"\(5, 5\) does not divide the 12 rows"),
        ({"splits": ("evn",)}, "'evn' must be one of"),
        ({"steps": 0}, "steps=0 must be at least 1"),
        ({"tolerance": -1.0}, "tolerance=-1.0 must be above 0"),
        ({"dtype": "float16"}, "dtype='float16' must be"),
        ({"dropout": False}, "dropout=False must be"),
        ({"step": None, "resume": True}, "a Trainer saves and loads its own checkpoints"),
    ],
)
def test_bad_options_are_rejected(options, text):
    with pytest.raises(ValueError, match=text):
        check(**({"build": Piece.build, "step": Piece.step, "batch": BATCH} | options))


def test_function_that_ranks_cannot_import_is_rejected_without_cloudpickle(monkeypatch):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(TypeError, match="Define the functions at the top level of a module"):
        check(lambda: None, Piece.step, BATCH)


def test_function_of_a_notebook_is_sent_by_cloudpickle():
    pytest.importorskip("cloudpickle")
    scale = 2.0
    assert check(Piece.build, lambda model, batch: scale * Piece.step(model, batch), BATCH, **TWO).ok


# Causes that need no museum


def raise_on_last_rank(model, batch):
    if dist.get_rank() == 1:
        raise RuntimeError("out of luck")
    return Piece.step(model, batch)


def exit_on_last_rank(model, batch):
    if dist.get_rank() == 1:
        os._exit(3)
    return Piece.step(model, batch)


def sys_exit_on_ranks(model, batch):
    if dist.get_world_size() > 1:
        sys.exit("enough")
    return Piece.step(model, batch)


def sleep_on_ranks(model, batch):
    if dist.get_world_size() > 1:
        time.sleep(60)
    return Piece.step(model, batch)


def need_rows(model, batch):
    return (model(batch["x"]) - batch["y"]).amax()


def seed_by_world_size():
    torch.manual_seed(dist.get_world_size())
    return WithoutDDP.build()


def no_valid_rows(model, batch):
    valid = batch["y"].squeeze(1) > 0.4  # on two ranks, the second has none
    return (model(batch["x"]).squeeze(1).square() * valid).sum() / valid.sum()


def add_noise_of_rank(model, batch):
    loss = Piece.step(model, batch)
    loss.backward()
    for p in model.parameters():
        p.grad += 0.1 * dist.get_rank()
    return loss.detach()


def divide_by_rows_of_rank(model, batch):
    return Piece.step(model, batch) / len(batch["x"]) ** 0.5


def square_gradients(model, batch):
    loss = Piece.step(model, batch)
    loss.backward()
    average_gradients(model)
    for p in model.parameters():
        p.grad = p.grad.sin() if dist.get_world_size() > 1 else p.grad
    return loss.detach()


SORTED = {"x": BATCH["x"], "y": BATCH["y"].sort(0, descending=True).values}


NAMED_CAUSES = [
    ("raises", Piece.build, raise_on_last_rank, {}),
    ("exits", Piece.build, exit_on_last_rank, {}),
    ("exits", Piece.build, sys_exit_on_ranks, {}),
    ("hangs", Piece.build, sleep_on_ranks, {"timeout": 3.0}),
    ("raises_without_rows", Piece.build, need_rows, {"splits": ("empty",)}),
    ("start_depends_on_world_size", seed_by_world_size, Piece.step, {}),
    ("mean_of_nothing", Piece.build, no_valid_rows, {}),
    ("disagreeing_ranks", Piece.build, add_noise_of_rank, {}),
    ("constant_factor", Piece.build, divide_by_rows_of_rank, {}),
    ("unexplained", WithoutDDP.build, square_gradients, {}),
]


@pytest.mark.parametrize(("cause", "build", "step", "options"), NAMED_CAUSES)
def test_cause_is_named(cause, build, step, options):
    report = check(build, step, SORTED, **(TWO | options))
    assert report.causes == [cause], str(report)


def test_every_cause_is_tested():
    named = {bug.cause for bug in BUGS.values()} | {case[0] for case in NAMED_CAUSES} | {"needs_gpu"}
    source = "".join(file.read_text() for file in Path(diagnoses.__file__).parent.glob("*.py"))
    assert set(re.findall(r'Finding\(\s*"(\w+)"', source)) == named


# The engine


def test_splits_cover_the_batch():
    for world_size in range(1, 6):
        for split in ("even", "uneven", "empty"):
            assert sum(split_sizes(split, 13, world_size)) == 13
    assert split_sizes("uneven", 12, 3) == (2, 4, 6)
    batch = {"x": torch.arange(6), "names": "same", "scale": torch.tensor(2.0)}
    assert count_rows(batch) == 6
    assert take_rows(batch, 2, 4)["x"].tolist() == [2, 3]
    assert take_rows(batch, 2, 4)["scale"] == 2.0


def test_loss_is_read_from_all_usual_results():
    class Output(dict):
        pass

    assert read_result(torch.tensor(2.0)) == (torch.tensor(2.0), {})
    assert read_result((2.0, {"accuracy": torch.tensor(0.5)})) == (2.0, {"accuracy": 0.5})
    assert read_result(Output(loss=3.0, logits=torch.zeros(2), n=1)) == (3.0, {"n": 1.0})


class Part(nn.Module):
    """Tensor parallelism: each rank has a part of the weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0, 1, 12).chunk(dist.get_world_size())[dist.get_rank()].clone())


def build_part():
    return Part()


def use_part(model, batch):
    return all_gather(model.weight, grad="slice").square().sum()


def test_parameter_whose_shape_depends_on_the_ranks_is_named():
    report = check(build_part, use_part, BATCH, **TWO)
    assert report.ok
    assert report.not_compared == ["weight"]
    assert "Not compared, because the shape depends on the number of ranks: weight" in str(report)


def test_tolerance_and_given_sizes_are_used():
    bug = BUGS["LocalMean"]
    assert not check(bug.build, bug.step, bug.batch, world_sizes=(1, 2), splits=[(5, 7)]).ok
    assert check(bug.build, bug.step, bug.batch, world_sizes=(1, 2), splits=[(5, 7)], tolerance=100.0).ok
    assert [str(result.case) for result in check(bug.build, bug.step, bug.batch, world_sizes=(2,), splits=[(6, 6)]).cases] == [
        "2 ranks, given 6+6"
    ]


def test_resume_goes_through_all_numbers_of_ranks():
    clean = CLEAN["OwnSync"]
    options = {"world_sizes": (1, 2, 3), "splits": ("uneven",), "resume": True}
    report = check(clean.build, clean.step, clean.batch, **options)
    assert [str(result.case) for result in report.cases if result.case.resumed_from] == [
        "1 rank, whole batch 12, resumed from 1",
        "2 ranks, uneven 4+8, resumed from 1",
        "3 ranks, uneven 2+4+6, resumed from 2",
        "1 rank, whole batch 12, resumed from 3",
    ]
    with pytest.raises(CheckError, match="resume needs at least two steps"):
        check(clean.build, clean.step, clean.batch, steps=1, **options)


def test_float32_finds_bugs_too():
    for name in ("LocalMean", "OwnSliceGradient", "BatchNorm", "ClippedBeforeSync"):
        bug = BUGS[name]
        report = check(bug.build, bug.step, bug.batch, dtype="float32", **bug.options)
        assert report.causes == [bug.cause], str(report)
        assert report.dtype == "float32"


def test_report_is_readable_and_raises():
    bug = BUGS["LocalMean"]
    report = check(bug.build, bug.step, bug.batch, **bug.options)
    with pytest.raises(LawBroken, match="2 ranks, uneven 4\\+8"):
        report.raise_if_broken()
    assert "\033[31m" in report.text(colour=True) and "\033" not in report.text()
    page = report.to_html()
    assert page.startswith("<!doctype html>") and "global_mean" in page and "2 ranks, uneven 4+8" in page


def test_law_fixture_passes_and_fails(law):
    clean, bug = CLEAN["GlobalMean"], BUGS["MissingSync"]
    assert law.check(clean.build, clean.step, clean.batch, **TWO).ok
    with pytest.raises(LawBroken, match="missing_sync"):
        law.check(bug.build, bug.step, bug.batch, **TWO)


def test_progress_is_told():
    told = []
    check(Piece.build, Piece.step, BATCH, progress=lambda *seen: told.append(seen), **TWO)
    assert told == [(0, 1, "one process"), (0, 1, "2 ranks, even 6+6"), (1, 1, "done")]

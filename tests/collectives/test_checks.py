"""A bad call raises the same clear error on every rank; no rank aborts or waits."""

import os
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from unisono.collectives import (
    MismatchError,
    Ring,
    all_gather,
    all_reduce,
    all_to_all,
    all_to_all_single,
    average_gradient,
    broadcast,
    checked,
    exchange_sizes,
    gather,
    global_mean,
    reduce,
    reduce_scatter,
    scatter,
    shift,
)
from unisono.collectives.checks import Validation, _environment_mode, user_frame
from unisono.collectives.groups import resolve_group
from unisono.collectives.testing import run_ranks

# For each mismatch, what two ranks call, and parts of the error. These raise also without checked().
UNCHECKED: dict[str, tuple[Callable[[int], object], list[str]]] = {
    "trailing dimension": (
        lambda r: all_gather(torch.zeros(4, 8 + r)),
        [
            "rank 0: all_gather(float32[4, 8], dim=0, grad='sum') at test_checks.py:",
            "rank 1: all_gather(float32[4, 9], dim=0, grad='sum') at test_checks.py:",
            "every dimension but 0",
        ],
    ),
    "transposed": (lambda r: all_gather(torch.zeros(4 + 5 * r, 9 - 5 * r)), ["float32[4, 9]", "float32[9, 4]"]),
    "dtype": (lambda r: all_gather(torch.zeros(4, dtype=[torch.float32, torch.int32][r])), ["float32[4]", "int32[4]"]),
    "itemsize": (lambda r: gather(torch.zeros(4, dtype=[torch.float32, torch.float64][r])), ["float32[4]", "float64[4]"]),
    "ndim": (lambda r: all_gather(torch.zeros((2, 3, 1)[: 3 - r])), ["float32[2, 3, 1]", "float32[2, 3]"]),
    "dim": (lambda r: all_gather(torch.zeros(2, 2), dim=r), ["dim=0", "dim=1"]),
    "root": (lambda r: gather(torch.zeros(2), root=r), ["root=0", "root=1"]),
    "offset": (lambda r: shift(torch.zeros(2), r), ["offset=0", "offset=1"]),
    "grad": (lambda r: all_gather(torch.zeros(2), grad=["sum", "slice"][r]), ["grad='sum'", "grad='slice'"]),
    "function": (lambda r: (all_gather if r else shift)(torch.zeros(2)), ["shift(float32[2]", "all_gather(float32[2]"]),
    "dim out of range on one rank": (
        lambda r: all_gather(torch.zeros(2, 3), dim=5 * r),
        ["a bad call on rank 1", "rank 1: dim=5 is out of range for x of shape (2, 3)"],
    ),
    "not a tensor on one rank": (lambda r: gather([1] if r else torch.zeros(2)), ["rank 1: x: expected a Tensor, got list"]),
    "not even a tree on one rank": (
        lambda r: all_gather(3.5 if r else torch.zeros(2)),
        ["rank 1: x: expected a Tensor or a tree of tensors, got float without any tensor"],
    ),
    "reduce_scatter shapes": (lambda r: reduce_scatter(torch.zeros(4 + r)), ["float32[4]", "float32[5]"]),
    "reduce_scatter ops": (lambda r: reduce_scatter(torch.zeros(4), op=["sum", "max"][r]), ["the ranks disagree"]),
    "scatter without x": (lambda r: scatter(None), ["rank 0: x: expected a Tensor of at least one dimension on root=0"]),
    "scatter with a list": (lambda r: scatter([1] if r else torch.zeros(2)), ["rank 1: x: expected a Tensor, got list"]),
    "Ring of lengths that differ on one rank": (
        lambda r: Ring([torch.zeros(2), torch.zeros(2 + r)]),
        ["rank 1: tensors must have the same first dimension, got float32[2], float32[3]"],
    ),
    "Ring of nothing on one rank": (
        lambda r: Ring([torch.zeros(2)] * (1 - r)),
        ["rank 1: tensors: expected at least one tensor, got an empty sequence"],
    ),
    "Ring of a tensor instead of a list on one rank": (
        lambda r: Ring(torch.zeros(2) if r else [torch.zeros(2)]),
        ["rank 1: tensors: expected a list of tensors, got one tensor: pass [x]"],
    ),
    "Ring counts": (lambda r: Ring([torch.zeros(2)] * (1 + r)), ["tensors=1", "tensors=2"]),
    "float8 that needs a gradient on one rank": (
        lambda r: all_gather(torch.zeros(2, requires_grad=bool(r)).to(torch.float8_e5m2)),
        ["rank 1: x: the ranks cannot add gradients in torch.float8_e5m2", "x.detach()"],
    ),
    "float8 that needs a gradient in a tree": (
        lambda r: all_gather({"x": torch.zeros(2, requires_grad=bool(r)).to(torch.float8_e5m2)}),
        ["rank 1: x: the ranks cannot add gradients in torch.float8_e5m2"],
    ),
    "scatter sizes of floats": (
        lambda r: scatter(None if r else torch.zeros(4), sizes=torch.tensor([1.5, 2.5])),
        ["rank 0: sizes=(1.5, 2.5) must be integers"],
    ),
    "scatter sizes": (
        lambda r: scatter(None if r else torch.zeros(4), sizes=None if r else [1, 2]),
        ["rank 0: sizes=(1, 2) do not add up", "(4,)"],
    ),
    "send sizes": (
        lambda r: all_to_all_single(torch.zeros(4), send_sizes=[2, 2 + r]),
        ["rank 1: send_sizes=(2, 3) do not add up"],
    ),
    "all_to_all length": (lambda r: all_to_all([torch.zeros(2)] * (1 + r)), ["rank 0: xs: expected 2 tensors"]),
    "all_to_all dtype": (lambda r: all_to_all([torch.zeros(2, dtype=[torch.int32, torch.int64][r])] * 2), ["int32", "int64"]),
    "exchange_sizes": (lambda r: exchange_sizes(torch.zeros(1, 1 + r)), ["float32[1, 1]", "float32[1, 2]"]),
}


def caught_message(name: str, cases: str) -> str:
    call = {"UNCHECKED": UNCHECKED, "CHECKED": CHECKED}[cases][name][0]
    with pytest.raises(MismatchError) as caught:
        call(dist.get_rank())
    assert all_gather(torch.ones(1)).shape == (dist.get_world_size(),)  # the ranks are still in step
    return str(caught.value)


@pytest.mark.parametrize("name", UNCHECKED)
def test_mismatch_is_the_same_error_on_all_ranks(name):
    messages = run_ranks(caught_message, name, "UNCHECKED", world_size=2)
    assert messages[0] == messages[1]
    assert [part for part in UNCHECKED[name][1] if part not in messages[0]] == [], messages[0]


def dtensors_are_refused() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x = DTensor.from_local(torch.ones(2, 2), mesh)
    calls = [all_gather, all_reduce, gather, scatter, broadcast, reduce, reduce_scatter, all_to_all_single, shift, global_mean]
    calls += [
        average_gradient,
        exchange_sizes,
        lambda x: all_gather({"x": x}),
        lambda x: all_to_all([x, x]),
        lambda x: Ring([x]),
    ]
    for call in calls:
        with pytest.raises((TypeError, ValueError), match=r"x is a DTensor: pass x\.to_local\(\).*x\.full_tensor\(\)"):
            call(x)


def test_dtensors_are_refused_by_name():
    run_ranks(dtensors_are_refused, world_size=2)


@pytest.mark.parametrize("sizes", [torch.tensor([2.0]), [2.0], [True], ["2"]])
def test_sizes_that_are_no_integers_are_refused(sizes):
    for call in (all_gather, gather, shift, reduce_scatter, lambda x, sizes: Ring([x], sizes=sizes)):
        with pytest.raises(ValueError, match=r"sizes=\(.*\) must be integers"):
            call(torch.ones(2), sizes=sizes)
    with pytest.raises(ValueError, match=r"all_to_all_single: receive_sizes=\(.*\) must be integers"):
        all_to_all_single(torch.ones(2), send_sizes=[2], receive_sizes=sizes)


def test_ops_that_are_not_reductions_are_refused():
    with pytest.raises(TypeError, match="reduce: op=1 is not a reduction; the rank that gets the result is root=1"):
        reduce(torch.ones(1), 1)
    with pytest.raises(ValueError, match=r"all_reduce: op='RedOpType.BAND' is not one of 'sum', 'avg'"):
        all_reduce(torch.ones(1), dist.ReduceOp.BAND)


def two_calls(rank: int, *, swapped: bool = False, skipped: bool = False) -> None:
    x = torch.ones(2)
    steps = [
        lambda: all_reduce(x),
        lambda: all_reduce(x * 2),
    ]
    if swapped and rank == 1:
        steps.reverse()
    for step in steps[1:] if skipped and rank == 1 else steps:
        step()
    if skipped:
        broadcast(x)


def in_checked(call: Callable[[int], object]) -> Callable[[int], object]:
    def run(rank: int) -> None:
        with checked():
            call(rank)

    return run


def mismatched_backward(rank: int) -> None:
    y, z = all_reduce(torch.ones(2, requires_grad=True)), all_gather(torch.ones(2, requires_grad=True), sizes=[2, 2])
    (y if rank else z).sum().backward()


# Mismatches that are silent, abort or hang without checked(): nothing is exchanged then that could reveal them.
CHECKED: dict[str, tuple[Callable[[int], object], list[str]]] = {
    "SUM and MAX": (in_checked(lambda r: all_reduce(torch.ones(2), ["sum", "max"][r])), ["op='sum'", "op='max'"]),
    "all_reduce f32 and i32": (
        in_checked(lambda r: all_reduce(torch.ones(2, dtype=[torch.float32, torch.int32][r]))),
        ["int32[2]"],
    ),
    "all_reduce shapes": (in_checked(lambda r: all_reduce(torch.ones(2 + r))), ["float32[2]", "float32[3]"]),
    "swapped calls": (in_checked(lambda r: two_calls(r, swapped=True)), ["test_checks.py:"]),
    "skipped call": (in_checked(lambda r: two_calls(r, skipped=True)), ["test_checks.py:"]),
    "roots": (in_checked(lambda r: broadcast(torch.ones(2), root=r)), ["broadcast(root=0)", "broadcast(root=1)"]),
    "wrong splits": (
        in_checked(lambda r: all_to_all_single(torch.ones(4), send_sizes=[2, 2], receive_sizes=[2 + r, 2])),
        ["rank 0 sends 2 rows to rank 1, which expects 3"],
    ),
    "receiver expects less": (
        in_checked(lambda r: all_to_all_single(torch.ones(4), send_sizes=[2, 2], receive_sizes=[2 - r, 2])),
        ["rank 0 sends 2 rows to rank 1, which expects 1"],
    ),
    "sizes that differ": (
        in_checked(lambda r: all_gather(torch.ones(2), sizes=[2, 3] if r == 0 else [2, 2])),
        ["sizes=(2, 2)", "sizes=(2, 3)"],
    ),
    "wrong own size": (in_checked(lambda r: all_gather(torch.ones(2 + r), sizes=[2, 2])), ["rank 1: sizes=(2, 2) promises 2"]),
    "different backwards": (in_checked(mismatched_backward), ["backward of all_gather", "backward of all_reduce"]),
}


@pytest.mark.parametrize("name", CHECKED)
def test_checked_turns_silent_mismatches_into_errors(name):
    messages = run_ranks(caught_message, name, "CHECKED", world_size=2)
    assert messages[0] == messages[1]
    assert [part for part in CHECKED[name][1] if part not in messages[0]] == [], messages[0]


def different_lines_on_purpose() -> None:
    x = torch.ones(4)
    with checked(call_sites=False):
        if dist.get_rank() == 0:  # noqa: SIM108
            parts = [scatter(x)]
        else:
            parts = [scatter(None)]
        assert parts[0].shape == (2,)


def test_call_sites_can_be_left_out():
    run_ranks(different_lines_on_purpose, world_size=2)


def everything_under_check(mode: str) -> None:
    os.environ["UNISONO_CHECK"] = mode
    _environment_mode.cache_clear()
    try:
        x = torch.randn(2 + dist.get_rank(), 3, requires_grad=True)
        loss = all_gather(x).sum() + shift(x).sum() + all_reduce(x.sum()) + global_mean(x) + all_gather({"x": x})["x"].sum()
        loss = loss + all_gather(x, sizes=[2, 3, 4]).sum() + all_gather(x, grad="slice").sum() + all_reduce(x.sum(), "max")
        loss.backward()
        with pytest.raises(MismatchError, match="sum"):
            all_reduce(x.sum(), ["sum", "avg", "sum"][dist.get_rank()])
    finally:
        del os.environ["UNISONO_CHECK"]
        _environment_mode.cache_clear()


@pytest.mark.parametrize("mode", ["1", "calls"])
def test_right_programs_pass_under_check(mode):
    run_ranks(everything_under_check, mode, world_size=3)


def given_sizes_are_checked_locally() -> str:
    with pytest.raises(ValueError, match="promises") as caught:
        all_gather(torch.ones(3), sizes=[2, 2])
    return str(caught.value)


def test_wrong_sizes_name_the_rank_and_the_way_out():
    messages = run_ranks(given_sizes_are_checked_locally, world_size=2)
    assert "rank 1 of 2" in messages[1] and "UNISONO_CHECK=1" in messages[1]


def many_numbers() -> None:
    """More leaves, sizes and dimensions than fit into the header."""
    rank = dist.get_rank()
    tree = [torch.full((rank + k % 3, 1), k) for k in range(40)]
    for k, y in enumerate(all_gather(tree)):
        assert y.shape == (1 + 2 * (k % 3), 1) and (y == k).all()
    deep = torch.ones((2 + rank, *(1,) * 30))
    assert all_gather(deep).shape == (5, *(1,) * 30)
    assert scatter(torch.ones((4, *(1,) * 30)) if rank == 0 else None).shape == (2, *(1,) * 30)
    assert all_to_all([torch.ones((1,) * (20 + rank))] * 2)[1 - rank].ndim == 21 - rank


def test_agreement_on_more_numbers_than_the_header_holds():
    run_ranks(many_numbers, world_size=2)


def validates_beside_other_calls():
    """Three are on their way at once, with other calls between; they are asked in another order than they were made."""
    rank = dist.get_rank()

    def start(same, numbers=(), problem=""):
        words = f"call of rank {rank}"
        return Validation(
            "f",
            resolve_group(None),
            same=same,
            numbers=numbers,
            words=lambda: words,
            device=None,
            rule="Rule.",
            problem=problem,
        )

    good = start("same", [*range(rank, rank + 30)])
    differs = start(f"other {rank}")
    assert all_reduce(torch.ones(3)).tolist() == [2.0] * 3
    bad = start("same", problem="" if rank else "a problem")
    assert all_gather(torch.full((1,), float(rank))).tolist() == [0.0, 1.0]
    assert [x.agrees() for x in (bad, differs, good, good)] == [False, False, True, True]
    with pytest.raises(MismatchError, match=r"(?s)f: the ranks disagree.*rank 0: call of rank 0.*rank 1: call of rank 1.*Rule"):
        differs.result()
    with pytest.raises(MismatchError, match=r"(?s)f: a bad call on rank 0.*a problem.*rank 1: call of rank 1"):
        bad.result()
    assert good.result() == [[*range(0, 30)], [*range(1, 31)]]


def test_validation_runs_beside_other_calls():
    run_ranks(validates_beside_other_calls, world_size=2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: all_gather(x, grad="mean"), "all_gather: grad='mean' is not one of 'sum', 'slice'"),
        (lambda x: all_reduce(x, "mean"), "all_reduce: op='mean' is not one of"),
        (lambda x: all_reduce(x, "max", grad="identity"), "grad='identity' goes with op='sum'"),
        (lambda x: gather(x, root=3), "gather: root=3 is not a rank of this group"),
        (lambda x: global_mean(x, grad_reduce="avg"), "global_mean: grad_reduce='avg'"),
        (lambda x: global_mean(x, weights=torch.ones(7)), r"weights of shape \(7,\)"),
        (lambda x: all_gather(x, sizes=[1, 2]), r"sizes=\(1, 2\) must have one length for each of 1 rank"),
        (lambda x: reduce_scatter(torch.tensor(1.0)), "a scalar cannot be split"),
    ],
)
def test_bad_arguments_name_function_argument_and_value(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.ones(2, 3))


@pytest.mark.parametrize(
    ("module", "name"),
    [("unisono.package_of_tomorrow.layer", "caller"), ("torch.nn.module", "caller"), ("unisono_models.clip.train", "call")],
)
def test_user_frame_skips_torch_and_every_package_of_our_namespace(module, name):
    """A list of our packages was hard-coded, so errors would have named a line inside any new one."""
    space = {"__name__": module, "user_frame": user_frame}
    exec("def call():\n    return user_frame()", space)  # what is defined here belongs to `module`

    def caller() -> str:
        return space["call"]()

    assert caller().endswith(f" in {name}")


def outsider() -> None:
    group = dist.new_group([0])
    if dist.get_rank() == 1:
        with pytest.raises(ValueError, match="this rank is not in the group"):
            all_reduce(torch.ones(1), group=group)


def test_group_without_this_rank_raises():
    run_ranks(outsider, world_size=2)


def absent_rank() -> str:
    group = dist.new_group(timeout=timedelta(seconds=2))
    if dist.get_rank() == 0:
        return ""
    with pytest.raises(RuntimeError, match=r"[Tt]imed? ?out") as caught:
        all_gather(torch.ones(2), sizes=[2, 2], group=group)
    return str(caught.value)


def test_absent_rank_is_an_error_at_the_groups_timeout():
    run_ranks(absent_rank, world_size=2, timeout=20)


def mismatched_all_gather_raises_on_every_rank() -> None:
    """The all_gather of x-clip hung, aborted or gave garbage for ranks of different shapes or dtypes."""
    rank = dist.get_rank()
    for x in (
        torch.zeros(2, 3 + (rank == 1)),
        torch.zeros((2, 3, 1) if rank else (2, 3)),
        torch.zeros(2, dtype=torch.float32 if rank else torch.int32),
        torch.zeros(2, dtype=torch.float32 if rank else torch.float64),
    ):
        with pytest.raises(MismatchError):
            all_gather(x)


def test_mismatched_all_gather_raises_on_every_rank():
    run_ranks(mismatched_all_gather_raises_on_every_rank, world_size=3)

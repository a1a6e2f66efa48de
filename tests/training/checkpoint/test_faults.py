"""Every fault that torch.distributed.checkpoint alone lets through: a clear error, or the newest good checkpoint."""

import errno
import hashlib
import json
import math
import os
import pickle
import shutil
import signal
import subprocess
import time
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.training.checkpoint.test_manager import assert_equal, everything
from unisono_models.training.checkpoint import atomic_file, manager, manifest, storage
from unisono_models.training.checkpoint.manager import Checkpoints


def model_of(value, **options):
    model = nn.Sequential(nn.Linear(4, 3, **options), nn.Linear(3, 2, **options))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def saved(folder, *steps, **options):
    """Checkpoints whose parameters all equal the step."""
    with Checkpoints(folder, keep=9, **options) as checkpoints:
        for step in steps:
            number = 0 if math.isnan(step) else step
            checkpoints.save(number, model_of(float(step)), {}, {"step": number})
        checkpoints.wait()
        return checkpoints.failures


def loaded(folder):
    """The step that loads, checked to be whole, and what was reported."""
    model, said = model_of(-1.0), []
    with Checkpoints(folder, report=said.append) as checkpoints:
        found = checkpoints.load(model, {}, state_type=dict)
    step = None if found is None else found[0]
    assert found is None or found[1] == {"step": step}
    assert all((parameter == (-1 if step is None else step)).all() for parameter in model.parameters())
    return step, said


def step_of(folder, step):
    return folder / f"step-{step:08}"


# ---- killed in the midst


def run_to_its_death(function, *args):
    """In a process of its own, forked from this one because it has torch loaded already."""
    child = os.fork()
    if child == 0:
        try:
            function(*args)
        finally:
            os._exit(1)
    deadline = time.monotonic() + 60
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGTERM)
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(ended[1]) == -signal.SIGKILL


def save_and_die(folder, step, place):
    saved(folder, 1, 2)

    def die(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGKILL)

    if place == "data":
        whole, tensors = storage._bytes_of, iter(range(2))
        storage._bytes_of = lambda tensor: die() if next(tensors) else whole(tensor)
    elif place == "before commit":
        manifest.write_manifest = die
    elif place == "within commit":
        type(folder).rename = die
    elif place == "pruning":
        manifest.shutil.rmtree = die
    saved(folder, step)


@pytest.mark.parametrize(
    ("place", "step", "expected"),
    [
        ("data", 3, 2),
        ("before commit", 3, 2),
        ("within commit", 3, 2),
        ("data", 2, 2),  # while it is saved once more
        ("before commit", 2, 2),
        ("pruning", 2, 2),
    ],
)
def test_killed_while_saving(tmp_path, place, step, expected):
    run_to_its_death(save_and_die, tmp_path, step, place)
    found, said = loaded(tmp_path)
    assert found == expected
    assert all("unfinished" in line for line in said)
    assert len(said) == (place != "pruning")

    saved(tmp_path, 4)  # tidies up
    kept = "step-00000002.old" if step == 2 and place != "pruning" else "step-00000002"
    assert [path.name for path in manifest.list_steps(tmp_path)] == ["step-00000004", kept, "step-00000001"]
    assert loaded(tmp_path) == (4, [])


# ---- damage


def test_shards_of_two_steps_are_found(ranks, tmp_path):
    ranks(saved, tmp_path, 1, 2, world_size=2)
    assert len(list(step_of(tmp_path, 1).glob("*.bin"))) == 2
    shutil.copy(step_of(tmp_path, 1) / "rank-00001.bin", step_of(tmp_path, 2) / "rank-00001.bin")
    (first, said), (second, silent) = ranks(loaded, tmp_path, world_size=2)
    assert first == second == 1 and silent == []
    digests = [hashlib.sha256((step_of(tmp_path, 1) / "rank-00001.bin").read_bytes()).hexdigest()]
    digests += [manifest.read_manifest(step_of(tmp_path, 2)).files["rank-00001.bin"][1]]
    assert len(said) == 1 and f"rank-00001.bin: sha256 {digests[1]} expected, {digests[0]} found" in said[0]


FILES = ["rank-00000.bin", "tensors.json", "state.json", "COMMIT"]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", ["bit", "cut", "longer", "gone", "link", "pipe"])
def test_damage_is_found(tmp_path, file, damage):
    saved(tmp_path, 1, 2)
    path = step_of(tmp_path, 2) / file
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= damage == "bit"
    path.unlink()
    if damage == "link":
        (tmp_path / "elsewhere").write_bytes(data)
        path.symlink_to(tmp_path / "elsewhere")
    elif damage == "pipe":
        os.mkfifo(path)
    elif damage != "gone":
        path.write_bytes(data[:-3] if damage == "cut" else data + b" " if damage == "longer" else data)
    step, said = loaded(tmp_path)
    if (file, damage) == ("COMMIT", "longer"):  # white space after JSON
        assert (step, said) == (2, [])
    else:
        assert step == 1 and len(said) == 1
        assert "step-00000002 skipped" in said[0] and file in said[0]


def test_none_is_good(ranks, tmp_path):
    ranks(saved, tmp_path, 1, 2, world_size=2)
    for step in (1, 2):
        (step_of(tmp_path, step) / "rank-00001.bin").write_bytes(b"")
    for step, said in ranks(loaded, tmp_path, world_size=2)[:1]:
        assert step is None and len(said) == 2 and all("size" in line for line in said)


def test_a_damaged_step_does_not_count_as_kept(tmp_path):
    saved(tmp_path, 1, 2, 30)
    (step_of(tmp_path, 30) / "rank-00000.bin").write_bytes(b"")
    with Checkpoints(tmp_path, keep=2, report=lambda line: None) as checkpoints:
        assert checkpoints.load(model_of(0.0), {})[0] == 2
        checkpoints.save(3, model_of(3.0), {}, {"step": 3})
    assert loaded(tmp_path)[0] == 3
    assert {path.name for path in manifest.list_steps(tmp_path)} == {f"step-{n:08}" for n in (2, 3, 30)}
    with Checkpoints(tmp_path, keep=1, report=lambda line: None) as checkpoints:
        assert checkpoints.load(model_of(0.0), {})[0] == 3
        checkpoints.save(30, model_of(30.0), {}, {"step": 30}, score=0.9)  # what is written anew is damaged no more
        checkpoints.save(31, model_of(31.0), {}, {"step": 31}, score=0.1)
    assert {path.name for path in manifest.list_steps(tmp_path)} == {f"step-{n:08}" for n in (30, 31)}


def test_only_what_is_surely_unfinished_is_removed(tmp_path):
    saved(tmp_path, 1, 2)
    (step_of(tmp_path, 1) / "COMMIT").write_text("{")  # as an error of the network might make it seem
    (tmp_path / "step-00000003").mkdir()
    (tmp_path / "notes").mkdir()
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(4, model_of(4.0), {}, {"step": 4})
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000001", "step-00000004", "notes"}


# ---- what does not fit


def load_into(folder, make):
    model, optimizer = make()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with Checkpoints(folder) as checkpoints:
        try:
            checkpoints.load(model, optimizer)
        except (ValueError, RuntimeError) as error:
            assert_equal(dict(model.state_dict()), before)
            return str(error)
    return None


def with_momentum(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 4, dtype=model[0].weight.dtype)).sum().backward()
    optimizer.step()
    return model, optimizer


def other_dtype():
    return with_momentum(model_of(0.0, dtype=torch.float64))


def other_keys():
    return with_momentum(model_of(0.0, bias=False))


def other_shape():
    return with_momentum(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2)))


def other_optimizer():
    model = model_of(0.0)
    return model, torch.optim.Adam(model.parameters())


def other_groups():
    model = model_of(0.0)
    groups = [{"params": [parameter]} for parameter in model.parameters()]
    return model, torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def save_with_momentum(folder):
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(1, *with_momentum(model_of(1.0)), {})


@pytest.mark.parametrize(
    ("make", "texts"),
    [
        (other_dtype, ["model/0.weight is float32[3, 4] in the checkpoint, float64[3, 4] here"]),
        (other_keys, ["model/0.bias (tensors) is in the checkpoint only"]),
        (other_shape, ["model/0.bias is float32[3] in the checkpoint, float32[5] here"]),
        (other_optimizer, ["optimizer 'main' is SGD in the checkpoint, Adam here"]),
        (other_groups, ["optimizer 'main' has other parameters or groups"]),
    ],
)
def test_what_does_not_fit_is_an_error_on_all_ranks(ranks, tmp_path, make, texts):
    ranks(save_with_momentum, tmp_path, world_size=2)
    alone, *both = [load_into(tmp_path, make), *ranks(load_into, tmp_path, make, world_size=2)]
    for text in texts:
        assert text in alone and str(tmp_path / "step-00000001") in alone
        assert both == [alone, alone]


# ---- the disk


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 256 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = shutil.which("mount") and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if not mounted or mounted.returncode:
        pytest.skip("needs the right to mount a tmpfs (root)")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def run_out_of_disk(folder, look_first):
    if not look_first:  # as if another program had taken the space after we looked
        storage.check_free_space = lambda directory, needed: None
    said = []
    small, large = model_of(1.0), nn.Linear(300, 300)
    optimizer = torch.optim.SGD(small.parameters(), lr=0.1)
    try:
        with Checkpoints(folder, keep=1, report=said.append) as checkpoints:
            checkpoints.save(1, small, optimizer, {"step": 1})
            checkpoints.save(2, large, {}, {})
            checkpoints.wait()
            if dist.is_initialized():
                dist.barrier()  # rank 0 tidies up
            left = [path.name for path in manifest.list_steps(folder)]
            if dist.is_initialized():
                dist.barrier()
            checkpoints.save(3, small, optimizer, {"step": 3})  # training goes on
            checkpoints.wait()
            return said, checkpoints.failures, left, checkpoints.load(small, optimizer)
    finally:
        storage.check_free_space = atomic_file.check_free_space


@pytest.mark.parametrize("look_first", [True, False], ids=["seen before", "in the midst"])
@pytest.mark.parametrize("world_size", [0, 2])
def test_disk_full(ranks, small_disk, world_size, look_first):
    if world_size:
        (said, *first), (silent, *second) = ranks(run_out_of_disk, small_disk, look_first, world_size=world_size)
        assert first == second and silent == []
    else:
        said, *first = run_out_of_disk(small_disk, look_first)
    failures, left, found = first
    assert left == ["step-00000001"] and found == (3, {"step": 3})
    assert len(said) == len(failures) == 1
    assert "NOT SAVED, step 2" in said[0] and "disk full" in said[0] and str(small_disk / "step-00000002") in said[0]
    assert "the newest checkpoint: step-00000001" in said[0]
    assert not look_first or "are needed" in said[0]


def test_directory_that_cannot_be_written(tmp_path, small_disk):
    (tmp_path / "file").write_text("")
    assert "NotADirectoryError" in saved(tmp_path / "file" / "run", 1)[0]
    saved(small_disk, 1)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert "Read-only" in saved(small_disk, 2, report=lambda line: None)[0]
    assert loaded(small_disk) == (1, [])  # loading writes nothing


def fail_on_one_rank(folder, rank, function):
    """An error of the disk on one rank, in the thread that writes."""
    places = {"data": (storage.os, "fsync"), "begin": (manifest, "begin"), "commit": (manifest, "write_manifest")}
    owner, name = places[function]
    whole = getattr(owner, name)

    def fail(*args):
        raise OSError(errno.EIO, "Input/output error")

    saved(folder, 1)
    if dist.get_rank() == rank:
        setattr(owner, name, fail)
    try:
        return saved(folder, 2, report=lambda line: None)
    finally:
        setattr(owner, name, whole)


@pytest.mark.parametrize(("rank", "function"), [(1, "data"), (0, "begin"), (0, "commit")])
def test_an_error_in_the_background_is_not_lost(ranks, tmp_path, rank, function):
    failures = ranks(fail_on_one_rank, tmp_path, rank, function, world_size=2)
    assert failures[0] == failures[1] and len(failures[0]) == 1
    assert f"rank {rank}: OSError" in failures[0][0] and "Input/output error" in failures[0][0]
    assert [path.name for path in manifest.list_steps(tmp_path)] == ["step-00000001"]


def test_a_failed_save_on_a_disk_that_cannot_be_listed_does_not_end_training(tmp_path, monkeypatch):
    saved(tmp_path, 1)

    def fail(*args):
        raise OSError(errno.EIO, "Input/output error")

    for name in ("begin", "list_steps"):
        monkeypatch.setattr(manifest, name, fail)
    said = []
    with Checkpoints(tmp_path, report=said.append) as checkpoints:
        checkpoints.save(2, model_of(2.0), {}, {})
        assert not checkpoints.wait() and checkpoints.wait()
    assert len(said) == 1 and "the newest checkpoint: unknown (Input/output error)" in said[0]


def test_a_checkpoint_stays_if_another_rank_dies_right_after_the_commit(tmp_path, monkeypatch):
    @contextmanager
    def lost_in_the_end(what, *, group=None):
        yield
        if what == "commit":
            raise ConnectionError("rank 1 is gone")

    monkeypatch.setattr(manager, "raise_together", lost_in_the_end)
    failures = saved(tmp_path, 1, report=lambda line: None)
    monkeypatch.undo()
    assert len(failures) == 1 and loaded(tmp_path) == (1, [])


def save_alone(folder):
    """As if rank 1 had stopped."""
    checkpoints = Checkpoints(folder, timeout=1.0)
    if dist.get_rank() == 0:
        checkpoints.save(1, model_of(1.0), {}, {})
        with pytest.raises(RuntimeError, match="checkpoint of step 1: rank 0 lost the other ranks"):
            checkpoints.wait()
    dist.barrier()


def test_a_rank_that_does_not_answer(ranks, tmp_path):
    ranks(save_alone, tmp_path, world_size=2)
    assert loaded(tmp_path) == (None, [])


# ---- malice


class Payload:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return (os.mkdir, (str(self.mark),))


def seal(path):
    """Write a COMMIT that agrees with whatever is there, as one who can write the directory could."""
    body = json.loads((path / "COMMIT").read_text())
    for name in body["files"]:
        data = (path / name).read_bytes()
        body["files"][name] = [len(data), hashlib.sha256(data).hexdigest()]
    write_sealed(path, body)


def write_sealed(path, body):
    body.pop("sha256", None)
    (path / "COMMIT").write_text(json.dumps({**body, "sha256": manifest._seal({"format": 1, **body})}))


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("file", [*FILES, ".metadata", "__0_0.distcp"])
def test_no_pickle_is_executed(tmp_path, monkeypatch, file, sealed):
    mark = tmp_path / "executed"
    payload = pickle.dumps(Payload(mark))
    pickle.loads(payload)
    assert mark.is_dir()  # it works
    mark.rmdir()
    saved(tmp_path / "run", 1)
    path = step_of(tmp_path / "run", 1) / file
    size = path.stat().st_size if path.exists() else 0
    path.write_bytes(payload.ljust(size if file.endswith(".bin") else 0, b"\0"))
    if sealed and file != "COMMIT":
        seal(path.parent)

    def refuse(*args, **kwargs):
        raise AssertionError("unpickled")

    for owner, name in [(torch, "load"), (pickle, "load"), (pickle, "loads"), (pickle, "Unpickler")]:
        monkeypatch.setattr(owner, name, refuse)
    with Checkpoints(tmp_path / "run", report=lambda line: None) as checkpoints:
        found = checkpoints.load(model_of(0.0), {})
    assert not mark.exists()
    assert (found is None) == (file in FILES and not (sealed and file.endswith(".bin")))


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "..", "", ".hidden", "a/b", "COMMIT"])
def test_names_that_lead_elsewhere_are_refused(tmp_path, name):
    saved(tmp_path, 1)
    body = json.loads((step_of(tmp_path, 1) / "COMMIT").read_text())
    body["files"][name] = body["files"]["state.json"]
    write_sealed(step_of(tmp_path, 1), body)
    step, said = loaded(tmp_path)
    assert step is None and f"names {name!r}, which is not a plain file name" in said[0]


def test_a_linked_directory_is_refused(tmp_path):
    saved(tmp_path / "other", 2)
    saved(tmp_path / "run", 1)
    step_of(tmp_path / "run", 2).symlink_to(step_of(tmp_path / "other", 2))
    step, said = loaded(tmp_path / "run")
    assert step == 1 and "symbolic link" in said[0]
    saved(tmp_path / "run", 3)
    assert loaded(tmp_path / "other")[0] == 2  # left alone
    saved(tmp_path / "run", 2)  # over the link itself
    assert loaded(tmp_path / "other") == (2, []) and not step_of(tmp_path / "run", 2).is_symlink()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("dtype", "load"),
        ("dtype", "float128"),
        ("shape", [3, 4, 1]),
        ("shape", [-3, -4]),
        ("shape", [10**12, 4]),
        ("parts", [["rank-00000.bin", 10**9, [0, 0], [3, 4]]]),
        ("parts", [["../../other", 0, [0, 0], [3, 4]]]),
        ("parts", [["rank-00000.bin", 0, [0, 0], [3, 3]]]),
        ("parts", [["rank-00000.bin", 0, [1, 0], [3, 4]]]),
        ("parts", [["rank-00000.bin", True, [0, 0], [3, 4]]]),
        ("parts", 7),
        ("parts", [[[], 0, [0, 0], [3, 4]]]),
    ],
)
def test_an_index_that_makes_no_sense_is_passed_over(tmp_path, key, value):
    saved(tmp_path, 1, 2)
    path = step_of(tmp_path, 2) / "tensors.json"
    index = json.loads(path.read_text())
    index["model/0.weight"][key] = value
    path.write_text(json.dumps(index))
    seal(path.parent)
    step, said = loaded(tmp_path)
    assert step == 1 and "tensors.json: 'model/0.weight'" in said[0]


def test_a_commit_of_another_step_or_format_is_passed_over(tmp_path):
    saved(tmp_path, 1, 2, 3)
    shutil.rmtree(step_of(tmp_path, 3))
    shutil.copytree(step_of(tmp_path, 1), step_of(tmp_path, 3))
    body = json.loads((step_of(tmp_path, 2) / "COMMIT").read_text())
    body.pop("sha256")
    body["format"] = 99
    (step_of(tmp_path, 2) / "COMMIT").write_text(json.dumps({**body, "sha256": manifest._seal(body)}))
    step, said = loaded(tmp_path)
    assert step == 1 and "that of step 1" in said[0] and "format 1" in said[1]


@pytest.mark.parametrize(
    "change",
    [
        lambda held: [],
        lambda held: {"state": held["state"]},
        lambda held: {"values": held["values"]},
        lambda held: held | {"values": {"model": {}}},
        lambda held: held | {"values": {"model": {}, "optimizers": {"main": []}}},
        lambda held: held | {"values": {"model": {}, "optimizers": {"main": {"class": "SGD", "groups": [{}], "states": {}}}}},
        lambda held: held | {"state": [1]},
    ],
)
def test_a_state_of_the_wrong_form_is_passed_over(tmp_path, change):
    saved(tmp_path, 1, 2)
    path = step_of(tmp_path, 2) / "state.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    seal(path.parent)
    step, said = loaded(tmp_path)
    assert step == 1 and "state.json: its" in said[0]


# ---- training that diverged


def test_a_checkpoint_with_nan_is_neither_saved_nor_loaded(tmp_path, monkeypatch):
    said = []
    assert "NaN in model/0.weight and 3 more: the training had diverged" in saved(tmp_path, math.nan, report=said.append)[0]
    assert "CHECKPOINT NOT SAVED" in said[0] and loaded(tmp_path) == (None, [])
    saved(tmp_path, 1)
    monkeypatch.setattr(manager, "has_nan", lambda tensor: False)  # as an older version saved it
    with Checkpoints(tmp_path, keep=9) as checkpoints:
        model = model_of(2.0)
        model[1].weight.data[1, 2] = math.nan
        checkpoints.save(2, model, {}, {"step": 2})
    step, said = loaded(tmp_path)
    assert step == 1 and "step-00000002 skipped: NaN in model/1.weight: the training had diverged" in said[0]


def test_infinities_such_as_those_of_a_mask_are_saved_and_loaded(tmp_path):
    model, again = model_of(-math.inf), model_of(0.0)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, model, {}, {})
        assert checkpoints.load(again, {}) == (1, {})
    assert again[0].weight[0, 0] == -math.inf


def test_everything_is_compared():
    """The comparison that these tests rest on sees a difference."""
    model, optimizer = with_momentum(model_of(1.0))
    held = everything(model, optimizer)
    held["state 0.weight momentum_buffer"] = held["state 0.weight momentum_buffer"] + 1
    with pytest.raises(AssertionError):
        assert_equal(held, everything(model, optimizer))

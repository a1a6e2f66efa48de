"""What is made of a trained generator: pictures, the animation, the export, the commands, the end of a run."""

import json
import shutil
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save

from unisono_models.gan.commands import evaluate, sample
from unisono_models.gan.config import Config, DataConfig, EvaluationConfig, ModelConfig
from unisono_models.gan.data import conditions as text_vectors
from unisono_models.gan.data.dataset import Datasets, build_datasets
from unisono_models.gan.data.images import Images
from unisono_models.gan.evaluate import Evaluator
from unisono_models.gan.feature_extractor import load_or_train_feature_extractor
from unisono_models.gan.figures import (
    BACKGROUND,
    FIRST,
    GAP,
    LAST,
    MARGIN,
    draw_grid,
    find_frames,
    frame_path,
    to_pixels,
    write_animation,
)
from unisono_models.gan.model.export import read_export, write_export
from unisono_models.gan.model.generator import Generator
from unisono_models.gan.model.sampling import generate, generate_for_evaluation, interpolate, show_classes, show_some
from unisono_models.gan.report import find_nearest, save_sample_grid, write_run_report
from unisono_models.training.config import RunConfig
from unisono_models.training.distributed.launch import Ranks
from unisono_models.training.run.run_directory import RunDirectory, open_run

ALONE = Ranks(0, 1, 0, torch.device("cpu"))
CLASSES = ("cat", "dog", "owl")
SEED = 4
SIZE, SIDE = 8, 56  # pixels of a picture, and of the same in a grid


def draw_images(count=30, *, channels=1, seed=0):
    draws = torch.Generator().manual_seed(seed)
    pixels = torch.randint(256, (count, channels, SIZE, SIZE), generator=draws, dtype=torch.uint8)
    captions, vectors = tuple(f"number {place % 7}" for place in range(count)), torch.randn(count, 5, generator=draws)
    return Images(pixels, torch.arange(count) % len(CLASSES), CLASSES, vectors, captions)


def make_generator(condition="class", *, dtype=torch.float32, channels=1):
    torch.manual_seed(0)
    config = ModelConfig(condition, noise=6, generator=(8, 4), embedding=4)
    conditions = {"class": len(CLASSES), "vector": 5, "text": 5, "none": 0}[condition]
    return Generator(config, size=SIZE, channels=channels, conditions=conditions).to(dtype).requires_grad_(False).eval()


def cells(picture, *, rows, columns, left=MARGIN, top=MARGIN):
    """The pixels of each picture in a grid, uint8 (rows * columns, size, size, 3), every one checked to be enlarged exactly."""
    sheet = torch.from_numpy(np.array(picture.convert("RGB")))
    found = []
    for place in range(rows * columns):
        y, x = (at * (SIDE + GAP) for at in divmod(place, columns))
        cell = sheet[top + y : top + y + SIDE, left + x : left + x + SIDE]
        small = cell[:: SIDE // SIZE, :: SIDE // SIZE]
        assert torch.equal(cell, small.repeat_interleave(SIDE // SIZE, 0).repeat_interleave(SIDE // SIZE, 1))
        found.append(small)
    return torch.stack(found)


def as_cells(pictures):
    return to_pixels(pictures).expand(-1, 3, -1, -1).permute(0, 2, 3, 1)


@pytest.mark.parametrize("channels", [1, 3])
def test_a_grid_has_the_pixels_of_its_pictures(channels):
    images = draw_images(5, channels=channels)
    picture = draw_grid(images.floats(torch.arange(5)), columns=3)
    assert picture.size == (2 * MARGIN + 3 * SIDE + 2 * GAP, 2 * MARGIN + 2 * SIDE + GAP)
    shown = cells(picture, rows=2, columns=3)
    assert torch.equal(shown[:5], images.pixels.expand(-1, 3, -1, -1).permute(0, 2, 3, 1))
    assert picture.getpixel((MARGIN + SIDE, MARGIN)) == picture.getpixel((0, 0)) == tuple(bytes.fromhex(BACKGROUND[1:]))
    assert shown[5].unique(dim=0).shape[0] == 1  # an empty place


def test_a_grid_with_names_is_the_same_beside_them():
    pictures = draw_images(6).floats(torch.arange(6))
    plain = draw_grid(pictures, columns=3)
    named = draw_grid(pictures, columns=3, row_names=["cat", "an owl " * 50], column_names=["a", "b", "c" * 99])
    dx, dy = named.width - plain.width, named.height - plain.height
    assert 240 < dx + MARGIN < 300 and dy > 0
    inner = named.crop((MARGIN + dx, MARGIN + dy, named.width, named.height))
    assert inner.tobytes() == plain.crop((MARGIN, MARGIN, plain.width, plain.height)).tobytes()
    with pytest.raises(ValueError, match="1 row_names, but there are 2"):
        draw_grid(pictures, columns=3, row_names=["cat"])


def test_the_animation_has_all_frames_and_holds_the_ends(tmp_path):
    pictures = draw_images(5).floats(torch.arange(5))
    for place, step in enumerate((100, 9, 20)):  # by number, not by name or age
        draw_grid(pictures[place : place + 1], columns=1).save(frame_path(tmp_path, step))
    (tmp_path / "step-x.png").touch()
    frames = find_frames(tmp_path)
    assert list(frames) == [9, 20, 100]
    write_animation(frames, tmp_path / "all.webp")
    with Image.open(tmp_path / "all.webp") as film:
        times = []
        for number, path in enumerate(frames.values()):
            film.seek(number)
            film.load()
            times.append(film.info["duration"])
            with Image.open(path) as frame:
                assert film.convert("RGB").crop((0, 0, *frame.size)).tobytes() == frame.tobytes()
        assert film.n_frames == 3 and film.info["loop"] == 0
    assert times[0] == FIRST and times[2] == LAST and 0 < times[1] < FIRST


def test_an_animation_that_would_be_large_is_made_smaller(tmp_path):
    for step in range(8):
        draw_grid(draw_images(9, channels=3, seed=step).floats(torch.arange(9)), columns=3).save(frame_path(tmp_path, step))
    write_animation(find_frames(tmp_path), path := tmp_path / "all.webp")
    whole = path.stat().st_size
    write_animation(find_frames(tmp_path), path, most_bytes=whole * 2 // 3)
    assert path.stat().st_size <= whole * 2 // 3
    with Image.open(path) as film:
        assert film.n_frames == 4


@pytest.mark.parametrize(("condition", "dtype"), [("class", torch.float32), ("text", torch.float64), ("none", torch.float32)])
def test_an_export_gives_the_same_bits_back(tmp_path, condition, dtype):
    generator = make_generator(condition, dtype=dtype, channels=3)
    write_export(tmp_path, generator, data=DataConfig(text_model="some/encoder"), images=draw_images(channels=3))
    exported = read_export(tmp_path)
    assert (exported.classes, exported.size, exported.channels, exported.text_model) == (CLASSES, SIZE, 3, "some/encoder")
    assert exported.condition == condition and exported.generator.config == generator.config
    assert not exported.generator.training and not any(p.requires_grad for p in exported.generator.parameters())
    one, other = generator.state_dict(), exported.generator.state_dict()
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert {value.dtype for value in other.values()} == {dtype}


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("model.safetensors", lambda data: data[:-9], "SafetensorError"),
        ("model.safetensors", lambda data: save({"other": torch.ones(2)}), "RuntimeError.*Missing key"),
        ("model.safetensors", lambda data: save({}), "StopIteration"),
        ("config.json", lambda data: data[:-9], "is not JSON"),
        ("config.json", lambda data: b'{"features": []}', "KeyError: 'model'"),
        ("config.json", lambda data: b"[1]", "TypeError"),
    ],
)
def test_a_foreign_or_damaged_export_is_refused(finished, tmp_path, name, change, message):
    run = shutil.copytree(finished[0], tmp_path / "run")
    file = run / "export" / name
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(
        SystemExit, match=rf"(?s)export is not the export of a GAN, or damaged \(.*{message}.*start its training"
    ):
        sample.main([str(run), "--out", str(tmp_path / "out.png")])


def test_pictures_are_made_where_the_generator_is():
    seen = []
    for condition in (torch.tensor([0, 1]), torch.zeros(2, 5, dtype=torch.float64)):
        generator = make_generator("vector" if condition.is_floating_point() else "class").to("meta")
        generator.register_forward_pre_hook(lambda _, inputs: seen.extend(inputs))
        generate(generator, condition, torch.arange(2), seed=0)
    assert {x.device.type for x in seen} == {"meta"}
    assert [x.dtype for x in seen] == [torch.float32, torch.int64, torch.float32, torch.float32]


def test_the_nearest_picture_is_found_in_whichever_tile_it_is():
    images = draw_images(2500)
    wanted, noise = torch.tensor([2400, 3, 1100]), torch.tensor([0.0, 0.01, 0.0])
    places, distances = find_nearest(images.floats(wanted) + noise[:, None, None, None], images)
    assert torch.equal(places, wanted)
    torch.testing.assert_close(distances, noise, atol=1e-6, rtol=0)
    places, _ = find_nearest(images.floats(wanted), images, describe=lambda x: -x.flatten(1)[:, :9])
    assert torch.equal(places, wanted)


def test_noise_goes_from_one_end_to_the_other_on_the_arc():
    start, end = torch.randn(2, 4, 64, dtype=torch.float64).unbind(0)
    path = interpolate(start, end, steps=5)
    torch.testing.assert_close(path[:, [0, -1]], torch.stack([start, end], 1), atol=1e-14, rtol=0)
    start, end = (torch.nn.functional.normalize(x) for x in (start, end))
    path = interpolate(start, end, steps=5)
    torch.testing.assert_close(path.norm(dim=2), torch.ones(4, 5, dtype=torch.float64))
    apart = (path[:, 1:] * path[:, :-1]).sum(2).acos()
    torch.testing.assert_close(apart, apart[:, :1].expand(-1, 4))
    torch.testing.assert_close(interpolate(start, start, steps=3), start[:, None].expand(-1, 3, -1))


def test_what_is_shown_has_its_names():
    images = draw_images()
    assert show_classes(("1", "0"), ["1", "0"]).condition.tolist() == [0, 1]  # a name comes before a number
    some = show_some(images, kind="class", seed=3, count=2)
    assert some.names == tuple(CLASSES[label] for label in some.condition.tolist()) and some.count == 2
    texts = show_some(images, kind="text", seed=3)
    assert len(set(texts.names)) == len(texts.names) == texts.count == 7
    for name, vector in zip(texts.names, texts.condition, strict=True):
        assert any(c == name and torch.equal(v, vector) for c, v in zip(images.captions, images.vectors, strict=True))
    assert show_some(images, kind="text", seed=3).names == texts.names != show_some(images, kind="text", seed=4).names


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run that was concluded, of a generator that knows nothing, on a folder of pictures."""
    home = tmp_path_factory.mktemp("gan")
    for place, array in enumerate(draw_images(60).pixels[:, 0].numpy()):
        path = home / "pictures" / CLASSES[place % 3] / f"{place}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(array).save(path)
    generator = make_generator()
    config = Config(
        RunConfig(steps=20, seed=SEED, dir=home / "run"),
        DataConfig(str(home / "pictures"), size=SIZE),
        generator.config,
        evaluation=EvaluationConfig(samples=30, judge_steps=2, tile=20),
    )
    run = open_run(config, model="gan", recipe="none", ranks=ALONE)
    (run.path / "metrics.jsonl").touch()
    source = build_datasets(config.data, condition="class", ranks=ALONE)
    judge = load_or_train_feature_extractor(run.path / "judge.safetensors", source, config.evaluation, ALONE)
    evaluator = Evaluator(source, judge, ALONE, None, config.evaluation)
    for step in (10, 20):
        save_sample_grid(run, generator, source, step=step, seed=SEED)
    figures = evaluator(partial(generate_for_evaluation, generator, source.train, seed=SEED))
    write_run_report(run, config, generator, source, evaluator, figures)
    return run.path, generator, figures


def test_the_end_of_a_run_leaves_all_behind(finished):
    path, generator, figures = finished
    names = {"samples.png", "real.png", "interpolation.png", "nearest.png", "training.webp", "step-00000010.png"}
    assert names < {file.name for file in (path / "samples").iterdir()}
    weights = load_file(path / "export" / "model.safetensors")
    assert all(torch.equal(weights[name], value) for name, value in generator.state_dict().items())
    summary = json.loads((path / "summary.json").read_text())
    assert {name: summary[name] for name in figures} == figures and {f"real/{name}" for name in figures} < {*summary}
    page = (path / "report.html").read_text()
    assert page.count("data:image/png") == 4 and page.count("data:image/webp") == 1
    assert "not FID" in page and "kept from" in page
    with Image.open(path / "samples" / "samples.png") as now, Image.open(path / "samples" / "step-00000010.png") as before:
        assert now.tobytes() == before.tobytes()  # the same noise and conditions
        shown = cells(now, rows=3, columns=10, left=now.width - MARGIN - 10 * SIDE - 9 * GAP)
    made = generate(generator, torch.arange(3).repeat_interleave(10), torch.arange(10).repeat(3), seed=SEED)
    assert torch.equal(shown, as_cells(made))


def test_samples_have_the_labels_in_order(finished, tmp_path, capsys):
    path, generator, _ = finished
    command = [str(path), "--labels", "owl", "0", "owl", "--count", "2", "--out"]
    for name, more in {"one.png": [], "again/two.png": [], "other.png": ["--seed", "1"]}.items():
        sample.main([*command, str(tmp_path / name), *more])
        assert capsys.readouterr().out.strip() == str(tmp_path / name)
    one = (tmp_path / "one.png").read_bytes()
    assert one == (tmp_path / "again" / "two.png").read_bytes() != (tmp_path / "other.png").read_bytes()
    with Image.open(tmp_path / "one.png") as picture:
        shown = cells(picture, rows=2, columns=3, top=picture.height - MARGIN - 2 * SIDE - GAP)
    made = generate(generator, torch.tensor([2, 2, 0, 0, 2, 2]), torch.arange(6), seed=0)
    assert torch.equal(shown, as_cells(made[[0, 2, 4, 1, 3, 5]]))


def test_truncation_makes_pictures_more_alike(finished):
    exported = read_export(finished[0] / "export")

    def spread(truncation):
        options = sample.Options(finished[0], labels=("dog",), count=4, truncation=truncation)
        picture = sample.sample(exported, options)
        return cells(picture, rows=4, columns=1, top=picture.height - MARGIN - 4 * SIDE - 3 * GAP).double().std(0).mean()

    assert spread(0.0) == 0 < spread(0.3) < spread(1.0)


def test_interpolations_begin_and_end_with_samples(finished, tmp_path):
    path, generator, _ = finished
    out = tmp_path / "path.png"
    sample.main([str(path), "--labels", "dog", "--interpolate", "4", "--count", "2", "--out", str(out)])
    with Image.open(out) as picture:
        shown = cells(picture, rows=2, columns=4, left=picture.width - MARGIN - 4 * SIDE - 3 * GAP)
    made = generate(generator, torch.ones(4, dtype=torch.int64), torch.arange(4), seed=0)
    assert (shown[[0, 3, 4, 7]].int() - as_cells(made).int()).abs().max() <= 1
    assert not torch.equal(shown[0], shown[1])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--labels", "cat", "cow"], "--labels: label 'cow' is no class; the classes are cat, dog, owl"),
        (["--texts", "a cat"], "model.condition=class: give it --labels"),
        (["--count", "0"], "--count 0: at least 1"),
        (["--interpolate", "1"], "--interpolate 1: at least 2"),
        (["--truncation", "nan"], "--truncation nan"),
        (["--out", "grid.gif"], "end in .png"),
    ],
)
def test_samples_that_cannot_be_made_are_refused(finished, args, message):
    with pytest.raises(SystemExit, match=message):
        sample.main([str(finished[0]), *args])


def test_a_run_that_has_not_finished_is_refused(finished, tmp_path):
    with pytest.raises(SystemExit, match=r"no such directory.*scripts/train gan"):
        sample.main([str(tmp_path / "none")])
    (tmp_path / "config.json").write_bytes((finished[0] / "config.json").read_bytes())
    with pytest.raises(SystemExit, match=r"export/model.safetensors is not there yet"):
        evaluate.main([str(tmp_path)])


def test_the_runs_of_other_models_are_not_offered(finished, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    about = json.loads((finished[0] / "config.json").read_text())
    for name, model in {"begun": "gan", "ours": "gan", "theirs": "clip"}.items():
        (tmp_path / "runs" / name / "export").mkdir(parents=True)
        if name != "begun":
            (tmp_path / "runs" / name / "export" / "model.safetensors").touch()
        (tmp_path / "runs" / name / "config.json").write_text(json.dumps(about | {"model": model}))
    with pytest.raises(SystemExit, match=r"runs/theirs holds a run of clip, not of gan\. Here are runs/ours$"):
        sample.main(["runs/theirs"])


def test_vectors_and_no_conditions_can_be_sampled(tmp_path):
    for condition in ("vector", "none"):
        write_export(tmp_path, make_generator(condition), data=DataConfig(), images=draw_images())
        exported = read_export(tmp_path)
        file = tmp_path / "rows.npy"
        np.save(file, draw_images().vectors[:3].numpy())
        picture = sample.sample(exported, sample.Options(tmp_path, vectors=file if condition == "vector" else None, count=2))
        rows = 3 if condition == "vector" else 1
        assert picture.height == 2 * MARGIN + rows * (SIDE + GAP) - GAP
    with pytest.raises(sample.RunError, match="takes no conditions"):
        sample.sample(exported, sample.Options(tmp_path, vectors=file))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (np.full((2, 5), np.nan), "row 0 has numbers that are not finite"),
        (np.ones((2, 4)), r"a table of \(2, 4\).*5 columns"),
        (np.array(["five"]), "must hold one table of numbers"),
    ],
)
def test_vectors_that_do_not_fit_are_refused(tmp_path, table, message):
    write_export(tmp_path, make_generator("vector"), data=DataConfig(), images=draw_images())
    np.save(tmp_path / "rows.npy", table)
    with pytest.raises(ValueError, match=rf"--vectors.*rows.npy: {message}"):
        sample.sample(read_export(tmp_path), sample.Options(tmp_path, vectors=tmp_path / "rows.npy"))


def test_a_text_has_a_row_however_short_it_is(monkeypatch, tmp_path):
    vectors = draw_images().vectors
    monkeypatch.setattr(text_vectors, "TextEncoder", lambda model, device: lambda texts: vectors[: len(texts)])
    write_export(tmp_path, generator := make_generator("text"), data=DataConfig(), images=draw_images())
    picture = sample.sample(read_export(tmp_path), sample.Options(tmp_path, texts=("a", "b"), count=3))
    shown = cells(picture, rows=2, columns=3, left=picture.width - MARGIN - 3 * SIDE - 2 * GAP)
    made = generate(generator, vectors[:2].repeat_interleave(3, 0), torch.arange(6), seed=0)
    assert torch.equal(shown, as_cells(made))


def test_evaluation_gives_the_figures_that_the_run_has_kept(finished):
    rows = evaluate.evaluate_run(evaluate.Options(finished[0]), ALONE)
    assert [row["generated"] for row in rows] == [row["run"] for row in rows] == list(finished[2].values())
    for changed in ({"samples": 20}, {"seed": SEED + 1}):
        others = evaluate.evaluate_run(evaluate.Options(finished[0], **changed), ALONE)
        assert others[0]["generated"] != rows[0]["generated"] and others[0]["run"] == rows[0]["run"]


def frame_on_ranks(rank_path):
    """On rank 0: a disk that does not take it is no error; what no rank could draw is one for all."""
    first = torch.distributed.get_rank() == 0
    run, images = RunDirectory(rank_path, False, first), draw_images()
    save_sample_grid(run, make_generator(), Datasets(images, images), step=1, seed=0)
    blocked = RunDirectory(rank_path / "samples" / "step-00000001.png", False, first)
    save_sample_grid(blocked, make_generator(), Datasets(images, images), step=1, seed=0)
    bare = Images(images.pixels)
    try:
        save_sample_grid(run, make_generator(), Datasets(bare, bare), step=2, seed=0)
    except RuntimeError as error:
        return str(error)


def test_an_error_in_drawing_reaches_every_rank(ranks, tmp_path):
    one, two = ranks(frame_on_ranks, tmp_path, world_size=2)
    assert one == two and one.startswith("write_frame: rank 0: ")
    assert [file.name for file in (tmp_path / "samples").iterdir()] == ["step-00000001.png"]

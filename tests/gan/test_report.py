"""What a run writes: sample grids, figures, the report."""

import json

import torch
from PIL import Image
from safetensors.torch import load_file

from tests.gan.small_runs import SEED, SIDE, as_cells, cells, draw_images, make_generator
from unisono_models.gan.data.dataset import Datasets
from unisono_models.gan.data.images import ImageDataset
from unisono_models.gan.figures import (
    GAP,
    MARGIN,
)
from unisono_models.gan.model.sampling import generate
from unisono_models.gan.report import find_nearest_images, save_sample_grid
from unisono_models.training.run.run_directory import RunDirectory


def test_nearest_image_is_found_in_every_tile():
    images = draw_images(2500)
    wanted, noise = torch.tensor([2400, 3, 1100]), torch.tensor([0.0, 0.01, 0.0])
    places, distances = find_nearest_images(images.floats(wanted) + noise[:, None, None, None], images)
    assert torch.equal(places, wanted)
    torch.testing.assert_close(distances, noise, atol=1e-6, rtol=0)
    places, _ = find_nearest_images(images.floats(wanted), images, describe=lambda x: -x.flatten(1)[:, :9])
    assert torch.equal(places, wanted)


def test_run_report_writes_export_figures_and_summary(finished_run):
    path, generator, metrics = finished_run
    names = {"samples.png", "real.png", "interpolation.png", "nearest.png", "training.webp", "step-00000010.png"}
    assert names < {file.name for file in (path / "samples").iterdir()}
    weights = load_file(path / "export" / "model.safetensors")
    assert all(torch.equal(weights[name], value) for name, value in generator.state_dict().items())
    summary = json.loads((path / "summary.json").read_text())
    assert {name: summary[name] for name in metrics} == metrics and {f"real/{name}" for name in metrics} < {*summary}
    page = (path / "report.html").read_text()
    assert page.count("data:image/png") == 4 and page.count("data:image/webp") == 1
    assert "not FID" in page and "kept from" in page
    with Image.open(path / "samples" / "samples.png") as now, Image.open(path / "samples" / "step-00000010.png") as before:
        assert now.tobytes() == before.tobytes()  # the same noise and conditions
        shown = cells(now, rows=3, columns=10, left=now.width - MARGIN - 10 * SIDE - 9 * GAP)
    made = generate(generator, torch.arange(3).repeat_interleave(10), torch.arange(10).repeat(3), seed=SEED)
    assert torch.equal(shown, as_cells(made))


def save_grids_on_ranks(rank_path):
    """A grid that cannot be written is no error; one that cannot be drawn is an error on all ranks."""
    first = torch.distributed.get_rank() == 0
    run, images = RunDirectory(rank_path, False, first), draw_images()
    save_sample_grid(run, make_generator(), Datasets(images, images), step=1, seed=0)
    blocked = RunDirectory(rank_path / "samples" / "step-00000001.png", False, first)
    save_sample_grid(blocked, make_generator(), Datasets(images, images), step=1, seed=0)
    bare = ImageDataset(images.pixels)
    try:
        save_sample_grid(run, make_generator(), Datasets(bare, bare), step=2, seed=0)
    except RuntimeError as error:
        return str(error)


def test_sample_grid_errors_reach_every_rank(ranks, tmp_path):
    one, two = ranks(save_grids_on_ranks, tmp_path, world_size=2)
    assert one == two and one.startswith("save_sample_grid: rank 0: ")
    assert [file.name for file in (tmp_path / "samples").iterdir()] == ["step-00000001.png"]

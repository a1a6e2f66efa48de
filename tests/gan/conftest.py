"""A finished run that several tests use."""

from functools import partial

import pytest
from PIL import Image

from tests.gan.small_runs import ALONE, CLASSES, SEED, SIZE, draw_images, make_generator
from unisono_models.gan.config import Config, DataConfig, EvaluationConfig
from unisono_models.gan.data.dataset import build_datasets
from unisono_models.gan.evaluate import Evaluator
from unisono_models.gan.feature_extractor import FILE, load_or_train_feature_extractor
from unisono_models.gan.model.sampling import generate_for_evaluation
from unisono_models.gan.report import save_sample_grid, write_run_report
from unisono_models.training.config import RunConfig
from unisono_models.training.run.run_directory import open_run


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory):
    """The directory, generator and metrics of a finished run on a folder of images. The generator is untrained."""
    home = tmp_path_factory.mktemp("gan")
    for place, array in enumerate(draw_images(60).pixels[:, 0].numpy()):
        path = home / "images" / CLASSES[place % 3] / f"{place}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(array).save(path)
    generator = make_generator()
    config = Config(
        RunConfig(steps=20, seed=SEED, dir=home / "run"),
        DataConfig(str(home / "images"), size=SIZE),
        generator.config,
        evaluation=EvaluationConfig(samples=30, feature_extractor_steps=2, tile=20),
    )
    run = open_run(config, model="gan", recipe="none", ranks=ALONE)
    (run.path / "metrics.jsonl").touch()
    datasets = build_datasets(config.data, condition="class", ranks=ALONE)
    extractor = load_or_train_feature_extractor(run.path / FILE, datasets, config.evaluation, ALONE)
    evaluator = Evaluator(datasets, extractor, ALONE, None, config.evaluation)
    for step in (10, 20):
        save_sample_grid(run, generator, datasets, step=step, seed=SEED)
    metrics = evaluator(partial(generate_for_evaluation, generator, datasets.train, seed=SEED))
    write_run_report(run, config, generator, datasets, evaluator, metrics)
    return run.path, generator, metrics

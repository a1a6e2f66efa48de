"""Training loops of other libraries, checked as they are: accelerate's, and the Trainer of transformers."""

import tempfile
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.collectives.law.bugs import Piece, mlp, rows
from unisono.collectives.law import CheckError, check

pytest.importorskip("transformers")
pytest.importorskip("accelerate")  # a Trainer needs it

OUTPUT = (
    Path(tempfile.gettempdir()) / "unisono-trainer-output"
)  # a Trainer makes it; ranks have a working directory of their own
LABELS = torch.arange(24) % 3


class Classifier(nn.Module):
    """What a Trainer expects of a model: keyword arguments, and the loss in the output."""

    def __init__(self, dropout=0.0, own_mean=True):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Dropout(dropout), nn.Linear(5, 3))
        self.own_mean = own_mean

    def forward(self, x, labels):
        logits = self.net(x)
        weights = torch.ones(len(x)) if self.own_mean else (labels > 0).to(x)  # rows that count, as tokens do
        loss = (F.cross_entropy(logits, labels, reduction="none") * weights).sum() / weights.sum()
        return {"loss": loss, "logits": logits}


def make_trainer(batch_size=6, dropout=0.0, own_mean=True, rows_read=24, **arguments):
    from transformers import Trainer, TrainingArguments

    data = [{"x": x, "labels": y} for x, y in zip(rows(rows_read, 6), LABELS[:rows_read], strict=True)]
    arguments |= {"use_cpu": True, "report_to": "none", "output_dir": str(OUTPUT)}
    args = TrainingArguments(per_device_train_batch_size=batch_size, **arguments)
    return Trainer(model=Classifier(dropout, own_mean), args=args, train_dataset=data)


def build_trainer():
    return make_trainer(gradient_accumulation_steps=2, max_grad_norm=0.1)


def build_trainer_with_dropout():
    return make_trainer(dropout=0.3)


def build_trainer_of_token_means():
    return make_trainer(own_mean=False)


def build_trainer_of_few_rows():
    return make_trainer(rows_read=5, batch_size=6)


def build_trainer_with_odd_batch():
    return make_trainer(batch_size=5)


def test_trainer_does_not_depend_on_the_number_of_ranks():
    report = check(build_trainer, world_sizes=(1, 2))
    assert report.ok, str(report)
    assert report.dtype == "float64" and report.steps == 2
    assert [str(result.case) for result in report.cases] == ["2 ranks, own loader"]
    assert not list(OUTPUT.iterdir())  # no checkpoint


@pytest.mark.parametrize(
    ("build", "cause"),
    [
        (build_trainer_with_dropout, "random_module"),
        (build_trainer_of_token_means, "token_mean"),
        (build_trainer_of_few_rows, "repeated_samples"),
    ],
)
def test_bug_in_a_trainer_is_found(build, cause):
    report = check(build, world_sizes=(1, 2))
    assert report.causes == [cause], str(report)


def test_dropout_can_be_switched_off():
    report = check(build_trainer_with_dropout, world_sizes=(1, 2), dropout="off")
    assert report.ok, str(report)


def test_trainer_whose_batch_cannot_be_divided_gets_a_sentence():
    report = check(build_trainer_with_odd_batch, world_sizes=(1, 2))
    assert report.causes == ["raises"]
    assert "must be a multiple of 2" in str(report)


def test_build_without_a_step_must_return_a_trainer():
    with pytest.raises(CheckError, match=r"build\(\) must return a Hugging Face Trainer; it returned tuple"):
        check(Piece.build, world_sizes=(1, 2))


# accelerate


def prepare(**options):
    from accelerate import Accelerator, DataLoaderConfiguration

    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(rows(12, 6), rows(12, 1, seed=1)), batch_size=6, shuffle=True)
    return accelerator.prepare(model, optimizer, loader)


def build_prepared():
    return prepare(split_batches=True, use_seedable_sampler=True)


def build_prepared_with_own_batch_size():
    return prepare(use_seedable_sampler=True)


def build_prepared_with_own_order():
    return prepare(split_batches=True)


def accelerate_step(model, optimizer, batch):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    optimizer.zero_grad()
    loss = F.mse_loss(model(batch[0]), batch[1])
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return loss.detach()


def test_accelerate_loop_does_not_depend_on_the_number_of_ranks():
    report = check(build_prepared, accelerate_step, world_sizes=(1, 2, 3))
    assert report.ok, str(report)
    assert report.steps == 2


@pytest.mark.parametrize(
    ("build", "cause"),
    [(build_prepared_with_own_batch_size, "growing_batch"), (build_prepared_with_own_order, "other_order")],
)
def test_bug_in_an_accelerate_loop_is_found(build, cause):
    report = check(build, accelerate_step, world_sizes=(1, 2))
    assert report.causes == [cause], str(report)

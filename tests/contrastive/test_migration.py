"""Every line of the README's table "Coming from another library" is run as it stands, against the other library's formula.

open_clip is installed and runs itself. The formulas of the others (x-clip, lightly, pytorch-metric-learning,
sentence-transformers, GradCache, Inf-CL) are written here from their sources.
"""

import copy
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize

import unisono.contrastive
from tests.contrastive.test_open_clip import FOUND, open_clip_losses
from unisono.contrastive import NegativeQueue, clip_loss

README = Path(__file__).parents[2] / "packages/contrastive/README.md"


def table() -> dict[str, list[str]]:
    """The code of each row, by its first cell."""
    lines = README.read_text().partition("## Coming from another library")[2].partition("\n## ")[0].splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")][1:]
    return {cells[0]: re.findall(r"`([^`]+)`", cells[1]) for cells in rows}


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def unit(*shape: int, seed: int = 0) -> torch.Tensor:
    return normalize(normal(*shape, seed=seed), dim=-1)


def both_ways(logits: torch.Tensor) -> torch.Tensor:
    labels = torch.arange(len(logits))
    return (cross_entropy(logits, labels) + cross_entropy(logits.T, labels)) / 2


def open_clip_clip():
    x, y, scale = unit(6, 4), unit(6, 4, seed=1), torch.tensor(10.0, dtype=torch.float64)
    return {"x": x, "y": y, "logit_scale": scale}, lambda x, y, logit_scale: open_clip_losses().ClipLoss()(x, y, logit_scale)


def open_clip_loop():
    out = {"image_features": unit(6, 4), "text_features": unit(6, 4, seed=1), "logit_scale": torch.tensor(10.0)}
    expected = open_clip_losses().ClipLoss()(**out, output_dict=True)
    return {"model_out": out}, lambda model_out: expected


def open_clip_siglip():
    given = {"x": unit(6, 4), "y": unit(6, 4, seed=1)}
    given |= {"logit_scale": torch.tensor(10.0, dtype=torch.float64), "logit_bias": torch.tensor(-3.0, dtype=torch.float64)}
    return given, lambda x, y, logit_scale, logit_bias: open_clip_losses().SigLipLoss()(x, y, logit_scale, logit_bias)


def x_clip_decoupled():
    def theirs(x, y, scale):
        exps = (scale * x @ y.T).exp()
        others = exps * (1 - torch.eye(len(x)))
        return (others.sum(1).log() + others.sum(0).log() - 2 * exps.diag().log()).mean() / 2

    return {"x": unit(6, 4), "y": unit(6, 4, seed=1), "scale": 10.0}, theirs


def x_clip_extra():
    def theirs(x, y, x_extra, y_extra, scale):
        labels = torch.arange(len(x))
        return (cross_entropy(scale * x @ y.T, labels) + cross_entropy(scale * y_extra @ x_extra.T, labels)) / 2

    features = {name: unit(6, 4, seed=seed) for seed, name in enumerate(("x", "y", "x_extra", "y_extra"))}
    return features | {"scale": 10.0}, theirs


def x_clip_views():
    def theirs(texts, images, scale, w):
        losses = torch.stack([both_ways(scale * text @ image.T) for text in texts for image in images])
        return losses[0] * (1 - w) + losses[1:].mean() * w

    return {"texts": unit(2, 6, 4), "images": unit(3, 6, 4, seed=1), "scale": 10.0, "w": 0.1}, theirs


def simclr(z0: torch.Tensor, z1: torch.Tensor, temperature: float) -> torch.Tensor:
    n = len(z0)
    z = torch.cat([z0, z1])
    logits = (z @ z.T / temperature)[~torch.eye(2 * n, dtype=torch.bool)].view(2 * n, 2 * n - 1)
    labels = torch.cat([torch.arange(n) + n - 1, torch.arange(n)])
    return cross_entropy(logits, labels)


def x_clip_simclr():
    return {"z0": unit(6, 4), "z1": unit(6, 4, seed=1)}, lambda z0, z1: simclr(z0, z1, 0.1)


def lightly_ntxent():
    given = {"z0": normal(6, 4), "z1": normal(6, 4, seed=1), "temperature": 0.5}
    return given, lambda z0, z1, temperature: simclr(normalize(z0, dim=1), normalize(z1, dim=1), temperature)


def lightly_bank():
    queue = NegativeQueue(8, 4, with_ids=True, dtype=torch.float64)
    queue.enqueue(unit(8, 4, seed=2), torch.ones(8, dtype=torch.int64))

    def theirs(z0, z1, temperature, **_):
        positive = (z0 * z1).sum(1, keepdim=True)
        logits = torch.cat([positive, z0 @ unit(8, 4, seed=2).T], 1) / temperature
        return cross_entropy(logits, torch.zeros(len(z0), dtype=torch.int64))

    zeros = torch.zeros(6, dtype=torch.int64)
    return {"z0": unit(6, 4), "z1": unit(6, 4, seed=1), "temperature": 0.5, "queue": queue, "zeros": zeros}, theirs


def metric_learning(per_label: int, over_pairs: bool):
    labels = torch.arange(12) // per_label

    def theirs(z, labels, temperature):
        logits = normalize(z, dim=1) @ normalize(z, dim=1).T / temperature
        own = torch.eye(len(z), dtype=torch.bool)
        positive = (labels[:, None] == labels) & ~own
        if over_pairs:  # each pair against the negatives of its anchor
            negatives = logits.masked_fill(positive | own, -torch.inf).logsumexp(1, keepdim=True)
            return (torch.logaddexp(logits, negatives) - logits)[positive].mean()
        log_probability = logits - logits.masked_fill(own, -torch.inf).logsumexp(1, keepdim=True)
        return -((log_probability * positive).sum(1) / positive.sum(1)).mean()

    return {"z": normal(12, 4), "labels": labels, "temperature": 0.1}, theirs


def ranking(triplets: bool):
    def theirs(query, answer, hard=None):
        candidates = torch.cat([answer] + [hard] * triplets)
        scores = 20 * normalize(query, dim=1) @ normalize(candidates, dim=1).T
        return cross_entropy(scores, torch.arange(len(query)))

    names = ("query", "answer", "hard") if triplets else ("query", "answer")
    return {name: normal(6, 4, seed=seed) for seed, name in enumerate(names)}, theirs


def cached(models: str, batches: str, loss: str, **more):
    """Theirs and ours give the loss and the gradients of the whole batch at once; the models are compared after the call."""

    def tower():
        torch.manual_seed(0)
        return nn.Linear(5, 4).double()

    encoders = [tower()] * 2 if models == "encoder" else [tower(), tower()]
    inputs = [normal(6, 5), normal(6, 5, seed=1)]

    def whole(x, y):
        return clip_loss(normalize(x, dim=1), normalize(y, dim=1), 10.0)

    twins = copy.deepcopy(encoders)
    expected = whole(*(twin(batch) for twin, batch in zip(twins, inputs, strict=True)))
    expected.backward()

    def theirs(**_):
        for encoder, twin in zip(encoders, twins, strict=True):
            torch.testing.assert_close(encoder.weight.grad, twin.weight.grad)
        return expected.detach()

    named = {"encoder": {"encoder": encoders[0]}, "models": {"models": encoders}}
    pairs = {"image_tower": encoders[0], "text_tower": encoders[1]}
    places = dict(zip(batches.split(), inputs, strict=True)) if " " in batches else {batches: inputs}
    return named.get(models, pairs) | places | {loss: whole} | more, theirs


ROWS = {
    "open_clip `ClipLoss(local_loss, gather_with_grad, rank, world_size)(x, y, logit_scale)`": open_clip_clip,
    "open_clip's training loop, `loss(**model_out, output_dict=True)`": open_clip_loop,
    "open_clip `SigLipLoss(rank, world_size)(x, y, logit_scale, logit_bias)`": open_clip_siglip,
    "open_clip `--accum-freq`": lambda: cached("towers", "images texts", "loss"),
    "x-clip `CLIP(decoupled_contrastive_learning=True)`": x_clip_decoupled,
    "x-clip `extra_latent_projection=True`": x_clip_extra,
    "x-clip multi-view, `multiview_loss_weight=w`": x_clip_views,
    'x-clip `visual_ssl_type="simclr"`': x_clip_simclr,
    "lightly `NTXentLoss(temperature, gather_distributed=True)(z0, z1)`": lightly_ntxent,
    "lightly `NTXentLoss(temperature, memory_bank_size)(z0, z1)`": lightly_bank,
    "pytorch-metric-learning `DistributedLossWrapper(SupConLoss(temperature))(z, labels)`": lambda: metric_learning(3, False),
    "pytorch-metric-learning `NTXentLoss(temperature)(z, labels)`, two samples of each label": lambda: metric_learning(2, True),
    "sentence-transformers `MultipleNegativesRankingLoss(gather_across_devices=True)`, pairs": lambda: ranking(False),
    "sentence-transformers, the same with triplets": lambda: ranking(True),
    "sentence-transformers `CachedMultipleNegativesRankingLoss(mini_batch_size)`": lambda: cached(
        "encoder", "queries answers", "loss", mini_batch_size=4
    ),
    "GradCache `GradCache(models, chunk_sizes, loss_fn)(*batches)`": lambda: cached(
        "models", "batches", "loss_fn", chunk_sizes=[2, 3]
    ),
    "Inf-CL `cal_inf_loss(x, y, scale)`": lambda: (
        {"x": unit(6, 4), "y": unit(6, 4, seed=1), "scale": 10.0},
        lambda x, y, scale: both_ways(scale * x @ y.T),
    ),
}


def test_every_row_of_the_table_is_run():
    assert list(table()) == list(ROWS)


@pytest.mark.parametrize("row", ROWS)
def test_the_line_gives_what_the_other_library_gives(row):
    if row.startswith("open_clip") and "--accum" not in row and FOUND is None:
        pytest.skip("open_clip is installed with the newest torch only")
    given, theirs = ROWS[row]()
    given = {name: _with_gradient(value) for name, value in given.items()}
    names = {"torch": torch, "normalize": normalize} | vars(unisono.contrastive) | given
    *statements, expression = table()[row]
    for statement in statements:
        exec(statement, names)
    found = eval(expression, names)
    expected = theirs(**given)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    leaves = [x for x in given.values() if isinstance(x, torch.Tensor) and x.requires_grad]
    if leaves and isinstance(found, torch.Tensor) and found.requires_grad:
        ours, truth = (torch.autograd.grad(loss, leaves) for loss in (found, expected))
        torch.testing.assert_close(ours, truth, rtol=1e-8, atol=1e-11)


def _with_gradient(value):
    return value.requires_grad_() if isinstance(value, torch.Tensor) and value.dtype == torch.float64 else value


def test_from_three_samples_of_a_label_on_the_losses_differ():
    given, theirs = metric_learning(3, True)
    z, labels, temperature = given.values()
    ours = unisono.contrastive.supcon_loss(normalize(z, dim=1), labels, temperature)
    assert not torch.isclose(ours, theirs(z, labels, temperature), rtol=1e-3)

"""ContrastiveWarning: once for each loss, only for what is almost surely a mistake, and never in the way of the computation."""

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from unisono.collectives import MismatchError
from unisono.contrastive import (
    ContrastiveWarning,
    clip_loss,
    hints,
    ntxent_loss,
    reference,
    retrieval_metrics,
    sigmoid_loss,
    supcon_loss,
)

RAW = torch.arange(1.0, 41).reshape(8, 5).sin() * 9
UNIT = F.normalize(RAW, dim=1)
LABELS = torch.arange(8) % 4


@pytest.fixture(autouse=True)
def nothing_called_yet():
    hints._checked.clear()


def hints_of(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(warning.message) for warning in caught if warning.category is ContrastiveWarning]


MISTAKES = {
    "clip, not normalised": (lambda: clip_loss(RAW, RAW, 14.3), "clip_loss: the features are not normalised"),
    "clip, one side": (lambda: clip_loss(UNIT, RAW, 14.3), "normalize(features, dim=1)"),
    "clip, tiny features": (lambda: clip_loss(UNIT / 10, UNIT, 14.3), "lengths of about 0.1 and 1"),
    "clip, 16 bits": (lambda: clip_loss(RAW.bfloat16(), RAW.bfloat16(), 14.3), "not normalised"),
    "clip, temperature": (lambda: clip_loss(UNIT, UNIT, 0.07), "scale=0.07 looks like a temperature: all logits lie within"),
    "clip, temperature in a tensor": (lambda: clip_loss(UNIT, UNIT, torch.tensor([0.07])), "give it 1 / 0.07"),
    "sigmoid": (lambda: sigmoid_loss(RAW, RAW, 10.0, -10.0), "sigmoid_loss: the features are not normalised"),
    "sigmoid, temperature": (lambda: sigmoid_loss(UNIT, UNIT, 0.1, -10.0), "scale=0.1 looks like a temperature"),
    "ntxent": (lambda: ntxent_loss(RAW, RAW, 0.1), "ntxent_loss: the features are not normalised"),
    "ntxent, scale": (lambda: ntxent_loss(UNIT, UNIT, 10.0), "temperature=10 looks like a scale"),
    "supcon": (lambda: supcon_loss(RAW, LABELS, 0.1), "supcon_loss: the features are not normalised"),
    "supcon, scale": (lambda: supcon_loss(UNIT, LABELS, 14.3), "temperature=14.3 looks like a scale"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_likely_mistake_is_named_once(name):
    call, text = MISTAKES[name]
    (found,) = hints_of(call)
    assert text in found and "ContrastiveWarning" in found and "test_hints.py" in found, found
    assert hints_of(call) == []


def test_what_may_be_meant_is_not_named():
    log_q = torch.linspace(-15, -12, 8).unsqueeze(1)
    meant = [
        lambda: clip_loss(UNIT, UNIT, 14.3),
        lambda: clip_loss(UNIT, UNIT, 1.0),
        lambda: clip_loss(RAW, RAW, 1.0),  # dot products as they are
        lambda: clip_loss(RAW, RAW, 0.2),  # as in attention: large features, a scale that makes up for them
        lambda: clip_loss(torch.cat([UNIT, torch.ones(8, 1)], 1), torch.cat([UNIT, -log_q / 5], 1), 5.0),  # log-q correction
        lambda: sigmoid_loss(UNIT, UNIT, 10.0, -10.0),
        lambda: ntxent_loss(UNIT, UNIT, 1.0),
        lambda: supcon_loss(UNIT, LABELS, 0.5),
        lambda: retrieval_metrics(RAW, RAW),
        lambda: clip_loss(RAW * torch.nan, RAW * torch.nan, 14.3),
    ]
    for call in meant:
        hints._checked.clear()
        assert hints_of(call) == []


def test_a_temperature_of_zero_is_left_to_others():
    """On a GPU nobody has read it before. An exception here would be one on this rank alone."""
    hints.warn_of_likely_mistakes("ntxent_loss", UNIT, UNIT, torch.tensor(0.0), "temperature")


def test_no_value_is_read_after_the_first_call():
    clip_loss(UNIT, UNIT, 14.3)
    assert hints_of(lambda: clip_loss(RAW, RAW, 14.3)) == []


def test_where_values_cannot_be_read_the_first_call_is_still_to_come():
    def step(x):
        return clip_loss(x, x, 14.3)

    with FakeTensorMode(allow_non_fake_inputs=True):
        hints.warn_of_likely_mistakes("clip_loss", torch.empty(8, 5), torch.empty(8, 5), 14.3, "scale")
    torch.func.vmap(lambda x: hints.warn_of_likely_mistakes("clip_loss", x, x, 14.3, "scale") or x)(RAW.unsqueeze(0))
    warm = torch.compile(step, backend="aot_eager", fullgraph=True)
    assert hints_of(lambda: warm(RAW)) == []
    assert hints_of(lambda: clip_loss(RAW[:0], RAW[:0], 14.3)) == []
    assert len(hints_of(lambda: step(RAW))) == 1


def test_a_filter_switches_it_off_and_the_numbers_stay():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", ContrastiveWarning)
        loss = clip_loss(RAW.double(), RAW.double(), 2.0)
    torch.testing.assert_close(loss, reference.clip_loss(RAW.double(), RAW.double(), 2.0))


def only_rank_1_is_wrong():
    hints._checked.clear()
    x = (RAW if dist.get_rank() == 1 else UNIT).requires_grad_()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        clip_loss(x, x, 14.3).backward()
    assert [w.category is ContrastiveWarning for w in caught] == [True] * (dist.get_rank() == 1)
    hints._checked.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(MismatchError, match=r"rank 1.*not normalised"):
            clip_loss(x, x, 14.3)


def test_a_hint_on_one_rank_does_not_stop_the_others(ranks):
    ranks(only_rank_1_is_wrong, world_size=2)

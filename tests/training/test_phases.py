"""The phases of a step reach the profiler, or whoever listens."""

from contextlib import contextmanager

import pytest
import torch

from tests.clip.small_clip import small_batch, small_training_module
from unisono_models.clip.config import LossConfig
from unisono_models.clip.loss import backward
from unisono_models.training.phases import listen_to_phases, phase

WHOLE = ["+forward", "+loss", "-loss", "-forward", "+backward", "-backward"]
ENCODED = ["+forward", "-forward"]
IN_PARTS = ["+backward", *ENCODED * 4, "+loss", "-loss", *ENCODED * 4, "-backward"]  # two towers of two micro-batches, twice


@pytest.mark.parametrize(("micro_batch", "expected"), [(None, WHOLE), (4, IN_PARTS)], ids=["whole", "micro-batches"])
def test_phases_of_a_clip_step(micro_batch, expected):
    heard = []

    @contextmanager
    def hear(name):
        heard.append(f"+{name}")
        yield
        heard.append(f"-{name}")

    module = small_training_module(LossConfig(micro_batch=micro_batch))
    with listen_to_phases(hear):
        backward(module, module, small_batch(module, slice(0, 7)))
    assert heard == expected


def test_the_profiler_shows_phases_by_name():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile, phase("optimizer"):
        torch.ones(3).add(1)
    assert "optimizer" in {event.key for event in profile.key_averages()}

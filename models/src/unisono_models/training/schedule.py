"""What happens when: functions of the step alone, so that a restarted run does the same."""

from __future__ import annotations

import math


def learning_rate_factor(step: int, steps: int, *, warmup: float = 0.0, final: float = 0.0) -> float:
    """The part of the learning rate that `step` of `steps` has: up in a line, down in a cosine.

    warmup: part of the steps in which it rises. final: what is left at the end.

    Example:
        >>> [round(learning_rate_factor(step, 4), 2) for step in range(4)]
        [1.0, 0.85, 0.5, 0.15]
    """
    rising = warmup * steps
    if step < rising:
        return (step + 1) / (rising + 1)
    done = (step - rising) / max(1.0, steps - rising)
    return final + (1 - final) * (1 + math.cos(math.pi * done)) / 2


def is_due(step: int, every: int) -> bool:
    """Whether `step` steps are a multiple of `every`. 0: never.

    Example:
        >>> is_due(20, 10), is_due(21, 10), is_due(20, 0)
        (True, False, False)
    """
    return every > 0 and step % every == 0

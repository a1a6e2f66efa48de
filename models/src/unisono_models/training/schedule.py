"""Schedules. They depend on the step only, so a run that continues does the same."""

import math


def learning_rate_factor(step: int, steps: int, *, warmup: float = 0.0, final: float = 0.0) -> float:
    """Return the fraction of the learning rate at `step`: it rises linearly, then falls as a cosine.

    warmup: the fraction of the steps in which it rises. final: the fraction of the learning rate at the end.

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
    """Return whether `step` is a multiple of `every`; never if `every` is 0.

    Example:
        >>> is_due(20, 10), is_due(21, 10), is_due(20, 0)
        (True, False, False)
    """
    return every > 0 and step % every == 0

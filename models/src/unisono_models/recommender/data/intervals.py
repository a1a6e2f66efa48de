"""Intervals of ratings, as RecBole's configs write them: "[0,3);(3,inf)"."""

from __future__ import annotations

import re

import torch
from torch import Tensor

_ONE = re.compile(r"\s*([\[(])\s*([^,\s]+)\s*,\s*([^,\s]+)\s*([\])])\s*")


def inside(values: Tensor, intervals: str) -> Tensor:
    """Which of the values lie in one of the intervals; a round bracket leaves the limit out.

    Example:
        >>> inside(torch.tensor([1.0, 3.0, 4.0]), "[0,3);(3,inf)")
        tensor([ True, False,  True])
    """
    found = torch.zeros_like(values, dtype=torch.bool)
    for text in intervals.split(";"):
        match = _ONE.fullmatch(text)
        try:
            low, high = (float(match[2]), float(match[3])) if match else (1.0, 0.0)
        except ValueError:
            match = None
        if match is None:
            raise ValueError(f"interval {text!r}: expected such as [0,3) or (3,inf), several with ; between")
        above = values >= low if match[1] == "[" else values > low
        below = values <= high if match[4] == "]" else values < high
        found |= above & below
    return found

"""The network of the judge."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from unisono_models.training.randomness import make_generator

FEATURES = 64
_TURNS = 4
_CHANNELS = (16, 32, 64)  # of the convolutions, the last of all further ones
_SMALLEST = 4  # pixels a side that the convolutions end at


class Judge(nn.Module):
    """Logits of pictures (n, channels, size, size) between -1 and 1: of `classes`, or else of their four quarter-turns.

    Unlabelled pictures have no classes that it could tell apart: then it tells how far a picture was turned, by 0, 90, 180 or
    270 degrees, for which it has to know what an upright one looks like. Convolutions down to 4 pixels a side, a
    hidden layer, no normalization: what it says of a picture does not depend on the others in the batch.

    Example:
        >>> judge = Judge(channels=1, size=16, classes=("cat", "dog"))
        >>> pictures = torch.zeros(3, 1, 16, 16)
        >>> judge(pictures).shape, judge.features(pictures).shape
        (torch.Size([3, 2]), torch.Size([3, 64]))
    """

    def __init__(self, *, channels: int, size: int, classes: Sequence[str] = ()) -> None:
        super().__init__()
        if channels < 1 or size < 1:
            raise ValueError(f"Judge: channels={channels}, size={size}: both must be at least 1")
        self.channels, self.size, self.classes = channels, size, tuple(classes)
        self.accuracy = math.nan
        """Part of the test pictures that it takes for what they are. NaN: not known."""
        width, halvings = _CHANNELS[0], max(0, math.ceil(math.log2(size / _SMALLEST)))
        layers: list[nn.Module] = [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
        for number in range(1, halvings + 1):
            wider = _CHANNELS[min(number, len(_CHANNELS) - 1)]
            layers += [nn.Conv2d(width, wider, 3, stride=2, padding=1), nn.ReLU()]
            width = wider
        side = -(-size // 2**halvings)
        self.body = nn.Sequential(*layers, nn.Flatten(), nn.Linear(width * side**2, FEATURES), nn.ReLU())
        self.head = nn.Linear(FEATURES, len(self.classes) or _TURNS)

    def features(self, pictures: Tensor) -> Tensor:
        """(n, 64), after the activation of the last layer but one: none is below 0."""
        found: Tensor = self.body(pictures.to(self.head.weight.dtype))
        return found

    def forward(self, pictures: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(pictures))
        return logits

    @torch.no_grad()
    def start(self, seed: int) -> None:
        """Draw the weights that training begins with: He's normal ones, as a function of `seed` and their names."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            else:
                drawn = torch.randn(parameter.shape, generator=make_generator(seed, "judge", name), dtype=torch.float64)
                parameter.copy_(drawn * math.sqrt(2 / parameter[0].numel()))

"""What a picture is to show, as a vector within a network."""

from __future__ import annotations

from torch import Tensor, nn

from unisono_models.gan.config import Condition


class ConditionEmbedding(nn.Module):
    """Labels (n,) or vectors (n, d) to (n, width); no condition to None. `size`: number of classes, or d."""

    def __init__(self, kind: Condition, size: int, width: int) -> None:
        super().__init__()
        self.kind = kind
        self.table = nn.Embedding(size, width) if kind == "class" else None
        self.linear = nn.Linear(size, width) if kind in ("vector", "text") else None

    def forward(self, condition: Tensor | None) -> Tensor | None:
        layer = self.table or self.linear
        if layer is None:
            return None
        if condition is None:
            raise ValueError(f"condition: None, but the network was made for condition={self.kind!r}")
        embedded: Tensor = layer(condition)
        return embedded

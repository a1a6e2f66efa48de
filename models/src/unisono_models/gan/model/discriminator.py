"""The discriminator: an image and a condition to a score, which is higher for real images."""

from collections.abc import Sequence

from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import leaky_relu, normalize

from unisono_models.gan.config import ModelConfig
from unisono_models.gan.model.blocks import SLOPE, ConditionEmbedding, Resample, ResidualBlock, convolution, linear
from unisono_models.gan.model.minibatch_stddev import MinibatchStddev


class Discriminator(nn.Module):
    """Images (n, channels, size, size) and their condition to scores (n,). All ranks call it together.

    The arguments of __init__ are those of the Generator.

    sizes: number of rows on every rank, for the minibatch standard deviation of the global batch.

    Example:
        >>> import torch
        >>> discriminator = Discriminator(ModelConfig(), size=16, channels=1, conditions=10)
        >>> discriminator(torch.zeros(3, 1, 16, 16), torch.tensor([7, 0, 1])).shape
        torch.Size([3])
    """

    def __init__(self, config: ModelConfig, *, size: int, channels: int, conditions: int = 0) -> None:
        super().__init__()
        self.config = config
        widths = config.discriminator
        base = config.lowest_resolution(widths, size)
        blocks = config.blocks * len(widths)
        self.pixels = convolution(channels * config.patch**2, widths[-1])
        self.stages = nn.ModuleList()
        for index in reversed(range(len(widths))):
            layers: list[nn.Module] = [ResidualBlock(widths[index], blocks=blocks) for _ in range(config.blocks)]
            layers += [Resample("down", widths[index], widths[index - 1])] if index else []
            self.stages.append(nn.Sequential(*layers))
        self.stddev = MinibatchStddev(config.stddev_group) if config.stddev_group else None
        self.last = convolution(widths[0] + (1 if self.stddev is not None else 0), widths[0])
        self.summary = nn.Conv2d(widths[0], widths[0], base, groups=widths[0], bias=False)
        self.head = linear(widths[0], config.embedding)
        self.plain = linear(config.embedding, 1)
        self.condition = ConditionEmbedding(config.condition, conditions, config.embedding)

    def forward(self, images: Tensor, condition: Tensor | None = None, *, sizes: Sequence[int] | None = None) -> Tensor:
        return self.score(self.features(images, sizes=sizes), condition)

    def features(self, images: Tensor, *, sizes: Sequence[int] | None = None) -> Tensor:
        """Return the features (n, config.embedding) that `score` takes."""
        patch = self.config.patch  # nn.PixelUnshuffle does not fold an empty batch; rearrange does
        x: Tensor = self.pixels(rearrange(images, "n c (h p) (w q) -> n (c p q) h w", p=patch, q=patch))
        for stage in self.stages:
            x = stage(x)
        if self.stddev is not None:
            x = self.stddev(x, sizes=sizes)
        x = self.summary(leaky_relu(self.last(leaky_relu(x, SLOPE)), SLOPE)).flatten(1)
        features: Tensor = self.head(x)
        return features

    def score(self, features: Tensor, condition: Tensor | None = None) -> Tensor:
        """Return scores (n,): how real an image looks, plus how well it fits its condition (Miyato and Koyama 2018)."""
        score: Tensor = self.plain(features)[:, 0]
        embedded = self.condition(condition)
        return score if embedded is None else score + (features * embedded).sum(1) / features.shape[1] ** 0.5

    def contrastive_pairs(self, features: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        """Return images and conditions as vectors of length 1, both (n, config.embedding)."""
        embedded = self.condition(condition)
        if embedded is None:
            raise ValueError("Discriminator.contrastive_pairs: the network was built for condition='none'")
        return normalize(features, dim=1), normalize(embedded, dim=1)

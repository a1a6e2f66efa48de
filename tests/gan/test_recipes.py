"""Every recipe can build its networks."""

import pytest
import torch

from unisono_models.gan.recipes import RECIPES


@pytest.mark.parametrize("name", list(RECIPES.recipes))
def test_recipes_build_their_networks(name):
    """The networks of every recipe can be built, and a batch of two goes through them."""
    from unisono_models.gan.loss import GAN

    config = RECIPES[name]
    channels = 3 if config.data.colour else 1
    with torch.device("meta"):
        gan = GAN(config.model, config.loss, size=config.data.size, channels=channels, conditions=7)
        made = gan.generator(torch.zeros(2, config.model.noise), _condition(config.model.condition))
        assert made.shape == (2, channels, config.data.size, config.data.size)
        assert gan.discriminator(made, _condition(config.model.condition), sizes=(2,)).shape == (2,)


def _condition(kind):
    return {"class": torch.zeros(2, dtype=torch.int64), "none": None}.get(kind, torch.zeros(2, 7))

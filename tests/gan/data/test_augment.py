"""Random changes of images: by whole pixels, each image for itself, and differentiable twice."""

import pytest
import torch

from unisono_models.gan.config import AugmentConfig
from unisono_models.gan.data.augment import NUMBERS, change_images, shift_images


def test_shift_repeats_edges_and_reaches_every_place():
    image = torch.arange(16.0).view(1, 1, 4, 4)
    padded = torch.nn.functional.pad(image, (1, 1, 1, 1), mode="replicate")
    found = set()
    for number in range(90):
        parts = torch.tensor([[number % 9 / 9, number // 9 / 10]])
        (shifted,) = shift_images(image, parts, limit=1)
        places = [(y, x) for y in range(3) for x in range(3) if torch.equal(shifted, padded[0, :, y : y + 4, x : x + 4])]
        assert len(places) == 1
        found.update(places)
    assert len(found) == 9
    assert shift_images(image, torch.zeros(1, 2), limit=0) is image


@pytest.mark.parametrize("config", [AugmentConfig(shift=0.3), AugmentConfig(colour=0.5), AugmentConfig(shift=0.3, colour=0.5)])
def test_changes_of_an_image_do_not_depend_on_the_others(config):
    random = torch.Generator().manual_seed(0)
    images = torch.rand(5, 3, 6, 6, generator=random, dtype=torch.float64)
    numbers = torch.rand(5, NUMBERS, generator=random, dtype=torch.float64)
    whole = change_images(images, numbers, config)
    assert whole.shape == images.shape and not torch.equal(whole, images)
    torch.testing.assert_close(
        torch.cat([change_images(images[i : i + 1], numbers[i : i + 1], config) for i in range(5)]), whole
    )
    assert change_images(images[:0], numbers[:0], config).shape == (0, 3, 6, 6)
    x = images[:2, :, :2, :2].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: change_images(x, numbers[:2], config).square(), x)
    assert torch.autograd.gradgradcheck(lambda x: change_images(x, numbers[:2], config).square(), x)

"""Augmentation: the random numbers depend on the sample alone, and each change does what its option says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from unisono_models.clip.config import AugmentConfig
from unisono_models.clip.data.augment import augment
from unisono_models.clip.recipes import DRAWINGS

STILL = AugmentConfig(
    rotate=0, zoom=(1, 1), stretch=0, shift=0, brightness=0, contrast=0, saturation=0, hue=0, gray=0, outline=0
)
STRONG = replace(DRAWINGS, flip=0.5, hue=0.5, gray=0.5)


def noise_images(count: int = 6, size: int = 16) -> Tensor:
    return torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("shares", [[6], [3, 3], [1, 5], [0, 2, 4], [1] * 6])
def test_augment_gives_a_sample_the_same_numbers_whatever_the_share(shares: list[int]) -> None:
    images, index = noise_images(), torch.tensor([40, 3, 12, 7, 100, 0])
    whole = augment(images, seed=1, epoch=2, index=index, config=STRONG)
    parts = [
        augment(a, seed=1, epoch=2, index=i, config=STRONG)
        for a, i in zip(images.split(shares), index.split(shares), strict=True)
    ]
    assert_close(torch.cat(parts), whole, rtol=0, atol=1e-6)


def test_augment_does_not_depend_on_the_order() -> None:
    images, index = noise_images(), torch.arange(6) * 11
    whole = augment(images, seed=1, epoch=2, index=index, config=STRONG)
    turned = augment(images.flip(0), seed=1, epoch=2, index=index.flip(0), config=STRONG)
    assert_close(turned.flip(0), whole, rtol=0, atol=1e-6)


def test_augment_differs_between_epochs_seeds_and_samples() -> None:
    images = noise_images(1).expand(2, -1, -1, -1)
    first = augment(images, seed=0, epoch=0, index=torch.tensor([0, 1]), config=STRONG)
    assert not torch.equal(first[0], first[1])
    for seed, epoch in ((0, 1), (1, 0)):
        assert not torch.equal(first[0], augment(images, seed=seed, epoch=epoch, index=torch.tensor([0, 1]), config=STRONG)[0])


def test_augment_without_changes_keeps_the_image() -> None:
    images = noise_images()
    assert_close(augment(images, seed=0, epoch=0, index=torch.arange(6), config=STILL), images / 255, rtol=0, atol=1e-5)


def test_augment_stays_between_black_and_white_and_leaves_its_input_alone() -> None:
    images = noise_images(64)
    before = images.clone()
    result = augment(images, seed=0, epoch=0, index=torch.arange(64), config=replace(STRONG, brightness=0.9, contrast=0.9))
    assert result.dtype == torch.float32 and result.min() >= 0 and result.max() <= 1
    assert torch.equal(images, before)


def test_augment_fills_with_the_margin() -> None:
    black = torch.zeros(4, 3, 16, 16, dtype=torch.uint8)
    result = augment(black, seed=0, epoch=0, index=torch.arange(4), config=replace(STILL, zoom=(0.5, 0.5), margin=1.0))
    assert_close(result[:, :, 0], torch.ones(4, 3, 16))
    assert_close(result[:, :, 6:10, 6:10], torch.zeros(4, 3, 4, 4))


def test_augment_mirrors() -> None:
    images = noise_images()
    result = augment(images, seed=0, epoch=0, index=torch.arange(6), config=replace(STILL, flip=1.0))
    assert_close(result, images.flip(3) / 255, rtol=0, atol=1e-5)


def test_augment_turns_by_the_angle_that_it_draws() -> None:
    # a quarter turn moves whole pixels: some angle between -90 and 90 of many samples comes near one of the ends
    bar = torch.full((1, 3, 15, 15), 255, dtype=torch.uint8)
    bar[..., 7, 7:] = 0  # points right
    many = augment(bar.expand(512, -1, -1, -1), seed=0, epoch=0, index=torch.arange(512), config=replace(STILL, rotate=90.0))
    up, down = torch.ones(3, 15, 15), torch.ones(3, 15, 15)
    up[:, :8, 7] = 0
    down[:, 7:, 7] = 0
    for target in (up, down):
        assert (many - target).abs().mean((1, 2, 3)).min() < 0.02
    assert (many[:, 0, 7, 14] - 1).abs().max() < 1.001  # and the middle stays inside


def test_augment_takes_the_colour_out() -> None:
    result = augment(noise_images(), seed=0, epoch=0, index=torch.arange(6), config=replace(STILL, gray=1.0))
    assert_close(result[:, 0], result[:, 1], rtol=0, atol=1e-5)
    assert_close(result[:, 0], result[:, 2], rtol=0, atol=1e-5)


def test_augment_hue_keeps_grey_as_it_is() -> None:
    grey = torch.full((4, 3, 8, 8), 100, dtype=torch.uint8)
    result = augment(grey, seed=0, epoch=0, index=torch.arange(4), config=replace(STILL, hue=0.5))
    assert_close(result, grey / 255, rtol=0, atol=1e-5)


def test_augment_draws_outlines_only_where_there_are_edges() -> None:
    half = torch.full((8, 3, 16, 16), 255, dtype=torch.uint8)
    half[..., 8:] = 128
    result = augment(half, seed=0, epoch=0, index=torch.arange(8), config=replace(STILL, outline=1.0))
    assert_close(result[..., :7], torch.ones(8, 3, 16, 7))
    assert (result[..., 7:9] < half[..., 7:9] / 255 - 0.1).all()


def test_augment_of_no_images() -> None:
    empty = torch.zeros(0, 3, 8, 8, dtype=torch.uint8)
    assert augment(empty, seed=0, epoch=0, index=torch.zeros(0, dtype=torch.int64), config=STRONG).shape == (0, 3, 8, 8)


def test_augment_rejects_what_is_no_batch_of_images() -> None:
    with pytest.raises(TypeError, match=r"augment: images is torch.float32 \(2, 3, 8, 8\)"):
        augment(torch.zeros(2, 3, 8, 8), seed=0, epoch=0, index=torch.arange(2), config=STRONG)
    with pytest.raises(ValueError, match=r"augment: index has shape \(3,\), must be \(2,\)"):
        augment(torch.zeros(2, 3, 8, 8, dtype=torch.uint8), seed=0, epoch=0, index=torch.arange(3), config=STRONG)


def test_crop_keeps_a_part_of_the_image_without_a_border() -> None:
    """A ramp shows which part: all of it lies within the image, and its area within the limits."""
    ramp = torch.arange(64, dtype=torch.uint8).mul(4).expand(200, 1, 64, 64)
    images = torch.cat([ramp, ramp.mT, ramp], 1)
    config = replace(STILL, crop=(0.25, 0.64), stretch=0.3, margin=1.0)
    result = augment(images, seed=0, epoch=0, index=torch.arange(200), config=config)
    inner = result[:, :2, 1:-1, 1:-1].flatten(2)
    width, height = ((inner.amax(2) - inner.amin(2)) * 255 / 4 / 61).T  # the part of the ramp that is seen
    area = width * height
    assert 0.23 < area.min() < 0.3 and 0.55 < area.max() < 0.68 and result.max() < 0.995
    assert (width / height).max() > 1.1 and (width / height).min() < 0.9

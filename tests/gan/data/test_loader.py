"""The batches of all ranks are slices of one global batch, to the bit."""

import pytest
import torch

from unisono_models.gan.config import AugmentConfig
from unisono_models.gan.data.images import ImageDataset
from unisono_models.gan.data.loader import BatchLoader
from unisono_models.training.distributed.launch import Ranks
from unisono_models.training.sampler import StepSampler

CPU = torch.device("cpu")


def make_images(rows=11):
    random = torch.Generator().manual_seed(0)
    return ImageDataset(
        torch.randint(256, (rows, 1, 8, 8), generator=random, dtype=torch.uint8),
        torch.arange(rows) % 4,
        tuple("abcd"),
        torch.randn(4, 3, generator=random)[torch.arange(rows) % 4],
    )


def make_batches(kind, rank=0, size=1, images=None, augment=None):
    images = images or make_images()
    ranks = Ranks(rank, size, rank, CPU)
    sampler = StepSampler(len(images), 5, 3)
    return BatchLoader(images, kind, sampler, 37, 3, ranks, torch.float64, augment or AugmentConfig())


@pytest.mark.parametrize("kind", ["class", "vector", "none"])
@pytest.mark.parametrize("size", [2, 3, 7])
def test_batches_of_ranks_are_slices_of_the_global_batch(kind, size):
    for step in (0, 2, 3):  # step 2 has the one sample that is left of the epoch
        augment = AugmentConfig(mirror=0.5, shift=0.1) if kind == "none" else None
        whole = make_batches(kind, augment=augment).at(step)
        shares = [make_batches(kind, rank, size, augment=augment).at(step) for rank in range(size)]
        assert whole.sizes == ((1,) if step == 2 else (5,))
        assert {share.sizes for share in shares} == {tuple(len(share.images) for share in shares)}
        assert {share.shift for share in shares} == {whole.shift}
        for name in ("images", "condition", "ids", "noise", "real_changes", "fake_changes"):
            pieces = [getattr(share, name) for share in shares]
            assert torch.equal(torch.cat(pieces), getattr(whole, name)) if getattr(whole, name) is not None else not any(pieces)


def test_steps_differ_and_conditions_belong_to_the_images():
    images = make_images()
    batches = make_batches("vector")
    for step in range(6):
        batch, samples = batches.at(step), StepSampler(11, 5, 3).at(step)
        assert torch.equal(batch.images, images.floats(samples, dtype=torch.float64))
        assert torch.equal(batch.condition, images.vectors[samples].double())
        assert torch.equal(batch.ids[:, None] == batch.ids, images.labels[samples][:, None] == images.labels[samples])
        assert 1 <= batch.shift < max(2, len(samples))
    assert not torch.equal(batches.at(0).noise, batches.at(1).noise)
    assert len({batches.at(step).shift for step in range(0, 12, 3)}) > 1


@pytest.mark.parametrize(("kind", "lacks"), [("class", "labels"), ("vector", "vectors"), ("text", "vectors")])
def test_rejects_images_without_the_condition(kind, lacks):
    with pytest.raises(ValueError, match=f"kind='{kind}', but the images have no {lacks}"):
        make_batches(kind, images=ImageDataset(make_images().pixels)).at(0)


def test_half_of_the_images_are_mirrored_and_others_in_the_next_epoch():
    images = make_images(200)
    loader = BatchLoader(
        images, "none", StepSampler(200, 200, 3), 4, 3, Ranks(0, 1, 0, CPU), torch.float32, AugmentConfig(mirror=0.5)
    )
    mirrored = []
    for step in range(2):
        order = StepSampler(200, 200, 3).at(step)
        plain, seen = images.floats(order), loader.at(step).images
        flags = torch.tensor([torch.equal(a.flip(2), b) for a, b in zip(plain, seen, strict=True)])
        assert torch.equal(seen[~flags], plain[~flags])
        mirrored.append(flags[order.argsort()])
    assert all(60 < int(flags.sum()) < 140 for flags in mirrored) and not torch.equal(*mirrored)
    assert loader.at(0).real_changes is None

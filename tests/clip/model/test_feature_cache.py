"""Cached features of frozen towers: they are those of the towers, with the same bits on any number of ranks."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.clip.random_pairs import RandomPairs
from tests.clip.small_clip import CAPTIONS, small_config, small_tokenizer
from unisono_models.clip.config import AugmentConfig, ImageConfig
from unisono_models.clip.data.augment import augment
from unisono_models.clip.data.pairs import SubsetPairs
from unisono_models.clip.model import Clip
from unisono_models.clip.model.feature_cache import ROWS, CaptionFeatures, ImageFeatures
from unisono_models.training.distributed.launch import Ranks, start_ranks
from unisono_models.training.distributed.object_collectives import RanksError
from unisono_models.training.distributed.watchdog import Watchdog

ALONE = Ranks(0, 1, 0, torch.device("cpu"))
VIEWS = 3
AUGMENT = AugmentConfig(rotate=40)


def features_of(clip, known, ranks=ALONE):
    """The features of captions, the last third of which is only tested, or of the images of pairs."""
    watchdog = Watchdog(ranks, timeout=60)
    if isinstance(known, RandomPairs):
        return ImageFeatures(clip, known, AUGMENT, 7, ranks, watchdog)
    return CaptionFeatures(clip, known[: 2 * len(known) // 3], known[2 * len(known) // 3 :], ranks, watchdog)


def frozen_clip(dtype=torch.float32):
    torch.manual_seed(0)
    image = ImageConfig("test_convnext", {"patch_size": 2, "drop_path_rate": 0.3}, size=32, frozen=True, views=VIEWS)
    return Clip(replace(small_config(frozen=True), image=image), small_tokenizer()).to(dtype).train()


def tables(captions, pairs):
    """All tensors that computing the features leaves behind."""
    clip = frozen_clip()
    with start_ranks() as ranks:
        text, images = features_of(clip, captions, ranks), features_of(clip, pairs, ranks)
    layers = {"text": clip.text.standardize, "image": clip.image.standardize}
    fitted = {f"{name}.{key}": value for name, layer in layers.items() for key, value in layer.state_dict().items()}
    return {"text": text.table, "image": images.table, "keys": images.keys} | fitted


@pytest.mark.parametrize(
    ("count", "pairs"),
    [
        (3 * ROWS + 5, RandomPairs(4 * ROWS + 9, broken=(3, 70, 200))),
        (10, RandomPairs(11)),  # one part: some ranks have none
        (10, RandomPairs(4 * ROWS + 1, drawings=40)),  # drawings come several times, one of them in a part of its own
        (10, RandomPairs(ROWS, broken=tuple(range(ROWS - 1)))),
    ],
)
def test_features_have_the_same_bits_on_any_number_of_ranks(ranks, count, pairs):
    captions = RandomPairs(count).captions(range(count))
    expected = tables(captions, pairs)
    assert len(expected["text"]) == count and len(expected["image"]) == VIEWS * (len(pairs) - len(pairs.broken))
    for world in (2, 3):
        for found in ranks(tables, captions, pairs, world_size=world):
            for name, value in expected.items():
                assert torch.equal(found[name], value), (world, name)


def test_caption_features_are_those_of_the_trunk():
    clip, count = frozen_clip(torch.float64), ROWS + 20
    captions = RandomPairs(count).captions(range(count))
    features = features_of(clip, [*captions, *captions[:9]])
    assert features.table.shape == (count, 16)  # each once
    asked = [captions[i] for i in (70, 3, 3, 0, count - 1)]
    expected = clip.text.encode(clip.tokenizer(asked))
    torch.testing.assert_close(features(asked), expected, rtol=1e-12, atol=1e-12)
    assert torch.pdist(expected[1:].unique(dim=0)).min() > 1e-3
    assert torch.equal(features(asked), features(asked[::-1]).flip(0)) and not features(asked).requires_grad
    torch.testing.assert_close(clip.text.eval()(features(asked)), clip.text(clip.tokenizer(asked)), rtol=1e-11, atol=1e-11)
    assert features([]).shape == (0, 16)


def asks_alone(captions):
    """Only the last rank has an unknown caption: it must not wait for the others."""
    clip = frozen_clip()
    with start_ranks() as ranks:
        features = features_of(clip, captions, ranks)
    if dist.get_rank() == dist.get_world_size() - 1:
        asked = [captions[0], "a town with a cat", captions[1]]
        assert torch.equal(features(asked), clip.text.encode(clip.tokenizer(asked)))
    return len(features.table)


def test_unknown_captions_are_encoded_by_the_rank_that_asks(ranks):
    assert ranks(asks_alone, CAPTIONS, world_size=3) == [len(set(CAPTIONS))] * 3


def test_image_features_are_those_of_the_trunk_view_by_view():
    clip, pairs = frozen_clip(torch.float64), RandomPairs(ROWS + 10, broken=(5,))
    features = features_of(clip, pairs)
    rows = [64, 2, 70, 2]
    batch = pairs.read(rows, 32)
    seen = []
    for epoch in range(2 * VIEWS):
        view = epoch % VIEWS
        images = batch.images.float() / 255
        if view:
            images = augment(batch.images, seed=7, epoch=view, index=batch.index, config=AUGMENT)
        seen.append(features(torch.tensor(rows), epoch))
        torch.testing.assert_close(seen[-1], clip.image.encode(images.double()), rtol=1e-12, atol=1e-12)
    assert all(torch.equal(seen[view], seen[view + VIEWS]) for view in range(VIEWS))
    assert torch.pdist(torch.stack(seen[:VIEWS]).flatten(1)).min() > 1e-2  # each epoch another view
    assert features(torch.tensor([], dtype=torch.int64), 4).shape == (0, clip.image.features)
    clip.image.eval()
    torch.testing.assert_close(clip.image(seen[0]), clip.image((batch.images / 255).double()), rtol=1e-11, atol=1e-11)


def test_images_without_features_are_not_taken_for_others():
    """An image that could not be read has no features. Those of its neighbour would be a silent mistake."""
    pairs = RandomPairs(20, broken=(5, 19))
    features = features_of(frozen_clip(), pairs)
    for index in (5, 19, 99):
        with pytest.raises(ValueError, match=rf"ImageFeatures: sample {index} has no features"):
            features(torch.tensor([4, index]), 0)


def test_standardize_is_fitted_to_the_features():
    clip, pairs = frozen_clip(torch.float64), RandomPairs(30)
    text, images = features_of(clip, CAPTIONS), features_of(clip, pairs)
    trained = text(list(set(CAPTIONS[:4])))  # not the others: nothing that is learned is to depend on the tests
    for tower, table in ((clip.text, trained), (clip.image, images.table)):
        layer, middle = tower.standardize, table.sum(0) / len(table)
        torch.testing.assert_close(layer.mean, middle, rtol=1e-12, atol=1e-12)
        deviation = ((table - middle) ** 2).mean(0).sqrt()
        torch.testing.assert_close(layer.deviation, deviation + 1e-3, rtol=1e-10, atol=1e-12)
        assert deviation.min() > 1e-4 and {"head.0.mean", "head.0.deviation"} <= tower.state_dict().keys()
        torch.testing.assert_close(layer(table).mean(0), torch.zeros_like(middle), rtol=0, atol=1e-9)


def training_batches(pairs, rows):
    """What training reads of these rows with cached features, and what it would read without them."""
    with start_ranks() as ranks:
        features = features_of(frozen_clip(), pairs, ranks)
    subset = SubsetPairs(pairs, np.arange(len(pairs))[::-1].copy())
    found = [features.without_images(each).read(rows, 32) for each in (pairs, subset)]
    return list(zip(found, [each.read(rows, 32) for each in (pairs, subset)], strict=True))


def test_training_reads_the_same_pairs_without_their_images(ranks):
    """Broken images are skipped again, on ranks that did not see them when the features were computed, too."""
    pairs, rows = RandomPairs(3 * ROWS, broken=(3, 70, 130)), [3, 5, 130, 130, 2, 121]
    for batches in [training_batches(pairs, rows), *ranks(training_batches, pairs, rows, world_size=3)]:
        for found, expected in batches:
            assert found.images.shape == (len(expected), 3, 0, 0) and 0 < len(found) < len(rows)
            assert found.captions == expected.captions and found.skipped == expected.skipped
            assert torch.equal(found.concepts, expected.concepts) and torch.equal(found.index, expected.index)


def fails_together(pairs):
    with start_ranks() as ranks, pytest.raises(RanksError, match=r"features of images: rank 1: OSError: the disk is gone"):
        features_of(frozen_clip(), pairs, ranks)


def test_what_one_rank_cannot_read_stops_all(ranks):
    ranks(fails_together, RandomPairs(3 * ROWS, failing=(ROWS,)), world_size=3)

"""Features of frozen towers that are computed beforehand: those of the towers, the same bits whoever computes them."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from tests.clip.made_pairs import MadePairs
from tests.clip.small_clip import CAPTIONS, small_config, small_tokenizer
from unisono_models.clip.config import ImageConfig
from unisono_models.clip.data.augment import AugmentConfig, augment
from unisono_models.clip.data.dataset import Source, TestSet
from unisono_models.clip.evaluate import prompts_for
from unisono_models.clip.model import Clip
from unisono_models.clip.model.feature_cache import ROWS, CaptionFeatures, PictureFeatures
from unisono_models.clip.model.feature_cache import tested_captions as captions_of_tests  # pytest would take it for a test
from unisono_models.training.distributed.launch import Ranks, start_ranks
from unisono_models.training.distributed.object_collectives import RanksError
from unisono_models.training.distributed.watchdog import Watchdog

ALONE = Ranks(0, 1, 0, torch.device("cpu"))
VIEWS = 3
AUGMENT = AugmentConfig(rotate=40)


def features_of(clip, known, ranks=ALONE):
    """Of captions, the last third of which are only tested, or of the pictures of pairs."""
    heartbeat = Watchdog(ranks, timeout=60)
    if isinstance(known, MadePairs):
        return PictureFeatures(clip, known, AUGMENT, 7, ranks, heartbeat)
    return CaptionFeatures(clip, known[: 2 * len(known) // 3], known[2 * len(known) // 3 :], ranks, heartbeat)


def frozen_clip(dtype=torch.float32):
    torch.manual_seed(0)
    image = ImageConfig("test_convnext", {"patch_size": 2, "drop_path_rate": 0.3}, size=32, frozen=True, views=VIEWS)
    return Clip(replace(small_config(frozen=True), image=image), small_tokenizer()).to(dtype).train()


def tables(captions, pairs):
    """All that features leave behind."""
    clip = frozen_clip()
    with start_ranks() as ranks:
        text, pictures = features_of(clip, captions, ranks), features_of(clip, pairs, ranks)
    layers = {"text": clip.text.standardize, "image": clip.image.standardize}
    fitted = {f"{name}.{key}": value for name, layer in layers.items() for key, value in layer.state_dict().items()}
    return {"text": text.table, "image": pictures.table, "keys": pictures.keys} | fitted


@pytest.mark.parametrize(
    ("count", "pairs"),
    [
        (3 * ROWS + 5, MadePairs(4 * ROWS + 9, broken=(3, 70, 200))),
        (10, MadePairs(11)),  # one part of captions, three of pictures: some ranks have none
        (10, MadePairs(4 * ROWS + 1, drawings=40)),  # drawings come several times, one of them in a part of its own
        (10, MadePairs(ROWS, broken=tuple(range(ROWS - 1)))),
    ],
)
def test_features_have_the_same_bits_on_any_number_of_ranks(ranks, count, pairs):
    captions = MadePairs(count).captions(range(count))
    expected = tables(captions, pairs)
    assert len(expected["text"]) == count and len(expected["image"]) == VIEWS * (len(pairs) - len(pairs.broken))
    for world in (2, 3):
        for found in ranks(tables, captions, pairs, world_size=world):
            for name, value in expected.items():
                assert torch.equal(found[name], value), (world, name)


def test_caption_features_are_those_of_the_trunk():
    clip, count = frozen_clip(torch.float64), ROWS + 20
    captions = MadePairs(count).captions(range(count))
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
    """Only the last rank meets a caption that nobody knew: it is not to wait for the others."""
    clip = frozen_clip()
    with start_ranks() as ranks:
        features = features_of(clip, captions, ranks)
    if dist.get_rank() == dist.get_world_size() - 1:
        asked = [captions[0], "a town with a cat", captions[1]]
        assert torch.equal(features(asked), clip.text.encode(clip.tokenizer(asked)))
    return len(features.table)


def test_unknown_captions_are_encoded_by_the_rank_that_asks(ranks):
    assert ranks(asks_alone, CAPTIONS, world_size=3) == [len(set(CAPTIONS))] * 3


def test_picture_features_are_those_of_the_trunk_view_by_view():
    clip, pairs = frozen_clip(torch.float64), MadePairs(ROWS + 10, broken=(5,))
    features = features_of(clip, pairs)
    rows = [64, 2, 70, 2]
    batch = pairs.read(rows, 32)
    seen = []
    for epoch in range(2 * VIEWS):
        view = epoch % VIEWS
        pictures = (
            augment(batch.images, seed=7, epoch=view, index=batch.index, config=AUGMENT) if view else batch.images.float() / 255
        )
        seen.append(features(torch.tensor(rows), epoch))
        torch.testing.assert_close(seen[-1], clip.image.encode(pictures.double()), rtol=1e-12, atol=1e-12)
    assert all(torch.equal(seen[view], seen[view + VIEWS]) for view in range(VIEWS))
    assert torch.pdist(torch.stack(seen[:VIEWS]).flatten(1)).min() > 1e-2  # each epoch another view
    assert features(torch.tensor([], dtype=torch.int64), 4).shape == (0, clip.image.features)
    clip.image.eval()
    torch.testing.assert_close(clip.image(seen[0]), clip.image((batch.images / 255).double()), rtol=1e-11, atol=1e-11)


def test_pictures_that_were_broken_are_not_taken_for_others():
    """One that is read in training, after all, has no features: those of its neighbour would be a silent mistake."""
    pairs = MadePairs(20, broken=(5, 19))
    features = features_of(frozen_clip(), pairs)
    for index in (5, 19, 99):
        with pytest.raises(ValueError, match=rf"features of pictures: sample {index} has none"):
            features(torch.tensor([4, index]), 0)


def test_standardize_is_fitted_to_the_features():
    clip, pairs = frozen_clip(torch.float64), MadePairs(30)
    text, pictures = features_of(clip, CAPTIONS), features_of(clip, pairs)
    trained = text(list(set(CAPTIONS[:4])))  # not the others: nothing that is learned is to depend on the tests
    for tower, table in ((clip.text, trained), (clip.image, pictures.table)):
        layer, middle = tower.standardize, table.sum(0) / len(table)
        torch.testing.assert_close(layer.mean, middle, rtol=1e-12, atol=1e-12)
        deviation = ((table - middle) ** 2).mean(0).sqrt()
        torch.testing.assert_close(layer.deviation, deviation + 1e-3, rtol=1e-10, atol=1e-12)
        assert deviation.min() > 1e-4 and {"head.0.mean", "head.0.deviation"} <= tower.state_dict().keys()
        torch.testing.assert_close(layer(table).mean(0), torch.zeros_like(middle), rtol=0, atol=1e-9)


def test_tested_captions_are_those_of_all_tests_and_prompts():
    tests = {"one": TestSet(MadePairs(3)), "two": TestSet(MadePairs(9, seed=1), classes=("red", "blue"))}
    source = Source(MadePairs(20), ["red heart"], True, tests)
    expected = {*MadePairs(9).captions(range(9)), *prompts_for(("red", "blue"))}
    assert set(captions_of_tests(source)) == expected and len(prompts_for(("red", "blue"))) == 8


def fails_together(pairs):
    with start_ranks() as ranks, pytest.raises(RanksError, match=r"features of pictures: rank 1: OSError: the disk is gone"):
        features_of(frozen_clip(), pairs, ranks)


def test_what_one_rank_cannot_read_stops_all(ranks):
    ranks(fails_together, MadePairs(3 * ROWS, failing=(ROWS,)), world_size=3)

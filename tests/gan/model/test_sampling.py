"""Noise, interpolations and the conditions that are shown."""

import torch

from tests.gan.small_runs import CLASSES, draw_images, make_generator
from unisono_models.gan.model.sampling import draw_conditions, generate, interpolate, select_classes


def test_inputs_move_to_the_device_of_the_generator():
    seen = []
    for condition in (torch.tensor([0, 1]), torch.zeros(2, 5, dtype=torch.float64)):
        generator = make_generator("vector" if condition.is_floating_point() else "class").to("meta")
        generator.register_forward_pre_hook(lambda _, inputs: seen.extend(inputs))
        generate(generator, condition, torch.arange(2), seed=0)
    assert {x.device.type for x in seen} == {"meta"}
    assert [x.dtype for x in seen] == [torch.float32, torch.int64, torch.float32, torch.float32]


def test_interpolation_is_spherical_and_includes_both_ends():
    start, end = torch.randn(2, 4, 64, dtype=torch.float64).unbind(0)
    path = interpolate(start, end, steps=5)
    torch.testing.assert_close(path[:, [0, -1]], torch.stack([start, end], 1), atol=1e-14, rtol=0)
    start, end = (torch.nn.functional.normalize(x) for x in (start, end))
    path = interpolate(start, end, steps=5)
    torch.testing.assert_close(path.norm(dim=2), torch.ones(4, 5, dtype=torch.float64))
    apart = (path[:, 1:] * path[:, :-1]).sum(2).acos()
    torch.testing.assert_close(apart, apart[:, :1].expand(-1, 4))
    torch.testing.assert_close(interpolate(start, start, steps=3), start[:, None].expand(-1, 3, -1))


def test_conditions_have_their_names():
    images = draw_images()
    assert select_classes(("1", "0"), ["1", "0"]).condition.tolist() == [0, 1]  # a name comes before a number
    some = draw_conditions(images, kind="class", seed=3, count=2)
    assert some.names == tuple(CLASSES[label] for label in some.condition.tolist()) and some.count == 2
    texts = draw_conditions(images, kind="text", seed=3)
    assert len(set(texts.names)) == len(texts.names) == texts.count == 7
    for name, vector in zip(texts.names, texts.condition, strict=True):
        assert any(c == name and torch.equal(v, vector) for c, v in zip(images.captions, images.vectors, strict=True))
    assert (
        draw_conditions(images, kind="text", seed=3).names == texts.names != draw_conditions(images, kind="text", seed=4).names
    )

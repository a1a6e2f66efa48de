"""Pictures from a trained generator, each a function of the seed and its number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unisono_models.gan.config import Condition
from unisono_models.gan.data.images import Images
from unisono_models.gan.data.loader import condition_of
from unisono_models.gan.model.generator import Generator
from unisono_models.training.randomness import normal, uniform


@torch.no_grad()
def generate(generator: Generator, condition: Tensor | None, numbers: Tensor, *, seed: int, stream: str = "samples") -> Tensor:
    """Pictures (n, channels, size, size) between -1 and 1. Noise belongs to `numbers` (n,), whoever makes them.

    Example:
        generate(average, torch.tensor([7, 7, 7]), torch.arange(3), seed=0)    # three sevens
    """
    noise = draw_noise(generator, numbers, seed=seed, stream=stream)
    pictures: Tensor = generator(noise, fit_condition(generator, condition))
    return pictures


def draw_noise(generator: Generator, numbers: Tensor, *, seed: int, stream: str = "samples", scale: float = 1.0) -> Tensor:
    """(n, noise), a function of the seed, the stream and `numbers` (n,), times `scale`, in the generator's dtype and place."""
    parameter = next(generator.parameters())
    noise = normal(seed, stream, 0, numbers.to(parameter.device), (generator.config.noise,))
    return noise.to(parameter.dtype) * scale


def fit_condition(generator: Generator, condition: Tensor | None) -> Tensor | None:
    """Labels (n,) or vectors (n, d) where the generator is, and vectors in its dtype."""
    if condition is None:
        return None
    parameter = next(generator.parameters())
    return condition.to(parameter.device, parameter.dtype if condition.is_floating_point() else condition.dtype)


def generate_for_evaluation(generator: Generator, images: Images, numbers: Tensor, places: Tensor, *, seed: int) -> Tensor:
    """For evaluation: pictures under the conditions of `images` at `places`."""
    parameter = next(generator.parameters())
    kind = generator.config.condition
    condition = condition_of(images, places, kind=kind, device=parameter.device, dtype=parameter.dtype)
    return generate(generator, condition, numbers, seed=seed, stream="evaluation")


ROWS, COLUMNS = 10, 10
_TILE = 256  # pictures at a time


@dataclass(frozen=True, eq=False)
class Shown:
    """Conditions to make pictures of. `count` of them, also where there is nothing to tell them apart."""

    condition: Tensor | None
    """(count,) labels, (count, d) vectors, or None."""
    names: tuple[str, ...]
    """What to call each; () if they have no names."""
    count: int


def show_classes(classes: Sequence[str], labels: Sequence[str] = ()) -> Shown:
    """The classes that `labels` name, in that order, or all: a label is a class's name, or else its number.

    Raises: ValueError that lists the classes if a label is none.

    Example:
        >>> show_classes(("cat", "dog"), ["dog", "0", "dog"]).condition
        tensor([1, 0, 1])
    """
    places = {str(number): number for number in range(len(classes))} | {name: place for place, name in enumerate(classes)}
    for label in labels:
        if label not in places:
            known = ", ".join(classes[:50]) + (", …" if len(classes) > 50 else "")
            raise ValueError(
                f"label {label!r} is no class; the classes are {known} (or their numbers, 0 to {len(classes) - 1})"
            )
    chosen = [places[label] for label in labels] or list(range(len(classes)))
    return Shown(torch.tensor(chosen), tuple(classes[place] for place in chosen), len(chosen))


def show_some(images: Images, *, kind: Condition, seed: int, count: int = ROWS) -> Shown:
    """At most `count` conditions of `images`, always the same ones for a seed.

    Classes in their order if they are few, and else some of them; pictures' vectors with their captions, no caption twice.
    """
    if kind == "none":
        return Shown(None, (), count)
    if kind == "class":
        some = _draw(len(images.classes), seed)[:count].sort().values.tolist()
        return show_classes(images.classes, [images.classes[place] for place in some])
    order = _draw(len(images), seed).tolist()
    if images.captions:
        order = (
            list({images.captions[place]: place for place in reversed(order) if images.captions[place]}.values())[::-1] or order
        )
    places = torch.tensor(order[:count])
    condition = condition_of(images, places, kind=kind, device=images.pixels.device)
    names = tuple(images.captions[place] for place in places.tolist()) if images.captions else ()
    return Shown(condition, names, len(places))


def find_real(images: Images, shown: Shown, *, kind: Condition, columns: int = COLUMNS) -> tuple[Tensor, tuple[str, ...]]:
    """Places of real pictures to put beside what is shown, and the names of their rows.

    A row for each class that is shown and that `images` has; without classes some pictures, from everywhere, and no names.
    """
    if kind != "class" or images.labels is None or shown.condition is None:
        return torch.linspace(0, len(images) - 1, min(len(images), shown.count * columns)).long(), ()
    rows, names = [torch.empty(0, dtype=torch.int64)], []
    for label, name in zip(shown.condition.tolist(), shown.names, strict=True):
        members = (images.labels == label).nonzero().squeeze(1)
        if len(members):
            rows.append(members[torch.arange(columns) % len(members)])
            names.append(name)
    return torch.cat(rows), tuple(names)


def interpolate(start: Tensor, end: Tensor, *, steps: int) -> Tensor:
    """(n, steps, d): from `start` (n, d) to `end`, which are the first and the last, on the arc between them.

    On a straight line noise would become shorter in the middle than any that the generator has seen.

    Example:
        >>> interpolate(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]]), steps=3)[0, 1]
        tensor([0.7071, 0.7071])
    """
    cosine = torch.nn.functional.cosine_similarity(start, end, dim=1).clamp(-1, 1)
    angle = cosine.acos().clamp(min=1e-4)[:, None, None]  # of what is the same: a straight line, as good as
    part = torch.linspace(0, 1, steps, dtype=start.dtype, device=start.device)[None, :, None]
    weights = torch.sin((1 - part) * angle), torch.sin(part * angle)
    return (weights[0] * start[:, None] + weights[1] * end[:, None]) / torch.sin(angle)


@torch.no_grad()
def make_pictures(generator: Generator, noise: Tensor, condition: Tensor | None) -> Tensor:
    """(n, channels, size, size) on the CPU, for noise (n, d) and a condition for each or None."""
    condition = fit_condition(generator, condition)
    tiles = zip(noise.split(_TILE), [None] * len(noise) if condition is None else condition.split(_TILE), strict=False)
    return torch.cat([generator(some, such).cpu() for some, such in tiles])


def make_rows(generator: Generator, shown: Shown, *, seed: int, columns: int = COLUMNS) -> Tensor:
    """A row for each condition, of the same noise in each column; without conditions, other noise in each place."""
    if shown.condition is None:
        noise = draw_noise(generator, torch.arange(shown.count * columns), seed=seed)
        return make_pictures(generator, noise, None)
    noise = draw_noise(generator, torch.arange(columns), seed=seed).repeat(shown.count, 1)
    return make_pictures(generator, noise, shown.condition.repeat_interleave(columns, 0))


def make_paths(generator: Generator, shown: Shown, *, seed: int, columns: int = COLUMNS, scale: float = 1.0) -> Tensor:
    """A row for each condition, from one noise to another in `columns` steps."""
    numbers = torch.arange(2 * shown.count)
    start, end = draw_noise(generator, numbers, seed=seed, scale=scale).view(shown.count, 2, -1).unbind(1)
    noise = interpolate(start, end, steps=columns).flatten(0, 1)
    condition = None if shown.condition is None else shown.condition.repeat_interleave(columns, 0)
    return make_pictures(generator, noise, condition)


def _draw(count: int, seed: int) -> Tensor:
    return uniform(seed, "shown", 0, torch.arange(count)).argsort(stable=True)

"""Generate images with a trained generator: which conditions to show, and images in rows and along interpolations.

Noise is a function of the seed, a stream name and the number of the image: the same on every rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unisono_models.gan.config import Condition
from unisono_models.gan.data.images import ImageDataset
from unisono_models.gan.model.generator import Generator
from unisono_models.training.errors import UserError
from unisono_models.training.randomness import normal, uniform

ROWS = 10
COLUMNS = 10
_IMAGES_PER_FORWARD = 256


@torch.no_grad()
def generate(generator: Generator, condition: Tensor | None, numbers: Tensor, *, seed: int, stream: str = "samples") -> Tensor:
    """Generate images (n, channels, size, size) in [-1, 1]. Image i gets the noise of numbers[i]; `numbers` is (n,).

    Example:
        generate(average, torch.tensor([7, 7, 7]), torch.arange(3), seed=0)    # three sevens
    """
    noise = draw_noise(generator, numbers, seed=seed, stream=stream)
    images: Tensor = generator(noise, _move_condition(generator, condition))
    return images


def generate_for_evaluation(
    generator: Generator, dataset: ImageDataset, numbers: Tensor, indices: Tensor, *, seed: int
) -> Tensor:
    """Generate images for an Evaluator, with the conditions of the images of `dataset` at `indices`."""
    parameter = next(generator.parameters())
    kind = generator.config.condition
    condition = dataset.condition(indices, kind=kind, device=parameter.device, dtype=parameter.dtype)
    return generate(generator, condition, numbers, seed=seed, stream="evaluation")


@torch.no_grad()
def generate_from_noise(generator: Generator, noise: Tensor, condition: Tensor | None) -> Tensor:
    """Generate images (n, channels, size, size) on the CPU from noise (n, d) and a condition for each row, or None."""
    condition = _move_condition(generator, condition)
    chunks = noise.split(_IMAGES_PER_FORWARD)
    conditions = [None] * len(chunks) if condition is None else condition.split(_IMAGES_PER_FORWARD)
    return torch.cat([generator(chunk, given).cpu() for chunk, given in zip(chunks, conditions, strict=True)])


def draw_noise(generator: Generator, numbers: Tensor, *, seed: int, stream: str = "samples", scale: float = 1.0) -> Tensor:
    """Draw noise (n, d) times `scale` for `numbers` (n,), in the dtype and on the device of the generator."""
    parameter = next(generator.parameters())
    noise = normal(seed, stream, 0, numbers.to(parameter.device), (generator.config.noise,))
    return noise.to(parameter.dtype) * scale


def _move_condition(generator: Generator, condition: Tensor | None) -> Tensor | None:
    """Move labels (n,) or vectors (n, d) to the device of the generator, and vectors to its dtype."""
    if condition is None:
        return None
    parameter = next(generator.parameters())
    return condition.to(parameter.device, parameter.dtype if condition.is_floating_point() else condition.dtype)


@dataclass(frozen=True, eq=False)
class SampleConditions:
    """The conditions to generate images for, with their names."""

    condition: Tensor | None
    """(count,) labels, (count, d) vectors, or None for a generator without a condition."""
    names: tuple[str, ...]
    """The name of each condition; () if they have no names."""
    count: int


def select_classes(classes: Sequence[str], labels: Sequence[str] = ()) -> SampleConditions:
    """Return the conditions for `labels`, in that order; by default for all classes. A label is a class name or number.

    Raises: UserError that lists the classes if a label is unknown.

    Example:
        >>> select_classes(("cat", "dog"), ["dog", "0", "dog"]).condition
        tensor([1, 0, 1])
    """
    by_number = {str(number): number for number in range(len(classes))}
    numbers = by_number | {name: number for number, name in enumerate(classes)}
    for label in labels:
        if label not in numbers:
            known = ", ".join(classes[:50]) + (", …" if len(classes) > 50 else "")
            raise UserError(f"{label!r} is not a class; the classes are {known} (or their numbers, 0 to {len(classes) - 1})")
    chosen = [numbers[label] for label in labels] or list(range(len(classes)))
    return SampleConditions(torch.tensor(chosen), tuple(classes[number] for number in chosen), len(chosen))


def draw_conditions(images: ImageDataset, *, kind: Condition, seed: int, count: int = ROWS) -> SampleConditions:
    """Draw at most `count` conditions of `images`: classes, sorted, or vectors with different captions."""
    if kind == "none":
        return SampleConditions(None, (), count)
    if kind == "class":
        drawn = _permutation(len(images.classes), seed)[:count].sort().values.tolist()
        return select_classes(images.classes, [images.classes[number] for number in drawn])
    indices = _permutation(len(images), seed).tolist()
    if images.captions:
        one_per_caption = {images.captions[index]: index for index in reversed(indices) if images.captions[index]}
        indices = list(reversed(one_per_caption.values())) or indices
    chosen = torch.tensor(indices[:count])
    condition = images.condition(chosen, kind=kind, device=images.pixels.device)
    names = tuple(images.captions[index] for index in chosen.tolist()) if images.captions else ()
    return SampleConditions(condition, names, len(chosen))


def select_real_images(
    images: ImageDataset, conditions: SampleConditions, *, kind: Condition, columns: int = COLUMNS
) -> tuple[Tensor, tuple[str, ...]]:
    """Return the indices of real images to show beside generated ones, and the names of their rows.

    Each class in `conditions` that `images` has gets a row. Without classes the images are spread evenly, without names.
    """
    if kind != "class" or images.labels is None or conditions.condition is None:
        return torch.linspace(0, len(images) - 1, min(len(images), conditions.count * columns)).long(), ()
    rows = [torch.empty(0, dtype=torch.int64)]
    names = []
    for label, name in zip(conditions.condition.tolist(), conditions.names, strict=True):
        members = (images.labels == label).nonzero().squeeze(1)
        if len(members):
            rows.append(members[torch.arange(columns) % len(members)])
            names.append(name)
    return torch.cat(rows), tuple(names)


def generate_rows(generator: Generator, conditions: SampleConditions, *, seed: int, columns: int = COLUMNS) -> Tensor:
    """Generate a row of images for each condition. A column has the same noise in every row, unless there is no condition."""
    if conditions.condition is None:
        noise = draw_noise(generator, torch.arange(conditions.count * columns), seed=seed)
        return generate_from_noise(generator, noise, None)
    noise = draw_noise(generator, torch.arange(columns), seed=seed).repeat(conditions.count, 1)
    return generate_from_noise(generator, noise, conditions.condition.repeat_interleave(columns, 0))


def generate_interpolations(
    generator: Generator, conditions: SampleConditions, *, seed: int, columns: int = COLUMNS, scale: float = 1.0
) -> Tensor:
    """Generate a row of images for each condition, from one noise vector to another in `columns` steps."""
    numbers = torch.arange(2 * conditions.count)
    start, end = draw_noise(generator, numbers, seed=seed, scale=scale).view(conditions.count, 2, -1).unbind(1)
    noise = interpolate(start, end, steps=columns).flatten(0, 1)
    condition = None if conditions.condition is None else conditions.condition.repeat_interleave(columns, 0)
    return generate_from_noise(generator, noise, condition)


def interpolate(start: Tensor, end: Tensor, *, steps: int) -> Tensor:
    """Interpolate spherically from `start` to `end`, both (n, d) and both included: (n, steps, d).

    On a straight line the noise would be shorter in the middle than any that the generator was trained with.

    Example:
        >>> interpolate(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]]), steps=3)[0, 1]
        tensor([0.7071, 0.7071])
    """
    cosine = torch.nn.functional.cosine_similarity(start, end, dim=1).clamp(-1, 1)
    angle = cosine.acos().clamp(min=1e-4)[:, None, None]  # for equal ends: nearly a straight line
    part = torch.linspace(0, 1, steps, dtype=start.dtype, device=start.device)[None, :, None]
    weights = torch.sin((1 - part) * angle), torch.sin(part * angle)
    return (weights[0] * start[:, None] + weights[1] * end[:, None]) / torch.sin(angle)


def _permutation(count: int, seed: int) -> Tensor:
    return uniform(seed, "shown", 0, torch.arange(count)).argsort(stable=True)

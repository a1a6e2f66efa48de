"""Options whose values are out of range: errors that name the option as it is typed, and a hint for learning rates."""

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass

from unisono_models.training.errors import UserError

_LARGE_LR = 10.0  # Adam moves each weight by about this much in a step


class LearningRateWarning(UserWarning):
    """A learning rate is so large that training will hardly succeed.

    To switch it off, set PYTHONWARNINGS=ignore:--optimizer.lr, or call warnings.simplefilter("ignore", LearningRateWarning).
    """


def check_options(section: str, config: object, rule: str, **holds: bool) -> None:
    """Raise UserError for the first of the fields in `holds` that is False. `rule` says what it must be.

    Example:
        >>> from types import SimpleNamespace
        >>> check_options("run", SimpleNamespace(log_every=0), "at least 1", log_every=False)
        Traceback (most recent call last):
        unisono_models.training.errors.UserError: --run.log-every 0: must be at least 1
    """
    for name, good in holds.items():
        if not good:
            raise UserError(f"{option_name(section, name)} {getattr(config, name)}: must be {rule}")


def option_name(*path: str) -> str:
    """Return the option of a field as users type it.

    Example:
        >>> option_name("run", "log_every")
        '--run.log-every'
    """
    return "--" + ".".join(part for part in path if part).replace("_", "-")


# Fields that have the same name and meaning in all models.
_RULES: dict[str, tuple[str, Callable[[float], bool]]] = {
    "lr": ("above 0 and finite", lambda value: 0 < value < math.inf),
    "batch": ("at least 1", lambda value: value >= 1),
    **dict.fromkeys(("warmup", "final", "max_broken"), ("from 0 to 1", lambda value: 0 <= value <= 1)),
    **dict.fromkeys(("beta1", "beta2", "dropout"), ("from 0 to less than 1", lambda value: 0 <= value < 1)),
    "weight_decay": ("at least 0 and finite", lambda value: 0 <= value < math.inf),
}


def validate_config(config: object) -> None:
    """Check the fields that have the same meaning in all models, such as `lr` and `batch`, in all sections of `config`.

    Raises: UserError that names the option.
    """
    for path, section, name in _common_fields(config):
        rule, holds = _RULES[name]
        check_options(path, section, rule, **{name: holds(getattr(section, name))})


def learning_rates(config: object) -> list[tuple[str, float]]:
    """List the learning rates of `config`, with their options: [("--optimizer.lr", 0.001)]."""
    fields_of = ((path, section, name) for path, section, name in _common_fields(config) if name == "lr")
    return [(option_name(path, name), getattr(section, name)) for path, section, name in fields_of]


def warn_of_learning_rates(config: object) -> None:
    """Warn, by LearningRateWarning, of each learning rate of `config` that is above 10."""
    for option, value in learning_rates(config):
        if value > _LARGE_LR:
            text = f"{option} {value:g} is very large: most trainings need one below 1"
            warnings.warn(text, LearningRateWarning, stacklevel=2)


def _common_fields(config: object, *path: str) -> Iterator[tuple[str, object, str]]:
    """Iterate over the fields in _RULES, as the dotted name of the section, the section, and the name of the field."""
    assert is_dataclass(config)
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            yield from _common_fields(value, *path, field.name)
        elif field.name in _RULES and isinstance(value, int | float):
            yield ".".join(path), config, field.name

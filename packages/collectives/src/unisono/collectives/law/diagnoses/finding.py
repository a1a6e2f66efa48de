"""Finding: why a case deviates."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from unisono.collectives.law.comparison import Case, Comparison


@dataclass
class Finding:
    """Why a case deviates, and what mends it."""

    cause: str  # "local_mean"
    what: str
    fix: str
    where: str = ""  # a line of the user's code, a module or a parameter
    cases: list[Case] = field(default_factory=list)


Diagnosis: TypeAlias = Callable[[Comparison], Finding | None]


def worst_parameter(c: Comparison) -> str:
    """Return the parameter whose gradient deviates most."""
    found = c.gradient_deviations(c.first_step)
    return f"parameter {max(found, key=lambda name: found[name])}" if found else ""

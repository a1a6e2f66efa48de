"""Diagnoses: from a deviation to its cause in words. Each function knows one cause; the first that applies is reported.

tests/collectives/law/bugs.py has a training step for each of them, with a bug from a public repository.
"""

from unisono.collectives.law.comparison import Comparison
from unisono.collectives.law.diagnoses import data, failures, forward, gradients, results, resume
from unisono.collectives.law.diagnoses.finding import Diagnosis, Finding

# In the order in which they are tried: causes before their consequences.
DIAGNOSES: list[Diagnosis] = [
    *failures.DIAGNOSES,
    *resume.DIAGNOSES,
    *data.DIAGNOSES,
    *forward.DIAGNOSES,
    *gradients.DIAGNOSES,
    *results.DIAGNOSES,
]


def diagnose(comparison: Comparison) -> Finding:
    """Return why the comparison deviates."""
    found = next(finding for function in DIAGNOSES if (finding := function(comparison)) is not None)
    found.cases.append(comparison.case)
    return found

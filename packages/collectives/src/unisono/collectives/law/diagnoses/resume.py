"""A run that was saved and loaded goes on otherwise than one that was not interrupted."""

from unisono.collectives.law.comparison import Comparison
from unisono.collectives.law.diagnoses.finding import Diagnosis, Finding


def lost_state(c: Comparison) -> Finding | None:
    """Something that the next steps need is not in the state_dicts."""
    if c.case.resumed_from is None:
        return None
    if c.case.resumed_from == c.world_size:
        lost = "something that it needs is in no state_dict: a buffer with persistent=False, an attribute of the model or the "
        lost += "optimizer, a schedule"
    else:
        lost = f"rank 0's state_dict of {c.case.resumed_from} ranks is not the whole state: other ranks have a part of it"
    return Finding(
        "lost_state",
        f"after its state_dicts are loaded, the run does not go on as one that was not interrupted; {lost}",
        "Keep state in parameters, registered buffers and optimizer.state[p]; what is divided over ranks as DTensors, or "
        "collect it before it is saved (ZeroRedundancyOptimizer.consolidate_state_dict)",
        where=_first_parameter(c),
    )


def _first_parameter(c: Comparison) -> str:
    wrong = [name for name, value in c.parameter_deviations.items() if value > c.precision.tolerance]
    return f"first parameter {wrong[0]}" if wrong else ""


DIAGNOSES: list[Diagnosis] = [lost_state]

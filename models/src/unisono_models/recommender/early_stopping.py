"""EarlyStopping: counts the evaluations since the best one."""

from collections.abc import Mapping

from unisono_models.training.distributed.object_collectives import Json


class EarlyStopping:
    """Tells when a score has not improved for `patience` evaluations in a row. A NaN is no improvement.

    Args:
        patience: 0 never stops.
        state: What an earlier start of the run has saved.

    Example:
        >>> stopping = EarlyStopping(2)
        >>> [stopping.update(score) for score in (0.5, 0.7, 0.7, 0.6)]
        [False, False, False, True]
        >>> stopping.state
        {'best': 0.7, 'since': 2}
    """

    def __init__(self, patience: int, *, state: Mapping[str, Json] | None = None) -> None:
        self.patience = patience
        self.best: float | None = state["best"] if state else None
        self.since: int = state["since"] if state else 0
        """The number of evaluations since the best one."""

    @property
    def state(self) -> dict[str, Json]:
        return {"best": self.best, "since": self.since}

    def update(self, score: float | None) -> bool:
        """Count an evaluation. Return whether to stop."""
        if score is not None and (score > self.best if self.best is not None else score == score):
            self.best, self.since = score, 0
        else:
            self.since += 1
        return 0 < self.patience <= self.since

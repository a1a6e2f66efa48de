"""Test distributed code on real ranks, fast: `run_ranks(fn, world_size=4)`.

The processes are started once and reused, so that a test costs milliseconds. A rank that raises, exits, crashes or hangs
fails the test promptly, with a report of every rank, and the next test gets new processes. No GPU, port or torchrun is
needed.
"""

from unisono.collectives.testing.gradcheck import gradcheck, gradgradcheck
from unisono.collectives.testing.pool import RankPool, RankReport, RanksFailed, close_pools, run_ranks

__all__ = ["RankPool", "RankReport", "RanksFailed", "close_pools", "gradcheck", "gradgradcheck", "run_ranks"]

"""Test distributed code on real ranks, fast: `run_ranks(fn, world_size=4)`.

The processes are started once and reused, so that a test costs milliseconds. A rank that raises, exits, crashes or hangs
fails the test promptly, with the word of every rank, and the next test gets fresh processes. Nothing here needs a GPU, a
port or torchrun.
"""

from unisono.collectives.testing.gradcheck import gradcheck, gradgradcheck
from unisono.collectives.testing.pool import RankPool, RankReport, RanksFailed, close_pools, run_ranks

__all__ = ["RankPool", "RankReport", "RanksFailed", "close_pools", "gradcheck", "gradgradcheck", "run_ranks"]

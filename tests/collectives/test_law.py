"""Every collective, at world sizes 1 to 4 and on every form of group: value, gradient, second gradient."""

import pytest

from tests.collectives.one_process import CASES, matches_one_process
from unisono.collectives.testing import run_ranks

GROUPS = ["without rank 0", "every other rank", "mesh dimension", "1-D mesh"]


@pytest.mark.parametrize("case", CASES)
def test_matches_one_process(ranks, world_size, case):
    ranks(matches_one_process, case, "world", world_size=world_size)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("group", GROUPS)
def test_matches_one_process_on_group(case, group):
    run_ranks(matches_one_process, case, group, world_size=4)

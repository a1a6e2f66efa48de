"""One process simulates a rank of 4,096: it sends the bytes of the formula, and holds the memory of a shard."""

import subprocess
import sys

SCRIPT = """
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from unisono.collectives import count_bytes
from unisono.embedding import SGD, ShardedEmbedding
W, ROWS, DIM = 4096, 10**9, 128
dist.init_process_group("fake", rank=5, world_size=W, store=FakeStore())
table = ShardedEmbedding(ROWS, DIM, plan="row", optimizer=SGD(lr=0.1), initialize=lambda rows, draw: None)
share = -(-ROWS // W)
assert tuple(table.local.shape) == (share, DIM) and table.weight.shape == (ROWS, DIM)
ids = (torch.arange(W)[:, None] * share + torch.arange(12)).flatten()  # twelve on each rank
ids = torch.cat([ids, ids, ids])  # requested once, though looked up three times
with count_bytes() as forward:
    out = table(ids)
with count_bytes() as backward:
    out.sum().backward()
print(forward.sent, forward.received, backward.sent, backward.received)
"""


def test_a_billion_rows_on_4096_ranks_send_what_the_formula_says():
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    unique, others = 12 * 4096, 4095 / 4096
    numbers, rows = 4 * unique * others, 4 * 128 * unique * others
    assert [int(x) for x in run.stdout.split()] == [numbers + rows, numbers + rows, rows, rows]

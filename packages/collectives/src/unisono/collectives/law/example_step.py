"""A training step to check: unisono-check train_step.py

Put your own model, loss and data here. This one has a bug that shows only on uneven ranks: the check names it.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

# The whole batch. Each rank gets its part of the rows; 12 rows divide by 1, 2, 3 and 4. Or a function that returns this rank's
# batches, such as a DataLoader with your own sampler.
batch = {"x": torch.randn(12, 8, generator=torch.Generator().manual_seed(0)), "y": torch.arange(12) % 3}


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return (model, optimizer). It runs on every rank, after init_process_group."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the loss; backward and optimizer.step() follow. Or define step(model, optimizer, batch) and do both yourself."""
    return F.cross_entropy(model(batch["x"]), batch["y"])
    # Right on any split:
    # return unisono.collectives.global_mean(F.cross_entropy(model(batch["x"]), batch["y"], reduction="none"))

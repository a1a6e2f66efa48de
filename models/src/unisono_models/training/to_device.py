"""to_device: batches travel to an accelerator while the CPU goes on."""

import torch
from torch import Tensor


def to_device(x: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return `x` on `device`, in `dtype` if that is given. The CPU does not wait for the copy.

    CUDA copies from pinned memory only without a wait, and a cast on the way would leave it: so the cast comes first. The
    memory may be freed at once: torch reuses pinned memory when the copies from it are done.
    """
    if device.type == "cuda" and x.device.type == "cpu":
        x = x.to(dtype or x.dtype).pin_memory()
    return x.to(device, dtype, non_blocking=True)

"""Whether all hosts see the same directory: checkpoints that each host writes to its own disk would be lost."""

import secrets
import socket
import time
from contextlib import suppress
from pathlib import Path

from unisono_models.training.distributed.launch import Ranks
from unisono_models.training.distributed.object_collectives import all_gather_object, broadcast_object, raise_together
from unisono_models.training.errors import UserError

_POLL_SECONDS = 0.2
_MOST_HOSTS = 5  # that a message lists


def check_directory_is_shared(path: Path, ranks: Ranks, *, patience: float = 15.0) -> None:
    """Check that every rank sees the run directory `path` of rank 0. All ranks call it.

    Rank 0 writes a file with a new name into it. The others look for that file for `patience` seconds, because network file
    systems show new files late.

    Raises: UserError on all ranks. It names the ranks and hosts that do not see the directory.
    """
    if ranks.world_size == 1:
        return
    probe = path / f".shared-{broadcast_object(secrets.token_hex(8))}"
    with raise_together("check_directory_is_shared"):
        if ranks.first:
            probe.touch()
    deadline = time.monotonic() + patience
    while not (seen := _exists(probe)) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    hosts: dict[str, list[int]] = {}
    for rank, host in enumerate(all_gather_object(None if seen else socket.gethostname())):
        if host is not None:
            hosts.setdefault(host, []).append(rank)
    if ranks.first:
        with suppress(OSError):
            probe.unlink()
    if hosts:
        listed = [f"rank {', '.join(map(str, blind))} on {host}" for host, blind in hosts.items()]
        more = f" and {len(listed) - _MOST_HOSTS} more hosts" if len(listed) > _MOST_HOSTS else ""
        raise UserError(
            f"the run directory {path} is not the same on all hosts: {'; '.join(listed[:_MOST_HOSTS])}{more} cannot see it. "
            "Set --run.dir to a directory on a file system that all hosts share"
        )


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # such as no permission for a folder above it
        return False

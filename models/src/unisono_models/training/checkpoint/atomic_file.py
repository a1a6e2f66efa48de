"""Files that are on the disk once the call returns, and errors of the disk in plain words."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_FULL = (errno.ENOSPC, errno.EDQUOT)
_PIECE = 1 << 20
PART = ".part"  # the ending of a file that is not whole yet


@contextmanager
def explain_os_errors(path: Path) -> Iterator[None]:
    """An OSError inside says `path`, and "disk full" where that is the reason."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise OSError(error.errno, f"disk full: {reason}" if error.errno in _FULL else reason, str(path)) from error


def check_free_space(directory: Path, needed: int) -> None:
    """Raise an OSError (ENOSPC) unless `needed` bytes are free where `directory` is."""
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise OSError(errno.ENOSPC, f"disk full: {needed:,} bytes are needed, {free:,} are free", str(directory))


def write_new_file(path: Path, data: bytes) -> list[int | str]:
    """Write a new file that survives a loss of power; returns [size, sha256]."""
    with explain_os_errors(path), open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return [len(data), hashlib.sha256(data).hexdigest()]


def atomic_write(path: Path, data: str | bytes) -> None:
    """`path` holds all of `data` or is as it was before, whenever the process or the machine dies."""
    part = path.with_name(path.name + PART)
    part.unlink(missing_ok=True)
    write_new_file(part, data.encode() if isinstance(data, str) else data)
    with explain_os_errors(path):
        part.rename(path)
        sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Names in `directory` survive a loss of power."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot, and need not
            raise
    finally:
        os.close(descriptor)


def hash_file(path: Path) -> tuple[int, str]:
    """Size and sha256 of a plain file; a symbolic link or a device is refused."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a plain file", str(path))
        digest, size = hashlib.sha256(), 0
        while piece := file.read(_PIECE):
            digest.update(piece)
            size += len(piece)
    return size, digest.hexdigest()

"""Atomic and durable file writes, and plain messages for errors of the disk."""

import errno
import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_FULL = (errno.ENOSPC, errno.EDQUOT)
_PIECE = 1 << 20
PART = ".part"  # the suffix of a file that is not complete yet


@contextmanager
def explain_os_errors(path: Path) -> Iterator[None]:
    """Raise an OSError of the block again with `path`, and with "disk full" if that is the reason. A context manager."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise OSError(error.errno, f"disk full: {reason}" if error.errno in _FULL else reason, str(path)) from error


def check_free_space(directory: Path, needed: int) -> None:
    """Raises: OSError (ENOSPC) unless `needed` bytes are free on the disk of `directory`."""
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise OSError(errno.ENOSPC, f"disk full: {needed:,} bytes are needed, {free:,} are free", str(directory))


def write_new_file(path: Path, data: bytes) -> list[int | str]:
    """Write a new file that survives a loss of power. Return [size, sha256]."""
    with explain_os_errors(path), open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return [len(data), hashlib.sha256(data).hexdigest()]


def atomic_write(path: Path, data: str | bytes) -> None:
    """Replace the content of `path`. If the process or the machine dies, `path` has the old or the new content."""
    part = path.with_name(path.name + PART)
    part.unlink(missing_ok=True)
    write_new_file(part, data.encode() if isinstance(data, str) else data)
    with explain_os_errors(path):
        part.rename(path)
        sync_directory(path.parent)


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path` to write to. It takes the place of `path`, at once, when the block ends well.

    For libraries that write files themselves. Several processes may do this at the same time: the last one's file stays.

    Example:
        with atomic_path(file) as temporary:
            save_file(tensors, temporary)
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.stem}-", suffix=PART)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o644)  # like any other file; a temporary one is for its owner alone
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def sync_directory(directory: Path) -> None:
    """Make the names in `directory` survive a loss of power."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot do it, and need not
            raise
    finally:
        os.close(descriptor)


def hash_file(path: Path) -> tuple[int, str]:
    """Return the size and the sha256 of a plain file. Raises: OSError for a symbolic link or a device."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a plain file", str(path))
        digest = hashlib.sha256()
        size = 0
        while piece := file.read(_PIECE):
            digest.update(piece)
            size += len(piece)
    return size, digest.hexdigest()

"""What Linux tells of a process: the memory it held at most, the bytes it sent."""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import struct
from contextlib import suppress
from pathlib import Path

M_MMAP_THRESHOLD = -3  # of glibc's malloc.h
BYTES_SENT, BYTES_RETRANSMITTED = 200, 208  # where they are in the kernel's struct tcp_info


def free_at_once() -> None:
    """From here on, malloc gives every freed tensor back to the system. Why: see contrastive_measures.weigh."""
    if not ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**16):
        raise RuntimeError("mallopt refuses a threshold")


def begin_peak() -> int:
    """The peak begins anew. The bytes that are resident now."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return resident_peak()


def resident_peak() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM: the peak memory is measured on Linux only")


def bytes_sent() -> int:
    """All that this process has written to its open TCP connections, by the kernel's count. Linux only."""
    total = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # what is no TCP connection, or is closed by now
            if not stat.S_ISSOCK(os.fstat(int(descriptor)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(descriptor))) as connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            sent, again = (struct.unpack_from("=Q", info, place)[0] for place in (BYTES_SENT, BYTES_RETRANSMITTED))
            total += sent - again
    return total

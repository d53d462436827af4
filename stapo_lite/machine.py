"""Cores and memory that this process may use, within the limits of its container or job (Linux,
cgroup v2)."""

import os
import platform
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

CGROUPS, OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
UNLIMITED = (OSError, ValueError, KeyError)
"""Errors from reading a limit that is not set: its file is missing, or says "max"."""


def cores() -> int:
    """Cores that the calling thread may keep busy."""
    count = len(os.sched_getaffinity(0))
    for group in _cgroups():
        with suppress(*UNLIMITED):
            quota, period = map(int, (group / "cpu.max").read_text().split())
            count = min(count, max(1, quota // period))
    return count


def host_memory() -> int:
    """Total host memory, in bytes."""
    total = psutil.virtual_memory().total
    for group in _cgroups():
        with suppress(*UNLIMITED):
            total = min(total, int((group / "memory.max").read_text()))
    return total


def host_memory_left() -> int:
    """Free host memory, in bytes."""
    free = psutil.virtual_memory().available
    for group in _cgroups():
        with suppress(*UNLIMITED):
            limit = int((group / "memory.max").read_text())
            used = int((group / "memory.current").read_text())
            lines = (group / "memory.stat").read_text().splitlines()
            cached = int(dict(map(str.split, lines))["inactive_file"])  # reclaimable
            free = min(free, limit - used + cached)
    return free


def _cgroups() -> Iterator[Path]:
    """Folders of this process's cgroup and of its ancestors."""
    with suppress(OSError):
        own = CGROUPS / OWN_CGROUP.read_text().partition("0::/")[2].strip()
        yield from (own, *own.parents)


def on_wsl() -> bool:
    """Whether this is WSL2, which can pin at most half of the memory."""
    return "microsoft" in platform.release().lower()

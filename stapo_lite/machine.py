"""Cores and memory that this process may use: a container or a job sets limits (Linux, cgroup v2)."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

CGROUPS, OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
UNLIMITED = (OSError, ValueError, KeyError)
"""What reading a limit raises where there is none: no such file, or one that says "max"."""


def cores() -> int:
    """Cores that the calling thread may keep busy."""
    count = len(os.sched_getaffinity(0))
    for group in _cgroups():
        with suppress(*UNLIMITED):
            quota, period = map(int, (group / "cpu.max").read_text("ascii").split())
            count = min(count, max(1, quota // period))
    return count


def host_memory() -> int:
    """Bytes of host memory, free or not."""
    total = psutil.virtual_memory().total
    for group in _cgroups():
        with suppress(*UNLIMITED):
            total = min(total, int((group / "memory.max").read_text("ascii")))
    return total


def host_memory_left() -> int:
    """Bytes of host memory that are free."""
    free = psutil.virtual_memory().available
    for group in _cgroups():
        with suppress(*UNLIMITED):
            limit, used = (int((group / f"memory.{name}").read_text("ascii")) for name in ("max", "current"))
            statistics = dict(line.split() for line in (group / "memory.stat").read_text("ascii").splitlines())
            free = min(free, limit - used + int(statistics["inactive_file"]))  # cached files make room
    return free


def _cgroups() -> Iterator[Path]:
    """The folder of this process's cgroup, and those of the cgroups that it is in."""
    with suppress(OSError):
        own = CGROUPS / OWN_CGROUP.read_text("utf-8").partition("0::/")[2].strip()
        yield from (own, *own.parents)

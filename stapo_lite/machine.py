"""What this process may use of its machine: in a container or a job less than all of it."""

import os
from contextlib import suppress
from pathlib import Path

import psutil

CGROUPS, OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def cores() -> int:
    """Cores that the calling thread may run on."""
    return len(os.sched_getaffinity(0))


def host_memory_left() -> int:
    """Bytes of host memory that are free; in a container or job with a limit, what is left of it (Linux, cgroup v2)."""
    free = psutil.virtual_memory().available
    with suppress(OSError):
        own = CGROUPS / OWN_CGROUP.read_text("utf-8").partition("0::/")[2].strip()
        for group in (own, *own.parents):
            with suppress(OSError, ValueError, KeyError):  # no cgroup, or one without a limit: "max"
                limit, used = (int((group / f"memory.{name}").read_text("ascii")) for name in ("max", "current"))
                statistics = dict(line.split() for line in (group / "memory.stat").read_text("ascii").splitlines())
                free = min(free, limit - used + int(statistics["inactive_file"]))  # cached files make room
    return free

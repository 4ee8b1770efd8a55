"""The cores and memory that this process may use, within the cgroup limits of its container or service.

    /proc/self/cgroup      0::/system.slice/antiphon.service      version 2: one tree of groups
                           4:memory:/docker/0a1b                  version 1: a tree for each controller

A group's limits apply to all groups inside it. In a container the mounted root may be the group itself, whatever its
path says.

**Source:** Linux kernel documentation, admin-guide/cgroup-v2 and admin-guide/cgroup-v1.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

ROOT = Path("/")
NICENESS = 5
"""Niceness added to threads that compute steps. See `stand_back`."""


def stand_back() -> None:
    """Lower the calling thread's priority below all others, among them those that pass it requests and take its tokens.

    With as many compute threads as cores, a thread that wakes up briefly would otherwise wait for one of them.
    """
    if sys.platform == "linux":  # Elsewhere niceness applies to a process, not a thread.
        # A system call filter may forbid it: the thread then keeps its priority.
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) + NICENESS)


def num_cores(root: Path = ROOT) -> int:
    """Return how many threads can run continuously: over its CPU quota, a group is throttled until the period ends."""
    cores = len(os.sched_getaffinity(0))
    for group in _groups(root, "cpu"):
        quota = _numbers(group / "cpu.max") or _numbers(group / "cpu.cfs_quota_us", group / "cpu.cfs_period_us")
        if len(quota) == 2 and quota[0] > 0:
            cores = min(cores, quota[0] // quota[1])
    return max(1, cores)


def available_bytes(root: Path = ROOT) -> int:
    """Return the memory that can be allocated without swapping."""
    available = _meminfo_bytes(root)
    for group in _groups(root, "memory"):
        for limit_file, use_file in (
            ("memory.max", "memory.current"),
            ("memory.high", "memory.current"),  # Above it processes are not killed, but slowed to a crawl.
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit_and_use = _numbers(group / limit_file, group / use_file)
            if len(limit_and_use) == 2:
                limit, used = limit_and_use
                available = min(available, max(0, limit - used + _file_bytes(group)))
    return available


def num_killed(root: Path = ROOT) -> int:
    """Return how many processes of the group the kernel has killed for lack of memory; 0 if this is not counted."""
    for group in _groups(root, "memory"):
        count_by_name = _counts(group / "memory.events") or _counts(group / "memory.oom_control")
        if "oom_kill" in count_by_name:
            return count_by_name["oom_kill"]
    return 0


def _meminfo_bytes(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def _file_bytes(group: Path) -> int:
    """Return the file pages charged to a group, which can be reclaimed as those in MemAvailable.

    Those of a checkpoint are active once it has been read twice: by a replica, and by the one that replaces it.
    """
    count_by_name = _counts(group / "memory.stat")
    names = ("inactive_file", "active_file")
    return sum(count_by_name.get(f"total_{name}", count_by_name.get(name, 0)) for name in names)


def _counts(file: Path) -> dict[str, int]:
    """Return the counts in a file with one "name count" per line; empty if the file does not exist."""
    try:
        lines = file.read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    return {name: int(count) for name, count in (line.split() for line in lines)}


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of the groups that contain this process, innermost first."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / controllers
        inside = Path(path.lstrip("/"))
        yield from (top / part for part in (inside, *inside.parents) if (top / part).is_dir())


def _numbers(*files: Path) -> tuple[int, ...]:
    """Return the numbers in the files; empty if a file does not exist or says that there is no limit."""
    try:
        return tuple(int(word) for file in files for word in file.read_text(encoding="ascii").split())
    except (OSError, ValueError):
        return ()

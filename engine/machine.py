"""What this process may use of its machine: cores and memory, less what a container or a service may not have.

    /proc/self/cgroup      0::/system.slice/antiphon.service      version 2: one tree of groups
                           4:memory:/docker/0a1b                  version 1: a tree for each controller

A group's limits hold for all inside it. In a container the root of what is mounted may be the group itself, whatever
its path says.

**Source:** the kernel's documentation, admin-guide/cgroup-v2 and admin-guide/cgroup-v1.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

ROOT = Path("/")
NICENESS = 5
"""By how much threads that compute steps stand back. See `stand_back`."""


def stand_back() -> None:
    """Let the calling thread give way to those that bring it requests and carry its tokens away, and to all others.

    Where as many threads compute as there are cores, who wakes up for a moment otherwise waits for one of them.
    """
    if sys.platform == "linux":  # Elsewhere niceness is a process's, not a thread's.
        # A filter of system calls may refuse it: then all are equal, as without it.
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) + NICENESS)


def num_cores(root: Path = ROOT) -> int:
    """Return how many threads can run all the time: who has used up a quota stands still until its period is over."""
    cores = len(os.sched_getaffinity(0))
    for group in _groups(root, "cpu"):
        quota = _numbers(group / "cpu.max") or _numbers(group / "cpu.cfs_quota_us", group / "cpu.cfs_period_us")
        if len(quota) == 2 and quota[0] > 0:
            cores = min(cores, quota[0] // quota[1])
    return max(1, cores)


def available_bytes(root: Path = ROOT) -> int:
    """Return the memory that can be taken without swapping."""
    available = _meminfo_bytes(root)
    for group in _groups(root, "memory"):
        limit_and_use = _numbers(group / "memory.max", group / "memory.current") or _numbers(
            group / "memory.limit_in_bytes", group / "memory.usage_in_bytes"
        )
        if len(limit_and_use) == 2:
            limit, used = limit_and_use
            available = min(available, max(0, limit - used + _unread_file_bytes(group)))
    return available


def num_killed(root: Path = ROOT) -> int:
    """Return how many processes the kernel has killed because a group had no memory left; 0 where nobody counts."""
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


def _unread_file_bytes(group: Path) -> int:
    """Return what counts as a group's and is given up for who needs it: pages of files, a checkpoint's say."""
    count_by_name = _counts(group / "memory.stat")
    return count_by_name.get("total_inactive_file", count_by_name.get("inactive_file", 0))


def _counts(file: Path) -> dict[str, int]:
    """Return the numbers of a file that has one to a line, behind its name; none where it is not there."""
    try:
        lines = file.read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    return {name: int(count) for name, count in (line.split() for line in lines)}


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of the groups that this process is in, the innermost first."""
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
    """Return the numbers in some files, none where a file is not there or says that there is no bound."""
    try:
        return tuple(int(word) for file in files for word in file.read_text(encoding="ascii").split())
    except (OSError, ValueError):
        return ()

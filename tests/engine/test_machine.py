"""Cores and memory of machines that are only files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.machine import available_bytes, num_cores, num_killed, stand_back

GIB = 1 << 30
NO_LIMIT = 0x7FFFFFFFFFFFF000
"""What version 1 says where there is none."""


@pytest.fixture(autouse=True)
def _sixteen_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))


def machine(root: Path, cgroup: str, **texts: str | int) -> Path:
    files = {"proc/self/cgroup": cgroup, "proc/meminfo": f"MemTotal: 9 kB\nMemAvailable: {8 * GIB // 1024} kB\n"}
    for name, text in (files | texts).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def test_without_groups_all_of_the_machine_is_there(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/")
    assert (num_cores(root), available_bytes(root)) == (16, 8 * GIB)
    (tmp_path / "proc/self/cgroup").unlink()
    assert (num_cores(root), available_bytes(root)) == (16, 8 * GIB)


@pytest.mark.parametrize(
    ("quota", "cores"), [("max 100000", 16), ("400000 100000", 4), ("150000 100000", 1), ("50000 100000", 1)]
)
def test_no_more_threads_run_than_a_quota_has_time_for(tmp_path: Path, quota: str, cores: int) -> None:
    assert num_cores(machine(tmp_path, "0::/", **{"sys/fs/cgroup/cpu.max": quota})) == cores


def test_the_limits_of_all_groups_around_hold(tmp_path: Path) -> None:
    """Of a checkpoint in the page cache only what had been read once counted as free, and a replica that began anew
    found too little."""
    outer, inner = "sys/fs/cgroup/outer.slice", "sys/fs/cgroup/outer.slice/server.service"
    files = {
        f"{outer}/cpu.max": "300000 100000",
        f"{inner}/cpu.max": "max 100000",
        f"{outer}/memory.max": "max",
        f"{outer}/memory.current": 5 * GIB,
        f"{inner}/memory.max": 4 * GIB,
        f"{inner}/memory.current": 3 * GIB,
        # A checkpoint of which a half has been read twice.
        f"{inner}/memory.stat": f"anon 7\ninactive_file {GIB}\nactive_file {GIB}",
    }
    root = machine(tmp_path, "0::/outer.slice/server.service", **files)
    assert (num_cores(root), available_bytes(root)) == (3, 3 * GIB)
    (root / f"{outer}/memory.high").write_text(str(5 * GIB + GIB // 2))
    assert available_bytes(root) == GIB // 2


def test_version_1_of_groups_is_known_and_a_container_that_is_told_of_a_path_outside(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": 200000,
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": 100000,
        "sys/fs/cgroup/memory/memory.limit_in_bytes": 2 * GIB,
        "sys/fs/cgroup/memory/memory.usage_in_bytes": GIB,
        "sys/fs/cgroup/memory/memory.stat": (
            f"inactive_file 3\ntotal_inactive_file {GIB // 4}\nactive_file 3\ntotal_active_file {GIB // 4}"
        ),
    }
    root = machine(tmp_path, "4:memory:/docker/0a\n2:cpu,cpuacct:/docker/0a\n1:cpuset:/docker/0a\n0::/", **files)
    assert (num_cores(root), available_bytes(root)) == (2, 3 * GIB // 2)
    for name, text in (("cpu,cpuacct/cpu.cfs_quota_us", -1), ("memory/memory.limit_in_bytes", NO_LIMIT)):
        (tmp_path / "sys/fs/cgroup" / name).write_text(f"{text}\n")
    assert (num_cores(root), available_bytes(root)) == (16, 8 * GIB)


@pytest.mark.parametrize(
    ("cgroup", "file"),
    [
        ("0::/a.service", "sys/fs/cgroup/a.service/memory.events"),
        ("4:memory:/docker/0a1b", "sys/fs/cgroup/memory/docker/0a1b/memory.oom_control"),
    ],
)
def test_what_the_kernel_has_killed_is_counted(tmp_path: Path, cgroup: str, file: str) -> None:
    root = machine(tmp_path, cgroup)
    assert num_killed(root) == 0
    assert num_killed(machine(tmp_path, cgroup, **{file: "oom_kill_disable 0\noom 3\noom_kill 2"})) == 2


def test_a_thread_that_may_not_stand_back_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def refuse(which: int, who: int, niceness: int) -> None:
        asked.append(niceness)
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr(os, "setpriority", refuse)
    stand_back()
    assert len(asked) == 1

"""What control groups leave this process, read from trees of files as the kernel writes them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from det_core.core._profiler._cgroup import Cgroup, cpu_quota, cpu_seconds, free_memory
from det_core.core._profiler._sensors import Cpu, Memory

V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNTS = (
    "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"
    "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
    "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n"
)


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def v2(root: Path, own: str = "/job/step", **files: str) -> Path:
    """A tree of version 2; a file's name has ``__`` for ``/`` and one ``_`` less for ``.``."""
    named = {f"sys/fs/cgroup/{k}": text for k, text in files.items()}
    fixed = {"proc/self/cgroup": f"0::{own}\n", "proc/self/mountinfo": V2_MOUNT}
    return tree(root, {**fixed, "sys/fs/cgroup/cgroup.controllers": "cpu memory\n", **named})


def test_version_2_memory_is_the_tightest_of_the_group_and_its_ancestors(tmp_path: Path) -> None:
    root = v2(
        tmp_path,
        **{
            "job/memory.max": "1000\n",
            "job/memory.current": "700\n",
            "job/memory.stat": "anon 600\ninactive_file 100\n",
            "job/step/memory.max": "max\n",
            "job/step/memory.current": "500\n",
        },
    )
    assert free_memory(Cgroup.find("memory", root)) == 400
    tree(root, {"sys/fs/cgroup/job/step/memory.max": "600\n"})
    assert free_memory(Cgroup.find("memory", root)) == 100


def test_version_2_without_limits_leaves_all(tmp_path: Path) -> None:
    root = v2(tmp_path, **{"job/step/memory.max": "max\n", "job/step/cpu.max": "max 100000\n"})
    assert free_memory(Cgroup.find("memory", root)) is None
    assert cpu_quota(Cgroup.find("cpu", root)) is None


def test_version_2_quota_is_the_tightest_and_its_use_is_that_groups(tmp_path: Path) -> None:
    root = v2(
        tmp_path,
        **{
            "job/cpu.max": "150000 100000\n",
            "job/cpu.stat": "usage_usec 2500000\nuser_usec 1\n",
            "job/step/cpu.max": "400000 100000\n",
            "job/step/cpu.stat": "usage_usec 1000000\n",
        },
    )
    group = Cgroup.find("cpu", root)
    assert cpu_quota(group) == (1.5, 1)
    assert group is not None and cpu_seconds(group, 1) == 2.5


def test_version_1_limits_are_read_beside_a_unified_mount(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/box\n3:cpu,cpuacct:/box\n1:name=systemd:/\n0::/\n",
            "proc/self/mountinfo": V1_MOUNTS,
            "sys/fs/cgroup/memory/box/memory.limit_in_bytes": "2000\n",
            "sys/fs/cgroup/memory/box/memory.usage_in_bytes": "1500\n",
            "sys/fs/cgroup/memory/box/memory.stat": "inactive_file 7\ntotal_inactive_file 300\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "99999\n",
            "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_quota_us": "50000\n",
            "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu,cpuacct/box/cpuacct.usage": "3000000000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/unified/cgroup.procs": "",
        },
    )
    assert free_memory(Cgroup.find("memory", root)) == 800
    assert cpu_quota(Cgroup.find("cpu", root)) == (0.5, 0)
    accounts = Cgroup.find("cpuacct", root)
    assert accounts is not None and cpu_seconds(accounts, 0) == 3.0


def test_a_container_without_a_namespace_of_its_own_sees_its_group_at_the_mount_point(tmp_path: Path) -> None:
    mounts = "35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/docker/abc\n",
            "proc/self/mountinfo": mounts,
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "100\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "30\n",
        },
    )
    assert free_memory(Cgroup.find("memory", root)) == 70


@pytest.mark.parametrize("group", ["0::/../../elsewhere\n", "0::/gone\n", "", "4:cpu:/\n"])
def test_groups_that_are_not_visible_limit_nothing(tmp_path: Path, group: str) -> None:
    tree(
        tmp_path,
        {"proc/self/cgroup": group, "proc/self/mountinfo": V2_MOUNT, "sys/fs/cgroup/cgroup.controllers": ""},
    )
    assert free_memory(Cgroup.find("memory", tmp_path)) is None
    assert cpu_quota(Cgroup.find("cpu", tmp_path)) is None


def test_a_machine_without_proc_has_no_groups(tmp_path: Path) -> None:
    assert Cgroup.find("memory", tmp_path) is None


def test_free_memory_is_what_both_machine_and_group_leave(tmp_path: Path) -> None:
    machine: Any = SimpleNamespace(virtual_memory=lambda: SimpleNamespace(available=250))
    files = {"job/step/memory.max": "1000\n", "job/step/memory.current": "700\n"}
    root = v2(tmp_path, **files)
    assert Memory(machine, root).read() == {"memory_free": 250}
    tree(root, {"sys/fs/cgroup/job/step/memory.current": "900\n"})
    assert Memory(machine, root).read() == {"memory_free": 100}


def test_utilisation_is_relative_to_a_quota_below_the_processors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    now = [100.0]
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    root = v2(tmp_path, **{"job/step/cpu.max": "200000 100000\n", "job/step/cpu.stat": "usage_usec 5000000\n"})
    sensor = Cpu(None, root)
    monkeypatch.setattr(sensor._rates, "_clock", lambda: now[0])
    assert sensor.read() == {}
    now[0] += 10
    tree(root, {"sys/fs/cgroup/job/step/cpu.stat": "usage_usec 20000000\n"})
    assert sensor.read() == {"cpu_util_simple": 75.0}


def test_utilisation_is_that_of_the_processors_this_process_may_run_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import os

    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 3})
    readings = iter([[(0, 0), (10, 10), (0, 0), (5, 5)], [(90, 0), (14, 16), (90, 0), (7, 13)]])

    class Times(tuple[float, float]):
        user = property(lambda self: self[0])
        idle = property(lambda self: self[1])

    machine: Any = SimpleNamespace(cpu_times=lambda percpu: [Times(t) for t in next(readings)])
    sensor = Cpu(machine, Path("/no/such/root"))
    assert sensor.read() == {}
    assert sensor.read() == {"cpu_util_simple": 30.0}

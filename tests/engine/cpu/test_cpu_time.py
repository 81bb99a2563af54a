"""CPU time and quotas from files of Linux, which the test writes, except those of its threads."""

import math
import os
import threading
import time
from pathlib import Path

import pytest

from engine.cpu import cpu_time
from engine.cpu.cpu_time import (
    ComputeDelay,
    CpuQuota,
    cores_for_a_while,
    other_python_threads,
    run_delay_s,
    unused_s,
    usable_cores,
)

V1_MOUNT = "33 31 0:29 {root} {mount} rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct\n"
V2_MOUNT = "30 23 0:26 {root} {mount} rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
OTHER_MOUNT = "40 31 0:30 / {mount} rw - cgroup cgroup rw,memory\n"


def proc_of(tmp_path: Path, cgroup: str, mountinfo: str) -> Path:
    """A /proc/self."""
    proc = tmp_path / "proc"
    proc.mkdir()
    (proc / "cgroup").write_text(cgroup)
    (proc / "mountinfo").write_text(mountinfo)
    return proc


def group(path: Path, **files: str) -> Path:
    """A cgroup's directory; `__` in a file's name is a dot."""
    path.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (path / name.replace("__", ".")).write_text(text)
    return path


def test_the_lowest_quota_from_the_own_cgroup_up_counts_in_version_2(tmp_path: Path) -> None:
    mount = group(tmp_path / "unified")
    group(mount / "pod", cpu__max="150000 100000\n", cpu__stat="usage_usec 9\nthrottled_usec 2000000\n")
    group(mount / "pod/box", cpu__max="max 100000\n", cpu__stat="usage_usec 9\nthrottled_usec 500000\n")
    quota = CpuQuota(proc_of(tmp_path, "0::/pod/box\n", V2_MOUNT.format(root="/", mount=mount)))
    assert quota.cores() == 1.5
    assert quota.throttled_s() == 2.5


def test_a_quota_of_version_1_counts_where_the_cpu_controller_is_mounted(tmp_path: Path) -> None:
    mount, other = group(tmp_path / "cpu"), group(tmp_path / "memory")
    box = {"cpu__cfs_quota_us": "50000\n", "cpu__cfs_period_us": "100000\n"}
    group(mount / "box", **box, cpu__stat="nr_throttled 3\nthrottled_time 1500000000\n")
    group(other / "box", cpu__cfs_quota_us="1000\n", cpu__cfs_period_us="100000\n")
    mounts = V1_MOUNT.format(root="/", mount=mount) + OTHER_MOUNT.format(mount=other)
    quota = CpuQuota(proc_of(tmp_path, "4:memory:/box\n3:cpu,cpuacct:/box\n0::/\n", mounts))
    assert quota.cores() == 0.5
    assert quota.throttled_s() == 1.5


@pytest.mark.parametrize("root", ["/", "/docker/0123"])
def test_a_container_that_is_told_a_path_of_its_host_finds_its_own_quota(tmp_path: Path, root: str) -> None:
    mount = group(tmp_path / "cpu", cpu__cfs_quota_us="200000\n", cpu__cfs_period_us="100000\n")
    proc = proc_of(tmp_path, "3:cpu,cpuacct:/docker/0123\n", V1_MOUNT.format(root=root, mount=mount))
    assert CpuQuota(proc).cores() == 2


def test_without_a_quota_or_without_cgroups_there_is_no_bound(tmp_path: Path) -> None:
    mount = group(tmp_path / "cpu", cpu__cfs_quota_us="-1\n", cpu__cfs_period_us="100000\n")
    quota = CpuQuota(proc_of(tmp_path, "3:cpu:/\n", V1_MOUNT.format(root="/", mount=mount)))
    assert quota.cores() == math.inf
    nothing = CpuQuota(tmp_path / "nothing")
    assert nothing.cores() == math.inf
    assert nothing.throttled_s() == 0


@pytest.mark.parametrize(
    ("micros", "cores", "for_a_while"), [(50_000, 1, 1), (200_000, 2, 2), (250_000, 2, 3), (950_000, 8, 8)]
)
def test_usable_are_the_cores_of_the_affinity_or_the_whole_ones_of_the_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, micros: int, cores: int, for_a_while: int
) -> None:
    """A container with a quota of 1.5 of 64 cores computed with 64 threads."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    mount = group(tmp_path / "unified", cpu__max=f"{micros} 100000\n")
    quota = CpuQuota(proc_of(tmp_path, "0::/\n", V2_MOUNT.format(root="/", mount=mount)))
    assert usable_cores(quota) == cores
    assert cores_for_a_while(quota) == for_a_while


def test_waits_are_those_of_all_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for thread, waited_ns in {1: 500_000_000, 2: 1_500_000_000, 3: 250_000_000}.items():
        group(tmp_path / str(thread), schedstat=f"7 {waited_ns} 3\n")
    (tmp_path / "4").mkdir()  # it ended between two reads
    monkeypatch.setattr(cpu_time, "TASKS", str(tmp_path))
    assert run_delay_s() == 2.25
    monkeypatch.setattr(cpu_time, "TASKS", str(tmp_path / "nothing"))
    assert run_delay_s() == 0


def test_only_threads_that_compute_count_and_new_ones_from_their_first_look_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading forty threads twice a step took a twentieth of it: each read waits for Python's lock."""
    now_s = [0.0]
    read: list[int] = []
    inner = cpu_time._times_of

    def told(thread: int) -> tuple[int, int] | None:
        read.append(thread)
        return inner(thread)

    def times(**waited_ms: tuple[int, int]) -> None:
        for name, (ran, waited) in waited_ms.items():
            group(tmp_path / name[1:], schedstat=f"{ran}000000 {waited}000000 3\n")

    monkeypatch.setattr(cpu_time, "TASKS", str(tmp_path))
    monkeypatch.setattr(cpu_time, "_times_of", told)
    delay = ComputeDelay(lambda: now_s[0])
    times(t1=(100, 40), t2=(5, 70))
    assert delay() == 0
    times(t1=(600, 140), t2=(6, 70), t3=(300, 900))
    now_s[0] = 1.0
    assert delay() == pytest.approx(0.1)  # and it looks at all threads
    read.clear()
    times(t1=(900, 240), t2=(6, 90), t3=(700, 1000))
    assert delay() == pytest.approx(0.3)
    assert sorted(read) == [1, 3]
    (tmp_path / "1" / "schedstat").unlink()
    assert delay() == pytest.approx(0.3)


def test_unused_is_what_was_idle_of_the_own_cores_and_what_this_process_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat = tmp_path / "stat"
    stat.write_text(
        "cpu  9 9 9 9000 900 0 0 0 0 0\ncpu0 9 9 9 200 50 0 0 0 0 0\ncpu1 9 9 9 7000 0 0 0 0 0 0\n"
        "cpu12 9 9 9 100 0 0 0 0 0 0\nintr 1 2 3\ncpu0 1 1 1 99999 1 0 0 0 0 0\n"
    )
    monkeypatch.setattr(cpu_time, "STAT", str(stat))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 12})
    monkeypatch.setattr(os, "sysconf", lambda _: 100)
    monkeypatch.setattr(time, "process_time", lambda: 4.0)
    assert unused_s() == 3.5 + 4.0


@pytest.mark.parametrize("text", [None, "", "cpu  0 0 0 0 0\ncpu0 0 0 0 0 0 0 0 0 0 0\n", "cpu0 1\n"])
def test_unused_is_unknown_where_idle_time_is_not_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    monkeypatch.setattr(cpu_time, "STAT", str(tmp_path / "stat"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    if text is not None:
        (tmp_path / "stat").write_text(text)
    assert unused_s() is None


def test_another_thread_of_python_is_told_from_the_callers() -> None:
    over = threading.Event()
    other = threading.Thread(target=over.wait)
    other.start()
    found = other_python_threads()
    over.set()
    other.join()
    assert other.native_id in found
    assert threading.get_native_id() not in found

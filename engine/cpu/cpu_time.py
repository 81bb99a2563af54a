"""CPU time and quotas, as Linux reports them. Without a report, functions assume no contention and no quota."""

import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

TASKS: Final = "/proc/self/task"
PROC: Final = Path("/proc/self")
STAT: Final = "/proc/stat"
LOOK_EVERY_S: Final = 1.0
BUSY: Final = 0.02  # share of a core that a computing thread uses


def run_delay_s() -> float:
    """Return the seconds that threads were ready to run but had no core. The sum falls when a thread ends."""
    return sum(waited_ns for _, waited_ns in _thread_times().values()) / 1e9


class ComputeDelay:
    """Returns the seconds since the first call that computing threads were ready to run but had no core.

    A thread counts if it used a core before the latest look at all threads. Of Python's threads only the caller's counts.
    Few threads are read, because each read releases the GIL and then waits for it while the event loop is busy.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waited_s = 0.0
        self._updated_s = -math.inf
        self._times: dict[int, tuple[int, int]] = {}  # of all threads, at the latest look
        self._before: dict[int, int] = {}  # nanoseconds waited so far, by thread that counts

    def __call__(self) -> float:
        for thread, before in self._before.items():
            _, waited_ns = _times_of(thread) or (0, before)
            self._waited_s += (waited_ns - before) / 1e9
            self._before[thread] = waited_ns
        now_s = self._clock()
        if now_s - self._updated_s >= LOOK_EVERY_S:
            self._update_threads(now_s)
        return self._waited_s

    def _update_threads(self, now_s: float) -> None:
        times, others = _thread_times(), other_python_threads()
        least_ns = BUSY * 1e9 * (now_s - self._updated_s) if self._times else 0.0
        self._before = {
            thread: waited_ns
            for thread, (ran_ns, waited_ns) in times.items()
            if thread not in others and ran_ns - self._times.get(thread, (0, 0))[0] >= least_ns
        }
        self._times, self._updated_s = times, now_s


def _thread_times() -> dict[int, tuple[int, int]]:
    """Return the nanoseconds that each thread ran, and that it was ready but had no core."""
    try:
        threads = [int(name) for name in os.listdir(TASKS)]  # noqa: PTH208  # a Path takes ten times as long
    except (OSError, ValueError):
        return {}
    return {thread: times for thread in threads if (times := _times_of(thread)) is not None}


def _times_of(thread: int) -> tuple[int, int] | None:
    try:
        with open(f"{TASKS}/{thread}/schedstat", "rb", buffering=0) as file:  # noqa: PTH123
            ran_ns, waited_ns, *_ = file.read().split()
            return int(ran_ns), int(waited_ns)
    except (OSError, ValueError):  # the thread has ended, or the kernel does not count
        return None


def unused_s() -> float | None:
    """Return the core seconds since boot, on this process's cores, that others did not use; None if unknown."""
    cores = {b"cpu%d" % core for core in own_cores()}
    idle = 0
    try:
        with open(STAT, "rb") as file:  # noqa: PTH123
            for line in file:
                name, *ticks = line.split()
                if not name.startswith(b"cpu"):
                    break  # the lines of cores come first
                if name in cores:
                    idle += int(ticks[3]) + int(ticks[4])  # idle and iowait
    except (OSError, IndexError, ValueError):
        return None
    return idle / os.sysconf("SC_CLK_TCK") + time.process_time() if idle else None


def other_python_threads() -> set[int]:
    """Return their kernel ids."""
    return {thread.native_id for thread in threading.enumerate() if thread.native_id} - {threading.get_native_id()}


class CpuQuota:
    """Quotas of this process's cgroups, version 1 or 2."""

    def __init__(self, proc: Path = PROC) -> None:
        self._groups = list(_cpu_groups(proc))

    def cores(self) -> float:
        return min((_cores(group) for group in self._groups), default=float("inf"))

    def throttled_s(self) -> float:
        return sum(_throttled_s(group) for group in self._groups)


def own_cores() -> list[int]:
    """Return the cores of the main thread, because computing threads may be bound."""
    return sorted(os.sched_getaffinity(os.getpid()))


def usable_cores(quota: CpuQuota | None = None) -> int:
    """Return how many cores affinity and quota allow all the time."""
    return max(1, int(_cores_allowed(quota)))


def cores_for_a_while(quota: CpuQuota | None = None) -> int:
    """Return how many cores may be used at times: a quota of 1.5 allows two for three quarters of the time."""
    return math.ceil(_cores_allowed(quota))


def _cores_allowed(quota: CpuQuota | None) -> float:
    return min(len(own_cores()), (quota or CpuQuota()).cores())


def _cpu_groups(proc: Path) -> Iterator[Path]:
    """Yield the directories of this process's cgroups, up to each mount's root."""
    try:
        memberships = (proc / "cgroup").read_text().splitlines()
        mounts = [line.split() for line in (proc / "mountinfo").read_text().splitlines()]
    except OSError:
        return
    paths = {controllers: path for _, controllers, path in (line.split(":", 2) for line in memberships)}
    for fields in mounts:
        root, mount = fields[3], fields[4]
        kind, _, options = fields[fields.index("-") + 1 :][:3]
        for controllers, path in paths.items():
            if (kind == "cgroup2" and not controllers) or (
                kind == "cgroup" and "cpu" in controllers.split(",") and "cpu" in options.split(",")
            ):
                # without a cgroup namespace, a container sees the host's path
                inside = path.removeprefix(root) if root != "/" else path
                lowest = Path(mount, inside.lstrip("/"))
                groups = [lowest, *lowest.parents] if lowest.is_dir() else [Path(mount)]
                yield from (group for group in groups if group.is_relative_to(mount))


def _cores(group: Path) -> float:
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(quota) / int(period) if int(quota) > 0 else float("inf")
    except (OSError, ValueError):  # the root has no such file; "max" is not a number
        return float("inf")


def _throttled_s(group: Path) -> float:
    try:
        facts = dict(line.split() for line in (group / "cpu.stat").read_text().splitlines())
        return int(facts.get("throttled_usec", 0)) / 1e6 + int(facts.get("throttled_time", 0)) / 1e9
    except (OSError, ValueError):
        return 0.0

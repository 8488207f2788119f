"""CPU time of processes and all that they start, and the busy time of the machine's cores."""

import contextlib
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

_STAT = Path("/proc/stat")
_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")
# Columns of proc_stat(5): user (which includes guests), nice, system, irq, softirq.
_BUSY = (1, 2, 3, 6, 7)
_CHILDREN_TICKS = (13, 14)  # fields of proc_pid_stat(5) after the name: cutime and cstime
_OWN_TICKS = (11, 12)  # fields of proc_pid_stat(5) after the name: utime and stime
_STATE = 0  # field of proc_pid_stat(5) after the name: state
_STOPPED = ("T", "t")  # states of a process that a signal or a debugger has stopped
_PARENT = 1  # field of proc_pid_stat(5) after the name: ppid
# CPUCLOCK_SCHED of the kernel's posix-timers: it counts nanoseconds, where ticks have 10 ms.
_PROCESS_CLOCK = 2


class CpuTime(NamedTuple):
    """CPU time and waiting time in seconds since some beginning."""

    ran_s: float = 0.0
    # Time ready to run without a core, summed over threads; 0 where the kernel doesn't count it.
    waited_s: float = 0.0

    def wait_fraction(self, elapsed_s: float) -> float | None:
        """Return the share of the time in which the threads were ready to run but had no core.

        The time is that which has elapsed or, if several threads were ready for longer together,
        theirs. None where nothing ran yet or the kernel doesn't count waiting.

        Args:
            elapsed_s: The seconds by the clock in which this time was used.
        """
        ready_s = self.ran_s + self.waited_s
        if ready_s <= 0 or not _kernel_counts_waiting():
            return None
        return self.waited_s / max(ready_s, elapsed_s)


class StudyTimes(NamedTuple):
    """Running totals of the CPU time of a study's processes on this machine."""

    trials: CpuTime
    # CPU time outside trials: this process, the fork server, and processes for the next trial.
    study_s: float


class CpuTimeSource(Protocol):
    """A source of a study's CPU times for a meter."""

    def read(self) -> StudyTimes: ...


class ProcessTree:
    """The CPU time of a process and of all that it has started, including ended processes.

    The kernel adds an ended process's time to that of the parent which waits for it. Orphans must
    therefore get a parent within the tree, as a trial's guard makes sure (PR_SET_CHILD_SUBREAPER).
    """

    def __init__(self, root: int, *, with_descendants: bool = True) -> None:
        self._root, self._with_descendants = root, with_descendants
        self._ran_s = self._unclaimed_s = 0.0
        self._waited_s = 0.0
        self._waits_s: dict[int, float] = {}  # waiting time by thread at the last reading
        self.is_stopped = False  # at the last reading a process was stopped, as by SIGSTOP

    def read(self) -> CpuTime:
        """Return the totals so far; after the root has ended, those of the last reading."""
        ran_s = self._unclaimed_s + self._read_living()
        # A process that ended during the reading may have been missed: read again.
        if ran_s < self._ran_s:
            ran_s = self._unclaimed_s + self._read_living()
        # The kernel adds nothing to a parent that ignores SIGCHLD: the time of its ended children
        # that was read before is kept here.
        self._unclaimed_s += max(0.0, self._ran_s - ran_s)
        self._ran_s = max(self._ran_s, ran_s)
        return CpuTime(self._ran_s, self._waited_s)

    def _read_living(self) -> float:
        """Return the CPU seconds of the living processes, and update the threads' waiting time.

        Parents are read before their children, so that a child's time can be missed for a moment
        but is never counted twice.
        """
        ran_s, waits_s = 0.0, dict[int, float]()
        self.is_stopped = False
        waiting = [self._root]
        children_of = None if _kernel_lists_children() else _children_by_parent()
        while waiting:
            pid = waiting.pop()
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                fields = _stat(pid)
                ran_s += _process_s(pid, fields)
                self.is_stopped |= fields[_STATE] in _STOPPED
                # Only names are needed.
                threads = [int(name) for name in os.listdir(f"/proc/{pid}/task")]  # noqa: PTH208
                waits_s |= {thread: _waited_s(pid, thread) for thread in threads}
                if not self._with_descendants:
                    continue
                waiting += (
                    _children(pid, threads) if children_of is None else children_of.get(pid, ())
                )
        self._waited_s += sum(
            max(0.0, now_s - self._waits_s.get(thread, 0.0)) for thread, now_s in waits_s.items()
        )
        self._waits_s |= waits_s  # keeps threads that were missed, so that none counts twice
        return ran_s


class StudyProcesses:
    """The processes that this process has started for a study, with all that these have started.

    Implements `CpuTimeSource`.
    """

    def __init__(self) -> None:
        self._living: list[StudyProcess] = []
        self._ended_trials, self._ended_study_s = CpuTime(), 0.0

    def add(self, pid: int, *, with_descendants: bool = True) -> "StudyProcess":
        """Count a process, from its start on, as the study's."""
        process = StudyProcess(ProcessTree(pid, with_descendants=with_descendants))
        self._living.append(process)
        return process

    def read(self) -> StudyTimes:
        trials, study_s = self._ended_trials, self._ended_study_s
        for process in tuple(self._living):
            times = process.read()
            trials = CpuTime(
                trials.ran_s + times.trials.ran_s, trials.waited_s + times.trials.waited_s
            )
            study_s += times.study_s
            if process.has_ended:
                self._living.remove(process)
                self._ended_trials = CpuTime(
                    self._ended_trials.ran_s + times.trials.ran_s,
                    self._ended_trials.waited_s + times.trials.waited_s,
                )
                self._ended_study_s += times.study_s
        return StudyTimes(trials, study_s + time.process_time())


class StudyProcess:
    """A process of a study, with its descendants: the study's own until it becomes a trial."""

    def __init__(self, tree: ProcessTree) -> None:
        self._tree = tree
        self._before_trial: CpuTime | None = None  # CPU time before the trial; None: no trial
        self._trial_began_s = 0.0  # on the monotonic clock
        self._final: CpuTime | None = None

    def become_trial(self) -> None:
        """Count the CPU time from now on as a trial's."""
        self._before_trial = self._tree.read()
        self._trial_began_s = time.monotonic()

    def wait_fraction(self) -> float | None:
        """Return `CpuTime.wait_fraction` of the trial, which must run still."""
        return self.read().trials.wait_fraction(time.monotonic() - self._trial_began_s)

    def read(self) -> StudyTimes:
        now = self._final or self._tree.read()
        if self._before_trial is None:
            return StudyTimes(CpuTime(), now.ran_s)
        before = self._before_trial
        own = CpuTime(max(0.0, now.ran_s - before.ran_s), max(0.0, now.waited_s - before.waited_s))
        return StudyTimes(own, before.ran_s)

    @property
    def has_ended(self) -> bool:
        return self._final is not None

    @property
    def is_stopped(self) -> bool:
        """True if one of the processes was stopped at the last reading, as by SIGSTOP."""
        return self._final is None and self._tree.is_stopped

    def end(self, ran_s: float | None = None) -> None:
        """Fix the process's totals at its end.

        `ran_s` has the CPU seconds that its guard reported; None: the guard could not.
        """
        if self._final is None:
            last = self._tree.read()
            self._final = last if ran_s is None else last._replace(ran_s=max(last.ran_s, ran_s))


class OwnProcess:
    """The CPU time of this process and all that it starts, which is one trial's.

    Implements `CpuTimeSource`.
    """

    def __init__(self) -> None:
        self._tree = ProcessTree(os.getpid())

    def read(self) -> StudyTimes:
        return StudyTimes(self._tree.read(), 0.0)


# All that this process has started; global, as the kernel counts CPU time by process, too.
STUDY_PROCESSES = StudyProcesses()


def busy_seconds() -> dict[int, float]:
    """Return how many seconds each core has been busy since the machine started, for anyone.

    Empty where the kernel doesn't count it.
    """
    lines = [line.split() for line in _STAT.read_text().splitlines()] if _STAT.exists() else []
    cores = {int(line[0][3:]): line for line in lines if re.fullmatch("cpu[0-9]+", line[0])}
    hertz = os.sysconf("SC_CLK_TCK")
    busy_s = {
        core: sum(int(line[column]) for column in _BUSY) / hertz for core, line in cores.items()
    }
    # gVisor lists cores with zeros.
    return busy_s if any(busy_s.values()) else {}


def all_cores() -> frozenset[int]:
    """Return the cores of this machine, whoever may use them."""
    return (
        frozenset(busy_seconds()) | os.sched_getaffinity(0) | frozenset(range(os.cpu_count() or 1))
    )


def usable_cores(cores: int) -> float:
    """Return how many of a number of cores this process may use by its cgroups' CPU quotas."""
    return min([float(cores), *_quotas()])


def _quotas() -> Iterator[float]:
    """Yield the CPU quotas, in CPU seconds per second, of this process's cgroups and their parents.

    Both versions of cgroups are read.
    """
    entries = _OWN_CGROUP.read_text().splitlines() if _OWN_CGROUP.exists() else []
    for entry in entries:
        _, controllers, path = entry.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = _CGROUPS / "cpu" if controllers else _CGROUPS
        folder = root / path.lstrip("/")
        # Within a container the path can be that of the host: the own cgroup is then the root.
        for place in (folder, *folder.parents):
            if place == root or root in place.parents:
                yield from _quota(place)


def _quota(cgroup: Path) -> Iterator[float]:
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        quota, period = (cgroup / "cpu.max").read_text().split()
        if quota != "max":
            yield int(quota) / int(period)
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        quota_us = int((cgroup / "cpu.cfs_quota_us").read_text())
        if quota_us > 0:
            yield quota_us / int((cgroup / "cpu.cfs_period_us").read_text())


def _process_s(pid: int, fields: list[str]) -> float:
    """Return the CPU seconds of a process and of the children that it has waited for.

    Its ended threads are included.

    Args:
        pid: the process.
        fields: its fields as `_stat` returns them.
    """
    hertz = os.sysconf("SC_CLK_TCK")
    ended_children_s = sum(int(fields[field]) for field in _CHILDREN_TICKS) / hertz
    try:
        own_s = time.clock_gettime((~pid << 3) | _PROCESS_CLOCK)
    except OSError:  # this kernel has no such clocks, or the process has just ended
        own_s = sum(int(fields[field]) for field in _OWN_TICKS) / hertz
    return own_s + ended_children_s


def _waited_s(pid: int, thread: int) -> float:
    try:
        return int(_read(f"/proc/{pid}/task/{thread}/schedstat").split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        # A kernel without CONFIG_SCHED_INFO, or a thread that has just ended.
        return 0.0


def _kernel_counts_waiting() -> bool:
    """Return whether schedstat counts; without CONFIG_SCHED_INFO it is absent or all zeros."""
    try:
        return int(_read("/proc/self/schedstat").split()[0]) > 0
    except (OSError, IndexError, ValueError):
        return False


def _kernel_lists_children() -> bool:
    # Asked at every reading.
    return os.path.exists(f"/proc/self/task/{os.getpid()}/children")  # noqa: PTH110


def _children(pid: int, threads: list[int]) -> list[int]:
    children: list[int] = []
    for thread in threads:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            children += map(int, _read(f"/proc/{pid}/task/{thread}/children").split())
    return children


def _children_by_parent() -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    # Only names are needed.
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):  # noqa: PTH208
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            children.setdefault(int(_stat(pid)[_PARENT]), []).append(pid)
    return children


def _stat(pid: int) -> list[str]:
    """Return the fields of proc_pid_stat(5) after the name, which may hold anything."""
    return _read(f"/proc/{pid}/stat").rpartition(")")[2].split()


def _read(path: str) -> str:
    """Return a file's text, in a third of Path.read_text's time: there are hundreds of threads."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, 1 << 16).decode(errors="replace")
    finally:
        os.close(descriptor)

"""The memory that compilers hold, and whether the kernel killed one for want of it."""

import contextlib
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import psutil

from sm120.build.compile.ninja import output_of, readable
from sm120.host.gather.cgroup import levels
from sm120.host.gather.text import read

_SECONDS = 0.5  # between two looks
_DEVICE = {"cicc", "ptxas"}  # only nvcc starts these: a file that ccache had, or a host file, needs far less
_NINJA = {"ninja", "ninja-build", "samu"}


@dataclass(frozen=True, kw_only=True)
class Sample:
    pid: int
    parent: int
    name: str
    rss: int  # bytes


@dataclass(frozen=True, kw_only=True)
class Group:
    """All processes of one step of ninja's."""

    leader: int  # the process that ninja started
    rss: int
    device: bool  # nvcc compiles for a GPU in it


def groups(samples: Iterable[Sample]) -> tuple[Group, ...]:
    by_pid = {sample.pid: sample for sample in samples}
    members: dict[int, list[Sample]] = {}
    for sample in by_pid.values():
        leader = _leader(sample, by_pid)
        if leader is not None:
            members.setdefault(leader, []).append(sample)
    return tuple(
        Group(leader=leader, rss=sum(one.rss for one in group), device=any(one.name in _DEVICE for one in group))
        for leader, group in sorted(members.items())
    )


def _leader(sample: Sample, by_pid: Mapping[int, Sample]) -> int | None:
    seen: set[int] = set()
    while sample.pid not in seen:
        seen.add(sample.pid)
        parent = by_pid.get(sample.parent)
        if parent is None:
            return None
        if parent.name in _NINJA and sample.name not in _NINJA:  # until it becomes another, a child is called ninja
            return sample.pid
        sample = parent
    return None


class Meter:
    """Looks at the processes of a build from a thread of its own.

    ``on_look`` gets the names of the files that are being compiled.
    """

    def __init__(self, on_look: Callable[[tuple[str, ...]], None]) -> None:
        self.peaks: dict[str, int] = {}  # bytes by file
        self.device_peak = 0  # bytes, of one nvcc
        self._on_look = on_look
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._files: dict[int, str] = {}

    def follow(self, pid: int) -> None:
        if self._thread is not None:  # the backend may build a second time, after a failure that its project foresees
            return
        self._thread = threading.Thread(target=self._run, args=(pid,), name="memory of the compilers", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self, pid: int) -> None:
        while not self._stop.wait(_SECONDS):
            try:
                self._look(psutil.Process(pid))
            except psutil.Error:
                return

    def _look(self, driver: psutil.Process) -> None:
        samples = sampled(driver.children(recursive=True))
        for group in groups(samples):
            file = self._file(group.leader)
            if file is not None:
                self.peaks[file] = max(group.rss, self.peaks.get(file, 0))
            if group.device:
                self.device_peak = max(group.rss, self.device_peak)
        running = {sample.pid for sample in samples}
        self._files = {leader: file for leader, file in self._files.items() if leader in running}
        self._on_look(tuple(sorted(self._files.values())))

    def _file(self, leader: int) -> str | None:
        if leader not in self._files:
            with contextlib.suppress(psutil.Error):
                output = output_of(" ".join(psutil.Process(leader).cmdline()))
                if output:
                    self._files[leader] = readable(output)
        return self._files.get(leader)


def sampled(processes: Iterable[psutil.Process]) -> list[Sample]:
    samples = []
    for process in processes:
        with contextlib.suppress(psutil.Error), process.oneshot():
            samples.append(
                Sample(pid=process.pid, parent=process.ppid(), name=process.name(), rss=process.memory_info().rss)
            )
    return samples


def oom_kills(root: Path = Path("/")) -> int | None:
    """How many processes the kernel has killed for want of memory in this control group; None: nobody says.

    Without a group that counts, the whole machine's number.
    """
    for version, file in ((2, "memory.events"), (1, "memory.oom_control")):
        for folder in levels("memory", version, root):
            number = _counter(folder / file)
            if number is not None:
                return number
    return _counter(root / "proc/vmstat")


def _counter(path: Path) -> int | None:
    for line in (read(path) or "").splitlines():
        words = line.split()
        if len(words) == 2 and words[0] == "oom_kill" and words[1].isdigit():
            return int(words[1])
    return None


class Kill(StrEnum):
    NONE = "nothing was killed"
    MEMORY = "the kernel killed it for want of memory"
    PERHAPS = "perhaps the kernel killed it for want of memory: nothing here counts that"
    SOMEBODY = "somebody killed it, not the kernel for want of memory"


def judge(*, killed: bool, before: int | None, after: int | None) -> Kill:
    """Signal 9, or exit code 137, says only that somebody sent it; the kernel's counter says who."""
    if not killed:
        return Kill.NONE
    if before is None or after is None:
        return Kill.PERHAPS
    return Kill.MEMORY if after > before else Kill.SOMEBODY

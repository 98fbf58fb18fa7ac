"""Limits that control groups set, version 1 and 2: the tightest of all levels counts."""

import math
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from sm120.host.gather.mounts import Mount, mounts
from sm120.host.gather.text import read, read_int

_NO_LIMIT = 2**60  # version 1 writes a number near 2^63 where there is no limit


def memory(root: Path = Path("/")) -> tuple[int | None, int | None]:
    """The tightest memory limit in bytes, and what is used at its level; (None, None) without a limit.

    File cache that is not in active use does not count as used: the kernel drops it when memory is asked for.
    """
    found: list[tuple[int, int | None]] = []
    for version, limit, usage, cache in (
        (2, "memory.max", "memory.current", "inactive_file"),
        (1, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        for folder in levels("memory", version, root):
            number = read_int(folder / limit)
            if number is not None and number < _NO_LIMIT:
                found.append((number, _used(folder, usage, cache)))
    return min(found, key=lambda pair: pair[0]) if found else (None, None)


def cpus(root: Path = Path("/")) -> int | None:
    """The tightest processor quota, in whole processors, rounded up; None without one."""
    quotas: list[float] = []
    for folder in levels("cpu", 2, root):
        words = (read(folder / "cpu.max", 128) or "").split()
        if len(words) == 2 and words[0].isdigit() and words[1].isdigit() and int(words[1]):
            quotas.append(int(words[0]) / int(words[1]))
    for folder in levels("cpu", 1, root):
        quota, period = read_int(folder / "cpu.cfs_quota_us"), read_int(folder / "cpu.cfs_period_us")
        if quota is not None and quota > 0 and period:
            quotas.append(quota / period)
    return max(1, math.ceil(min(quotas))) if quotas else None


def _used(folder: Path, name: str, cache: str) -> int | None:
    used = read_int(folder / name)
    if used is None:
        return None
    for line in (read(folder / "memory.stat") or "").splitlines():
        key, _, value = line.partition(" ")
        if key == cache and value.strip().isdigit():
            return max(0, used - int(value))
    return used


def levels(controller: str, version: int, root: Path) -> Iterator[Path]:
    """The folders of this process's groups, from its own up to the mount."""
    path = _own_group(controller, version, root)
    mount = next((m for m in mounts(root) if _carries(m, controller, version)), None)
    if path is None or mount is None:
        return
    top = root / mount.point.lstrip("/")
    # Where only a part of the tree is mounted (a container), the path is told from the tree's root. A path outside of
    # that part, or one that a group namespace hides, leaves the mount itself.
    inner = PurePosixPath(path)
    inside = inner.relative_to(mount.root) if inner.is_relative_to(mount.root) else PurePosixPath()
    if ".." in inside.parts:
        inside = PurePosixPath()
    yield from (top / level for level in (inside, *inside.parents))


def _carries(mount: Mount, controller: str, version: int) -> bool:
    if version == 2:
        return mount.filesystem == "cgroup2"
    return mount.filesystem == "cgroup" and controller in mount.options


def _own_group(controller: str, version: int, root: Path) -> str | None:
    """The path in /proc/self/cgroup: ``0::/a`` in version 2, ``4:cpu,cpuacct:/a`` in version 1."""
    for line in (read(root / "proc/self/cgroup") or "").splitlines():
        number, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if (version == 2 and number == "0" and not names) or (version == 1 and controller in names.split(",")):
            return path
    return None

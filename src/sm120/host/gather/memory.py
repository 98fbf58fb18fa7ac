"""Memory: the machine's, this process's control groups', and shared memory."""

import os
from pathlib import Path

from sm120.host.facts import Memory
from sm120.host.gather import cgroup
from sm120.host.gather.text import read


def memory(root: Path = Path("/")) -> Memory:
    table = _meminfo(root)
    limit, used = cgroup.memory(root)
    shm_total, shm_free = _shm(root / "dev/shm")
    return Memory(
        total=table.get("MemTotal"),
        available=table.get("MemAvailable"),
        free=table.get("MemFree"),
        cached=table.get("Cached"),
        swap_total=table.get("SwapTotal"),
        swap_free=table.get("SwapFree"),
        cgroup_limit=limit,
        cgroup_used=used,
        shm_total=shm_total,
        shm_free=shm_free,
    )


def _meminfo(root: Path) -> dict[str, int]:
    """Bytes by name; the file counts in kB, which are 1024 bytes."""
    table: dict[str, int] = {}
    for line in (read(root / "proc/meminfo") or "").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[0].isdigit() and words[1] == "kB":
            table[name] = int(words[0]) * 1024
    return table


def _shm(path: Path) -> tuple[int | None, int | None]:
    try:
        status = os.statvfs(path)
    except OSError:
        return None, None
    return status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize

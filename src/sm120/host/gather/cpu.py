"""The processor, and how much of it this process may use."""

import os
import platform
import re
from pathlib import Path

from sm120.host.facts import Cpu
from sm120.host.gather import cgroup
from sm120.host.gather.text import read


def cpu(root: Path = Path("/")) -> Cpu:
    import psutil

    nodes = root / "sys/devices/system/node"
    return Cpu(
        architecture=platform.machine(),
        model=_model(root),
        cores=psutil.cpu_count(logical=False),
        threads=psutil.cpu_count(),
        allowed=_allowed(root),
        numa_nodes=len(list(nodes.glob("node[0-9]*"))) or None,
    )


def _model(root: Path) -> str | None:
    """The first processor's name; ARM processors have none in /proc/cpuinfo."""
    found = re.search(r"^model name\s*:\s*(.+?)\s*$", read(root / "proc/cpuinfo") or "", re.MULTILINE)
    return found[1] if found else None


def _allowed(root: Path) -> int:
    threads = len(os.sched_getaffinity(0))
    quota = cgroup.cpus(root)
    return threads if quota is None else min(threads, quota)

"""Small reads of kernel and package files, and numbers out of text."""

import re
from pathlib import Path

from sm120.host.binaries.regular import open_regular
from sm120.host.facts import Version2

_LIMIT = 2**20


def read(path: Path, limit: int = _LIMIT) -> str | None:
    """The first ``limit`` bytes of a file, or None when it cannot be read or is none: a pipe would never answer."""
    try:
        with open_regular(path) as file:
            return file.read(limit).decode("utf-8", "replace")
    except (OSError, ValueError):
        return None


def read_int(path: Path) -> int | None:
    """A file that holds one whole number; None when it is missing or says something else (cgroup's ``max``)."""
    text = (read(path, 64) or "").strip()
    return int(text) if re.fullmatch(r"-?\d{1,20}", text) else None


def version2(text: str | None) -> Version2 | None:
    """The first two parts of a version: ``13.0.88`` → (13, 0)."""
    found = re.match(r"\s*(\d{1,6})(?:\.(\d{1,6}))?", text or "")
    return (int(found[1]), int(found[2] or 0)) if found else None


def cuda_version(number: int) -> Version2:
    """CUDA's own integers, as CUDART_VERSION and NVML's: 13020 → (13, 2)."""
    return number // 1000, number % 1000 // 10

"""What is mounted where, from /proc/self/mountinfo."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from sm120.host.gather.text import read

_ESCAPE = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, kw_only=True)
class Mount:
    point: str
    root: str  # which folder of the file system is mounted there
    filesystem: str
    options: tuple[str, ...]  # of the file system; cgroup v1 names its controllers there


def mounts(root: Path = Path("/")) -> tuple[Mount, ...]:
    """All mounts in the kernel's order; a line that is not understood is left out."""
    text = read(root / "proc/self/mountinfo", 8 * 2**20) or ""
    return tuple(mount for line in text.splitlines() if (mount := _parse(line)) is not None)


def under(path: str, table: Sequence[Mount]) -> Mount | None:
    """The mount that holds an absolute path: the deepest, and of those the last, which hides the others."""
    place = PurePosixPath(path)
    best: Mount | None = None
    for mount in table:
        if place.is_relative_to(mount.point) and (best is None or len(mount.point) >= len(best.point)):
            best = mount
    return best


def _parse(line: str) -> Mount | None:
    """``36 35 98:0 /root /point rw,noatime shared:1 - ext3 /dev/sda1 rw,errors=continue``; see proc(5)."""
    left, separator, right = line.partition(" - ")
    fields, tail = left.split(" "), right.split(" ")
    if not separator or len(fields) < 6 or len(tail) < 3:
        return None
    return Mount(
        point=_unescape(fields[4]), root=_unescape(fields[3]), filesystem=tail[0], options=tuple(tail[2].split(","))
    )


def _unescape(text: str) -> str:
    """Space, tab, newline and backslash stand as octal numbers; other bytes are UTF-8 as they are."""
    return _ESCAPE.sub(lambda found: chr(int(found[1], 8)), text)

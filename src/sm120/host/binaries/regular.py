"""Opens regular files only: a pipe, a device or a link to one must not stop or feed us for ever."""

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path


def open_regular(path: Path) -> BufferedReader:
    """Opens a regular file for reading; a link to one is followed. OSError for anything else, without touching it."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise _not_regular(path)
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):  # replaced in between
        file.close()
        raise _not_regular(path)
    return file


def read_limited(path: Path, limit: int) -> bytes | None:
    """The whole file when it is regular, readable and holds ``limit`` bytes at most, else None."""
    try:
        with open_regular(path) as file:
            data = file.read(limit + 1)
    except OSError:
        return None
    return data if len(data) <= limit else None


def _not_regular(path: Path) -> OSError:
    return OSError(errno.EINVAL, "not a regular file", str(path))

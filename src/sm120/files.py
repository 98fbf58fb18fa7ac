"""Files that are whole or absent: atomic writes, JSON errors that name the place, locks between processes."""

import contextlib
import errno
import fcntl
import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from sm120 import errors

_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}
FULL = {errno.ENOSPC, errno.EDQUOT}
MOVE_REMEDY = "set SM120_HOME=/a/writable/folder: .venv, .sm120 and runs then live there"


def no_write(path: Path, error: OSError) -> errors.PreflightError:
    """The one error for a place that cannot be written, by its cause."""
    if error.errno in FULL:
        return errors.PreflightError(
            f"no space left on the disk while writing {path}",
            where=str(path),
            remedy=f"free some space, or {MOVE_REMEDY}",
        )
    if error.errno in _READ_ONLY:
        return errors.PreflightError(f"cannot write {path}: {error.strerror}", where=str(path), remedy=MOVE_REMEDY)
    return errors.PreflightError(
        f"cannot write {path}: {error.strerror or error}",
        where=str(path),
        remedy=f"make the folder usable, or {MOVE_REMEDY}",
    )


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns an OSError of the body into a PreflightError about ``path``."""
    try:
        yield
    except OSError as error:
        raise no_write(path, error) from error


def make_folder(path: Path) -> Path:
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
    return path


def write_bytes_atomic(path: Path, data: bytes) -> None:
    """Replaces ``path`` by a file that holds ``data``; a reader sees the old file or the new one, whatever happens."""
    with writing(path):
        staged = stage(path, data, 0o666 & ~_umask())
        try:
            staged.replace(path)
        except BaseException:
            staged.unlink(missing_ok=True)
            raise


def stage(path: Path, data: bytes, mode: int) -> Path:
    """A new file beside ``path`` that holds ``data`` on the disk, to be renamed to it."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            Path(name).chmod(mode)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    return Path(name)


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def write_text_atomic(path: Path, text: str) -> None:
    write_bytes_atomic(path, text.encode("utf-8", "backslashreplace"))


def write_json_atomic(path: Path, obj: object) -> None:
    """Writes one JSON document. NaN and infinities are refused with ValueError: they are not JSON."""
    write_text_atomic(path, json.dumps(obj, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_text(path: Path) -> str:
    """Raises UsageError when the file is missing, unreadable or not UTF-8."""
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise errors.UsageError(
            f"{path} is not UTF-8 text: {error.reason} at byte {error.start}", where=str(path)
        ) from error
    except OSError as error:
        raise errors.UsageError(f"cannot read {path}: {error.strerror or error}", where=str(path)) from error


def read_json(path: Path) -> object:
    """Raises UsageError with file, line and column when the file is unreadable or malformed."""
    text = read_text(path)
    try:
        return json.loads(text, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        where = f"{path}:{error.lineno}:{error.colno}"
        raise errors.UsageError(f"{where}: not JSON: {error.msg}", where=where) from error
    except (ValueError, RecursionError) as error:
        raise errors.UsageError(f"{path}: not JSON: {error}", where=str(path)) from error


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not a JSON number")


@contextlib.contextmanager
def lock(path: Path, *, timeout: float = -1, waiting: str | None = None) -> Iterator[int]:
    """Holds an exclusive lock between processes, and gives its file descriptor.

    The kernel drops the lock with its last holder, so it cannot go stale; a child that is given the descriptor is a
    holder too. ``timeout`` is in seconds, negative for ever; PreflightError when it passes. ``waiting`` is told to the
    user when somebody else holds the lock.
    """
    make_folder(path.parent)
    with contextlib.ExitStack() as stack:
        with writing(path):
            fd = stack.enter_context(path.open("a")).fileno()
            if not _try_lock(fd):
                _wait_for_lock(fd, path, timeout, waiting)
        yield fd


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _wait_for_lock(fd: int, path: Path, timeout: float, waiting: str | None) -> None:
    from sm120.console import Console

    if waiting:
        Console.current().info(waiting)
    deadline = time.monotonic() + timeout
    while not _try_lock(fd):
        if timeout >= 0 and time.monotonic() >= deadline:
            raise errors.PreflightError(
                f"another process has held {path} for more than {timeout:.0f} s",
                where=str(path),
                remedy="wait for it to end, or end it, then try again",
            )
        time.sleep(0.1)


def free_bytes(path: Path) -> int:
    """Free bytes for this user on the disk that holds ``path``, which need not exist yet."""
    import shutil

    place = path.absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def sha256(path: Path) -> str:
    import hashlib

    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

"""Several files written as one: all of them, or none."""

import contextlib
from pathlib import Path

from sm120 import errors, files
from sm120.build.patches.tree import Changes


def write_all(root: Path, changes: Changes) -> None:
    """First every new file beside the old one, then the names: what can fail for want of space fails before any.

    Raises PreflightError, and the tree is as it was. Only a kill between two names leaves some of them.
    """
    staged: dict[str, Path] = {}
    before = {path: (root / path).read_bytes() if (root / path).is_file() else None for path in changes}
    done: list[str] = []
    try:
        for path, data in changes.items():
            if data is not None:
                staged[path] = _stage(root / path, data)
        for path, data in changes.items():
            with files.writing(root / path):
                if data is None:
                    (root / path).unlink()
                else:
                    staged[path].replace(root / path)
            done.append(path)
    except BaseException:
        for path in done:
            _restore(root / path, before[path])
        raise
    finally:
        for left in staged.values():
            left.unlink(missing_ok=True)


def _restore(path: Path, data: bytes | None) -> None:
    with contextlib.suppress(errors.ToolkitError, OSError):
        if data is None:
            path.unlink()
        else:
            files.write_bytes_atomic(path, data)


def _stage(path: Path, data: bytes) -> Path:
    """A file beside ``path`` that holds ``data``, with the mode that ``path`` has."""
    with files.writing(path):
        mode = path.stat().st_mode & 0o7777 if path.is_file() else 0o644
    return files.stage(path, data, mode)

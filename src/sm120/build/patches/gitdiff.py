"""Unified diffs, applied by ``git apply`` without fuzz to files in an empty folder that is no repository."""

import os
import posixpath
import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from sm120 import errors
from sm120.build.patches.tree import Changes, Tree

_TIMEOUT = 60.0  # seconds
_PLACE = re.compile(rb"^(?:error: )?(?:patch failed: )?(?P<path>[^\n]+?):(?P<line>\d+)$", re.MULTILINE)
_FROM = re.compile(rb"^(?:rename|copy) from ([^\r\n]+)", re.MULTILINE)  # git's own list names the new file alone
# No configuration of the user's may change what is applied: whitespace fixes, line ends, hooks, another repository.
_OPTIONS = ("-c", "core.autocrlf=false", "-c", "apply.whitespace=nowarn", "-c", "core.safecrlf=false")


class Refused(Exception):
    """git does not apply the diff. ``where`` is file:line."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(reason)
        self.where = where
        self.reason = reason


def names(diff: bytes, folder: str, label: str) -> tuple[str, ...]:
    """The paths that the diff speaks of, below ``folder``. Raises Refused for what is no diff."""
    with tempfile.TemporaryDirectory(prefix="sm120-patch-") as place:
        status, out = _git(Path(place), diff, "--numstat", "-z", *_below(folder))
        if status:
            raise _refusal(out, label)
    found = [os.fsdecode(record.split(b"\t", 2)[2]) for record in out.split(b"\0") if record.count(b"\t") >= 2]
    found += [posixpath.join(folder, os.fsdecode(name)) for name in _FROM.findall(diff)]
    for path in found:
        if path.startswith("/") or {"..", ".git"} & set(path.split("/")):
            raise Refused(f"{label}:1", f"the diff leaves the tree: {path}")
    return tuple(dict.fromkeys(found))


def apply_diff(tree: Tree, diff: bytes, folder: str, label: str) -> Changes | None:
    """The changes the diff makes; None when the tree holds them already. Raises Refused."""
    paths = names(diff, folder, label)
    with tempfile.TemporaryDirectory(prefix="sm120-patch-") as place:
        before = {path: tree.bytes_of(path) for path in paths}
        _lay_out(Path(place), before)
        status, out = _git(Path(place), diff, "--check", *_below(folder))
        if status:
            backward, _ = _git(Path(place), diff, "--reverse", "--check", *_below(folder))
            if backward == 0:
                return None
            raise _refusal(out, label)
        status, out = _git(Path(place), diff, *_below(folder))
        if status:
            raise _refusal(out, label)
        after = {path: _read(Path(place) / path, label) for path in paths}
    return {path: data for path, data in after.items() if data != before[path]}


def _below(folder: str) -> tuple[str, ...]:
    return (f"--directory={folder}",) if folder else ()


def _lay_out(place: Path, contents: Mapping[str, bytes | None]) -> None:
    for path, data in contents.items():
        if data is not None:
            (place / path).parent.mkdir(parents=True, exist_ok=True)
            (place / path).write_bytes(data)


def _read(path: Path, label: str) -> bytes | None:
    if path.is_symlink():
        raise Refused(f"{label}:1", "the diff makes a symbolic link")
    return path.read_bytes() if path.is_file() else None


def _git(place: Path, diff: bytes, *words: str) -> tuple[int, bytes]:
    """Exit code and output of git apply in ``place``."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    environment |= {
        "GIT_CEILING_DIRECTORIES": str(place.parent.resolve()),
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "LC_ALL": "C",
    }
    command = ["git", *_OPTIONS, "apply", "--whitespace=nowarn", *words, "-"]
    try:
        done = subprocess.run(
            command, cwd=place, env=environment, input=diff, capture_output=True, timeout=_TIMEOUT, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise errors.PreflightError(
            f"git apply cannot run: {error}", remedy="install git (Debian, Ubuntu: apt install git)"
        ) from error
    return done.returncode, done.stdout if done.returncode == 0 else done.stderr


def _refusal(out: bytes, label: str) -> Refused:
    found = _PLACE.search(out)
    lines = [line.removeprefix(b"error: ").decode("utf-8", "replace") for line in out.splitlines() if line.strip()]
    where = f"{os.fsdecode(found['path'])}:{int(found['line'])}" if found else f"{label}:1"
    return Refused(where, f"git apply: {lines[0] if lines else 'refused without a word'}")

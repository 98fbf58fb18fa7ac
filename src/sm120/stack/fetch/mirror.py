"""A mirror: a folder with a stack file, its lock, and every wheel, from which the environment can be made offline.

    <stack>.toml  pylock.toml  wheels/  sm120-mirror.json

The manifest is written last and names the hashes of stack file and lock, so half a mirror is told from a whole one.
"""

import contextlib
import os
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sm120 import __version__, errors, files
from sm120.console import Console, size
from sm120.stack.fetch.store import Store
from sm120.stack.install.interpreter import platform_tag
from sm120.stack.lock import Lock, LockedFile, read_lock, write_lock
from sm120.stack.spec import Stack, load_stack, parse, request

SCHEMA = 1
MANIFEST = "sm120-mirror.json"
LOCK = "pylock.toml"
WHEELS = "wheels"


@dataclass(frozen=True, kw_only=True)
class Mirror:
    folder: Path
    stack: Stack  # from the mirror's own stack file
    lock: Lock  # its URLs are those of the files in the mirror


def missing(folder: Path, lock: Lock) -> list[LockedFile]:
    """What ``write`` would copy. Reads every wheel that is there."""
    return [file for file in lock.files if not _is_whole(folder / WHEELS / file.filename, file)]


def write(folder: Path, stack: Stack, lock: Lock, store: Store, console: Console) -> int:
    """Brings a mirror up to date from the store; the number of wheels that were copied.

    Raises UsageError when the folder is something else, PreflightError when there is no space.
    """
    folder = folder.absolute()
    files.make_folder(folder / WHEELS)
    with files.lock(folder / ".lock", waiting=f"another process is writing {folder}; waiting for it"):
        check_ours(folder, stack)
        wanted = missing(folder, lock)
        total = sum(store.path(file).stat().st_size for file in wanted)
        free = files.free_bytes(folder)
        if free < total:
            raise errors.PreflightError(
                f"the mirror needs another {size(total)} in {folder}: {size(total - free)} more than the"
                f" {size(free)} that are free",
                where=str(folder),
                remedy="free some space, or choose another folder",
            )
        with console.progress(total, "copying wheels", in_bytes=True) as progress:
            for file in wanted:
                progress.advance(_copy(store.path(file), folder / WHEELS / file.filename), file.filename)
        _describe(folder, stack, lock)
    return len(wanted)


def open_mirror(folder: Path, asked: str = "") -> Mirror:
    """A whole mirror. Raises UsageError when it is none, or is of another stack than ``asked`` or another machine."""
    folder = folder.absolute()
    manifest = _manifest(folder)
    name = str(manifest["stack"])
    remedy = f"make it whole where the network is: scripts/inv setup --stack {name} --mirror {shlex.quote(str(folder))}"
    for entry, sha256 in manifest["files"].items():
        path = folder / entry
        if not path.is_file() or files.sha256(path) != sha256:
            what = "has changed since, or the mirror was not finished" if path.exists() else "is missing"
            raise errors.UsageError(f"{folder} is no whole mirror: {entry} {what}", where=str(path), remedy=remedy)
    stack = parse(files.read_text(folder / f"{name}.toml"), folder / f"{name}.toml")
    lock = read_lock(folder / LOCK)
    _check_asked(asked, stack, folder)
    if lock.platform != platform_tag():
        raise errors.UsageError(
            f"{folder} is for {lock.platform}, and this machine is {platform_tag()}",
            where=str(folder / LOCK),
            remedy="make a mirror on a machine of this kind",
        )
    for file in lock.files:
        path = folder / file.url
        if not path.is_file() or (file.size is not None and path.stat().st_size != file.size):
            what = f"has {path.stat().st_size} bytes, not {file.size}" if path.is_file() else "is missing"
            raise errors.UsageError(f"{folder} is no whole mirror: {file.url} {what}", where=str(path), remedy=remedy)
    located = tuple(replace(file, url=(folder / file.url).as_uri()) for file in lock.files)
    # The manifest holds stack file and lock together; how a request is computed may change with the toolkit.
    return Mirror(folder=folder, stack=stack, lock=replace(lock, request=request(stack), files=located))


def _check_asked(asked: str, stack: Stack, folder: Path) -> None:
    if not asked:
        return
    remedy = f"leave --stack out to take the mirror's: scripts/inv setup --offline {shlex.quote(str(folder))}"
    name = Path(asked).stem if asked.endswith(".toml") or "/" in asked else asked
    if name != stack.name:
        raise errors.UsageError(
            f"{folder} is the mirror of the stack {stack.name}, not of {name}", where=str(folder), remedy=remedy
        )
    if request(load_stack(asked)) != request(stack):
        raise errors.UsageError(
            f"the stack file of {name} has changed since {folder} was written", where=str(folder), remedy=remedy
        )


def _manifest(folder: Path) -> Mapping[str, Any]:
    path = folder / MANIFEST
    if not path.exists():
        what = "there is no such folder" if not folder.is_dir() else f"{MANIFEST}, which is written last, is missing"
        raise errors.UsageError(
            f"{folder} is no whole mirror: {what}",
            where=str(path),
            remedy=f"make one where the network is: scripts/inv setup --mirror {shlex.quote(str(folder))}",
        )
    content: Any = None
    with contextlib.suppress(errors.UsageError):  # damaged: the error below also says what to do
        content = files.read_json(path)
    if (
        not isinstance(content, dict)
        or content.get("schema") != SCHEMA
        or not isinstance(content.get("stack"), str)
        or not isinstance(content.get("files"), dict)
        or set(content["files"]) != {LOCK, f"{content['stack']}.toml"}
    ):
        raise errors.UsageError(
            f"{path} is damaged, or not the manifest of a mirror, or one of another version",
            where=str(path),
            remedy=f"where the network is: rm {shlex.quote(str(path))}; then make the mirror whole with setup --mirror",
        )
    return content


def check_ours(folder: Path, stack: Stack) -> None:
    """UsageError unless the folder is new, empty, or holds a mirror of this stack, whole or half.

    PreflightError when it can be seen that it cannot be written.
    """
    folder = folder.absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir():
        raise errors.UsageError(f"{there} is no folder", where=str(folder), remedy="name a new or an empty folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise errors.PreflightError(
            f"the mirror {folder} cannot be written: {there} does not allow it",
            where=str(there),
            remedy="name a folder that you may write",
        )
    if there != folder:
        return
    if (folder / MANIFEST).exists():
        name = _manifest(folder)["stack"]
        if name != stack.name:
            raise errors.UsageError(
                f"{folder} is the mirror of the stack {name}",
                where=str(folder / MANIFEST),
                remedy=f"choose another folder for the stack {stack.name}",
            )
        return
    strange = sorted(
        entry.name
        for entry in folder.iterdir()
        if entry.name not in {".lock", WHEELS, LOCK, f"{stack.name}.toml"} and not entry.name.endswith(".tmp")
    )
    if strange:
        raise errors.UsageError(
            f"{folder} holds something else: {strange[0]}",
            where=str(folder),
            remedy="name a new or an empty folder",
        )


def _describe(folder: Path, stack: Stack, lock: Lock) -> None:
    text = files.read_text(stack.path)
    files.write_text_atomic(folder / f"{stack.name}.toml", text)
    relative = tuple(replace(file, url=f"{WHEELS}/{file.filename}") for file in lock.files)
    write_lock(replace(lock, files=relative), folder / LOCK)
    manifest = {
        "schema": SCHEMA,
        "stack": stack.name,
        "python": lock.python,
        "platform": lock.platform,
        "fingerprint": lock.fingerprint,
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "toolkit": __version__,
        "files": {name: files.sha256(folder / name) for name in (f"{stack.name}.toml", LOCK)},
    }
    files.write_json_atomic(folder / MANIFEST, manifest)


def _is_whole(path: Path, file: LockedFile) -> bool:
    return path.is_file() and files.sha256(path) == file.sha256


def _copy(source: Path, target: Path) -> int:
    """A copy of its own, never a link: a mirror is what is left when the store is damaged."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    with files.writing(target):
        try:
            shutil.copyfile(source, temporary)
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
        return target.stat().st_size

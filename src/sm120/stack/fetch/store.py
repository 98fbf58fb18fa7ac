"""The wheel store: ``<sha256>/<file name>``, each file whole, and what it is named after.

A file that is being fetched is ``<file name>.part`` beside its place, held by a lock on it; what an interruption leaves
there is gone on with. Nothing reaches its place before its SHA-256 is right.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shlex
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from io import FileIO
from pathlib import Path
from typing import IO, TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from sm120 import errors, files, redact

if TYPE_CHECKING:
    from sm120.console import Console
    from sm120.stack.fetch.transport import Transport
    from sm120.stack.lock import LockedFile

_SHA256 = re.compile(r"[0-9a-f]{64}")
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+!-]{0,250}")
_UNHASHED = "unhashed"
_BLOCK = 2**20


class Store:
    def __init__(self, root: Path) -> None:
        self.root = root
        self._verified: set[str] = set()  # SHA-256 of what this process has seen whole

    def path(self, file: "LockedFile") -> Path:
        return self._place(file.sha256, file.filename)

    def has(self, file: "LockedFile") -> bool:
        """Whether the file is in its place, in the size that is known. ``check`` looks at what is in it."""
        try:
            found = self.path(file).stat().st_size
        except OSError:
            return False
        return file.size is None or found == file.size

    def missing_bytes(self, wanted: Iterable["LockedFile"]) -> int:
        """What ``fetch`` would still have to bring, as far as sizes are known."""
        return sum(max(0, (file.size or 0) - self._partial_size(file)) for file in wanted if not self.has(file))

    def fetch(self, wanted: Sequence["LockedFile"], transport: "Transport | None", console: "Console") -> None:
        """Brings every file to its place; without a transport only from file URLs.

        Raises PreflightError (no network, no space, gone), BinaryError (another file than the one that is wanted).
        """
        from sm120.stack.fetch.download import Job, fetch_all

        missing = [file for file in wanted if not self.path(file).exists()]
        if not missing:
            return
        jobs = [
            Job(url=file.url, sha256=file.sha256, size=file.size, filename=file.filename, path=self.path(file))
            for file in missing
        ]
        for job in jobs:
            files.make_folder(job.path.parent)
        fetch_all(jobs, transport, console, self.missing_bytes(missing))
        self._verified.update(file.sha256 for file in missing)

    def fetch_unhashed(
        self, url: str, filename: str, transport: "Transport | None", console: "Console"
    ) -> tuple[str, int]:
        """SHA-256 and size of a file whose index states no hash; it is in the store afterwards.

        A file that was fetched before is asked for again, but sent again only when the server says that it has changed.
        """
        from sm120.stack.fetch.download import Job, fetch_all

        folder = files.make_folder(self.root / _UNHASHED / hashlib.sha256(redact.redact(url).encode()).hexdigest())
        path = folder / _checked_name(filename)
        with files.lock(folder / ".lock", waiting=f"another process is fetching {filename}; waiting for it"):
            seen = self._seen(folder, filename)
            job = Job(url=url, filename=filename, path=path, known_tag=seen[1] if seen else None)
            (fetched,) = fetch_all([job], transport, console, 0)
            if fetched.unchanged and seen is not None:
                return seen[0], self._place(seen[0], filename).stat().st_size
            digest, length = self.add(path)
            path.unlink()
            files.write_json_atomic(folder / "seen.json", {"sha256": digest, "tag": fetched.tag})
            return digest, length

    def add(self, path: Path) -> tuple[str, int]:
        """Takes a file in under its own name, and leaves it where it is. Returns SHA-256 and size."""
        digest = files.sha256(path)
        place = self._place(digest, path.name)
        files.make_folder(place.parent)
        take(path, place, digest)
        self._verified.add(digest)
        return digest, place.stat().st_size

    def check(self, wanted: Iterable["LockedFile"]) -> None:
        """Raises BinaryError when a file in the store is not, or no longer, the one that it is named after."""
        for file in wanted:
            if file.sha256 in self._verified:
                continue
            path = self.path(file)
            found = files.sha256(path)
            if found != file.sha256:
                raise errors.BinaryError(
                    f"{file.filename} in the wheel store has changed: expected SHA-256 {file.sha256}, found {found}",
                    where=str(path),
                    remedy=f"rm {shlex.quote(str(path))}; then run the same command again to fetch it anew",
                )
            self._verified.add(file.sha256)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """While this is held, in any process, nothing is pruned."""
        with self._lock_file() as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            yield

    def prune(self, keep: Iterable[str]) -> int:
        """Drops every file but those with these SHA-256, unless the store is in use. Returns the bytes freed."""
        kept = set(keep)
        freed = 0
        with self._lock_file() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return 0
            for folder in self.root.iterdir():
                if folder.name in kept or not (folder.name == _UNHASHED or _SHA256.fullmatch(folder.name)):
                    continue
                targets = [path for path in folder.iterdir() if not self._is_seen(path, kept)]
                for path in targets if folder.name == _UNHASHED else [folder]:
                    freed += sum(item.stat().st_size for item in path.rglob("*") if item.is_file())
                    shutil.rmtree(path, ignore_errors=True)
        return freed

    def _lock_file(self) -> contextlib.AbstractContextManager[IO[str]]:
        files.make_folder(self.root)
        with files.writing(self.root):
            return (self.root / ".lock").open("a")

    def _place(self, sha256: str, filename: str) -> Path:
        if not _SHA256.fullmatch(sha256):
            raise errors.UsageError(f"{filename}: {sha256!r} is no SHA-256 in lower-case hexadecimal digits")
        return self.root / sha256 / _checked_name(filename)

    def _partial_size(self, file: "LockedFile") -> int:
        path = self.path(file)
        with contextlib.suppress(OSError):
            return path.with_name(f"{path.name}.part").stat().st_size
        return 0

    def _seen(self, folder: Path, filename: str) -> tuple[str, str] | None:
        """SHA-256 and validator of a file that is still in the store."""
        with contextlib.suppress(errors.UsageError):
            content = files.read_json(folder / "seen.json")
            if isinstance(content, dict) and isinstance(content.get("tag"), str) and content["tag"]:
                place = self._place(str(content.get("sha256")), filename)
                if place.is_file() and files.sha256(place) == content["sha256"]:
                    return str(content["sha256"]), content["tag"]
        return None

    @staticmethod
    def _is_seen(folder: Path, kept: set[str]) -> bool:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            return json.loads((folder / "seen.json").read_text("utf-8")).get("sha256") in kept
        return False


def _checked_name(filename: str) -> str:
    if not _PLAIN.fullmatch(filename):
        raise errors.UsageError(f"{filename!r} is no file name that a wheel can have")
    return filename


def take(source: Path, place: Path, sha256: str | None) -> None:
    """Brings a local file to its place by a hard link, or else by a copy, whole or not at all; the source stays.

    Raises PreflightError when it is gone or there is no space, BinaryError when its SHA-256 is another.
    """
    if not source.is_file():
        raise errors.PreflightError(
            f"{source.name} is gone from {source.parent}",
            where=str(source),
            remedy="put it back, or resolve anew, which takes what exists now: add --lock to the setup command",
        )
    temporary = place.with_name(f".{place.name}.{os.getpid()}.tmp")
    with files.writing(place):
        try:
            temporary.unlink(missing_ok=True)
            try:
                temporary.hardlink_to(source.resolve())
            except OSError:
                shutil.copyfile(source, temporary)
            if sha256 is not None and (found := files.sha256(temporary)) != sha256:
                raise wrong_file(place.name, f"SHA-256 {sha256}", f"SHA-256 {found}", str(source))
            temporary.replace(place)
        finally:  # also after the replacement: it does nothing where both are links to one file
            temporary.unlink(missing_ok=True)


def wrong_file(filename: str, expected: str, found: str, place: str) -> errors.BinaryError:
    """The one error for a file that is not what the lock says."""
    is_local = "://" not in place
    place = redact.redact(place)
    return errors.BinaryError(
        f"{filename} is not the file that the lock names: expected {expected}, found {found}, at {place}",
        where=place,
        remedy="put the right file there (for a mirror, setup --mirror does it where the network is); or take what is"
        " there now: add --lock to the setup command"
        if is_local
        else "if that index serves a new build under the old name, resolve anew: add --lock to the setup command;"
        " else look for a proxy or a mirror that changes files",
    )


def file_path(url: str) -> Path | None:
    """The local path that a file URL names; None for every other URL."""
    parts = urlsplit(url)
    return Path(unquote(parts.path)) if parts.scheme == "file" and parts.netloc in {"", "localhost"} else None


@contextlib.contextmanager
def locked_part(path: Path, stopped: Callable[[], bool]) -> Iterator[FileIO | None]:
    """The partial file of ``path``, open for reading and appending, and ours alone; None when we are to stop first.

    Unbuffered: what could not be written must not be tried again when the file is closed.
    """
    part = path.with_name(f"{path.name}.part")
    while not stopped():
        with files.writing(part):
            opened = part.open("a+b", buffering=0)
        with opened as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.1)
                continue
            # Whoever held it may have moved it to its place meanwhile: then this is no longer the partial file.
            if not part.exists() or not os.path.samestat(part.stat(), os.fstat(file.fileno())):
                continue
            yield file
            return
    yield None


def digest_of(file: FileIO) -> "tuple[hashlib._Hash, int]":
    """A running SHA-256 over what is in an open file, and its length; the file then stands at its end."""
    digest, length = hashlib.sha256(), 0
    file.seek(0)
    while block := file.read(_BLOCK):
        digest.update(block)
        length += len(block)
    return digest, length

"""Archives: brought by their hash, and unpacked so that nothing leaves the folder."""

import gzip
import lzma
import tarfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from sm120 import errors, files, redact
from sm120.build.source.address import file_name
from sm120.state import State

if TYPE_CHECKING:
    from sm120.console import Console

LARGEST = 16 * 10**9  # bytes that an archive may hold; triton has 0.1 GB
MOST = 500_000  # files that it may hold


def kept(sha256: str, url: str, state: State) -> Path | None:
    """The archive, when it is here and whole."""
    path = state.sources / "archives" / sha256 / _plain(url)
    return path if path.is_file() and files.sha256(path) == sha256 else None


def download(url: str, sha256: str | None, place: str, state: State, console: "Console") -> tuple[Path, str]:
    """The file and its SHA-256. Raises PreflightError, and BinaryError when it is another than was asked for."""
    from sm120.stack.fetch.store import Store
    from sm120.stack.fetch.transport import Transport
    from sm120.stack.lock import LockedFile
    from sm120.stack.resolve.pipconfig import read_pip_config

    store, name = Store(state.sources / "archives"), _plain(url)
    try:
        if sha256 is None:
            sha256, _ = store.fetch_unhashed(url, name, Transport(read_pip_config()), console)
            return store.root / sha256 / name, sha256
        wanted = LockedFile(name=name, version="", filename=name, url=url, sha256=sha256, size=None)
        path = store.path(wanted)
        if path.exists() and files.sha256(path) != sha256:
            with files.writing(path):
                path.unlink()
        store.fetch([wanted], Transport(read_pip_config()), console)
    except errors.BinaryError as error:
        found = error.message.rpartition("found SHA-256 ")[2].partition(",")[0]
        raise wrong(redact.redact(url), sha256 or "", found, place) from error
    except errors.PreflightError as error:
        if error.where is None or "://" not in error.where:  # of the disk, not of the server
            raise
        raise errors.PreflightError(
            error.message,
            where=f"{place}: {error.where}",
            remedy="run the same command again when it can be reached, it goes on where it stopped; without a network:"
            " scripts/inv build-kernels --git-mirror DIR, a folder that holds the file, or --dependency NAME=DIR",
        ) from error
    return path, sha256


def wrong(what: str, expected: str, found: str, place: str) -> errors.BinaryError:
    return errors.BinaryError(
        f"{what} is not the archive that {place} asks for: expected SHA-256 {expected}, found {found}",
        where=place,
        remedy="look for a proxy or a mirror that changes files; or name a folder with --dependency NAME=DIR",
    )


def unpack(archive: Path, destination: Path) -> Path:
    """Unpacks into an empty folder. Returns the folder of the contents: the one on top, if that is all there is.

    Raises BinaryError for what is no archive, or one that would write elsewhere; PreflightError without space.
    """
    files.make_folder(destination)
    try:
        with tarfile.open(archive, "r:*") as tar:
            tar.extractall(destination, members=_bounded(tar), filter=_safe)  # noqa: S202 - members and filter guard it
    except (tarfile.TarError, EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile, ValueError) as error:
        raise errors.BinaryError(
            f"{archive} cannot be unpacked: {error}",
            where=str(archive),
            remedy=f"if it is damaged, rm {archive} and run the same command again",
        ) from error
    except OSError as error:
        raise files.no_write(destination, error) from error
    top = list(destination.iterdir())
    return top[0] if len(top) == 1 and top[0].is_dir() and not top[0].is_symlink() else destination


def _bounded(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    size = count = 0
    for member in tar:
        size, count = size + member.size, count + 1
        if size > LARGEST or count > MOST:
            raise tarfile.TarError(f"it holds more than {LARGEST // 10**9} GB, or more than {MOST} files")
        yield member


def _safe(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo | None:
    """The time is now: an older one would hide from ninja that a file has changed."""
    safe = tarfile.data_filter(member, path)
    return safe.replace(mtime=time.time(), deep=False)


def _plain(url: str) -> str:
    """A name that the store takes."""
    from sm120.runs import safe_name

    return safe_name(file_name(url))

"""Files of a folder: which count, their hash, and a copy of them that is brought up to date."""

import contextlib
import filecmp
import hashlib
import os
import posixpath
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sm120 import errors, files

_MADE = {"__pycache__", ".git", ".mypy_cache", ".pytest_cache", "_skbuild"}  # wherever they are
_MADE_ABOVE = {"build", "dist"}  # by an earlier build in place, at the top
_MADE_ENDS = (".so", ".pyc", ".egg-info")


@dataclass(frozen=True, kw_only=True)
class Item:
    """One file of a copy: bytes, or those of a file, or a symbolic link."""

    source: Path | None = None
    data: bytes | None = None
    link: str | None = None
    executable: bool = False


def is_made(path: str) -> bool:
    """Whether an earlier build in place made it, or git or Python: by its path below the component's folder."""
    parts = path.split("/")
    return bool(_MADE & set(parts)) or parts[0] in _MADE_ABOVE or any(part.endswith(_MADE_ENDS) for part in parts)


def walk(folder: Path) -> Iterator[str]:
    """Paths of files and symbolic links below a folder, git's own left out."""
    for place, folders, names in os.walk(folder):
        below = Path(place).relative_to(folder).as_posix()
        links = [name for name in folders if (Path(place) / name).is_symlink()]
        folders[:] = sorted(name for name in folders if name != ".git" and name not in links)
        for name in sorted([*names, *links]):
            if name != ".git":
                yield name if below == "." else f"{below}/{name}"


def items(folder: Path, paths: Sequence[str]) -> dict[str, Item]:
    """What is at the paths; one that is gone is left out. Raises PreflightError for a link that leads outside."""
    found = {}
    for path in paths:
        place = folder / path
        try:
            mode = place.lstat().st_mode
            if stat.S_ISLNK(mode):
                found[path] = Item(link=_inner_link(folder, path))
            elif stat.S_ISREG(mode):
                found[path] = Item(source=place, executable=bool(mode & 0o100))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise unreadable(place, error) from error
    return found


def _inner_link(folder: Path, path: str) -> str:
    target = str((folder / path).readlink())
    lexical = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
    try:
        is_inside = (folder / path).resolve().is_relative_to(folder.resolve())
    except RuntimeError:  # a link that leads to itself
        is_inside = False
    if target.startswith("/") or lexical.split("/")[0] == ".." or not is_inside:
        raise errors.PreflightError(
            f"the symbolic link {folder / path} leads out of the folder, to {target}",
            where=str(folder / path),
            remedy="put the file itself in its place; a build's copy holds nothing else of this machine",
        )
    return target


def content(found: Mapping[str, Item]) -> str:
    """SHA-256 over paths, exec bits and bytes."""
    total = hashlib.sha256()
    for path, item in sorted(found.items()):
        kind = "link" if item.link is not None else "executable" if item.executable else "file"
        total.update(os.fsencode(f"{kind}\0{path}\0{_digest(item)}\n"))
    return total.hexdigest()


def _digest(item: Item) -> str:
    if item.source is not None:
        try:
            return files.sha256(item.source)
        except OSError as error:
            raise unreadable(item.source, error) from error
    data = os.fsencode(item.link) if item.link is not None else (item.data or b"")
    return hashlib.sha256(data).hexdigest()


def bring(wanted: Mapping[str, Item], destination: Path) -> None:
    """Makes a folder hold just these files. One that is as it should be keeps its time of change.

    Each file is whole or absent; interrupted, it goes on the next time. Raises PreflightError.
    """
    for path in wanted:
        if path.startswith("/") or {"", ".", "..", ".git"} & set(path.split("/")):
            raise ValueError(f"{path!r} is no path below the folder")
    with files.writing(destination):
        if destination.is_symlink():
            destination.unlink()
        destination.mkdir(parents=True, exist_ok=True)
        _prune(wanted, destination)
    for path, item in sorted(wanted.items()):
        place = destination / path
        if not _is_there(item, place):
            with files.writing(place):
                _write(item, place)


def _prune(wanted: Mapping[str, Item], destination: Path) -> None:
    folders = {str(parent) for path in wanted for parent in Path(path).parents}
    for place, below, names in os.walk(destination, topdown=False):
        here = Path(place)
        for name in [*names, *below]:
            path = here / name
            relative = path.relative_to(destination).as_posix()
            if path.is_symlink() or not path.is_dir():
                if relative not in wanted:
                    path.unlink()
            elif relative not in folders:
                with contextlib.suppress(OSError):  # not empty: what stays in it is wanted
                    path.rmdir()


def _is_there(item: Item, place: Path) -> bool:
    try:
        mode = place.lstat().st_mode
        if item.link is not None:
            return stat.S_ISLNK(mode) and str(place.readlink()) == item.link
        if not stat.S_ISREG(mode) or bool(mode & 0o100) != item.executable:
            return False
        if item.source is not None:
            return filecmp.cmp(item.source, place, shallow=False)
        return place.read_bytes() == item.data
    except OSError:
        return False


def _write(item: Item, place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    part = place.with_name(f".{place.name[:200]}.part")
    part.unlink(missing_ok=True)
    try:
        if item.link is not None:
            part.symlink_to(item.link)
        else:
            if item.source is not None:
                _copy(item.source, part)
            else:
                part.write_bytes(item.data or b"")
            part.chmod(0o755 if item.executable else 0o644)
        part.replace(place)
    finally:
        part.unlink(missing_ok=True)


def _copy(source: Path, part: Path) -> None:
    try:
        opened = source.open("rb")
    except OSError as error:
        raise unreadable(source, error) from error
    with opened, part.open("wb") as into:
        shutil.copyfileobj(opened, into, 2**20)


def unreadable(path: Path, error: OSError) -> errors.PreflightError:
    return errors.PreflightError(
        f"cannot read {path}: {error.strerror or error}", where=str(path), remedy="make it readable, or take it away"
    )


def remove(path: Path) -> None:
    """Takes away whatever is there, write-protected folders included. Raises PreflightError."""
    with files.writing(path):
        if path.is_symlink() or path.is_file():
            path.unlink()
        elif path.exists():
            shutil.rmtree(path)

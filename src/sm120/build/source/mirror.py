"""A folder of git repositories and archives that stands for the network."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from sm120 import errors, files
from sm120.build.source.address import Address, archive_names
from sm120.build.source.git import PROTOCOLS, numbered

_FORGE = "github.com"  # whose repositories a folder OWNER/NAME holds
_ARCHIVES = ("", "archives")


@dataclass(frozen=True, kw_only=True)
class Mirror:
    folder: Path

    def repository(self, where: Address) -> Path | None:
        return next((self.folder / place for place in where.places() if is_repository(self.folder / place)), None)

    def archive(self, url: str, sha256: str | None) -> tuple[Path | None, tuple[Path, ...]]:
        """The file with that SHA-256, or else those that are named as it is and hold something else.

        Where no SHA-256 is known, the name with the owner in it is taken at its word, and then the other.
        """
        named = [self.folder / place / name for name in archive_names(url) for place in _ARCHIVES]
        there = tuple(path for path in named if path.is_file())
        if sha256 is None:
            return next(iter(there), None), ()
        right = next((path for path in there if files.sha256(path) == sha256), None)
        return right, () if right else there


def open_mirror(folder: Path | None) -> Mirror | None:
    """Raises PreflightError when it is no folder."""
    if folder is None:
        return None
    if not folder.is_dir():
        raise errors.PreflightError(
            f"--git-mirror {folder} is no folder",
            where=str(folder),
            remedy="name a folder that holds OWNER/NAME.git for each repository, as git clone --mirror makes them",
        )
    return Mirror(folder=folder.absolute())


def is_repository(place: Path) -> bool:
    return ((place / "HEAD").is_file() and (place / "objects").is_dir()) or (place / ".git").exists()


def git_environment(mirror: Path | None) -> dict[str, str]:
    """What a build's own git gets, beside our environment: CMake's clones of what we did not fetch.

    With a mirror it reads nothing else: addresses lead into it, and only files may be read.
    """
    made = {"GIT_TERMINAL_PROMPT": "0", "GIT_ALLOW_PROTOCOL": PROTOCOLS}
    opened = open_mirror(mirror)
    if opened is None:
        return made
    home = opened.folder / _FORGE if (opened.folder / _FORGE).is_dir() else opened.folder
    settings = [_instead(f"https://{_FORGE}/", f"{home}/")]
    for host, name, place in _repositories(opened.folder):
        for start in (f"https://{host}/", f"http://{host}/", f"git://{host}/", f"ssh://git@{host}/", f"git@{host}:"):
            settings += [_instead(f"{start}{name}{end}", str(place)) for end in ("", ".git")]
    return {**made, "GIT_ALLOW_PROTOCOL": "file", **numbered(settings, os.environ)}


def _instead(prefix: str, place: str) -> tuple[str, str]:
    return f"url.file://{quote(place)}.insteadOf", prefix


def _repositories(folder: Path) -> Iterator[tuple[str, str, Path]]:
    """Host, OWNER/NAME and place of what lies in OWNER/NAME.git or HOST/OWNER/NAME.git."""
    for first in _folders(folder):
        for second in _folders(first):
            if is_repository(second):
                yield _FORGE, f"{first.name}/{second.name.removesuffix('.git')}", second
                continue
            for third in _folders(second):
                if is_repository(third):
                    yield first.name, f"{second.name}/{third.name.removesuffix('.git')}", third


def _folders(folder: Path) -> list[Path]:
    try:
        return [] if is_repository(folder) else sorted(path for path in folder.iterdir() if path.is_dir())
    except OSError:
        return []

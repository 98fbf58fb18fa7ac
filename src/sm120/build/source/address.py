"""Addresses of repositories and archives, and names of revisions: what is one, and where it is kept."""

import posixpath
import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from urllib.parse import quote, unquote, urlsplit

from sm120 import errors, redact

_SCHEMES = {"https", "http", "ssh", "git", "file"}
_SCP = re.compile(r"(?:[A-Za-z0-9_][\w.-]*@)?(?P<host>[A-Za-z0-9][A-Za-z0-9.-]*):(?!/?/)(?P<path>[^\s:]+)")
_REVISION = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._/+-]*[A-Za-z0-9_+-])?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHORT = re.compile(r"[0-9a-f]{7,39}")
_TARBALL = re.compile(r"\.(?:tar|tar\.gz|tgz|tar\.bz2|tbz2|tar\.xz|txz)$")
_OF_COMMIT = re.compile(r"(?P<repository>/[^/]+/[^/]+)/archive/(?:refs/tags/)?(?P<revision>.+?)\.(?:tar\.gz|tgz)")


@dataclass(frozen=True, kw_only=True)
class Address:
    """Of a git repository. May hold a password: show ``label``."""

    url: str
    host: str  # with its port when that is named; "" for a repository on this machine
    parts: tuple[str, ...]  # of the path, the last without .git

    @property
    def label(self) -> str:
        return redact.redact(self.url)

    @property
    def name(self) -> str:
        """For short: NVIDIA/cutlass."""
        return "/".join(self.parts[-2:])

    @property
    def kept(self) -> PurePosixPath:
        """The folder of its store, below that of all stores."""
        *folders, last = [quote(part, safe="+@") for part in self.parts]
        return PurePosixPath(self.host.replace(":", "_") or "local", *folders, f"{last}.git")

    def places(self) -> tuple[str, ...]:
        """Where a mirror may have it, below its folder, the most exact first."""
        full, last = posixpath.join(*self.parts), self.parts[-1]
        names = [posixpath.join(self.host, full)] if self.host else []
        return tuple(f"{name}{end}" for name in dict.fromkeys([*names, full, last]) for end in (".git", ""))


def address(url: str) -> Address:
    """Raises PreflightError for what git must not be given: other transports, options, relative paths."""
    if url.startswith("/"):
        host, path = "", url
    elif "://" in url:
        try:
            split = urlsplit(url)
            host, path = (split.hostname or "") + (f":{split.port}" if split.port else ""), unquote(split.path)
        except ValueError:
            split, host, path = urlsplit(""), "", ""
        if split.scheme not in _SCHEMES or (not host and split.scheme != "file") or host.startswith("-"):
            raise _refused(url)
    elif found := _SCP.fullmatch(url):
        host, path = found["host"].lower(), found["path"]
    else:
        raise _refused(url)
    parts = [part for part in path.split("/") if part and part != "."]
    if not parts or ".." in parts or "\0" in path or any(ord(letter) < 32 for letter in url):
        raise _refused(url)
    last = parts[-1].removesuffix(".git")
    return Address(url=url, host=host, parts=(*parts[:-1], last or parts[-1]))


def _refused(url: str) -> errors.PreflightError:
    return errors.PreflightError(
        f"{redact.redact(url)!r} is no address of a git repository that is taken",
        where=redact.redact(url),
        remedy="write it as in https://github.com/NVIDIA/cutlass, ssh://git@host/a/b.git or /a/folder",
    )


def relative(base: str, url: str) -> str:
    """A submodule's address; ``./`` and ``../`` are relative to the repository that names it, as git has it."""
    if not url.startswith(("./", "../")):
        return url
    base = base.rstrip("/")
    while True:
        if url.startswith("./"):
            url = url[2:]
        elif url.startswith("../"):
            url = url[3:]
            cut = max(base.rfind("/"), base.rfind(":"))
            if cut < 0:
                return url
            base = base[:cut] if base[cut] == "/" else base[: cut + 1]
        else:
            return f"{base}{url}" if base.endswith(":") else f"{base}/{url}"


def is_revision(text: str) -> bool:
    """Whether it can be a commit, a tag or a branch, and nothing else to git."""
    bad = ("..", "//", "/.", "./", ".lock/")
    return (
        _REVISION.fullmatch(text) is not None and not any(part in text for part in bad) and not text.endswith(".lock")
    )


def is_commit(text: str) -> bool:
    return _COMMIT.fullmatch(text) is not None


def is_short_commit(text: str) -> bool:
    return _SHORT.fullmatch(text) is not None


def is_tarball(url: str) -> bool:
    return _TARBALL.search(urlsplit(url).path) is not None


def file_name(url: str) -> str:
    return posixpath.basename(unquote(urlsplit(url).path))


def archive_names(url: str) -> tuple[str, ...]:
    """What an archive may be called in a mirror: ``owner-name-v1.tar.gz`` or ``v1.tar.gz``."""
    last = file_name(url)
    parts = [part for part in unquote(urlsplit(url).path).split("/") if part]
    names = [f"{parts[0]}-{parts[1]}-{last}"] if len(parts) > 2 else []
    return tuple(name for name in (*names, last) if name and "\0" not in name)


def archived(url: str) -> tuple[str, str] | None:
    """Repository and revision of an archive that a forge makes of a commit or a tag; None for any other archive."""
    split = urlsplit(url)
    found = _OF_COMMIT.fullmatch(unquote(split.path))
    if found is None or split.scheme not in {"https", "http"} or not is_revision(found["revision"]):
        return None
    return f"{split.scheme}://{split.netloc}{found['repository']}", found["revision"]

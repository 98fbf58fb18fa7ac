"""What git's failures mean, and what the user is told of each."""

import errno
import os
import re
import shlex
from collections.abc import Sequence
from enum import Enum
from pathlib import Path

from sm120 import errors, files
from sm120.build.source.address import Address, is_commit


class Trouble(Enum):
    """Kinds of git's failures, by the cure."""

    FULL = "the disk is full"
    OWNER = "the repository belongs to another user"
    HOST = "the host's name is not known"
    EXACT = "the server does not serve single commits"
    REVISION = "the revision is not there"
    ABSENT = "the repository is not there, or needs a login"
    DAMAGED = "objects are missing or broken"
    NETWORK = "the connection fails"
    OTHER = "something else"


_SAYS = {  # in this order: git reports the cause first, and then that the connection ended
    Trouble.FULL: r"No space left on device|Disk quota exceeded|unable to write (?:file|new index|loose object)",
    Trouble.OWNER: r"detected dubious ownership",
    Trouble.HOST: r"Could not resolve|Name or service not known|name resolution"
    r"|unable to look up",
    Trouble.EXACT: r"unadvertised object|does not support shallow|transport does not support",
    Trouble.REVISION: r"not our ref|couldn't find remote ref|no such remote ref",
    Trouble.ABSENT: r"repository '.*' (?:not found|does not exist)|Repository not found"
    r"|could not read (?:Username|Password)|terminal prompts disabled|Authentication failed"
    r"|Permission denied \(|returned error: (?:401|403|404|410)\b"
    r"|does not appear to be a git repository|Host key verification failed",
    Trouble.DAMAGED: r"repository corruption|bad object|unable to read [0-9a-f]{7}|unable to read sha1"
    r"|missing (?:blob|tree)|object file \S+ is empty|is corrupt"
    r"|did not send all necessary objects|not a valid object|invalid sha1 pointer"
    r"|inflate: |[Cc]ould not read [0-9a-f]{7}|did not receive expected object|failed to unpack tree|bad tree object",
    Trouble.NETWORK: r"Failed to connect|[Cc]onnection (?:refused|reset|timed out|closed)|[Tt]imed out|early EOF"
    r"|hung up unexpectedly|unexpected disconnect|RPC failed|returned error: (?:429|5\d\d)|Empty reply|gnutls|SSL"
    r"|[Cc]ertificate|is unreachable|No route to host|ssh: connect to host|transfer closed|HTTP/2 stream|too slow",
}


def trouble(lines: Sequence[str]) -> tuple[Trouble, str]:
    """What failed, and the line of git's output that says so."""
    for kind, pattern in _SAYS.items():
        for line in lines:
            if re.search(pattern, line):
                return kind, _words(line)
    said = [line for line in lines if line.startswith(("fatal:", "error:"))] or [line for line in lines if line.strip()]
    return Trouble.OTHER, _words(said[0]) if said else "it says nothing"


def _words(line: str) -> str:
    return re.sub(r"^(?:remote: |fatal: |error: )+", "", line.strip())[:300]


class Failed(Exception):
    def __init__(self, kind: Trouble, said: str) -> None:
        super().__init__(said)
        self.kind = kind
        self.said = said


def explained(
    failed: Failed, where: Address, revision: str, asked_by: str, *, mirror: Path | None, store: Path
) -> errors.PreflightError:
    """The one error for a fetch that failed, by its cause."""
    short = revision[:12] if is_commit(revision) else revision
    what = "commit" if is_commit(revision) else "commit, tag or branch"
    url, said, place = where.label, failed.said, asked_by or where.label
    offline = "without a network: scripts/inv build-kernels --git-mirror DIR, or --source and --dependency"
    if failed.kind is Trouble.FULL:
        return files.no_write(store, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    if mirror is not None:
        quoted = shlex.quote(str(mirror))
        message, remedy = {
            Trouble.OWNER: (
                f"the mirror {mirror} belongs to another user, and git does not serve it",
                f"git config --global --add safe.directory {quoted}",
            ),
            Trouble.REVISION: (
                f"the mirror {mirror} has no {what} {revision} of {url}",
                f"bring it up to date where the network is: {bring_up_to_date(where, mirror)}",
            ),
            Trouble.DAMAGED: (
                f"the mirror {mirror} is damaged: objects of {short} are missing or broken ({said})",
                f"make it anew where the network is: git clone --mirror {url} {quoted}",
            ),
        }.get(failed.kind, (f"git cannot read {short} from the mirror {mirror}: {said}", f"try git -C {quoted} fsck"))
        return errors.PreflightError(message, where=place, remedy=remedy)
    host = where.host or "this machine"
    message, remedy = {
        Trouble.HOST: (f"the name of the host {host} cannot be resolved: {said}", f"check the network; {offline}"),
        Trouble.NETWORK: (
            f"{host} cannot be reached, three times tried: {said}",
            f"check the network and git's proxy, then run the same command again; {offline}",
        ),
        Trouble.ABSENT: (
            f"{url} is no repository that can be read without a login: {said}",
            "check the address; for a private one, set up git so that git ls-remote of it works without asking",
        ),
        Trouble.REVISION: (
            f"{url} has no {what} {revision}",
            "correct it where it is asked for; a fork may have it, or the upstream repository no longer does",
        ),
        Trouble.DAMAGED: (
            f"objects of {short} from {url} are missing or broken: {said}",
            f"rm -r {shlex.quote(str(store))}; then run the same command again to fetch it anew",
        ),
    }.get(failed.kind, (f"git cannot fetch {short} from {url}: {said}", "see git's log in the run's folder"))
    return errors.PreflightError(message, where=place, remedy=remedy)


def bring_up_to_date(where: Address, mirror: Path) -> str:
    return f"git -C {shlex.quote(str(mirror))} fetch {where.label} '+refs/*:refs/*'"

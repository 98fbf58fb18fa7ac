"""A series on every version of the build files that a git repository's history holds. For developers of patches."""

import os
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from packaging.version import Version

from sm120 import errors
from sm120.build.patches.engine import propose_for
from sm120.build.patches.outcome import Context, State
from sm120.build.patches.series import Series
from sm120.build.patches.tree import FOLDERS, ROOT_FILE, Layout, Reader, Tree

CONTEXTS = (
    Context(cmake=Version("3.26.4"), cuda=Version("12.9"), torch=Version("2.9.1"), compile_threads=1),
    Context(cmake=Version("3.31.10"), cuda=Version("13.0"), torch=Version("2.11.0"), compile_threads=2),
    Context(cmake=Version("4.2.3"), cuda=Version("13.2"), torch=Version("2.15.0"), architectures=("120f",)),
    Context(cmake=Version("4.2.3"), cuda=Version("13.0"), torch=Version("2.14.1"), architectures=("120a", "121a")),
)
COLUMNS = ("patch", "applied", *(str(state) for state in (State.UPSTREAM, State.NOT_NEEDED, State.CONFLICT)))
_TIMEOUT = 600.0  # seconds, for one command of git
_GIT = {"GIT_NO_LAZY_FETCH": "1", "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}


@dataclass(frozen=True, kw_only=True)
class Conflict:
    commit: str
    folder: str
    patch: str
    where: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Counts:
    versions: int  # distinct build files
    contexts: int  # each version is tried under each
    states: dict[str, Counter[State]]  # patch → how often each state came out; PENDING is one that applied
    conflicts: tuple[Conflict, ...] = field(default=())

    def rows(self) -> list[tuple[str, ...]]:
        """In the order of COLUMNS."""
        order = (State.PENDING, State.UPSTREAM, State.NOT_NEEDED, State.CONFLICT)
        return [(name, *(str(counted[state]) for state in order)) for name, counted in self.states.items()]


@dataclass(frozen=True, kw_only=True)
class BuildVersion:
    commit: str  # the newest that holds it
    layout: Layout


def corpus(
    repository: Path,
    series: Series,
    *,
    folders: Sequence[str] = tuple(FOLDERS),
    since: str = "2025-09-01",
    contexts: Sequence[Context] = CONTEXTS,
) -> Counts:
    """Tries each distinct version of the build files since a date, on all branches. Nothing is checked out.

    A patch whose result it would change again, or whose result is no CMake, counts as a conflict. Raises PatchError
    when the repository cannot be read or holds no version.
    """
    states: dict[str, Counter[State]] = {patch.name: Counter() for patch in series.patches}
    conflicts: list[Conflict] = []
    found = versions(repository, folders, since)
    with _blobs(repository) as blob:
        for version in found:
            read = _reader(blob, version.commit)
            for context in contexts:
                for patch, state, where, reason in _try(series, read, version.layout, context):
                    states[patch][state] += 1
                    if state is State.CONFLICT:
                        place = {"commit": version.commit, "folder": version.layout.folder}
                        conflicts.append(Conflict(**place, patch=patch, where=where, reason=reason))
    return Counts(versions=len(found), contexts=len(contexts), states=states, conflicts=tuple(dict.fromkeys(conflicts)))


def _try(series: Series, read: Reader, layout: Layout, context: Context) -> Iterator[tuple[str, State, str, str]]:
    """Patch, state, place and reason of each, the series once and once more on what it made."""
    tree = Tree(read, layout)
    made = propose_for(series, tree, context)
    again = propose_for(series, Tree(tree.with_changes(made.changes).bytes_of, layout), context)
    changed = {outcome.patch: outcome for outcome in again.outcomes if outcome.state in {State.PENDING, State.CONFLICT}}
    for outcome in made.outcomes:
        second = changed.get(outcome.patch)
        if outcome.state is not State.CONFLICT and second is not None and (second.edits or not outcome.environment):
            yield outcome.patch, State.CONFLICT, ", ".join(second.where), f"a second time: {second.reason}"
        else:
            yield outcome.patch, outcome.state, ", ".join(outcome.where), outcome.reason


def versions(repository: Path, folders: Sequence[str], since: str) -> tuple[BuildVersion, ...]:
    """The newest commit for each distinct set of build files, by the ids of their blobs."""
    found: dict[tuple[str, str], BuildVersion] = {}
    for folder in folders:
        layout = Layout(folder=folder, when=FOLDERS.get(folder, ""))
        paths = [layout.path(ROOT_FILE), layout.path("cmake")]
        words = ["log", "--all", "--full-history", f"--since={since}", "--format=%H", "--", *paths]
        for commit in _git(repository, *words).split():
            listed = _git(repository, "ls-tree", "-r", commit, "--", *paths)
            if f"\t{paths[0]}\n" in listed:
                found.setdefault((folder, listed), BuildVersion(commit=commit, layout=layout))
    if not found:
        raise errors.PatchError(
            f"{repository} holds no {ROOT_FILE} of sgl-kernel since {since}: looked in {', '.join(folders)}",
            where=str(repository),
            remedy="name a clone of SGLang with its history",
        )
    return tuple(found.values())


def _git(repository: Path, *words: str) -> str:
    command = ["git", "-C", str(repository), *words]
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **_GIT},
            capture_output=True,
            timeout=_TIMEOUT,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise errors.PreflightError(f"git cannot run: {error}", remedy="install git") from error
    if done.returncode:
        last = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        remedy = "name a clone of SGLang with its history"
        raise errors.PatchError(f"{repository}: git {words[0]}: {last}", where=str(repository), remedy=remedy)
    return done.stdout.decode("utf-8", "surrogateescape")


@contextmanager
def _blobs(repository: Path) -> Iterator["_Blobs"]:
    """One git for all blobs."""
    process = subprocess.Popen(
        ["git", "-C", str(repository), "cat-file", "--batch"],
        env={**os.environ, **_GIT},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    with process:
        if process.stdin is None or process.stdout is None:
            raise ValueError("the child has no pipe")
        yield _Blobs(process.stdin, process.stdout)


class _Blobs:
    def __init__(self, ask: IO[bytes], answer: IO[bytes]) -> None:
        self._ask = ask
        self._answer = answer

    def read(self, name: str) -> bytes | None:
        """The blob's bytes; None when there is none of that name, or it is not here."""
        if "\n" in name:
            return None
        self._ask.write(os.fsencode(f"{name}\n"))
        self._ask.flush()
        head = self._answer.readline().split()
        if len(head) != 3 or not head[2].isdigit():
            return None
        data = self._answer.read(int(head[2]))
        self._answer.read(1)
        return data if head[1] == b"blob" else None


def _reader(blobs: _Blobs, commit: str) -> Reader:
    kept: dict[str, bytes | None] = {}

    def read(path: str) -> bytes | None:
        if path not in kept:
            kept[path] = blobs.read(f"{commit}:{path}")
        return kept[path]

    return read

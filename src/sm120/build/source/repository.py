"""A bare store for each repository: fetched revision by revision, and laid out from there."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sm120 import errors, files
from sm120.build.source.address import Address, is_commit, is_revision, is_short_commit, relative
from sm120.build.source.failure import Failed, Trouble, explained, trouble
from sm120.build.source.git import Git
from sm120.state import State

WAITS = (2.0, 8.0)  # seconds before the second and the third try of a connection that fails
_REFS = "refs/sm120"
_WHOLE = "--depth=2147483647"  # git-fetch(1): infinite
_ALL = f"+refs/heads/*:{_REFS}/heads/*", f"+refs/tags/*:{_REFS}/tags/*"


@dataclass(frozen=True, kw_only=True)
class Submodule:
    path: str
    url: str
    commit: str


class Repository:
    """``mirror`` is the repository on this machine that stands for the address; None: the address itself is asked."""

    def __init__(self, where: Address, git: Git, state: State, mirror: Path | None = None) -> None:
        self.address = where
        self.mirror = mirror
        self.store = state.sources / "git" / where.kept
        self._git = git
        self._url = where.url if mirror is None else str(mirror)

    def find(self, revision: str) -> str | None:
        """The commit, when the store has it. A branch is never found: it goes on."""
        if not (self.store / "HEAD").is_file():
            return None
        if is_commit(revision):
            return self._commit(f"{_REFS}/commits/{revision}")
        return self._commit(f"{_REFS}/tags/{revision}") if is_revision(revision) else None

    def fetch(self, revision: str, *, partial: bool = False, asked_by: str = "") -> str:
        """The commit, in the store afterwards; ``partial`` leaves the files to ``lay_out``, where the server can.

        Raises PreflightError.
        """
        if not is_revision(revision):
            raise errors.PreflightError(
                f"{revision!r} is no commit, tag or branch", where=asked_by, remedy="correct it where it is asked for"
            )
        found = self.find(revision)
        if found is not None:
            return found
        try:
            with self._locked():
                commit = self._fetch(revision, ("--filter=blob:none",) if partial else ())
        except Failed as failed:
            where = self.address
            raise explained(failed, where, revision, asked_by, mirror=self.mirror, store=self.store) from failed
        if is_commit(revision) and commit != revision:
            raise errors.PreflightError(
                f"{revision} of {self.address.label} is no commit", where=asked_by, remedy="name a commit"
            )
        return commit

    def lay_out(self, commit: str, destination: Path, below: str = "") -> None:
        """Writes the files of a commit, or of one folder of it, into an empty folder. Raises PreflightError."""
        files.make_folder(destination)
        index = self.store / "sm120.index"
        extra = {"GIT_DIR": str(self.store), "GIT_WORK_TREE": str(destination), "GIT_INDEX_FILE": str(index)}
        tree = f"{commit}:{below}" if below else commit
        try:
            with self._locked():
                index.unlink(missing_ok=True)
                self._tried(["read-tree", "--reset", "-u", tree], extra)
        except Failed as failed:
            at = destination if failed.kind is Trouble.FULL else self.store
            raise explained(failed, self.address, commit, str(destination), mirror=None, store=at) from failed

    def has_file(self, commit: str, path: str) -> bool:
        return bool(self._ask(commit, "ls-tree", "--name-only", commit, "--", path))

    def committed(self, commit: str) -> int:
        """Seconds since 1970."""
        return int(self._ask(commit, "log", "-1", "--no-show-signature", "--format=%ct", commit, "--"))

    def submodules(self, commit: str) -> tuple[Submodule, ...]:
        """Those that ``git submodule update --init`` would bring."""
        listed = self._ask(commit, "ls-tree", "-r", "-z", commit)
        links = {}
        for entry in listed.split(b"\0"):
            head, _, path = entry.partition(b"\t")
            if head.startswith(b"160000 "):
                links[os.fsdecode(path)] = head.split()[2].decode()
        if not links:
            return ()
        blob = f"--blob={commit}:.gitmodules"
        said = self._git.ask(self.store, "config", blob, "-z", "--get-regexp", r"^submodule\..*\.(path|url|update)$")
        named: dict[str, dict[str, str]] = {}
        for entry in (said or b"").split(b"\0"):
            key, _, value = os.fsdecode(entry).partition("\n")
            name, _, what = key.removeprefix("submodule.").rpartition(".")
            named.setdefault(name, {})[what] = value
        return tuple(
            Submodule(path=one["path"], url=relative(self.address.url, one["url"]), commit=links[one["path"]])
            for one in named.values()
            if one.get("path") in links and one.get("url") and one.get("update") != "none"
        )

    def _ask(self, commit: str, *words: str) -> bytes:
        """About a commit that was fetched."""
        said = self._git.ask(self.store, *words)
        if said is None:
            failed = Failed(Trouble.DAMAGED, f"git {words[0]} fails in {self.store}")
            raise explained(failed, self.address, commit, "", mirror=None, store=self.store)
        return said

    def _commit(self, ref: str) -> str | None:
        said = self._git.ask(self.store, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{ref}^{{commit}}")
        return said.decode().strip() if said else None

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Holds the store, which is made first; what a killed git left in it, and would stop the next, goes."""
        waiting = f"another process fetches {self.address.name}; waiting for it"
        with files.lock(self.store.with_name(f"{self.store.name}.lock"), waiting=waiting):
            files.make_folder(self.store)
            with files.writing(self.store):
                for pattern in ("*.lock", "refs/**/*.lock", "objects/pack/tmp_*", "objects/??/tmp_obj_*"):
                    for left in self.store.glob(pattern):
                        left.unlink()
            if not all((self.store / name).exists() for name in ("HEAD", "config", "objects", "refs")):
                self._tried(["init", "--quiet", "--bare", "--template=", str(self.store)])
            yield

    def _fetch(self, revision: str, options: Sequence[str]) -> str:
        kinds = {"tags": f"refs/tags/{revision}", "heads": f"refs/heads/{revision}"}
        for kind, name in ({"commits": revision} if is_commit(revision) else kinds).items():
            ref = f"{_REFS}/{kind}/{revision}"
            try:
                self._bring([f"+{name}:{ref}"], [*options, "--depth=1"])
            except Failed as failed:
                if failed.kind is Trouble.EXACT:
                    return self._fetch_all(revision)
                if failed.kind is not Trouble.REVISION:
                    raise
            else:
                return self._arrived(ref, revision)
        if is_short_commit(revision):
            return self._fetch_all(revision)
        raise Failed(Trouble.REVISION, f"no {revision} in it")

    def _fetch_all(self, revision: str) -> str:
        """For servers that serve no single commit, and for commits that are not named in full."""
        is_shallow = (
            self.store / "shallow"
        ).exists()  # of an earlier single commit: what is behind it is asked for too
        self._bring(list(_ALL), [_WHOLE] if is_shallow else [])
        for name in (f"{_REFS}/tags/{revision}", f"{_REFS}/heads/{revision}"):
            if (found := self._commit(name)) is not None:
                return found
        found = self._commit(revision) if is_commit(revision) or is_short_commit(revision) else None
        if found is None:
            raise Failed(Trouble.REVISION, f"no {revision} in it")
        self._git.ask(self.store, "update-ref", f"{_REFS}/commits/{found}", found)
        return found

    def _arrived(self, ref: str, revision: str) -> str:
        found = self._commit(ref)
        if found is None:
            raise Failed(Trouble.REVISION, f"{revision} is no commit")
        return found

    def _bring(self, specs: Sequence[str], options: Sequence[str]) -> None:
        words = ["fetch", "--no-tags", "--no-write-fetch-head", "--no-recurse-submodules", *options, "source", *specs]
        try:
            self._tried(["-C", str(self.store), *words])
        except Failed as failed:
            if not any(option.startswith("--filter") for option in options) or "filter" not in failed.said:
                raise
            self._bring(specs, [option for option in options if not option.startswith("--filter")])

    def _tried(self, words: Sequence[str], extra: dict[str, str] | None = None) -> None:
        """Up to three times where the network is at fault. Raises Failed."""
        for wait in (*WAITS, None):
            done = self._git.work(words, [("remote.source.url", self._url)], extra)
            if done.returncode == 0:
                return
            kind, said = trouble(done.tail)
            if kind not in {Trouble.NETWORK, Trouble.HOST} or wait is None:
                raise Failed(kind, said)
            time.sleep(wait)

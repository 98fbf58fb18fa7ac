"""Private checkouts of what the build files ask for: made beside their place, marked, and left alone while right."""

import json
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from sm120 import errors, files
from sm120.build.source import archives, tree
from sm120.build.source.address import address, archive_names, archived, file_name, is_commit
from sm120.build.source.failure import bring_up_to_date
from sm120.build.source.git import Git
from sm120.build.source.mirror import Mirror, open_mirror
from sm120.build.source.model import Checkout, Dependency, Wanted
from sm120.build.source.repository import Repository
from sm120.console import Console
from sm120.runs import Run
from sm120.state import State

_SCHEMA = 1
_DEEPEST = 8  # submodules in submodules


def check_out(
    wanted: Wanted, found: Sequence[Dependency], folder: Path, state: State, run: Run | None, console: Console
) -> tuple[Checkout, ...]:
    """One folder for each dependency but those that are left to CMake, and for each that was given.

    Raises PreflightError (all that a mirror lacks in one), BinaryError for an archive that is another.
    """
    given = {name.lower(): path.absolute() for name, path in wanted.given.items()}
    _check_given(given)
    mirror = open_mirror(wanted.mirror)
    work = _Work(mirror=mirror, git=Git(run, network=mirror is None), folder=folder, state=state, console=console)
    known = {one.name for one in found}
    ours = [one for one in found if one.kind != "cmake" or one.name in given]
    names = {one.name for one in ours}
    for one in found:
        container = one.inside.partition("/")[0]
        if one.kind == "cmake" and one.name not in given:
            console.info(f"    {one.name}: left to CMake ({one.reason})")
        elif container and container not in names:
            console.info(f"    {one.name}: left to CMake (it goes into {container}, which is)")
            ours.remove(one)
    work.check_mirror([one for one in ours if one.name not in given])
    made = []
    for one in sorted(ours, key=lambda one: bool(one.inside)):  # what others go into comes first
        place = folder / (one.inside or one.name)
        made.append(work.give(one.name, given[one.name], place) if one.name in given else work.get(one, place))
    made += [work.give(name, path, folder / name) for name, path in given.items() if name not in known]
    return tuple(made)


def _check_given(given: dict[str, Path]) -> None:
    wrong = []
    for name, path in given.items():
        if not path.is_dir():
            wrong.append(f"{name}={path} is no folder")
        elif next(path.iterdir(), None) is None:
            wrong.append(f"{name}={path} is empty")
        if "/" in name or name.startswith("."):
            wrong.append(f"{name} is no name of a dependency")
    if wrong:
        raise errors.PreflightError(
            f"--dependency: {'; '.join(wrong)}", remedy="name a folder with the dependency's source, as NAME=/a/folder"
        )


@dataclass(frozen=True, kw_only=True)
class _Work:
    mirror: Mirror | None
    git: Git
    folder: Path
    state: State
    console: Console

    def give(self, name: str, path: Path, place: Path) -> Checkout:
        """A copy of the user's folder, which stays as it is."""
        items = tree.items(path, list(tree.walk(path)))
        revision = tree.content(items)
        with files.writing(place):
            _mark(place).unlink(missing_ok=True)
        tree.bring(items, place)
        self.console.info(f"    {name}: from {path}")
        return Checkout(name=name, path=place, revision=revision, how="given")

    def get(self, one: Dependency, place: Path) -> Checkout:
        """What is there, when it is what is asked for; else made anew."""
        if one.kind == "git":
            return self._git(one, self._repository(one.url), place)
        if self.mirror is not None:
            source, mirrored = archived(one.url), self._mirrored(one)
            if source is not None and isinstance(mirrored, Repository):
                made = self._git(replace(one, revision=source[1], submodules=False), mirrored, place)
                self.console.info(f"    {one.name}: from the mirror's commit, in the stead of {one.url}")
                return replace(made, how="mirror")
            return self._archive(one, mirrored if isinstance(mirrored, Path) else None, place)
        return self._archive(one, None, place)

    def _repository(self, url: str) -> Repository:
        where = address(url)
        stands_for = self.mirror.repository(where) if self.mirror is not None else None
        return Repository(where, self.git, self.state, stands_for)

    def _git(self, one: Dependency, repository: Repository, place: Path) -> Checkout:
        def key(commit: str) -> dict[str, object]:
            return {"git": str(repository.address.kept), "commit": commit, "submodules": one.submodules}

        revision = one.revision
        if is_commit(revision) and _is_made(place, key(revision)):
            self.console.info(f"    {one.name}: {repository.address.name} {revision[:12]}, there already")
            return Checkout(name=one.name, path=place, revision=revision, how="git")
        with self.console.step(f"{one.name}: {repository.address.name} {revision[:12]}"):
            commit = repository.fetch(revision, asked_by=one.place)
            if not _is_made(place, key(commit)):
                with _beside(place) as part:
                    repository.lay_out(commit, part)
                    if one.submodules:
                        self._submodules(repository, one, commit, part)
                    _finish(place, part, key(commit))
        return Checkout(name=one.name, path=place, revision=commit, how="git")

    def _submodules(self, repository: Repository, one: Dependency, commit: str, into: Path, depth: int = 0) -> None:
        """All that the commit names, and theirs; of the dependency itself only the paths that are asked for."""
        found = repository.submodules(commit)
        if isinstance(one.submodules, tuple):
            paths = one.submodules
            found = tuple(sub for sub in found if any(f"{sub.path}/".startswith(f"{path}/") for path in paths))
        if depth > _DEEPEST:
            raise errors.PreflightError(f"the submodules of {one.name} are nested too deep", where=one.place)
        asked_by = f"{one.place}, a submodule of {repository.address.name}"
        if self.mirror is not None:
            lacking = [each for sub in found for each in self._lacking(f"{one.name}'s {sub.path}", sub.url, sub.commit)]
            self._refuse(lacking, one.name)
        for sub in found:
            inner = self._repository(sub.url)
            inner.fetch(sub.commit, asked_by=asked_by)
            inner.lay_out(sub.commit, into / sub.path)
            self._submodules(inner, replace(one, submodules=True), sub.commit, into / sub.path, depth + 1)

    def _archive(self, one: Dependency, mirrored: Path | None, place: Path) -> Checkout:
        name = file_name(one.url)
        if one.sha256 is not None and _is_made(place, {"archive": one.sha256}):
            self.console.info(f"    {one.name}: {name}, there already")
            return Checkout(name=one.name, path=place, revision=one.sha256, how="archive")
        with self.console.step(f"{one.name}: {name}"):
            if mirrored is not None:
                path, sha256 = mirrored, files.sha256(mirrored)
            else:
                path, sha256 = archives.download(one.url, one.sha256, one.place, self.state, self.console)
            if not _is_made(place, {"archive": sha256}):
                with _beside(place) as part:
                    _finish(place, archives.unpack(path, part), {"archive": sha256})
        return Checkout(name=one.name, path=place, revision=sha256, how="archive")

    def _mirrored(self, one: Dependency) -> Path | Repository | None:
        """The archive that is here, or else the repository that has its commit; None when the mirror has neither.

        Raises BinaryError when it only has another file by that name.
        """
        if self.mirror is None:
            return None
        kept = archives.kept(one.sha256, one.url, self.state) if one.sha256 else None
        path, others = self.mirror.archive(one.url, one.sha256)
        if kept is not None or path is not None:
            return kept or path
        source = archived(one.url)
        if source is not None:
            repository = self._repository(source[0])
            if repository.mirror is not None or repository.find(source[1]) is not None:
                return repository
        if others and one.sha256 is not None:
            raise archives.wrong(str(others[0]), one.sha256, files.sha256(others[0]), one.place)
        return None

    def check_mirror(self, found: Sequence[Dependency]) -> None:
        """Raises PreflightError that names all that the mirror lacks."""
        lacking: list[tuple[str, str]] = []
        for one in found if self.mirror is not None else ():
            if one.kind == "git":
                lacking += self._lacking(one.name, one.url, one.revision)
                continue
            source, mirrored = archived(one.url), self._mirrored(one)
            if source is not None and isinstance(mirrored, Repository):
                lacking += self._lacking(one.name, *source)
            elif mirrored is None:
                places = [*archive_names(one.url), *(address(source[0]).places() if source else ())]
                lacking.append((f"{one.name}: {one.url} (looked for {', '.join(places)})", f"download {one.url}"))
        self._refuse(lacking, lacking[0][0].partition(":")[0] if lacking else "")

    def _lacking(self, name: str, url: str, revision: str) -> list[tuple[str, str]]:
        """What to tell of a repository or commit that the mirror lacks, and the command that brings it."""
        repository = self._repository(url)
        where, place = repository.address, repository.mirror
        if self.mirror is None or repository.find(revision) is not None:
            return []
        text = f"{name}: {where.label} at {revision}"
        if place is None:
            command = f"git clone --mirror {where.label} {shlex.quote(str(self.mirror.folder / where.name))}.git"
            return [(f"{text} (looked for {', '.join(where.places())})", command)]
        if is_commit(revision) and self.git.ask(place, "rev-parse", "--verify", f"{revision}^{{commit}}") is None:
            return [(f"{text} ({place} has no such commit)", bring_up_to_date(where, place))]
        return []

    def _refuse(self, lacking: Sequence[tuple[str, str]], name: str) -> None:
        if lacking and self.mirror is not None:
            raise errors.PreflightError(
                f"the mirror {self.mirror.folder} lacks\n  " + "\n  ".join(dict(lacking)),
                where=str(self.mirror.folder),
                remedy="where the network is: "
                + "; ".join(dict.fromkeys(word for _, word in lacking))
                + f"; or name a folder: --dependency {name}=DIR",
            )


def _mark(place: Path) -> Path:
    return place.with_name(f".{place.name}.checkout.json")


def _is_made(place: Path, key: dict[str, object]) -> bool:
    mark = _mark(place)
    if not place.is_dir() or not mark.is_file():
        return False
    try:
        return bool(files.read_json(mark) == json.loads(json.dumps({"schema": _SCHEMA, **key})))
    except errors.UsageError:
        return False


@contextmanager
def _beside(place: Path) -> Iterator[Path]:
    """An empty folder beside the place, gone afterwards."""
    part = place.with_name(f".{place.name}.part")
    tree.remove(part)
    try:
        yield files.make_folder(part)
    finally:
        tree.remove(part)


def _finish(place: Path, made: Path, key: dict[str, object]) -> None:
    """Puts the folder in its place. The mark comes last: what is not marked is made again."""
    tree.remove(_mark(place))
    tree.remove(place)
    with files.writing(place):
        made.replace(place)
    files.write_json_atomic(_mark(place), {"schema": _SCHEMA, **key})

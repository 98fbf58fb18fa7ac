"""The source before the patches, and the build's own copy of it with them."""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from sm120 import errors, files, redact
from sm120.build.patches.tree import FOLDERS, ROOT_FILE, detect_layout
from sm120.build.source import tree
from sm120.build.source.address import address, is_commit
from sm120.build.source.git import Git
from sm120.build.source.mirror import open_mirror
from sm120.build.source.model import Pristine, Wanted
from sm120.build.source.repository import Repository
from sm120.console import Console
from sm120.runs import Run
from sm120.state import State

_NO_COMMIT = 315532800  # seconds: 1980-01-01, the earliest time that a zip archive can hold
_SCHEMA = 1


def obtain(wanted: Wanted, state: State, run: Run | None, console: Console) -> Pristine:
    """The user's folder as it is, or the commit of the repository, which is fetched when it is not there yet.

    Raises PatchError when neither holds sgl-kernel's build, PreflightError when it cannot be had.
    """
    if wanted.folder is not None:
        return _own(wanted.folder.absolute(), Git(run, network=False))
    if wanted.repository is None or wanted.commit is None:
        raise ValueError("neither a folder nor a repository and its commit")
    return _fetched(wanted.repository, wanted.commit, wanted.mirror, state, run, console)


def copy(pristine: Pristine, destination: Path, changes: Mapping[str, bytes | None]) -> None:
    """Makes ``destination`` hold the component at its place below the root, with the changes; nothing else stays.

    Raises PreflightError, also when the source has changed since it was obtained.
    """
    folder = pristine.root / pristine.folder
    found = _listed(folder)
    if tree.content(found) != pristine.content:
        raise errors.PreflightError(
            f"{folder} was changed while the build was prepared",
            where=str(folder),
            remedy="run the same command again when nothing writes there",
        )
    below = f"{pristine.folder}/" if pristine.folder else ""
    items = {f"{below}{path}": item for path, item in found.items()}
    for path, data in changes.items():
        before = items.pop(path, None)
        if data is not None:
            items[path] = tree.Item(data=data, executable=before is not None and before.executable)
    tree.bring(items, destination)


def _own(root: Path, git: Git) -> Pristine:
    layout = detect_layout(root)
    folder = root / layout.folder
    found = _listed(folder)
    made = Pristine(
        root=root,
        folder=layout.folder,
        commit=None,
        dirty=False,
        committed=_NO_COMMIT,
        content=tree.content(found),
        origin=f"{root}, which is no git checkout",
    )
    if not _is_checkout(folder, git):
        return made
    said = (git.ask(folder, "log", "-1", "--format=%H %ct") or b"").split()
    if len(said) != 2:
        return replace(made, origin=f"{root}, a git checkout without a commit")
    commit = said[0].decode()
    dirty = _is_dirty(folder, git)
    words = f"{root}, commit {commit[:12]}" + (" with changes that are not committed" if dirty else "")
    return replace(made, commit=commit, dirty=dirty, committed=int(said[1]), origin=words)


def _listed(folder: Path) -> dict[str, tree.Item]:
    """What counts: of a checkout what git tracks and does not ignore, else all that no earlier build made."""
    git = Git(None, network=False)
    if not _is_checkout(folder, git):
        return tree.items(folder, [path for path in tree.walk(folder) if not tree.is_made(path)])
    tracked = git.ask(folder, "ls-files", "-z", "--cached")
    others = git.ask(folder, "ls-files", "-z", "--others", "--exclude-standard")
    if tracked is None or others is None:
        raise errors.PreflightError(
            f"git cannot list the files of {folder}", where=str(folder), remedy=f"see what git -C {folder} status says"
        )
    paths = [*_paths(tracked), *(path for path in _paths(others) if not tree.is_made(path))]
    return tree.items(folder, paths)


def _paths(listed: bytes) -> list[str]:
    return [os.fsdecode(path) for path in listed.split(b"\0") if path]


def _is_checkout(folder: Path, git: Git) -> bool:
    """Whether git tracks the folder; one that only lies in a repository is none of its files."""
    if not any((place / ".git").exists() for place in (folder, *folder.parents)):
        return False
    return git.ask(folder, "ls-files", "--error-unmatch", "--", ROOT_FILE) is not None


def _is_dirty(folder: Path, git: Git) -> bool:
    said = git.ask(folder, "status", "--porcelain", "-z", "--no-renames", "--untracked-files=all", "--", ".")
    prefix = os.fsdecode((git.ask(folder, "rev-parse", "--show-prefix") or b"").removesuffix(b"\n"))
    for entry in _paths(said or b""):
        state, path = entry[:2], entry[3:].removeprefix(prefix)
        if state != "??" or not tree.is_made(path):
            return True
    return False


def _fetched(
    url: str, revision: str, mirror_folder: Path | None, state: State, run: Run | None, console: Console
) -> Pristine:
    where = address(url)
    mirror = open_mirror(mirror_folder)
    stands_for = mirror.repository(where) if mirror is not None else None
    git = Git(run, network=mirror is None)
    repository = Repository(where, git, state, stands_for)
    asked_by = f"{where.label} at {revision}"
    commit = repository.find(revision)
    if commit is None:
        if mirror is not None and stands_for is None:
            raise errors.PreflightError(
                f"the mirror {mirror.folder} lacks the source: {asked_by}; looked for {', '.join(where.places())}",
                where=str(mirror.folder),
                remedy=f"where the network is: git clone --mirror {where.label} {mirror.folder / where.places()[0]};"
                " or name a checkout with --source DIR",
            )
        with console.step(f"fetching {where.name} at {revision[:12] if is_commit(revision) else revision}"):
            commit = repository.fetch(revision, partial=True, asked_by=asked_by)
    root, folder, content = _laid_out(repository, commit, state)
    words = asked_by if is_commit(revision) else f"{asked_by} (commit {commit[:12]})"
    return Pristine(
        root=root,
        folder=folder,
        commit=commit,
        dirty=False,
        committed=repository.committed(commit) or _NO_COMMIT,
        content=content,
        origin=words if mirror is None else f"{words}, from the mirror {redact.redact(str(mirror.folder))}",
    )


def _laid_out(repository: Repository, commit: str, state: State) -> tuple[Path, str, str]:
    """A tree of its own with the component's folder of a commit, that folder, and the hash of its content.

    Made again when something has changed it.
    """
    name = hashlib.sha256(str(repository.address.kept).encode()).hexdigest()[:8]
    root = state.sources / "trees" / f"{commit}-{name}"
    mark = root.with_name(f"{root.name}.json")
    with files.lock(root.with_name(f"{root.name}.lock"), waiting=f"another process lays out {root}; waiting for it"):
        folder = next((one for one in FOLDERS if repository.has_file(commit, f"{one}/{ROOT_FILE}")), None)
        if folder is None:
            raise errors.PatchError(
                f"{repository.address.label} has no sgl-kernel at {commit}: neither "
                + " nor ".join(f"{one}/{ROOT_FILE}" for one in FOLDERS),
                where=repository.address.label,
                remedy="take a commit that has it, or name a folder with --source DIR",
            )
        if root.is_dir() and mark.is_file():
            content = tree.content(_listed(root / folder))
            if files.read_json(mark) == {"schema": _SCHEMA, "content": content}:
                return root, folder, content
        part = root.with_name(f".{root.name}.part")
        for left in (mark, part, root):
            tree.remove(left)
        repository.lay_out(commit, part / folder, folder)
        with files.writing(root):
            part.replace(root)
        content = tree.content(_listed(root / folder))
        files.write_json_atomic(mark, {"schema": _SCHEMA, "content": content})
    return root, folder, content

"""The kernels of an environment exchanged for others: all of it or nothing, whenever it is interrupted.

Two distributions are imported as ``sgl_kernel`` and would mix their files, so the old one goes before the new one
comes. Meanwhile a mark lies beside the environment's record; where it is left, the next task puts in again what the
record says.
"""

import contextlib
import csv
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.utils import canonicalize_name

from sm120 import errors, files
from sm120.console import Console, size
from sm120.runs import Run
from sm120.stack.install import record
from sm120.state import State

if TYPE_CHECKING:
    from sm120.stack.fetch.store import Store
    from sm120.stack.lock import LockedFile

_MODULE = "sgl_kernel"

Entry = Mapping[str, str]  # one of the record's "built": name, version, sha256, wheel (a file in state.kernels)


@contextlib.contextmanager
def alone(name: str, state: State) -> Iterator[int]:
    """The lock between processes that change this environment. A child that holds the descriptor is waited for too."""
    state.prepare()
    waiting = f"another process is setting up the stack {name}; waiting for it"
    with files.lock(state.root / "env" / f"{name}.lock", waiting=waiting) as held:
        yield held


def mend(name: str, state: State, run: Run, console: Console, held: int) -> bool:
    """Puts in again what the record says where an exchange was interrupted; whether that was so and could be done."""
    kernels = Kernels(name=name, state=state, run=run, console=console, held=held)
    if not kernels.mark.exists():
        return False
    try:
        content = record.read(kernels.folder)
        wanted = kernels.wheels(content.get("built", []))
    except errors.UsageError:  # no record or no lock to mend it by
        return False
    with kernels.store.in_use():
        if not all(kernels.have(file) for file in wanted):
            console.info("    an exchange of its kernels was interrupted, and what was there before is gone")
            return False
        with console.step(f"putting {_named(wanted)} back into {name}: an exchange was interrupted"):
            kernels.put(content, content.get("built", []))
    return True


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The kernels of one environment. Whatever changes them needs its lock, and the store in use."""

    name: str
    state: State
    run: Run
    console: Console
    held: int  # the descriptor of the lock

    @property
    def folder(self) -> Path:
        return self.state.env(self.name)

    @property
    def mark(self) -> Path:
        return self.folder / record.EXCHANGE

    @property
    def site(self) -> Path:
        return record.site_packages(self.folder)

    @cached_property
    def store(self) -> "Store":
        from sm120.stack.fetch.store import Store

        return Store(self.state.wheels)

    def wheels(self, built: Sequence[Entry]) -> "tuple[LockedFile, ...]":
        """The last one that was built, or else those of the lock: none where the stack leaves them out."""
        from sm120.stack.lock import LockedFile, read_lock

        if not built:
            locked = read_lock(self.state.lock_file(self.name)).files
            return tuple(file for file in locked if file.name in record.KERNELS)
        last = built[-1]
        return (
            LockedFile(
                name=last["name"],
                version=last["version"],
                filename=last["wheel"],
                url=(self.state.kernels(self.name) / last["wheel"]).absolute().as_uri(),
                sha256=last["sha256"],
                size=None,
            ),
        )

    def have(self, file: "LockedFile") -> bool:
        """Whether the file is in the store, or can be taken into it: one that was built here is kept elsewhere."""
        if self.store.path(file).exists():
            return True
        path = self.state.kernels(self.name) / file.filename
        with contextlib.suppress(OSError):
            if files.sha256(path) == file.sha256:
                self.store.add(path)
                return True
        return False

    def put(self, content: Mapping[str, Any], built: Sequence[Entry]) -> None:
        """Makes the last of ``built`` the kernels of the environment, and its record say so.

        All wheels that are needed must be in the store, those that are there now as well. Raises PreflightError (no
        space) and BinaryError (a clash, or files that are not what the wheel says); then what was there is there again.
        """
        before, wanted = self.wheels(content.get("built", [])), self.wheels(built)
        known = [file for file in {*before, *wanted} if self.have(file)]
        self.store.check(known)
        self._check_space(wanted)
        self._check_clashes(wanted)
        files.write_json_atomic(self.mark, {"schema": 1, "run": self.run.id, "to": _named(wanted)})
        try:
            self._install(wanted, known)
            self._write_record(content, built)
        except errors.ToolkitError:
            with contextlib.suppress(errors.ToolkitError):
                self._install(before, known)
                self.mark.unlink()
            raise
        self.mark.unlink()

    def wrong_files(self, wanted: "Sequence[LockedFile]") -> list[str]:
        """What is not in the environment as these wheels have it."""
        from sm120.stack.install.contents import contents

        found = {f"{name} {version}" for name, version in record.distributions(self.site) if name in record.KERNELS}
        wrong = [f"{name} is installed as well" for name in sorted(found - {_said(file) for file in wanted})]
        for file in wanted:
            for path, digest in contents(self.store.path(file)).installed.items():
                try:
                    is_right = digest in {None, files.sha256(self.site / path)}
                except OSError:
                    is_right = False
                if not is_right:
                    wrong.append(path)
        return wrong

    def _install(self, wanted: "Sequence[LockedFile]", known: "Sequence[LockedFile]") -> None:
        from sm120.stack.install.installer import Installer

        with files.writing(self.site):
            self._remove(known)
        if wanted:
            installer = Installer(
                python=self.folder / "bin" / "python",
                store=self.store,
                run=self.run,
                console=self.console,
                held=self.held,
            )
            installer.install(wanted, [])
        wrong = self.wrong_files(wanted)
        if wrong:
            raise errors.BinaryError(
                f"{_named(wanted)} was installed, but not whole: {wrong[0]}"
                + (f" and {len(wrong) - 1} more files" if len(wrong) > 1 else ""),
                where=str(self.site),
                remedy="see that nothing else writes there, then run the same command again",
            )

    def _write_record(self, content: Mapping[str, Any], built: Sequence[Entry]) -> None:
        # What was proven of other kernels says nothing of these.
        proved = [proof for proof in content["proved"] if proof["module"] != _MODULE]
        present = [f"{name} {version}" for name, version in record.distributions(self.site)]
        after = {**content, "proved": proved, "present": present, "built": list(built)}
        files.write_json_atomic(self.folder / record.NAME, after)

    def _remove(self, known: "Sequence[LockedFile]") -> None:
        """All files of the kernels, also where an interruption left only a part of them, or of what says which."""
        from sm120.stack.install.contents import contents

        infos = [path for path in self.site.glob("*.dist-info") if _distribution(path) in record.KERNELS]
        doomed = {path for info in infos for path in (*info.rglob("*"), *self._recorded(info)) if not path.is_dir()}
        for file in known:
            found = contents(self.store.path(file))
            doomed |= {self.site / path for path in found.installed}
            doomed |= {path for path in (self.site / found.info).rglob("*") if not path.is_dir()}
        doomed -= {Path(os.path.normpath(self.site / path)) for path in self._of_others()}
        for path in doomed:
            path.unlink(missing_ok=True)
        folders = {parent for path in doomed for parent in path.parents if self.site in parent.parents}
        for folder in sorted(folders, key=lambda path: len(path.parts), reverse=True):
            if not any(folder.glob("*.py")):
                shutil.rmtree(folder / "__pycache__", ignore_errors=True)
            with contextlib.suppress(OSError):  # not empty
                folder.rmdir()

    def _recorded(self, info: Path) -> Iterator[Path]:
        """What a distribution says that it installed, as far as it lies in the environment."""
        try:
            lines = (info / "RECORD").read_text("utf-8", "replace").splitlines()
        except OSError:
            return
        with contextlib.suppress(csv.Error):
            for row in csv.reader(lines):
                path = Path(os.path.normpath(self.site / row[0])) if row and "\0" not in row[0] else self.site
                if path.is_relative_to(self.folder) and path != self.site:
                    yield path

    def _of_others(self) -> dict[str, tuple[str, str | None]]:
        """Files that other distributions installed: path below site-packages → whose, and SHA-256."""
        from sm120.host.binaries.records import read_records

        others = (found for found in read_records(self.site) if found.name not in record.KERNELS)
        return {path: (found.name, digest) for found in others for path, digest in found.hashes.items()}

    def _check_clashes(self, wanted: "Sequence[LockedFile]") -> None:
        """What another distribution has, and has otherwise, is not overwritten: that could not be taken back."""
        from sm120.stack.install.contents import contents

        others = self._of_others()
        for file in wanted:
            mine = contents(self.store.path(file)).installed
            clashes = sorted(path for path in mine.keys() & others.keys() if mine[path] != others[path][1])
            if clashes:
                more = f" and {len(clashes) - 1} more files" if len(clashes) > 1 else ""
                raise errors.BinaryError(
                    f"{_said(file)} would overwrite {clashes[0]}{more} of {others[clashes[0]][0]}",
                    where=str(self.site),
                    remedy=f"build the kernels that this stack's SGLang asks for, or take a stack without"
                    f" {others[clashes[0]][0]}",
                )

    def _check_space(self, wanted: "Sequence[LockedFile]") -> None:
        from sm120.stack.install.contents import contents

        needed = sum(contents(self.store.path(file)).unpacked for file in wanted)
        free = files.free_bytes(self.folder)
        if free < needed:
            raise errors.PreflightError(
                f"no space left on the disk: {_named(wanted)} needs {size(needed)} in {self.folder}, and {size(free)}"
                " are free",
                where=str(self.folder),
                remedy=f"free some space, or {files.MOVE_REMEDY}",
            )


def _distribution(info: Path) -> str:
    return canonicalize_name(info.name.removesuffix(".dist-info").rpartition("-")[0])


def _said(file: "LockedFile") -> str:
    return f"{file.name} {file.version}"


def _named(wanted: "Sequence[LockedFile]") -> str:
    return ", ".join(_said(file) for file in wanted) or "no kernels"

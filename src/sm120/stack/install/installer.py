"""Locked wheels into an environment, by uv: no index, no network, every hash checked."""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sm120 import errors, files
from sm120.console import Console
from sm120.process import run as run_process
from sm120.runs import Run
from sm120.stack.fetch.store import Store
from sm120.stack.lock import LockedFile

_SECONDS = 3600.0
_SHOWN = 500  # letters of uv's own explanation
_WORK = ".sm120-install"  # inside the environment: one file system, so uv can move instead of copying
# What would lead uv or Python elsewhere than to the environment that is named.
_ELSEWHERE = ("UV_", "PIP_")
_NAMES = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX"}


@dataclass(frozen=True, kw_only=True)
class Installer:
    python: Path
    store: Store
    run: Run
    console: Console
    held: int  # a lock's descriptor; uv holds it too, should we be killed

    def install(self, wanted: Sequence[LockedFile], again: Sequence[LockedFile]) -> None:
        """All of ``wanted`` in one go; after that each of ``again`` once more, in this order."""
        with self._work_folder(wanted) as work:
            self._uv(work, wanted, "all")
            for file in again:
                self._uv(work, [file], file.name, "--reinstall")

    @contextmanager
    def _work_folder(self, wanted: Sequence[LockedFile]) -> Iterator[Path]:
        work = self.python.parents[1] / _WORK
        wheels = work / "wheels"
        with files.writing(wheels):
            if work.exists():  # of an installation that was killed: the lock is ours now
                shutil.rmtree(work)
            wheels.mkdir(parents=True)
            for file in wanted:
                (wheels / file.filename).symlink_to(self.store.path(file).absolute())
        try:
            yield work
        finally:
            # The cache's links to what is installed go with it: the environment's files then belong to it alone.
            shutil.rmtree(work, ignore_errors=True)

    def _uv(self, work: Path, wanted: Sequence[LockedFile], name: str, *flags: str) -> None:
        import uv

        requirements = work / f"{name}.txt"
        lines = [f"{file.name}=={file.version} --hash=sha256:{file.sha256}\n" for file in wanted]
        files.write_text_atomic(requirements, "".join(lines))
        argv = [uv.find_uv_bin(), "pip", "install", "--no-config", "--offline", "--no-index", "--no-deps"]
        argv += ["--python", str(self.python), "--find-links", str(work / "wheels"), "--require-hashes"]
        argv += ["--color", "never", "--no-progress", *flags, "--requirements", str(requirements)]
        log = self.run.log_path("uv")
        env = clean_environment() | {"UV_CACHE_DIR": str(work / "cache")}
        done = run_process(argv, env=env, log=log, timeout=_SECONDS, stream=self.console.verbose, pass_fds=(self.held,))
        self.run.record_command(done, env=env)
        if done.returncode:
            raise _explain(done.tail, log)


def clean_environment() -> dict[str, str]:
    """Ours, without what sends packages or imports elsewhere."""
    return {k: v for k, v in os.environ.items() if not k.startswith(_ELSEWHERE) and k not in _NAMES}


def _explain(tail: Sequence[str], log: Path) -> errors.ToolkitError:
    text = "\n".join(tail)
    if "No space left on device" in text or "Disk quota exceeded" in text:
        return errors.PreflightError(
            "no space left on the disk while packages were installed",
            where=str(log),
            remedy=f"free some space, or {files.MOVE_REMEDY}",
        )
    if "Hash mismatch" in text:
        return errors.BinaryError(
            "a wheel changed between its check and its installation: uv found another SHA-256 than the lock's",
            where=str(log),
            remedy="see that nothing else writes into the wheel store, then run the same command again",
        )
    lines = [line.strip(" ╰─▶├×│") for line in tail if line.strip()]
    start = next((number for number, line in enumerate(lines) if line.startswith("error")), max(0, len(lines) - 1))
    said = " ".join(lines[start:]).removeprefix("error: ")  # uv breaks long lines where COLUMNS says so
    return errors.PreflightError(
        f"uv could not install the wheels: {said[:_SHOWN] or 'no output'}",
        where=str(log),
        remedy="see the log named above, mend what it says, then run the same command again",
    )

"""Wheels built here: of packages from git, and of packages that an index has only as source."""

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from sm120 import errors, files, redact
from sm120.process import Completed
from sm120.process import run as run_process
from sm120.runs import Run
from sm120.stack.spec import Package

SECONDS = 3600.0  # for one build; sglang's takes a minute
# These would build for another Python, elsewhere, or something else.
_ELSEWHERE = {
    *("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_PYTHON", "PIP_DRY_RUN", "PIP_REPORT", "PIP_NO_DEPS", "PIP_QUIET"),
    *("PIP_REQUIRE_HASHES", "PIP_WHEEL_DIR", "PIP_ONLY_BINARY", "PYTHONPATH", "PYTHONHOME"),
}


@dataclass(frozen=True, kw_only=True)
class Builder:
    python: Path  # what the wheels are for
    folder: Path  # each wheel gets a folder in it
    run: Run
    verbose: bool

    def from_git(self, package: Package) -> Path:
        """The wheel of a package at its commit. Raises BuildError or PreflightError."""
        return self._build(package.name, package.requirement)

    def from_source(self, name: str, version: str) -> Path:
        """The wheel of a package that has only a source distribution."""
        return self._build(name, f"{name}=={version}")

    def _build(self, name: str, requirement: str) -> Path:
        target = files.make_folder(self.folder / name)
        argv = [sys.executable, "-I", "-m", "pip", "--python", str(self.python), "wheel", "--no-deps", "--no-input"]
        argv += ["--progress-bar=off", "--disable-pip-version-check", "--wheel-dir", str(target), requirement]
        env = {k: v for k, v in os.environ.items() if k not in _ELSEWHERE}
        env |= {"GIT_TERMINAL_PROMPT": "0", "PIP_REQUIRE_VIRTUALENV": "0"}
        log = self.run.log_path(f"build-{name}")
        done = run_process(argv, env=env, log=log, stream=self.verbose, timeout=SECONDS)
        self.run.record_command(done, env=env)
        if done.returncode:
            raise explain(requirement, done, log)
        (wheel,) = target.glob("*.whl")
        return wheel


def explain(requirement: str, done: Completed, log: Path) -> errors.ToolkitError:
    """The error in words for a build that failed."""
    where, text = str(log), "\n".join(done.tail)
    wanted = redact.redact(requirement)
    if done.timed_out:
        return errors.BuildError(f"building {wanted} did not end within {SECONDS:.0f} s", where=where, remedy=_SEE)
    if "No space left on device" in text or "Disk quota exceeded" in text:
        return errors.PreflightError(
            f"no space left on the disk while {wanted} was built",
            where=where,
            remedy="free some space where TMPDIR is, or set TMPDIR=/another/folder",
        )
    if re.search(r"Cannot find command ['\"]?git", text):
        return errors.PreflightError(f"{wanted} needs git", where=where, remedy="install it: apt install git")
    if re.search(r"does not appear to be a git repository|repository .* (?:not found|does not exist)", text):
        return errors.PreflightError(f"there is no repository at {wanted}", where=where, remedy="correct its git = …")
    if re.search(r"Could not resolve host|unable to access|Connection (?:refused|timed out)|Could not read from", text):
        return errors.PreflightError(
            f"the repository of {wanted} cannot be reached",
            where=where,
            remedy="connect to the network; behind a proxy: git config --global http.proxy URL",
        )
    if re.search(r"did not match any file|unable to read tree|not our ref|reference is not a tree|bad object", text):
        return errors.PreflightError(
            f"the repository has no such commit: {wanted}", where=where, remedy="correct commit = … in the stack file"
        )
    last = done.tail[-1] if done.tail else "no output"
    problem = next((line for line in reversed(done.tail) if "error" in line.lower()), last)
    return errors.BuildError(f"{wanted} does not build: {problem.strip()}", where=where, remedy=_SEE)


_SEE = "the log named above has the whole output; mend what it says, then run the same command again"

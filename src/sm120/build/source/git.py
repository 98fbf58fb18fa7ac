"""git, run so that neither the user's configuration nor a hook decides what arrives."""

import functools
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from sm120 import errors, redact
from sm120.process import Completed
from sm120.process import run as run_process
from sm120.runs import Run

PROTOCOLS = "file:git:http:https:ssh"  # no command transports
_OLDEST = (2, 31)  # takes settings from GIT_CONFIG_COUNT
_TIMEOUT = 600.0  # seconds, for a question that needs no network
# What git itself calls local to a repository (git rev-parse --local-env-vars); set inside a hook, for one.
_LOCAL = {
    *("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_ALTERNATE_OBJECT_DIRECTORIES"),
    *("GIT_COMMON_DIR", "GIT_NAMESPACE", "GIT_PREFIX", "GIT_GRAFT_FILE", "GIT_SHALLOW_FILE", "GIT_CONFIG"),
    *("GIT_NO_REPLACE_OBJECTS", "GIT_REPLACE_REF_BASE", "GIT_IMPLICIT_WORK_TREE", "GIT_CONFIG_PARAMETERS"),
    *("GIT_INTERNAL_SUPER_PREFIX", "GIT_QUARANTINE_PATH", "GIT_LITERAL_PATHSPECS", "GIT_GLOB_PATHSPECS"),
    *("GIT_NOGLOB_PATHSPECS", "GIT_ICASE_PATHSPECS", "GIT_EXTERNAL_DIFF"),
}
_SETTINGS = (
    ("core.autocrlf", "false"),
    ("core.fsmonitor", "false"),
    ("core.hooksPath", os.devnull),
    ("core.quotePath", "false"),
    ("core.sparseCheckout", "false"),
    ("fetch.recurseSubmodules", "false"),
    ("gc.auto", "0"),
    ("maintenance.auto", "false"),
    ("http.lowSpeedLimit", "1000"),  # bytes a second
    ("http.lowSpeedTime", "60"),  # seconds
    ("protocol.version", "2"),  # any commit can be asked for, not only those that a branch stands on
    ("safe.directory", "*"),  # the user named the folder, and building from it runs what is in it anyway
    ("submodule.recurse", "false"),
)


def numbered(settings: Sequence[tuple[str, str]], base: Mapping[str, str]) -> dict[str, str]:
    """Settings as environment variables, behind those that ``base`` has: no other user can read them, unlike words."""
    count = base.get("GIT_CONFIG_COUNT", "")
    first = int(count) if count.isdigit() else 0
    made = {"GIT_CONFIG_COUNT": str(first + len(settings))}
    for number, (key, value) in enumerate(settings, first):
        made |= {f"GIT_CONFIG_KEY_{number}": key, f"GIT_CONFIG_VALUE_{number}": value}
    return made


class Git:
    """Runs git for one build. Without a network, only repositories on this machine can be read."""

    def __init__(self, run: Run | None, *, network: bool) -> None:
        self._run = run
        self._protocols = PROTOCOLS if network else "file"

    def environment(self, settings: Sequence[tuple[str, str]] = ()) -> dict[str, str]:
        """The whole environment of a git of ours."""
        base = {name: value for name, value in os.environ.items() if name not in _LOCAL and name != "LANGUAGE"}
        return {
            **base,
            **numbered([*_SETTINGS, *settings], base),
            "GIT_ALLOW_PROTOCOL": self._protocols,
            "GIT_LFS_SKIP_SMUDGE": "1",
            "GIT_OPTIONAL_LOCKS": "0",
            "GIT_TERMINAL_PROMPT": "0",
            "LC_ALL": "C",
        }

    def work(
        self, words: Sequence[str], settings: Sequence[tuple[str, str]] = (), extra: Mapping[str, str] | None = None
    ) -> Completed:
        """What may take long: recorded, with its output in the run's log."""
        _check_installed()
        env = {**self.environment(settings), **(extra or {})}
        log = None if self._run is None else self._run.log_path("git")
        done = run_process(["git", *words], env=env, log=log)
        if self._run is not None:
            self._run.record_command(done, env=env)
        return done

    def ask(self, folder: Path, *words: str) -> bytes | None:
        """What git answers about a repository, without the network; None when it refuses."""
        _check_installed()
        env = {**self.environment(), "GIT_ALLOW_PROTOCOL": "none"}  # a partial clone would fetch what it lacks
        command = ["git", "-C", str(folder), *words]
        try:
            done = subprocess.run(
                command, env=env, capture_output=True, timeout=_TIMEOUT, check=False, stdin=subprocess.DEVNULL
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise errors.PreflightError(
                f"git does not answer: {redact.redact(str(error))}",
                where=str(folder),
                remedy="run the same command again",
            ) from error
        return done.stdout if done.returncode == 0 else None


@functools.cache
def _check_installed() -> None:
    remedy = "install git, 2.31 or newer (on Debian and Ubuntu: apt install git)"
    if shutil.which("git") is None:
        raise errors.PreflightError(
            "git is not installed: it fetches the source and its dependencies, and tells what a checkout holds",
            remedy=remedy,
        )
    said = run_process(["git", "version"], timeout=60).tail
    found = re.search(r"(\d+)\.(\d+)", " ".join(said))
    if found is not None and (int(found[1]), int(found[2])) < _OLDEST:
        raise errors.PreflightError(f"{said[0]} is too old to be told by variables what to fetch", remedy=remedy)

"""pip, run on another interpreter, with the machine's own configuration and with errors in words."""

import os
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from packaging.utils import canonicalize_name

from sm120 import errors, files, redact
from sm120.process import Completed
from sm120.process import run as run_process

# These would send packages elsewhere, or change what an installation is. Index, find-links, constraints, certificate
# and proxy are the machine's own business and stay.
_ELSEWHERE = {
    "PIP_TARGET",
    "PIP_PREFIX",
    "PIP_ROOT",
    "PIP_PYTHON",
    "PIP_DRY_RUN",
    "PIP_REPORT",
    "PIP_NO_DEPS",
    "PIP_IGNORE_INSTALLED",
    "PIP_REQUIRE_HASHES",
    "PIP_QUIET",
    "PYTHONPATH",
    "PYTHONHOME",
}
_NETWORK = re.compile(
    r"NewConnectionError|ConnectTimeout|ReadTimeout|name resolution|Name or service not known|Network is unreachable"
    r"|Connection refused|Connection reset|ProxyError|Max retries exceeded|Could not fetch URL|SSLError|timed out",
    re.IGNORECASE,
)
_TRIED_AGAIN = re.compile(r"^.*Retrying \(Retry\(total=[1-9].*$", re.MULTILINE)  # not the last try
_MISSING = re.compile(r"No matching distribution found for ([^\s(]+)")
# What pip says instead where a constraint is configured for the package that it misses.
_CONSTRAINED = re.compile(r"The user requested ([^\s(]+)\s+The user requested \(constraint\) ([^\n]+)")
_NAME_END = re.compile(r"[<>=!~\[; @]")


class NoSuchVersion(errors.PreflightError):
    """No configured index has a wanted version for this Python and this machine."""

    def __init__(self, message: str, *, package: str, remedy: str, where: str) -> None:
        super().__init__(message, remedy=remedy, where=where)
        self.package = package  # canonical name


@dataclass(frozen=True)
class Distribution:
    name: str  # canonical
    version: str
    url: str  # where the file came from, without credentials
    sha256: str


@dataclass(frozen=True)
class Pip:
    python: Path  # the interpreter that pip installs for
    log: Path
    verbose: bool
    notice: Callable[[str], None]  # told what pip downloads
    record: Callable[[Completed], None]
    hold: tuple[int, ...] = ()  # descriptors that pip keeps open: should we be killed, the lock ends with pip

    def install(self, words: Sequence[str]) -> list[Distribution]:
        """Installs requirements (options may stand before them), and says what exactly was installed.

        Raises NoSuchVersion, or PreflightError for any other reason that pip has to fail.
        """
        with tempfile.TemporaryDirectory(prefix="sm120-pip-") as folder:
            report = Path(folder) / "report.json"
            self._run(["install", "--report", str(report), *words])
            content = files.read_json(report)
        if not isinstance(content, dict):
            raise TypeError("pip's report is no object")
        return [self._distribution(item) for item in content["install"]]

    def _run(self, words: Sequence[str]) -> None:
        command, *rest = words
        argv = [sys.executable, "-I", "-m", "pip", "--python", str(self.python), command]
        argv += ["--no-input", "--progress-bar=off", "--disable-pip-version-check", *rest]
        start = self.log.stat().st_size if self.log.exists() else 0
        done = run_process(
            argv, env=environment(), log=self.log, stream=self.verbose, on_line=self._notice, pass_fds=self.hold
        )
        self.record(done)
        if done.returncode:
            with self.log.open("rb") as file:
                file.seek(start)
                text = file.read().decode("utf-8", "replace")
            raise explain(text, self.log, done)

    def _notice(self, line: str) -> None:
        words = line.strip()
        if not self.verbose and re.match(r"(Downloading|Processing|Using cached|Building wheel|Installing) ", words):
            self.notice(f"    {words if len(words) < 160 else words[:157] + '...'}")

    def _distribution(self, item: dict[str, Any]) -> Distribution:
        info = item["download_info"]
        digest = _digest(info) or self._digest_by_download(info["url"])
        name, version = item["metadata"]["name"], item["metadata"]["version"]
        return Distribution(canonicalize_name(name), version, redact.redact(info["url"]), digest)

    def _digest_by_download(self, url: str) -> str:
        """For an index that states no hashes. The file is in pip's cache by now."""
        with tempfile.TemporaryDirectory(prefix="sm120-pip-") as folder:
            self._run(["download", "--no-deps", "--dest", folder, url])
            (path,) = Path(folder).iterdir()
            return files.sha256(path)


def environment() -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if k not in _ELSEWHERE}
    env["PIP_USER"] = "0"
    env.setdefault("PIP_RETRIES", "2")
    return env


def _digest(info: dict[str, Any]) -> str | None:
    digest = info.get("archive_info", {}).get("hashes", {}).get("sha256")
    if isinstance(digest, str):
        return digest
    parts = urlsplit(info["url"])
    path = Path(unquote(parts.path))
    return files.sha256(path) if parts.scheme == "file" and path.is_file() else None


def explain(text: str, log: Path, done: Completed) -> errors.PreflightError:
    """The error in words for a pip that failed, from what it wrote."""
    where = str(log)
    text = _TRIED_AGAIN.sub("", text)
    if "No space left on device" in text or "Disk quota exceeded" in text:
        return errors.PreflightError(
            "no space left on the disk while packages were installed",
            where=where,
            remedy=f"free some space, or {files.MOVE_REMEDY}; pip also unpacks in TMPDIR",
        )
    missing = _MISSING.search(text)
    if _NETWORK.search(text):
        return errors.PreflightError(
            "no package index could be reached" + (f" (wanted first: {missing[1]})" if missing else ""),
            where=where,
            remedy="connect to the network, or point pip to an index or a folder of wheels (pip config set"
            " global.index-url URL, or PIP_NO_INDEX=1 PIP_FIND_LINKS=/folder), then run the same command again",
        )
    constrained = _CONSTRAINED.search(text)
    if missing is None and constrained:
        return NoSuchVersion(
            f"no configured package index has {constrained[1]} within pip's own constraint {constrained[2].strip()}",
            package=canonicalize_name(_NAME_END.split(constrained[1], maxsplit=1)[0]),
            where=where,
            remedy="add an index or a folder that has it (pip config set global.extra-index-url URL, or"
            " PIP_FIND_LINKS=/folder), or lift the constraint: pip config list names its file",
        )
    if missing:
        package = _NAME_END.split(missing[1], maxsplit=1)[0]
        return NoSuchVersion(
            f"no configured package index has {missing[1]} for this Python on this machine",
            package=canonicalize_name(package),
            where=where,
            remedy="add an index or a folder that has it (pip config set global.extra-index-url URL, or"
            " PIP_FIND_LINKS=/folder), or use another Python (SM120_PYTHON)",
        )
    lines = [line for line in done.tail if line.strip()]
    problem = next((line for line in reversed(lines) if "error" in line.lower()), lines[-1] if lines else "no output")
    return errors.PreflightError(
        f"pip failed with exit code {done.returncode}: {problem.strip()}",
        where=where,
        remedy="see the log named above, mend what it says, then run the same command again",
    )

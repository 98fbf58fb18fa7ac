"""uv, run to resolve: requirements in, exact versions or a pylock file out, and its failures in words."""

import os
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from sm120 import errors, files
from sm120.process import run as run_process
from sm120.runs import Run
from sm120.stack.resolve import uverrors
from sm120.stack.resolve.pipconfig import PipConfig, bare

_READ = 2**20  # bytes of its output that are looked at
SECONDS = 1800.0  # for one resolution; 3 s on a good network


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is to be resolved, as lines of requirements files."""

    requirements: Sequence[str]
    overrides: Sequence[str] = ()
    constraints: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Resolved:
    name: str  # canonical
    version: str
    source: str  # the index or the find-links place that has it, without credentials


@dataclass(frozen=True, kw_only=True)
class Uv:
    config: PipConfig
    python: Path
    overlay: str  # URL of the index that is asked first
    folder: Path  # for files between us and uv
    cache: Path
    run: Run
    verbose: bool
    base: dict[str, str] = field(default_factory=lambda: dict(os.environ))

    def resolve(self, asked: Asked) -> list[Resolved]:
        """Exact versions; downloads metadata only. Raises what ``uverrors.explain`` makes of a failure."""
        path = self._compile(asked, "requirements.txt", ["--emit-index-annotation"], find_links=True)
        return parse_resolution(files.read_text(path))

    def lock(self, asked: Asked) -> list[dict[str, Any]]:
        """The packages of a pylock file. Find-links are left out: what comes from there is in the overlay by now."""
        path = self._compile(asked, "pylock.toml", [], find_links=False)
        packages: list[dict[str, Any]] = tomllib.loads(files.read_text(path))["packages"]
        return packages

    def _compile(self, asked: Asked, form: str, words: list[str], *, find_links: bool) -> Path:
        out = self.folder / form
        out.unlink(missing_ok=True)  # uv would prefer the versions in it
        argv = [_uv(), "pip", "compile", str(self._write("requirements.in", asked.requirements))]
        argv += ["--format", form, "--output-file", str(out), "--no-header", "--quiet", *words]
        argv += ["--python", str(self.python), "--cache-dir", str(self.cache)]
        for flag, lines in (("--overrides", asked.overrides), ("--constraints", asked.constraints)):
            if lines:
                argv += [flag, str(self._write(f"{flag.strip('-')}.txt", lines))]
        argv += self._config_words(find_links=find_links)
        env = self.environment()
        log = self.run.log_path("uv")
        start = log.stat().st_size if log.exists() else 0
        done = run_process(argv, env=env, log=log, stream=self.verbose, timeout=SECONDS)
        self.run.record_command(done, env=env)
        if done.returncode:
            with log.open("rb") as file:
                file.seek(start)
                text = file.read(_READ).decode("utf-8", "replace")
            raise uverrors.explain(text, done, str(log))
        return out

    def _config_words(self, *, find_links: bool) -> list[str]:
        words, kept = self.config.uv_words(), []
        while words:
            word = words.pop(0)
            if word == "--find-links" and not find_links:
                words.pop(0)
            elif word != "--no-index":  # it would also forbid the overlay; see ``environment``
                kept.append(word)
        return kept

    def environment(self) -> dict[str, str]:
        env = self.config.uv_environment(self.base)
        if self.config.no_index:
            env |= {"UV_DEFAULT_INDEX": self.overlay}
            env.pop("UV_INDEX", None)
        else:
            env["UV_INDEX"] = f"{self.overlay} {env.get('UV_INDEX', '')}".strip()  # the first wins between equals
        return env

    def _write(self, name: str, lines: Sequence[str]) -> Path:
        path = self.folder / name
        files.write_text_atomic(path, "".join(f"{line}\n" for line in lines))
        return path


def parse_resolution(text: str) -> list[Resolved]:
    """From uv's requirements with a line ``# from URL`` below each."""
    found: list[Resolved] = []
    name = version = ""
    for line in text.splitlines():
        pin = re.match(r"([A-Za-z0-9][A-Za-z0-9._-]*)(?:\[[^\]]*\])?==([^\s;\\]+)", line)
        source = re.match(r"\s+# from (\S+)\s*$", line)
        if pin:
            name, version = canonicalize_name(pin[1]), pin[2]
        elif source and name:
            found.append(Resolved(name=name, version=version, source=bare(source[1]).rstrip("/")))
            name = ""
    return found


def _uv() -> str:
    import uv

    try:
        return str(uv.find_uv_bin())
    except FileNotFoundError as error:
        raise errors.PreflightError(
            "uv, which resolves packages, is missing from the toolkit's own environment",
            where=str(error),
            remedy="rm -r .venv; the next scripts/inv makes it again",
        ) from error

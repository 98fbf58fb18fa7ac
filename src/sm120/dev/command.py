"""``dev.lint``, ``dev.types``, ``dev.format`` and ``dev.test``: the parts of the one test command."""

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sm120 import errors
from sm120.config import CHECKOUT
from sm120.console import Console, duration
from sm120.dev import rules
from sm120.process import run as run_process
from sm120.stack import Environment, ensure_environment, load_stack
from sm120.state import State

NO_TEST_RAN = 5  # pytest's exit code
PARTS = ("lint", "types", "toolkit", "cells", "judge")
_PYTHON = ("src", "tests", "scripts", "tasks.py")
_TOOLKIT = ("src/sm120", "tasks.py", "scripts/bootstrap.py", "tests/unit/toolkit", "tests/integration/toolkit")
_CELLS = ("src/sm120_cells", "tests/unit/cells", "tests/integration/cells", "tests/gpu")


@dataclass(frozen=True, kw_only=True)
class Options:
    pass


@dataclass(frozen=True, kw_only=True)
class TestOptions:
    slow: bool = False
    only: tuple[str, ...] = PARTS
    k: str = ""


@dataclass
class _Parts:
    """Runs every part even when one fails, and remembers what failed."""

    console: Console
    rows: list[tuple[str, str, str]] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def run(self, name: str, body: Callable[[], bool | None]) -> bool:
        """Whether the body said that tests ran."""
        started = time.monotonic()
        verdict, ran = "ok", False
        try:
            with self.console.step(name):
                ran = bool(body())
        except errors.ToolkitError as error:
            verdict = error.message
            self.failed.append(name)
            self.console.error(error)
        self.rows.append((name, verdict, duration(time.monotonic() - started)))
        return ran

    def end(self, title: str) -> None:
        self.console.table(title, ("part", "verdict", "time"), self.rows)
        parts = {name: verdict for name, verdict, _ in self.rows}
        self.console.result({"schema": 1, "parts": parts, "failed": self.failed})
        if self.failed:
            raise errors.ToolkitError(f"{len(self.failed)} of {len(self.rows)} parts failed: {', '.join(self.failed)}")


def lint(_: Options) -> None:
    parts = _Parts(Console.current())
    _lint(parts)
    parts.end("lint")


def types(_: Options) -> None:
    parts = _Parts(Console.current())
    _types(parts)
    parts.end("types")


def reformat(_: Options) -> None:
    _tool("ruff", "format", *_present(_PYTHON))
    _tool("ruff", "check", "--fix-only", *_present(_PYTHON))


def test(options: TestOptions) -> None:
    unknown = [part for part in options.only if part not in PARTS]
    if unknown:
        raise errors.UsageError(f"--only: no part is named {unknown[0]!r}; {errors.nearest(unknown[0], list(PARTS))}")
    parts = _Parts(Console.current())
    ran = [_PART[name](parts, options) for name in PARTS if name in options.only]
    tests_ran = [some for some in ran if some is not None]
    parts.end("test")
    if tests_ran and not any(tests_ran):
        raise errors.NothingChecked("no test ran", remedy="check the words given to -k")


def _lint(parts: _Parts) -> None:
    parts.run("ruff check", lambda: _tool("ruff", "check", "--output-format=concise", *_present(_PYTHON)))
    parts.run("ruff format", lambda: _tool("ruff", "format", "--check", *_present(_PYTHON)))
    parts.run("imports", lambda: _no_findings(rules.broken_imports(), "the packages must stay apart (CONTRIBUTING.md)"))
    parts.run("package hosts", lambda: _no_findings(rules.named_hosts(), "leave hosts to each machine's configuration"))


def _types(parts: _Parts) -> None:
    parts.run("types of the toolkit", lambda: _tool("mypy", *_present(_TOOLKIT)))
    parts.run("types of the cells", _types_of_cells)


def _types_of_cells() -> None:
    cache = CHECKOUT / ".mypy_cache" / "cells"
    python = _cpu_stack().python
    _tool("mypy", f"--cache-dir={cache}", f"--python-executable={python}", *_present(_CELLS))


def _lint_part(parts: _Parts, _: TestOptions) -> None:
    _lint(parts)


def _types_part(parts: _Parts, _: TestOptions) -> None:
    _types(parts)


def _toolkit_part(parts: _Parts, options: TestOptions) -> bool:
    folders = ("tests/unit/toolkit", "tests/integration/toolkit")
    # A file's tests stay in one process: they share what is expensive to make.
    parallel = ("--numprocesses=auto", "--maxprocesses=8", "--dist=loadfile")
    return parts.run("tests of the toolkit", lambda: _pytest(Path(sys.executable), folders, options, parallel))


def _cells_part(parts: _Parts, options: TestOptions) -> bool:
    folders = ("tests/unit/cells", "tests/integration/cells")

    def body() -> bool:
        with _without_spaces(_cpu_stack().python) as python:
            return _pytest(python, folders, options)

    return parts.run("tests of the cells", body)


def _judge_part(parts: _Parts, options: TestOptions) -> None:
    """The self-test at one seed: every fault caught, no right variant rejected."""
    if options.k:
        return

    def body() -> None:
        words = ["-m", "invoke", "--search-root", str(CHECKOUT), "validate-backends", "--self-test"]
        done = run_process([sys.executable, *words], cwd=CHECKOUT, stream=True)
        if done.returncode:
            raise errors.ToolkitError(f"the self-test ended with exit code {done.returncode}")

    parts.run("self-test of the judge", body)


_PART: dict[str, Callable[[_Parts, TestOptions], bool | None]] = {
    "lint": _lint_part,
    "types": _types_part,
    "toolkit": _toolkit_part,
    "cells": _cells_part,
    "judge": _judge_part,
}


@contextlib.contextmanager
def _without_spaces(python: Path) -> Iterator[Path]:
    """The same interpreter by a path without spaces.

    mmasim is built by torch.utils.cpp_extension, which breaks the path of torch's libraries at spaces.
    """
    if " " not in str(python):
        yield python
        return
    with tempfile.TemporaryDirectory(prefix="sm120-") as folder:
        link = Path(folder, "env")
        link.symlink_to(python.parents[1])
        yield link / "bin" / python.name


def _cpu_stack() -> Environment:
    return ensure_environment(load_stack("cpu"), State.resolve(), Console.current())


def _pytest(python: Path, folders: Sequence[str], options: TestOptions, flags: Sequence[str] = ()) -> bool:
    """Whether any test ran. Raises ToolkitError when one failed."""
    words = [str(python), "-m", "pytest", *flags, *_present(folders)]
    if options.slow:
        words += ["-m", "not gpu"]
    if options.k:
        words += ["-k", options.k]
    env = {**os.environ, "PYTHONPATH": str(CHECKOUT / "src")}
    done = run_process(words, cwd=CHECKOUT, env=env, stream=True)
    if done.returncode == NO_TEST_RAN and options.k:
        return False
    if done.returncode:
        raise errors.ToolkitError(f"pytest ended with exit code {done.returncode}")
    return True


def _present(names: Sequence[str]) -> list[str]:
    return [name for name in names if (CHECKOUT / name).exists()]


def _tool(module: str, *words: str) -> None:
    done = run_process([sys.executable, "-m", module, *words], cwd=CHECKOUT, stream=True)
    if done.returncode:
        raise errors.ToolkitError(f"{module} ended with exit code {done.returncode}")


def _no_findings(found: list[str], remedy: str) -> None:
    for line in found:
        Console.current().info(line)
    if found:
        raise errors.ToolkitError(f"{len(found)} findings", remedy=remedy)

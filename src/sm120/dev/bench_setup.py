"""``dev.bench setup``: what ``setup --stack cpu`` costs beside a plain ``pip install`` of the very same files.

Both install from one lock, in alternation: with nothing kept from before (every file is fetched), with the files kept
(the wheel store here, pip's cache there), and once more when there is nothing to do. ``setup`` also proves what it
installed and makes the CUDA home; pip does neither. Times are of this machine and its index, at this moment; what
carries over is their ratio.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sm120 import errors
from sm120.config import CHECKOUT
from sm120.console import Console
from sm120.stack.lock import Lock, read_lock

ROUNDS = 2
STACK = "cpu"
SUMMARY = "cold and warm setup of the cpu stack against pip install of the same lock, and setup with nothing to do"


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to install: ``prepare`` is not timed."""

    name: str
    against: str | None  # the way that its time is divided by
    prepare: Callable[[], None]
    run: Callable[[], None]


def setup(console: Console) -> dict[str, object]:
    """Measures and prints. BuildError when one of the installations fails."""
    with tempfile.TemporaryDirectory(prefix="sm120-bench-") as name:
        bench = _Bench(Path(name), console)
        with console.step("resolving the lock that both install"):
            lock = bench.resolve()
        ways = bench.ways(lock)
        seconds: dict[str, list[float]] = {way.name: [] for way in ways}
        for number in range(1, ROUNDS + 1):
            for way in ways:
                with console.step(f"round {number} of {ROUNDS}: {way.name}"):
                    way.prepare()
                    started = time.monotonic()
                    way.run()
                    seconds[way.name].append(time.monotonic() - started)
        return _show(ways, {name: statistics.median(values) for name, values in seconds.items()}, lock, console)


def _show(ways: list[Way], median: dict[str, float], lock: Lock, console: Console) -> dict[str, object]:
    ratios = {way.name: median[way.name] / median[way.against] for way in ways if way.against is not None}
    console.table(
        f"{len(lock.files)} packages, median of {ROUNDS} rounds side by side",
        ("way", "seconds", "ratio"),
        [
            (way.name, f"{median[way.name]:.2f}", f"{ratios[way.name]:.2f} × {way.against}" if way.against else "")
            for way in ways
        ],
    )
    return {
        "packages": len(lock.files),
        "rounds": ROUNDS,
        "seconds": {name: round(value, 3) for name, value in median.items()},
        "ratios": {name: round(value, 3) for name, value in ratios.items()},
    }


class _Bench:
    def __init__(self, folder: Path, console: Console) -> None:
        self._folder = folder
        self._console = console
        self._home = folder / "home"
        self._kept_lock = folder / "lock.toml"

    def resolve(self) -> Lock:
        document = self._setup("--lock")
        shutil.copyfile(str(document["pylock"]), self._kept_lock)
        return read_lock(self._kept_lock)

    def ways(self, lock: Lock) -> list[Way]:
        pip_cold, pip_warm = "pip install, nothing kept", "pip install, cache kept"
        venv, cache = self._folder / "pip-venv", self._folder / "pip-cache"
        requirements = self._folder / "requirements.txt"
        requirements.write_text("".join(f"{f.name} @ {f.url} --hash=sha256:{f.sha256}\n" for f in lock.files), "utf-8")

        def venv_only() -> None:
            shutil.rmtree(venv, ignore_errors=True)

        def pip(*words: str) -> None:
            self._check([sys.executable, "-I", "-m", "venv", "--without-pip", str(venv)])
            python = str(venv / "bin" / "python")
            argv = [sys.executable, "-I", "-m", "pip", "--python", python, "install", "--no-deps", "--quiet"]
            self._check([*argv, *words, "--require-hashes", "--requirement", str(requirements)])

        return [
            Way(name=pip_cold, against=None, prepare=venv_only, run=lambda: pip("--no-cache-dir")),
            Way(name="setup, nothing kept", against=pip_cold, prepare=self._forget_all, run=self._install),
            Way(name=pip_warm, against=None, prepare=venv_only, run=lambda: pip("--cache-dir", str(cache))),
            Way(name="setup, wheels kept", against=pip_warm, prepare=self._forget_environment, run=self._install),
            Way(name="setup, nothing to do", against=pip_warm, prepare=lambda: None, run=self._install),
        ]

    def _forget_all(self) -> None:
        shutil.rmtree(self._home, ignore_errors=True)
        lock = self._home / ".sm120" / "locks" / f"pylock.{STACK}.toml"
        lock.parent.mkdir(parents=True)
        shutil.copyfile(self._kept_lock, lock)

    def _forget_environment(self) -> None:
        shutil.rmtree(self._home / ".sm120" / "env")

    def _install(self) -> None:
        self._setup()

    def _setup(self, *words: str) -> dict[str, object]:
        task = ["setup", "--stack", STACK, "--home", str(self._home), "--json", *words]
        document: dict[str, object] = json.loads(
            self._check([sys.executable, "-P", "-m", "invoke", "--search-root", str(CHECKOUT), *task])
        )
        return document

    def _check(self, argv: list[str]) -> str:
        done = subprocess.run(argv, capture_output=True, text=True, check=False, env=dict(os.environ), cwd=CHECKOUT)
        if done.returncode:
            for line in done.stderr.splitlines()[-20:]:
                self._console.info(line)
            raise errors.BuildError(f"a step of the benchmark ended with exit code {done.returncode}: {argv[3:6]}")
        return done.stdout

"""A home of the toolkit on a machine whose pip is configured by the test alone."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from packaging.utils import parse_wheel_filename

from sm120 import files
from sm120.config import CHECKOUT
from sm120.console import Console
from sm120.stack import Environment, Stack, ensure_environment, load_stack
from sm120.stack.fetch.store import Store
from sm120.stack.install.interpreter import platform_tag
from sm120.stack.lock import Lock, LockedFile, read_lock, write_lock
from sm120.stack.spec import request
from sm120.state import State

TORCH_CPU = {
    "torch/__init__.py": "from torch import _C, version\n__version__ = version.__version__\n",
    "torch/_C.py": "",
    "torch/version.py": "__version__ = '2.13.0+cpu'\ncuda = None\n",
}


def torch_cuda(version: str, cuda: str = "13.0", architectures: str = "sm_90 sm_120") -> dict[str, str]:
    """A torch that says of itself what a CUDA build says."""
    return {
        **TORCH_CPU,
        "torch/version.py": f"__version__ = {version!r}\ncuda: str | None = {cuda!r}\n",
        "torch/_C.py": f"def _cuda_getArchFlags():\n    return {architectures!r}\n",
    }


@dataclass
class Home:
    path: Path
    _pip: Path
    _monkeypatch: pytest.MonkeyPatch

    @classmethod
    def make(cls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> "Home":
        for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
            monkeypatch.delenv(name)
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "REQUESTS_CA_BUNDLE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        for name in ("XDG_CONFIG_DIRS", "XDG_CONFIG_HOME"):
            monkeypatch.setenv(name, str(tmp_path / "no configuration"))
        monkeypatch.setenv("PIP_CACHE_DIR", str(tmp_path / "cache"))
        monkeypatch.setenv("SM120_HOME", str(tmp_path / "a home"))
        return cls(tmp_path / "a home", tmp_path / "pip.conf", monkeypatch)

    def configure_pip(self, text: str) -> None:
        """Writes the machine's pip.conf."""
        self._pip.write_text(f"[global]\n{text}\n")
        self._monkeypatch.setenv("PIP_CONFIG_FILE", str(self._pip))

    @property
    def state(self) -> State:
        return State.resolve()

    def stack_file(self, packages: str, *, imports: str = "", tail: str = "", python: str = ">=3.11") -> Path:
        path = self.path.parent / "mine.toml"
        prove = f"[prove]\nimports = [{imports}]\n" if imports else ""
        head = f'schema = 2\nsummary = "s"\npython = "{python}"\ndisk-mb = 1\n'
        top, _, rest = tail.partition("\n---\n") if "\n---\n" in tail else ("", "", tail)
        path.write_text(f"{head}{top}\n[packages]\n{packages}\n{prove}{rest}")
        return path

    def stack(self, packages: str, **options: str) -> Stack:
        return load_stack(self.stack_file(packages, **options))

    def ensure(self, stack: Stack) -> Environment:
        return ensure_environment(stack, self.state, Console.current())

    def write_lock(self, stack: Stack, urls: Mapping[Path, str]) -> Lock:
        """A lock of these wheels, each to be had at its URL: what resolving would have come to."""
        locked = []
        for wheel, url in urls.items():
            name, version, *_ = parse_wheel_filename(wheel.name)
            size = wheel.stat().st_size
            locked.append(
                LockedFile(
                    name=name,
                    version=str(version),
                    filename=wheel.name,
                    url=url,
                    sha256=files.sha256(wheel),
                    size=size,
                )
            )
        lock = Lock(
            stack=stack.name,
            request=request(stack),
            python=f"{sys.version_info[0]}.{sys.version_info[1]}",
            platform=platform_tag(),
            created="2026-03-07T08:00:00+00:00",
            sources=("a test",),
            files=tuple(sorted(locked, key=lambda file: file.name)),
        )
        write_lock(lock, self.state.lock_file(stack.name))
        return lock

    def lock(self) -> Lock:
        return read_lock(self.state.lock_file("mine"))

    def store(self) -> Store:
        return Store(self.state.wheels)

    def everything_written(self) -> str:
        """All text below the home, and the output of nothing else."""
        texts = [path.read_text("utf-8", "replace") for path in self.path.rglob("*") if _is_text(path)]
        return "\n".join(texts)

    def setup(self, *words: str, wrap: Sequence[str] = ()) -> "subprocess.CompletedProcess[str]":
        """``invoke setup --json`` in a process of its own."""
        return subprocess.run(
            [*wrap, *invocation("setup", "--json", *words)], capture_output=True, text=True, timeout=280, check=False
        )

    def setup_ok(self, *words: str, wrap: Sequence[str] = ()) -> dict[str, Any]:
        done = self.setup(*words, wrap=wrap)
        assert done.returncode == 0, done.stderr
        result: dict[str, Any] = json.loads(done.stdout)
        return result


_OWN = ("INSTALLER", "direct_url.json", "uv_cache.json")


def snapshot(environment: Path) -> dict[str, str]:
    """Every installed file and what is in it; byte code and an installer's own notes left out."""
    found = {}
    for path in environment.rglob("*"):
        name = str(path.relative_to(environment))
        if path.is_symlink():
            found[name] = f"-> {path.readlink()}"
        elif path.is_file() and path.suffix != ".pyc" and path.name not in _OWN and path.name != "sm120-lock.json":
            found[name] = _record_lines(path) if path.name == "RECORD" else files.sha256(path)
    return found


def _record_lines(path: Path) -> str:
    lines = path.read_text().splitlines()
    return "\n".join(sorted(line for line in lines if not line.split(",")[0].endswith(_OWN)))


def without_network() -> tuple[str, ...]:
    """The words that run a command where there is no network at all, not even loopback."""
    words = ("unshare", "--net", "--map-root-user")
    try:
        able = subprocess.run([*words, "true"], capture_output=True, check=False)
    except OSError:
        pytest.skip("no unshare here")
    if able.returncode:
        pytest.skip("unshare cannot make a network namespace here")
    return words


def invocation(*words: str) -> list[str]:
    return [sys.executable, "-P", "-m", "invoke", "--search-root", str(CHECKOUT), *words]


def record_of(environment: Environment) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(environment.lock.read_text())
    return content


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert holds()


def _is_text(path: Path) -> bool:
    return path.is_file() and path.suffix in {".json", ".jsonl", ".log", ".toml", ".txt", ".sh", ".part", ".tag"}

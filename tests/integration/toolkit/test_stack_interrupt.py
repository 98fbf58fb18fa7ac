"""Installations that are killed, interrupted, or run side by side."""

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.integration.toolkit.local_index import LocalIndex, make_wheel, serving
from tests.integration.toolkit.stack_home import Home, invocation, wait_until

from sm120 import errors, files
from sm120.stack import Stack, look

PACKAGES = 'numpy = "2.4"'


@pytest.fixture
def index(tmp_path: Path) -> Iterator[LocalIndex]:
    with serving(tmp_path / "index") as made:
        yield made


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: LocalIndex) -> Home:
    made = Home.make(tmp_path, monkeypatch)
    made.configure_pip(f"index-url = {index.url}\nretries = 0")
    return made


class Setup:
    """``invoke setup`` in a process of its own."""

    def __init__(self, stack: Stack) -> None:
        argv = invocation("setup", "--json", "--stack", str(stack.path))
        self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.out = self.error = ""

    def end(self, sign: signal.Signals | None = None) -> int:
        """Sends the signal, if any, and waits; the exit code."""
        if sign is not None:
            self.process.send_signal(sign)
        self.out, self.error = self.process.communicate(timeout=120)
        return self.process.returncode

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


def assert_not_whole(stack: Stack, home: Home) -> None:
    assert look(stack, home.state)[0] is None
    assert not list((home.path / ".sm120").rglob("sm120-lock.json"))


def assert_locked(home: Home) -> None:
    lock = home.state.root / "env" / "mine.lock"
    with pytest.raises(errors.PreflightError, match="has held"), files.lock(lock, timeout=0.2):
        pytest.fail("somebody still uses the environment")


def end_all(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_in_the_middle_of_a_download(index: LocalIndex, home: Home, sign: signal.Signals) -> None:
    stack = home.stack(PACKAGES)
    wheel = index.wheel("numpy", "2.4", padding=3_000_000)
    file = home.write_lock(stack, {wheel: index.file_url(wheel)}).files[0]
    index.faults[wheel.name] = "stalled"
    setup = Setup(stack)
    part = home.store().path(file).with_name(f"{wheel.name}.part")
    wait_until(lambda: part.exists() and part.stat().st_size > 1_000_000)
    assert setup.end(sign) == (-9 if sign is signal.SIGKILL else 130), setup.error
    assert "Traceback" not in setup.error
    assert_not_whole(stack, home)

    del index.faults[wheel.name]
    left = part.stat().st_size
    assert home.ensure(stack).fresh
    assert index.requests[-1].range == f"bytes={left}-"
    assert not part.exists()


def start_large(home: Home, tmp_path: Path) -> tuple[Stack, Setup, psutil.Process]:
    """An installation whose uv has begun, and is held up; uv's process."""
    stack = home.stack(PACKAGES)
    wheel = make_wheel(tmp_path / "wheels", "numpy", "2.4", padding=150_000_000)
    home.write_lock(stack, {wheel: wheel.as_uri()})
    setup = Setup(stack)
    wait_until((home.state.env("mine") / ".sm120-install" / "cache").exists)
    (uv,) = (child for child in setup.children() if child.name() == "uv")
    uv.suspend()
    return stack, setup, uv


def test_killed_in_the_middle_of_an_installation(home: Home, tmp_path: Path) -> None:
    """The uv that was left behind still holds the lock: nobody makes the folder anew under its feet."""
    stack, setup, uv = start_large(home, tmp_path)
    try:
        assert setup.end(signal.SIGKILL) == -9
        assert_not_whole(stack, home)
        assert_locked(home)
    finally:
        uv.resume()
    assert home.ensure(stack).fresh
    assert not list(home.state.env("mine").glob(".sm120-install*"))


def test_interrupted_in_the_middle_of_an_installation(home: Home, tmp_path: Path) -> None:
    stack, setup, uv = start_large(home, tmp_path)
    assert setup.end(signal.SIGINT) == 130, setup.error
    assert "run the same command again" in setup.error
    assert not uv.is_running()
    assert_not_whole(stack, home)
    assert home.ensure(stack).fresh


def test_in_the_middle_of_a_proof(index: LocalIndex, home: Home, tmp_path: Path) -> None:
    """The import that was left behind still holds the lock: nobody makes the folder anew under its feet."""
    begun, go_on = tmp_path / "begun", tmp_path / "go on"
    waits = f"""
import pathlib, time
pathlib.Path({str(begun)!r}).touch()
while not pathlib.Path({str(go_on)!r}).exists():
    time.sleep(0.02)
"""
    stack = home.stack(PACKAGES, imports='"numpy"')
    wheel = index.wheel("numpy", "2.4", content={"numpy/__init__.py": waits})
    home.write_lock(stack, {wheel: index.file_url(wheel)})
    setup = Setup(stack)
    wait_until(begun.exists)
    children = setup.children()
    assert children
    assert home.store().prune([]) == 0  # it is in use
    try:
        assert setup.end(signal.SIGKILL) == -9
        assert_not_whole(stack, home)
        assert_locked(home)
        go_on.touch()
        assert home.ensure(stack).fresh
    finally:
        end_all(children)


def test_two_at_once_install_once(index: LocalIndex, home: Home) -> None:
    index.wheel("numpy", "2.4")
    stack = home.stack(PACKAGES)
    setups = [Setup(stack) for _ in range(3)]
    assert [setup.end() for setup in setups] == [0, 0, 0], [setup.error for setup in setups]
    assert sorted(json.loads(setup.out)["fresh"] for setup in setups) == [False, False, True]
    assert len(list(home.state.runs.iterdir())) == 1


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder], check=False).returncode:
        pytest.skip("mounting is not permitted here")
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_disk_that_fills_up_while_installing(home: Home, tmp_path: Path) -> None:
    """The stack file says too little, so the check beforehand lets it pass."""
    home.stack_file(PACKAGES)
    wheel = make_wheel(tmp_path / "wheels", "numpy", "2.4", padding=8_000_000)
    with small_disk(home.path, "12m"):
        stack = home.stack(PACKAGES)
        home.write_lock(stack, {wheel: wheel.as_uri()})
        with pytest.raises(errors.PreflightError, match="no space left on the disk") as raised:
            home.ensure(stack)
        assert "SM120_HOME" in (raised.value.remedy or "")
        assert_not_whole(stack, home)
        assert os.statvfs(home.path).f_bavail >= 0

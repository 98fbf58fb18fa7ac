"""The stacks of the repository against the machine's own package index."""

import sys
from pathlib import Path

import pytest

from sm120.console import Console
from sm120.runs import Run
from sm120.stack.lock import Lock, read_lock, write_lock
from sm120.stack.resolve.resolution import resolve
from sm120.stack.spec import load_stack
from sm120.state import State


@pytest.fixture
def locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Lock:
    monkeypatch.setenv("SM120_HOME", str(tmp_path))
    state = State.resolve()
    lock = resolve(
        load_stack(request.param), state, Console.current(), Run.start(state, "setup", []), python=Path(sys.executable)
    )
    write_lock(lock, tmp_path / "pylock.toml")
    assert read_lock(tmp_path / "pylock.toml") == lock
    return lock


def versions(lock: Lock) -> dict[str, str]:
    return {file.name: file.version for file in lock.files}


def check_pins(lock: Lock) -> None:
    found = versions(lock)
    for package in load_stack(lock.stack).packages:
        if package.pinned is not None:
            assert found[package.name] == package.pinned


@pytest.mark.network
@pytest.mark.parametrize("locked", ["cpu"], indirect=True)
def test_cpu(locked: Lock) -> None:
    check_pins(locked)
    assert sum(file.size or 0 for file in locked.files) < load_stack("cpu").disk_bytes
    assert not {"nvidia-cublas", "nvidia-cudnn-cu13", "triton"} & set(versions(locked))


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.parametrize(
    ("locked", "cublas", "cutlass"),
    [("stable", "13.1.1.3", "4.8.0"), ("stable-torch-2.11", "13.1.0.3", "4.5.2")],
    indirect=["locked"],
)
def test_sets_of_upstream(locked: Lock, cublas: str, cutlass: str) -> None:
    check_pins(locked)
    found = versions(locked)
    assert (found["nvidia-cublas"], found["nvidia-cutlass-dsl"]) == (cublas, cutlass)
    assert found["cuda-toolkit"].startswith("13.0.")
    assert found["nvidia-cuda-nvcc"].startswith("13.0.")
    assert "+" not in found["torch"]
    assert {"nvidia-cuda-cuobjdump", "nvidia-cuda-nvdisasm", "nvidia-nvml-dev", "nvidia-cuda-profiler-api"} <= set(
        found
    )
    assert 3e9 < sum(file.size or 0 for file in locked.files) < load_stack(locked.stack).disk_bytes

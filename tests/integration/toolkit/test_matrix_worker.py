"""The client of the door against a worker that does everything wrong.

Limits are generous except where the worker is silent on purpose: there, nothing but the limit can end the test.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.integration.toolkit.matrix_scenario import PATIENT, Scenario

from sm120.errors import PreflightError
from sm120.matrix.boundedlog import HEAD_BYTES, TAIL_BYTES
from sm120.matrix.door import Door, greet
from sm120.matrix.lost import WorkerCrashed, WorkerError, WorkerGarbled, WorkerHung, WorkerRefused
from sm120.matrix.worker import Limits, Worker

IMPATIENT = Limits(start=60, quiet=0.5, total=60, grace=0.3)
CELL = {"id": "c", "reference": None}


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """No thread, no zombie and no orphan outlives a test."""
    threads = set(threading.enumerate())
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    yield
    assert psutil.Process().children(recursive=True) == []
    assert set(threading.enumerate()) == threads
    assert len(list(Path("/proc/self/fd").iterdir())) <= descriptors


def start(folder: Path, what: str | None = None, limits: Limits = PATIENT, **more: Any) -> Worker:
    """A worker that does ``what`` when it is asked to run the cell."""
    return Scenario(folder, do={} if what is None else {"c": what}, limits=limits, **more).door(folder).open("test")


def lose(worker: Worker, **limits: float) -> WorkerError:
    with pytest.raises(WorkerError) as caught:
        worker.request("run", {"cell": CELL, "reference": None, "reproducer": None}, **limits)
    return caught.value


def is_running(pid: int) -> bool:
    """Whether it goes on running; one that was just killed gets the time to fall."""
    try:
        process = psutil.Process(pid)
        for _ in range(200):
            if process.status() == psutil.STATUS_ZOMBIE:
                return False
            time.sleep(0.05)
    except psutil.NoSuchProcess:
        return False
    return True


def test_requests_are_answered_in_order(tmp_path: Path) -> None:
    with start(tmp_path) as worker:
        assert worker.hello()["pid"] == worker.pid
        for _ in range(3):
            assert worker.request("probe") == {"ok": True, "message": "1 + 1 gave 3"}


def test_worker_leaves_by_itself_when_its_input_ends(tmp_path: Path) -> None:
    worker = start(tmp_path)
    worker.hello()
    worker.close()
    assert worker._process.returncode == 0
    worker.close()
    worker.kill()


@pytest.mark.parametrize(
    ("what", "error", "said"),
    [
        pytest.param("sigkill", WorkerCrashed, "was killed by SIGKILL", id="sigkill"),
        pytest.param("segv", WorkerCrashed, "was killed by SIGSEGV", id="segv"),
        pytest.param("abort", WorkerCrashed, "was killed by SIGABRT", id="abort"),
        pytest.param("exit3", WorkerCrashed, "ended with exit code 3", id="exit-code"),
        pytest.param("exit0", WorkerCrashed, "ended with exit code 0 without an answer", id="silent-death"),
        pytest.param("orphan", WorkerCrashed, "ended with exit code 4", id="child-holds-the-pipes"),
        pytest.param(
            "half_then_segv", WorkerCrashed, "SIGSEGV; before that, it ended in the middle", id="half-and-segv"
        ),
        pytest.param("half_line", WorkerGarbled, "ended in the middle of a line", id="half-line"),
        pytest.param("garbage", WorkerGarbled, "sent what is not JSON: 'Loading weights: 100%'", id="garbage"),
        pytest.param("binary", WorkerGarbled, "sent what is not JSON", id="binary"),
        pytest.param("nested", WorkerGarbled, "sent what is not JSON", id="nested-too-deeply"),
        pytest.param("nan_literal", WorkerGarbled, "sent what is not JSON", id="nan-literal"),
        pytest.param("infinite", WorkerGarbled, "sent what is not JSON", id="infinite"),
        pytest.param("not_object", WorkerGarbled, "sent what is no object: '[1, 2]'", id="not-an-object"),
        pytest.param("wrong_id", WorkerGarbled, "answered request 8 while the request was 1", id="wrong-id"),
        pytest.param("boolean_id", WorkerGarbled, "answered request True", id="true-is-not-1"),
        pytest.param("no_result", WorkerGarbled, "sent a reply without result or error", id="no-result"),
        pytest.param("oversized", WorkerGarbled, "sent a line of more than 16 MiB", id="oversized"),
        pytest.param("close_stdout", WorkerGarbled, "closed its output but went on running", id="closed-output"),
    ],
)
def test_a_lost_worker_is_told_by_how_it_was_lost(
    tmp_path: Path, what: str, error: type[WorkerError], said: str
) -> None:
    worker = start(tmp_path, what)
    found = lose(worker)
    assert type(found) is error
    assert said in found.message
    assert found.started
    assert not is_running(worker.pid)
    assert not [line for line in found.tail if line.startswith("child") and is_running(int(line.split()[1]))]


@pytest.mark.parametrize("what", [pytest.param("hang", id="hang"), pytest.param("stubborn", id="ignores-signals")])
def test_silence_is_a_hang_and_ends_the_whole_group(tmp_path: Path, what: str) -> None:
    worker = start(tmp_path, what, IMPATIENT)
    worker.hello()
    found = lose(worker)
    assert isinstance(found, WorkerHung)
    assert "silent for" in found.message
    assert not is_running(worker.pid)
    children = [int(line.split()[1]) for line in found.tail if line.startswith("child")]
    assert len(children) == (what == "stubborn")
    assert not any(is_running(child) for child in children)


def test_events_do_not_extend_the_cap(tmp_path: Path) -> None:
    worker = start(tmp_path, "chatter")
    worker.hello()
    found = lose(worker, quiet=60, total=1)
    assert isinstance(found, WorkerHung)
    assert "not done within 1 s; its last message was 'still at it'" in found.message


def test_events_prove_life(tmp_path: Path) -> None:
    worker = start(tmp_path, "chatter")
    worker.hello()
    assert "not done within" in lose(worker, quiet=1, total=3).message


def test_a_worker_that_never_reads_cannot_block_us(tmp_path: Path) -> None:
    worker = Worker(["sleep", "600"], env=os.environ, cwd=tmp_path, log=tmp_path / "log", limits=IMPATIENT)
    with pytest.raises(WorkerHung):
        worker.request("run", {"cell": "x" * 4_000_000})


def test_a_flood_on_stderr_blocks_nothing_and_fills_no_disk(tmp_path: Path) -> None:
    with start(tmp_path, "flood") as worker:
        answer = worker.request("run", {"cell": CELL, "reference": None, "reproducer": None})
    assert answer["verdict"] == "PASS"
    assert HEAD_BYTES < worker.log.stat().st_size < HEAD_BYTES + 2 * TAIL_BYTES + 1000
    assert "bytes left out" in worker.log.read_text()


def test_last_words_are_kept_without_secrets(tmp_path: Path) -> None:
    worker = start(tmp_path, "segv")
    found = lose(worker)
    assert found.tail == ("about to die: token ***",)
    assert worker.log.read_text() == "about to die: token ***\n"


def test_a_refusal_leaves_the_worker_alive(tmp_path: Path) -> None:
    with start(tmp_path, "refuse") as worker:
        with pytest.raises(WorkerRefused, match="no") as caught:
            worker.request("run", {"cell": CELL, "reference": None, "reproducer": None})
        assert caught.value.kind == "internal"
        assert worker.request("probe")["ok"] is True


def test_a_second_answer_is_garbage(tmp_path: Path) -> None:
    worker = start(tmp_path, "twice")
    worker.request("run", {"cell": CELL, "reference": None, "reproducer": None})
    with pytest.raises(WorkerGarbled, match="answered request 1"):
        worker.request("probe")


def test_death_between_requests_is_not_the_next_requests_fault(tmp_path: Path) -> None:
    worker = start(tmp_path, "die_after")
    worker.request("run", {"cell": CELL, "reference": None, "reproducer": None})
    found = lose(worker)
    assert isinstance(found, WorkerCrashed)
    assert not found.started


def test_killing_it_from_another_thread_ends_the_request(tmp_path: Path) -> None:
    worker = start(tmp_path, "hang")
    worker.hello()
    killer = threading.Timer(0.3, worker.kill)
    killer.start()
    found = lose(worker)
    killer.join()
    assert isinstance(found, WorkerCrashed)
    assert isinstance(lose(worker), WorkerCrashed)


def test_an_outside_sigkill_is_seen(tmp_path: Path) -> None:
    worker = start(tmp_path, "hang")
    worker.hello()
    killer = threading.Timer(0.3, os.kill, (worker.pid, signal.SIGKILL))
    killer.start()
    assert "SIGKILL" in lose(worker).message
    killer.join()


def test_a_program_that_cannot_be_started(tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match="cannot start"):
        Door((str(tmp_path / "no-such-python"), "-m", "x"), tmp_path).open("test")


@pytest.mark.parametrize(
    ("do", "hello", "said"),
    [
        pytest.param({"hello": "exit1"}, {}, "does not start: it ended with exit code 1", id="dies"),
        pytest.param({"hello": "refuse"}, {}, "cannot work here: no", id="refuses"),
        pytest.param({}, {"protocol": 2}, "speaks protocol 2", id="another-protocol"),
    ],
)
def test_a_worker_that_does_not_start(tmp_path: Path, do: dict[str, str], hello: dict[str, int], said: str) -> None:
    worker = Scenario(tmp_path, do=do, hello=hello).door(tmp_path).open("test")
    try:
        with pytest.raises(PreflightError, match=said):
            greet(worker)
    finally:
        worker.kill()


def test_import_errors_are_shown(tmp_path: Path) -> None:
    script = tmp_path / "w.py"
    script.write_text("import no_such_module_at_all")
    worker = Worker([sys.executable, str(script)], env=os.environ, cwd=tmp_path, log=tmp_path / "log")
    try:
        with pytest.raises(PreflightError, match="No module named 'no_such_module_at_all'"):
            greet(worker)
    finally:
        worker.kill()


def test_requests_carry_no_nan(tmp_path: Path) -> None:
    with start(tmp_path) as worker:
        with pytest.raises(ValueError, match="not JSON compliant"):
            worker.request("run", {"cell": {"cost": float("nan")}})
        assert json.loads(json.dumps(worker.request("probe")))["ok"] is True

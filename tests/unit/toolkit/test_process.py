"""Real processes: what is promised about children is promised about these."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from sm120 import errors, process

STUBBORN = """
import signal, sys, time
def note(name):
    return lambda *_: print(name, flush=True)
signal.signal(signal.SIGINT, note("interrupt"))
signal.signal(signal.SIGTERM, note("terminate"))
print("ready", flush=True)
while True:
    time.sleep(1)
"""


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 30
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


@pytest.fixture
def pid_file(tmp_path: Path) -> Iterator[Path]:
    """A file where a test's grandchild writes its process id; killed at the end if it lives."""
    path = tmp_path / "pid"
    yield path
    with contextlib.suppress(OSError, ValueError):
        os.kill(int(path.read_text()), signal.SIGKILL)


def test_output_is_kept_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "logs" / "log"
    seen: list[str] = []
    argv = ["sh", "-c", "echo one; echo two >&2; printf 'three \\033[31m'; exit 3"]
    done = process.run(argv, log=log, stream=True, on_line=seen.append)
    assert done.returncode == 3
    assert done.argv == tuple(argv)
    assert done.tail == ("one", "two", "three \\x1b[31m")
    assert seen == ["one", "two", "three \x1b[31m"]
    assert log.read_bytes() == b"one\ntwo\nthree \x1b[31m\n"
    assert capsys.readouterr().out == "one\ntwo\nthree \\x1b[31m\n"


def test_environment_and_folder(tmp_path: Path) -> None:
    done = process.run(["sh", "-c", "pwd; echo $A-$HOME"], cwd=tmp_path, env={"A": "b", "PATH": os.environ["PATH"]})
    assert done.tail == (str(tmp_path), "b-")


def test_child_has_no_standard_input() -> None:
    assert process.run(["cat"]).tail == ()


def test_secrets_stay_out_of_log_and_tail(tmp_path: Path) -> None:
    env = {**os.environ, "MY_TOKEN": "correct-horse-battery"}
    done = process.run(["sh", "-c", "echo $MY_TOKEN https://u:p@h/"], env=env, log=tmp_path / "log")
    assert done.tail == ("*** https://***@h/",)
    assert (tmp_path / "log").read_text() == "*** https://***@h/\n"


@pytest.mark.parametrize("argv", [["/no/such/program"], ["/"], ["a\0b"]])
def test_a_program_that_cannot_be_started(argv: list[str]) -> None:
    with pytest.raises(errors.PreflightError, match="cannot start"):
        process.run(argv)


def test_ended_by_a_signal() -> None:
    assert process.run(["sh", "-c", "kill -SEGV $$"]).returncode == -signal.SIGSEGV


def test_flood_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "LOG_LIMIT", 100_000)
    done = process.run(["sh", "-c", "yes 0123456789 | head -c 20000000; echo end"], log=tmp_path / "log")
    assert len(done.tail) == process.TAIL_LINES
    assert done.tail[-1].endswith("end")
    assert 100_000 - 11 <= (tmp_path / "log").stat().st_size <= 100_100
    assert b"bytes left out" in (tmp_path / "log").read_bytes()


def test_line_without_end_and_bytes_that_are_no_text(tmp_path: Path) -> None:
    script = "import sys; sys.stdout.buffer.write(b'\\xff\\x00' * 1_000_000)"
    done = process.run([sys.executable, "-c", script], log=tmp_path / "log")
    assert done.returncode == 0
    assert max(len(line) for line in done.tail) < 50_000
    assert (tmp_path / "log").stat().st_size > 2_000_000


def test_child_that_closes_its_output_and_goes_on() -> None:
    done = process.run(["sh", "-c", "exec >&- 2>&-; sleep 0.3; exit 7"])
    assert done.returncode == 7


def test_time_out_stops_the_group(pid_file: Path) -> None:
    done = process.run(["sh", "-c", f"sleep 600 & echo $! > '{pid_file}'; echo started; wait"], timeout=1, grace=0.5)
    assert done.timed_out
    assert done.tail == ("started",)
    assert until(lambda: not is_running(int(pid_file.read_text())))


def test_what_a_finished_child_left_behind_is_killed(pid_file: Path) -> None:
    done = process.run(["sh", "-c", f"sleep 600 & echo $! > '{pid_file}'; echo done"])
    assert done.returncode == 0
    assert not done.timed_out
    assert done.tail == ("done",)
    assert until(lambda: not is_running(int(pid_file.read_text())))


def test_a_daemon_that_holds_the_pipe_does_not_hold_us(pid_file: Path) -> None:
    done = process.run(["sh", "-c", f"setsid sleep 600 & echo $! > '{pid_file}'; echo done"])
    assert done.returncode == 0
    assert done.tail == ("done",)


def test_interrupt_then_terminate_then_kill() -> None:
    child = process.spawn([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE)
    assert child.stdout is not None
    with child.stdout:
        assert child.stdout.readline() == b"ready\n"
        assert process.terminate(child, grace=0.5) == -signal.SIGKILL
        assert child.stdout.read() == b"interrupt\nterminate\n"


def test_a_child_that_obeys_is_only_interrupted() -> None:
    script = STUBBORN.replace('note("interrupt")', "lambda *_: sys.exit(5)")
    child = process.spawn([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert child.stdout is not None
    with child.stdout:
        assert child.stdout.readline() == b"ready\n"
        assert process.terminate(child, grace=30) == 5
        assert child.stdout.read() == b""


def test_terminate_reaches_descendants_in_sessions_of_their_own(pid_file: Path) -> None:
    child = process.spawn(["sh", "-c", f"setsid sleep 600 & echo $! > '{pid_file}'; wait"])
    assert until(lambda: pid_file.exists() and pid_file.read_text().strip() != "")
    process.terminate(child, grace=5)
    assert until(lambda: not is_running(int(pid_file.read_text())))


def test_terminate_twice_and_after_the_end_is_harmless() -> None:
    child = process.spawn(["true"])
    child.wait()
    assert process.terminate(child) == 0
    assert process.terminate(child) == 0


def test_terminate_never_signals_our_own_group() -> None:
    with subprocess.Popen(["sleep", "600"]) as child:  # not made by spawn: in our group
        assert process.terminate(child, grace=5) == -signal.SIGINT


RUNNER = """
import sys
from sm120 import process
process.run(["sh", "-c", "echo $$ > '" + sys.argv[1] + "'; exec sleep 600"], grace=1)
"""


def test_interrupt_of_the_toolkit_stops_its_child(pid_file: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", RUNNER, str(pid_file)], stderr=subprocess.PIPE) as runner:
        assert until(lambda: pid_file.exists() and pid_file.read_text().strip() != "")
        runner.send_signal(signal.SIGINT)
        _, err = runner.communicate(timeout=30)
    assert b"KeyboardInterrupt" in err
    assert until(lambda: not is_running(int(pid_file.read_text())))

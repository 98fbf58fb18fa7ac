"""The children of ``doctor --links`` as real processes over gloo: what they say, and that nothing of them stays."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
FAULTY = Path(__file__).parent / "plugins" / "links_faulty.py"
SUMS = {"task": "reduce", "ranks": 2, "sizes": [[1024, "bfloat16", 2], [4096, "float32", 2]], "timed": [[1024, 5]]}
COPIES = {"task": "peer", "ranks": 1, "sizes": [[4096, 1]], "timed": 4096}

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a supervisor in a session of its own."""
    started: list[subprocess.Popen[str]] = []

    def begin(request: dict[str, Any], fault: str = "", **changes: object) -> "subprocess.Popen[str]":
        path = tmp_path / "request.json"
        common = {"device": "cpu", "start": 60, "quiet": 30, "seed": 0, "blocks": 2, "parent": os.getpid()}
        whole = {**common, "store": str(tmp_path / "store"), **request, **changes}
        path.write_text(json.dumps(whole), encoding="utf-8")
        env = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("SM120_", "NCCL_", "COV_"))},
            "PYTHONPATH": str(ROOT / "src"),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            **({"SM120_LINKS": str(FAULTY), "LINKS_FAULT": fault} if fault else {}),
        }
        words = [sys.executable, "-m", "sm120_cells.links", str(path)]
        child = subprocess.Popen(
            words, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        started.append(child)
        return child

    yield begin
    for child in started:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
        child.communicate()


def talk(child: "subprocess.Popen[str]") -> tuple[list[dict[str, Any]], str]:
    """Its messages, and everything that it printed."""
    text, _ = child.communicate(timeout=120)
    return [json.loads(line) for line in text.splitlines() if line.startswith('{"links": 1,')], text


def of(messages: list[dict[str, Any]], event: str) -> list[dict[str, Any]]:
    return [message for message in messages if message["event"] == event]


def members(session: int) -> list[int]:
    """Processes of a session that have not ended."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, number = (folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(number) == session and state not in "ZX":
            found.append(int(folder.name))
    return found


def wait_until(condition: Callable[[], bool]) -> None:
    """Fails with pytest's time limit, not with one of its own."""
    while not condition():
        time.sleep(0.05)


def test_two_ranks_check_and_time_their_sums(start: Start) -> None:
    child = start(SUMS)
    messages, _ = talk(child)
    assert child.returncode == 0
    assert of(messages, "wrong") == []
    assert sorted((m["rank"], m["checks"], m["wrong"]) for m in of(messages, "done")) == [(0, 4, 0), (1, 4, 0)]
    timings = of(messages, "timing")
    assert sorted(m["rank"] for m in timings) == [0, 1]
    assert all(m["bytes"] == 1024 and m["ranks"] == 2 and m["calls"] == 10 and len(m["blocks"]) == 2 for m in timings)
    assert all(0 < m["median"] <= m["p99"] for m in timings)


def test_a_wrong_element_is_reported_by_the_rank_that_got_it(start: Start) -> None:
    child = start(SUMS, "off-by-one")
    messages, _ = talk(child)
    assert child.returncode == 0
    (wrong,) = of(messages, "wrong")
    assert wrong["rank"] == 1
    where = wrong["where"]
    assert (where["bytes"], where["dtype"], where["round"]) == (4096, "float32", 0)
    assert (where["first"], where["count"], where["of"], where["got"]) == (7, 1, 1024, where["expected"] + 1)
    assert sorted((m["rank"], m["wrong"]) for m in of(messages, "done")) == [(0, 0), (1, 1)]


def test_a_rank_that_dies_ends_the_others_at_once(start: Start) -> None:
    child = start(SUMS, "dies", quiet=1000)
    messages, text = talk(child)
    assert child.returncode == 1
    assert (1, -signal.SIGSEGV) in [(m["rank"], m["code"]) for m in of(messages, "lost")]
    assert "[rank 1] ncclDevKernel_AllReduce: misaligned address" in text
    assert members(child.pid) == []


def test_a_rank_that_never_joins_is_a_hang_that_says_who_waits_for_whom(start: Start) -> None:
    child = start(SUMS, "never-joins", start=8)
    messages, _ = talk(child)
    (hung,) = of(messages, "hung")
    assert [(rank, step) for rank, step, _ in hung["ranks"]] == [(0, "joining"), (1, "joining")]
    assert hung["seconds"] >= 8
    assert members(child.pid) == []


def test_ranks_that_ignore_signals_and_hang_are_killed(start: Start) -> None:
    child = start(SUMS, "stubborn", quiet=1)
    messages, _ = talk(child)
    (hung,) = of(messages, "hung")
    assert hung["ranks"][1][1] == "all-reduce of 1024 bytes of bfloat16, round 0"
    assert of(messages, "stuck") == []
    assert members(child.pid) == []


def test_an_interrupt_ends_supervisor_and_stubborn_ranks(start: Start) -> None:
    child = start(SUMS, "stubborn", quiet=1000)
    assert child.stdout is not None
    for line in child.stdout:
        if '"rank": 1, "step": "all-reduce' in line:
            break
    os.killpg(child.pid, signal.SIGINT)
    child.wait(timeout=60)
    assert child.returncode == 1
    assert members(child.pid) == []


def test_ranks_do_not_outlive_a_killed_supervisor(start: Start) -> None:
    child = start(SUMS, "stubborn", quiet=1000)
    assert child.stdout is not None
    for line in child.stdout:
        if '"rank": 1, "step": "all-reduce' in line:
            break
    child.kill()
    child.wait()
    wait_until(lambda: members(child.pid) == [])


def test_a_supervisor_whose_parent_has_gone_does_not_begin(start: Start) -> None:
    child = start(SUMS, parent=2**22 + 1)
    assert talk(child) == ([], "")
    assert child.returncode == 1


def test_what_is_no_message_comes_as_garbled(start: Start) -> None:
    messages, _ = talk(start(SUMS, "garbles"))
    assert of(messages, "garbled")[0]["rank"] == 1


def test_noise_is_passed_on_in_short_lines_and_never_as_a_message(start: Start) -> None:
    child = start(SUMS, "noisy")
    messages, text = talk(child)
    assert child.returncode == 0
    assert len(of(messages, "done")) == 2
    assert max(map(len, text.splitlines())) < 8192
    assert '[rank 0] {"links": 2}' in text


def test_an_error_in_a_rank_is_told_with_its_kind(start: Start) -> None:
    child = start(COPIES, "memory")
    messages, text = talk(child)
    assert child.returncode == 1
    (failed,) = of(messages, "failed")
    assert failed["kind"] == "memory"
    assert "Tried to allocate" in failed["message"]
    assert "Traceback" in text


def test_a_look_says_what_torch_is(start: Start) -> None:
    messages, _ = talk(start({"task": "look", "ranks": 1}))
    (machine,) = of(messages, "machine")
    assert machine["torch"]
    assert machine.keys() >= {"cuda", "nccl", "package", "gpus"}

"""``doctor --links`` with real children over gloo, on links that lie, hang and die."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from sm120 import config
from sm120.console import Console
from sm120.errors import PreflightError
from sm120.host.facts import Gpu, Pair
from sm120.host.links import LinkReport, Verdict
from sm120.host.links.bench import Bench
from sm120.host.links.examine import Machine, look, measure
from sm120.host.links.plan import DEFAULT, THROUGH_HOST, THROUGH_SOCKETS, Effort
from sm120.runs import Run
from sm120.stack import ensure_environment, load_stack
from sm120.state import State

FAULTY = Path(__file__).parents[1] / "cells" / "plugins" / "links_faulty.py"
SMALL = Effort(
    copies=((1, 1), (4096, 2)),
    copy_timed=4096,
    sums=((1024, "bfloat16", 2), (4096, "float32", 2)),
    timed=((8192, 5), (65536, 5)),
    blocks=2,
    start=120,
    quiet=60,
    total=240,
)
IMPATIENT = Effort(**{**{name: getattr(SMALL, name) for name in SMALL.__dataclass_fields__}, "quiet": 3})
MACHINE = Machine(
    gpus=tuple(Gpu(index=i, uuid=f"GPU-{i}", name="stand-in", bus_id="") for i in range(2)),
    pairs=(Pair(a=0, b=1, path="PIX", read="ok", write="ok"),),  # the default, peer access off, sockets
    driver="580.95",
    nccl="nvidia-nccl-cu13==2.28.9",
)


@pytest.fixture(scope="session")
def python() -> Path:
    existing = State.resolve().env("cpu") / "bin" / "python"
    return (
        existing
        if existing.exists()
        else ensure_environment(load_stack("cpu"), State.resolve(), Console.create()).python
    )


@pytest.fixture
def bench(python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Bench]:
    for name in list(os.environ):
        if name.startswith("NCCL_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(config, "_current", config.resolve({}, {"SM120_HOME": str(tmp_path)}))

    def made(fault: str = "", effort: Effort = SMALL) -> Bench:
        if fault:
            monkeypatch.setenv("SM120_LINKS", str(FAULTY))
            monkeypatch.setenv("LINKS_FAULT", fault)
        run = Run.start(State.resolve(), "doctor", ["doctor", "--links"])
        return Bench(python=python, run=run, device="cpu", variables={}, effort=effort)

    return made


def seen(bench: Bench) -> tuple[LinkReport, dict[str, Verdict], list[str]]:
    report = measure(bench, MACHINE, "cpu", Console.create())
    verdicts = {result.setting.name: result.verdict for result in report.settings}
    return report, verdicts, [finding.id for finding in report.findings()]


def test_right_links_are_right(bench: Callable[..., Bench], tmp_path: Path) -> None:
    report, verdicts, findings = seen(bench())
    (pair,) = report.pairs
    assert (pair.outcome.verdict, pair.outcome.direct, pair.outcome.checks) == (Verdict.RIGHT, True, 36)
    assert verdicts == {DEFAULT.name: Verdict.RIGHT, THROUGH_HOST.name: Verdict.RIGHT}
    assert report.chosen in (DEFAULT, THROUGH_HOST)  # no set: settings hold a mapping
    assert [timing.bytes for timing in report.settings[0].timings] == [8192, 65536]
    assert findings == ["links-setting"]
    assert running(tmp_path) == []


def test_a_default_that_hangs_costs_itself_and_the_next_setting_is_taken(
    bench: Callable[..., Bench], tmp_path: Path
) -> None:
    report, verdicts, findings = seen(bench("hangs-with-peer-access", IMPATIENT))
    assert verdicts == {DEFAULT.name: Verdict.HANG, THROUGH_HOST.name: Verdict.RIGHT}
    assert "all-reduce of 1024 bytes of bfloat16, round 0" in report.settings[0].detail
    assert report.chosen == THROUGH_HOST
    assert findings == ["links-default-fails", "links-setting"]
    assert running(tmp_path) == []


@pytest.mark.slow
def test_sums_that_are_off_by_one_once_leave_no_setting(bench: Callable[..., Bench]) -> None:
    report, verdicts, findings = seen(bench("off-by-one"))
    assert verdicts == {
        DEFAULT.name: Verdict.WRONG,
        THROUGH_HOST.name: Verdict.WRONG,
        THROUGH_SOCKETS.name: Verdict.WRONG,
    }
    (where,) = report.settings[0].groups[0].outcome.where
    assert (where["rank"], where["first"], where["count"], where["bytes"]) == (1, 7, 1, 4096)
    assert where["got"] == where["expected"] + 1
    assert report.chosen is None
    assert findings == ["links-no-setting-works"]


@pytest.mark.slow
def test_the_last_resort_is_tried_when_all_else_crashed(bench: Callable[..., Bench]) -> None:
    report, verdicts, findings = seen(bench("needs-sockets"))
    assert list(verdicts.values()) == [Verdict.CRASH, Verdict.CRASH, Verdict.RIGHT]
    assert "unhandled system error: shm_open failed" in report.settings[0].detail
    assert report.chosen == THROUGH_SOCKETS
    assert findings == ["links-default-fails", "links-only-sockets-work", "links-setting"]


@pytest.mark.slow
def test_copies_of_zeros_forbid_peer_access(bench: Callable[..., Bench]) -> None:
    report, _, findings = seen(bench("zeros"))
    assert report.pairs[0].outcome.verdict == Verdict.WRONG
    assert report.pairs[0].outcome.where[0]["kind"] == "zeros"
    assert report.chosen == THROUGH_HOST
    assert not report.peer_memory_trusted
    assert findings[0] in {"links-copies-wrong", "links-peer-copies-wrong"}


@pytest.mark.parametrize(
    ("fault", "effort", "verdict", "words"),
    [
        ("stale", SMALL, Verdict.WRONG, "36 of 36 results are wrong"),
        ("copy-dies", SMALL, Verdict.CRASH, "rank 0 was killed by SIGKILL in engine copy, forth, 1 bytes, round 0"),
        ("copy-hangs", IMPATIENT, Verdict.HANG, "rank 0 in engine copy, forth, 1 bytes, round 0"),
    ],
)
def test_a_pair_that_fails_costs_its_child(
    bench: Callable[..., Bench], fault: str, effort: Effort, verdict: Verdict, words: str
) -> None:
    request = {"task": "peer", "ranks": 1, "sizes": effort.copies, "timed": effort.copy_timed}
    outcome = bench(fault, effort).child("copies", ("a", "b"), request, None)
    assert outcome.verdict == verdict
    assert words in outcome.detail


def test_want_of_memory_is_no_verdict(bench: Callable[..., Bench]) -> None:
    with pytest.raises(PreflightError, match="ran out of memory") as raised:
        measure(bench("memory"), MACHINE, "cpu", Console.create())
    assert "nvidia-smi" in str(raised.value.remedy)


def test_a_torch_without_cuda_is_refused_with_the_stack_to_take(bench: Callable[..., Bench]) -> None:
    with pytest.raises(PreflightError, match="built without CUDA") as raised:
        look(bench(), "cpu")
    assert "setup --stack nightly" in str(raised.value.remedy)


MEASURE = """
import sys
from pathlib import Path
sys.path[:0] = {path!r}
from tests.integration.toolkit.test_links_real import MACHINE, SMALL
from sm120 import config, entry
from sm120.console import Console
from sm120.host.links.bench import Bench
from sm120.host.links.examine import measure
from sm120.runs import Run
from sm120.state import State
config.use(config.resolve({{}}))
run = Run.start(State.resolve(), "doctor", [])
bench = Bench(python=Path({python!r}), run=run, device="cpu", variables={{}}, effort=SMALL)
sys.exit(entry.guarded(lambda: measure(bench, MACHINE, "cpu", Console.current()) and 0, {{}}))
"""


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupt_in_the_middle_leaves_nothing_behind(
    bench: Callable[..., Bench], python: Path, tmp_path: Path, sign: signal.Signals
) -> None:
    bench("stubborn")  # ranks that hang and ignore every signal that can be ignored
    root = Path(__file__).parents[3]
    words = [sys.executable, "-c", MEASURE.format(path=[str(root), str(root / "src")], python=str(python))]
    env = {**os.environ, "SM120_HOME": str(tmp_path)}
    with subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as task:
        wait_until(lambda: len(list(tmp_path.glob("stubborn-*"))) == 2 or task.poll() is not None)
        assert len(running(tmp_path)) == 3
        task.send_signal(sign)
        text, _ = task.communicate(timeout=60)
    assert task.returncode == (130 if sign == signal.SIGINT else -signal.SIGKILL), text
    wait_until(lambda: running(tmp_path) == [])
    if sign == signal.SIGINT:
        assert not list(tmp_path.glob("sm120-links-*"))


def running(folder: Path) -> list[int]:
    """Children of this test: their request lies in its folder."""
    found = []
    for process in psutil.process_iter():
        try:
            words: list[Any] = process.cmdline()
            if "sm120_cells.links" in words and str(folder) in words[3] and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except (psutil.Error, IndexError):
            continue
    return found


def wait_until(condition: Callable[[], bool]) -> None:
    """Fails with pytest's time limit, not with one of its own."""
    while not condition():
        time.sleep(0.05)

"""The whole task on a scripted worker: right verdicts beside wrong ones, resuming, and what is left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from tests.integration.toolkit.fake_worker import HELLO
from tests.integration.toolkit.matrix_scenario import Outcome, Scenario, perform_in, settle, subject

from sm120 import runs
from sm120.errors import NothingChecked, PreflightError, ToolkitError, UsageError
from sm120.matrix.fingerprint import take
from sm120.matrix.gate import Allowed, gate_path, load, may_start
from sm120.matrix.journal import FILE
from sm120.matrix.options import Options, request
from sm120.matrix.worker import Limits
from sm120.state import State

OPTIONS = Options(json=True, model="Qwen3-30B-A3B")
WITH_SHARED = Options(json=True)
ONE_DENSE = (
    subject("dense", None, "a"),
    subject("moe", "x", None),
    subject("moe", "y", None),
    subject("block", "x", "a"),
    subject("block", "y", "a"),
)


@pytest.fixture(autouse=True)
def _home(tmp_path: Path) -> Iterator[None]:
    settle(tmp_path)
    yield
    assert psutil.Process().children(recursive=True) == []


def pair(outcome: Outcome, moe: str, dense: str) -> str:
    (found,) = [p for p in outcome.document["pairs"] if (p["moe"], p["dense"]) == (moe, dense)]
    return str(found["verdict"]["word"])


def test_everything_right_opens_the_gate(tmp_path: Path) -> None:
    outcome = perform_in(Scenario(tmp_path), WITH_SHARED)
    assert outcome.code == 0
    assert set(outcome.cells.values()) == {"PASS"}
    assert len(outcome.cells) == 16
    assert outcome.document["gate"]["state"] == "gate open for x + a, x + b, y + a, y + b"
    asked, _ = request(WITH_SHARED)
    gate = load(gate_path(State.resolve().gate, asked.model))
    assert gate is not None
    now = take(HELLO, asked.model, stack="stack", patches=gate.fingerprint.patches)
    assert may_start(gate, now, "x", "a", asked.model) == Allowed(())
    assert not isinstance(may_start(gate, now, "x", "c", asked.model), Allowed)


def test_one_process_a_subject_and_one_for_the_references(tmp_path: Path) -> None:
    scenario = Scenario(tmp_path)
    perform_in(scenario, WITH_SHARED)
    requests = scenario.requests()
    by_pid: dict[int, set[str]] = {}
    for entry in requests:
        owner = entry["op"] if entry["op"] != "run" else entry["name"].rpartition("/")[0]
        by_pid.setdefault(entry["pid"], set()).add(owner)
    assert len(by_pid) == 9
    assert sum("reference" in owners for owners in by_pid.values()) == 1
    assert all(len(owners) == 2 for owners in by_pid.values() if "reference" not in owners)  # hello and one subject
    computed = [entry["name"] for entry in requests if entry["op"] == "reference"]
    assert sorted(computed) == ["r-c1", "r-c2"]  # shared by all subjects
    assert not (Path(runs.latest(State.resolve(), "validate-backends").path) / "references").exists()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("what", "verdict", "said"),
    [
        pytest.param("sigkill", "CRASH", "was killed by SIGKILL", id="sigkill"),
        pytest.param("segv", "CRASH", "was killed by SIGSEGV; its last line: about to die", id="segv"),
        pytest.param("exit0", "CRASH", "without an answer", id="silent-death"),
        pytest.param("garbage", "CRASH", "sent what is not JSON", id="garbage"),
        pytest.param("half_line", "CRASH", "ended in the middle of a line", id="half-line"),
        pytest.param("nan", "FAIL", "not finite", id="nan"),
        pytest.param("fail", "FAIL", "wrong", id="wrong-numbers"),
        pytest.param("flood", "PASS", "", id="flooded-stderr"),
        pytest.param("inconclusive", "INCONCLUSIVE", "no bound", id="inconclusive"),
        pytest.param("unsupported", "UNSUPPORTED", "capability 9.0", id="unsupported"),
        pytest.param("refuse", "INCONCLUSIVE", "could not run it: internal: no", id="refused"),
        pytest.param("pass_with_findings", "CRASH", "PASS with findings", id="pass-with-findings"),
        pytest.param("pass_out_of_bound", "CRASH", "PASS with an error of 1.5 times", id="pass-out-of-bound"),
        pytest.param("pass_unchecked", "CRASH", "PASS without a single check", id="pass-without-a-check"),
        pytest.param("crash_verdict", "CRASH", "'CRASH' is not one of", id="a-verdict-not-its-own"),
        pytest.param("lower_case", "CRASH", "'pass' is not one of", id="not-a-verdict"),
    ],
)
def test_one_bad_cell_costs_no_other_cell(tmp_path: Path, what: str, verdict: str, said: str) -> None:
    outcome = perform_in(Scenario(tmp_path, do={"moe/x/c1": what}, subjects=ONE_DENSE), WITH_SHARED)
    assert outcome.cells["moe/x/c1"] == verdict
    assert {word for name, word in outcome.cells.items() if name != "moe/x/c1"} == {"PASS"}
    assert pair(outcome, "x", "a") == verdict
    assert pair(outcome, "y", "a") == "PASS"
    assert outcome.code == {"PASS": 0, "UNSUPPORTED": 0}.get(verdict, 14)
    failed = {failure["cell"]: failure for failure in outcome.document["failures"]}
    if verdict in ("PASS", "UNSUPPORTED"):
        assert failed == {}
    else:
        assert said in failed["moe/x/c1"]["reason"]
        again = failed["moe/x/c1"]["reproduce"]
        assert again.startswith(
            "scripts/inv validate-backends --model Qwen3.5-397B-A17B --tp 1 --seed 0 --only 'moe/x/c1'"
        )


def test_a_hang_costs_no_other_cell(tmp_path: Path) -> None:
    limits = Limits(start=60, quiet=1.5, total=60, grace=0.3)
    outcome = perform_in(Scenario(tmp_path, do={"dense/b/c2": "hang"}, limits=limits), WITH_SHARED)
    assert outcome.cells["dense/b/c2"] == "HANG"
    assert {word for name, word in outcome.cells.items() if name != "dense/b/c2"} == {"PASS"}
    assert pair(outcome, "x", "b") == "HANG"
    assert outcome.code == 14


def test_the_device_is_probed_after_anything_but_a_pass(tmp_path: Path) -> None:
    scenario = Scenario(tmp_path, do={"dense/a/c1": "fail", "moe/x/c1": "segv"})
    perform_in(scenario, WITH_SHARED)
    operations = [(entry["op"], entry["name"]) for entry in scenario.requests() if entry["op"] in ("run", "probe")]
    assert operations.count(("probe", "")) == 2
    for cell in ("dense/a/c1", "moe/x/c1"):
        assert operations[operations.index(("run", cell)) + 1] == ("probe", "")


def test_a_failed_probe_restarts_the_worker(tmp_path: Path) -> None:
    scenario = Scenario(tmp_path, do={"dense/a/c1": "fail", "probe": "once:fail"})
    outcome = perform_in(scenario, WITH_SHARED)
    assert outcome.cells["dense/a/c2"] == "PASS"
    assert "probe failed after dense/a/c1 (1 + 1 gave 3): worker restarted" in " ".join(outcome.document["notes"])
    pids = {entry["pid"] for entry in scenario.requests() if entry["name"].startswith("dense/a/")}
    assert len(pids) == 2


def test_a_device_that_stays_broken_gives_no_verdict(tmp_path: Path) -> None:
    outcome = perform_in(Scenario(tmp_path, do={"dense/a/c1": "fail", "probe": "fail"}), WITH_SHARED)
    assert outcome.cells["dense/a/c2"] == "INCONCLUSIVE"
    assert pair(outcome, "x", "a") == "FAIL"


def test_death_after_an_answer_is_blamed_on_the_cell_that_answered(tmp_path: Path) -> None:
    outcome = perform_in(Scenario(tmp_path, do={"dense/a/c1": "die_after"}), WITH_SHARED)
    assert outcome.cells["dense/a/c1"] == "CRASH"
    assert outcome.cells["dense/a/c2"] == "PASS"
    (failure,) = outcome.document["failures"]
    assert "after its answer, which was a PASS" in failure["reason"]


def test_death_before_the_first_cell_is_the_first_cells(tmp_path: Path) -> None:
    outcome = perform_in(Scenario(tmp_path, do={"dense/a/c1": "die_before_start"}), WITH_SHARED)
    assert outcome.cells["dense/a/c1"] == "CRASH"
    assert outcome.cells["dense/a/c2"] == "PASS"


@pytest.mark.parametrize("what", ["segv", "refuse", "garbage"])
def test_without_a_reference_its_cells_are_inconclusive(tmp_path: Path, what: str) -> None:
    outcome = perform_in(Scenario(tmp_path, do={"r-c1": what}), WITH_SHARED)
    for name, word in outcome.cells.items():
        assert word == ("INCONCLUSIVE" if name.endswith("c1") else "PASS")
    assert outcome.code == 14
    assert pair(outcome, "x", "a") == "INCONCLUSIVE"


def test_a_block_is_skipped_when_a_backend_has_no_pass(tmp_path: Path) -> None:
    scenario = Scenario(tmp_path, do={"dense/a/c1": "fail", "dense/a/c2": "fail"})
    outcome = perform_in(scenario, WITH_SHARED)
    assert outcome.cells["block/x+a/c1"] == "SKIPPED"
    assert outcome.cells["block/x+b/c1"] == "PASS"
    assert not [entry for entry in scenario.requests() if entry["name"].startswith("block/x+a")]
    assert pair(outcome, "x", "a") == "FAIL"


def test_unsupported_subjects_start_no_process(tmp_path: Path) -> None:
    subjects = [
        subject("dense", None, "a", unsupported="capability 9.0"),
        subject("dense", None, "b"),
        subject("moe", "x", None),
        subject("block", "x", "a", unsupported="capability 9.0"),
        subject("block", "x", "b"),
    ]
    scenario = Scenario(tmp_path, subjects=subjects)
    outcome = perform_in(scenario, WITH_SHARED)
    assert outcome.code == 0
    assert pair(outcome, "x", "a") == "UNSUPPORTED"
    assert pair(outcome, "x", "b") == "PASS"
    assert len({entry["pid"] for entry in scenario.requests()}) == 4


def test_all_unsupported_checks_nothing(tmp_path: Path) -> None:
    subjects = [subject("dense", None, "a", unsupported="no card"), subject("moe", "x", None, unsupported="no card")]
    with pytest.raises(NothingChecked, match="dense:a: no card"):
        perform_in(Scenario(tmp_path, subjects=subjects), OPTIONS)


@pytest.mark.parametrize("what", ["unsupported", "inconclusive"])
def test_cells_that_never_ran_check_nothing(tmp_path: Path, what: str) -> None:
    subjects = [subject("dense", None, "a"), subject("moe", "x", None)]
    do = dict.fromkeys(("dense/a/c1", "dense/a/c2", "moe/x/c1", "moe/x/c2"), what)
    outcome = perform_in(Scenario(tmp_path, subjects=subjects, do=do), OPTIONS)
    assert outcome.code == 3
    assert outcome.document["gate"]["state"].startswith("gate closed")


def test_a_model_without_shared_expert_needs_no_block(tmp_path: Path) -> None:
    subjects = [subject("dense", None, "a"), subject("moe", "x", None)]
    assert pair(perform_in(Scenario(tmp_path, subjects=subjects), OPTIONS), "x", "a") == "PASS"
    with_shared = perform_in(Scenario(tmp_path, subjects=subjects), WITH_SHARED)
    assert pair(with_shared, "x", "a") == "SKIPPED"
    assert with_shared.document["gate"]["state"].startswith("gate closed")


def test_require_servable(tmp_path: Path) -> None:
    subjects = [subject("dense", None, "a", servable=False), subject("moe", "x", None, servable=False)]
    outcome = perform_in(Scenario(tmp_path, subjects=subjects), OPTIONS)
    assert outcome.code == 0
    closed = "gate closed: no backend that a server here could use has been checked"
    assert outcome.document["gate"]["state"] == closed
    required = perform_in(
        Scenario(tmp_path, subjects=subjects), Options(json=True, model=OPTIONS.model, require_servable=True)
    )
    assert required.code == 3


def test_quick_never_opens_the_gate(tmp_path: Path) -> None:
    outcome = perform_in(Scenario(tmp_path), Options(json=True, quick=True))
    assert outcome.code == 0
    assert outcome.document["gate"]["state"] == "gate closed: the quick profile is too little to open it"


def test_a_part_neither_opens_nor_closes_but_what_it_finds_wrong_counts(tmp_path: Path) -> None:
    part = Options(json=True, only=("dense/a/*",))
    assert "only a part" in perform_in(Scenario(tmp_path), part).document["gate"]["state"]
    whole = "gate open for x + a, x + b, y + a, y + b"
    assert perform_in(Scenario(tmp_path), WITH_SHARED).document["gate"]["state"] == whole
    assert perform_in(Scenario(tmp_path), part).document["gate"]["state"] == whole
    broken = perform_in(Scenario(tmp_path, do={"dense/a/c1": "fail"}), part)
    assert broken.document["gate"]["state"] == "gate open for x + b, y + b"
    assert perform_in(Scenario(tmp_path), WITH_SHARED).document["gate"]["state"] == whole


def test_only_a_block_runs_it(tmp_path: Path) -> None:
    outcome = perform_in(Scenario(tmp_path), Options(json=True, only=("block/x+a/c2",)))
    assert outcome.cells == {"block/x+a/c2": "PASS"}


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        pytest.param(Options(only=("dense/a/c3",)), NothingChecked, "no cell matches --only dense/a/c3", id="only"),
        pytest.param(Options(moe_backends=("z",)), UsageError, "no backend z", id="moe-backend"),
        pytest.param(Options(fp4_backends=("aa",)), UsageError, "no backend aa", id="fp4-backend"),
        pytest.param(Options(model="Qwen3.5-397"), UsageError, "neither a preset nor", id="model"),
        pytest.param(Options(tp=3), UsageError, "--tp 3 does not fit", id="tp"),
    ],
)
def test_wrong_names_are_refused(tmp_path: Path, options: Options, error: type[ToolkitError], said: str) -> None:
    with pytest.raises(error, match=said) as caught:
        perform_in(Scenario(tmp_path), options)
    assert caught.value.remedy


def test_a_worker_that_does_not_start_ends_the_task(tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match="does not start"):
        perform_in(Scenario(tmp_path, do={"hello": "exit1"}), WITH_SHARED)


def test_a_changing_stack_ends_the_run(tmp_path: Path) -> None:
    scenario = Scenario(tmp_path)
    original = scenario.door

    def door(folder: Path) -> object:
        made = original(folder)
        scenario.hello = {"cells_sha256": str(len(scenario.requests()))}
        return made

    scenario.door = door  # type: ignore[assignment,method-assign]
    with pytest.raises(PreflightError, match=r"changed while the matrix was running: cells was \w+, is \w+"):
        perform_in(scenario, WITH_SHARED)


def test_list_and_dry_run_run_nothing(tmp_path: Path) -> None:
    for options in (Options(json=True, list=True), Options(json=True, dry_run=True)):
        scenario = Scenario(tmp_path)
        assert perform_in(scenario, options).code == 0
        assert {entry["op"] for entry in scenario.requests()} == {"hello", "plan"}
    assert not (tmp_path / "runs").exists()
    assert not (tmp_path / "state").exists()


def interrupted_run(tmp_path: Path, sign: signal.Signals) -> tuple[int, Path]:
    """Runs the task in a process of its own, and sends it ``sign`` when the third cell is under way."""
    reached = tmp_path / "reached"
    scenario = Scenario(tmp_path, do={"dense/b/c1": "once:interruptible"})
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\n"
        "from pathlib import Path\n"
        "from sm120 import entry\n"
        "from sm120.matrix.options import Options\n"
        "from tests.integration.toolkit.matrix_scenario import Scenario, perform_in, settle\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "settle(folder)\n"
        "scenario = Scenario(folder, do={'dense/b/c1': 'once:interruptible'})\n"
        "sys.exit(entry.guarded(lambda: perform_in(scenario, Options()).code, {}))\n"
    )
    assert scenario.do
    checkout = Path(__file__).parents[3]
    env = {**os.environ, "FAKE_REACHED": str(reached), "PYTHONPATH": str(checkout)}
    task = subprocess.Popen([sys.executable, str(program)], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    while not reached.exists():
        assert task.poll() is None, task.communicate()
        time.sleep(0.05)
    family = psutil.Process(task.pid).children(recursive=True)
    assert len(family) >= 2
    task.send_signal(sign)
    task.send_signal(sign)
    output = task.communicate()[0].decode()
    assert not [child for child in family if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    assert "--resume" in output
    (folder,) = (tmp_path / "runs").iterdir()
    return task.returncode, folder


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_keeps_what_is_done_and_resuming_does_the_rest(tmp_path: Path, sign: signal.Signals) -> None:
    code, folder = interrupted_run(tmp_path, sign)
    assert code == 130
    lines = [json.loads(line) for line in (folder / FILE).read_text().splitlines()]
    assert [line.get("cell") for line in lines[1:]] == ["dense/a/c1", "dense/a/c2"]
    before = len(Scenario(tmp_path).requests())
    with (folder / FILE).open("a") as journal:
        journal.write('{"cell": "dense/b/c1", "resu')  # torn
    outcome = perform_in(Scenario(tmp_path, do={"dense/b/c1": "once:interruptible"}), Options(json=True, resume="last"))
    assert outcome.code == 0
    assert len(outcome.cells) == 16
    assert set(outcome.cells.values()) == {"PASS"}
    assert outcome.document["gate"]["state"].startswith("gate open")
    again = [entry["name"] for entry in Scenario(tmp_path).requests()[before:] if entry["op"] == "run"]
    references = [entry["name"] for entry in Scenario(tmp_path).requests() if entry["op"] == "reference"]
    assert sorted(references) == ["r-c1", "r-c2"]  # those of the first part serve the second
    assert len([json.loads(line) for line in (folder / FILE).read_text().splitlines()]) == 17  # the torn line is gone
    assert len(again) == 14
    assert not {"dense/a/c1", "dense/a/c2"} & set(again)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [folder.name]


def half_done(tmp_path: Path, options: Options = WITH_SHARED) -> Path:
    """A run whose process was killed after three cells."""
    perform_in(Scenario(tmp_path), options)
    run = runs.latest(State.resolve(), "validate-backends")
    assert run is not None
    lines = (run.path / FILE).read_text().splitlines(keepends=True)
    (run.path / FILE).write_text("".join(lines[:4]))
    return run.path


def resume(tmp_path: Path, scenario: Scenario | None = None, **more: object) -> Outcome:
    options = Options(json=True, resume="last", **more)  # type: ignore[arg-type]
    return perform_in(scenario or Scenario(tmp_path), options)


def test_a_finished_run_is_only_shown_again(tmp_path: Path) -> None:
    perform_in(Scenario(tmp_path), WITH_SHARED)
    (tmp_path / "trace").unlink()
    assert resume(tmp_path).code == 0
    assert {entry["op"] for entry in Scenario(tmp_path).requests()} == {"hello", "plan"}


@pytest.mark.parametrize(
    ("hello", "said"),
    [
        pytest.param({"cells_sha256": "other"}, "cells was cd, is other", id="cells"),
        pytest.param({"versions": {"torch": "2.14.0", "sglang": None}}, "versions.torch was 2.13.0", id="torch"),
        pytest.param({"libraries": {"common_ops.so": "ac"}}, "libraries.common_ops.so was ab, is ac", id="library"),
        pytest.param({"environment": {"X": "1"}}, "environment.X was absent, is 1", id="environment"),
        pytest.param({"device": {**HELLO["device"], "uuid": "GPU-2"}}, "GPU-1, is RTX PRO 6000 GPU-2", id="card"),
        pytest.param(
            {"device": {**HELLO["device"], "capability": [9, 0]}}, "compute capability was 12.0", id="capability"
        ),
        pytest.param({"device": {**HELLO["device"], "driver": "600"}}, "driver was 590.48, is 600", id="driver"),
    ],
)
def test_resuming_on_another_state_is_refused(tmp_path: Path, hello: dict[str, object], said: str) -> None:
    half_done(tmp_path)
    with pytest.raises(UsageError, match=said):
        resume(tmp_path, Scenario(tmp_path, hello=hello))


def test_resuming_another_plan_is_refused(tmp_path: Path) -> None:
    half_done(tmp_path)
    with pytest.raises(UsageError, match="plan was"):
        resume(tmp_path, Scenario(tmp_path, reduced=["fewer experts"]))


def test_resuming_takes_the_recorded_options(tmp_path: Path) -> None:
    half_done(tmp_path, Options(json=True, tp=2, seed=5))
    assert resume(tmp_path, tp=2).code == 0
    for more, said in (({"tp": 4}, "--tp is 4"), ({"seed": 0}, "--seed is 0"), ({"quick": True}, "--quick is True")):
        with pytest.raises(UsageError, match=said):
            resume(tmp_path, **more)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        pytest.param(lambda lines: [], "interrupted before its plan was written", id="empty"),
        pytest.param(lambda lines: [lines[0][:50]], "interrupted before its plan was written", id="torn-header"),
        pytest.param(lambda lines: [lines[0], "garbage\n", lines[1]], ":2 is damaged", id="garbage-inside"),
        pytest.param(lambda lines: [lines[0], '{"cell": "c"}\n'], ":2 is damaged", id="no-result"),
        pytest.param(lambda lines: [lines[0].replace('"schema": 1', '"schema": 9')], "has schema 9", id="schema"),
        pytest.param(lambda lines: [lines[0], lines[1].replace("PASS", "FINE")], ":2 is damaged", id="verdict"),
    ],
)
def test_a_damaged_journal_is_refused(tmp_path: Path, damage: "Damage", said: str) -> None:
    folder = half_done(tmp_path)
    lines = (folder / FILE).read_text().splitlines(keepends=True)
    (folder / FILE).write_text("".join(damage(lines)))
    with pytest.raises(UsageError, match=said):
        resume(tmp_path)


def test_the_last_run_is_the_last_that_planned(tmp_path: Path) -> None:
    folder = half_done(tmp_path)
    with pytest.raises(UsageError, match="no backend z"):
        perform_in(Scenario(tmp_path), Options(moe_backends=("z",)))
    assert len(list((tmp_path / "runs").iterdir())) == 2
    assert resume(tmp_path).document["run"] == str(folder)
    for name in (str(folder), folder.name):
        assert perform_in(Scenario(tmp_path), Options(json=True, resume=name)).code == 0
    with pytest.raises(UsageError, match=r"manifest\.json"):
        perform_in(Scenario(tmp_path), Options(resume="gone"))


def test_there_is_nothing_to_resume(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no run to go on with"):
        resume(tmp_path)


class Damage:
    """A way to damage a journal."""

    def __call__(self, lines: Sequence[str]) -> Sequence[str]:
        raise NotImplementedError

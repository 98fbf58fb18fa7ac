"""What a report says: findings, table, JSON, and for how long its record holds."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sm120.host.facts import Cpu, Distribution, Driver, Environment, Facts, Gpu, Host, Memory
from sm120.host.findings import Finding, Severity
from sm120.host.links import (
    COLUMNS,
    PAIR_COLUMNS,
    GroupResult,
    Key,
    LinkReport,
    Outcome,
    PairResult,
    Setting,
    SettingResult,
    Timing,
    Verdict,
    choose,
    load_links,
)
from sm120.host.links.plan import DEFAULT, KIB, MIB, THROUGH_HOST, THROUGH_SOCKETS
from sm120.host.links.store import LIMIT, nccl_package, save
from sm120.state import State

PEER = Setting(
    name="peer access up to SYS", variables={"NCCL_P2P_LEVEL": "SYS"}, reason="far", peer_memory=True
)  # fmt: skip
RIGHT = Outcome(
    verdict=Verdict.RIGHT, checks=60, direct=True, bandwidth={"forth": 5.5e10, "back": 5.4e10, "both": 9e10}
)
HUNG = Outcome(verdict=Verdict.HANG, detail="silent for 30 s: rank 0 in all-reduce of 8192 bytes")
ZEROS: dict[str, Any] = {
    "rank": 0, "how": "engine", "direction": "forth", "bytes": 64 * KIB, "round": 0, "source": 0, "target": 1,
    "first": 0, "last": 65535, "count": 65280, "of": 65664, "expected": "a1", "got": "00", "kind": "zeros",
    "source_sound": True,
}  # fmt: skip
WRONG = Outcome(verdict=Verdict.WRONG, detail="12 of 60 results are wrong", wrong=12, where=(ZEROS,), direct=True)


def result(setting: Setting, outcome: Outcome | None = None, decode: float = 30e-6) -> SettingResult:
    timings = tuple(
        Timing(bytes=size, ranks=2, calls=300, median=decode * size / (8 * KIB), p99=decode * 2, noise=0.01)
        for size in (8 * KIB, 64 * KIB, 256 * MIB)
    )
    done = outcome or Outcome(verdict=Verdict.RIGHT, checks=80, timings=timings)
    return SettingResult(setting=setting, groups=(GroupResult(gpus=("GPU-a", "GPU-b"), outcome=done),))


def report(
    *results: SettingResult, pair: Outcome = RIGHT, set_aside: dict[str, str] | None = None
) -> LinkReport:  # fmt: skip
    chosen, reason = choose(results, peer_memory_trusted=pair.verdict == Verdict.RIGHT)
    return LinkReport(
        key=Key(gpus=("GPU-a", "GPU-b"), driver="580.95", nccl="nvidia-nccl-cu13==2.28.9"),
        taken="2026-12-01T10:00:00+00:00",
        stack="stable",
        names={"GPU-a": "GPU 0 (RTX PRO 6000)", "GPU-b": "GPU 1 (RTX PRO 6000)"},
        pairs=(PairResult(a="GPU-a", b="GPU-b", outcome=pair),),
        settings=results,
        chosen=chosen,
        reason=reason,
        set_aside=set_aside or {},
    )


def found(what: LinkReport) -> dict[str, Finding]:
    return {finding.id: finding for finding in what.findings()}


def test_a_healthy_machine_gets_one_note_with_setting_and_latency() -> None:
    (note,) = report(result(DEFAULT), result(THROUGH_HOST, decode=60e-6)).findings()
    assert (note.id, note.severity, note.cure) == ("links-setting", Severity.NOTE, None)
    assert "its defaults" in note.what
    assert "8 KiB take 30 µs (99 % within 60 µs) over 2 GPUs" in note.what
    assert "GB/s" in note.what
    assert len(note.read) == 2


def test_the_setting_that_is_faster_is_named_with_by_how_much() -> None:
    (note,) = report(result(DEFAULT, decode=60e-6), result(PEER)).findings()
    assert "NCCL_P2P_LEVEL=SYS" in note.what
    assert "instead of" in note.what


def test_wrong_peer_copies_refuse_and_say_where_and_what() -> None:
    what = report(result(DEFAULT, decode=10e-6), result(THROUGH_HOST), pair=WRONG)
    finding = found(what)["links-peer-copies-wrong"]
    assert finding.severity == Severity.REFUSE
    for words in ("GPU 0 (RTX PRO 6000) and GPU 1 (RTX PRO 6000)", "64 KiB", "only zeros", "65280 bytes of 65664"):
        assert words in finding.what
    assert finding.cure is not None
    assert finding.cure.startswith("export NCCL_P2P_DISABLE=1")
    assert not what.peer_memory_trusted
    assert what.chosen == THROUGH_HOST


def test_the_cure_cures_it() -> None:
    what = report(result(THROUGH_HOST), pair=WRONG, set_aside={"NCCL_P2P_DISABLE": "1"})
    assert found(what)["links-peer-copies-wrong"].severity == Severity.WARN
    assert not [finding for finding in what.findings() if finding.severity == Severity.REFUSE]


@pytest.mark.parametrize("kind", ["zeros", "stale", "shifted", "other"])
def test_what_arrived_is_put_into_words(kind: str) -> None:
    where = {**ZEROS, "kind": kind, "by": -64}
    what = found(report(result(THROUGH_HOST), pair=replace(WRONG, where=(where,))))["links-peer-copies-wrong"].what
    words = {"zeros": "only zeros", "stale": "held before", "shifted": "-64 away", "other": "00 stands instead of a1"}
    assert [name for name, text in words.items() if text in what] == [kind]
    spoiled = replace(WRONG, where=({**where, "source_sound": False},))
    assert "source reads back wrong" in report(result(THROUGH_HOST), pair=spoiled).findings()[0].what


@pytest.mark.parametrize(
    "pair", [replace(WRONG, where=({**ZEROS, "how": "staged"},)), replace(WRONG, direct=False)]
)  # fmt: skip
def test_damage_without_peer_access_has_no_setting_for_a_cure(pair: Outcome) -> None:
    finding = found(report(result(THROUGH_HOST), pair=pair))["links-copies-wrong"]
    assert finding.severity == Severity.REFUSE
    assert "NCCL_P2P_DISABLE" not in str(finding.cure)


@pytest.mark.parametrize("verdict", [Verdict.HANG, Verdict.CRASH])
def test_copies_that_do_not_end_refuse_too(verdict: Verdict) -> None:
    what = report(result(DEFAULT), result(THROUGH_HOST), pair=Outcome(verdict=verdict, detail="silent\nmore"))
    finding = found(what)["links-peer-copies-fail"]
    assert finding.severity == Severity.REFUSE
    assert f"{verdict}, silent." in finding.what
    assert what.chosen == THROUGH_HOST


@pytest.mark.parametrize(
    ("verdict", "words"), [(Verdict.HANG, "hangs"), (Verdict.CRASH, "crashes"), (Verdict.WRONG, "wrong sums")]
)
def test_a_default_that_fails_is_a_warning_with_the_setting_that_works(verdict: Verdict, words: str) -> None:
    findings = found(report(result(DEFAULT, replace(HUNG, verdict=verdict)), result(THROUGH_HOST)))
    assert findings.keys() == {"links-default-fails", "links-setting"}
    finding = findings["links-default-fails"]
    assert finding.severity == Severity.WARN
    assert words in finding.what
    assert finding.cure == "export NCCL_P2P_DISABLE=1"
    assert any("HANG" in line or verdict in line for line in finding.read)


def test_when_nothing_works_that_is_refused() -> None:
    findings = found(report(result(DEFAULT, HUNG), result(THROUGH_HOST, HUNG), result(THROUGH_SOCKETS, HUNG)))
    assert findings.keys() == {"links-no-setting-works"}
    assert findings["links-no-setting-works"].severity == Severity.REFUSE
    assert len(findings["links-no-setting-works"].read) == 3


def test_sockets_as_the_only_way_are_a_warning() -> None:
    findings = found(report(result(DEFAULT, HUNG), result(THROUGH_HOST, HUNG), result(THROUGH_SOCKETS)))
    assert findings["links-only-sockets-work"].severity == Severity.WARN
    assert "/dev/shm" in str(findings["links-only-sockets-work"].cure)


def test_own_variables_and_stuck_processes_are_told() -> None:
    stuck = result(DEFAULT, replace(HUNG, stuck=(4711,)))
    findings = found(report(stuck, result(THROUGH_HOST), set_aside={"NCCL_P2P_LEVEL": "SYS"}))
    assert "NCCL_P2P_LEVEL=SYS" in findings["links-variables-set-aside"].what
    assert findings["links-process-stuck"].severity == Severity.WARN
    assert "4711" in findings["links-process-stuck"].what


def test_the_table_has_a_row_a_setting_and_a_cell_a_column() -> None:
    what = report(result(DEFAULT, HUNG), result(THROUGH_HOST))
    rows = what.rows()
    assert all(len(row) == len(COLUMNS) for row in rows)
    assert [row[0] for row in rows] == ["", "→"]
    assert rows[0][3] == "HANG"
    assert rows[1][4:7] == ["30 (60) µs", "240 (60) µs", "0.3 GB/s at 256 MiB"]
    assert [len(row) for row in what.pair_rows()] == [len(PAIR_COLUMNS)]
    assert what.pair_rows()[0][1:6] == ["RIGHT", "yes", "55.0", "54.0", "90.0"]


def facts(**changes: Any) -> Facts:
    whole: dict[str, Any] = {
        "collected": "",
        "toolkit": "",
        "host": Host(),
        "driver": Driver(version="580.95"),
        "cpu": Cpu(architecture="x86_64"),
        "memory": Memory(),
        "gpus": tuple(Gpu(index=i, uuid=uuid, name="card", bus_id="") for i, uuid in enumerate(("GPU-b", "GPU-a"))),
        "environments": (environment("2.28.9"),),
    }
    return Facts(**{**whole, **changes})


def environment(nccl: str | None, stack: str = "stable") -> Environment:
    packages = () if nccl is None else (Distribution(name="nvidia-nccl-cu13", version=nccl),)
    return Environment(stack=stack, python="python", distributions=(Distribution(name="torch", version="2"), *packages))


@pytest.fixture
def state(tmp_path: Path) -> State:
    return State(root=tmp_path / "state", runs=tmp_path / "runs")


@pytest.mark.parametrize("pair", [RIGHT, WRONG])
def test_a_record_is_read_back_whole(state: State, pair: Outcome) -> None:
    what = report(result(DEFAULT, HUNG), result(THROUGH_HOST), pair=pair, set_aside={"NCCL_P2P_LEVEL": "SYS"})
    assert save(what, state) == state.links
    assert load_links(state, facts()) == what
    json.dumps(what.as_json(), allow_nan=False)


def test_a_record_holds_for_its_cards_driver_and_nccl_only(state: State) -> None:
    save(report(result(DEFAULT)), state)
    assert load_links(state, facts()) is not None
    assert load_links(state, facts(driver=Driver(version="590.1"))) is None
    assert load_links(state, facts(gpus=facts().gpus[:1])) is None
    more = (*facts().gpus, Gpu(index=2, uuid="GPU-c", name="card", bus_id=""))
    assert load_links(state, facts(gpus=more)) is None
    assert load_links(state, facts(gpus=more), gpus=["GPU-b", "GPU-a"]) is not None
    assert load_links(state, facts(environments=(environment("2.30.7"),))) is None
    assert load_links(state, facts(environments=(environment(None),))) is None
    assert load_links(state, facts(environments=(environment("2.28.9", "nightly"),))) is None


def test_an_nccl_that_is_no_package_is_known_by_its_absence(state: State) -> None:
    what = report(result(DEFAULT))
    save(replace(what, key=replace(what.key, nccl="2.28.9")), state)
    assert load_links(state, facts()) is None
    assert load_links(state, facts(environments=(environment(None),))) is not None


def test_the_package_of_the_newest_cuda_counts() -> None:
    both = {"nvidia-nccl-cu12": "2.27.5", "nvidia-nccl-cu13": "2.28.9", "torch": "2"}
    assert nccl_package(both) == "nvidia-nccl-cu13==2.28.9"
    assert nccl_package({"torch": "2"}) is None


def test_without_a_record_there_is_none(state: State) -> None:
    assert load_links(state, facts()) is None


DAMAGE: list[Any] = [
    lambda text: "",
    lambda text: text[: len(text) // 2],
    lambda text: "[" * 100_000,
    lambda text: '"x"',
    lambda text: text.replace('"schema": 1', '"schema": 2'),
    lambda text: text.replace('"reason"', '"raison"'),
    lambda text: text.replace('"RIGHT"', '"FINE"'),
    lambda text: text.replace('"median": ', '"median": 1e999, "was": '),
    lambda text: text.replace('"calls": 300', '"calls": true'),
    lambda text: text.replace('"calls": 300', '"calls": "300"'),
    lambda text: text.replace('"gpus": [', '"gpus": {"a": 1}, "were": ['),
    lambda text: text.replace('"names": {', '"names": [], "were": {'),
    lambda text: text + " " * LIMIT,
]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_record_is_none(state: State, damage: Any) -> None:
    path = save(report(result(DEFAULT)), state)
    text = path.read_text("utf-8")
    assert damage(text) != text
    path.write_text(damage(text), encoding="utf-8")
    assert load_links(state, facts()) is None


def test_a_record_that_is_no_file_is_none(state: State) -> None:
    state.links.mkdir(parents=True)
    assert load_links(state, facts()) is None

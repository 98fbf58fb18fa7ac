"""The doctor's door: flags, record, JSON and exit code. Rules, gathering and links are stand-ins here."""

import json
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from sm120 import config, entry, runs
from sm120.errors import PreflightError, UsageError
from sm120.host import gather, rules
from sm120.host.codec import facts_to_json, load_facts
from sm120.host.command import Options, doctor
from sm120.host.facts import Cpu, Disk, Driver, Environment, Facts, Gpu, Host, Memory, Pair, Tool, Toolkit, Torch
from sm120.host.findings import Finding, Severity
from sm120.state import State

FACTS = Facts(
    collected="2026-11-01T00:00:00+00:00",
    toolkit="0.1.0",
    host=Host(distribution="Ubuntu 24.04", kernel="6.8", glibc="2.39", container="docker"),
    driver=Driver(version="580.65.06", cuda=(13, 0), module="open"),
    cpu=Cpu(architecture="x86_64", model="EPYC", cores=8, threads=16, allowed=4, numa_nodes=2),
    memory=Memory(total=64 * 2**30, available=60 * 2**30, cgroup_limit=32 * 2**30),
    gpus=(
        Gpu(
            index=0, uuid="GPU-a", name="RTX PRO 6000", bus_id="1", compute_capability=(12, 0), memory_total=96 * 2**30
        ),
        Gpu(index=1, uuid="", name="unknown", bus_id="", problem="GPU is lost"),
    ),
    pairs=(Pair(a=0, b=1, path="PHB", read="ok"),),
    disks=(
        Disk(purpose="state", path="/s", mount="/", filesystem="ext4", total=2**40, free=2**39, writable=True),
        Disk(purpose="runs", path="/r", mount="/", filesystem="ext4", total=2**40, free=2**38, writable=True),
        Disk(purpose="home", path="/h", mount="/h", filesystem="nfs4", problem="no answer within 10 s"),
    ),
    toolkits=(Toolkit(root="/usr/local/cuda", seen_by=("PATH", "system"), nvcc=(12, 8), headers=(13, 0)),),
    tools=(Tool(name="gcc", path="/usr/bin/gcc", version="14.2.0"), Tool(name="ccache")),
    environments=(
        Environment(stack="stable", python="/e/bin/python", torch=Torch(version="2.14.1+cu130", cuda=(13, 0))),
        Environment(stack="mine", python="/m/bin/python3", adopted=True, problem="its Python is gone"),
    ),
    variables={"HF_TOKEN": "hf_abcdefghijklmnopqrstuvwxyz", "NCCL_P2P_DISABLE": "1"},
    unread=("the wheels could not be read: broken",),
)


def finding(name: str, severity: Severity, cure: str | None = "type this") -> Finding:
    return Finding(id=name, severity=severity, what=f"{name} is so.", read=(f"{name}: /f",), why="Because.", cure=cure)


REFUSE = finding("no-driver", Severity.REFUSE, "install a driver")
WARN = finding("slow-link", Severity.WARN)
NOTE = finding("no-ccache", Severity.NOTE, None)


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SM120_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(gather, "gather", lambda state, console: FACTS)
    monkeypatch.setattr(rules, "judge", lambda facts: (NOTE, WARN))


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Facts]]:
    """Sets what the rules say; what they were given is collected."""

    def install(*found: Finding) -> list[Facts]:
        seen: list[Facts] = []

        def judge(facts: Facts) -> tuple[Finding, ...]:
            seen.append(facts)
            return found

        monkeypatch.setattr(rules, "judge", judge)
        return seen

    return install


def run(options: Options, *, as_json: bool = False) -> int:
    def body() -> int:
        doctor(options)
        return 0

    return entry.guarded(body, {"json": as_json})


def last_run() -> runs.Run:
    found = runs.latest(State.resolve(), "doctor")
    assert found is not None
    return found


def test_picture_and_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(Options()) == 0
    out = capsys.readouterr().out
    for text in (
        "Ubuntu 24.04, Linux 6.8, glibc 2.39, in a container (docker)",
        "EPYC, 8 cores, 16 threads, 4 for us, 2 NUMA nodes",
        "60.0 GiB available of 64.0 GiB; limited to 32.0 GiB by its control group",
        "driver: 580.65.06, up to CUDA 13.0, open kernel module",
        "RTX PRO 6000",
        "unknown: GPU is lost",
        "0 – 1  PHB   ok          unknown",
        "256.0 GiB  1024.0 GiB  state, runs",
        "no answer within 10 s",
        "/usr/local/cuda  PATH, system  12.8  13.0",
        "gcc   14.2.0   /usr/bin/gcc",
        "not found: ccache",
        "2.14.1+cu130",
        "adopted; its Python is gone",
    ):
        assert text in out
    assert out.rstrip().endswith("2 findings: 0 refuse, 1 warn, 1 note")


def test_the_worst_finding_comes_first_with_its_evidence(
    judged: Callable[..., list[Facts]], capsys: pytest.CaptureFixture[str]
) -> None:
    judged(NOTE, REFUSE, WARN)
    assert run(Options()) == 10
    out, err = capsys.readouterr()
    assert out.index("REFUSE no-driver") < out.index("WARN slow-link") < out.index("NOTE no-ccache")
    assert (
        "REFUSE no-driver: no-driver is so.\n  read: no-driver: /f\n  why: Because.\n  cure: install a driver\n" in out
    )
    assert "NOTE no-ccache: no-ccache is so.\n  read: no-ccache: /f\n  why: Because.\n\n" in out
    assert out.rstrip().endswith("3 findings: 1 refuse, 1 warn, 1 note")
    assert "error: 1 finding refuses this machine: no-driver\n  remedy: install a driver\n" in err
    assert "warning: the wheels could not be read: broken" in err


def test_first_cure_that_there_is(judged: Callable[..., list[Facts]]) -> None:
    judged(replace(REFUSE, cure=None), replace(REFUSE, id="other", cure="do it"), WARN)
    with pytest.raises(PreflightError) as caught:
        doctor(Options())
    assert caught.value.message == "2 findings refuse this machine: no-driver, other"
    assert caught.value.remedy == "do it"


def test_nothing_found(judged: Callable[..., list[Facts]], capsys: pytest.CaptureFixture[str]) -> None:
    judged()
    assert run(Options()) == 0
    assert capsys.readouterr().out.rstrip().endswith("0 findings: 0 refuse, 0 warn, 0 notes")


def test_a_machine_of_which_nothing_is_known(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = Facts(
        collected="", toolkit="", host=Host(), driver=Driver(), cpu=Cpu(architecture="x86_64"), memory=Memory()
    )
    monkeypatch.setattr(gather, "gather", lambda state, console: bare)
    assert run(Options()) == 0
    out = capsys.readouterr().out
    assert "driver: none\ncards: none\n" in out
    assert "environments: none" in out
    on_the_bus = replace(bare, driver=Driver(pci_devices=("0000:01:00.0 10de:2bb1",)))
    monkeypatch.setattr(gather, "gather", lambda state, console: on_the_bus)
    assert run(Options()) == 0
    assert "on the bus, but no driver reads them: 0000:01:00.0 10de:2bb1" in capsys.readouterr().out


def test_json_is_one_document(judged: Callable[..., list[Facts]], capsys: pytest.CaptureFixture[str]) -> None:
    judged(NOTE, REFUSE)
    assert run(Options(), as_json=True) == 10
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == 1
    assert (document["refuse"], document["warn"], document["note"]) == (1, 0, 1)
    assert [item["id"] for item in document["findings"]] == ["no-driver", "no-ccache"]
    assert document["findings"][0] == {
        "id": "no-driver",
        "severity": "refuse",
        "what": "no-driver is so.",
        "read": ["no-driver: /f"],
        "why": "Because.",
        "cure": "install a driver",
    }
    assert document["facts"]["gpus"][0]["compute_capability"] == [12, 0]
    assert document["error"]["exit_code"] == 10
    assert "links" not in document


def test_record(judged: Callable[..., list[Facts]]) -> None:
    judged(WARN)
    assert run(Options()) == 0
    record = last_run()
    assert (record.status, record.manifest["exit_code"]) == ("finished", 0)
    assert record.manifest["summary"] == {"refuse": 0, "warn": 1, "note": 0}
    assert load_facts(record.path / "facts.json").gpus == FACTS.gpus
    found: Any = record.read_json("findings.json")
    assert [item["id"] for item in found] == ["slow-link"]


def test_record_of_a_refusal(judged: Callable[..., list[Facts]]) -> None:
    judged(REFUSE, NOTE)
    assert run(Options()) == 10
    record = last_run()
    assert (record.status, record.manifest["exit_code"]) == ("finished", 10)
    assert record.manifest["summary"] == {"refuse": 1, "warn": 0, "note": 1}


def test_no_secret_in_anything_that_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "facts.json"
    assert run(Options(save=saved), as_json=True) == 0
    texts = [saved.read_text(), capsys.readouterr().out]
    texts += [path.read_text() for path in last_run().path.glob("*.json")]
    assert len(texts) == 5
    for text in texts:
        assert "hf_abcdefghijklmnopqrstuvwxyz" not in text


def test_saved_facts_are_judged_elsewhere(tmp_path: Path, judged: Callable[..., list[Facts]]) -> None:
    saved = tmp_path / "facts.json"
    assert run(Options(save=saved)) == 0
    seen = judged()
    assert run(Options(facts=saved)) == 0
    assert seen == [replace(FACTS, variables={"HF_TOKEN": "***", "NCCL_P2P_DISABLE": "1"})]


def test_facts_of_another_machine_are_not_mixed_with_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, judged: Callable[..., list[Facts]]
) -> None:
    path = tmp_path / "facts.json"
    path.write_text(json.dumps(facts_to_json(FACTS)))

    def never(state: State, console: object) -> Facts:
        raise AssertionError("this machine was looked at")

    monkeypatch.setattr(gather, "gather", never)
    judged(REFUSE)
    with pytest.raises(PreflightError) as caught:
        doctor(Options(facts=path))
    assert caught.value.where == str(path)


def test_saving_replaces_facts_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "facts.json"
    path.write_text("my novel")
    with pytest.raises(UsageError, match="exists and is no facts file, so it is left alone") as caught:
        doctor(Options(save=path))
    assert caught.value.remedy == "name a new file"
    assert path.read_text() == "my novel"
    with pytest.raises(UsageError, match="left alone"):
        doctor(Options(save=tmp_path))
    path.write_text(json.dumps(facts_to_json(replace(FACTS, collected="before"))))
    doctor(Options(save=path))
    assert load_facts(path).collected == FACTS.collected


def test_facts_that_cannot_be_read_are_a_usage_error_in_the_record(tmp_path: Path) -> None:
    path = tmp_path / "facts.json"
    path.write_text("{}")
    assert run(Options(facts=path)) == 2
    assert last_run().manifest["exit_code"] == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (Options(links=True, facts=Path("f.json")), "--links measures this machine, --facts judges another one"),
        (Options(stack="stable"), "--stack says which stack checks the links, so it needs --links"),
    ],
)
def test_flags_that_contradict_each_other(options: Options, said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        doctor(options)
    assert caught.value.remedy


def test_flags_are_recorded(tmp_path: Path) -> None:
    doctor(Options(save=tmp_path / "f.json"))
    assert last_run().manifest["argv"] == ["doctor", f"--save={tmp_path / 'f.json'}"]


def test_without_a_place_for_the_record_it_judges_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a-file").write_text("")
    monkeypatch.setenv("SM120_HOME", str(tmp_path / "a-file"))
    assert run(Options()) == 0
    out = capsys.readouterr().out
    assert "no record is kept of this: cannot write" in out
    assert "2 findings" in out


def test_a_state_folder_of_a_newer_toolkit_is_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    state = State(root=config.current().state, runs=config.current().runs)
    state.root.mkdir(parents=True)
    (state.root / "state.json").write_text('{"state_version": 99}')
    assert run(Options()) == 0
    assert "was written by a newer toolkit" in capsys.readouterr().out
    assert not state.runs.exists()


@dataclass
class Report:
    found: tuple[Finding, ...]

    def findings(self) -> tuple[Finding, ...]:
        return self.found

    def as_json(self) -> dict[str, object]:
        return {"best": "NCCL_P2P_DISABLE=1"}


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """A stand-in for the check of the links; the arguments of each call."""
    calls: list[tuple[object, ...]] = []

    def check(*args: object, facts: Facts) -> Report:
        calls.append((*args, facts))
        return Report((finding("peer-corrupts", Severity.REFUSE, "set NCCL_P2P_DISABLE=1"),))

    module = types.ModuleType("sm120.host.links")
    module.check = check  # type: ignore[attr-defined] # a module made here
    monkeypatch.setitem(sys.modules, "sm120.host.links", module)
    import sm120.host

    monkeypatch.setattr(sm120.host, "links", module, raising=False)
    return calls


def test_links(checked: list[tuple[object, ...]], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(Options(links=True, stack="stable"), as_json=True) == 10
    document = json.loads(capsys.readouterr().out)
    assert document["links"] == {"best": "NCCL_P2P_DISABLE=1"}
    assert [item["id"] for item in document["findings"]] == ["peer-corrupts", "slow-link", "no-ccache"]
    ((state, _, record, stack, facts),) = checked
    assert facts == FACTS
    assert state == State.resolve()
    assert isinstance(record, runs.Run)
    assert record.id == last_run().id
    assert stack == "stable"


def test_links_need_a_record(
    checked: list[tuple[object, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a-file").write_text("")
    monkeypatch.setenv("SM120_HOME", str(tmp_path / "a-file"))
    assert run(Options(links=True)) == 10
    assert checked == []


def test_a_check_of_links_that_fails_leaves_the_other_findings(
    checked: list[tuple[object, ...]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def check(*args: object, facts: Facts) -> Report:
        raise PreflightError("the stack is not installed", remedy="scripts/inv setup")

    monkeypatch.setattr(sys.modules["sm120.host.links"], "check", check)
    assert run(Options(links=True), as_json=True) == 10
    document = json.loads(capsys.readouterr().out)
    assert [item["id"] for item in document["findings"]] == ["slow-link", "no-ccache"]
    assert document["error"]["message"] == "the stack is not installed"
    assert last_run().manifest["summary"] == {"error": "the stack is not installed"}


def test_findings_are_shown_and_kept_when_the_facts_cannot_be_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert run(Options(save=tmp_path / "file/facts.json"), as_json=True) == PreflightError.exit_code
    document = json.loads(capsys.readouterr().out)
    assert [found["id"] for found in document["findings"]] == [WARN.id, NOTE.id]
    assert "--save: cannot write" in document["error"]["message"]
    assert "SM120_HOME" not in document["error"]["remedy"]


def test_dead_link_is_not_replaced_and_a_link_to_facts_stays_one(tmp_path: Path) -> None:
    link = tmp_path / "link.json"
    link.symlink_to(tmp_path / "target.json")
    with pytest.raises(UsageError, match="is no facts file, so it is left alone"):
        doctor(Options(save=link))
    doctor(Options(save=tmp_path / "target.json"))
    doctor(Options(save=link))
    assert link.is_symlink()

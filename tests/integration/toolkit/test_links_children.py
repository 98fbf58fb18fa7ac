"""``doctor --links`` around children that are scripts: what they are given, and every way in which they fail."""

import json
import os
import re
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import sm120.stack
from sm120 import config
from sm120.console import Console
from sm120.errors import NothingChecked, PreflightError
from sm120.host.facts import Cpu, Driver, Facts, Gpu, Host, Memory, Pair
from sm120.host.links import LinkReport, Outcome, Verdict, check
from sm120.host.links.bench import Bench
from sm120.host.links.plan import FULL, THROUGH_HOST, Effort
from sm120.runs import Run
from sm120.state import State

CHILD = """#!{python}
import json, os, sys, time
request = json.load(open(sys.argv[-1]))
def say(event, **content):
    print(json.dumps({{"links": 1, "event": event, **content}}), flush=True)
with open({seen!r}, "a") as file:
    print(json.dumps({{"env": dict(os.environ), "cwd": os.getcwd(), "request": request}}), file=file)
def done(checks=4, wrong=0):
    for rank in range(request["ranks"]):
        say("done", rank=rank, checks=checks, wrong=wrong)
def timings(decode):
    for rank in range(request["ranks"]):
        for size in (8192, 65536, 1 << 20):
            times = dict(median=decode, p99=decode, blocks=[decode])
            say("timing", rank=rank, bytes=size, ranks=request["ranks"], calls=3, **times)
def machine(**changes):
    gpus = [{{"uuid": f"GPU-{{name}}", "name": "card", "free": 90 << 30}} for name in "ba"]
    versions = dict(torch="2.11.0+cu130", cuda="13.0", nccl="2.28.9", package="nvidia-nccl-cu13==2.28.9")
    say("machine", **{{"rank": 0, "gpus": gpus, **versions, **changes}})
    done()
HEALTHY = {{
    "look": machine,
    "peer": lambda: (say("pair", rank=0, direct=True), say("bandwidth", rank=0, by={{"forth": 5e10}}), done()),
    "reduce": lambda: (timings(2e-5 if os.environ.get("NCCL_P2P_LEVEL") else 6e-5), done()),
}}
{body}
"""


@dataclass
class Scene:
    state: State
    run: Run
    folder: Path

    def python(self, body: str = "HEALTHY[request['task']]()") -> Path:
        """A program in the place of the stack's Python."""
        path = self.folder / "python"
        path.write_text(CHILD.format(python=sys.executable, seen=str(self.folder / "seen"), body=body), "utf-8")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return path

    def seen(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "seen").read_text("utf-8").splitlines()]

    def bench(self, body: str, **effort: float) -> Bench:
        limits: dict[str, Any] = {**{name: getattr(FULL, name) for name in FULL.__dataclass_fields__}, **effort}
        return Bench(python=self.python(body), run=self.run, device="cuda", variables={}, effort=Effort(**limits))


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    for name in list(os.environ):
        if name.startswith(("NCCL_", "CUDA_")):
            monkeypatch.delenv(name)
    monkeypatch.setattr(config, "_current", config.resolve({}, {"SM120_HOME": str(tmp_path)}))
    state = State.resolve()
    return Scene(state, Run.start(state, "doctor", ["doctor", "--links"]), tmp_path)


@dataclass
class Found:
    name: str
    python: Path
    variables: Mapping[str, str]


def installed(monkeypatch: pytest.MonkeyPatch, python: Path) -> None:
    found = Found("stable", python, {"CUDA_HOME": "/home/of/the/stack", "PYTHONPATH": "/not/this"})
    monkeypatch.setattr(sm120.stack, "look", lambda stack, state: (found, ""))


def facts(count: int = 2) -> Facts:
    cards = [Gpu(index=i, uuid=f"GPU-{name}", name="RTX PRO 6000", bus_id="") for i, name in enumerate("abcd"[:count])]
    pairs = [Pair(a=a, b=b, path="PHB", read="ok", write="ok") for b in range(count) for a in range(b)]
    return Facts(
        collected="",
        toolkit="",
        host=Host(),
        driver=Driver(version="580.95"),
        cpu=Cpu(architecture="x86_64"),
        memory=Memory(),
        gpus=tuple(cards),
        pairs=tuple(pairs),
    )


def checked(scene: Scene, *, count: int = 2) -> LinkReport:
    return check(scene.state, Console.create(), scene.run, "stable", facts=facts(count))


def test_a_whole_check_chooses_records_and_shows(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    installed(monkeypatch, scene.python())
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    report = checked(scene, count=3)  # torch sees two of the machine's three
    assert report.chosen is not None
    assert report.chosen.variables == {"NCCL_P2P_LEVEL": "SYS"}
    assert report.key.gpus == ("GPU-a", "GPU-b")
    assert (report.key.driver, report.key.nccl) == ("580.95", "nvidia-nccl-cu13==2.28.9")
    assert report.names == {"GPU-b": "GPU 1 (RTX PRO 6000)", "GPU-a": "GPU 0 (RTX PRO 6000)"}
    assert report.set_aside == {"NCCL_P2P_DISABLE": "1"}
    assert json.loads(scene.state.links.read_text("utf-8"))["chosen"]["variables"] == {"NCCL_P2P_LEVEL": "SYS"}
    assert (scene.run.path / "links.json").exists()
    printed = capsys.readouterr().out
    assert "NCCL_P2P_LEVEL=SYS" in printed
    assert "20 (20) µs" in printed

    look, copies, *sums = scene.seen()
    assert [len(seen["env"].get("CUDA_VISIBLE_DEVICES", "").split(",")) for seen in (look, copies)] == [1, 2]
    assert {seen["env"]["CUDA_VISIBLE_DEVICES"] for seen in (copies, *sums)} == {"GPU-b,GPU-a"}
    governed = ("NCCL_P2P_LEVEL", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE")
    assert [{name: seen["env"][name] for name in governed if name in seen["env"]} for seen in sums] == [
        {},
        {"NCCL_P2P_LEVEL": "SYS"},
        {"NCCL_P2P_DISABLE": "1"},
    ]
    for seen in sums:
        assert seen["env"]["NCCL_DEBUG"] == "WARN"
        assert seen["env"]["NCCL_CUMEM_ENABLE"] == "0"
        assert seen["env"]["CUDA_HOME"] == "/home/of/the/stack"
        assert (Path(seen["env"]["PYTHONPATH"]) / "sm120_cells").is_dir()
        assert seen["request"]["parent"] == os.getpid()
        assert seen["request"]["ranks"] == 2
    assert not [seen["cwd"] for seen in scene.seen() if Path(seen["cwd"]).exists()]  # each had a folder while it ran


def test_what_the_user_says_of_sglangs_own_variables_stands(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "1")
    scene.bench("done()").child("x", ("a", "b"), {"task": "reduce", "ranks": 2}, THROUGH_HOST)
    assert scene.seen()[0]["env"]["NCCL_CUMEM_ENABLE"] == "1"


def test_the_default_is_kept_when_sockets_are_not_needed(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, scene.python())
    report = checked(scene)
    assert [result.setting.last_resort for result in report.settings] == [False, False, False]


def test_a_group_that_is_not_right_spares_the_larger_ones(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    body = """
if request["task"] == "look":
    machine(gpus=[{"uuid": f"GPU-{name}", "name": "card", "free": 90 << 30} for name in "abcd"])
elif request["task"] == "peer":
    HEALTHY["peer"]()
elif os.environ.get("NCCL_P2P_DISABLE"):
    HEALTHY["reduce"]()
else:
    done(wrong=1)
"""
    installed(monkeypatch, scene.python(body))
    report = checked(scene, count=4)
    assert len(report.pairs) == 6
    assert [[group.outcome.verdict for group in result.groups] for result in report.settings] == [
        [Verdict.WRONG, Verdict.SKIPPED],
        [Verdict.WRONG, Verdict.SKIPPED],
        [Verdict.RIGHT, Verdict.RIGHT],
    ]
    assert report.chosen == THROUGH_HOST
    assert [finding.id for finding in report.findings()] == ["links-default-fails", "links-setting"]


@pytest.mark.parametrize(("count", "words"), [(0, "no GPU"), (1, "one GPU, RTX PRO 6000")])
def test_with_fewer_than_two_gpus_nothing_is_checked(scene: Scene, count: int, words: str) -> None:
    with pytest.raises(NothingChecked, match=words) as raised:
        checked(scene, count=count)
    assert raised.value.exit_code == 3


@pytest.mark.parametrize(
    ("body", "kind", "words"),
    [
        ("machine(cuda=None, torch='2.13.0+cpu')", PreflightError, "torch 2.13.0[+]cpu of .* without CUDA"),
        ("machine(gpus=[])", NothingChecked, "torch sees no GPU"),
        ("machine(gpus=[{'uuid': 'GPU-a', 'name': 'card', 'free': 1}])", NothingChecked, "torch sees one GPU"),
        (
            "machine(gpus=[{'uuid': f'GPU-{n}', 'name': 'card', 'free': 1 << 29} for n in 'ab'])",
            PreflightError,
            "0.5 GiB of free memory; the check needs 2 GiB",
        ),
        (
            "machine(gpus=[{'uuid': f'MIG-{n}', 'name': 'card', 'free': 1 << 33} for n in 'ab'])",
            PreflightError,
            "NVML does not know: MIG-a, MIG-b",
        ),
        ("done()", PreflightError, "does not say what it sees"),
        ("sys.exit('ImportError: libcudart.so.13')", PreflightError, "does not start: .*libcudart.so.13"),
        (
            "machine() if request['task'] == 'look' else say('failed', rank=0, kind='memory', message='out of memory')",
            PreflightError,
            "ran out of memory: rank 0: out of memory",
        ),
    ],
)
def test_what_is_in_the_way_is_said_with_a_remedy(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, body: str, kind: type[Exception], words: str
) -> None:
    installed(monkeypatch, scene.python(body))
    with pytest.raises(kind, match=f"(?s){words}") as raised:
        checked(scene)
    assert getattr(raised.value, "remedy", None)
    assert not scene.state.links.exists()


def test_without_a_stack_the_remedy_is_to_set_one_up(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PreflightError, match="no stack is installed") as raised:
        check(scene.state, Console.create(), scene.run, "", facts=facts())
    assert "scripts/inv setup" in str(raised.value.remedy)
    monkeypatch.setattr(sm120.stack, "look", lambda stack, state: (None, "not installed yet"))
    with pytest.raises(PreflightError, match="stable, which cannot be used: not installed yet") as raised:
        checked(scene)
    assert raised.value.remedy == "scripts/inv setup --stack stable, then: scripts/inv doctor --links --stack stable"


def test_without_a_name_the_stack_that_setup_made_last_is_taken(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, scene.python())
    monkeypatch.setattr(sm120.stack, "selected", lambda state: "stable")
    report = check(scene.state, Console.create(), scene.run, "", facts=facts())
    assert report.stack == "stable"


GARBLED = 'print(\'{"links": 1, "event": "done", "rank": 0, "checks": "many"}\', flush=True)'


@pytest.mark.parametrize(
    ("body", "verdict", "words"),
    [
        ("done()", Verdict.RIGHT, ""),
        ("", Verdict.CRASH, "ended with exit code 0 before it was done"),
        ("os.abort()", Verdict.CRASH, "killed by SIGABRT"),
        (GARBLED + "\ndone()", Verdict.CRASH, "sent what is not the protocol"),
        ("sys.stdout.buffer.write(os.urandom(1 << 20) + bytes([10])); done()", Verdict.RIGHT, ""),
        ("print('{\"links\": 1,' + 'x' * 100000); done()", Verdict.CRASH, "sent what is not the protocol"),
        ("print('word ' * 9); sys.exit(3)", Verdict.CRASH, "word word"),
        ("say('wrong', rank=0, where={'first': 0}); done(wrong=1)", Verdict.WRONG, "are wrong"),
        ("say('at', rank=0, step='joining'); time.sleep(600)", Verdict.HANG, "not done within .*rank 0 in joining"),
        (
            "import signal; [signal.signal(s, signal.SIG_IGN) for s in (2, 15)]; time.sleep(600)",
            Verdict.HANG,
            "nothing was said",
        ),
    ],
)
def test_whatever_a_child_does_is_a_verdict(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, body: str, verdict: Verdict, words: str
) -> None:
    monkeypatch.setattr("sm120.host.links.bench._GRACE", 0.3)
    bench = scene.bench(body, total=2.0 if verdict == Verdict.HANG else 60.0)
    outcome: Outcome = bench.child("x", ("a", "b"), {"task": "reduce", "ranks": 2}, THROUGH_HOST)
    assert outcome.verdict == verdict
    assert re.search(words, outcome.detail, re.DOTALL)
    assert len(outcome.detail) < 2000
    (command,) = [json.loads(line) for line in (scene.run.path / "commands.jsonl").read_text("utf-8").splitlines()]
    assert command["env"]["NCCL_P2P_DISABLE"] == "1"
    assert scene.run.log_path("links-x").exists()

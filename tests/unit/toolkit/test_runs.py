import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sm120 import config, errors, process, runs
from sm120.runs import Run
from sm120.state import State


@pytest.fixture
def state(tmp_path: Path) -> State:
    return State.resolve(config.Settings(home=tmp_path, state=tmp_path / ".sm120", runs=tmp_path / "runs"))


def test_record_of_a_task(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "correct-horse-battery")
    run = Run.start(state, "validate-backends", ["validate-backends", "--token", "abc", "--url", "http://u:p@h/"])
    assert Run.open(run.path).status == "running"
    done = process.run(["echo", "hello"], log=run.log_path("a/../b c"))
    run.record_command(done, env={**os.environ, "EXTRA": "1", "MY_TOKEN": "abcdefghi"})
    run.write_json("result.json", {"echo": "correct-horse-battery", "n": 1})
    run.finish(0, {"cells": 3, "secret": "x"})

    again = Run.open(run.path)
    assert again.id == run.id
    assert again.status == "finished"
    assert again.manifest["schema"] == 1
    assert again.manifest["exit_code"] == 0
    assert again.manifest["summary"] == {"cells": 3, "secret": "***"}
    assert again.manifest["argv"] == ["validate-backends", "--token", "***", "--url", "http://***@h/"]
    assert again.read_json("result.json") == {"echo": "***", "n": 1}
    (line,) = (run.path / "commands.jsonl").read_text().splitlines()
    command = json.loads(line)
    assert command["argv"] == ["echo", "hello"]
    assert command["returncode"] == 0
    assert command["env"] == {"EXTRA": "1", "MY_TOKEN": "***"}
    assert (run.path / "logs" / "a-..-b-c.log").read_text() == "hello\n"


def test_folder_name(state: State) -> None:
    run = Run.start(state, "dev.test ../x", [])
    assert run.path.parent == state.runs
    stamp, _, rest = run.id.partition("-")
    assert len(stamp) == len("20260101T000000Z")
    assert rest.startswith("dev.test-..-x-")
    assert Run.start(state, "dev.test ../x", []).id != run.id


def test_a_run_whose_process_died_is_interrupted(state: State) -> None:
    run = Run.start(state, "bench", [])
    manifest = json.loads((run.path / "manifest.json").read_text())
    with subprocess.Popen([sys.executable, "-c", "pass"]) as gone:
        pass
    for change in ({"pid": gone.pid}, {"pid_started": 1.0}, {"pid": None}, {"pid": -1}, {"pid_started": "x"}):
        (run.path / "manifest.json").write_text(json.dumps({**manifest, **change}))
        assert Run.open(run.path).status == "interrupted"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        pytest.param(None, "cannot read", id="missing"),
        pytest.param("", "not JSON", id="empty"),
        pytest.param('{"schema": 1, "id": "x", "ta', "manifest.json:1:", id="half"),
        pytest.param("[]", "no run manifest", id="list"),
        pytest.param('{"schema": 1, "id": 5, "task": "t", "status": "s"}', "no run manifest", id="wrong-type"),
        pytest.param('{"schema": 2, "id": "x", "task": "t", "status": "s"}', "has schema 2", id="newer"),
    ],
)
def test_damaged_manifest(tmp_path: Path, content: str | None, words: str) -> None:
    if content is not None:
        (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(errors.UsageError, match=words):
        Run.open(tmp_path)


def test_latest_passes_over_what_it_cannot_read(state: State) -> None:
    assert runs.latest(state, "bench") is None
    good = Run.start(state, "bench", [])
    Run.start(state, "bench-other", [])
    (state.runs / "99990101T000000Z-bench-ffffff").mkdir()
    (state.runs / "99990101T000000Z-bench-eeeeee").write_text("a file")
    found = runs.latest(state, "bench")
    assert found is not None
    assert found.id == good.id


def test_runs_folder_that_cannot_be_made(state: State) -> None:
    state.runs.write_text("a file")
    with pytest.raises(errors.PreflightError):
        Run.start(state, "bench", [])


@pytest.mark.parametrize(
    ("name", "safe"), [("", "unnamed"), ("..", "unnamed"), ("/etc/x", "etc-x"), ("a" * 300, "a" * 100)]
)
def test_safe_name(name: str, safe: str) -> None:
    assert runs.safe_name(name) == safe

"""The worker as a real process: what crosses its door, and what does not."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integration.cells.door import MODEL, Door, environment, worker


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    """One worker for all tests that leave it as it was."""
    with worker(tmp_path_factory.mktemp("worker")) as opened:
        yield opened


# --- the round trip ---------------------------------------------------------------------------------------------------


def test_hello_is_facts_and_the_same_each_time(door: Door) -> None:
    hello = door.result("hello")
    assert hello == door.result("hello")
    assert hello["protocol"] == 1
    assert hello["pid"] == door.process.pid
    assert hello["python"] == sys.executable
    assert hello["device"]["type"] == "cpu"
    assert hello["device"]["memory_bytes"] > 1 << 28
    assert hello["devices"] == [hello["device"]]
    assert hello["versions"]["torch"] == torch.__version__
    assert "sglang" in hello["versions"]
    assert re.fullmatch("[0-9a-f]{64}", hello["cells_sha256"])
    assert not any("KEY" in name or "TOKEN" in name for name in hello["environment"])


def test_a_plan_a_reference_and_every_kind_of_cell(door: Door, tmp_path: Path) -> None:
    backends = {"dense": ["torch_dequant"], "moe": ["torch_dequant"]}
    made = door.result("plan", profile="quick", model=MODEL, seed=3, backends=backends)
    assert [s["id"] for s in made["subjects"]] == [
        "dense:torch_dequant",
        "moe:torch_dequant",
        "block:torch_dequant+torch_dequant",
    ]
    assert made["reduced"]
    kinds = set()
    for cell in made["cells"]:
        if "w4a16" in cell["id"]:
            continue
        kinds.add(cell["subject"].partition(":")[0])
        path = tmp_path / cell["reference"]
        done = door.result("reference", key=cell["reference"], case=cell["case"], path=str(path))
        assert done["bytes"] == path.stat().st_size
        result = door.run(cell, reference=str(path))
        assert (result["verdict"], result["reason"], result["findings"]) == ("PASS", None, [])
        assert result["checks"] > 0
        assert result["calls"] > 0
        assert result["eta"] <= 1.0
        assert set(result["seconds"]) >= {"kernel", "judge", "total"}
        assert result["kernels"] == []
        assert result["reproducer"] is None
    assert kinds == {"dense", "moe", "block"}
    assert not list(tmp_path.glob("*.tmp"))


def test_a_run_without_a_reference_makes_its_own(door: Door) -> None:
    assert door.run(door.cell("moe/right/exact-*"))["verdict"] == "PASS"


def test_probe(door: Door) -> None:
    assert door.result("probe") == {"ok": True}


def test_self_test_lists_and_judges(door: Door) -> None:
    mutants = door.result("self-test", list=True)["mutants"]
    assert len(mutants) > 60
    assert all(set(m) >= {"name", "operation", "kind"} for m in mutants)
    index = next(i for i, m in enumerate(mutants) if (m["name"], m["operation"]) == ("output halved", "dense"))
    record = door.result("self-test", seed=0, index=index)
    assert (record["name"], record["kind"], record["caught"]) == ("output halved", "fault", True)
    assert record["eta"] is None, "infinite"
    assert record["criteria"]["cosine > 0.97"]


# --- verdicts ---------------------------------------------------------------------------------------------------------


def test_a_wrong_backend_fails_where_it_is_wrong(door: Door) -> None:
    result = door.run(door.cell("dense/doubled/exact-*"))
    assert result["verdict"] == "FAIL"
    found = result["findings"][0]
    assert (found["tier"], found["check"]) == ("T1", "exact")
    assert found["condition"]["failed_at"] == list(range(17, 33))
    assert result["reason"].startswith("T1 exact: at M = 17-32 of 0-32")
    assert result["error_map"]["rows"] > 16
    assert 0 < len(found["worst"]) <= 20


def test_numbers_that_are_not_finite_cross_as_null(door: Door) -> None:
    before = len(door.lines)
    result = door.run(door.cell("dense/nan/bound-*", "dense/nan/*bound-m*"))
    assert result["verdict"] == "FAIL"
    assert result["eta"] is None
    assert [e["got"] for e in result["findings"][0]["worst"]] == [None, None]
    assert result["error_map"]["tiles"] == [[None]]
    assert not any(re.search(r"\b(NaN|-?Infinity)\b", line) for line in door.lines[before:])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("raises", 'RuntimeError: an "odd" one:\r\n\'\'\' and """ and \\ and {braces}\0'),
        ("raises-key", "KeyError: 'no such kernel'"),
        ("raises-type", "TypeError: unexpected keyword"),
        ("raises-early", "KeyError: 'w13_input_scale'"),
    ],
)
def test_a_backend_that_raises_fails(door: Door, name: str, said: str) -> None:
    """Whatever it raises: a KeyError is the backend's fault, too."""
    result = door.run(door.cell(f"dense/{name}/repeat-*"))
    assert result["verdict"] == "FAIL"
    assert [(f["tier"], f["check"], f["message"]) for f in result["findings"]] == [("T0", "raises", said)]
    assert result["reason"] == f"T0 raises: {said}"
    assert said.partition(":")[0] in door.errors.read_text(), "the traceback is in the log"


def test_a_backend_that_refuses_is_unsupported(door: Door) -> None:
    result = door.run(door.cell("dense/refuses/repeat-*"))
    assert (result["verdict"], result["reason"]) == ("UNSUPPORTED", "needs compute capability 12.0")
    assert result["findings"] == []


def test_no_memory_is_inconclusive(door: Door) -> None:
    result = door.run(door.cell("dense/no-memory/repeat-*"))
    assert (result["verdict"], result["reason"]) == ("INCONCLUSIVE", "out of memory: no 80 GiB left")


def test_a_case_of_a_format_that_the_backend_does_not_take(door: Door) -> None:
    cell = door.cell("dense/torch_dequant/repeat-w4a16-*")
    result = door.run({**cell, "subject": "dense:right"})
    assert result["verdict"] == "UNSUPPORTED"
    assert "bf16" in result["reason"]


# --- what must not reach the door -------------------------------------------------------------------------------------


def test_what_a_library_prints_never_reaches_the_door(door: Door) -> None:
    result = door.run(door.cell("dense/prints/repeat-*"))
    assert result["verdict"] == "PASS"
    log = door.errors.read_text()
    for words in ('"printed"', "through the first stdout", '"written"', "from a child"):
        assert words in log
    assert door.result("probe") == {"ok": True}


def test_what_is_meant_for_the_door_never_reaches_a_library(door: Door) -> None:
    assert door.run(door.cell("dense/reads-stdin/repeat-*"))["verdict"] == "PASS"


# --- bad requests -----------------------------------------------------------------------------------------------------

DEEP = "[" * 100_000


@pytest.mark.parametrize(
    "line",
    [
        "",
        "hello",
        "{",
        "[]",
        "[1, 2]",
        "3",
        "null",
        '"hello"',
        '{"op": "hello"}',
        '{"id": 3}',
        '{"id": 3, "op": ["hello"]}',
        '{"id": 3, "op": {"hello": 1}}',
        b"\xff\xfe\x00",
        b'{"id": 3, "op": "\xe9"}x',
        DEEP,
        "9" * 5000,
    ],
    ids=lambda line: repr(line)[:24],
)
def test_a_line_that_is_no_request_is_answered_and_the_next_one_too(door: Door, line: str | bytes) -> None:
    door.send(line)
    reply = door.read()
    assert (reply["ok"], reply["error"]["kind"]) == (False, "bad-request")
    assert len(json.dumps(reply)) < 2000
    assert door.result("probe") == {"ok": True}


def test_an_unknown_operation(door: Door) -> None:
    error = door.error("launch")
    assert error["kind"] == "unknown-op"
    assert "launch" in error["message"]
    assert door.error("__class__")["kind"] == "unknown-op"


@pytest.mark.parametrize(
    ("op", "fields"),
    [
        ("plan", {}),
        ("plan", {"profile": "huge", "model": MODEL}),
        ("plan", {"profile": ["quick"], "model": MODEL}),
        ("plan", {"model": []}),
        ("plan", {"model": {**MODEL, "hidden": -1}}),
        ("plan", {"model": {**MODEL, "hidden": 60}}),
        ("plan", {"model": MODEL, "seed": "x"}),
        ("plan", {"model": MODEL, "backends": ["right"]}),
        ("run", {}),
        ("run", {"cell": None}),
        ("run", {"cell": {"id": "x", "subject": "dense:right"}}),
        ("run", {"cell": {"id": "x", "subject": "dense:right", "case": {"operation": "dense"}}}),
        ("reference", {}),
        ("reference", {"case": {"operation": "dense", "declared": {}}, "path": "/nowhere"}),
        ("self-test", {}),
        ("self-test", {"seed": 0, "index": "x"}),
        ("self-test", {"seed": 0, "index": 10**6}),
        ("self-test", {"seed": 0, "index": -1}),
    ],
    ids=str,
)
def test_a_request_that_cannot_be_done_is_refused_and_the_next_one_answered(door: Door, op: str, fields: Any) -> None:
    error = door.error(op, **fields)
    assert error["kind"] == "bad-request"
    assert error["message"]
    assert door.result("probe") == {"ok": True}


def test_a_case_with_an_unknown_field_is_refused_by_name(door: Door) -> None:
    cell = door.cell("dense/right/repeat-*")
    error = door.error("run", cell={**cell, "case": {**cell["case"], "colour": "red"}})
    assert error["kind"] == "bad-request"
    assert "colour" in error["message"]


def test_an_unknown_backend(door: Door) -> None:
    error = door.error("plan", model=MODEL, backends={"dense": ["cutlas"], "moe": None})
    assert error["kind"] == "unknown-backend"
    assert "cutlas" in error["message"]
    assert error["known"][:3] == ["torch_dequant", "sm120_model", "right"]
    cell = door.cell("dense/right/repeat-*")
    assert door.error("run", cell={**cell, "subject": "dense:cutlas"})["kind"] == "unknown-backend"


@pytest.mark.parametrize("content", [None, b"", b"not a reference"])
def test_a_reference_that_cannot_be_read_is_not_the_backends_fault(
    door: Door, tmp_path: Path, content: bytes | None
) -> None:
    path = tmp_path / "reference"
    if content is not None:
        path.write_bytes(content)
    error = door.error("run", cell=door.cell("dense/right/repeat-*"), reference=str(path))
    assert error["kind"] == "failed"


def test_a_reference_of_another_case_is_not_the_backends_fault(door: Door, tmp_path: Path) -> None:
    path = tmp_path / "reference"
    door.result("reference", key="x", case=door.cell("dense/right/exact-*")["case"], path=str(path))
    error = door.error("run", cell=door.cell("dense/right/repeat-*"), reference=str(path))
    assert error["kind"] == "failed"
    assert "another case" in error["message"]


def test_a_reference_that_cannot_be_written(door: Door, tmp_path: Path) -> None:
    cell = door.cell("dense/right/repeat-*")
    error = door.error("reference", case=cell["case"], key="x", path=str(tmp_path / "no folder" / "x"))
    assert error["kind"] == "failed"
    assert not list(tmp_path.iterdir())


def test_a_probe_that_cannot_be_exact(door: Door, tmp_path: Path) -> None:
    cell = door.cell("dense/right/exact-*")
    long = {**cell, "case": {**cell["case"], "k": 1 << 17, "n": 16, "ms": [4]}}
    result = door.run(long)
    assert result["verdict"] == "INCONCLUSIVE"
    assert "not exact" in result["reason"]
    error = door.error("reference", case=long["case"], key="x", path=str(tmp_path / "x"))
    assert error["kind"] == "not-exact"
    assert not list(tmp_path.iterdir())


# --- life and death ---------------------------------------------------------------------------------------------------


def test_the_end_of_stdin_is_the_end(tmp_path: Path) -> None:
    with worker(tmp_path) as door:
        assert door.result("probe") == {"ok": True}
        assert door.process.stdin is not None
        door.process.stdin.close()
        assert door.process.wait(60) == 0
        assert door.process.stdout is not None
        assert door.process.stdout.read() == b""


def test_a_backend_that_takes_the_process_down_closes_the_pipe(tmp_path: Path) -> None:
    with worker(tmp_path) as door:
        cell = door.cell("dense/dies/repeat-*")
        with pytest.raises(EOFError):
            door.run(cell)
        assert door.process.wait(60) == -signal.SIGKILL
        assert door.lines[-1] == '{"id": 2, "event": "started"}\n', "the request was acknowledged first"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent died")
def test_a_worker_dies_with_its_parent(tmp_path: Path) -> None:
    """Killed as by the kernel, the parent can do nothing about it."""
    script = (
        "import subprocess, sys\n"
        "w = subprocess.Popen([sys.executable, '-m', 'sm120_cells.worker', '--device', 'cpu'],"
        " stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)\n"
        'w.stdin.write(b\'{"id": 1, "op": "probe"}\\n\'); w.stdin.flush()\n'
        "w.stdout.readline(); w.stdout.readline()\n"
        "print(w.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment(), cwd=tmp_path
    )
    with parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        os.kill(pid, 0)
        parent.kill()
    deadline = time.monotonic() + 60
    while _alive(pid):
        assert time.monotonic() < deadline, "the worker outlived its parent"
        time.sleep(0.05)


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_said_at_hello(tmp_path: Path) -> None:
    with worker(tmp_path, "--device", "cuda") as door:
        for op in ("hello", "plan"):
            door.send(json.dumps({"id": 7, "op": op}))
            reply = door.read()
            assert (reply["id"], reply["ok"], reply["error"]["kind"]) == (7, False, "no-device")
        door.send("not a request")
        assert door.read()["error"]["kind"] == "no-device"
        assert door.process.stdin is not None
        door.process.stdin.close()
        assert door.process.wait(60) == 0


def test_a_backend_module_that_cannot_be_imported_is_said(tmp_path: Path) -> None:
    with worker(tmp_path, plugins=["no_such_module"]) as door:
        error = door.error("plan", model=MODEL)
        assert error["kind"] == "failed"
        assert "no_such_module" in error["message"]

"""A worker that speaks the door's protocol and misbehaves on command. Standard library only.

    python fake_worker.py SCENARIO.json

The scenario is the plan itself (``subjects``, ``cells``, ``reduced``), what to do (``do``: cell id, reference key,
``probe``, ``hello`` or mutant name -> behaviour) and ``trace``, a file to which every request is appended. A behaviour
``once:X`` does X the first time in the whole run and the good thing afterwards.
"""

import fnmatch
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

DOOR = os.fdopen(os.dup(1), "wb", buffering=0)
os.dup2(2, 1)


def send(message: object) -> None:
    DOOR.write(json.dumps(message).encode() + b"\n")


def main(path: str) -> None:
    scenario = json.loads(Path(path).read_text())
    for line in sys.stdin.buffer:
        request = json.loads(line)
        with Path(scenario["trace"]).open("a") as trace:
            name = (request.get("cell") or {}).get("id") or request.get("key") or ""
            trace.write(json.dumps({"pid": os.getpid(), "op": request["op"], "name": name}) + "\n")
        answer(scenario, request)


def answer(scenario: dict[str, Any], request: dict[str, Any]) -> None:
    number, op = request["id"], request["op"]
    what = behaviour(scenario, request)
    if what == "die_before_start":
        os.kill(os.getpid(), signal.SIGKILL)
    send({"id": number, "event": "started"})
    if what is not None:
        misbehave(what, number)
    if op == "run":
        result: dict[str, Any] = run(scenario, request, what)
    elif op == "plan":
        known = {s[kind] for s in scenario["subjects"] for kind in ("moe", "dense") if s[kind]}
        asked = [name for names in request["backends"].values() for name in names or ()]
        if unknown := [name for name in asked if name not in known]:
            error = {"kind": "unknown-backend", "message": f"no backend {unknown[0]}", "name": unknown[0]}
            send({"id": number, "ok": False, "error": {**error, "known": sorted(known)}})
            return
        result = plan(scenario, request)
    elif op == "hello":
        result = {**HELLO, "pid": os.getpid(), **scenario.get("hello", {})}
    elif op == "reference":
        Path(request["path"]).write_text(request["key"])
        result = {"seconds": 0.0, "bytes": len(request["key"])}
    elif op == "probe":
        result = {"ok": what != "fail", "message": "1 + 1 gave 3"}
    elif op == "self-test":
        mutants = scenario["mutants"]
        result = {"mutants": mutants} if request.get("list") else mutant(mutants[request["index"]], what)
    else:
        send({"id": number, "ok": False, "error": {"kind": "unknown-op", "message": op}})
        return
    if what == "refuse":
        send({"id": number, "ok": False, "error": {"kind": "internal", "message": "no"}})
        return
    send({"id": number, "ok": True, "result": result})
    if what == "die_after":
        os.kill(os.getpid(), signal.SIGSEGV)


def behaviour(scenario: dict[str, Any], request: dict[str, Any]) -> str | None:
    name: str = request["op"]
    if name == "run":
        name = request["cell"]["id"]
    elif name == "reference":
        name = request["key"]
    elif name == "self-test":
        name = "list" if request.get("list") else scenario["mutants"][request["index"]]["name"]
    what: str | None = scenario.get("do", {}).get(name)
    if what is not None and what.startswith("once:"):
        marker = Path(scenario["trace"] + "." + name.replace("/", "_") + ".once")
        if marker.exists():
            return None
        marker.touch()
        what = what.removeprefix("once:")
    return what


def misbehave(what: str, number: int) -> None:
    """Everything that a worker can do to its client, short of a wrong answer."""
    if what in ("sigkill", "segv", "abort"):
        signum = {"sigkill": signal.SIGKILL, "segv": signal.SIGSEGV, "abort": signal.SIGABRT}[what]
        os.write(2, b"about to die: token hf_abcdefghijklmnopqrstuvwxyz\n")
        os.kill(os.getpid(), signum)
    elif what.startswith("exit"):
        os._exit(int(what.removeprefix("exit")))
    elif what == "hang":
        time.sleep(600)
    elif what == "stubborn":
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, signal.SIG_IGN)
        leave_behind("import signal, time; signal.signal(2, signal.SIG_IGN); time.sleep(600)")
        time.sleep(600)
    elif what == "chatter":
        while True:
            send({"id": number, "event": "progress", "message": "still at it"})
            time.sleep(0.05)
    elif what == "interruptible":
        Path(os.environ["FAKE_REACHED"]).write_text(str(os.getpid()))
        time.sleep(600)
    else:
        garble(what, number)


def garble(what: str, number: int) -> None:
    good = json.dumps({"id": number, "ok": True, "result": {"verdict": "PASS"}}).encode()
    written = {
        "garbage": b"Loading weights: 100%\n",
        "binary": b"\xff\xfe\x00\n",
        "wrong_id": json.dumps({"id": number + 7, "ok": True, "result": {}}).encode() + b"\n",
        "boolean_id": good.replace(b'"id": %d' % number, b'"id": true') + b"\n",
        "not_object": b"[1, 2]\n",
        "nan_literal": good.replace(b'"PASS"', b"NaN") + b"\n",
        "infinite": good.replace(b'"PASS"', b"1e999") + b"\n",
        "twice": good + b"\n" + good + b"\n",
        "nested": b"[" * 200_000 + b"\n",
        "no_result": json.dumps({"id": number, "ok": True}).encode() + b"\n",
        "half_line": good[:20],
        "half_then_segv": good[:20],
        "close_stdout": b"",
        "orphan": b"",
    }.get(what)
    if written is not None:
        DOOR.write(written)
    if what == "oversized":
        for _ in range(20):
            DOOR.write(b"x" * (1 << 20))
        time.sleep(600)
    elif what == "flood":
        for _ in range(2000):
            os.write(2, b"a line of noise from a library, again and again and again\n" * 100)
    elif what == "half_line":
        os._exit(0)
    elif what == "half_then_segv":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif what == "close_stdout":
        DOOR.close()
        time.sleep(600)
    elif what == "orphan":  # a child that outlives it and holds its pipes
        leave_behind("import time; time.sleep(600)")
        os._exit(4)


def leave_behind(program: str) -> None:
    """A child that holds the door, and whose id is told on stderr."""
    child = subprocess.Popen([sys.executable, "-I", "-S", "-c", program], stdout=DOOR)
    os.write(2, b"child %d\n" % child.pid)


def run(scenario: dict[str, Any], request: dict[str, Any], what: str | None) -> dict[str, Any]:
    if request["reference"] is not None:
        assert Path(request["reference"]).read_text() == request["cell"]["reference"]
    finding = {
        "tier": "T1",
        "check": "identity",
        "condition": {"m": 17, "row": 3, "tile": [0, 1]},
        "message": "1 row is not the weight's",
        "worst": [{"row": 3, "col": 5, "got": None, "want": 1.5, "bound": 0.0, "eta": None}],
    }
    base: dict[str, Any] = {
        "reason": None,
        "eta": 0.5,
        "findings": [],
        "notes": [],
        "checks": 3,
        "calls": 9,
        "kernels": ["k"],
    }
    base |= {"seconds": {"kernel": 0.0, "total": 0.0}, "error_map": None, "reproducer": None, "verdict": "PASS"}
    time.sleep(scenario.get("seconds", 0.0))
    changed: dict[str, dict[str, Any]] = {
        "fail": {"verdict": "FAIL", "reason": "wrong", "findings": [finding], "reproducer": request["reproducer"]},
        "nan": {"verdict": "FAIL", "reason": "not finite", "eta": None, "findings": [finding]},
        "unsupported": {"verdict": "UNSUPPORTED", "reason": "capability 9.0"},
        "inconclusive": {"verdict": "INCONCLUSIVE", "reason": "no bound"},
        "pass_with_findings": {"findings": [finding]},
        "pass_out_of_bound": {"eta": 1.5},
        "pass_unchecked": {"checks": 0},
        "crash_verdict": {"verdict": "CRASH"},
        "lower_case": {"verdict": "pass"},
    }
    return base | changed.get(what or "", {})


def plan(scenario: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    only = request["only"]
    chosen = [
        subject
        for subject in scenario["subjects"]
        if all(
            subject[kind] is None or not request["backends"][kind] or subject[kind] in request["backends"][kind]
            for kind in ("moe", "dense")
        )
    ]
    names = {subject["id"] for subject in chosen}
    cells = [
        cell
        for cell in scenario["cells"]
        if cell["subject"] in names
        and (only is None or any(fnmatch.fnmatchcase(cell["id"], pattern) for pattern in only))
    ]
    return {"subjects": chosen, "cells": cells, "reduced": scenario.get("reduced", [])}


def mutant(listed: dict[str, Any], what: str | None) -> dict[str, Any]:
    right = listed["kind"] == "right"
    caught = (not right) != (what == "wrong")
    return {
        **listed,
        "caught": caught,
        "tiers": ["T1"] if caught else [],
        "first": {"tier": "T1", "check": "identity"} if caught else None,
        "eta": 7.0 if caught else 0.9,
        "criteria": {"cosine>0.97": True, "deepgemm<0.02": right},
        "seconds": 0.0,
    }


HELLO: dict[str, Any] = {
    "protocol": 1,
    "python": "3.11",
    "device": {
        "type": "cuda",
        "name": "RTX PRO 6000",
        "capability": [12, 0],
        "uuid": "GPU-1",
        "driver": "590.48",
        "memory_bytes": 1,
    },
    "versions": {"torch": "2.13.0", "sglang": None},
    "libraries": {"common_ops.so": "ab"},
    "environment": {},
    "cells_sha256": "cd",
}


if __name__ == "__main__":
    main(sys.argv[1])

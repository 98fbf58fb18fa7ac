"""The door: requests on stdin, replies on stdout, one JSON object a line each way.

The protocol has file descriptors of its own: fd 1 is pointed at stderr and fd 0 at nothing, so what a library prints or
reads never reaches the door. Whatever a backend does to this process costs this process only.
"""

import argparse
import ctypes
import json
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO, TypeVar

import torch

from sm120_cells import machine, plan, reproducer
from sm120_cells.backends import UnsupportedError, dense_backends, moe_backends
from sm120_cells.cases import BlockCase, Case, CaseError, DenseCase, MoeCase, case_from_json
from sm120_cells.evaluate import Outcome, evaluate
from sm120_cells.judge import Finding
from sm120_cells.plan import declared_accumulation, declared_recipe
from sm120_cells.probes import NotExactError, block_operands, dense_operands, moe_operands, to_device
from sm120_cells.reference import Expected, block_reference, dense_reference, moe_reference
from sm120_cells.subjects import BlockSubject, DenseSubject, MoeSubject, Subject

_PROGRESS_SECONDS = 5.0
_PR_SET_PDEATHSIG = 1
_NOT_A_REQUEST = (ValueError, TypeError, KeyError, RecursionError)


class RequestError(Exception):
    """A request that cannot be answered: kind and message go back through the door."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def _read_case(cell_case: Mapping[str, Any]) -> tuple[Case, Mapping[str, Any]]:
    """A case and what the backend declared for it."""
    fields = dict(cell_case)
    declared = fields.pop("declared", None)
    if not isinstance(declared, Mapping):
        raise CaseError("the case lacks what the backend declared of its arithmetic")
    return case_from_json(fields), declared


def _expected(case: Case, declared: Mapping[str, Any], device: torch.device) -> Expected:
    match case:
        case DenseCase():
            return dense_reference(case, to_device(dense_operands(case), device), declared_accumulation(declared))
        case MoeCase():
            return moe_reference(case, to_device(moe_operands(case), device), declared_recipe(declared))
        case BlockCase():
            operands = to_device(block_operands(case), device)
            dense = declared_accumulation(declared), declared_accumulation(declared, "down")
            return block_reference(case, operands, declared_recipe(declared), dense, declared["dense_format"])


def _subject(case: Case, name: str, device: torch.device) -> Subject:
    """The backend or pair called ``name`` (as in the subject's id) on a case; UnsupportedError where it says so."""
    moe_name, _, dense_name = name.partition("+")
    match case:
        case DenseCase():
            dense = _named(dense_backends(), name)
            _require(dense.unsupported(device, case))
            return DenseSubject(case, to_device(dense_operands(case), device), dense)
        case MoeCase():
            moe = _named(moe_backends(), name)
            _require(moe.unsupported(device, case))
            return MoeSubject(case, to_device(moe_operands(case), device), moe)
        case BlockCase():
            moe, dense = _named(moe_backends(), moe_name), _named(dense_backends(), dense_name)
            _require(moe.unsupported(device, case.routed) or dense.unsupported(device))
            return BlockSubject(case, to_device(block_operands(case), device), moe, dense)


BackendT = TypeVar("BackendT")


def _named(known: Mapping[str, BackendT], name: str) -> BackendT:
    if name not in known:
        raise plan.UnknownBackendError(name, tuple(known))
    return known[name]


def _require(reason: str | None) -> None:
    if reason is not None:
        raise UnsupportedError(reason)


def run_cell(
    cell: Mapping[str, Any],
    device: torch.device,
    reference: Path | None,
    *,
    sizes: tuple[int, ...] = (),
    tick: Callable[[], None] | None = None,
) -> Outcome:
    """Judge one cell. Refusals and faults of the backend are verdicts; what is wrong with the cell itself is raised."""
    case, declared = _read_case(cell["case"])
    try:
        expected = _expected(case, declared, device) if reference is None else _load(reference, case, device)
    except _INCONCLUSIVE as error:
        return _inconclusive(error)
    try:
        subject = _subject(case, cell["subject"].partition(":")[2], device)
        if sizes:
            subject.sweep = sizes
        return evaluate(subject, expected, tick=tick)
    except UnsupportedError as error:
        return Outcome("UNSUPPORTED", reason=str(error))
    except _INCONCLUSIVE as error:
        return _inconclusive(error)
    except plan.UnknownBackendError:
        raise
    except Exception as error:  # noqa: BLE001  # whatever a backend raises is its fault, and is the verdict
        if "can't allocate memory" in str(error):  # torch's CPU allocator has no error class of its own
            return _inconclusive(error)
        traceback.print_exc()
        _die_if_poisoned(device)
        message = f"{type(error).__name__}: {error}".strip()
        return Outcome("FAIL", reason=f"T0 raises: {message}", findings=[Finding("T0", "raises", message)])


_INCONCLUSIVE = (NotExactError, torch.OutOfMemoryError, MemoryError)


def _inconclusive(error: Exception) -> Outcome:
    what = "the probe is not exact for this shape" if isinstance(error, NotExactError) else "out of memory"
    return Outcome("INCONCLUSIVE", reason=f"{what}: {error}")


def _die_if_poisoned(device: torch.device) -> None:
    """A sticky CUDA error outlives its call: nothing more can be learnt in this process."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        print(f"the CUDA context is lost: {error}", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGABRT)


def reproduce(cell: Mapping[str, Any], sizes: list[int]) -> int:
    """What a stand-alone reproducer does: judge the cell again and print what is wrong. 1: the fault shows."""
    device = machine.choose_device(None)
    outcome = run_cell(cell, device, None, sizes=tuple(sizes))
    if sizes and outcome.verdict == "PASS":  # what depends on the calls before it needs them
        outcome = run_cell(cell, device, None)
    print(f"{cell['id']} on {machine.describe(device)['name']}, torch {torch.__version__}")
    print(f"{outcome.verdict}{f': {outcome.reason}' if outcome.reason else ''}")
    for finding in outcome.findings:
        print(f"\n{finding.tier} {finding.check}: {finding.message}\n  {dict(finding.condition)}")
        for element in finding.worst:
            print(f"  [{element.row}, {element.col}] got {element.got}, want {element.want} ± {element.bound:.3g}")
    return {"FAIL": 1, "PASS": 0}.get(outcome.verdict, 2)


def _load(path: Path, case: Case, device: torch.device) -> Expected:
    stored = torch.load(path, map_location=device, weights_only=True)
    if stored["case"] != case.digest:
        raise RequestError("failed", f"{path} is the reference of another case")
    return Expected(stored["value"], stored["radius"])


class Worker:
    """Answers requests, one at a time."""

    def __init__(self, door: TextIO, device: torch.device) -> None:
        self.door, self.device = door, device
        self.operations: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
            "hello": lambda _: machine.hello(self.device),
            "plan": self.plan,
            "reference": self.reference,
            "run": self.run,
            "probe": lambda _: self.probe(),
            "self-test": self.self_test,
        }
        self.request = 0
        self.last_sent = 0.0

    def send(self, message: Mapping[str, Any]) -> None:
        """One line; a number that is not finite becomes null."""
        self.door.write(json.dumps(_finite(message), allow_nan=False) + "\n")
        self.door.flush()
        self.last_sent = time.monotonic()

    def tick(self) -> None:
        """Say now and then that work goes on; called between a cell's calls, so that a hanging call stays silent."""
        if time.monotonic() - self.last_sent > _PROGRESS_SECONDS:
            self.send({"id": self.request, "event": "progress"})

    def answer(self, line: str) -> None:
        """Read a request, do it, reply."""
        try:
            request = json.loads(line)
            self.request = request["id"]
            operation = self.operations.get(request["op"])
        except _NOT_A_REQUEST as error:
            message = f"not a request: {type(error).__name__}: {error}"
            self.send({"id": None, "ok": False, "error": {"kind": "bad-request", "message": message}})
            return
        self.send({"id": self.request, "event": "started"})
        if operation is None:
            self.refuse("unknown-op", f"no operation is called {request['op']!r}")
            return
        try:
            self.send({"id": self.request, "ok": True, "result": operation(request)})
        except RequestError as error:
            self.refuse(error.kind, str(error))
        except plan.UnknownBackendError as error:
            self.refuse("unknown-backend", str(error), known=list(error.known))
        except (CaseError, KeyError, TypeError) as error:
            self.refuse("bad-request", f"{type(error).__name__}: {error}")
        except Exception as error:  # noqa: BLE001  # the door stays open: the message is the answer
            traceback.print_exc()
            self.refuse("failed", f"{type(error).__name__}: {error}")

    def refuse(self, kind: str, message: str, **more: Any) -> None:
        """The reply to a request that cannot be answered."""
        self.send({"id": self.request, "ok": False, "error": {"kind": kind, "message": message, **more}})

    def plan(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Subjects and cells for a model."""
        profile = request.get("profile", "default")
        if profile not in plan.PROFILES:
            raise RequestError("bad-request", f"profile must be one of {', '.join(plan.PROFILES)}, not {profile!r}")
        backends = request.get("backends") or {}
        if not isinstance(backends, Mapping):
            raise RequestError("bad-request", "backends must be an object with lists of names")
        return plan.make_plan(
            plan.Shapes.from_json(request["model"]),
            profile,
            self.device,
            _whole(request, "seed", 1 << 64, default=0),
            operations=request.get("operations") or ("dense", "moe"),
            dense=backends.get("dense"),
            moe=backends.get("moe"),
            only=request.get("only"),
        )

    def reference(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Compute a reference and write it whole or not at all."""
        start = time.perf_counter()
        case, declared = _read_case(request["case"])
        try:
            expected = _expected(case, declared, self.device)
        except NotExactError as error:
            raise RequestError("not-exact", str(error)) from error
        path = Path(request["path"])
        partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        stored = {"case": case.digest, "value": expected.value.cpu(), "radius": expected.radius.cpu()}
        torch.save(stored, partial)
        partial.replace(path)
        return {"seconds": time.perf_counter() - start, "bytes": path.stat().st_size}

    def run(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Judge a cell; write its reproducer where it fails."""
        cell = request["cell"]
        reference = Path(request["reference"]) if request.get("reference") else None
        start = time.perf_counter()
        outcome = run_cell(cell, self.device, reference, tick=self.tick)
        total = time.perf_counter() - start
        findings = [f.to_json() for f in outcome.findings]
        script = request.get("reproducer") if outcome.verdict == "FAIL" else None
        if script:
            sizes = sorted({int(s) for f in outcome.findings for s in f.condition.get("failed_at", ())})
            reproducer.write(Path(script), cell, findings, sizes)
        rest = total - outcome.kernel_seconds - outcome.judge_seconds
        return {
            "verdict": outcome.verdict,
            "reason": outcome.reason,
            "eta": outcome.eta,
            "findings": findings,
            "notes": outcome.notes,
            "checks": outcome.checks,
            "calls": outcome.calls,
            "seconds": {
                "kernel": outcome.kernel_seconds,
                "judge": outcome.judge_seconds,
                "operands": rest,
                "total": total,
            },
            "kernels": outcome.kernels,
            "error_map": outcome.error_map,
            "reproducer": script,
        }

    def probe(self) -> dict[str, Any]:
        """A small operation with a known answer: is the device still sane?"""
        a = torch.arange(64, dtype=torch.float32, device=self.device).reshape(8, 8)
        got = (a @ torch.eye(8, device=self.device) + 1).sum().item()
        return {"ok": got == 2080.0} if got == 2080.0 else {"ok": False, "message": f"8x8 product gave {got}, not 2080"}

    def self_test(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """List the catalogue, or judge one of its entries for a seed."""
        from sm120_cells import faults, selftest  # only this operation needs them

        mutants = faults.catalogue()
        if request.get("list"):
            listed = [{"name": m.name, "operation": m.operation, "kind": m.kind, "source": m.source} for m in mutants]
            return {"mutants": listed}
        index, seed = _whole(request, "index", len(mutants)), _whole(request, "seed", 1 << 64)
        return selftest.judge_mutant(mutants[index], seed, self.device).to_json()


def _whole(request: Mapping[str, Any], name: str, limit: int, default: int | None = None) -> int:
    value = request.get(name, default)
    if type(value) is not int or not 0 <= value < limit:
        raise RequestError("bad-request", f"{name} must be a whole number from 0 to {limit - 1}, not {value!r:.200}")
    return value


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return value


def _private_door() -> tuple[TextIO, TextIO]:
    """(requests, replies) on descriptors of their own."""
    requests = os.fdopen(os.dup(0), encoding="utf-8", errors="replace")
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return requests, replies


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> int:
    """Serve until stdin ends."""
    parser = argparse.ArgumentParser(prog="sm120_cells.worker", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"))
    arguments = parser.parse_args()
    _die_with_parent()
    requests, replies = _private_door()
    try:
        device = machine.choose_device(arguments.device)
    except machine.NoDeviceError as error:
        return _refuse(requests, replies, str(error))
    worker = Worker(replies, device)
    for line in requests:
        worker.answer(line)
    return 0


def _refuse(requests: TextIO, replies: TextIO, message: str) -> int:
    for line in requests:
        try:
            number = json.loads(line)["id"]
        except _NOT_A_REQUEST:
            number = None
        refusal = {"id": number, "ok": False, "error": {"kind": "no-device", "message": message}}
        replies.write(json.dumps(refusal) + "\n")
        replies.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())

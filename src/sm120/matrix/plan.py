"""What crosses the door, read and checked: the plan and a cell's result. MalformedReply where it is not that."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

PASS: Final = "PASS"  # noqa: S105 - a verdict
FAIL: Final = "FAIL"
UNSUPPORTED: Final = "UNSUPPORTED"
SKIPPED: Final = "SKIPPED"
CRASH: Final = "CRASH"
HANG: Final = "HANG"
INCONCLUSIVE: Final = "INCONCLUSIVE"
VERDICTS: Final = (PASS, FAIL, UNSUPPORTED, SKIPPED, CRASH, HANG, INCONCLUSIVE)
WORKER_VERDICTS: Final = frozenset((PASS, FAIL, UNSUPPORTED, INCONCLUSIVE))
"""What a worker may say of its own cell; the others are given by the toolkit."""

PROFILES: Final = ("quick", "default", "full")
OPERATIONS: Final = ("dense", "moe")

_MAX_REASON: Final = 2000  # characters; a library's message may be a whole compiler log

T = TypeVar("T")


class MalformedReply(ValueError):
    """A reply that is JSON but not what the protocol says; the message names the field."""


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked of the worker's ``plan``. ``model`` is the MODEL of one rank."""

    profile: str
    model: Mapping[str, Any]
    seed: int
    only: tuple[str, ...] = ()
    moe: tuple[str, ...] = ()
    dense: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The body of the plan request."""
        return {
            "profile": self.profile,
            "model": dict(self.model),
            "seed": self.seed,
            "only": list(self.only) or None,
            "operations": list(OPERATIONS),
            "backends": {"dense": list(self.dense) or None, "moe": list(self.moe) or None},
        }


@dataclass(frozen=True, slots=True)
class Subject:
    """One backend of an operation, or a pair of them in the model's MoE block: what gets a process of its own."""

    id: str
    operation: str
    moe: str | None
    dense: str | None
    unsupported: str | None
    servable: bool


@dataclass(frozen=True, slots=True)
class Cell:
    """One case of one subject. ``raw`` is what the worker sent and gets back unchanged."""

    id: str
    subject: str
    reference: str | None
    cost: float
    raw: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that is to be run."""

    subjects: tuple[Subject, ...]
    cells: tuple[Cell, ...]
    reduced: tuple[str, ...]

    def cells_of(self, subject: str) -> tuple[Cell, ...]:
        """The subject's cells, in the plan's order."""
        return tuple(cell for cell in self.cells if cell.subject == subject)


@dataclass(frozen=True, slots=True)
class Result:
    """A cell's verdict and what led to it. ``details`` is the rest of the worker's reply, for the record."""

    verdict: str
    reason: str | None = None
    eta: float | None = None
    findings: tuple[Mapping[str, Any], ...] = ()
    notes: tuple[str, ...] = ()
    reproducer: str | None = None
    seconds: Mapping[str, float] | None = None
    details: Mapping[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """As it is kept in the run's record."""
        return {
            "verdict": self.verdict,
            "reason": self.reason,
            "eta": self.eta,
            "findings": [dict(finding) for finding in self.findings],
            "notes": list(self.notes),
            "reproducer": self.reproducer,
            "seconds": None if self.seconds is None else dict(self.seconds),
            "details": None if self.details is None else dict(self.details),
        }


def read_plan(raw: Mapping[str, Any]) -> Plan:
    """A plan reply, checked for what scheduling relies on: known subjects, unique ids, sane costs."""
    subjects = tuple(_subject(entry) for entry in _objects(raw, "subjects"))
    names = {subject.id for subject in subjects}
    if len(names) != len(subjects):
        raise MalformedReply("plan.subjects: two subjects share an id")
    cells = tuple(_cell(entry) for entry in _objects(raw, "cells"))
    if len({cell.id for cell in cells}) != len(cells):
        raise MalformedReply("plan.cells: two cells share an id")
    for cell in cells:
        if cell.subject not in names:
            raise MalformedReply(f"plan.cells: {cell.id} belongs to {cell.subject}, which is no subject")
    return Plan(subjects, cells, _texts(raw, "reduced"))


def read_result(raw: Mapping[str, Any]) -> Result:
    """A run reply. A verdict that only the toolkit gives is refused, and so is a PASS whose own figures deny it."""
    verdict = _text(raw, "verdict")
    if verdict not in WORKER_VERDICTS:
        raise MalformedReply(f"result.verdict: {verdict!r} is not one of {', '.join(sorted(WORKER_VERDICTS))}")
    findings = tuple(_objects(raw, "findings")) if raw.get("findings") is not None else ()
    eta = _optional(raw, "eta", float)
    checks, reason = _optional(raw, "checks", int), _optional(raw, "reason", str)
    if verdict == PASS and findings:
        raise MalformedReply("result.verdict: PASS with findings")
    if verdict == PASS and eta is not None and not eta <= 1:
        raise MalformedReply(f"result.verdict: PASS with an error of {eta} times its bound")
    if verdict == PASS and (checks is None or checks <= 0):
        raise MalformedReply("result.verdict: PASS without a single check")
    seconds = raw.get("seconds")
    if seconds is not None and not isinstance(seconds, Mapping):
        raise MalformedReply("result.seconds must be an object")
    known = {"verdict", "reason", "eta", "findings", "notes", "reproducer", "seconds"}
    return Result(
        verdict=verdict,
        reason=None if reason is None else reason[:_MAX_REASON],
        eta=eta,
        findings=findings,
        notes=_texts(raw, "notes"),
        reproducer=_optional(raw, "reproducer", str),
        seconds=seconds,
        details={key: value for key, value in raw.items() if key not in known},
    )


def stored_result(raw: Mapping[str, Any]) -> Result:
    """A result as this toolkit wrote it into a run's record."""
    verdict = _text(raw, "verdict")
    if verdict not in VERDICTS:
        raise MalformedReply(f"verdict: {verdict!r} is not one of {', '.join(VERDICTS)}")
    return Result(
        verdict=verdict,
        reason=_optional(raw, "reason", str),
        eta=_optional(raw, "eta", float),
        findings=tuple(_objects(raw, "findings")),
        notes=_texts(raw, "notes"),
        reproducer=_optional(raw, "reproducer", str),
        seconds=raw.get("seconds"),
        details=raw.get("details"),
    )


def _subject(raw: Mapping[str, Any]) -> Subject:
    operation = _text(raw, "operation")
    moe, dense = _optional(raw, "moe", str), _optional(raw, "dense", str)
    expected = {"dense": (False, True), "moe": (True, False), "block": (True, True)}.get(operation)
    if expected != (moe is not None, dense is not None):
        raise MalformedReply(
            f"plan.subjects: {raw.get('id')!r} has operation {operation!r}, moe {moe!r}, dense {dense!r}"
        )
    servable = raw.get("servable")
    if not isinstance(servable, bool):
        raise MalformedReply(f"plan.subjects: servable of {raw.get('id')!r} must be true or false")
    return Subject(_text(raw, "id"), operation, moe, dense, _optional(raw, "unsupported", str), servable)


def _cell(raw: Mapping[str, Any]) -> Cell:
    cost = _optional(raw, "cost", float)
    if cost is None or not 0 <= cost < 1e12:
        raise MalformedReply(f"plan.cells: cost of {raw.get('id')!r} must be a number from 0")
    return Cell(_text(raw, "id"), _text(raw, "subject"), _optional(raw, "reference", str), cost, raw)


def _text(raw: Mapping[str, Any], key: str) -> str:
    value = raw.get(key)
    if not isinstance(value, str) or not value:
        raise MalformedReply(f"{key} must be a text, not {value!r:.80}")
    return value


def _texts(raw: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = raw.get(key)
    if value is None:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, str) or not all(isinstance(item, str) for item in value):
        raise MalformedReply(f"{key} must be a list of texts, not {value!r:.80}")
    return tuple(value)


def _objects(raw: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    value = raw.get(key)
    if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
        raise MalformedReply(f"{key} must be a list of objects, not {value!r:.80}")
    return value


def _optional(raw: Mapping[str, Any], key: str, kind: Callable[..., T]) -> T | None:
    value = raw.get(key)
    if value is None:
        return None
    accepted = (int, float) if kind is float else kind
    if isinstance(value, bool) or not isinstance(value, accepted):  # type: ignore[arg-type]  # kind is one of int, float, str
        raise MalformedReply(f"{key} must be a {getattr(kind, '__name__', kind)}, not {value!r:.80}")
    return kind(value)

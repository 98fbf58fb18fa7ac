"""The record that lets a benchmark start, and the one function that answers whether it may."""

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Self

from sm120.errors import UsageError
from sm120.files import lock, read_json, write_json_atomic
from sm120.matrix.fingerprint import Fingerprint, canonical, differences, digest
from sm120.matrix.plan import INCONCLUSIVE, PASS, MalformedReply
from sm120.matrix.verdict import WRONG
from sm120.runs import safe_name

SCHEMA: Final = 1
_OPENING_PROFILES: Final = ("default", "full")
"""``quick`` leaves out shapes and conditions: it tells that something is broken, never that all is well."""
_SHOWN: Final = 4


@dataclass(frozen=True, slots=True)
class PairVerdict:
    """What is known of one pair of backends. ``servable``: a server on the machine of the record can use it."""

    moe: str
    dense: str
    servable: bool
    verdict: str
    reason: str | None
    passed: int


@dataclass(frozen=True, slots=True)
class Gate:
    """One run of the matrix, as far as it matters to what comes after it."""

    fingerprint: Fingerprint
    profile: str
    seed: int
    only: tuple[str, ...]
    cases: tuple[str, ...]
    """Ids of the cells that ran to an answer."""
    backends: tuple[tuple[str, str], ...]
    """(subject id, verdict)."""
    pairs: tuple[PairVerdict, ...]
    reduced: tuple[str, ...]
    complete: bool
    """Whether every planned cell got its verdict; an interrupted run opens nothing."""
    run: str
    finished: str
    """UTC, ISO 8601."""

    def to_json(self) -> dict[str, Any]:
        """The file's content. ``cases_sha256`` guards the list against edits."""
        return {
            "schema": SCHEMA,
            "fingerprint": self.fingerprint.to_json(),
            "profile": self.profile,
            "seed": self.seed,
            "only": list(self.only),
            "cases": list(self.cases),
            "cases_sha256": digest(list(self.cases)),
            "backends": dict(self.backends),
            "pairs": [
                {
                    "moe": pair.moe,
                    "dense": pair.dense,
                    "servable": pair.servable,
                    "verdict": pair.verdict,
                    "reason": pair.reason,
                    "passed": pair.passed,
                }
                for pair in self.pairs
            ],
            "reduced": list(self.reduced),
            "complete": self.complete,
            "run": self.run,
            "finished": self.finished,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Inverse of `to_json`; MalformedReply names what is wrong."""
        if data.get("schema") != SCHEMA:
            raise MalformedReply(f"schema is {data.get('schema')!r}, this toolkit reads {SCHEMA}")
        try:
            cases = tuple(data["cases"])
            gate = cls(
                fingerprint=Fingerprint.from_json(data["fingerprint"]),
                profile=str(data["profile"]),
                seed=int(data["seed"]),
                only=tuple(data["only"]),
                cases=cases,
                backends=tuple(sorted((str(k), str(v)) for k, v in data["backends"].items())),
                pairs=tuple(_pair(pair) for pair in data["pairs"]),
                reduced=tuple(data["reduced"]),
                complete=data["complete"] is True,
                run=str(data["run"]),
                finished=str(data["finished"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise MalformedReply(f"{type(error).__name__}: {error}") from error
        if digest(list(cases)) != data.get("cases_sha256"):
            raise MalformedReply("cases_sha256 is not that of the cases")
        return gate


@dataclass(frozen=True, slots=True)
class Allowed:
    """The benchmark may start. ``notes`` is what the validation left out, to be stated beside its figures."""

    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Refused:
    """It may not."""

    reason: str


def may_start(
    gate: Gate | None, now: Fingerprint, moe_backend: str, fp4_backend: str, model: Mapping[str, Any]
) -> Allowed | Refused:
    """May a benchmark of ``model`` start with these backends, on the machine and stack that ``now`` describes?

    Yes only when this very pair passed, in a whole run of the default or full profile, with nothing changed since.
    """
    if gate is None:
        return Refused("no backend has been validated for this model on this machine")
    reason = _record_refuses(gate, now, model) or _pair_refuses(gate, moe_backend, fp4_backend)
    return Allowed(gate.reduced) if reason is None else Refused(reason)


def _record_refuses(gate: Gate, now: Fingerprint, model: Mapping[str, Any]) -> str | None:
    changed = differences(gate.fingerprint, now)
    if canonical(model) != now.model:
        reason = "the model to be served is not the one that the machine was asked about"
    elif changed or gate.fingerprint != now:
        rest = f", and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else ""
        reason = f"the validation is stale: {'; '.join(map(str, changed[:_SHOWN]))}{rest}"
    elif not gate.complete:
        reason = "the validation was interrupted"
    elif not gate.cases:
        reason = "the validation ran no cell to an answer"
    elif gate.only:
        reason = f"only a part was validated (--only {' '.join(gate.only)})"
    elif gate.profile not in _OPENING_PROFILES:
        reason = f"only the {gate.profile} profile was run, which is too little to open the gate"
    elif not now.gpus or any(not gpu.uuid or not gpu.capability for gpu in now.gpus):
        reason = "no GPU, or one that does not say which it is, was validated"
    else:
        return None
    return reason


def _pair_refuses(gate: Gate, moe: str, dense: str) -> str | None:
    name = f"{moe} with {dense}"
    pairs = [pair for pair in gate.pairs if (pair.moe, pair.dense) == (moe, dense)]
    if len(pairs) != 1:
        known = ", ".join(f"{p.moe} + {p.dense}" for p in gate.pairs if p.verdict == PASS and p.servable)
        return f"{name} was not validated; validated: {known or 'nothing'}"
    pair, own = pairs[0], dict(gate.backends)
    if pair.verdict != PASS:
        return f"{name} is {pair.verdict}: {pair.reason or 'no reason recorded'}"
    if not pair.servable:
        return f"no server on this machine can use {name}"
    if pair.passed <= 0 or (own.get(f"moe:{moe}"), own.get(f"dense:{dense}")) != (PASS, PASS):
        return f"{name}: the record contradicts itself"
    return None


def open_pairs(gate: Gate) -> tuple[PairVerdict, ...]:
    """The pairs with which a benchmark may start as long as nothing changes."""
    now, model = gate.fingerprint, json.loads(gate.fingerprint.model)
    return tuple(p for p in gate.pairs if isinstance(may_start(gate, now, p.moe, p.dense, model), Allowed))


def state_line(gate: Gate) -> str:
    """The last line of the task: what the gate says after it."""
    if pairs := open_pairs(gate):
        return f"gate open for {', '.join(f'{pair.moe} + {pair.dense}' for pair in pairs)}"
    if not gate.complete:
        return "gate closed: the run was interrupted"
    if gate.only:
        return "gate closed: only a part was checked (--only)"
    if not any(pair.servable and pair.passed for pair in gate.pairs):
        return "gate closed: no backend that a server here could use has been checked"
    if gate.profile not in _OPENING_PROFILES:
        return f"gate closed: the {gate.profile} profile is too little to open it"
    return "gate closed: no pair that a server here could use has passed"


def gate_path(folder: Path, model: Mapping[str, Any]) -> Path:
    """One file a model and tensor-parallel size."""
    return folder / f"{safe_name(str(model['name']))}-tp{model['tp']}.json"


def load(path: Path) -> Gate | None:
    """The record, or None where there is none. UsageError when the file is damaged or of another schema."""
    if not path.exists():
        return None
    data = read_json(path)
    try:
        if not isinstance(data, Mapping):
            raise MalformedReply("not an object")  # noqa: TRY301 - one place turns all of them into the user's error
        return Gate.from_json(data)
    except MalformedReply as error:
        raise UsageError(
            f"{path} is no gate record: {error}",
            where=str(path),
            remedy="scripts/inv validate-backends writes it anew",
        ) from error


def store(path: Path, new: Gate) -> Gate:
    """Writes a run's record and returns what is in force after it (see `combined`)."""
    with lock(path.with_suffix(".lock")):
        old: Gate | None = None
        with contextlib.suppress(UsageError):  # a damaged record vouches for nothing, so nothing of it is kept
            old = load(path)
        kept = combined(old, new)
        write_json_atomic(path, kept.to_json())
        return kept


def combined(old: Gate | None, new: Gate) -> Gate:
    """What is in force after a run. It replaces an earlier one, but

    - a part of the matrix (``--only``, quick, interrupted) cannot replace the whole on an unchanged machine;
    - pairs that it did not look at keep what is known of them on an unchanged machine;
    - whatever it found wrong takes a PASS away in either case.
    """
    if old is None or _partial(old) or old.fingerprint != new.fingerprint:
        return new
    found = dict(new.backends)
    wrong = {name: verdict for name, verdict in found.items() if verdict in (*WRONG, INCONCLUSIVE)}
    known = tuple(_without(pair, wrong, new.run) for pair in old.pairs)
    if _partial(new):
        backends = tuple((name, wrong.get(name, verdict)) for name, verdict in old.backends)
        return replace(old, backends=backends, pairs=known)
    looked_at = {(pair.moe, pair.dense) for pair in new.pairs}
    return replace(
        new,
        backends=tuple(sorted({**dict(old.backends), **found}.items())),
        pairs=new.pairs + tuple(pair for pair in known if (pair.moe, pair.dense) not in looked_at),
        cases=tuple(sorted({*old.cases, *new.cases})),
    )


def _partial(gate: Gate) -> bool:
    return bool(gate.only) or gate.profile not in _OPENING_PROFILES or not gate.complete


def _without(pair: PairVerdict, wrong: Mapping[str, str], run: str) -> PairVerdict:
    hit = next((name for name in _subjects(pair) if name in wrong), None)
    if hit is None:
        return pair
    return replace(pair, verdict=wrong[hit], reason=f"{hit} was {wrong[hit]} in {run}", passed=0)


def _subjects(pair: PairVerdict) -> tuple[str, str, str]:
    return f"moe:{pair.moe}", f"dense:{pair.dense}", f"block:{pair.moe}+{pair.dense}"


def _pair(raw: Mapping[str, Any]) -> PairVerdict:
    if not isinstance(raw["servable"], bool):
        raise MalformedReply("servable must be true or false")
    return PairVerdict(
        moe=str(raw["moe"]),
        dense=str(raw["dense"]),
        servable=raw["servable"],
        verdict=str(raw["verdict"]),
        reason=None if raw["reason"] is None else str(raw["reason"]),
        passed=int(raw["passed"]),
    )

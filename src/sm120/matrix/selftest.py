"""Who tests the tester: every known fault is injected into a right backend, and the judge must catch each of them and
accept every right variant. Beside it, what four published criteria would have said.
"""

import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sm120.console import Console
from sm120.errors import NothingChecked, NumericsError, PreflightError
from sm120.matrix.door import Door, greet
from sm120.matrix.lost import WorkerError, WorkerRefused
from sm120.matrix.plan import MalformedReply
from sm120.matrix.worker import Worker

FAULT, RIGHT = "fault", "right"


@dataclass(frozen=True, slots=True)
class Record:
    """One mutant or right variant under one seed. ``error`` is set where the worker gave no answer about it."""

    name: str
    kind: str
    operation: str
    seed: int
    caught: bool
    tiers: tuple[str, ...] = ()
    check: str | None = None
    eta: float | None = None
    criteria: Mapping[str, bool] = field(default_factory=dict)
    error: str | None = None

    @property
    def right(self) -> bool:
        """Whether the judge was right about it."""
        return self.error is None and self.caught == (self.kind == FAULT)


@dataclass(frozen=True, slots=True)
class Mutant:
    """All seeds of one mutant or variant."""

    name: str
    kind: str
    operation: str
    records: tuple[Record, ...]

    @property
    def right(self) -> bool:
        """Whether the judge was right about it under every seed."""
        return all(record.right for record in self.records)

    def accepted_by(self, criterion: str) -> int:
        """The number of seeds under which a published criterion would have accepted it."""
        return sum(record.criteria.get(criterion, False) for record in self.records)


def workers_for(cpus: int) -> int:
    """One process a core, two at most: a mutant's numpy and torch work fills the rest."""
    return max(1, min(2, cpus))


def run(door: Door, seeds: Sequence[int], workers: int, advance: Callable[[int, str], None]) -> list[Record]:
    """Every mutant under every seed. ``advance(total, name)`` is told of each one that is done."""
    control = door.open("self-test-0")
    try:
        greet(control)
        try:
            mutants = _list(control)
        except (WorkerError, WorkerRefused, MalformedReply) as error:
            raise PreflightError(f"the worker could not list its faults: {error}", where=str(control.log)) from error
        todo: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        for seed in seeds:
            for index in range(len(mutants)):
                todo.put((seed, index))
        total = len(mutants) * len(seeds)
        done: queue.SimpleQueue[Record | BaseException] = queue.SimpleQueue()
        lanes = [
            _Lane(door, number, mutants, todo, done, control if number == 0 else None) for number in range(workers)
        ]
        records: list[Record] = []
        try:
            for lane in lanes:
                lane.start()
            while len(records) < total:
                item = done.get()
                if isinstance(item, BaseException):
                    raise item
                records.append(item)
                advance(total, item.name)
        finally:
            for lane in lanes:
                lane.stop()
    finally:
        control.kill()
    order = {(mutant["operation"], mutant["name"]): number for number, mutant in enumerate(mutants)}
    return sorted(records, key=lambda record: (order[record.operation, record.name], record.seed))


class _Lane(threading.Thread):
    """One worker process that takes mutants until there are none, replaced when it is lost."""

    def __init__(
        self,
        door: Door,
        number: int,
        mutants: Sequence[Mapping[str, Any]],
        todo: "queue.SimpleQueue[tuple[int, int]]",
        done: "queue.SimpleQueue[Record | BaseException]",
        worker: Worker | None,
    ) -> None:
        super().__init__(name=f"self-test-{number}", daemon=True)
        self._door = door
        self._mutants = mutants
        self._todo = todo
        self._done = done
        self._worker = worker
        self._stopping = False

    def run(self) -> None:
        """Puts a record, or the exception that ends everything, for each mutant taken."""
        try:
            while not self._stopping:
                try:
                    seed, index = self._todo.get_nowait()
                except queue.Empty:
                    return
                self._done.put(self._one(seed, index))
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits
            self._done.put(error)

    def stop(self) -> None:
        """Ends thread and process."""
        self._stopping = True
        if (worker := self._worker) is not None:
            worker.kill()
        if self.ident is not None:
            self.join()
        if (worker := self._worker) is not None:  # one that was being started meanwhile
            worker.kill()

    def _one(self, seed: int, index: int) -> Record:
        listed = self._mutants[index]
        name, kind, operation = listed["name"], listed["kind"], listed["operation"]
        try:
            if self._worker is None:
                self._worker = self._door.open(self.name)
                greet(self._worker)
            return _record(self._worker.request("self-test", {"seed": seed, "index": index}), listed, seed)
        except (WorkerError, WorkerRefused, MalformedReply) as error:
            if isinstance(error, WorkerError):
                self._worker = None
            return Record(name, kind, operation, seed, caught=False, error=str(error))


def _list(worker: Worker) -> list[Mapping[str, Any]]:
    answer = worker.request("self-test", {"list": True}).get("mutants")
    if not isinstance(answer, list) or not all(
        isinstance(m, Mapping) and isinstance(m.get("name"), str) and m.get("kind") in (FAULT, RIGHT) for m in answer
    ):
        raise MalformedReply("self-test: the list of mutants is not one")
    mutants: list[Mapping[str, Any]] = [{"operation": "", **mutant} for mutant in answer]
    if len({(mutant["operation"], mutant["name"]) for mutant in mutants}) != len(mutants):
        raise MalformedReply("self-test: two mutants of one operation share a name")
    return mutants


def _record(raw: Mapping[str, Any], listed: Mapping[str, Any], seed: int) -> Record:
    caught, criteria, tiers, eta = raw.get("caught"), raw.get("criteria"), raw.get("tiers"), raw.get("eta")
    if raw.get("name") != listed["name"] or raw.get("kind") != listed["kind"]:
        raise MalformedReply(f"self-test: asked for {listed['name']}, got {raw.get('name')!r:.60}")
    if not isinstance(caught, bool) or not isinstance(criteria, Mapping) or not isinstance(tiers, list):
        raise MalformedReply(f"self-test: the record of {listed['name']} lacks caught, criteria or tiers")
    if not all(isinstance(verdict, bool) for verdict in criteria.values()):
        raise MalformedReply(f"self-test: a criterion of {listed['name']} is neither true nor false")
    first = raw.get("first")
    return Record(
        name=listed["name"],
        kind=listed["kind"],
        operation=listed["operation"],
        seed=seed,
        caught=caught,
        tiers=tuple(str(tier) for tier in tiers),
        check=str(first.get("check")) if isinstance(first, Mapping) else None,
        eta=float(eta) if isinstance(eta, int | float) and not isinstance(eta, bool) else None,
        criteria=dict(criteria),
    )


def gather(records: Sequence[Record]) -> list[Mutant]:
    """Records by mutant, in their order."""
    found: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        found.setdefault((record.operation, record.name), []).append(record)
    return [Mutant(name, own[0].kind, operation, tuple(own)) for (operation, name), own in found.items()]


def report(mutants: Sequence[Mutant], seeds: int, seconds: float) -> dict[str, Any]:
    """The JSON document. A mutant counts as missed when it escaped, or could not be judged, under any of the seeds."""
    faults = [mutant for mutant in mutants if mutant.kind == FAULT]
    variants = [mutant for mutant in mutants if mutant.kind == RIGHT]
    names = list(dict.fromkeys(name for m in mutants for record in m.records for name in record.criteria))
    return {
        "self_test": {
            "faults": len(faults),
            "missed": sum(not mutant.right for mutant in faults),
            "false_alarms": sum(not mutant.right for mutant in variants),
            "variants": len(variants),
            "errors": sum(record.error is not None for mutant in mutants for record in mutant.records),
            "seeds": seeds,
            "seconds": round(seconds, 1),
            "criteria": {
                name: {
                    "missed": sum(mutant.accepted_by(name) > 0 for mutant in faults),
                    "rejected_right": sum(mutant.accepted_by(name) < len(mutant.records) for mutant in variants),
                }
                for name in names
            },
            "mutants": [_mutant_json(mutant) for mutant in mutants],
        }
    }


def exit_code(document: Mapping[str, Any]) -> int:
    """0: all faults caught and no right variant rejected; 14: not so; 3: nothing was judged."""
    found = document["self_test"]
    if not found["faults"] and not found["variants"]:
        return NothingChecked.exit_code
    return NumericsError.exit_code if found["missed"] or found["false_alarms"] or found["errors"] else 0


def show(console: Console, mutants: Sequence[Mutant], document: Mapping[str, Any]) -> None:
    """The kill table and its summary."""
    found = document["self_test"]
    names = list(found["criteria"])
    for kind, title in ((FAULT, "Injected faults"), (RIGHT, "Right variants")):
        rows = [_row(mutant, names) for mutant in mutants if mutant.kind == kind]
        if rows:
            console.table(title, ["what", "operation", "judge", "by", "eta", *names], rows)
    for mutant in mutants:
        for record in mutant.records:
            if not record.right:
                why = record.error or ("not caught" if record.kind == FAULT else f"rejected by {record.check}")
                console.info(f"WRONG: {record.operation} {record.name} with seed {record.seed}: {why}")
    console.info(
        f"{found['faults'] - found['missed']} of {found['faults']} faults caught, {found['false_alarms']} of"
        f" {found['variants']} right variants rejected, {found['seeds']} seed(s), {found['seconds']} s"
    )
    for name, numbers in found["criteria"].items():
        console.info(
            f"  {name}: missed {numbers['missed']} of {found['faults']} faults,"
            f" rejected {numbers['rejected_right']} of {found['variants']} right variants"
        )


def _row(mutant: Mutant, criteria: Sequence[str]) -> list[str]:
    seeds = len(mutant.records)
    caught = sum(record.caught for record in mutant.records if record.error is None)
    word = {(FAULT, True): "caught", (RIGHT, True): "accepted", (FAULT, False): "MISSED", (RIGHT, False): "REJECTED"}
    judge = word[mutant.kind, mutant.right] + (f" {caught}/{seeds}" if seeds > 1 else "")
    etas = [record.eta for record in mutant.records if record.eta is not None]
    eta = "" if not etas else f"{min(etas) if mutant.kind == FAULT else max(etas):.4g}"
    by = next((f"{r.tiers[0]} {r.check or ''}".strip() for r in mutant.records if r.tiers), "")
    said = [_said(mutant.accepted_by(name), seeds) for name in criteria]
    return [mutant.name, mutant.operation, judge, by, eta, *said]


def _said(accepted: int, seeds: int) -> str:
    if accepted in (0, seeds):
        return "accepts" if accepted else "rejects"
    return f"accepts {accepted}/{seeds}"


def _mutant_json(mutant: Mutant) -> dict[str, Any]:
    return {
        "name": mutant.name,
        "kind": mutant.kind,
        "operation": mutant.operation,
        "right": mutant.right,
        "records": [
            {
                "seed": record.seed,
                "caught": record.caught,
                "tiers": list(record.tiers),
                "check": record.check,
                "eta": record.eta,
                "criteria": dict(record.criteria),
                "error": record.error,
            }
            for record in mutant.records
        ],
    }


def self_test(console: Console, door: Callable[[int], Door], first_seed: int, seeds: int) -> tuple[dict[str, Any], int]:
    """Runs, prints and returns the JSON document and the exit code. ``door`` is told how many workers will compute."""
    began = time.monotonic()
    workers = workers_for(len(os.sched_getaffinity(0)))
    with console.progress(100, "self-test") as progress:
        shown = 0

        def advance(total: int, name: str) -> None:
            nonlocal shown
            shown += 1
            before, after = 100 * (shown - 1) // total, 100 * shown // total
            progress.advance(after - before, f"{shown} of {total}: {name}")

        records = run(door(workers), range(first_seed, first_seed + seeds), workers, advance)
    mutants = gather(records)
    document = report(mutants, seeds, time.monotonic() - began)
    show(console, mutants, document)
    return document, exit_code(document)

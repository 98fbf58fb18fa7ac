"""``validate-backends``: which backends return right numbers on this machine, and may a benchmark start?"""

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from sm120 import config
from sm120.console import Console
from sm120.errors import Interrupted, NothingChecked, PreflightError, UsageError, nearest
from sm120.files import lock
from sm120.matrix import gate as gates
from sm120.matrix import grid, schedule, selftest, verdict
from sm120.matrix.door import Door, greet, stack_door
from sm120.matrix.fingerprint import Fingerprint, canonical, digest, patches_hash, take
from sm120.matrix.journal import FILE, Journal
from sm120.matrix.lost import WorkerError, WorkerRefused
from sm120.matrix.observer import Watcher
from sm120.matrix.options import DEFAULT_MODEL, DEFAULT_STACK, Options, check, is_given, request
from sm120.matrix.plan import MalformedReply, Plan, Request, read_plan
from sm120.matrix.resume import TASK, find_run, same_options, same_plan
from sm120.matrix.signals import one_interrupt
from sm120.matrix.worker import Worker
from sm120.runs import Run
from sm120.state import State


@dataclass(frozen=True, slots=True)
class Site:
    """Where workers come from: ``door(folder, workers)`` and the hash of what is installed there."""

    door: Callable[[Path, int], Door]
    stack: str


def validate_backends(options: Options) -> int:
    """The task. Returns its exit code; every other ending is a ToolkitError."""
    check(options)
    return perform(options, lambda console, state: _site(options, console, state))


def perform(options: Options, site: Callable[[Console, State], Site | None]) -> int:
    """`validate_backends` with the workers' origin given; ``site`` returns None where there is none to be had."""
    console, state = Console.current(), State.resolve()
    if options.self_test:
        return _self_test(options, console, state, site)
    if options.resume is not None:
        return _resume(options, console, state, site)
    asked, shapes = request(options)
    for note in shapes.notes:
        console.info(f"note: {note}")
    place = site(console, state)
    if place is None:
        return 0
    if options.list or options.dry_run:
        return _preview(options, asked, console, place)
    run = Run.start(state, TASK, _argv(options))
    return _recorded(run, lambda: _fresh(options, asked, console, state, place, run))


def _site(options: Options, console: Console, state: State) -> Site | None:
    from sm120.stack import ensure_environment, look, selected

    stack = options.stack or selected(state) or DEFAULT_STACK
    if options.dry_run or options.list:
        found, why = look(stack, state)
        if found is None:
            console.info(f"the stack {stack} would be installed first ({why}); what runs is known after that")
            console.info(f"to install it: scripts/inv setup --stack {stack}")
            return None
    environment = ensure_environment(stack, state, console)
    return Site(
        door=lambda folder, workers: stack_door(
            environment.python,
            folder,
            device=options.device,
            workers=workers,
            variables=environment.variables,
        ),
        stack=environment.fingerprint,
    )


@dataclass(frozen=True, slots=True)
class _Opened:
    """A worker that has greeted and planned, and what it said."""

    worker: Worker
    hello: Mapping[str, Any]
    plan: Plan
    raw: Mapping[str, Any]
    fingerprint: Fingerprint


def _open(door: Door, asked: Request, place: Site) -> _Opened:
    """Starts the first worker and asks for the plan. PreflightError or UsageError where that cannot be."""
    patches = patches_hash(config.CHECKOUT / "patches")
    worker = door.open("references")
    try:
        hello = greet(worker)
        raw = worker.request("plan", asked.to_json())
        return _Opened(worker, hello, read_plan(raw), raw, take(hello, asked.model, stack=place.stack, patches=patches))
    except WorkerRefused as error:
        worker.kill()
        _refused(error)
    except (WorkerError, MalformedReply) as error:
        worker.kill()
        raise PreflightError(
            f"the worker could not plan: {error}", where=str(worker.log), remedy=f"read {worker.log}"
        ) from error
    except BaseException:
        worker.kill()
        raise


def _refused(error: WorkerRefused) -> NoReturn:
    known = error.detail.get("known")
    if error.kind == "unknown-backend" and isinstance(known, list):
        name = str(error.detail.get("name") or error.message)
        raise UsageError(error.message, remedy=nearest(name, [str(item) for item in known])) from error
    raise PreflightError(f"the worker refused to plan: {error.kind}: {error.message}") from error


def _fresh(options: Options, asked: Request, console: Console, state: State, place: Site, run: Run) -> int:
    door = place.door(run.path, 2)
    with console.step("planning"):
        opened = _open(door, asked, place)
    try:
        _must_have_cells(asked, opened)
        header = {
            "request": asked.to_json(),
            "options": options.deciding(),
            "fingerprint": opened.fingerprint.to_json(),
            "plan": digest(opened.raw),
        }
        with Journal.create(run.path / FILE, header) as journal, lock(run.path / ".lock"):
            return _matrix(options, asked, console, state, place, run, opened, journal)
    finally:
        opened.worker.kill()


def _resume(options: Options, console: Console, state: State, site: Callable[[Console, State], Site | None]) -> int:
    run = find_run(state, options.resume or "last")
    if run.status == "running":
        raise UsageError(f"{run.id} is still running", where=str(run.path))
    with Journal.resume(run.path / FILE) as journal, lock(run.path / ".lock", timeout=0):
        options = same_options(options, journal.header)
        asked, _ = request(options)
        if canonical(asked.to_json()) != canonical(journal.header.get("request")):
            raise UsageError(f"cannot resume {run.id}: the shapes of {options.model or DEFAULT_MODEL} have changed")
        place = site(console, state)
        if place is None:
            raise PreflightError(f"cannot resume {run.id}: its stack is gone")
        opened = _open(place.door(run.path, 2), asked, place)
        try:
            same_plan(run, journal.header, opened.fingerprint, digest(opened.raw))
            left = len(opened.plan.cells) - len(journal.results)
            console.info(f"resuming {run.id}: {len(journal.results)} cells have a verdict, {left} are left")
            return _recorded(run, lambda: _matrix(options, asked, console, state, place, run, opened, journal))
        finally:
            opened.worker.kill()


def _matrix(
    options: Options,
    asked: Request,
    console: Console,
    state: State,
    place: Site,
    run: Run,
    opened: _Opened,
    journal: Journal,
) -> int:
    """Runs what is left, then judges, prints and records; after ^C it does the latter with what there is."""
    plan, notes, interrupted = opened.plan, list[str](), False
    patches = opened.fingerprint.patches
    with console.progress(100, "matrix") as progress:
        watcher = Watcher(plan, journal, console, progress)
        job = schedule.Job(
            plan=plan,
            door=place.door(run.path, 2),
            identity=lambda hello: take(hello, asked.model, stack=place.stack, patches=patches),
            observer=watcher,
        )
        try:
            with one_interrupt():
                schedule.run(job, opened.worker, opened.hello, journal.results)
            shutil.rmtree(run.path / schedule.REFERENCES, ignore_errors=True)  # large, and no longer needed
        except KeyboardInterrupt:
            interrupted = True
        notes += watcher.notes
    results = dict(journal.results)
    found = verdict.grid(plan, results, has_shared_expert=asked.model["moe"]["shared_intermediate"] is not None)
    repeat = grid.Repeat(
        model=options.model or DEFAULT_MODEL,
        tp=asked.model["tp"],
        seed=asked.seed,
        profile=asked.profile,
        stack=options.stack,
        device=options.device,
    )
    record = _record(opened, asked, run, found, results, complete=not interrupted)
    path = gates.gate_path(state.gate, asked.model)
    in_force = gates.store(path, record)
    code = verdict.exit_code(results.values(), found, require_servable=options.require_servable)
    grid.show(console, plan, results, found, repeat)
    for note in notes:
        console.info(f"note: {note}")
    document = {
        "schema": 1,
        "run": str(run.path),
        "complete": not interrupted,
        "summary": grid.summary(plan, results),
        "backends": {name: asdict(own) for name, own in found.backends.items()},
        "pairs": [asdict(pair) for pair in found.pairs],
        "failures": grid.failures(plan, results, repeat),
        "cells": {cell: result.verdict for cell, result in results.items()},
        "reduced": list(plan.reduced),
        "notes": notes,
        "gate": {"file": str(path), "state": gates.state_line(in_force)},
    }
    run.write_json("matrix.json", document)
    console.result(document)
    console.info(f"record: {run.path}")
    console.info(gates.state_line(in_force))
    if interrupted:
        raise Interrupted(
            f"interrupted with {len(results)} of {len(plan.cells)} cells done",
            remedy="scripts/inv validate-backends --resume last",
        )
    return code


def _record(
    opened: _Opened,
    asked: Request,
    run: Run,
    found: verdict.Grid,
    results: Mapping[str, Any],
    *,
    complete: bool,
) -> gates.Gate:
    return gates.Gate(
        fingerprint=opened.fingerprint,
        profile=asked.profile,
        seed=asked.seed,
        only=asked.only,
        cases=tuple(sorted(cell for cell, result in results.items() if result.verdict in verdict.RAN)),
        backends=tuple(sorted((name, own.word) for name, own in found.backends.items())),
        pairs=tuple(
            gates.PairVerdict(p.moe, p.dense, p.servable, p.verdict.word, p.verdict.reason, p.verdict.passed)
            for p in found.pairs
        ),
        reduced=opened.plan.reduced,
        complete=complete,
        run=run.id,
        finished=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _recorded(run: Run, body: Callable[[], int]) -> int:
    """Closes the run's manifest; an interrupted run stays open, so that it reads as interrupted and can be resumed."""
    try:
        code = body()
    except (KeyboardInterrupt, Interrupted):
        raise
    except BaseException as error:
        run.finish(getattr(error, "exit_code", 1), {"error": str(error)})
        raise
    run.finish(code, {"exit_code": code})
    return code


def _must_have_cells(asked: Request, opened: _Opened) -> None:
    if opened.plan.cells:
        return
    if not asked.only:
        reasons = "; ".join(f"{s.id}: {s.unsupported}" for s in opened.plan.subjects if s.unsupported)
        raise NothingChecked(f"there is nothing to run: {reasons or 'the plan is empty'}")
    every = read_plan(opened.worker.request("plan", replace(asked, only=()).to_json()))
    names = [cell.id for cell in every.cells]
    near = get_close_matches(asked.only[0], names, n=3, cutoff=0.3) or names[:3]
    raise NothingChecked(
        f"no cell matches --only {','.join(asked.only)}",
        remedy=f"cells are named like {', '.join(near)}" if near else "scripts/inv validate-backends --list",
    )


def _preview(options: Options, asked: Request, console: Console, place: Site) -> int:
    """--list and --dry-run: what would run here, and what could not."""
    with (
        tempfile.TemporaryDirectory(prefix="sm120-") as folder,
        _planned(place.door(Path(folder), 1), asked, place) as opened,
    ):
        plan = opened.plan
        rows = [
            [
                subject.id,
                "no" if subject.unsupported else "yes",
                "yes" if subject.servable else "no",
                len(plan.cells_of(subject.id)),
                subject.unsupported or "",
            ]
            for subject in plan.subjects
        ]
        console.table("Backends", ["subject", "usable here", "a server could use it", "cells", "reason"], rows)
        if options.dry_run or options.verbose:
            for cell in plan.cells:
                console.info(f"{cell.id}  (cost {cell.cost:g})")
        for note in plan.reduced:
            console.info(f"reduced: {note}")
        console.info(
            f"{len(plan.cells)} cells, {len({c.reference for c in plan.cells if c.reference})} references; none was run"
        )
        console.result(
            {
                "schema": 1,
                "request": asked.to_json(),
                "subjects": [asdict(subject) for subject in plan.subjects],
                "cells": [cell.id for cell in plan.cells],
                "reduced": list(plan.reduced),
            }
        )
    return 0


@contextlib.contextmanager
def _planned(door: Door, asked: Request, place: Site) -> Iterator[_Opened]:
    opened = _open(door, asked, place)
    try:
        yield opened
    finally:
        opened.worker.close()


def _self_test(options: Options, console: Console, state: State, site: Callable[[Console, State], Site | None]) -> int:
    place = site(console, state)
    if place is None:
        raise PreflightError("the self-test needs a stack")
    run = Run.start(state, "self-test", _argv(options))

    def body() -> int:
        with one_interrupt():
            document, code = selftest.self_test(
                console, lambda workers: place.door(run.path, workers), options.first_seed, options.seeds or 1
            )
        run.write_json("self-test.json", document)
        console.result(document)
        console.info(f"record: {run.path}")
        return code

    return _recorded(run, body)


def _argv(options: Options) -> list[str]:
    words = ["scripts/inv", TASK]
    for name, value in asdict(options).items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(flag)
        elif is_given(value):
            words += [flag, ",".join(value) if isinstance(value, tuple) else str(value)]
    return words

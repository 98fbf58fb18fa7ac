"""``doctor``: what this machine is, what is wrong with it, and what to type next. Changes nothing."""

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sm120 import config, errors, files, redact
from sm120.console import Console
from sm120.host import show
from sm120.host.codec import facts_to_json, load_facts
from sm120.host.facts import Facts
from sm120.host.findings import Finding, Severity
from sm120.runs import Run
from sm120.state import State

SCHEMA = 1
TASK = "doctor"


@dataclass(frozen=True, kw_only=True)
class Options:
    links: bool = False
    facts: Path | None = None
    save: Path | None = None
    stack: str = ""


def doctor(options: Options) -> None:
    """The task. Raises PreflightError when a finding refuses the machine, UsageError for a flag or a file."""
    _check(options)
    console = Console.current()
    state, run = _record(options, console)
    try:
        found = _examine(options, state, console, run)
    except errors.ToolkitError as error:
        _finish(run, error.exit_code, {"error": error.message})
        raise
    refused = [finding for finding in found if finding.severity is Severity.REFUSE]
    _finish(run, errors.PreflightError.exit_code if refused else 0, show.counts(found))
    if refused:
        raise errors.PreflightError(
            f"{len(refused)} {'finding refuses' if len(refused) == 1 else 'findings refuse'} this machine:"
            f" {', '.join(finding.id for finding in refused)}",
            where=str(options.facts) if options.facts else None,
            remedy=next((finding.cure for finding in refused if finding.cure), None),
        )


def _check(options: Options) -> None:
    if options.links and options.facts is not None:
        raise errors.UsageError(
            "--links measures this machine, --facts judges another one", remedy="leave one of the two out"
        )
    if options.stack and not options.links:
        raise errors.UsageError(
            "--stack says which stack checks the links, so it needs --links", remedy="add --links, or leave it out"
        )
    if options.save is not None and os.path.lexists(options.save):  # a dead link is not ours to replace either
        try:
            load_facts(options.save)
        except errors.UsageError as error:
            raise errors.UsageError(
                f"--save: {options.save} exists and is no facts file, so it is left alone ({error.message})",
                where=str(options.save),
                remedy="name a new file",
            ) from error


def _record(options: Options, console: Console) -> tuple[State, Run | None]:
    """The state folder and the run's record; no record where that cannot be written, because doctor runs anywhere."""
    settings = config.current()
    state = State(root=settings.state, runs=settings.runs)
    words = [f"--{name}={value}" for name, value in vars(options).items() if value]
    try:
        return state, Run.start(State.resolve(settings), TASK, [TASK, *words])
    except errors.ToolkitError as error:
        if options.links:
            raise
        console.info(f"no record is kept of this: {error.message}")
        return state, None


def _examine(options: Options, state: State, console: Console, run: Run | None) -> list[Finding]:
    from sm120.host.rules import judge

    facts = _facts(options, state, console)
    plain = redact.redact_json(facts_to_json(facts))
    _write(run, "facts.json", plain)
    if options.facts is not None:
        console.info(f"facts of {facts.collected}, from {options.facts}")
    show.picture(facts, console)
    found = show.ordered(judge(facts))
    document: dict[str, object] = {"schema": SCHEMA, "facts": plain}
    try:  # what was found so far is shown and kept, however saving and the check of the links end
        if options.save is not None:
            _save(options.save, plain, console)
        if options.links and run is not None:
            from sm120.host import links

            report = links.check(state, console, run, options.stack, facts=facts)
            document["links"] = report.as_json()
            found = show.ordered([*found, *report.findings()])
    finally:
        document["findings"] = as_json(found)
        _write(run, "findings.json", document["findings"])
        show.findings(found, console)
        console.result({**document, **show.counts(found)})
    return found


def _save(path: Path, plain: object, console: Console) -> None:
    try:
        files.write_json_atomic(path.resolve(), plain)  # a link stays one
    except errors.PreflightError as error:
        remedy = "name a file in a folder that can be written, and has room: --save FILE"
        raise errors.PreflightError(f"--save: {error.message}", where=error.where, remedy=remedy) from error
    console.info(f"the facts are in {path}; elsewhere: scripts/inv doctor --facts {shlex.quote(path.name)}")


def _facts(options: Options, state: State, console: Console) -> Facts:
    if options.facts is not None:
        return load_facts(options.facts)
    from sm120.host.gather import gather

    with console.step("reading this machine"):
        return gather(state, console)


def as_json(found: Sequence[Finding]) -> list[dict[str, object]]:
    return [
        {
            "id": finding.id,
            "severity": finding.severity.value,
            "what": finding.what,
            "read": list(finding.read),
            "why": finding.why,
            "cure": finding.cure,
        }
        for finding in found
    ]


def _write(run: Run | None, name: str, obj: object) -> None:
    if run is not None:
        run.write_json(name, obj)


def _finish(run: Run | None, exit_code: int, summary: Mapping[str, object]) -> None:
    if run is not None:
        run.finish(exit_code, summary)

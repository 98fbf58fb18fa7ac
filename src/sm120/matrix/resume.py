"""Going on with a run that was interrupted: only where it began, with what it began."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sm120.errors import ToolkitError, UsageError
from sm120.matrix.fingerprint import Difference, Fingerprint, differences
from sm120.matrix.journal import FILE
from sm120.matrix.options import Options
from sm120.matrix.plan import MalformedReply
from sm120.runs import Run
from sm120.state import State

TASK = "validate-backends"


def find_run(state: State, name: str) -> Run:
    """The run to go on with: ``last`` (the newest that was interrupted, else the newest), an id or a folder."""
    if name == "last":
        # Without a journal it ended before there was anything to go on with.
        folders = [f for f in sorted(state.runs.glob(f"*-{TASK}-*/"), reverse=True) if (f / FILE).exists()]
        runs = [run for run in map(_readable, folders) if run is not None]
        if not runs:
            raise UsageError("--resume: there is no run to go on with", where=str(state.runs))
        return next((run for run in runs if run.status == "interrupted"), runs[0])
    path = Path(name).expanduser()
    run = Run.open(path if path.is_dir() else state.runs / name)
    if run.task != TASK:
        raise UsageError(f"--resume: {run.id} is a run of {run.task}, not of {TASK}", where=str(run.path))
    return run


def _readable(folder: Path) -> Run | None:
    try:
        return Run.open(folder)
    except ToolkitError:  # a damaged run harms no other
        return None


def same_options(options: Options, header: Mapping[str, Any]) -> Options:
    """The recorded options with how to run from the new ones. UsageError when a flag contradicts the record."""
    recorded = header.get("options")
    if not isinstance(recorded, Mapping):
        raise UsageError("cannot resume: the journal does not say which options it was started with")
    before: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in recorded.items()
    }
    for name, value in options.deciding().items():
        if before.get(name) != value:
            flag = name.replace("_", "-")
            raise UsageError(
                f"cannot resume: --{flag} is {value!r}, the run was started with {before.get(name)!r}",
                remedy=f"leave --{flag} out, or start afresh without --resume",
            )
    try:
        return replace(options, **before)
    except TypeError as error:
        raise UsageError(f"cannot resume: {error}") from error


def same_plan(run: Run, header: Mapping[str, Any], now: Fingerprint, plan: str) -> None:
    """UsageError when anything changed since the run began; ``plan`` is the digest of the plan as it is now."""
    try:
        before = Fingerprint.from_json(header["fingerprint"])
    except (KeyError, TypeError, MalformedReply) as error:
        raise UsageError(f"cannot resume {run.id}: its journal is damaged: {error}") from error
    changed = list(differences(before, now))
    if not changed and header.get("plan") != plan:
        changed = [Difference("plan", str(header.get("plan"))[:12], plan[:12])]
    if changed:
        raise UsageError(
            f"cannot resume {run.id}: {'; '.join(map(str, changed[:4]))}",
            remedy="start afresh without --resume: verdicts of two states must not meet in one grid",
        )

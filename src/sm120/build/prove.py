"""Whether installed kernels are the ones that were built, import, and compute: each in a clean process."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import sm120
from sm120 import errors, files
from sm120.build.install import rollback
from sm120.build.wheel import RECORD, Built
from sm120.console import Console
from sm120.process import run as run_process
from sm120.runs import Run
from sm120.stack.install import exchange, record, verify
from sm120.stack.install.installer import clean_environment
from sm120.stack.install.record import Environment
from sm120.stack.install.verify import Outcome, Proof
from sm120.state import State

OPERATION = Path(sm120.__file__).parents[1] / "sm120_cells" / "operation.py"
_SAID = "tried "


def prove_or_roll_back(built: Built, environment: Environment, state: State, run: Run, console: Console) -> Proof:
    """As ``prove``; what fails is taken out again before BinaryError says so."""
    try:
        return prove(built, environment, state, run)
    except errors.BinaryError as error:
        try:
            back = rollback(environment, state, run, console)
        except errors.ToolkitError as second:
            raise errors.BinaryError(
                f"{error.message}; and it could not be taken out again: {second.message}",
                where=error.where,
                remedy=second.remedy or error.remedy,
            ) from error
        raise errors.BinaryError(
            f"{error.message}; it was taken out again: {environment.name} has {back.after or 'no kernels'}, as before",
            where=error.where,
            remedy=error.remedy,
        ) from error


def prove(built: Built, environment: Environment, state: State, run: Run) -> Proof:
    """Imports what was installed and, on a card of compute capability 12.x, computes with it.

    OK says in its detail what was not tried here. SKIPPED: only the driver's library is missing. Raises BinaryError.
    """
    env = {**clean_environment(), **environment.variables}
    log = run.log_path("prove")
    with exchange.alone(environment.name, state) as held:
        _check_installed(built, environment)
        (proof,) = verify.prove((), (built.module,), environment.python, env, run, held)
        if proof.outcome is Outcome.FAILED:
            raise _failed(built, f"does not import: {proof.detail}", log)
        if proof.outcome is Outcome.SKIPPED:
            return replace(proof, detail=f"not proven on this machine: {proof.detail}")
        argv = [str(environment.python), "-I", str(OPERATION), built.module]
        done = run_process(argv, env=env, timeout=verify.PROVE_SECONDS, log=log, pass_fds=(held,))
        run.record_command(done, env=env)
    said = next((line for line in reversed(done.tail) if line.startswith(_SAID)), None)
    if said is None or done.returncode:
        last = next((line for line in reversed(done.tail) if line.strip()), "no output")
        raise _failed(built, f"imports, but its first operator did not end well: {last}", log)
    return judged(built, environment, proof, json.loads(said.removeprefix(_SAID)), log)


def judged(built: Built, environment: Environment, proof: Proof, said: Mapping[str, Any], log: Path) -> Proof:
    """The verdict on what the operator's process said. Raises BinaryError."""
    site = record.site_packages(environment.python.parents[1]).resolve()
    if not Path(said["file"]).resolve().is_relative_to(site):
        raise _failed(built, f"is installed in {site}, but {said['file']} is imported", log)
    facts = {**proof.facts, **said}
    if said["card"] is None:
        return replace(proof, detail=f"{proof.detail} imports; no card here to compute on", facts=facts)
    card = f"{said['card']} ({'.'.join(str(part) for part in said['capability'])})"
    if "op" not in said:
        return replace(proof, detail=f"{proof.detail} imports; not run on {card}: its code is for 12.x", facts=facts)
    if said["op"] is None:
        return replace(proof, detail=f"{proof.detail} imports; it has no operator that is known here", facts=facts)
    if said["off"] is None or said["off"] > 1:
        how = said["why"] if said["off"] is None else f"off by {said['off']:.3g} times what rounding allows"
        raise _failed(built, f"imports, but {said['op']} on {card} is wrong: {how}", log)
    return replace(proof, detail=f"{proof.detail} imports; {said['op']} is right on {card}", facts=facts)


def _check_installed(built: Built, environment: Environment) -> None:
    path = record.site_packages(environment.python.parents[1]) / built.module / RECORD
    try:
        found = files.read_json(path)
    except errors.UsageError as error:
        raise _failed(built, f"is not what is installed: {error.message}", path) from error
    if not isinstance(found, dict) or found.get("identity") != built.record.get("identity"):
        raise _failed(built, "is not what is installed: the record there is another's", path)


def _failed(built: Built, what: str, where: Path) -> errors.BinaryError:
    return errors.BinaryError(
        f"{built.name} {built.version} {what}",
        where=str(where),
        remedy="the log has the whole of it; what loads elsewhere, but not here, was built against another torch",
    )

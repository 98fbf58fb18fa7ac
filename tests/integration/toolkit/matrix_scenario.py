"""Scenarios for the fake worker, and a matrix run on them. Imported by the tests beside it."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sm120 import config
from sm120.console import Console
from sm120.matrix.command import Site, perform
from sm120.matrix.door import Door
from sm120.matrix.options import Options
from sm120.matrix.worker import Limits

FAKE = Path(__file__).with_name("fake_worker.py")
PATIENT = Limits(start=60, quiet=60, total=60, grace=0.5, leave=1)


def subject(operation: str, moe: str | None, dense: str | None, **more: Any) -> dict[str, Any]:
    name = "+".join(part for part in (moe, dense) if part)
    base = {"id": f"{operation}:{name}", "operation": operation, "moe": moe, "dense": dense}
    return {**base, "unsupported": None, "servable": True, **more}


def cell(owner: str, name: str, **more: Any) -> dict[str, Any]:
    case = {"name": name}
    path = owner.replace(":", "/")
    return {"id": f"{path}/{name}", "subject": owner, "case": case, "reference": f"r-{name}", "cost": 1.0, **more}


@dataclass
class Scenario:
    """Two MoE backends, two dense ones, their pairs, two cells each; ``do`` says who misbehaves."""

    folder: Path
    do: Mapping[str, str] = field(default_factory=dict)
    limits: Limits = PATIENT
    hello: Mapping[str, Any] = field(default_factory=dict)
    subjects: Sequence[Mapping[str, Any]] = (
        subject("dense", None, "a"),
        subject("dense", None, "b"),
        subject("moe", "x", None),
        subject("moe", "y", None),
        subject("block", "x", "a"),
        subject("block", "x", "b"),
        subject("block", "y", "a"),
        subject("block", "y", "b"),
    )
    mutants: Sequence[Mapping[str, Any]] = ()
    seconds: float = 0.0
    reduced: Sequence[str] = ()

    @property
    def trace(self) -> Path:
        return self.folder / "trace"

    @property
    def cells(self) -> list[dict[str, Any]]:
        return [cell(s["id"], f"c{n}") for s in self.subjects if s["unsupported"] is None for n in (1, 2)]

    def write(self) -> Path:
        path = self.folder / "scenario.json"
        content = {
            "trace": str(self.trace),
            "do": dict(self.do),
            "hello": dict(self.hello),
            "subjects": list(self.subjects),
            "cells": self.cells,
            "mutants": list(self.mutants),
            "seconds": self.seconds,
            "reduced": list(self.reduced),
        }
        path.write_text(json.dumps(content))
        return path

    def door(self, folder: Path) -> Door:
        return Door((sys.executable, "-I", "-S", str(FAKE), str(self.write())), folder, limits=self.limits)

    def requests(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.trace.read_text().splitlines()] if self.trace.exists() else []


@dataclass(frozen=True)
class Outcome:
    code: int
    document: Mapping[str, Any]

    @property
    def cells(self) -> Mapping[str, str]:
        found: Mapping[str, str] = self.document["cells"]
        return found


def settle(folder: Path) -> None:
    """Makes ``folder`` the home of state and runs."""
    config.use(config.Settings(home=folder, state=folder / "state", runs=folder / "runs"))


def perform_in(scenario: Scenario, options: Options) -> Outcome:
    """One run of the task on the fake worker. Its --json document is read back from the run's record."""
    console = Console.create(json=options.json)
    code = perform(options, lambda console, state: Site(lambda folder, workers: scenario.door(folder), "stack"))
    return Outcome(code, console._result or {})

"""``dev.bench matrix``: what the matrix costs beyond the kernels, and what isolation costs.

The same cells are run three ways, side by side in alternation: one process a backend (as the matrix does), one process
a cell, and one process for all. References are computed beforehand and count apart. Times are of this machine, at this
moment; what carries over is their ratio.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from sm120.console import Console
from sm120.errors import NumericsError
from sm120.matrix.door import Door, greet, stack_door
from sm120.matrix.plan import PASS, Cell, Plan, Request, read_plan, read_result
from sm120.stack import ensure_environment, load_stack
from sm120.state import State

ROUNDS = 3
SUMMARY = "cells a second, time outside kernels and references, cost of a process a backend and a cell"
MODEL: dict[str, Any] = {
    "name": "bench",
    "tp": 1,
    "hidden": 1024,
    "moe": {
        "experts": 16,
        "top_k": 4,
        "intermediate": 512,
        "shared_intermediate": 512,
        "shared_gate": True,
        "activation": {"kind": "silu", "limit": None, "alpha": 1.0, "beta": 0.0},
        "routed_scaling": 1.0,
    },
    "dense": [{"name": "qkv_proj", "n": 1024, "k": 1024}],
}


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one way of running all cells; kernel is the time inside backends, judge that of comparing."""

    wall: float
    kernel: float
    judge: float


def matrix(console: Console) -> dict[str, object]:
    """Measures and prints; NumericsError when a cell does not pass, since then nothing comparable was done."""
    environment = ensure_environment(load_stack("cpu"), State.resolve(), console)
    with tempfile.TemporaryDirectory(prefix="sm120-bench-") as name:
        folder = Path(name)
        door = stack_door(environment.python, folder, workers=1)
        plan, references, reference_seconds = _prepare(door, folder, console)
        ways: dict[str, Callable[[], Iterable[Sequence[Cell]]]] = {
            "one process a backend": lambda: (list(group) for _, group in groupby(plan.cells, lambda c: c.subject)),
            "one process a cell": lambda: ([cell] for cell in plan.cells),
            "one process for all": lambda: [plan.cells],
        }
        timings: dict[str, list[Timing]] = {way: [] for way in ways}
        for number in range(1, ROUNDS + 1):
            for way, groups in ways.items():
                with console.step(f"{way}, {number} of {ROUNDS}"):
                    timings[way].append(_run(door, groups(), references))
    return _report(console, len(plan.cells), reference_seconds, timings)


def _prepare(door: Door, folder: Path, console: Console) -> tuple[Plan, dict[str, Path], float]:
    with console.step("references"), door.open("bench") as worker:
        greet(worker)
        request = Request(profile="quick", model=MODEL, seed=0, only=("*/torch_dequant*",))
        plan = read_plan(worker.request("plan", request.to_json()))
        references: dict[str, Path] = {}
        seconds = 0.0
        for cell in plan.cells:
            if cell.reference is None or cell.reference in references:
                continue
            path = folder / f"{cell.reference}.ref"
            body = {"key": cell.reference, "case": cell.raw["case"], "path": str(path)}
            seconds += float(worker.request("reference", body)["seconds"])
            references[cell.reference] = path
    return plan, references, seconds


def _run(door: Door, groups: Iterable[Sequence[Cell]], references: dict[str, Path]) -> Timing:
    started = time.perf_counter()
    kernel = judge = 0.0
    for cells in groups:
        with door.open("bench") as worker:
            greet(worker)
            for cell in cells:
                reference = None if cell.reference is None else str(references[cell.reference])
                body = {"cell": dict(cell.raw), "reference": reference, "reproducer": None}
                result = read_result(worker.request("run", body))
                if result.verdict != PASS:
                    raise NumericsError(f"{cell.id} is {result.verdict}: {result.reason}")
                kernel += (result.seconds or {}).get("kernel", 0.0)
                judge += (result.seconds or {}).get("judge", 0.0)
    return Timing(time.perf_counter() - started, kernel, judge)


def _report(
    console: Console, cells: int, reference_seconds: float, timings: dict[str, list[Timing]]
) -> dict[str, object]:
    base = statistics.median(t.wall for t in timings["one process for all"])
    rows: list[tuple[str, ...]] = []
    result: dict[str, object] = {"cells": cells, "rounds": ROUNDS, "reference_seconds": reference_seconds}
    for way, runs in timings.items():
        wall = statistics.median(t.wall for t in runs)
        outside = statistics.median(1 - t.kernel / t.wall for t in runs)
        judging = statistics.median(t.judge / t.wall for t in runs)
        spread = f"{min(t.wall for t in runs):.1f}-{max(t.wall for t in runs):.1f}"
        rows.append(
            (
                way,
                f"{cells / wall:.2f}",
                f"{wall:.1f} ({spread})",
                f"{wall / base:.2f}",
                f"{outside:.0%}",
                f"{judging:.0%}",
            )
        )
        result[way.replace(" ", "_")] = {
            "cells_a_second": cells / wall,
            "seconds": [t.wall for t in runs],
            "ratio_to_one_process_for_all": wall / base,
            "share_outside_kernels": outside,
            "share_judging": judging,
        }
    console.table(
        f"{cells} cells; references {reference_seconds:.1f} s, computed once and not counted below",
        ("isolation", "cells a second", "seconds (span)", "ratio", "outside kernels", "of it judging"),
        rows,
    )
    return result

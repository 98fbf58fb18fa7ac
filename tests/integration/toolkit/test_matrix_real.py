"""The matrix with the real worker, the CPU stack and backends that misbehave: every verdict falls where it belongs."""

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sm120 import config
from sm120.console import Console
from sm120.matrix.command import Site, perform
from sm120.matrix.door import Door, stack_door
from sm120.matrix.options import Options
from sm120.matrix.worker import Limits
from sm120.stack import ensure_environment, load_stack
from sm120.state import State

BACKENDS = Path(__file__).parents[1] / "cells" / "plugins" / "misbehaving.py"
NAMES = ("killed", "hangs", "writes_nan", "fine")


def test_a_backend_that_dies_hangs_or_writes_nan_costs_its_own_cell_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    console = Console.create()
    python = ensure_environment(load_stack("cpu"), State.resolve(), console).python
    monkeypatch.setattr(config, "_current", config.resolve({}, {"SM120_HOME": str(tmp_path)}))
    monkeypatch.setenv("SM120_BACKENDS", str(BACKENDS))

    def door(folder: Path, workers: int) -> Door:
        made = stack_door(python, folder, device="cpu", workers=workers)
        return replace(made, limits=Limits(start=120, quiet=15, total=120, grace=0.5))

    options = Options(
        model="Qwen3-30B-A3B",
        quick=True,
        fp4_backends=NAMES,
        moe_backends=("sm120_model",),
        only=("dense/*/exact-*", "dense/*/repeat*"),
    )
    assert perform(options, lambda console, state: Site(door, "test")) == 14
    document: dict[str, Any] = dict(console._result or {})
    verdicts = {cell: verdict for cell, verdict in document["cells"].items() if cell.startswith("dense/")}
    assert {(c.split("/")[1], c.split("/")[2].partition("-")[0]): v for c, v in verdicts.items()} == {
        ("killed", "exact"): "CRASH",
        ("killed", "repeat"): "PASS",
        ("hangs", "exact"): "HANG",
        ("hangs", "repeat"): "PASS",
        ("writes_nan", "exact"): "FAIL",
        ("writes_nan", "repeat"): "PASS",
        ("fine", "exact"): "PASS",
        ("fine", "repeat"): "PASS",
    }
    (failure,) = [f for f in document["failures"] if f["verdict"] == "FAIL"]
    assert "row 2" in failure["reason"] or "rows 2" in failure["reason"]
    assert "M = 5 of" in failure["reason"]
    words = [python, "-I", failure["reproducer"]]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "[2, 3] got None" in done.stdout

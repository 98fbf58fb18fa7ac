"""Verdicts of the worker for what a machine, not a backend, is to blame for."""

import pytest
import torch

from sm120_cells import plan, worker

MODEL = {
    "name": "tiny",
    "hidden": 64,
    "moe": {
        "experts": 4,
        "top_k": 2,
        "intermediate": 32,
        "shared_intermediate": None,
        "activation": {"kind": "silu", "limit": None, "alpha": 1.0, "beta": 0.0},
    },
    "dense": [],
}


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"), "INCONCLUSIVE"),
        (torch.OutOfMemoryError("CUDA out of memory"), "INCONCLUSIVE"),
        (RuntimeError("misaligned address"), "FAIL"),
    ],
)
def test_a_machine_without_memory_is_no_fault_of_the_backend(
    monkeypatch: pytest.MonkeyPatch, error: Exception, verdict: str
) -> None:
    made = plan.make_plan(plan.Shapes.from_json(MODEL), "quick", torch.device("cpu"), dense=["torch_dequant"])
    cell = next(c for c in made["cells"] if c["id"].startswith("dense/torch_dequant/exact"))

    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(worker, "_subject", refuse)
    assert worker.run_cell(cell, torch.device("cpu"), None).verdict == verdict

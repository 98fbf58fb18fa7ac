"""The judge on CUDA tensors: the whole self-test, and the matrix's cells through a worker on the GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sm120_cells.faults import Mutant, catalogue
from sm120_cells.selftest import judge_mutant

pytestmark = pytest.mark.gpu

SRC = Path(__file__).parents[2] / "src"
MODEL = {
    "name": "small",
    "tp": 1,
    "hidden": 1024,
    "moe": {
        "experts": 64,
        "top_k": 6,
        "intermediate": 512,
        "shared_intermediate": 512,
        "shared_gate": True,
        "activation": {"kind": "silu", "limit": None, "alpha": 1.0, "beta": 0.0},
        "routed_scaling": 2.5,
    },
    "dense": [{"name": "qkv_proj", "n": 1536, "k": 1024}],
}


@pytest.mark.parametrize("mutant", catalogue(), ids=lambda m: f"{m.operation}-{m.kind}-{m.name}".replace(" ", "_"))
def test_every_fault_is_caught_and_every_right_variant_accepted(mutant: Mutant) -> None:
    judgement = judge_mutant(mutant, seed=0, device=torch.device("cuda", 0))
    assert judgement.cells
    assert judgement.right, judgement.first


def test_the_matrix_passes_through_a_worker(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "sm120_cells.worker", "--device", "cuda"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(SRC)},
    ) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None

        def ask(number: int, **request: object) -> dict[str, object]:
            assert worker.stdin is not None
            assert worker.stdout is not None
            worker.stdin.write(json.dumps({"id": number, **request}) + "\n")
            worker.stdin.flush()
            while True:
                reply = json.loads(worker.stdout.readline())
                if "event" not in reply:
                    assert reply["ok"], reply
                    result: dict[str, object] = reply["result"]
                    return result

        hello = ask(1, op="hello")
        device = hello["device"]
        assert isinstance(device, dict)
        assert device["type"] == "cuda"
        assert tuple(device["capability"]) == torch.cuda.get_device_capability(0)
        assert device["uuid"].startswith("GPU-")
        assert device["driver"]
        cells = ask(2, op="plan", profile="quick", model=MODEL, seed=0)["cells"]
        assert isinstance(cells, list)
        assert cells
        failed = {}
        for number, cell in enumerate(cells, start=3):
            result = ask(number, op="run", cell=cell)
            if result["verdict"] != "PASS":
                failed[cell["id"]] = result["reason"]
            assert result["kernels"], "the profiler saw no kernel run on the GPU"
        assert not failed

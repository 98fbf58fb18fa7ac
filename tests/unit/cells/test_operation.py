"""The operator that proves a kernel package: what is right passes in every form, what is wrong does not."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

from sm120_cells import operation

Function = Callable[[torch.Tensor], torch.Tensor]


def gated(act: Function, dtype: torch.dtype = torch.float32) -> Function:
    """As kernels compute it: in this type, rounded once at the end."""

    def compute(x: torch.Tensor) -> torch.Tensor:
        left, right = x.to(dtype).chunk(2, dim=-1)
        return (act(left) * right).to(x.dtype)

    return compute


RIGHT: dict[str, Function] = {
    "silu_and_mul": gated(functional.silu),
    "gelu_and_mul": gated(functional.gelu),
    "gelu_tanh_and_mul": gated(lambda x: functional.gelu(x, approximate="tanh")),
}


def off(name: str, function: Function) -> Any:
    found = operation.compare(SimpleNamespace(**{name: function}), "cpu")
    assert found["op"] == name
    return found["off"]


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_passes(name: str) -> None:
    assert off(name, RIGHT[name]) <= 1


def test_the_ways_that_kernels_write_it_pass() -> None:
    assert off("silu_and_mul", gated(lambda x: x / (1 + torch.exp(-x)))) <= 1
    assert off("silu_and_mul", gated(lambda x: x * torch.sigmoid(x), torch.float64)) <= 1
    assert off("silu_and_mul", gated(functional.silu, torch.bfloat16)) <= 1
    tanh = gated(lambda x: 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x**3)) * (1 + 2**-11)))
    assert off("gelu_tanh_and_mul", tanh) <= 1


WRONG: dict[str, Function] = {
    "the other half": lambda x: RIGHT["silu_and_mul"](x.roll(x.shape[-1] // 2, dims=-1)),
    "another function": RIGHT["gelu_and_mul"],
    "one row not written": lambda x: torch.cat(
        [RIGHT["silu_and_mul"](x)[:-1], torch.zeros_like(x[:1]).chunk(2, -1)[0]]
    ),
    "one number off": lambda x: RIGHT["silu_and_mul"](x).index_fill(1, torch.tensor([1023]), 0.25),
    "zeros": lambda x: torch.zeros_like(x).chunk(2, dim=-1)[0],
}


@pytest.mark.parametrize("how", WRONG)
def test_what_is_wrong_does_not(how: str) -> None:
    assert off("silu_and_mul", WRONG[how]) > 1


def test_what_is_no_number_or_of_another_shape() -> None:
    assert off("silu_and_mul", lambda x: RIGHT["silu_and_mul"](x) * float("nan")) is None
    assert off("silu_and_mul", lambda x: x) is None


def test_the_first_known_operator_is_taken() -> None:
    assert operation.compare(SimpleNamespace(**RIGHT), "cpu")["op"] == "silu_and_mul"
    assert operation.compare(SimpleNamespace(other=1), "cpu") == {"op": None}


def test_it_runs_alone_and_says_what_it_found(tmp_path: Path) -> None:
    package = tmp_path / "kernels_of_mine"
    package.mkdir()
    (package / "__init__.py").write_text("")
    script = f"import runpy, sys; sys.path.insert(0, {str(tmp_path)!r}); sys.argv = ['-', 'kernels_of_mine']"
    script += f"; runpy.run_path({operation.__file__!r}, run_name='__main__')"
    env = {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-I", "-c", script], capture_output=True, text=True, check=True, env=env)
    said = json.loads(done.stdout.splitlines()[-1].removeprefix("tried "))
    assert said == {"file": str(package / "__init__.py"), "card": None, "capability": None}

"""The verdict on installed kernels: what the process that computed with them said."""

from pathlib import Path
from typing import Any

import pytest

from sm120 import errors
from sm120.build.prove import OPERATION, judged
from sm120.build.wheel import Built
from sm120.stack import Environment
from sm120.stack.install.verify import Outcome, Proof

BUILT = Built(
    path=Path("/k/w.whl"), name="sgl-kernel", version="0.3.21+sm120.a", sha256="", record={}, module="sgl_kernel"
)
IMPORTED = Proof(module="sgl_kernel", outcome=Outcome.OK, detail="0.3.21", facts={})
RIGHT = {"card": "RTX 5090", "capability": [12, 0], "op": "silu_and_mul", "off": 0.5}


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    site = tmp_path / "env" / "lib" / "python3.12" / "site-packages"
    site.mkdir(parents=True)
    return Environment("mine", tmp_path / "env/bin/python", tmp_path / "env/record.json", "f", fresh=False)


def judge(environment: Environment, **said: Any) -> Proof:
    file = environment.python.parents[1] / "lib/python3.12/site-packages/sgl_kernel/__init__.py"
    return judged(BUILT, environment, IMPORTED, {"file": str(file)} | said, Path("/runs/prove.log"))


@pytest.mark.parametrize(
    ("said", "detail"),
    [
        (RIGHT, "0.3.21 imports; silu_and_mul is right on RTX 5090 (12.0)"),
        ({**RIGHT, "off": 1.0}, "0.3.21 imports; silu_and_mul is right on RTX 5090 (12.0)"),
        ({**RIGHT, "capability": [12, 1]}, "0.3.21 imports; silu_and_mul is right on RTX 5090 (12.1)"),
        ({"card": None, "capability": None}, "0.3.21 imports; no card here to compute on"),
        (
            {"card": "H200", "capability": [9, 0]},
            "0.3.21 imports; not run on H200 (9.0): its code is for 12.x",
        ),
        ({**RIGHT, "op": None}, "0.3.21 imports; it has no operator that is known here"),
    ],
)
def test_what_was_not_tried_is_said(environment: Environment, said: dict[str, Any], detail: str) -> None:
    proof = judge(environment, **said)
    assert (proof.outcome, proof.detail) == (Outcome.OK, detail)
    assert proof.facts["card"] == said["card"]


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"off": 1.01}, r"silu_and_mul on RTX 5090 \(12\.0\) is wrong: off by 1\.01 times what rounding allows"),
        ({"off": None, "why": "it is no number"}, "is wrong: it is no number"),
    ],
)
def test_wrong_numbers_are_a_failure(environment: Environment, said: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.BinaryError, match=message) as raised:
        judge(environment, **(RIGHT | said))
    assert raised.value.exit_code == 13
    assert raised.value.where == "/runs/prove.log"


def test_another_copy_that_is_imported_is_a_failure(environment: Environment) -> None:
    with pytest.raises(errors.BinaryError, match=r"but /elsewhere/sgl_kernel/__init__\.py is imported"):
        judge(environment, **RIGHT, file="/elsewhere/sgl_kernel/__init__.py")


def test_what_computes_is_there() -> None:
    assert OPERATION.is_file()

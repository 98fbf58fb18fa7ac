"""Operators: schemas among the constants of a library, calls in Python, files that stand in for libraries."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sm120.build.audit.operators import Calls, calls, schema_name
from sm120.build.patches.rules import standin


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (b"rmsnorm(Tensor! output, Tensor input, float eps) -> ()", "rmsnorm"),
        (b"launches() -> int", "launches"),
        (b"fwd(Tensor   q,\n  Tensor?  k_new) -> Tensor[]", "fwd"),
        (b"sgl_kernel::all_reduce(int fa, Tensor inp) -> ()", "all_reduce"),
        (b"topk.out(Tensor x) -> Tensor", "topk"),
        (b"f(Tensor a) -> (Tensor, Tensor)", "f"),
        (b"\x01\xff\x00"[:2] + b"after_numbers(int a) -> int", "after_numbers"),
        (b"expected f(x) -> y", None),
        (b"({%}, {int}) -> None", None),
        (b"(Tensor) -> Tensor", None),
        (b"name only", None),
        (b"a -> b(c)", None),
        (b"f(x", None),
        (b"f(x) y -> z", None),
        (b"", None),
    ],
)
def test_schemas(text: bytes, name: str | None) -> None:
    assert schema_name(text) == name


@given(st.binary(max_size=200))
def test_any_bytes_are_a_schema_or_not(text: bytes) -> None:
    name = schema_name(text)
    assert name is None or name.isidentifier()


def test_calls_of_operators() -> None:
    source = """
import torch
from torch import Tensor

def f(x):
    torch.ops.sgl_kernel.rmsnorm.default(x)
    torch.ops.sgl_kernel.rmsnorm(x)
    torch.ops.load_library("x")
    return torch.ops.other.add(x), torch.opsy.no.no(x), self.ops.a.b(x), torch.ops.sgl_kernel.__dict__
"""
    found = calls([("k/a.py", source), ("k/b.py", "import torch\ntorch.ops.sgl_kernel.rmsnorm(1)\n")])
    assert found == Calls(files={("sgl_kernel", "rmsnorm"): "k/a.py", ("other", "add"): "k/a.py"}, stood_in=frozenset())


@pytest.mark.parametrize("text", ["torch.ops.a.b(", "torch\0", "torch " + "(" * 5000, "print 'torch'"])
def test_files_that_are_no_python_are_passed_over(text: str) -> None:
    assert calls([("a.py", text), ("b.py", "torch.ops.a.b()")]).files == {("a", "b"): "b.py"}


def test_a_file_that_stands_in_for_a_library_names_what_is_left_out() -> None:
    """As the patch writes it."""
    text = standin._TEMPLATE.format(
        name="flash_ops",
        reason="it holds no code for SM120",
        mark=standin.MARK,
        package="sgl_kernel",
        namespace="sgl_kernel",
        operators=("fwd", "get_scheduler_metadata"),
    )
    found = calls([("sgl_kernel/flash_ops.py", text)])
    assert found == Calls(files={}, stood_in=frozenset({"fwd", "get_scheduler_metadata"}))

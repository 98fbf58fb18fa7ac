from dataclasses import fields, replace
from typing import Any

import pytest

from sm120.build.patches import Outcome, State
from sm120.build.recipe import Recipe

RECIPE = Recipe(
    component="sgl-kernel",
    content="c" * 64,
    commit="f" * 40,
    dirty=False,
    series="5" * 64,
    patches=(Outcome(patch="sm120-only", title="t", state=State.PENDING, reason="r", left_out=("flash_ops",)),),
    changes="d" * 64,
    dependencies={"repo-b": "2", "repo-a": "1"},
    architectures=("120a",),
    python="3.11",
    torch="2.11.0",
    cuda="13.0",
    nvcc="13.0.88",
    cxx="g++ 12",
    cmake="4.0.3",
)
OTHER: dict[str, Any] = {
    "component": "other",
    "content": "e" * 64,
    "commit": None,
    "dirty": True,
    "series": "6" * 64,
    "changes": "7" * 64,
    "dependencies": {"repo-a": "1", "repo-b": "3"},
    "architectures": ("120f",),
    "python": "3.12",
    "torch": "2.11.0+cu130",
    "cuda": "13.1",
    "nvcc": "13.0.90",
    "cxx": "g++ 13",
    "cmake": "4.0.4",
    "flags": {"X": "1"},
}


def test_every_field_that_decides_is_tried() -> None:
    assert {field.name for field in fields(Recipe)} - {"patches"} == set(OTHER)


@pytest.mark.parametrize("name", OTHER)
def test_whatever_decides_the_bytes_changes_the_identity(name: str) -> None:
    assert replace(RECIPE, **{name: OTHER[name]}).identity != RECIPE.identity


def test_the_order_of_a_mapping_does_not() -> None:
    assert replace(RECIPE, dependencies={"repo-a": "1", "repo-b": "2"}).identity == RECIPE.identity


def test_a_reason_in_other_words_does_not() -> None:
    worded = (replace(RECIPE.patches[0], reason="in other words"),)
    assert replace(RECIPE, patches=worded).identity == RECIPE.identity


def test_the_record_says_what_was_left_out_and_what_the_tag_stands_for() -> None:
    record = RECIPE.record()
    assert record["left_out"] == ["flash_ops"]
    assert RECIPE.tag == f"sm120.{str(record['identity'])[:10]}"
    assert record["patches"] == [{"patch": "sm120-only", "state": "pending", "reason": "r"}]

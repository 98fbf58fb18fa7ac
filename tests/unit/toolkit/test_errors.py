import inspect
from pathlib import Path

import pytest

from sm120 import errors
from sm120.config import CHECKOUT


def classes() -> list[type[errors.ToolkitError]]:
    found = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, errors.ToolkitError)]
    return sorted(found, key=lambda c: c.exit_code)


def test_exit_codes_are_the_documented_ones_and_unique() -> None:
    assert [c.exit_code for c in classes()] == [1, 2, 3, 10, 11, 12, 13, 14, 15, 16, 17, 130]


@pytest.mark.parametrize("cls", classes(), ids=lambda c: c.__name__)
def test_readme_lists_every_exit_code(cls: type[errors.ToolkitError]) -> None:
    assert f"| {cls.exit_code} |" in Path(CHECKOUT, "README.md").read_text("utf-8")


def test_an_error_carries_message_place_and_remedy() -> None:
    error = errors.PreflightError("no space", where="/disk", remedy="free some")
    assert str(error) == "no space"
    assert error.as_json() == {
        "kind": "PreflightError",
        "exit_code": 10,
        "message": "no space",
        "where": "/disk",
        "remedy": "free some",
    }


@pytest.mark.parametrize(
    ("word", "known", "expected"),
    [
        ("nigtly", ["cpu", "nightly", "stable"], "did you mean nightly?"),
        ("zzz", ["stable", "cpu"], "known: cpu, stable"),
        ("zzz", [], "none is known"),
    ],
)
def test_nearest_names(word: str, known: list[str], expected: str) -> None:
    assert errors.nearest(word, known) == expected

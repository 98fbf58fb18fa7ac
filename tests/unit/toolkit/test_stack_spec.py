from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sm120 import errors
from sm120.stack import load_stack
from sm120.stack.spec import Stack, names, parse

GOOD = """\
schema = 1
summary = "a stack"
python = ">=3.11"
disk-mb = 10

[packages]
torch = "2.13.0+cpu"
ml_dtypes = "0.7.0"

[prove]
imports = ["torch"]

[[index]]
url = "https://example.org/cpu"
packages = ["torch"]
reason = "because"

[[index]]
url = "https://example.org/other"
packages = ["ml-dtypes"]
reason = "because"
"""


def read(text: str) -> Stack:
    return parse(text, Path("stacks/mine.toml"))


def test_good_file() -> None:
    stack = read(GOOD)
    assert stack.name == "mine"
    assert stack.disk_bytes == 10_000_000
    assert stack.requirements() == ["torch==2.13.0+cpu", "ml-dtypes==0.7.0"]
    assert [index.packages for index in stack.indexes] == [("torch",), ("ml-dtypes",)]


@pytest.mark.parametrize("name", names())
def test_every_stack_of_the_repository_is_good(name: str) -> None:
    stack = load_stack(name)
    assert stack.name == name
    assert stack == load_stack(stack.path) == load_stack(str(stack.path))


def test_cpu_stack_asks_for_a_cpu_build_of_torch() -> None:
    assert load_stack("cpu").packages["torch"].endswith("+cpu")


def test_unknown_name_offers_the_nearest() -> None:
    with pytest.raises(errors.UsageError, match="did you mean cpu") as raised:
        load_stack("cpuu")
    assert raised.value.exit_code == 2


@pytest.mark.parametrize("name", ["", "..", "nope", "cpu\n", "\0"])
def test_a_name_that_is_none(name: str) -> None:
    with pytest.raises(errors.UsageError, match="no stack is named"):
        load_stack(name)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(errors.UsageError, match="cannot read"):
        load_stack(tmp_path / "x.toml")


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        pytest.param("schema = 1", "schema = 2", 1, "schema must be 1, not 2", id="schema"),
        pytest.param("schema = 1", "schema = true", 1, "schema must be 1", id="schema-bool"),
        pytest.param('summary = "a stack"', "summary = 5", 2, "summary must be text, not 5", id="wrong-type"),
        pytest.param('summary = "a stack"', "", 1, "summary is missing", id="missing"),
        pytest.param('summary = "a stack"', 'sumary = "a"', 2, "'sumary'; did you mean summary", id="unknown-key"),
        pytest.param('">=3.11"', '"three"', 3, "no version specifier", id="python"),
        pytest.param("disk-mb = 10", "disk-mb = -1", 4, "disk-mb must be", id="negative"),
        pytest.param("disk-mb = 10", "disk-mb = 1.5", 4, "disk-mb must be", id="fraction"),
        pytest.param('"2.13.0+cpu"', '">=2.13"', 7, "torch must be an exact version", id="range"),
        pytest.param('"2.13.0+cpu"', "2.13", 7, "torch must be an exact version", id="number"),
        pytest.param('ml_dtypes = "0.7.0"', 'Torch = "1"', 8, "Torch is named twice", id="twice"),
        pytest.param('ml_dtypes = "0.7.0"', '"-e ." = "1"', 8, "no package name", id="option-as-name"),
        pytest.param('"torch"]\n\n[[index]]', '"torch; x"]\n\n[[index]]', 11, "no module name", id="module"),
        pytest.param('imports = ["torch"]', "imports = []", 11, "must be a list of names", id="empty-list"),
        pytest.param('imports = ["torch"]', "import = []", 11, "did you mean imports", id="unknown-inner-key"),
        pytest.param('["ml-dtypes"]', '["numpy"]', 20, "numpy is not in [packages]", id="second-index"),
        pytest.param("https://example.org/other", "ftp://x/", 19, "url must be", id="scheme"),
        pytest.param("https://example.org/other", "https://u:p@x/", 19, "url must be", id="credentials"),
        pytest.param("https://example.org/other", "https://[x", 19, "url must be", id="broken-url"),
        pytest.param("[[index]]\nurl", "[[indx]]\nurl", 13, "unknown key 'indx'", id="unknown-table"),
        pytest.param("[packages]\n", "[packages\n", 6, "not TOML", id="syntax"),
        pytest.param("ml_dtypes", "torch", 8, "not TOML", id="key-twice"),
        pytest.param("[packages]\ntorch", "packages = 5\n[prove2]\ntorch", 7, "unknown key 'prove2'", id="table"),
    ],
)
def test_each_mistake_names_file_and_line(old: str, new: str, line: int, words: str) -> None:
    assert old in GOOD
    with pytest.raises(errors.UsageError) as raised:
        read(GOOD.replace(old, new, 1) if old != "[[index]]\nurl" else GOOD.replace(old, new))
    assert words in raised.value.message
    assert raised.value.where == f"stacks/mine.toml:{line}"
    assert "p@x" not in raised.value.message


@pytest.mark.parametrize("name", ["a b.toml", "-x.toml", ".toml"])
def test_file_name_that_cannot_name_an_environment(name: str) -> None:
    with pytest.raises(errors.UsageError, match="file's name"):
        parse(GOOD, Path(name))


def test_no_package() -> None:
    with pytest.raises(errors.UsageError, match="names no package"):
        read(GOOD.replace('torch = "2.13.0+cpu"\nml_dtypes = "0.7.0"\n', "", 1))


def explained(text: str) -> None:
    """Any text gives a stack, or an error of ours that names the file."""
    found: errors.UsageError | None = None
    try:
        read(text)
    except errors.UsageError as error:
        found = error
    if found is not None:
        assert found.message.startswith("stacks/mine.toml:")
        assert found.where is not None
        assert 1 <= int(found.where.rpartition(":")[2]) <= text.count("\n") + 1


@given(st.integers(0, len(GOOD)), st.integers(0, 40), st.text(max_size=10))
def test_a_damaged_file_is_explained(start: int, length: int, text: str) -> None:
    explained(GOOD[:start] + text + GOOD[start + length :])


@given(st.permutations(GOOD.splitlines(keepends=True)))
def test_shuffled_lines_are_explained(lines: list[str]) -> None:
    explained("".join(lines))


@given(st.text())
def test_any_text_is_explained(text: str) -> None:
    explained(text)


@pytest.mark.parametrize("text", ["a = " + "[" * 100_000, "a = " + "9" * 5000, "a = 9999-99-99"])
def test_text_that_overwhelms_the_reader(text: str) -> None:
    explained(text)

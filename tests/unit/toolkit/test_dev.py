from pathlib import Path

import pytest

from sm120 import errors
from sm120.dev import bench, command
from sm120.process import Completed
from sm120.stack import Environment


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Stands for the tools that are started: exit codes by a word of their command line. Keeps what was called."""
    codes: dict[str, int] = {}

    def run(argv: list[str], **_: object) -> Completed:
        line = " ".join(argv)
        code = next((code for word, code in codes.items() if word in line), 0)
        return Completed(tuple(argv), code, 0.0, ())

    def stack() -> Environment:
        return Environment("cpu", Path("python"), Path("lock"), "0", fresh=False)

    monkeypatch.setattr(command, "run_process", run)
    monkeypatch.setattr(command, "_cpu_stack", stack)
    return codes


def test_all_parts_pass(tools: dict[str, int], capsys: pytest.CaptureFixture[str]) -> None:
    assert tools == {}
    command.test(command.TestOptions())
    out = capsys.readouterr().out
    for part in (
        "ruff check",
        "ruff format",
        "imports",
        "package hosts",
        "types of the",
        "tests of the cells",
        "self-test",
    ):
        assert part in out


def test_every_part_runs_even_when_others_fail(tools: dict[str, int], capsys: pytest.CaptureFixture[str]) -> None:
    tools.update({"ruff check": 1, "tests/unit/toolkit": 2})
    with pytest.raises(errors.ToolkitError, match="3 of 9 parts failed: ruff check, types of the toolkit, tests"):
        command.test(command.TestOptions())
    out = capsys.readouterr().out
    assert out.index("==> ruff check") < out.index("==> tests of the toolkit") < out.index("==> tests of the cells")


def test_a_stack_that_cannot_be_installed_fails_the_cells_alone(
    tools: dict[str, int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tools == {}

    def no_network() -> Environment:
        raise errors.PreflightError("no package index could be reached", remedy="connect")

    monkeypatch.setattr(command, "_cpu_stack", no_network)
    with pytest.raises(errors.ToolkitError, match="2 of 9 parts failed: types of the cells, tests of the cells"):
        command.test(command.TestOptions())
    assert "remedy: connect" in capsys.readouterr().err


def test_no_test_without_a_filter_is_a_failure(tools: dict[str, int]) -> None:
    tools["pytest"] = command.NO_TEST_RAN
    with pytest.raises(errors.ToolkitError, match="1 of 1 parts failed"):
        command.test(command.TestOptions(only=("toolkit",)))
    with pytest.raises(errors.NothingChecked):
        command.test(command.TestOptions(only=("toolkit",), k="nothing"))


@pytest.mark.parametrize(
    ("options", "words", "absent"),
    [
        (command.TestOptions(only=("cells",), slow=True), "-m not gpu", "-k"),
        (command.TestOptions(only=("cells",), k="a or b"), "-k a or b", "-m not gpu"),
    ],
)
def test_pytest_gets_the_flags(
    monkeypatch: pytest.MonkeyPatch, tools: dict[str, int], options: command.TestOptions, words: str, absent: str
) -> None:
    assert tools == {}
    lines: list[str] = []

    def run(argv: list[str], **_: object) -> Completed:
        lines.append(" ".join(argv))
        return Completed(tuple(argv), 0, 0.0, ())

    monkeypatch.setattr(command, "run_process", run)
    command.test(options)
    (line,) = lines
    assert words in line
    assert absent not in line


def test_the_cells_python_is_called_by_a_path_without_spaces(tmp_path: Path) -> None:
    python = tmp_path / "a b" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("")
    with command._without_spaces(python) as found:
        assert " " not in str(found)
        assert found.samefile(python)
    assert not found.exists()
    with command._without_spaces(tmp_path) as found:
        assert found == tmp_path


def test_benchmarks_are_run_by_name(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(bench.BENCHMARKS, "nap", bench.Benchmark("how long a nap takes", lambda _: {"seconds": 1.0}))
    bench.bench(bench.Options(name="nap"))
    assert "how long a nap takes" in capsys.readouterr().out
    with pytest.raises(errors.UsageError, match="did you mean nap"):
        bench.bench(bench.Options(name="nab"))

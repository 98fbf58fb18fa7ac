"""Faults that users met, each with the test that would have caught it."""

import io
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import rich.console

from sm120.console import Console, Progress
from sm120.errors import UsageError
from sm120.matrix import resume
from sm120.matrix.configs import load_shapes
from sm120.matrix.door import stack_door
from sm120.matrix.grid import Repeat
from sm120.matrix.journal import FILE, Journal
from sm120.matrix.plan import Result
from sm120.state import State


def test_an_unsupported_activation_is_blamed_on_its_own_key(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(
        '{"hidden_size": 64, "num_hidden_layers": 1, "num_experts": 4, "num_experts_per_tok": 2,'
        ' "moe_intermediate_size": 32, "hidden_act": "gelu"}'
    )
    with pytest.raises(UsageError, match="hidden_act: experts with the activation"):
        load_shapes(str(config))


def test_the_command_to_repeat_a_cell_brings_its_plug_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SM120_BACKENDS", "/tmp/a b.py")
    line = Repeat(model="m", tp=1, seed=0, profile="default").command("dense/x/y")
    assert line.startswith("'SM120_BACKENDS=/tmp/a b.py' scripts/inv validate-backends")


def test_a_plug_in_is_found_from_the_folder_that_it_was_named_in(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SM120_BACKENDS", os.pathsep.join(["mine.py", "some.module"]))
    words = stack_door(Path("python"), tmp_path / "run").env["SM120_BACKENDS"].split(os.pathsep)
    assert words == [str(tmp_path / "mine.py"), "some.module"]


def test_last_is_the_newest_run_that_was_interrupted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    status = {"1": "interrupted", "2": "interrupted", "3": "finished"}
    for number in status:
        folder = tmp_path / "runs" / f"{number}-{resume.TASK}-x"
        folder.mkdir(parents=True)
        (folder / FILE).touch()

    def opened(folder: Path) -> Any:
        return SimpleNamespace(path=folder, status=status[folder.name[0]])

    monkeypatch.setattr(resume, "Run", SimpleNamespace(open=opened))
    state: State = SimpleNamespace(runs=tmp_path / "runs")  # type: ignore[assignment]  # all that find_run reads
    assert resume.find_run(state, "last").path.name.startswith("2-")
    status.update({"1": "finished", "2": "finished"})
    assert resume.find_run(state, "last").path.name.startswith("3-")


def test_resuming_runs_again_what_says_nothing_of_the_backend(tmp_path: Path) -> None:
    with Journal.create(tmp_path / "j", {}) as journal:
        journal.append("full-disk", Result("INCONCLUSIVE", "no space left"))
        journal.append("right", Result("PASS"))
        journal.append("was-full", Result("INCONCLUSIVE", "no space left"))
        journal.append("was-full", Result("PASS"))
    with Journal.resume(tmp_path / "j") as again:
        assert sorted(again.results) == ["right", "was-full"]


def test_progress_keeps_its_numbers_on_a_narrow_terminal() -> None:
    screen = rich.console.Console(file=io.StringIO(), width=60, force_terminal=True, color_system=None)
    with Progress(Console.create(), 100, "matrix")._live(screen) as progress:
        progress.advance(24, "% of the work, cell 48 of 109, dense/backend/" + "a-very-long-name" * 8)
        assert progress._bar is not None
        progress._bar.refresh()
    assert isinstance(screen.file, io.StringIO)
    assert "24/100" in screen.file.getvalue()

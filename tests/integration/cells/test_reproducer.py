"""The stand-alone script of a failing cell: run where nothing of this project is, it shows the same fault."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.cells.door import Door, worker


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    with worker(tmp_path_factory.mktemp("worker")) as opened:
        yield opened


def written(door: Door, folder: Path, *only: str) -> tuple[dict[str, Any], Path]:
    """(RESULT of a failing cell, its reproducer)"""
    script = folder / "reproducer.py"
    result = door.run(door.cell(*only), reproducer=str(script))
    assert result["verdict"] == "FAIL"
    assert result["reproducer"] == str(script)
    assert not list(folder.glob("*.tmp"))
    return result, script


def alone(script: Path) -> "subprocess.CompletedProcess[str]":
    """In an empty folder, with nothing of this project to import."""
    folder = script.parent / "empty"
    folder.mkdir()
    bare = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "SM120_"))}
    check = subprocess.run(
        [sys.executable, "-I", "-c", "import sm120_cells"], capture_output=True, cwd=folder, env=bare, check=False
    )
    assert b"ModuleNotFoundError" in check.stderr, "nothing may help it"
    done = subprocess.run(
        [sys.executable, "-I", "-W", "error", str(script)],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**bare, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert not list(folder.iterdir()), "it leaves nothing behind"
    return done


def test_it_shows_the_same_finding(door: Door, tmp_path: Path) -> None:
    result, script = written(door, tmp_path, "dense/doubled/exact-*")
    assert f"# T1 exact: {result['findings'][0]['message']}\n" in script.read_text(encoding="utf-8")
    done = alone(script)
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("dense/doubled/exact-")
    assert lines[1].startswith("FAIL: T1 exact: at M = 17-32 of 17-32: ")
    worst = result["findings"][0]["worst"][0]
    assert f"  [{worst['row']}, {worst['col']}] got {worst['got']}, want {worst['want']} ± 0" in lines


def test_a_mixture(door: Door, tmp_path: Path) -> None:
    _, script = written(door, tmp_path, "moe/swapped/bound-*h64-i32-e6-k2-s0")
    done = alone(script)
    assert done.returncode == 1, done.stderr
    assert "FAIL: T2 bound" in done.stdout


def test_one_call_in_many_needs_the_calls_before_it(door: Door, tmp_path: Path) -> None:
    """Only some sizes failed; run alone they would pass, so the whole sweep is run again."""
    result, script = written(door, tmp_path, "dense/rare/exact-*")
    assert len(result["findings"][0]["condition"]["failed_at"]) == 1
    done = alone(script)
    assert done.returncode == 1, (done.stdout, done.stderr)


def test_a_backend_that_raises_odd_words(door: Door, tmp_path: Path) -> None:
    """Quotes, backslashes and braces of a message, and of a backend's source, do not break the script."""
    result, script = written(door, tmp_path, "dense/raises/repeat-*")
    message = result["findings"][0]["message"]
    assert message.startswith("RuntimeError: an")
    text = script.read_text(encoding="utf-8")
    for line in ('# T0 raises: RuntimeError: an "odd" one:', "# ''' and \"\"\" and \\ and {braces} "):
        assert line in text.split("\n")
    done = alone(script)
    assert done.returncode == 1, done.stderr
    assert "FAIL: T0 raises: RuntimeError: an" in done.stdout


def test_a_right_backend_gives_zero(door: Door, tmp_path: Path) -> None:
    """The wrong one's script with the right one's name: the library was mended."""
    _, script = written(door, tmp_path, "dense/doubled/exact-*")
    text = script.read_text(encoding="utf-8")
    assert text.count('"dense:doubled"') == 1
    script.write_text(text.replace('"dense:doubled"', '"dense:right"'), encoding="utf-8")
    done = alone(script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1] == "PASS"


def test_a_backend_that_cannot_run_there_gives_two(door: Door, tmp_path: Path) -> None:
    _, script = written(door, tmp_path, "dense/doubled/exact-*")
    text = script.read_text(encoding="utf-8").replace('"dense:doubled"', '"dense:refuses"')
    script.write_text(text, encoding="utf-8")
    done = alone(script)
    assert done.returncode == 2, done.stderr
    assert "UNSUPPORTED: needs compute capability 12.0" in done.stdout


def test_a_script_that_fails_itself_gives_three(door: Door, tmp_path: Path) -> None:
    _, script = written(door, tmp_path, "dense/doubled/exact-*")
    text = script.read_text(encoding="utf-8").replace('"dense:doubled"', '"dense:gone"')
    script.write_text(text, encoding="utf-8")
    done = alone(script)
    assert done.returncode == 3, done.stdout
    assert "no backend is called 'gone'" in done.stderr


def test_its_sources_are_plain_text_and_all_there(door: Door, tmp_path: Path) -> None:
    _, script = written(door, tmp_path, "dense/doubled/exact-*")
    text = script.read_text(encoding="utf-8")
    compile(text, "reproducer", "exec")
    for module in ("sm120_cells.judge", "sm120_cells.reference", "sm120_cells.nvfp4", "crooked"):
        assert re.search(rf"^SOURCES\['{re.escape(module)}'\] = '''", text, re.MULTILINE), module
    assert "def dense_reference(" in text
    assert str(Path.home()) not in text


def test_a_cell_that_passes_writes_none(door: Door, tmp_path: Path) -> None:
    script = tmp_path / "reproducer.py"
    result = door.run(door.cell("dense/right/repeat-*"), reproducer=str(script))
    assert (result["verdict"], result["reproducer"]) == ("PASS", None)
    assert not script.exists()

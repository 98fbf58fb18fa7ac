import io
import json
import sys
import time

import pytest

from sm120 import errors
from sm120.console import Console, clean, duration, size


@pytest.fixture(autouse=True)
def _no_color_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)


def test_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console.create()
    with console.step("building"):
        console.info("a [bold]line[/bold] :smile:")
        console.detail("only with --verbose")
    console.warn("careful")
    out, err = capsys.readouterr()
    assert out == "==> building\na [bold]line[/bold] :smile:\n    done in 0.0 s\n"
    assert err == "warning: careful\n"


def test_a_failed_step_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt), Console.create().step("building"):
        raise KeyboardInterrupt
    assert "failed after" in capsys.readouterr().out


def test_json_keeps_stdout_for_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console.create(json=True, verbose=True)
    with console.step("working"), console.progress(2, "cells") as progress:
        progress.advance()
    console.detail("detail")
    console.table("title", ("a",), [("b",)])
    console.result({"good": 1})
    console.result({"good": 2, "text": "ü"})
    console.finish()
    out, err = capsys.readouterr()
    assert json.loads(out) == {"good": 2, "text": "ü"}
    assert out.isascii()
    assert "working" in err
    assert "detail" in err
    assert "title" in err


def test_json_of_a_task_that_failed_has_result_and_error(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console.create(json=True)
    console.result({"grid": []})
    console.finish(errors.NumericsError("one cell failed", where="cell 1", remedy="look"))
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert document["grid"] == []
    assert document["error"]["exit_code"] == 14
    assert err == "error: one cell failed\n  where: cell 1\n  remedy: look\n"


def test_what_is_no_json_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        Console.create().result({"eta": float("inf")})


def test_without_json_the_result_is_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console.create()
    console.result({"a": 1})
    console.finish()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\x1b[31mred\x1b[0m", "\\x1b[31mred\\x1b[0m"),
        ("a\tb\nc", "a\tb\nc"),
        ("old\rnew\r\nnext", "old\nnew\nnext"),
        ("bell\x07 nul\x00 c1\x9b", "bell\\x07 nul\\x00 c1\\x9b"),
        ("turn\u202eround", "turn\\u202eround"),
        ("lone \ud83d half", "lone \\ud83d half"),
        ("ünï ✓ 漢字", "ünï ✓ 漢字"),
    ],
)
def test_control_characters_become_visible(text: str, expected: str) -> None:
    assert clean(text) == expected


def test_plain_table_is_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    Console.create().table("grid", ("name", "verdict"), [("漢字", "PASS"), ("a\nb", 1), ("[red]x[/red]", None)])
    assert capsys.readouterr().out.splitlines() == [
        "grid",
        "name          verdict",
        "漢字          PASS",
        "a b           1",
        "[red]x[/red]  None",
    ]


def test_a_row_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="has not 2 cells"):
        Console.create().table("grid", ("a", "b"), [("only one",)])


def test_rich_on_request_leaves_markup_in_text_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    console = Console.create()
    console.info("[bold]not bold[/bold] \x1b[31m")
    console.table("[i]grid[/i]", ("[a]",), [("[red]x[/red]",)])
    with console.progress(2, "[b]cells[/b]") as progress:
        progress.advance(label="[c]next[/c]")
    with console.step("[u]step[/u]"):
        pass
    out = capsys.readouterr().out
    for text in ("[bold]not bold[/bold] \\x1b[31m", "[i]grid[/i]", "[a]", "[red]x[/red]", "[c]next[/c]", "[u]step[/u]"):
        assert text in out
    assert "\x1b[" in out


def test_no_color_means_no_colour(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    Console.create().table("grid", ("a",), [("b",)])
    Console.create().warn("careful")
    assert "\x1b[3" not in capsys.readouterr().out


def test_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    Console.create().info("line")
    assert capsys.readouterr().out == "line\n"


def test_plain_progress_speaks_up_now_and_then_with_the_time_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with Console.create().progress(4, "cells") as progress:
        progress.advance()
        now += 30
        progress.advance(label="dense")
        now += 1
        progress.advance()
    assert capsys.readouterr().out == "2/4 dense, 30.0 s left\n"


def test_plain_progress_in_bytes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with Console.create().progress(4_500_000_000, "wheels", in_bytes=True) as progress:
        progress.advance(1_000_000_000)
        now += 60
        progress.advance(200_000_000, "torch.whl")
        progress.expect(1_500_000_000)
        now += 60
        progress.advance(1_800_000_000)
        now += 60
        progress.advance(3_000_000_000)
    assert capsys.readouterr().out.splitlines() == [
        "1.2/4.5 GB torch.whl, 2 min 45 s left",
        "3.0/6.0 GB torch.whl, 2 min 00 s left",
        "6.0/6.0 GB torch.whl",
    ]


def test_progress_in_bytes_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with Console.create().progress(2_000_000, "wheels", in_bytes=True) as progress:
        progress.expect(2_000_000)
        progress.advance(1_000_000, "[b]torch[/b]")
    out = capsys.readouterr().out
    assert "/4.0" in out
    assert "[b]torch[/b]" in out


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (999_949, "999.9 kB"),
        (999_950, "1.0 MB"),
        (141_200_000, "141.2 MB"),
        (999_950_000, "1.0 GB"),
        (4_130_000_000, "4.1 GB"),
        (2_000_000_000_000, "2000.0 GB"),
    ],
)
def test_size(n: int, text: str) -> None:
    assert size(n) == text


def test_a_locale_without_unicode_is_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    Console.create().info("×")
    assert raw.getvalue() == b"\\xd7\n"


def test_current_is_the_last_created(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console.create(json=True)
    assert Console.current() is console
    console.finish()
    assert capsys.readouterr().out == "{}\n"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.04, "0.0 s"), (59.9, "59.9 s"), (61, "1 min 01 s"), (7260, "2 h 01 min")]
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text

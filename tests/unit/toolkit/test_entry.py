import json
import os
import signal
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from sm120 import config, entry, errors
from sm120.console import Console


@dataclass(frozen=True, kw_only=True)
class Options:
    tp: int = 1
    share: float | None = None
    only: tuple[str, ...] | None = None
    sizes: list[int] | None = None
    model: str = "default"
    folder: Path | None = None
    quick: bool = False
    json: bool = False


def command(options: Options) -> int | None:
    return options.tp


def test_flags_become_what_the_fields_are() -> None:
    flags = {"tp": "4", "share": "0.5", "only": "a*, b", "sizes": "1,2", "folder": "~/x", "quick": True, "json": True}
    assert entry.options_for(command, flags) == Options(
        tp=4, share=0.5, only=("a*", "b"), sizes=[1, 2], folder=Path("~/x").expanduser(), quick=True, json=True
    )


def test_an_empty_value_is_not_the_same_as_none() -> None:
    with pytest.raises(errors.UsageError, match="--model is empty"):
        entry.options_for(command, {"model": ""})


def test_flags_not_given_leave_the_defaults() -> None:
    flags = {"tp": None, "model": None, "only": None, "quick": False, "verbose": True, "home": "/x"}
    assert entry.options_for(command, flags) == Options()


def test_a_flag_without_a_field_is_a_fault_of_ours() -> None:
    with pytest.raises(TypeError, match="no field for the flag 'depth'"):
        entry.options_for(command, {"depth": "1"})


@pytest.mark.parametrize(
    ("flag", "text", "words"),
    [
        ("tp", "x", "--tp: 'x' is not a whole number"),
        ("tp", "1.5", "--tp: '1.5' is not a whole number"),
        ("tp", "9" * 5000, "is not a whole number"),
        ("share", "nan", "--share: 'nan' is not a number"),
        ("share", "-inf", "is not a number"),
        ("sizes", "1,x", "--sizes: 'x' is not a whole number"),
        ("only", "a,,b", "--only: a list has an empty part"),
    ],
)
def test_bad_text_is_one_sentence(flag: str, text: str, words: str) -> None:
    with pytest.raises(errors.UsageError, match=words.replace("*", r"\*")):
        entry.options_for(command, {flag: text})


def test_exit_code_of_a_command_that_returns_one() -> None:
    assert entry.guarded(lambda: 3, {}) == 3


def test_explained_failure(capsys: pytest.CaptureFixture[str]) -> None:
    def body() -> int:
        Console.current().result({"done": 1})
        raise errors.GateError("the gate is stale", where="gate.json", remedy="invoke validate-backends")

    assert entry.guarded(body, {"json": True}) == 17
    out, err = capsys.readouterr()
    assert json.loads(out)["done"] == 1
    assert json.loads(out)["error"]["kind"] == "GateError"
    assert err == "error: the gate is stale\n  where: gate.json\n  remedy: invoke validate-backends\n"


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_end_a_task_with_130(sign: signal.Signals, capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(sign)

    def body() -> int:
        os.kill(os.getpid(), sign)
        signal.pause()
        return 0

    assert entry.guarded(body, {}) == 130
    assert "interrupted" in capsys.readouterr().err
    assert signal.getsignal(sign) == before


def test_unexpected_failure_leaves_a_log_without_secrets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SM120_HOME", str(tmp_path))
    monkeypatch.setenv("HF_TOKEN", "correct-horse-battery")

    def body() -> int:
        raise ZeroDivisionError("by correct-horse-battery")

    assert entry.guarded(body, {}) == 1
    err = capsys.readouterr().err
    assert "unexpected ZeroDivisionError: by ***" in err
    assert "Traceback" not in err
    (log,) = (tmp_path / ".sm120" / "logs").iterdir()
    assert str(log) in err
    assert "ZeroDivisionError: by ***" in log.read_text()


def test_unexpected_failure_where_nothing_can_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SM120_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path / "file"))
    assert entry.guarded(lambda: 1 // 0, {"verbose": True}) == 1
    out, err = capsys.readouterr()
    assert "no log could be written" in err
    assert "Traceback" in out


def test_home_flag_moves_the_state(tmp_path: Path) -> None:
    with pytest.raises(errors.UsageError):
        entry._call({"runs": "records"}, "sm120.dev.bench:bench", {"home": str(tmp_path), "name": "none"})
    assert config.current().runs == tmp_path / "records"

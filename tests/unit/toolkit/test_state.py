import json
from pathlib import Path

import pytest

from sm120 import config, errors
from sm120.state import STATE_VERSION, State


def settings(folder: Path) -> config.Settings:
    return config.Settings(home=folder, state=folder / ".sm120", runs=folder / "runs")


def test_resolve_reads_only(tmp_path: Path) -> None:
    state = State.resolve(settings(tmp_path))
    assert state.env("cpu") == tmp_path / ".sm120" / "env" / "cpu"
    assert state.gate.parent == state.logs.parent == tmp_path / ".sm120"
    assert list(tmp_path.iterdir()) == []


def test_places_of_a_stack_are_all_below_the_state(tmp_path: Path) -> None:
    state = State.resolve(settings(tmp_path))
    root = tmp_path / ".sm120"
    assert state.adopted("x") == root / "env" / "x.adopted.json"
    assert state.lock_file("cpu") == root / "locks" / "pylock.cpu.toml"
    assert state.wheels == root / "wheels"
    assert state.cuda_home("cpu") == root / "cuda" / "cpu"
    assert state.activation("cpu") == root / "activate" / "cpu.sh"
    assert state.cache("cpu") == root / "cache" / "cpu"
    assert state.stack_file("cpu") == root / "stacks" / "cpu.toml"
    assert state.links == root / "links.json"
    assert state.selected == root / "selected.json"
    assert list(tmp_path.iterdir()) == []


def test_prepare_twice(tmp_path: Path) -> None:
    state = State.resolve(settings(tmp_path))
    state.prepare()
    state.prepare()
    assert json.loads((tmp_path / ".sm120" / "state.json").read_text())["state_version"] == STATE_VERSION
    assert State.resolve(settings(tmp_path)) == state


def test_state_of_a_newer_toolkit_is_refused(tmp_path: Path) -> None:
    State.resolve(settings(tmp_path)).prepare()
    (tmp_path / ".sm120" / "state.json").write_text(json.dumps({"state_version": STATE_VERSION + 1}))
    with pytest.raises(errors.PreflightError, match="newer toolkit") as raised:
        State.resolve(settings(tmp_path))
    assert raised.value.exit_code == 10
    assert raised.value.remedy is not None


@pytest.mark.parametrize("content", ["[]", "{}", '{"state_version": "1"}'])
def test_state_file_that_says_nothing(tmp_path: Path, content: str) -> None:
    (tmp_path / ".sm120").mkdir()
    (tmp_path / ".sm120" / "state.json").write_text(content)
    with pytest.raises(errors.PreflightError, match="does not say which version"):
        State.resolve(settings(tmp_path))


def test_damaged_state_file(tmp_path: Path) -> None:
    (tmp_path / ".sm120").mkdir()
    (tmp_path / ".sm120" / "state.json").write_text('{"state_ver')
    with pytest.raises(errors.ToolkitError, match="not JSON"):
        State.resolve(settings(tmp_path))


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / ".sm120").write_text("a file")
    with pytest.raises(errors.PreflightError, match="cannot write") as raised:
        State.resolve(settings(tmp_path)).prepare()
    assert raised.value.remedy is not None
    assert "SM120_HOME" in raised.value.remedy


def test_settings_default_to_the_checkout() -> None:
    found = config.resolve({}, env={})
    assert found.state == config.CHECKOUT / ".sm120"
    assert found.runs == config.CHECKOUT / "runs"


def test_one_variable_moves_everything(tmp_path: Path) -> None:
    found = config.resolve({"state": ".sm120", "runs": "runs"}, env={"SM120_HOME": str(tmp_path)})
    assert found == settings(tmp_path)


def test_absolute_folders_stay(tmp_path: Path) -> None:
    found = config.resolve({"state": str(tmp_path / "s"), "runs": "~/r"}, env={"SM120_HOME": "/elsewhere"})
    assert found.state == tmp_path / "s"
    assert found.runs == Path("~/r").expanduser()


@pytest.mark.parametrize("value", [5, ["a"], "a\0b"])
def test_a_setting_that_is_no_folder(value: object) -> None:
    with pytest.raises(errors.UsageError, match="must be a folder's name"):
        config.resolve({"state": value}, env={})


def test_flag_moves_what_stands_in_the_old_home(tmp_path: Path) -> None:
    config.use(config.resolve({"runs": "/elsewhere/runs"}, env={"SM120_HOME": "/old"}))
    config.move(str(tmp_path))
    assert config.current().state == tmp_path / ".sm120"
    assert config.current().runs == Path("/elsewhere/runs")

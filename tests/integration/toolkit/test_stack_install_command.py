"""``setup``'s flags: which stack, the lock, plans, and what does not go together."""

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.toolkit.local_index import LocalIndex, serving
from tests.integration.toolkit.stack_home import Home

from sm120 import errors, files
from sm120.console import Console
from sm120.host import gather
from sm120.stack import selected
from sm120.stack.command import Options, setup
from sm120.stack.selection import select


@pytest.fixture
def index(tmp_path: Path) -> Iterator[LocalIndex]:
    with serving(tmp_path / "index") as made:
        yield made


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: LocalIndex) -> Home:
    made = Home.make(tmp_path, monkeypatch)
    made.configure_pip(f"index-url = {index.url}")
    return made


def run(options: Options, capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], str]:
    """The task's result, and what it said."""
    console = Console.create(json=True)
    setup(options)
    console.finish()
    captured = capsys.readouterr()
    result: dict[str, Any] = json.loads(captured.out)
    assert result["schema"] == 1
    return result, captured.err


def test_lock_writes_the_lock_alone_and_says_what_changed(
    index: LocalIndex, home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    index.wheel("numpy", "2.4", requires=("leaf", "twig"), padding=100_000)
    index.wheel("leaf", "1.0")
    index.wheel("twig", "1.0")
    stack = home.stack_file('numpy = "2.4"')
    options = Options(stack=str(stack), lock=True)

    result, said = run(options, capsys)
    assert result["is_new"] is True
    assert result["pylock"] == str(home.state.lock_file("mine"))
    assert result["packages"] == 3
    assert result["bytes"] == sum(file.size or 0 for file in home.lock().files) > 100_000
    assert f"3 packages, {result['bytes'] / 1000:.1f} kB of wheels, 1.0 MB when installed" in said
    assert not home.state.env("mine").exists()
    assert selected(home.state) is None

    before = home.state.lock_file("mine").read_bytes()
    result, said = run(options, capsys)
    assert (result["is_new"], result["changes"]) == (False, [])
    assert "nothing has changed" in said
    assert home.state.lock_file("mine").read_bytes() == before

    index.wheel("leaf", "2.0")
    index.wheel("twig", "1.0", padding=5)
    result, said = run(options, capsys)
    leaf, twig = result["changes"]
    assert leaf == {"package": "leaf", "before": "1.0", "now": "2.0"}
    assert twig["package"] == "twig"
    assert twig["before"].startswith("1.0 ")
    assert twig["before"] != twig["now"]
    assert "leaf     1.0" in said


def test_dry_run_of_a_damaged_lock_is_the_error_that_the_installation_ends_with(
    index: LocalIndex, home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    index.wheel("numpy", "2.4")
    stack = str(home.stack_file('numpy = "2.4"'))
    files.write_text_atomic(home.state.lock_file("mine"), "[")
    for dry_run in (True, False):
        with pytest.raises(errors.UsageError, match="not a lock that can be used") as raised:
            setup(Options(stack=stack, dry_run=dry_run))
        assert "add --lock to the setup command" in str(raised.value.remedy)
    capsys.readouterr()
    setup(Options(stack=stack, dry_run=True, lock=True))
    assert "would resolve the stack" in capsys.readouterr().out


def test_a_damaged_lock_is_mended_by_lock(index: LocalIndex, home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    index.wheel("numpy", "2.4")
    options = Options(stack=str(home.stack_file('numpy = "2.4"')), lock=True)
    home.state.prepare()
    home.state.lock_file("mine").parent.mkdir()
    home.state.lock_file("mine").write_text("half a li")
    result, _ = run(options, capsys)
    assert result["is_new"] is True
    assert [file.name for file in home.lock().files] == ["numpy"]


def test_setup_installs_selects_and_writes_the_activation(
    index: LocalIndex, home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel = index.wheel("numpy", "2.4")
    stack = home.stack('numpy = "2.4"', imports='"numpy"')
    home.write_lock(stack, {wheel: index.file_url(wheel)})
    options = Options(stack=str(stack.path))
    result, said = run(options, capsys)
    assert result["fresh"] is True
    assert result["proved"] == [{"module": "numpy", "outcome": "OK", "detail": "2.4"}]
    assert result["chosen_because"] == "asked for"
    activation = home.state.activation("mine")
    assert result["activation"] == str(activation)
    assert f". {shlex.quote(str(activation))}" in said
    assert selected(home.state) == str(stack.path)

    activation.unlink()
    result, said = run(options, capsys)
    assert result["fresh"] is False
    assert "nothing to do (0." in said
    assert activation.exists()


@pytest.mark.parametrize(
    ("cards", "name", "why"),
    [
        ((), "cpu", "no card is seen"),
        (((9, 0),), "cpu", "its cards are 9.0"),
        (((12, 0),), "nightly", "a card of compute capability 12.0"),
        (((8, 9), (12, 1)), "nightly", "a card of compute capability 12.1"),
    ],
)
def test_the_cards_choose_the_stack(
    home: Home,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    cards: tuple[tuple[int, int], ...],
    name: str,
    why: str,
) -> None:
    monkeypatch.setattr(gather, "gpu_capabilities", lambda: cards)
    result, said = run(Options(dry_run=True), capsys)
    assert result["stack"] == name
    assert why in result["chosen_because"]
    assert f"taking the stack {name}: " in said
    assert "--stack takes another" in said
    assert not home.path.exists()


def test_dry_run_says_what_would_be_done(
    index: LocalIndex, home: Home, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    wheel = index.wheel("numpy", "2.4", padding=10_000)
    stack = home.stack('numpy = "2.4"')
    name = str(stack.path)
    result, said = run(Options(stack=name, dry_run=True), capsys)
    assert (result["install"], result["resolve"], result["fetch_bytes"]) == (True, True, None)
    assert result["packages"] == ["numpy==2.4"]
    assert "after resolving it (it has no lock yet)" in said
    result, said = run(Options(stack=name, dry_run=True, lock=True), capsys)
    assert (result["install"], result["resolve"]) == (False, True)
    assert "install nothing" in said
    assert not home.path.exists()
    assert index.requests == []

    home.write_lock(stack, {wheel: index.file_url(wheel)})
    result, said = run(Options(stack=name, dry_run=True, mirror=tmp_path / "mirror"), capsys)
    assert (result["install"], result["resolve"]) == (True, False)
    assert result["fetch_bytes"] == wheel.stat().st_size
    assert result["needed_bytes"] == stack.disk_bytes + wheel.stat().st_size
    assert "would then bring the mirror" in said
    setup(Options(stack=name, mirror=tmp_path / "mirror"))
    result, said = run(Options(stack=name, dry_run=True), capsys)
    assert (result["install"], result["resolve"]) == (False, False)
    assert "nothing to do" in said

    result, said = run(Options(offline=tmp_path / "mirror", dry_run=True), capsys)
    assert result["install"] is False
    home.state.env("mine").rename(tmp_path / "gone")
    result, said = run(Options(offline=tmp_path / "mirror", dry_run=True), capsys)
    assert (result["install"], result["offline"]) == (True, str(tmp_path / "mirror"))
    assert "offline" in said
    assert not home.state.env("mine").exists()


SOME = Path("/somewhere")


@pytest.mark.parametrize(
    ("options", "one", "other"),
    [
        (Options(offline=SOME, lock=True), "--offline", "--lock"),
        (Options(offline=SOME, mirror=SOME), "--offline", "--mirror"),
        (Options(adopt=SOME, offline=SOME), "--adopt", "--offline"),
        (Options(adopt=SOME, mirror=SOME), "--adopt", "--mirror"),
        (Options(adopt=SOME, lock=True), "--adopt", "--lock"),
    ],
)
def test_flags_that_do_not_go_together(home: Home, options: Options, one: str, other: str) -> None:
    with pytest.raises(errors.UsageError, match=f"{one} and {other} do not go together: ") as raised:
        setup(options)
    assert raised.value.remedy == f"leave {other} out"
    assert not home.path.exists()


def test_a_stack_that_does_not_exist(home: Home) -> None:
    for options in (Options(stack="cpuu"), Options(stack="cpuu", lock=True), Options(stack="cpuu", dry_run=True)):
        with pytest.raises(errors.UsageError, match=r"no stack is named 'cpuu'; did you mean cpu\?"):
            setup(options)
    assert not home.path.exists()


def test_selection(home: Home) -> None:
    assert selected(home.state) is None
    select(home.state, "stable")
    assert selected(home.state) == "stable"
    for text in ("{", "[]", "{}", '{"stack": 5}', '{"stack": ""}'):
        home.state.selected.write_text(text)
        with pytest.raises(errors.UsageError, match="does not name a stack") as raised:
            selected(home.state)
        assert raised.value.remedy
    select(home.state, "cpu")
    assert selected(home.state) == "cpu"


def test_a_selection_that_stays_the_same_is_not_written_again(home: Home) -> None:
    select(home.state, "cpu")
    before = home.state.selected.stat()
    select(home.state, "cpu")
    assert home.state.selected.stat() == before  # another file would have another inode

"""A mirror is written, and the environment made of it again where there is no network."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.integration.toolkit.local_index import LocalIndex, make_wheel, serving
from tests.integration.toolkit.stack_home import TORCH_CPU, Home, snapshot, without_network

from sm120 import errors, files
from sm120.console import Console
from sm120.stack import look, selected
from sm120.stack.command import Options, setup
from sm120.stack.fetch import mirror
from sm120.stack.fetch.mirror import open_mirror
from sm120.stack.lock import read_lock

PACKAGES = 'torch = "2.13.0+cpu"\nnumpy = "2.4"'


@pytest.fixture
def index(tmp_path: Path) -> Iterator[LocalIndex]:
    with serving(tmp_path / "index") as made:
        yield made


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: LocalIndex) -> Home:
    made = Home.make(tmp_path, monkeypatch)
    made.configure_pip(f"index-url = {index.url}")
    return made


def install_with_mirror(index: LocalIndex, home: Home, folder: Path) -> None:
    stack = home.stack(PACKAGES, imports='"torch", "numpy"')
    script = {"numpy/__init__.py": "__version__ = '2.4'\n", "numpy-2.4.data/scripts/numpy-tool": "#!python\nprint(1)\n"}
    wheels = [
        index.wheel("torch", "2.13.0+cpu", content=TORCH_CPU, requires=("numpy",)),
        index.wheel("numpy", "2.4", content=script),
    ]
    home.write_lock(stack, {wheel: index.file_url(wheel) for wheel in wheels})
    setup(Options(stack=str(stack.path), mirror=folder))


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole mirror, made on another machine; not to be changed."""
    folder = tmp_path_factory.mktemp("elsewhere")
    with pytest.MonkeyPatch.context() as patch, serving(folder / "index") as index:
        install_with_mirror(index, Home.make(folder, patch), folder / "mirror")
    return folder / "mirror"


@pytest.fixture
def whole(original: Path, tmp_path: Path) -> Path:
    """A whole mirror on a machine that has never seen its stack."""
    return Path(shutil.copytree(original, tmp_path / "mirror"))


@pytest.fixture
def installed(index: LocalIndex, home: Home, tmp_path: Path) -> Path:
    """A whole mirror of a stack that is installed."""
    install_with_mirror(index, home, tmp_path / "mirror")
    return tmp_path / "mirror"


def forget(home: Home) -> None:
    """As on a machine that has never seen the stack."""
    shutil.rmtree(home.path / ".sm120")


def tree(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): files.sha256(p) for p in folder.rglob("*") if p.is_file()}


def test_a_mirror_holds_stack_lock_and_every_wheel(home: Home, installed: Path) -> None:
    lock = read_lock(installed / "pylock.toml")
    assert lock.fingerprint == home.lock().fingerprint
    for file in lock.files:
        assert file.url == f"wheels/{file.filename}"
        assert files.sha256(installed / file.url) == file.sha256
        assert (installed / file.url).stat().st_nlink == 1  # a link would be damaged together with the store
    assert (installed / "mine.toml").read_text() == (home.path.parent / "mine.toml").read_text()
    assert {path.name for path in installed.iterdir()} == {
        "mine.toml",
        "pylock.toml",
        "wheels",
        "sm120-mirror.json",
        ".lock",
    }


def test_offline_without_any_network_gives_the_same_files(index: LocalIndex, home: Home, installed: Path) -> None:
    wrap = without_network()
    folder = home.state.env("mine")
    before = snapshot(folder)
    assert any(name.endswith("numpy-tool") for name in before)
    forget(home)
    index.requests.clear()
    result = home.setup_ok("--offline", str(installed), wrap=wrap)
    assert result["fresh"] is True
    assert result["stack"] == "mine"
    assert result["fingerprint"] == read_lock(installed / "pylock.toml").fingerprint
    assert snapshot(folder) == before
    assert index.requests == []
    assert not home.setup_ok("--offline", str(installed), wrap=wrap)["fresh"]


NO_SOCKETS = """
import sys
from pathlib import Path
def hook(event, words):
    if event.startswith("socket."):
        print("SOCKET", event, words, flush=True)
sys.addaudithook(hook)
from sm120 import entry
from sm120.stack.command import Options, setup
def body():
    setup(Options(offline=Path(sys.argv[1])))
    return 0
sys.exit(entry.guarded(body, {}))
"""


def test_offline_opens_no_socket(home: Home, whole: Path) -> None:
    done = subprocess.run([sys.executable, "-c", NO_SOCKETS, str(whole)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "SOCKET" not in done.stdout


def test_after_offline_a_stack_that_is_not_in_the_checkout_is_found_by_later_tasks(home: Home, whole: Path) -> None:
    setup(Options(offline=whole))
    name = selected(home.state)
    assert name == str(home.state.stack_file("mine"))
    shutil.rmtree(whole)
    found, why = look(name, home.state)
    assert found is not None, why


def test_a_second_mirror_adds_only_what_is_missing_and_mends_what_is_damaged(
    home: Home, installed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tree(installed)
    Console.create()
    stamps = {path: path.stat().st_mtime_ns for path in (installed / "wheels").iterdir()}
    torch, numpy = sorted((installed / "wheels").glob("*.whl"), reverse=True)
    numpy.unlink()
    setup(Options(stack=str(home.path.parent / "mine.toml"), mirror=installed))
    assert "holds 2 wheels, 1 of them new" in capsys.readouterr().out
    assert torch.stat().st_mtime_ns == stamps[torch]
    torch.write_bytes(torch.read_bytes()[:-1])
    setup(Options(stack=str(home.path.parent / "mine.toml"), mirror=installed))
    after = tree(installed)
    assert after.pop("sm120-mirror.json") != ""
    assert after == {name: digest for name, digest in before.items() if name != "sm120-mirror.json"}


def test_an_interrupted_mirror_is_told_and_can_be_finished(
    home: Home, installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(installed)
    monkeypatch.setattr(mirror, "_describe", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    options = Options(stack=str(home.path.parent / "mine.toml"), mirror=installed)
    with pytest.raises(KeyboardInterrupt):
        setup(options)
    monkeypatch.undo()
    with pytest.raises(
        errors.UsageError, match=r"no whole mirror: sm120-mirror\.json, which is written last"
    ) as raised:
        open_mirror(installed)
    assert f"--mirror {installed}" in (raised.value.remedy or "")
    assert home.path.name == "a home"


def damage_manifest(folder: Path) -> None:
    (folder / "sm120-mirror.json").write_text('{"schema": 1')


def other_manifest(folder: Path) -> None:
    (folder / "sm120-mirror.json").write_text('{"schema": 1, "stack": "../../etc", "files": {"/etc/passwd": "x"}}')


def new_lock_old_manifest(folder: Path) -> None:
    (folder / "pylock.toml").write_text((folder / "pylock.toml").read_text() + "\n")


def no_stack_file(folder: Path) -> None:
    (folder / "mine.toml").unlink()


def no_wheel(folder: Path) -> None:
    next(iter((folder / "wheels").glob("numpy*"))).unlink()


def cut_wheel(folder: Path) -> None:
    wheel = next(iter((folder / "wheels").glob("numpy*")))
    wheel.write_bytes(wheel.read_bytes()[:-1])


def changed_wheel(folder: Path) -> None:
    wheel = next(iter((folder / "wheels").glob("numpy*")))
    wheel.write_bytes(bytes([wheel.read_bytes()[0] ^ 1]) + wheel.read_bytes()[1:])


def edit_lock(old: str, new: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path, manifest = folder / "pylock.toml", folder / "sm120-mirror.json"
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))
        content = json.loads(manifest.read_text())
        content["files"]["pylock.toml"] = files.sha256(path)
        manifest.write_text(json.dumps(content))

    return damage


PYTHON = f"3.{sys.version_info[1]}"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        pytest.param(damage_manifest, "is damaged", id="half a manifest"),
        pytest.param(other_manifest, "not the manifest of a mirror", id="somebody's manifest"),
        pytest.param(
            new_lock_old_manifest, r"pylock\.toml has changed since, or the mirror was not", id="half written"
        ),
        pytest.param(no_stack_file, r"mine\.toml is missing", id="no stack file"),
        pytest.param(no_wheel, r"wheels/numpy-.* is missing", id="no wheel"),
        pytest.param(cut_wheel, r"wheels/numpy-.* has \d+ bytes, not \d+", id="half a wheel"),
        pytest.param(changed_wheel, "expected SHA-256", id="a changed wheel"),
        pytest.param(edit_lock(f'python = "{PYTHON}"', 'python = "3.99"'), "needs Python 3.99", id="another python"),
        pytest.param(edit_lock("linux_x86_64", "linux_riscv64"), "is for linux_riscv64", id="another machine"),
        pytest.param(edit_lock('path = "wheels/num', 'path = "../num'), "no usable URL or path", id="outside"),
    ],
)
def test_a_mirror_that_cannot_be_used(home: Home, whole: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(whole)
    before = tree(whole)
    with pytest.raises(errors.ToolkitError, match=message) as raised:
        setup(Options(offline=whole))
    assert raised.value.exit_code in {2, 10, 13}
    assert tree(whole) == before
    assert not list((home.path / ".sm120").rglob("sm120-lock.json"))


def test_a_mirror_of_another_stack(home: Home, whole: Path, tmp_path: Path) -> None:
    with pytest.raises(errors.UsageError, match="is the mirror of the stack mine, not of cpu"):
        setup(Options(offline=whole, stack="cpu"))
    mine = home.stack_file(PACKAGES.replace('"2.4"', '"2.5"'))
    with pytest.raises(errors.UsageError, match="the stack file of mine has changed") as raised:
        setup(Options(offline=whole, stack=str(mine)))
    assert "leave --stack out" in (raised.value.remedy or "")
    other = mine.rename(tmp_path / "other.toml")
    for lock in (True, False):
        with pytest.raises(errors.UsageError, match="is the mirror of the stack mine"):
            setup(Options(stack=str(other), mirror=whole, lock=lock))
    assert not home.path.exists()


def test_a_folder_that_is_no_mirror(home: Home, tmp_path: Path) -> None:
    with pytest.raises(errors.UsageError, match="there is no such folder"):
        setup(Options(offline=tmp_path / "nowhere"))
    documents = tmp_path / "documents"
    documents.mkdir()
    (documents / "letter.txt").write_text("dear")
    with pytest.raises(errors.UsageError, match=r"holds something else: letter\.txt"):
        setup(Options(stack=str(home.stack_file(PACKAGES)), mirror=documents))
    with pytest.raises(errors.UsageError, match="is no folder"):
        setup(Options(stack=str(home.stack_file(PACKAGES)), mirror=documents / "letter.txt"))
    with pytest.raises(errors.UsageError, match=r"letter\.txt is no folder"):
        setup(Options(stack=str(home.stack_file(PACKAGES)), mirror=documents / "letter.txt" / "mirror"))
    assert [path.name for path in documents.iterdir()] == ["letter.txt"]
    assert not home.path.exists()


def test_a_mirror_that_may_not_be_written_is_told_before_the_work(
    home: Home, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("os.access", lambda path, _: path != tmp_path)
    for lock in (False, True):
        with pytest.raises(errors.PreflightError, match="cannot be written"):
            setup(Options(stack=str(home.stack_file(PACKAGES)), mirror=tmp_path / "new" / "mirror", lock=lock))
    assert not home.path.exists()


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": 1, "stack": "../x", "files": {}}'])
def test_a_damaged_manifest_says_how_to_make_the_mirror_whole(home: Home, tmp_path: Path, text: str) -> None:
    folder = tmp_path / "a b"
    folder.mkdir()
    (folder / "sm120-mirror.json").write_text(text)
    for options in (Options(offline=folder), Options(stack=str(home.stack_file(PACKAGES)), mirror=folder)):
        with pytest.raises(errors.UsageError, match="is damaged, or not the manifest") as raised:
            setup(options)
        assert f"rm '{folder}/sm120-mirror.json'" in str(raised.value.remedy)
    assert not home.path.exists()


def test_a_mirror_needs_space(home: Home, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "wheels", "numpy", "2.4")
    stack = home.stack('numpy = "2.4"')
    lock = home.write_lock(stack, {wheel: wheel.as_uri()})
    home.store().fetch(lock.files, None, Console.current())
    monkeypatch.setattr(files, "free_bytes", lambda _: 10)
    with pytest.raises(
        errors.PreflightError, match=r"the mirror needs another \d+ B in .*: \d+ B more than the 10 B that are free"
    ):
        mirror.write(tmp_path / "new", stack, lock, home.store(), Console.current())


def test_a_mirror_by_lock_alone_installs_nothing(index: LocalIndex, home: Home, tmp_path: Path) -> None:
    index.wheel("numpy", "2.4")
    stack = home.stack_file('numpy = "2.4"')
    setup(Options(stack=str(stack), lock=True, mirror=tmp_path / "mirror"))
    assert not home.state.env("mine").exists()
    assert selected(home.state) is None
    assert open_mirror(tmp_path / "mirror").lock.fingerprint == home.lock().fingerprint


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.network
def test_cpu_is_reproduced_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrap = without_network()
    monkeypatch.setenv("SM120_HOME", str(tmp_path / "home"))
    home = Home(tmp_path / "home", tmp_path / "pip.conf", monkeypatch)
    first = home.setup_ok("--stack", "cpu", "--mirror", str(tmp_path / "mirror"))
    folder = Path(first["environment"])
    before = snapshot(folder)
    assert len(before) > 10_000
    forget(home)
    result = home.setup_ok("--offline", str(tmp_path / "mirror"), wrap=wrap)
    assert result["fingerprint"] == first["fingerprint"]
    assert snapshot(folder) == before
    assert selected(home.state) == "cpu"

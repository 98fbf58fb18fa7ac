"""Interpreters that exist already: real virtual environments, looked over and never changed."""

import hashlib
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tests.integration.toolkit.local_index import make_wheel
from tests.integration.toolkit.stack_home import TORCH_CPU, Home, invocation

from sm120 import errors
from sm120.console import Console
from sm120.stack import ensure_environment, look, selected
from sm120.stack.command import Options, setup


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    return Home.make(tmp_path, monkeypatch)


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """Somebody's environment, with a torch, whose files have not been compiled yet; its interpreter."""
    folder = tmp_path / "their env"
    subprocess.run([sys.executable, "-I", "-m", "venv", "--without-pip", folder], check=True)
    add(folder, "torch", "2.13.0+cpu", TORCH_CPU)
    add(folder, "numpy", "2.4")
    return folder / "bin" / "python"


def add(folder: Path, name: str, version: str, content: dict[str, str] | None = None) -> None:
    import zipfile

    wheel = make_wheel(folder.parent / "wheels", name, version, content=content)
    (site,) = folder.glob("lib/*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)


def tree(folder: Path) -> dict[str, tuple[int, str]]:
    """Every entry with its time of change and content: what a write of any kind would alter."""
    found = {}
    for path in [folder, *folder.rglob("*")]:
        content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() and not path.is_symlink() else ""
        found[str(path)] = (path.lstat().st_mtime_ns, content)
    return found


def test_adopting_proves_fingerprints_and_changes_nothing(home: Home, venv: Path) -> None:
    before = tree(venv.parents[1])
    setup(Options(adopt=venv))
    assert tree(venv.parents[1]) == before
    record = json.loads(home.state.adopted("adopted").read_text())
    assert record["torch"] == {"version": "2.13.0+cpu", "cuda": None, "file": record["torch"]["file"]}
    assert record["python"] == str(venv)
    assert [(d["name"], d["version"]) for d in record["distributions"]] == [("numpy", "2.4"), ("torch", "2.13.0+cpu")]
    (info,) = venv.parents[1].glob("lib/*/site-packages/numpy-2.4.dist-info")
    numpy = record["distributions"][0]
    assert numpy["sha256"] == hashlib.sha256((info / "RECORD").read_bytes()).hexdigest()

    assert selected(home.state) == "adopted"
    found, why = look("adopted", home.state)
    assert found is not None, why
    assert found.adopted
    assert found.python == venv
    assert found.fingerprint == record["fingerprint"]
    assert ensure_environment("adopted", home.state, Console.current()) == found
    assert tree(venv.parents[1]) == before


def test_an_adopted_one_stands_for_a_stack_of_its_name(home: Home, venv: Path) -> None:
    stack = home.stack('numpy = "2.4"')
    setup(Options(adopt=venv, stack="mine"))
    assert ensure_environment(stack, home.state, Console.current()).python == venv
    assert look(stack, home.state)[0] is not None
    setup(Options(stack="mine"))
    assert not home.state.env("mine").exists()
    for options in (Options(stack="mine", lock=True), Options(stack="mine", mirror=home.path / "mirror")):
        with pytest.raises(errors.UsageError, match="adopted interpreter: it has no lock") as raised:
            setup(options)
        assert f"rm {shlex.quote(str(home.state.adopted('mine')))}" in (raised.value.remedy or "")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("add", r"\+ extra-1\.0"),
        ("remove", r"- numpy-2\.4"),
        ("upgrade", r"- numpy-2\.4, \+ numpy-2\.5|\+ numpy-2\.5.*- numpy-2\.4"),
        ("rewrite", r"changed numpy-2\.4"),
        ("python", "the interpreter is gone"),
    ],
)
def test_a_change_is_told_and_it_can_be_adopted_again(home: Home, venv: Path, change: str, message: str) -> None:
    setup(Options(adopt=venv, stack="theirs"))
    (info,) = venv.parents[1].glob("lib/*/site-packages/numpy-2.4.dist-info")
    if change == "add":
        add(venv.parents[1], "extra", "1.0")
    elif change in {"remove", "upgrade"}:
        info.rename(info.with_name("gone" if change == "remove" else "numpy-2.5.dist-info"))
    elif change == "rewrite":
        (info / "RECORD").write_text("numpy/__init__.py,sha256=xyz,1\n")
    else:
        venv.rename(venv.with_name("elsewhere"))
    for attempt in (look, lambda name, state: ensure_environment(name, state, Console.current())):
        with pytest.raises(errors.PreflightError, match=f"has changed since .*{message}") as raised:
            attempt("theirs", home.state)
        assert f"--adopt {shlex.quote(str(venv))} --stack theirs" in (raised.value.remedy or "")
    if change != "python":
        setup(Options(adopt=venv, stack="theirs"))
        assert look("theirs", home.state)[0] is not None


def test_a_package_that_is_shadowed_is_no_change(home: Home, venv: Path, tmp_path: Path) -> None:
    add(tmp_path / "their env", "numpy", "2.3")
    setup(Options(adopt=venv))
    assert look("adopted", home.state)[0] is not None


def test_what_cannot_be_adopted(home: Home, venv: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    (tmp_path / "text").chmod(0o755)
    for path, message, remedy in (
        (venv.parents[1], "is a folder", str(venv)),
        (tmp_path / "nowhere", "does not exist", "interpreter"),
        (Path("/bin/ls"), "does not answer as a Python does", "interpreter"),
        (tmp_path / "text", "does not answer as a Python does", "interpreter"),
    ):
        with pytest.raises(errors.UsageError, match=message) as raised:
            setup(Options(adopt=path))
        assert remedy in (raised.value.remedy or "")
    with pytest.raises(errors.BinaryError, match="its torch does not import: ModuleNotFoundError"):
        setup(Options(adopt=Path(sys.executable)))
    with pytest.raises(errors.UsageError, match="is the name to adopt it by"):
        setup(Options(adopt=venv, stack="./mine.toml"))
    for name in ("a b", "-rf", "a\nb", "a" * 101):
        with pytest.raises(errors.UsageError, match="letters, digits"):
            setup(Options(adopt=venv, stack=name))
    assert not home.path.exists()


@pytest.mark.parametrize(
    "said",
    [
        *("adopted {", "adopted null", 'adopted {"version": "new", "folders": []}'),
        'adopted {"version": "3.11.7", "folders": 5}',
        'adopted {"version": "3.11.7", "folders": []}\npackage {"x',
        'adopted {"version": "3.11.7", "folders": []}\npackage [1, 2, 3]',
        f"adopted {'[' * 20_000}",
    ],
)
def test_a_program_that_nearly_answers_as_a_python_does(home: Home, tmp_path: Path, said: str) -> None:
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{said}\nEND\n")
    program.chmod(0o755)
    with pytest.raises(errors.UsageError, match="does not answer as a Python does"):
        setup(Options(adopt=program))
    assert not home.path.exists()


def test_a_program_whose_torch_says_nonsense(home: Home, tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text(
        "#!/bin/sh\ncase $* in *'import json, torch'*) echo 'adopted {\"version\": 5}' ;;"
        ' *) echo \'adopted {"version": "3.11.7", "folders": []}\' ;; esac\n'
    )
    program.chmod(0o755)
    with pytest.raises(errors.BinaryError, match="its torch does not import"):
        setup(Options(adopt=program))
    assert not home.path.exists()


def test_a_torch_that_is_broken(home: Home, venv: Path) -> None:
    (init,) = venv.parents[1].glob("lib/*/site-packages/torch/__init__.py")
    init.write_text("raise ImportError('libc10.so: undefined symbol: xyz')")
    with pytest.raises(errors.BinaryError, match=r"ImportError: libc10\.so: undefined symbol: xyz"):
        setup(Options(adopt=venv))
    assert not home.state.adopted("adopted").exists()


def test_a_damaged_record_is_one_error(home: Home, venv: Path) -> None:
    setup(Options(adopt=venv))
    for text in ("{", "[]", '{"schema": 99}', '{"schema": 1}'):
        home.state.adopted("adopted").write_text(text)
        with pytest.raises(errors.UsageError, match="of another version or damaged") as raised:
            look("adopted", home.state)
        assert "--adopt PYTHON --stack adopted" in str(raised.value.remedy)


def test_dry_run_registers_nothing(home: Home, venv: Path) -> None:
    before = tree(venv.parents[1])
    words = ("setup", "--json", "--dry-run", "--adopt", os.path.relpath(venv, Path.cwd()))
    done = subprocess.run(invocation(*words), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["python"] == str(venv)
    assert result["torch"]["version"] == "2.13.0+cpu"
    assert not home.path.exists()
    assert tree(venv.parents[1]) == before

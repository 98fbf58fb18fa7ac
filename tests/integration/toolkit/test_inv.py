"""scripts/inv as it stands, in small checkouts whose lock names one package, served by a folder of wheels."""

import base64
import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest

from sm120.config import CHECKOUT

INVOKE = """\
import json, os, sys
print(json.dumps({"argv": sys.argv[1:], "cwd": os.getcwd(), "python": sys.version_info[:2], "exe": sys.executable}))
"""
# A build backend that needs nothing: an editable wheel is one .pth file.
BACKEND = """\
import zipfile, pathlib
def build_editable(folder, settings=None, metadata=None):
    info = "tiny-1.dist-info"
    with zipfile.ZipFile(pathlib.Path(folder, "tiny-1-py3-none-any.whl"), "w") as wheel:
        wheel.writestr("tiny.pth", str(pathlib.Path.cwd() / "src"))
        wheel.writestr(info + "/METADATA", "Metadata-Version: 2.1\\nName: tiny\\nVersion: 1\\n")
        wheel.writestr(info + "/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(info + "/RECORD", "tiny.pth,,\\n")
    return "tiny-1-py3-none-any.whl"
"""
PROJECT = """\
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "tiny"
version = "1"
"""


def make_wheel(folder: Path, name: str, version: str, members: dict[str, str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    members = {
        **members,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for path, text in members.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record += f"{path},sha256={digest},{len(text.encode())}\n"
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in {**members, f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}.items():
            archive.writestr(path, text)
    return wheel


class Checkout:
    """A checkout with the real scripts/inv, and the environment variables of a machine with a folder of wheels."""

    def __init__(self, root: Path, wheels: Path) -> None:
        self.root = root
        self.wheel = make_wheel(wheels, "invoke", "1", {"invoke/__init__.py": "", "invoke/__main__.py": INVOKE})
        (root / "scripts").mkdir(parents=True)
        for name in ("inv", "bootstrap.py"):
            shutil.copy(CHECKOUT / "scripts" / name, root / "scripts" / name)
        (root / "backend.py").write_text(BACKEND)
        (root / "pyproject.toml").write_text(PROJECT)
        (root / "src").mkdir()
        (root / "src" / "tiny.py").write_text("")
        self.write_lock(hashlib.sha256(self.wheel.read_bytes()).hexdigest())
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "SM120_", "XDG_", "PYTHON"))}
        self.env.update(
            PIP_CONFIG_FILE=os.devnull, PIP_NO_INDEX="1", PIP_FIND_LINKS=str(wheels), SM120_PYTHON=base_python()
        )

    @property
    def script(self) -> Path:
        return self.root / "scripts" / "inv"

    @property
    def venv(self) -> Path:
        return self.root / ".venv"

    def write_lock(self, digest: str) -> None:
        (self.root / "requirements-dev.lock").write_text(f"invoke==1 --hash=sha256:{digest}\n")

    def inv(
        self, *words: str, script: Path | None = None, cwd: Path | None = None, env: dict[str, str] | None = None
    ) -> "subprocess.CompletedProcess[str]":
        argv = [str(script or self.script), *words]
        env = {**self.env, **(env or {})}
        return subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, check=False)

    def start(self) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [str(self.script), "word"],
            env=self.env,
            text=True,
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )


def base_python() -> str:
    return str(getattr(sys, "_base_executable", sys.executable))


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path / "a checkout with spaces", tmp_path / "wheels")


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    folder = tmp_path_factory.mktemp("ready")
    made = Checkout(folder / "a $HOME 'quoted' \"checkout\"", folder / "wheels")
    done = made.inv("first")
    assert done.returncode == 0, done.stderr
    assert "making" in done.stderr
    return made


def call(done: "subprocess.CompletedProcess[str]") -> dict[str, object]:
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


def test_words_arrive_unchanged_and_the_folder_stays(ready: Checkout, tmp_path: Path) -> None:
    done = ready.inv("validate-backends", "--only", "a b*", "", cwd=tmp_path)
    found = call(done)
    assert found["argv"] == ["--search-root", str(ready.root), "validate-backends", "--only", "a b*", ""]
    assert found["cwd"] == str(tmp_path)
    assert found["exe"] == str(ready.venv / "bin" / "python")
    assert done.stderr == ""


def test_through_links(ready: Checkout, tmp_path: Path) -> None:
    (tmp_path / "absolute").symlink_to(ready.script)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "relative").symlink_to("../absolute")
    (tmp_path / "checkout").symlink_to(ready.root)
    for script in (tmp_path / "absolute", tmp_path / "folder" / "relative", tmp_path / "checkout" / "scripts" / "inv"):
        done = ready.inv("x", script=script, cwd=tmp_path)
        assert call(done)["argv"] == ["--search-root", str(ready.root), "x"]
        assert done.stderr == ""


def test_a_second_call_looks_for_no_python_and_calls_no_pip(ready: Checkout, tmp_path: Path) -> None:
    for name in ("cat", "cmp", "cksum", "cut", "dirname", "readlink", "sh"):
        (tmp_path / name).symlink_to(shutil.which(name) or name)
    log = ready.venv / ".sm120" / "bootstrap.log"
    before = log.stat().st_mtime_ns
    assert ready.inv("x", env={"PATH": str(tmp_path)}).returncode == 0
    assert log.stat().st_mtime_ns == before


def test_files_of_the_callers_folder_shadow_nothing(ready: Checkout, tmp_path: Path) -> None:
    (tmp_path / "invoke").mkdir()
    (tmp_path / "invoke" / "__init__.py").write_text("raise SystemExit('shadowed')")
    (tmp_path / "json.py").write_text("raise SystemExit('shadowed')")
    assert ready.inv("x", cwd=tmp_path).returncode == 0


def test_project_is_installed_in_editable_form(ready: Checkout) -> None:
    done = subprocess.run(
        [ready.venv / "bin" / "python", "-c", "import tiny; print(tiny.__file__)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == str(ready.root / "src" / "tiny.py")


def test_change_of_project_or_lock_makes_it_anew(checkout: Checkout) -> None:
    assert checkout.inv("x").returncode == 0
    (checkout.venv / "rubble").write_text("")
    (checkout.root / "pyproject.toml").write_text(PROJECT + "# changed\n")
    assert "making" in checkout.inv("x").stderr
    assert not (checkout.venv / "rubble").exists()
    assert checkout.inv("x").stderr == ""
    with (checkout.root / "requirements-dev.lock").open("a") as lock:
        lock.write("# new\n")
    assert "making" in checkout.inv("x").stderr


@pytest.mark.slow
def test_moved_checkout_makes_it_anew(checkout: Checkout) -> None:
    assert checkout.inv("x").returncode == 0
    moved = checkout.root.with_name("moved")
    checkout.root.rename(moved)
    checkout.root = moved
    done = checkout.inv("x")
    assert call(done)["exe"] == str(moved / ".venv" / "bin" / "python")


def test_two_at_once(checkout: Checkout) -> None:
    both = [checkout.start(), checkout.start()]
    outputs = [one.communicate(timeout=200) for one in both]
    assert [one.returncode for one in both] == [0, 0], outputs
    errors = "".join(err for _, err in outputs)
    assert errors.count("scripts/inv: making") == 1
    assert errors.count("waiting for it") <= 1


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert path.exists()


@pytest.mark.parametrize(
    "sign",
    [
        signal.SIGKILL,
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_interrupted_first_run_is_made_again(checkout: Checkout, sign: signal.Signals) -> None:
    first = checkout.start()
    wait_for(checkout.venv / "pyvenv.cfg")
    os.killpg(first.pid, sign)
    first.communicate(timeout=60)
    assert first.returncode != 0
    assert not (checkout.venv / ".sm120" / "complete").exists()
    (checkout.venv / "rubble").write_text("")
    assert call(checkout.inv("x"))["argv"] == ["--search-root", str(checkout.root), "x"]
    assert not (checkout.venv / "rubble").exists()


@pytest.mark.slow
def test_lock_of_somebody_else_is_waited_for(checkout: Checkout) -> None:
    assert checkout.inv("x").returncode == 0
    (checkout.venv / ".sm120" / "complete").unlink()
    with (checkout.root / ".venv.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        waiting = checkout.start()
        assert waiting.stderr is not None
        assert "waiting for it" in waiting.stderr.readline()
        threading.Timer(0.2, lambda: fcntl.flock(file, fcntl.LOCK_UN)).start()
        out, err = waiting.communicate(timeout=200)
    assert waiting.returncode == 0, err
    assert json.loads(out)


def test_folder_that_is_not_ours_is_left_alone(checkout: Checkout) -> None:
    checkout.venv.mkdir()
    (checkout.venv / "precious").write_text("")
    done = checkout.inv("x")
    assert done.returncode == 10
    assert "was not made by scripts/inv" in done.stderr
    assert (checkout.venv / "precious").exists()


@pytest.mark.slow
def test_home_elsewhere(checkout: Checkout, tmp_path: Path) -> None:
    for home in (str(tmp_path / "the home") + "/", "relative"):
        done = checkout.inv("x", env={"SM120_HOME": home}, cwd=tmp_path)
        assert Path(str(call(done)["exe"])) == tmp_path / home / ".venv" / "bin" / "python"
        assert checkout.inv("x", env={"SM120_HOME": home}, cwd=tmp_path).stderr == ""
    assert not checkout.venv.exists()


def test_no_index(checkout: Checkout) -> None:
    env = {"PIP_NO_INDEX": "0", "PIP_FIND_LINKS": "", "PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "1"}
    done = checkout.inv("x", env=env)
    assert done.returncode == 10
    assert "no package index could be reached" in done.stderr
    assert "remedy: connect to the network" in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 3
    assert checkout.inv("x").returncode == 0


def test_package_that_is_not_the_locked_one(checkout: Checkout) -> None:
    checkout.write_lock("0" * 64)
    done = checkout.inv("x")
    assert done.returncode == 10
    assert "not the one that requirements-dev.lock names" in done.stderr


@pytest.mark.slow
def test_package_that_does_not_exist_shows_the_end_of_the_log(checkout: Checkout) -> None:
    (checkout.root / "requirements-dev.lock").write_text(f"nowhere==1 --hash=sha256:{'0' * 64}\n")
    done = checkout.inv("x")
    assert done.returncode == 10
    assert "No matching distribution found for nowhere==1" in done.stderr
    assert "whole log" in done.stderr


NO_ENSUREPIP = """#!/bin/sh
exec "{python}" -c 'import runpy, sys
sys.modules["ensurepip"] = None
words = sys.argv[1:]
if words[0] == "-c":
    exec(words[1])
else:
    sys.argv = words[1:]
    runpy.run_path(words[1], run_name="__main__")' "$@"
"""


def fake_python(folder: Path, name: str, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(text)
    path.chmod(0o755)
    return path


def test_python_without_ensurepip(checkout: Checkout, tmp_path: Path) -> None:
    python = fake_python(tmp_path / "bin", "python3", NO_ENSUREPIP.format(python=base_python()))
    done = checkout.inv("x", env={"SM120_PYTHON": str(python)})
    assert done.returncode == 10
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert f"remedy: Debian, Ubuntu: apt install python{version}-venv" in done.stderr

    # Without SM120_PYTHON, a later candidate that can do it is taken.
    fake_python(tmp_path / "bin", "python3.13", f'#!/bin/sh\nexec "{base_python()}" "$@"\n')
    path = f"{tmp_path / 'bin'}:/usr/bin:/bin"
    assert checkout.inv("x", env={"SM120_PYTHON": "", "PATH": path}).returncode == 0


@pytest.mark.parametrize("program", ["/no/such/python", "/bin/false"])
def test_python_that_is_none(checkout: Checkout, program: str) -> None:
    done = checkout.inv("x", env={"SM120_PYTHON": program})
    assert done.returncode == 10
    assert f"SM120_PYTHON={program} is not a Python 3.11 or newer" in done.stderr


def test_no_python_at_all(checkout: Checkout, tmp_path: Path) -> None:
    for name in ("cmp", "dirname", "readlink", "sh"):
        (tmp_path / name).symlink_to(shutil.which(name) or name)
    fake_python(tmp_path, "python3", "#!/bin/sh\nexit 4\n")
    done = checkout.inv("x", env={"SM120_PYTHON": "", "PATH": str(tmp_path)})
    assert done.returncode == 10
    assert "no Python 3.11 or newer is on PATH" in done.stderr


@pytest.mark.slow
def test_called_from_the_environment_that_it_replaces(checkout: Checkout) -> None:
    assert checkout.inv("x").returncode == 0
    (checkout.root / "pyproject.toml").write_text(PROJECT + "# changed\n")
    activated = f"{checkout.venv / 'bin'}:{os.environ['PATH']}"
    done = checkout.inv("x", env={"SM120_PYTHON": "", "PATH": activated, "VIRTUAL_ENV": str(checkout.venv)})
    assert done.returncode == 0, done.stderr
    assert checkout.inv("x", env={"SM120_PYTHON": ""}).stderr == ""


@pytest.fixture
def read_only(checkout: Checkout) -> Checkout:
    """A checkout that the test can mount read-only, in a namespace of its own."""
    probe = ["unshare", "--mount", "--map-root-user", "true"]
    try:
        able = subprocess.run(probe, capture_output=True, check=False).returncode == 0
    except OSError:
        able = False
    if not able:
        pytest.skip("unshare cannot make a mount namespace here")
    return checkout


def test_read_only_checkout_uses_the_cache_folder(read_only: Checkout, tmp_path: Path) -> None:
    root = read_only.root
    script = 'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" && exec "$1/scripts/inv" x'
    argv = ["unshare", "--mount", "--map-root-user", "sh", "-c", script, "sh", str(root)]
    env = {**read_only.env, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    for calls in range(2):
        done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert str(json.loads(done.stdout)["exe"]).startswith(str(tmp_path / "cache" / "sm120"))
        assert ("making" in done.stderr) == (calls == 0)

"""The installer against a real package index on loopback: small wheels, real pip, real processes."""

import base64
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote, unquote

import psutil
import pytest

from sm120 import config, errors, files
from sm120.console import Console
from sm120.stack import Environment, Stack, ensure_environment
from sm120.stack.spec import parse
from sm120.state import State

TORCH_CPU = {
    "torch/__init__.py": "from torch.version import __version__",
    "torch/version.py": "__version__ = 'x'\ncuda = None\n",
}
TORCH_CUDA = {**TORCH_CPU, "torch/version.py": "__version__ = 'x'\ncuda: str | None = '13.0'\n"}


def make_wheel(
    folder: Path, name: str, version: str, content: dict[str, str] | None = None, requires: tuple[str, ...] = ()
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {requirement}\n" for requirement in requires)
    members = {
        **({f"{name}/__init__.py": f"__version__ = {version!r}\n"} if content is None else content),
        f"{info}/METADATA": metadata,
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for path, text in members.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record += f"{path},sha256={digest},{len(text.encode())}\n"
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in members.items():
            archive.writestr(path, text)
        archive.writestr(f"{info}/RECORD", record + f"{info}/RECORD,,\n")
    return wheel


class Index:
    """A PEP 503 index over a folder of wheels, on loopback."""

    def __init__(self, root: Path) -> None:
        self.files = root / "files"
        self.files.mkdir(parents=True)
        self.hashes = True
        self.requests: list[str] = []
        self.stall = threading.Event()  # set: a wheel's second half never comes
        self.stop = threading.Event()
        index = self

        class Handler(SimpleHTTPRequestHandler):
            def do_GET(self) -> None:
                index.answer(self)

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05})
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}/simple/"

    def answer(self, request: SimpleHTTPRequestHandler) -> None:
        self.requests.append(request.path)
        _, kind, name, *_ = [*unquote(request.path).split("/"), ""]
        if kind == "files":
            data, content_type = (self.files / name).read_bytes(), "application/octet-stream"
        else:
            wheels = [
                w for w in sorted(self.files.glob("*.whl")) if w.name.split("-")[0].replace("_", "-").lower() == name
            ]
            if not wheels:
                request.send_error(404)
                return
            links = (self._link(wheel) for wheel in wheels)
            data, content_type = f"<!DOCTYPE html><html><body>{''.join(links)}</body></html>".encode(), "text/html"
        request.send_response(200)
        request.send_header("Content-Type", content_type)
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        if kind == "files" and self.stall.is_set():
            request.wfile.write(data[: len(data) // 2])
            request.wfile.flush()
            self.stop.wait(120)
            return
        request.wfile.write(data)

    def _link(self, wheel: Path) -> str:
        digest = f"#sha256={files.sha256(wheel)}" if self.hashes else ""
        return f'<a href="/files/{quote(wheel.name)}{digest}">{wheel.name}</a>'

    def close(self) -> None:
        self.stop.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    made = Index(tmp_path / "index")
    yield made
    made.close()


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Index]:
    made = Index(tmp_path / "other")
    yield made
    made.close()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of the toolkit, and a machine whose pip is configured by the test alone."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("SM120_HOME", str(tmp_path / "a home"))
    return tmp_path / "a home"


@pytest.fixture
def pip_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: Path) -> Callable[[str], None]:
    """Writes the machine's pip.conf."""
    path = tmp_path / "pip.conf"

    def write(text: str) -> None:
        path.write_text("[global]\n" + text)
        monkeypatch.setenv("PIP_CONFIG_FILE", str(path))

    assert home.parent == tmp_path
    return write


def make_stack(packages: str, imports: str = "", tail: str = "", python: str = ">=3.11") -> Stack:
    prove = f"[prove]\nimports = [{imports}]\n" if imports else ""
    head = f'schema = 1\nsummary = "s"\npython = "{python}"\ndisk-mb = 1\n[packages]\n'
    return parse(f"{head}{packages}\n{prove}{tail}", Path("mine.toml"))


def ensure(stack: Stack) -> Environment:
    return ensure_environment(stack, State.resolve(), Console.current())


def lock_of(environment: Environment) -> dict[str, dict[str, str]]:
    content = json.loads(environment.lock.read_text())
    return {d["name"]: d for d in content["distributions"]}


def everything_written(home: Path) -> str:
    texts = [
        p.read_text("utf-8", "replace")
        for p in home.rglob("*")
        if p.is_file() and p.suffix in {".json", ".jsonl", ".log"}
    ]
    return "\n".join(texts)


def test_install_records_version_url_and_hash_and_a_second_call_does_nothing(
    index: Index, pip_config: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = make_wheel(index.files, "torch", "2.13.0+cpu", TORCH_CPU, requires=("leaf>=1",))
    leaf = make_wheel(index.files, "leaf", "1.5")
    make_wheel(index.files, "torch", "2.14.0+cpu", TORCH_CPU)
    pip_config(f"index-url = {index.url}\n")
    stack = make_stack('torch = "2.13.0+cpu"', imports='"torch", "leaf"')

    made = ensure(stack)
    assert made.fresh
    lock = lock_of(made)
    assert sorted(lock) == ["leaf", "torch"]
    assert lock["torch"]["version"] == "2.13.0+cpu"
    assert lock["torch"]["sha256"] == files.sha256(torch)
    assert lock["leaf"]["sha256"] == files.sha256(leaf)
    assert lock["leaf"]["url"].endswith("/files/leaf-1.5-py3-none-any.whl")
    done = subprocess.run([made.python, "-c", "import torch, leaf"], check=True)
    assert done.returncode == 0
    assert "proved" in json.loads(made.lock.read_text())

    def refuse(*_: object, **__: object) -> None:
        pytest.fail("a second call starts nothing")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    before = sorted(State.resolve().runs.iterdir())
    again = ensure(stack)
    assert not again.fresh
    assert again.fingerprint == made.fingerprint
    assert sorted(State.resolve().runs.iterdir()) == before


def test_constraints_and_extra_index_of_the_machine_are_honoured(
    index: Index, other: Index, pip_config: Callable[[str], None], tmp_path: Path
) -> None:
    make_wheel(index.files, "numpy", "2.4", requires=("leaf",))
    for version in ("1.0", "2.0"):
        make_wheel(other.files, "leaf", version)
    (tmp_path / "constraints.txt").write_text("leaf<2\n")
    pip_config(f"index-url = {index.url}\nextra-index-url = {other.url}\nconstraint = {tmp_path / 'constraints.txt'}\n")
    assert lock_of(ensure(make_stack('numpy = "2.4"')))["leaf"]["version"] == "1.0"


def test_find_links_and_no_index_of_the_machine_are_honoured(pip_config: Callable[[str], None], tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "wheels", "torch", "2.13.0+cpu", TORCH_CPU)
    pip_config(f"no-index = true\nfind-links = {tmp_path / 'wheels'}\n")
    torch = lock_of(ensure(make_stack('torch = "2.13.0+cpu"')))["torch"]
    assert torch["sha256"] == files.sha256(wheel)
    assert torch["url"].startswith("file://")


def test_index_without_hashes(index: Index, pip_config: Callable[[str], None]) -> None:
    index.hashes = False
    wheel = make_wheel(index.files, "numpy", "2.4")
    pip_config(f"index-url = {index.url}\n")
    assert lock_of(ensure(make_stack('numpy = "2.4"')))["numpy"]["sha256"] == files.sha256(wheel)


def test_variables_that_send_packages_elsewhere_do_not(
    index: Index, pip_config: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_wheel(index.files, "numpy", "2.4")
    pip_config(f"index-url = {index.url}\nuser = true\n")
    monkeypatch.setenv("PIP_TARGET", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("PIP_DRY_RUN", "1")
    made = ensure(make_stack('numpy = "2.4"', imports='"numpy"'))
    assert made.fresh
    assert not (tmp_path / "elsewhere").exists()


def test_password_of_an_index_is_written_nowhere(index: Index, pip_config: Callable[[str], None], home: Path) -> None:
    make_wheel(index.files, "numpy", "2.4")
    pip_config(f"index-url = {index.url.replace('http://', 'http://someone:battery-staple@')}\n")
    made = ensure(make_stack('numpy = "2.4"'))
    assert "battery-staple" not in lock_of(made)["numpy"]["url"]
    assert "battery-staple" not in everything_written(home)


def test_cuda_build_of_torch_is_not_taken(index: Index, pip_config: Callable[[str], None], home: Path) -> None:
    for version in ("2.13.0+cu130", "2.13.0", "2.14.0"):
        make_wheel(index.files, "torch", version, TORCH_CUDA)
    pip_config(f"index-url = {index.url}\n")
    with pytest.raises(errors.PreflightError, match=r"no configured package index has torch==2\.13\.0\+cpu"):
        ensure(make_stack('torch = "2.13.0+cpu"'))
    assert not any("/files/" in path for path in index.requests)
    assert not list(home.glob(".sm120/env/mine/*lock*"))


def test_mislabelled_torch_is_refused_and_not_used_later(index: Index, pip_config: Callable[[str], None]) -> None:
    make_wheel(index.files, "torch", "2.13.0+cpu", TORCH_CUDA)
    pip_config(f"index-url = {index.url}\n")
    for _ in range(2):
        with pytest.raises(errors.BinaryError, match="cu130 build"):
            ensure(make_stack('torch = "2.13.0+cpu"'))


FALLBACK = '[[index]]\nurl = "{url}"\npackages = ["torch"]\nreason = "no other has it"\n'


def test_stacks_own_index_is_asked_for_its_package_alone_and_only_when_needed(
    index: Index, other: Index, pip_config: Callable[[str], None]
) -> None:
    make_wheel(index.files, "torch", "2.13.0", TORCH_CUDA)
    make_wheel(index.files, "numpy", "2.4", requires=("torch>=2",))
    wheel = make_wheel(other.files, "torch", "2.13.0+cpu", TORCH_CPU)
    make_wheel(other.files, "numpy", "2.4", {"numpy/__init__.py": "raise ImportError('from the wrong index')"})
    pip_config(f"index-url = {index.url}\n")
    stack = make_stack('torch = "2.13.0+cpu"\nnumpy = "2.4"', imports='"numpy"', tail=FALLBACK.format(url=other.url))
    made = ensure(stack)
    assert lock_of(made)["torch"]["sha256"] == files.sha256(wheel)
    assert other.url in json.loads(made.lock.read_text())["source"]
    assert not [path for path in other.requests if "numpy" in path]

    other.requests.clear()
    make_wheel(index.files, "torch", "2.13.0+cpu", TORCH_CPU)
    made.lock.unlink()
    assert lock_of(ensure(stack))["torch"]["url"].startswith(index.url.removesuffix("simple/"))
    assert other.requests == []


def test_constraint_for_the_package_that_is_missing(
    index: Index, other: Index, pip_config: Callable[[str], None], tmp_path: Path
) -> None:
    make_wheel(index.files, "torch", "2.13.0", TORCH_CUDA)
    wheel = make_wheel(other.files, "torch", "2.13.0+cpu", TORCH_CPU)
    constraints = tmp_path / "constraints.txt"
    constraints.write_text("torch<=2.14.1\n")
    pip_config(f"index-url = {index.url}\nconstraint = {constraints}\n")
    with pytest.raises(errors.PreflightError, match=r"within pip's own constraint torch<=2\.14\.1"):
        ensure(make_stack('torch = "2.13.0+cpu"'))
    stack = make_stack('torch = "2.13.0+cpu"', tail=FALLBACK.format(url=other.url))
    assert lock_of(ensure(stack))["torch"]["sha256"] == files.sha256(wheel)

    constraints.write_text("torch<2.10\n")
    with pytest.raises(errors.PreflightError, match=r"is not to be had.*constraint torch<2\.10"):
        ensure(make_stack('torch = "2.13.0+cpu"', tail=FALLBACK.format(url=other.url), python=">=3.10"))


def test_neither_has_it(index: Index, other: Index, pip_config: Callable[[str], None]) -> None:
    pip_config(f"index-url = {index.url}\n")
    stack = make_stack('torch = "2.13.0+cpu"', tail=FALLBACK.format(url=other.url))
    with pytest.raises(errors.PreflightError, match="is not to be had") as raised:
        ensure(stack)
    assert other.url in raised.value.message
    assert "find-links" in (raised.value.remedy or "")


def test_no_network(pip_config: Callable[[str], None]) -> None:
    pip_config("index-url = http://127.0.0.1:9/simple/\nretries = 1\n")
    with pytest.raises(errors.PreflightError, match="no package index could be reached") as raised:
        ensure(make_stack('numpy = "2.4"'))
    assert raised.value.exit_code == 10
    assert "PIP_NO_INDEX" in (raised.value.remedy or "")
    assert Path(raised.value.where or "").is_file()


def test_no_space(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not home.exists()
    monkeypatch.setattr(files, "free_bytes", lambda _: 12345)
    with pytest.raises(errors.PreflightError, match=r"needs 1000000 bytes in .*, 12345 are free"):
        ensure(make_stack('numpy = "2.4"'))


def test_no_python_that_the_stack_has_wheels_for(home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert not home.exists()
    fake = tmp_path / "bin" / "python3.29"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")
    with pytest.raises(
        errors.PreflightError, match=r"needs a Python ==3\.29\.\*; .*python3\.29 is not one that starts"
    ):
        ensure(make_stack('numpy = "2.4"', python="==3.29.*"))


def test_a_module_that_does_not_import(index: Index, pip_config: Callable[[str], None]) -> None:
    make_wheel(index.files, "numpy", "2.4", {"numpy/__init__.py": "raise ImportError('libmissing.so.1: not found')"})
    pip_config(f"index-url = {index.url}\n")
    with pytest.raises(errors.BinaryError, match=r"does not import: ImportError: libmissing\.so\.1"):
        ensure(make_stack('numpy = "2.4"', imports='"numpy"'))


@pytest.mark.parametrize("damage", ["removed", "added", "half a lock", "no python", "another pin"])
def test_what_was_changed_is_made_again(
    index: Index, pip_config: Callable[[str], None], damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for version in ("2.4", "2.5"):
        make_wheel(index.files, "numpy", version)
    pip_config(f"index-url = {index.url}\n")
    made = ensure(make_stack('numpy = "2.4"'))
    (info,) = made.lock.parent.glob("lib/*/site-packages/numpy-2.4.dist-info")
    version = "2.4"
    if damage == "removed":
        info.rename(info.with_name("elsewhere"))
    elif damage == "added":
        (info.parent / "extra-1.dist-info").mkdir()
    elif damage == "half a lock":
        made.lock.write_text(made.lock.read_text()[:100])
    elif damage == "no python":
        made.python.unlink()
    else:
        version = "2.5"
    again = ensure(make_stack(f'numpy = "{version}"'))
    assert again.fresh
    assert lock_of(again)["numpy"]["version"] == version
    assert not (info.parent / "extra-1.dist-info").exists()
    assert "installing the stack mine (" in capsys.readouterr().out


PROGRAM = """
import sys
from pathlib import Path
from sm120.console import Console
from sm120.stack import ensure_environment
from sm120.stack.spec import parse
from sm120.state import State
stack = parse(sys.stdin.read(), Path("mine.toml"))
print(ensure_environment(stack, State.resolve(), Console.create()).fresh)
"""
STACK = 'schema = 1\nsummary = "s"\npython = ">=3.11"\ndisk-mb = 1\n[packages]\nnumpy = "2.4"\n'


def start_program() -> "subprocess.Popen[str]":
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert program.stdin is not None
    program.stdin.write(STACK)
    program.stdin.close()
    program.stdin = None
    return program


def wait_for_download(index: Index) -> None:
    deadline = time.monotonic() + 60
    while not any("/files/" in path for path in index.requests) and time.monotonic() < deadline:
        time.sleep(0.05)


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_download_leaves_nothing_that_counts(
    index: Index, pip_config: Callable[[str], None], home: Path, sign: signal.Signals
) -> None:
    make_wheel(index.files, "numpy", "2.4")
    pip_config(f"index-url = {index.url}\n")
    index.stall.set()
    program = start_program()
    wait_for_download(index)
    children = psutil.Process(program.pid).children(recursive=True)
    program.send_signal(sign)
    if sign == signal.SIGINT:
        program.communicate(timeout=60)
        assert not [child for child in children if child.is_running()]
    else:  # without the task's handler it dies at once, and its pip lives on with the lock
        program.communicate(timeout=60)
        for child in children:
            child.kill()
    assert (home / ".sm120" / "env" / "mine").exists()
    assert not list(home.rglob("sm120-lock.json"))

    index.stall.clear()
    made = ensure(parse(STACK, Path("mine.toml")))
    assert made.fresh
    assert sorted(lock_of(made)) == ["numpy"]


def test_killed_toolkits_pip_still_holds_the_lock(index: Index, pip_config: Callable[[str], None], home: Path) -> None:
    make_wheel(index.files, "numpy", "2.4")
    pip_config(f"index-url = {index.url}\n")
    index.stall.set()
    program = start_program()
    wait_for_download(index)
    children = psutil.Process(program.pid).children(recursive=True)
    program.kill()
    program.communicate(timeout=60)
    lock = home / ".sm120" / "env" / "mine.lock"
    with pytest.raises(errors.PreflightError, match="has held"), files.lock(lock, timeout=0.2):
        pytest.fail("pip still writes into the environment")
    for child in children:
        child.kill()
    index.stall.clear()
    assert ensure(parse(STACK, Path("mine.toml"))).fresh


def test_two_at_once_install_once(index: Index, pip_config: Callable[[str], None], home: Path) -> None:
    make_wheel(index.files, "numpy", "2.4")
    pip_config(f"index-url = {index.url}\n")
    programs = [start_program(), start_program()]
    outputs = [program.communicate(timeout=120) for program in programs]
    assert [program.returncode for program in programs] == [0, 0], outputs
    assert sorted(out.split()[-1] for out, _ in outputs) == ["False", "True"]
    assert len(list((home / "runs").iterdir())) == 1


def test_moved_home_is_made_again(
    index: Index, pip_config: Callable[[str], None], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_wheel(index.files, "numpy", "2.4")
    pip_config(f"index-url = {index.url}\n")
    ensure(make_stack('numpy = "2.4"'))
    home.rename(home.with_name("moved"))
    monkeypatch.setenv("SM120_HOME", str(home.with_name("moved")))
    assert config.resolve({}).home == home.with_name("moved")
    assert ensure(make_stack('numpy = "2.4"')).fresh

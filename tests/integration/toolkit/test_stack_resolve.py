"""Resolution by the real uv and the real pip against package indexes on loopback."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.toolkit.local_index import LocalIndex, fill_nightly, make_wheel, serving

from sm120 import errors, files
from sm120.console import Console
from sm120.runs import Run
from sm120.stack.lock import Lock, read_lock, write_lock
from sm120.stack.resolve.resolution import resolve
from sm120.stack.resolve.uv import Asked, Uv
from sm120.stack.spec import STACKS, Stack, parse, request
from sm120.state import State

Configure = Callable[[str], None]


@pytest.fixture
def index(tmp_path: Path) -> Iterator[LocalIndex]:
    with serving(tmp_path / "index") as made:
        yield made


@pytest.fixture
def other(tmp_path: Path) -> Iterator[LocalIndex]:
    with serving(tmp_path / "other") as made:
        yield made


@pytest.fixture
def pip_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Configure:
    """A machine whose pip is configured by the test alone."""
    for name in list(os.environ):
        if name.startswith(("PIP_", "UV_")) or name.upper() in {"HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"}:
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "user"))  # neither a configuration nor a netrc of the real user
    monkeypatch.setenv("PIP_CACHE_DIR", str(tmp_path / "pip-cache"))
    monkeypatch.setenv("SM120_HOME", str(tmp_path / "home"))
    path = tmp_path / "pip.conf"
    monkeypatch.setenv("PIP_CONFIG_FILE", str(path))

    def write(text: str) -> None:
        path.write_text(f"[global]\nretries = 0\ntimeout = 20\n{text}")

    write("no-index = true\n")
    return write


def stack_of(text: str, name: str = "mine") -> Stack:
    head = "" if "schema = 2" in text else 'schema = 2\nsummary = "s"\npython = ">=3.11"\ndisk-mb = 1\n'
    return parse(head + text, Path(f"{name}.toml"))


def lock_of(text: str | Stack) -> Lock:
    stack = stack_of(text) if isinstance(text, str) else text
    state = State.resolve()
    run = Run.start(state, "setup", ["setup"])
    return resolve(stack, state, Console.current(), run, python=Path(sys.executable))


def pins(lock: Lock) -> dict[str, str]:
    return {file.name: file.version for file in lock.files}


def failure(text: str | Stack) -> errors.ToolkitError:
    with pytest.raises(errors.ToolkitError) as raised:
        lock_of(text)
    assert raised.value.remedy
    return raised.value


def stored(lock: Lock, name: str) -> Path:
    file = lock.file(name)
    assert file is not None
    return State.resolve().wheels / file.sha256 / file.filename


NEVER_USED = "https://index.invalid/simple"


def test_a_lock_has_url_hash_and_size_of_every_file(index: LocalIndex, pip_config: Configure, tmp_path: Path) -> None:
    torch = index.wheel("torch", "2.13.0+cpu", requires=("leaf>=1",))
    leaf = index.wheel("leaf", "1.5")
    index.wheel("torch", "2.14.0+cpu")
    pip_config(f"index-url = {index.url}\n")
    stack = stack_of('[packages]\ntorch = "2.13.0+cpu"\n')
    lock = lock_of(stack)
    assert pins(lock) == {"leaf": "1.5", "torch": "2.13.0+cpu"}
    for file, wheel in zip(lock.files, (leaf, torch), strict=True):
        assert file.sha256 == files.sha256(wheel)
        assert file.size == wheel.stat().st_size
        assert file.url == index.file_url(wheel)
    assert (lock.stack, lock.request) == ("mine", request(stack))
    assert lock.python == f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert lock.sources == (index.url,)
    assert index.downloads(torch) == []
    write_lock(lock, tmp_path / "pylock.toml")
    assert read_lock(tmp_path / "pylock.toml") == lock


def test_html_listing_without_sizes(index: LocalIndex, pip_config: Configure) -> None:
    index.json = False
    wheel = index.wheel("torch", "2.13.0")
    pip_config(f"index-url = {index.url}\n")
    (file,) = lock_of('[packages]\ntorch = "2.13.0"\n').files
    assert (file.sha256, file.size) == (files.sha256(wheel), None)


def test_the_best_wheel_for_this_python_is_taken(index: LocalIndex, pip_config: Configure) -> None:
    own = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    for tag in (
        "py3-none-any",
        f"{own}-abi3-manylinux_2_17_x86_64",
        f"{own}-{own}-manylinux_2_17_x86_64",
        "cp39-cp39-manylinux_2_17_x86_64",
        f"{own}-{own}-win_amd64",
    ):
        index.wheel("leaf", "1.0", tag=tag)
    pip_config(f"index-url = {index.url}\n")
    (file,) = lock_of('[packages]\nleaf = "1.0"\n').files
    assert file.filename == f"leaf-1.0-{own}-{own}-manylinux_2_17_x86_64.whl"


def test_constraints_and_extra_index_of_the_machine(
    index: LocalIndex, other: LocalIndex, pip_config: Configure, tmp_path: Path
) -> None:
    index.wheel("numpy", "2.4", requires=("leaf",))
    index.wheel("leaf", "0.5")
    for version in ("1.0", "2.0"):
        other.wheel("leaf", version)
    (tmp_path / "constraints.txt").write_text("leaf<2\n")
    pip_config(f"index-url = {index.url}\nextra-index-url = {other.url}\nconstraint = {tmp_path / 'constraints.txt'}\n")
    lock = lock_of('[packages]\nnumpy = "2.4"\n')
    assert pins(lock)["leaf"] == "1.0"  # the best of all indexes, as pip has it
    assert lock.sources == tuple(sorted((index.url, other.url)))


def test_find_links_without_any_index(pip_config: Configure, tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "my wheels", "torch", "2.13.0+cpu")
    (tmp_path / "link").symlink_to(wheel.parent)
    pip_config(f"no-index = true\nfind-links = {tmp_path / 'link'} {tmp_path / 'not-there'}\n")
    lock = lock_of('[packages]\ntorch = "2.13.0+cpu"\n')
    (file,) = lock.files
    assert file.sha256 == files.sha256(wheel)
    assert file.url == (tmp_path / "link" / wheel.name).as_uri()
    assert file.size == wheel.stat().st_size
    assert stored(lock, "torch").exists()


def test_a_page_of_links(index: LocalIndex, pip_config: Configure) -> None:
    wheel = index.wheel("torch", "2.13.0")
    index.hashes = index.json = False
    pip_config(f"no-index = true\nfind-links = {index.url}/torch/\n")
    (file,) = lock_of('[packages]\ntorch = "2.13.0"\n').files
    assert (file.sha256, file.url) == (files.sha256(wheel), index.file_url(wheel))


def test_index_in_a_folder(pip_config: Configure, tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "files", "torch", "2.13.0")
    page = tmp_path / "simple" / "torch" / "index.html"
    page.parent.mkdir(parents=True)
    page.write_text(f'<a href="../../files/{wheel.name}#sha256={files.sha256(wheel)}">{wheel.name}</a>')
    pip_config(f"index-url = {(tmp_path / 'simple').as_uri()}\n")
    (file,) = lock_of('[packages]\ntorch = "2.13.0"\n').files
    assert (file.sha256, file.size) == (files.sha256(wheel), wheel.stat().st_size)


def test_wheels_without_a_hash_are_downloaded_once(index: LocalIndex, pip_config: Configure) -> None:
    index.hashes = False
    torch = index.wheel("torch", "2.13.0", requires=("leaf",), padding=200_000)
    leaf = index.wheel("leaf", "1.0", padding=200_000)
    pip_config(f"index-url = {index.url}\n")
    lock = lock_of('[packages]\ntorch = "2.13.0"\n')
    for wheel in (torch, leaf):
        assert len(index.downloads(wheel)) == 1
        name = wheel.name.split("-")[0]
        assert stored(lock, name).read_bytes() == wheel.read_bytes()
        file = lock.file(name)
        assert file is not None
        assert file.url == index.file_url(wheel)
    cached = sum(path.stat().st_size for path in (State.resolve().root / "uv").rglob("*") if path.is_file())
    assert cached < 100_000


def test_password_goes_with_the_request_and_into_no_record(
    index: LocalIndex, pip_config: Configure, tmp_path: Path
) -> None:
    index.hashes = False
    index.user = ("someone", "battery-staple")
    index.wheel("torch", "2.13.0")
    pip_config(f"index-url = {index.url_with('someone', 'battery-staple')}\n")
    lock = lock_of('[packages]\ntorch = "2.13.0"\n')
    assert lock.files[0].url == index.file_url(index.files / lock.files[0].filename)
    write_lock(lock, tmp_path / "home" / "pylock.toml")
    for path in (tmp_path / "home").rglob("*"):
        if path.is_file():
            assert b"battery-staple" not in path.read_bytes(), path


def test_own_index_is_asked_for_its_package_alone_and_only_when_needed(
    index: LocalIndex, other: LocalIndex, pip_config: Configure
) -> None:
    index.wheel("torch", "2.13.0")
    index.wheel("numpy", "2.4", requires=("torch>=2",))
    wheel = other.wheel("torch", "2.13.0+cpu", requires=("numpy",))
    other.wheel("torch", "2.13.0+cpu", tag="cp39-cp39-win_amd64")
    other.wheel("numpy", "2.5")
    pip_config(f"index-url = {index.url}\n")
    text = (
        '[packages]\ntorch = "2.13.0+cpu"\nnumpy = "*"\n'
        f'[[index]]\nurl = "{other.url}"\npackages = ["torch"]\nreason = "no other has it"\n'
    )
    lock = lock_of(text)
    torch = lock.file("torch")
    assert torch is not None
    assert (torch.sha256, torch.url) == (files.sha256(wheel), other.file_url(wheel))
    assert pins(lock)["numpy"] == "2.4"
    assert f"{other.url} for torch" in lock.sources
    assert other.asked_for("numpy") == []

    other.requests.clear()
    index.wheel("torch", "2.13.0+cpu")
    again = lock_of(text).file("torch")
    assert again is not None
    assert again.url.startswith(index.root)
    assert other.requests == []


def test_own_index_that_cannot_help(index: LocalIndex, other: LocalIndex, pip_config: Configure) -> None:
    index.wheel("torch", "2.13.0")
    pip_config(f"index-url = {index.url}\n")
    own = '[packages]\ntorch = "2.13.0+cpu"\n[[index]]\nurl = "{url}"\npackages = ["torch"]\nreason = "r"\n'
    error = failure(own.format(url=other.url))
    assert "torch==2.13.0+cpu is not to be had" in error.message
    assert f"it has no torch==2.13.0+cpu for Python {sys.version_info[0]}.{sys.version_info[1]}" in error.message
    assert "cannot be reached" in failure(own.format(url="http://127.0.0.1:9/simple")).message
    pip_config(f"no-index = true\nfind-links = {index.files}\n")  # a machine that is to ask no index
    other.requests.clear()
    assert "no configured package index has torch==2.13.0+cpu" in failure(own.format(url=other.url)).message
    assert other.requests == []


def test_a_version_that_is_nowhere_names_the_nearest(index: LocalIndex, pip_config: Configure) -> None:
    for version in ("2.9.1", "2.10.0", "2.11.0", "2.12.0", "2.13.0", "2.14.0", "2.14.1", "2.15.0"):
        index.wheel("torch", version)
    pip_config(f"index-url = {index.url}\n")
    error = failure('[packages]\ntorch = "2.13.7"\n')
    assert error.exit_code == 10
    assert "no configured package index has torch==2.13.7" in error.message
    assert "there are 2.12.0, 2.13.0, 2.14.0, 2.14.1, 2.15.0" in error.message


def test_a_package_that_is_nowhere(index: LocalIndex, pip_config: Configure) -> None:
    pip_config(f"index-url = {index.url}\n")
    error = failure('[packages]\nsglangg = "0.5.23"\n')
    assert "sglangg" in error.message
    assert "no version of it is to be had at all" in error.message


def test_a_wheel_for_another_python(index: LocalIndex, pip_config: Configure) -> None:
    index.wheel("torch", "2.13.0", tag="cp39-cp39-manylinux_2_28_x86_64")
    pip_config(f"index-url = {index.url}\n")
    error = failure('[packages]\ntorch = "2.13.0"\n')
    assert "it is there for cp39 on manylinux_2_28_x86_64 only" in error.message
    assert "SM120_PYTHON" in (error.remedy or "")


def test_two_that_contradict_are_named(index: LocalIndex, pip_config: Configure) -> None:
    index.wheel("torch", "2.13.0")
    index.wheel("torch", "2.14.1")
    index.wheel("sglang", "0.5.23", requires=("torch==2.14.1",))
    pip_config(f"index-url = {index.url}\n")
    text = '[packages]\ntorch = "2.13.0"\nsglang = "0.5.23"\n'
    error = failure(text)
    assert "sglang" in error.message
    assert "torch==2.14.1" in error.message
    assert "torch==2.13.0" in error.message
    assert "[overrides]" in (error.remedy or "")
    assert pins(lock_of(text + '[overrides]\ntorch = {reason = "ours"}\n')) == {"sglang": "0.5.23", "torch": "2.13.0"}


@pytest.mark.parametrize("limit", ["torch<2.10", "leaf<1"])
def test_a_constraint_of_the_machine_that_forbids_a_pin(
    index: LocalIndex, pip_config: Configure, tmp_path: Path, limit: str
) -> None:
    index.wheel("torch", "2.13.0", requires=("leaf==1.0",))
    index.wheel("leaf", "1.0")
    constraints = tmp_path / "constraints.txt"
    constraints.write_text(f"# the company's\n\nnumpy<3\n{limit}  # old driver\n")
    pip_config(f"index-url = {index.url}\nconstraint = {constraints}\n")
    error = failure('[packages]\ntorch = "2.13.0"\n')
    assert f"{limit} ({constraints}:4)" in error.message
    assert "numpy" not in error.message
    assert "PIP_CONSTRAINT=/dev/null" in (error.remedy or "")


def test_overrides_constraints_and_dropped_packages(index: LocalIndex, pip_config: Configure) -> None:
    index.wheel("torch", "2.14.1", requires=("leaf", "twig"))
    index.wheel("sglang", "0.5.23", requires=("torch==2.13.0", "sglang-kernel==0.4.10", "twig==1.0"))
    for version in ("1.0", "2.0", "3.0"):
        index.wheel("leaf", version)
        index.wheel("twig", version)
    pip_config(f"index-url = {index.url}\n")
    lock = lock_of(
        """
[packages]
torch = "2.14.1"
sglang = "0.5.23"
[overrides]
torch = {reason = "ours wins"}
sglang-kernel = {drop = true, reason = "built from source"}
twig = {version = ">=2,<3", reason = "1.0 crashes"}
[constraints]
leaf = {version = "<3", reason = "3.0 crashes"}
"""
    )
    assert pins(lock) == {"sglang": "0.5.23", "torch": "2.14.1", "twig": "2.0", "leaf": "2.0"}


def test_prereleases_only_where_asked(index: LocalIndex, pip_config: Configure) -> None:
    for name in ("asked", "taken"):
        index.wheel(name, "1.0")
        index.wheel(name, "2.0b1")
    index.wheel("top", "1", requires=("asked", "taken"))
    pip_config(f"index-url = {index.url}\n")
    assert pins(lock_of('[packages]\ntop = "1"\nasked = ">=2.0b1"\n')) == {"top": "1", "asked": "2.0b1", "taken": "1.0"}


def test_a_release_in_the_middle_of_a_resolution(
    index: LocalIndex, pip_config: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.wheel("leaf", "1.0")
    pip_config(f"index-url = {index.url}\n")
    lock = Uv.lock

    def release_and_lock(uv: Uv, asked: Asked) -> list[dict[str, Any]]:
        index.wheel("leaf", "2.0")
        shutil.rmtree(uv.cache)
        return lock(uv, asked)

    monkeypatch.setattr(Uv, "lock", release_and_lock)
    assert pins(lock_of('[packages]\nleaf = "*"\n')) == {"leaf": "1.0"}


def test_what_is_last_must_be_needed(index: LocalIndex, pip_config: Configure) -> None:
    index.wheel("torch", "2.13.0")
    pip_config(f"index-url = {index.url}\n")
    last = '[packages]\ntorch = "2.13.0"\n[[last]]\npackages = ["{}"]\nreason = "r"\n'
    assert pins(lock_of(last.format("torch"))) == {"torch": "2.13.0"}
    error = failure(last.format("leaf"))
    assert error.exit_code == 2
    assert "nothing in it needs leaf" in error.message


@pytest.mark.parametrize(
    ("fault", "words"),
    [("gone", "answers 404 Not Found"), ("refused", "answers 403 Forbidden"), ("truncated", "broke off")],
)
def test_files_that_do_not_come(
    index: LocalIndex, pip_config: Configure, monkeypatch: pytest.MonkeyPatch, fault: str, words: str
) -> None:
    monkeypatch.setenv("COLUMNS", "40")  # uv breaks its lines by it
    wheel = index.wheel("torch", "2.13.0", padding=100_000)
    index.faults[wheel.name] = fault  # type: ignore[assignment] # one of the literals
    pip_config(f"index-url = {index.url}\n")
    assert words in failure('[packages]\ntorch = "2.13.0"\n').message


def test_index_that_wants_a_password(index: LocalIndex, pip_config: Configure) -> None:
    index.wheel("torch", "2.13.0")
    index.user = ("someone", "battery-staple")
    pip_config(f"index-url = {index.url}\n")
    error = failure('[packages]\ntorch = "2.13.0"\n')
    assert "refuses access (401)" in error.message
    assert "netrc" in (error.remedy or "")


def test_index_that_answers_with_a_login_page(index: LocalIndex, pip_config: Configure) -> None:
    index.listings["torch"] = b"<html><body>please log in</body></html>"
    pip_config(f"index-url = {index.url}\n")
    assert "a page that lists no files" in failure('[packages]\ntorch = "2.13.0"\n').message


def test_no_network(pip_config: Configure) -> None:
    pip_config("index-url = http://127.0.0.1:9/simple\n")
    error = failure('[packages]\ntorch = "2.13.0"\n')
    assert "127.0.0.1:9/simple/torch/ could not be reached" in error.message
    assert "PIP_NO_INDEX" in (error.remedy or "")
    assert Path(error.where or "").is_file()


def test_certificate_that_is_not_trusted_and_one_that_is_named(
    index: LocalIndex, pip_config: Configure, tmp_path: Path
) -> None:
    import ssl

    wheel = index.wheel("torch", "2.13.0")
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    words += ["-addext", "subjectAltName=IP:127.0.0.1", "-addext", "basicConstraints=critical,CA:FALSE"]
    subprocess.run([*words, "-keyout", key, "-out", cert], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    index.server.socket = context.wrap_socket(index.server.socket, server_side=True)
    pip_config(f"index-url = {index.url}\n")
    error = failure('[packages]\ntorch = "2.13.0"\n')
    assert "certificate" in error.message
    assert "global.cert" in (error.remedy or "")
    for line in (f"cert = {cert}", "trusted-host = 127.0.0.1"):
        index.hashes = False  # so that our own requests are part of it
        pip_config(f"index-url = {index.url}\n{line}\n")
        assert lock_of('[packages]\ntorch = "2.13.0"\n').files[0].sha256 == files.sha256(wheel)


def test_uv_configuration_of_the_user_changes_nothing(
    index: LocalIndex, other: LocalIndex, pip_config: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.wheel("torch", "2.13.0")
    other.wheel("torch", "2.13.0")
    pip_config(f"index-url = {index.url}\n")
    uv_toml = tmp_path / "user" / ".config" / "uv" / "uv.toml"
    uv_toml.parent.mkdir(parents=True)
    uv_toml.write_text(f'index-url = "{other.url}"\nno-binary = ["torch"]\n')
    for name, value in (
        ("UV_INDEX", other.url),
        ("UV_DEFAULT_INDEX", other.url),
        ("UV_EXCLUDE_NEWER", "2001-01-01"),
        ("UV_OVERRIDE", "/nothing"),
        ("UV_OFFLINE", "1"),
        ("UV_CACHE_DIR", str(tmp_path / "elsewhere")),
        ("VIRTUAL_ENV", str(tmp_path / "venv")),
    ):
        monkeypatch.setenv(name, value)
    assert lock_of('[packages]\ntorch = "2.13.0"\n').files[0].url.startswith(index.root)
    assert other.requests == []
    assert not (tmp_path / "elsewhere").exists()


def test_record_of_what_was_run(index: LocalIndex, pip_config: Configure, tmp_path: Path) -> None:
    index.wheel("torch", "2.13.0")
    pip_config(f"index-url = {index.url}\n")
    lock_of('[packages]\ntorch = "2.13.0"\n')
    (commands,) = (tmp_path / "home" / "runs").glob("*/commands.jsonl")
    lines = [json.loads(line) for line in commands.read_text().splitlines()]
    assert [line["argv"][1:3] for line in lines] == [["pip", "compile"]] * 2
    assert all(line["env"]["UV_DEFAULT_INDEX"] == index.url for line in lines)


def git_repository(folder: Path) -> str:
    """A repository with a package in a folder of it; its first commit."""
    package = folder / "python"
    package.mkdir(parents=True)
    (package / "tiny.py").write_text("VALUE = 1\n")
    (package / "backend.py").write_text(
        "import base64, hashlib, zipfile\n"
        "def build_wheel(folder, settings=None, metadata=None):\n"
        "    name = 'tiny-0.5.9.dev7+gf88acf8'\n"
        "    info = name + '.dist-info/'\n"
        "    members = {'tiny.py': open('tiny.py').read(),\n"
        "        info + 'METADATA': 'Metadata-Version: 2.1\\nName: tiny\\nVersion: 0.5.9.dev7+gf88acf8\\n'\n"
        "            'Provides-Extra: more\\nRequires-Dist: leaf\\nRequires-Dist: twig; extra == \"more\"\\n',\n"
        "        info + 'WHEEL': 'Wheel-Version: 1.0\\nGenerator: t\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n',\n"
        "        info + 'RECORD': ''}\n"
        "    with zipfile.ZipFile(folder + '/' + name + '-py3-none-any.whl', 'w') as archive:\n"
        "        for path, text in members.items(): archive.writestr(path, text)\n"
        "    return name + '-py3-none-any.whl'\n"
    )
    (package / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    )
    git = ["git", "-C", str(folder), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "one"], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    (package / "tiny.py").write_text("VALUE = 2\n")
    subprocess.run([*git, "commit", "-qam", "two"], check=True)
    return commit


GIT = '[packages]\ntiny = {{git = "{url}", commit = "{commit}", subdirectory = "python", extras = ["more"]}}\n'


def test_a_package_from_git_is_built_at_its_commit(index: LocalIndex, pip_config: Configure, tmp_path: Path) -> None:
    import zipfile

    commit = git_repository(tmp_path / "repository")
    index.wheel("leaf", "1.0")
    index.wheel("twig", "1.0")
    index.wheel("tiny", "9.0")  # of the same name: not taken
    pip_config(f"index-url = {index.url}\nrequire-virtualenv = true\n")  # which is about installing by hand
    lock = lock_of(GIT.format(url=(tmp_path / "repository").as_uri(), commit=commit))
    assert pins(lock) == {"tiny": "0.5.9.dev7+gf88acf8", "leaf": "1.0", "twig": "1.0"}
    wheel = stored(lock, "tiny")
    assert zipfile.ZipFile(wheel).read("tiny.py") == b"VALUE = 1\n"
    tiny = lock.file("tiny")
    assert tiny is not None
    assert tiny.sha256 == hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert tiny.url == wheel.as_uri()


def test_git_that_cannot_be_had(pip_config: Configure, tmp_path: Path) -> None:
    commit = git_repository(tmp_path / "repository")
    url = (tmp_path / "repository").as_uri()
    assert "no such commit" in failure(GIT.format(url=url, commit="0" * 40)).message
    assert "no repository at" in failure(GIT.format(url=f"{url}-gone", commit=commit)).message
    text = GIT.format(url=url, commit=commit).replace('"python"', '"nowhere"')
    error = failure(text)
    assert error.exit_code == 12
    assert "does not build" in error.message
    assert "['" not in error.message  # a line, not a list of lines


def test_a_package_that_is_there_only_as_source(index: LocalIndex, pip_config: Configure, tmp_path: Path) -> None:
    import tarfile

    repository = tmp_path / "repository"
    git_repository(repository)
    folder = repository / "python"
    text = (folder / "backend.py").read_text().replace("0.5.9.dev7+gf88acf8", "1.0")
    (folder / "backend.py").write_text(text)
    (folder / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
    with tarfile.open(index.files / "tiny-1.0.tar.gz", "w:gz") as archive:
        archive.add(folder, arcname="tiny-1.0")
    index.wheel("leaf", "1.0")
    pip_config(f"index-url = {index.url}\n")
    lock = lock_of('[packages]\ntiny = "1.0"\n')
    assert pins(lock) == {"tiny": "1.0", "leaf": "1.0"}
    assert stored(lock, "tiny").exists()

    pip_config(f"no-index = true\nfind-links = {index.files}\n")
    assert pins(lock_of('[packages]\ntiny = "1.0"\n')) == {"tiny": "1.0", "leaf": "1.0"}


NIGHTLY = """
schema = 2
summary = "s"
python = ">=3.11"
disk-mb = 1
cuda = "13.0"
[packages]
sglang = "0.5.23"
[overrides]
torch = {{reason = "the nightly"}}
torchvision = {{reason = "the nightly"}}
torchaudio = {{reason = "the nightly"}}
[nightly]
url = "{url}"
lead = "torch"
packages = ["torchvision"]
frozen = ["torchaudio", "triton"]
{date}
reason = "r"
"""


@pytest.fixture
def nightly(index: LocalIndex, other: LocalIndex, pip_config: Configure) -> LocalIndex:
    """A nightly index, beside a general one with releases."""
    fill_nightly(other)
    for name, version in (("torch", "2.14.1"), ("triton", "3.9.0"), ("torchvision", "0.29.0"), ("sympy", "1.14")):
        index.wheel(name, version)
    index.wheel("sglang", "0.5.23", requires=("torch==2.14.1", "torchvision", "torchaudio==2.11.0", "triton"))
    other.wheel("sympy", "1.99")  # PyTorch's index carries dependencies too; they are not taken from there
    pip_config(f"index-url = {index.url}\n")
    return other


def nightly_stack(index: LocalIndex, date: str | None = None, name: str = "nightly") -> Stack:
    return stack_of(NIGHTLY.format(url=index.url, date=f'date = "{date}"' if date else ""), name)


def test_newest_complete_nightly(nightly: LocalIndex) -> None:
    lock = lock_of(nightly_stack(nightly))
    assert pins(lock) == {
        "torch": "2.12.0.dev20260401+cu130",
        "torchvision": "0.27.0.dev20260401+cu130",
        "torchaudio": "2.11.0.dev20260330+cu130",
        "triton": "3.7.0+git00000002",
        "sglang": "0.5.23",
        "sympy": "1.14",
    }
    torch = lock.file("torch")
    assert torch is not None
    wheel = nightly.files / torch.filename
    assert (torch.url, torch.sha256) == (nightly.file_url(wheel), files.sha256(wheel))
    assert len(nightly.downloads(wheel)) == 1
    assert nightly.asked_for("sympy") == []
    assert nightly.url in lock.sources


def test_pinned_nightly(nightly: LocalIndex) -> None:
    assert pins(lock_of(nightly_stack(nightly, "20260331")))["torch"] == "2.12.0.dev20260331+cu130"


@pytest.mark.parametrize(
    ("date", "reason", "nearest", "take"),
    [
        ("20260307", "has left the index, which shows 20260330 to 20260403", "20260330 (torch 2.12", "20260330"),
        ("20260402", "is not on the index", "20260401 (torch 2.12", "20260401"),
        ("20260403", "there is no torchvision of 20260403", "20260401 (torch 2.12", "20260401"),
    ],
)
def test_nightly_that_is_gone(nightly: LocalIndex, date: str, reason: str, nearest: str, take: str) -> None:
    error = failure(nightly_stack(nightly, date, "mine"))
    assert error.exit_code == 10
    assert f"asks for the nightlies of {date}, but" in error.message
    assert reason in error.message
    assert nearest in error.message
    assert f"mine-{take}.toml" in (error.remedy or "")
    assert "scripts/inv setup --stack nightly" in (error.remedy or "")


def test_the_remedy_of_a_nightly_that_is_gone_works(
    nightly: LocalIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "mine.toml"
    path.write_text(NIGHTLY.format(url=nightly.url, date='date = "20260307"'))
    error = failure(parse(path.read_text(), path))
    command = (error.remedy or "").partition(": ")[2].partition(" && ")[0]
    subprocess.run(["sh", "-c", command], check=True)
    copy = tmp_path / "mine-20260330.toml"
    assert pins(lock_of(parse(copy.read_text(), copy)))["torch"] == "2.12.0.dev20260330+cu130"


def test_march_2026_is_the_living_example(index: LocalIndex, nightly: LocalIndex, tmp_path: Path) -> None:
    commit = git_repository(tmp_path / "repository")
    text = (STACKS / "march-2026.toml").read_text()
    for old, new in (
        ("https://download.pytorch.org/whl/nightly/cu130", nightly.url),
        ("https://github.com/sgl-project/sglang", (tmp_path / "repository").as_uri()),
        ("f88acf87805b1e27182c4927a47bc60818f768d8", commit),
    ):
        assert old in text
        text = text.replace(old, new)
    error = failure(stack_of(text, "march-2026"))
    assert "asks for the nightlies of 20260307, but the torch of 20260307 has left the index" in error.message
    assert "20260330 (torch 2.12.0.dev20260330+cu130, torchvision" in error.message


def test_a_set_that_does_not_resolve_is_passed_over(nightly: LocalIndex, capsys: pytest.CaptureFixture[str]) -> None:
    (nightly.files / "triton-3.7.0+git00000002-py3-none-any.whl").unlink()
    assert pins(lock_of(nightly_stack(nightly)))["torch"] == "2.12.0.dev20260331+cu130"
    assert "they do not fit: no configured package index has triton==3.7.0+git00000002" in capsys.readouterr().out
    for path in nightly.files.glob("triton-*"):
        path.unlink()
    error = failure(nightly_stack(nightly))
    assert "none of the newest 3 sets of nightlies fits; 20260401: no configured" in error.message


def test_constraint_of_the_machine_that_forbids_every_nightly(
    index: LocalIndex, nightly: LocalIndex, pip_config: Configure, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.txt").write_text("torch<=2.11\n")
    pip_config(f"index-url = {index.url}\nconstraint = {tmp_path / 'c.txt'}\n")
    assert f"torch<=2.11 ({tmp_path / 'c.txt'}:1)" in failure(nightly_stack(nightly)).message
    assert capsys.readouterr().out.count("nightlies of") == 1


def test_nightlies_of_a_company_mirror(index: LocalIndex, nightly: LocalIndex, pip_config: Configure) -> None:
    pip_config(f"index-url = {index.url}\nextra-index-url = {nightly.url}\n")
    stack = stack_of(NIGHTLY.format(url=NEVER_USED, date=""), "nightly")
    lock = lock_of(stack)
    assert pins(lock)["torch"] == "2.12.0.dev20260401+cu130"
    assert len(nightly.downloads(nightly.files / "torch-2.12.0.dev20260401+cu130-py3-none-any.whl")) == 1


def test_nightly_index_that_is_not_reached(index: LocalIndex, nightly: LocalIndex) -> None:
    stack = stack_of(NIGHTLY.format(url="http://127.0.0.1:9/nightly", date=""), "nightly")
    error = failure(stack)
    assert error.message.startswith("the nightlies of the stack nightly cannot be looked up: the package index")
    assert "http://127.0.0.1:9/nightly/torch/ cannot be used: it cannot be reached" in error.message
    for way in ("global.extra-index-url", "setup --offline DIR", "setup --stack stable"):
        assert way in str(error.remedy)


def test_no_space_left(
    index: LocalIndex, pip_config: Configure, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    index.wheel("torch", "2.13.0")
    pip_config(f"index-url = {index.url}\n")
    fake = tmp_path / "uv"
    fake.write_text(
        "#!/bin/sh\necho 'error: failed to write\n  cause: No space left on device (os error 28)' >&2\nexit 2\n"
    )
    fake.chmod(0o755)
    monkeypatch.setattr("sm120.stack.resolve.uv._uv", lambda: str(fake))
    assert "no space left on the disk" in failure('[packages]\ntorch = "2.13.0"\n').message

"""From a stack file to an environment: a real package index on loopback, small wheels, the real uv, real processes."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.toolkit.local_index import LocalIndex, make_wheel, serving
from tests.integration.toolkit.stack_home import TORCH_CPU, Home, record_of, torch_cuda

from sm120 import config, errors, files
from sm120.stack import Environment, look


@pytest.fixture
def index(tmp_path: Path) -> Iterator[LocalIndex]:
    with serving(tmp_path / "index") as made:
        yield made


@pytest.fixture
def other(tmp_path: Path) -> Iterator[LocalIndex]:
    with serving(tmp_path / "other") as made:
        yield made


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: LocalIndex) -> Home:
    made = Home.make(tmp_path, monkeypatch)
    made.configure_pip(f"index-url = {index.url}")
    return made


def test_install_records_what_it_did_and_a_second_call_does_nothing(
    index: LocalIndex, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = index.wheel("torch", "2.13.0+cpu", content=TORCH_CPU, requires=("leaf>=1",))
    leaf = index.wheel("leaf", "1.5")
    index.wheel("torch", "2.14.0+cpu", content=TORCH_CPU)
    stack = home.stack('torch = "2.13.0+cpu"', imports='"torch", "leaf"')

    made = home.ensure(stack)
    assert made.fresh
    record = record_of(made)
    found = {d["name"]: d for d in record["distributions"]}
    assert sorted(found) == ["leaf", "torch"]
    assert found["torch"]["version"] == "2.13.0+cpu"
    assert found["torch"]["sha256"] == files.sha256(torch)
    assert found["leaf"]["sha256"] == files.sha256(leaf)
    assert found["leaf"]["url"] == index.file_url(leaf)
    assert [(p["module"], p["outcome"], p["detail"]) for p in record["proved"]] == [
        ("torch", "OK", "2.13.0+cpu"),
        ("leaf", "OK", "1.5"),
    ]
    assert made.fingerprint == home.lock().fingerprint
    assert subprocess.run([made.python, "-c", "import torch, leaf"], check=True).returncode == 0

    def refuse(*_: object, **__: object) -> None:
        pytest.fail("a second call starts nothing")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    before, asked = sorted(home.state.runs.iterdir()), len(index.requests)
    again = home.ensure(stack)
    assert not again.fresh
    assert again.fingerprint == made.fingerprint
    assert sorted(home.state.runs.iterdir()) == before
    assert len(index.requests) == asked


def test_an_environment_owns_its_files(index: LocalIndex, home: Home) -> None:
    index.wheel("numpy", "2.4", padding=10_000)
    made = home.ensure(home.stack('numpy = "2.4"'))
    folder = made.python.parents[1]
    installed = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    assert len(installed) > 5
    assert [path for path in installed if path.stat().st_nlink > 1] == []
    assert not list(folder.glob(".sm120-install*"))
    assert not list(folder.rglob("direct_url.json"))


def test_an_existing_lock_is_installed_and_not_resolved_again(index: LocalIndex, home: Home) -> None:
    index.wheel("numpy", "2.4", requires=("leaf",))
    index.wheel("leaf", "1.0")
    stack = home.stack('numpy = "2.4"')
    made = home.ensure(stack)
    index.wheel("leaf", "2.0")
    made.lock.unlink()
    index.requests.clear()
    again = home.ensure(stack)
    assert again.fresh
    assert again.fingerprint == made.fingerprint
    assert index.requests == []


def test_a_damaged_lock_is_one_error(index: LocalIndex, home: Home) -> None:
    index.wheel("numpy", "2.4")
    stack = home.stack('numpy = "2.4"')
    home.ensure(stack)
    path = home.state.lock_file("mine")
    path.write_text(path.read_text()[:200])
    with pytest.raises(errors.UsageError, match="not a lock that can be used") as raised:
        home.ensure(stack)
    assert "--lock" in (raised.value.remedy or "")


def test_a_lock_for_another_python_is_made_anew(index: LocalIndex, home: Home) -> None:
    index.wheel("numpy", "2.4")
    stack = home.stack('numpy = "2.4"')
    home.ensure(stack).lock.unlink()
    path = home.state.lock_file("mine")
    python = home.lock().python
    path.write_text(path.read_text().replace(f'python = "{python}"', 'python = "3.99"'))
    assert home.lock().python == "3.99"
    assert home.ensure(stack).fresh
    assert home.lock().python == python


def test_constraints_and_extra_index_of_the_machine_are_honoured(
    index: LocalIndex, other: LocalIndex, home: Home, tmp_path: Path
) -> None:
    index.wheel("numpy", "2.4", requires=("leaf",))
    for version in ("1.0", "2.0"):
        other.wheel("leaf", version)
    (tmp_path / "constraints.txt").write_text("leaf<2\n")
    home.configure_pip(
        f"index-url = {index.url}\nextra-index-url = {other.url}\nconstraint = {tmp_path / 'constraints.txt'}"
    )
    home.ensure(home.stack('numpy = "2.4"'))
    assert {file.name: file.version for file in home.lock().files}["leaf"] == "1.0"


def test_find_links_and_no_index_of_the_machine_are_honoured(home: Home, tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "wheels", "torch", "2.13.0+cpu", content=TORCH_CPU)
    home.configure_pip(f"no-index = true\nfind-links = {tmp_path / 'wheels'}")
    home.ensure(home.stack('torch = "2.13.0+cpu"'))
    (torch,) = home.lock().files
    assert torch.sha256 == files.sha256(wheel)
    assert torch.url.startswith("file://")
    assert wheel.exists()


def test_an_index_without_hashes_sends_each_wheel_once(index: LocalIndex, home: Home) -> None:
    index.hashes = False
    wheel = index.wheel("numpy", "2.4", padding=100_000)
    home.ensure(home.stack('numpy = "2.4"'))
    (numpy,) = home.lock().files
    assert numpy.sha256 == files.sha256(wheel)
    assert len(index.downloads(wheel)) == 1


def test_variables_that_send_packages_elsewhere_do_not(
    index: LocalIndex, home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.wheel("numpy", "2.4")
    elsewhere = str(tmp_path / "elsewhere")
    for name in ("PIP_TARGET", "UV_TARGET", "UV_PREFIX", "UV_CACHE_DIR", "VIRTUAL_ENV", "PYTHONPATH"):
        monkeypatch.setenv(name, elsewhere)
    monkeypatch.setenv("PIP_DRY_RUN", "1")
    monkeypatch.setenv("UV_LINK_MODE", "symlink")
    made = home.ensure(home.stack('numpy = "2.4"', imports='"numpy"'))
    assert made.fresh
    assert not Path(elsewhere).exists()


def test_password_of_an_index_is_written_nowhere(index: LocalIndex, home: Home) -> None:
    index.user = ("someone", "battery-staple")
    index.wheel("numpy", "2.4")
    home.configure_pip(f"index-url = {index.url_with('someone', 'battery-staple')}")
    home.ensure(home.stack('numpy = "2.4"'))
    written = home.everything_written()
    assert "numpy" in written
    assert "battery-staple" not in written
    assert "someone" not in written


def test_a_mislabelled_torch_is_refused_and_not_used_later(index: LocalIndex, home: Home) -> None:
    index.wheel("torch", "2.13.0+cpu", content=torch_cuda("2.13.0+cpu"))
    stack = home.stack('torch = "2.13.0+cpu"')
    for _ in range(2):
        with pytest.raises(errors.BinaryError, match="cu130 build"):
            home.ensure(stack)
    found, why = look(stack, home.state)
    assert found is None
    assert why == "its installation was not finished"


def test_a_torch_without_code_for_these_cards_is_refused(index: LocalIndex, home: Home) -> None:
    index.wheel("torch", "2.13.0+cu130", content=torch_cuda("2.13.0+cu130", architectures="sm_80 sm_90"))
    with pytest.raises(errors.BinaryError, match=r"no code for compute capability 12\.x, only for sm_80, sm_90"):
        home.ensure(home.stack('torch = "2.13.0+cu130"', imports='"torch"'))


@pytest.mark.parametrize("columns", ["40", "400"])  # uv breaks its lines by it
def test_a_wheel_whose_metadata_lie_is_refused(
    index: LocalIndex, home: Home, monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    stack = home.stack('numpy = "2.4"')
    wheel = index.wheel("numpy", "2.4", says="2.5")
    home.write_lock(stack, {wheel: index.file_url(wheel)})
    with pytest.raises(errors.ToolkitError, match=r"numpy-2\.4-py3-none-any\.whl .*2\.5") as raised:
        home.ensure(stack)
    assert raised.value.exit_code in {10, 13}
    assert look(stack, home.state)[0] is None


def test_a_wheel_that_is_corrupted_on_its_way_is_refused(index: LocalIndex, home: Home) -> None:
    stack = home.stack('numpy = "2.4"')
    wheel = index.wheel("numpy", "2.4", padding=10_000)
    lock = home.write_lock(stack, {wheel: index.file_url(wheel)})
    index.faults[wheel.name] = "corrupt"
    with pytest.raises(errors.BinaryError, match=f"expected SHA-256 {lock.files[0].sha256}, found") as raised:
        home.ensure(stack)
    assert raised.value.exit_code == 13
    assert len(index.downloads(wheel)) == 2
    assert look(stack, home.state)[0] is None
    del index.faults[wheel.name]
    assert home.ensure(stack).fresh


def test_a_wheel_that_is_gone_says_how_to_resolve_anew(index: LocalIndex, home: Home) -> None:
    stack = home.stack('numpy = "2.4"')
    wheel = index.wheel("numpy", "2.4")
    home.write_lock(stack, {wheel: index.file_url(wheel)})
    index.faults[wheel.name] = "gone"
    with pytest.raises(errors.PreflightError, match="is gone from") as raised:
        home.ensure(stack)
    assert "--lock" in (raised.value.remedy or "")


def test_a_wheel_that_changed_in_the_store_is_refused(index: LocalIndex, home: Home) -> None:
    index.wheel("numpy", "2.4")
    stack = home.stack('numpy = "2.4"')
    home.ensure(stack).lock.unlink()
    (file,) = home.lock().files
    home.store().path(file).write_bytes(b"other")
    with pytest.raises(errors.BinaryError, match="has changed") as raised:
        home.ensure(stack)
    assert (raised.value.remedy or "").startswith("rm ")
    home.store().path(file).unlink()
    assert home.ensure(stack).fresh


def test_what_comes_last_is_installed_last(index: LocalIndex, home: Home) -> None:
    """Two packages that write one file: the one that is named last wins, whatever order they are installed in."""
    shared = "both/shared.py"
    index.wheel("libs-cu13", "1.0", content={shared: "who = 'cu13'\n", "both/cu13.py": ""})
    index.wheel("libs-base", "1.0", content={shared: "who = 'base'\n", "both/base.py": ""})
    packages = 'libs-cu13 = "1.0"\nlibs-base = "1.0"'
    for last in ('"libs-base", "libs-cu13"', '"libs-cu13", "libs-base"'):
        made = home.ensure(home.stack(packages, tail=f'[[last]]\npackages = [{last}]\nreason = "one file"\n'))
        done = subprocess.run(
            [made.python, "-c", "import both.shared as s; print(s.who)"], capture_output=True, check=True
        )
        assert f"libs-{done.stdout.decode().strip()}" in last.split(", ")[1]


def test_an_old_wheel_goes_when_no_lock_names_it(index: LocalIndex, home: Home) -> None:
    for version in ("2.4", "2.5"):
        index.wheel("numpy", version)
    home.ensure(home.stack('numpy = "2.4"'))
    (old,) = home.lock().files
    assert home.store().has(old)
    home.ensure(home.stack('numpy = "2.5"'))
    assert not home.store().has(old)
    assert home.store().has(home.lock().files[0])


def test_no_network(home: Home) -> None:
    home.configure_pip("index-url = http://127.0.0.1:9/simple/\nretries = 0")
    with pytest.raises(errors.PreflightError) as raised:
        home.ensure(home.stack('numpy = "2.4"'))
    assert raised.value.exit_code == 10
    assert raised.value.remedy


def test_no_space(index: LocalIndex, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not home.path.exists()
    index.wheel("numpy", "2.4", padding=100_000)
    monkeypatch.setattr(files, "free_bytes", lambda _: 12345)
    with pytest.raises(errors.PreflightError, match=r"mine needs 1\.0 MB in .*: 987\.7 kB more than the 12\.3 kB"):
        home.ensure(home.stack('numpy = "2.4"'))
    assert index.requests == []
    monkeypatch.setattr(files, "free_bytes", lambda _: 1_050_000)
    with pytest.raises(errors.PreflightError, match=r"needs 1\.\d MB \(10\d\.\d kB of them for wheels\) in "):
        home.ensure(home.stack('numpy = "2.4"'))
    assert home.state.lock_file("mine").exists()


def test_no_python_that_the_stack_has_wheels_for(home: Home, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = tmp_path / "bin" / "python3.29"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")
    with pytest.raises(
        errors.PreflightError, match=r"needs Python ==3\.29\.\*; .*python3\.29 is not one that starts"
    ) as raised:
        home.ensure(home.stack('numpy = "2.4"', python="==3.29.*"))
    assert "apt install python3.29 python3.29-venv" in str(raised.value.remedy)


@pytest.mark.parametrize(
    ("python", "remedy"), [(">=3.27,<3.29", "apt install python3.28 python3.28-venv"), (">=4", "correct python = …")]
)
def test_the_python_to_install_is_one_that_the_stack_takes(home: Home, python: str, remedy: str) -> None:
    with pytest.raises(errors.PreflightError) as raised:
        home.ensure(home.stack('numpy = "2.4"', python=python))
    assert remedy in str(raised.value.remedy)


def test_modules_that_do_not_import_are_all_named(index: LocalIndex, home: Home) -> None:
    index.wheel("numpy", "2.4", content={"numpy/__init__.py": "raise ImportError('libmissing.so.1: not found')"})
    index.wheel("good", "1.0")
    index.wheel("crash", "1.0", content={"crash/__init__.py": "import os\nos.kill(os.getpid(), 11)"})
    packages = 'numpy = "2.4"\ngood = "1.0"\ncrash = "1.0"'
    with pytest.raises(errors.BinaryError) as raised:
        home.ensure(home.stack(packages, imports='"numpy", "good", "crash"'))
    assert "numpy: ImportError: libmissing.so.1: not found; crash: ended by signal 11" in raised.value.message
    assert "good" not in raised.value.message
    assert Path(raised.value.where or "").is_file()


NEEDS_DRIVER = "raise ImportError('libcuda.so.1: cannot open shared object file: No such file or directory')"


def test_an_import_that_needs_the_driver_is_skipped_where_that_is_said(index: LocalIndex, home: Home) -> None:
    index.wheel("kernel", "1.0", content={"kernel/__init__.py": NEEDS_DRIVER})
    made = home.ensure(home.stack('kernel = "1.0"', tail='[prove]\nneeds-driver = ["kernel"]\n'))
    assert [(p["module"], p["outcome"]) for p in made.proofs] == [("kernel", "SKIPPED")]
    with pytest.raises(errors.BinaryError, match=r"kernel: ImportError: libcuda\.so\.1"):
        home.ensure(home.stack('kernel = "1.0"', tail='[prove]\nimports = ["kernel"]\n'))


@pytest.mark.parametrize(
    "damage", ["removed", "added", "half a record", "no python", "another pin", "another lock", "twice"]
)
def test_what_was_changed_is_made_again(
    index: LocalIndex, home: Home, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    wheels = {version: index.wheel("numpy", version) for version in ("2.4", "2.5")}

    def install(version: str) -> Environment:
        stack = home.stack(f'numpy = "{version}"')
        home.write_lock(stack, {wheels[version]: index.file_url(wheels[version])})
        return home.ensure(stack)

    made = install("2.4")
    (info,) = made.lock.parent.glob("lib/*/site-packages/numpy-2.4.dist-info")
    version = "2.4"
    if damage == "removed":
        info.rename(info.with_name("elsewhere"))
    elif damage == "added":
        (info.parent / "extra-1.dist-info").mkdir()
    elif damage == "twice":
        (info.parent / "numpy-2.3.dist-info").mkdir()
    elif damage == "half a record":
        made.lock.write_text(made.lock.read_text()[:100])
    elif damage == "no python":
        made.python.unlink()
    elif damage == "another lock":
        wheels["2.4"] = index.wheel("numpy", "2.4", padding=10)
    else:
        version = "2.5"
    again = install(version)
    assert again.fresh
    assert {d["name"]: d["version"] for d in record_of(again)["distributions"]} == {"numpy": version}
    assert not (info.parent / "extra-1.dist-info").exists()
    assert "installing the stack mine (" in capsys.readouterr().out


def test_without_its_lock_it_is_resolved_anew(index: LocalIndex, home: Home) -> None:
    wheel = index.wheel("numpy", "2.4")
    stack = home.stack('numpy = "2.4"')
    home.write_lock(stack, {wheel: index.file_url(wheel)})
    home.ensure(stack)
    home.state.lock_file("mine").unlink()
    assert look(stack, home.state) == (None, "its lock is gone")
    assert home.ensure(stack).fresh
    assert home.lock().sources != ("a test",)


def test_a_lock_that_was_only_written_anew_is_no_change(index: LocalIndex, home: Home) -> None:
    index.wheel("numpy", "2.4")
    stack = home.stack('numpy = "2.4"')
    home.ensure(stack)
    path = home.state.lock_file("mine")
    path.write_text(f"# a comment of the user's\n{path.read_text()}")
    assert not home.ensure(stack).fresh


def test_moved_home_is_made_again(index: LocalIndex, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    index.wheel("numpy", "2.4")
    stack = home.stack('numpy = "2.4"')
    home.ensure(stack)
    home.path.rename(home.path.with_name("moved"))
    monkeypatch.setenv("SM120_HOME", str(home.path.with_name("moved")))
    assert config.resolve({}).home == home.path.with_name("moved")
    assert home.ensure(stack).fresh

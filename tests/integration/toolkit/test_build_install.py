"""Built wheels into a real environment and back, by the real uv: both package names, interruptions, full disks."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.integration.toolkit.local_index import make_wheel
from tests.integration.toolkit.stack_home import TORCH_CPU, Home, record_of, snapshot
from tests.integration.toolkit.test_stack_interrupt import small_disk
from tests.unit.toolkit.build.wheels_made import record, tag, write_wheel

from sm120 import errors, files
from sm120.build.install import Installed, install, rollback
from sm120.build.prove import prove_or_roll_back
from sm120.build.wheel import Built, finish
from sm120.console import Console
from sm120.host.gather import environments
from sm120.runs import Run
from sm120.stack import Environment, Stack, look
from sm120.stack.install import adopt
from sm120.stack.install.exchange import Kernels
from sm120.stack.install.installer import Installer
from sm120.stack.install.record import EXCHANGE, site_packages

NAME = "mine"
TORCH = {
    **TORCH_CPU,
    "torch/__init__.py": "from torch import _C, nn, version\nTensor = object\n__version__ = '2.13.0+cpu'\n",
}
TORCH |= {"torch/nn/__init__.py": "from torch.nn import functional\n", "torch/nn/functional.py": "silu = gelu = None\n"}
OLD = {
    "sgl_kernel/__init__.py": "__version__ = 'old'\n",
    "sgl_kernel/only_old.py": "a = 1\n",
    "triton_kernels/deep/__init__.py": "",
}


@dataclass(frozen=True)
class Bench:
    """An environment with kernels in it, and what was there when it was made."""

    home: Home
    stack: Stack
    environment: Environment
    before: Mapping[str, str]

    @property
    def folder(self) -> Path:
        return self.environment.python.parents[1]

    @property
    def site(self) -> Path:
        return site_packages(self.folder)

    def built(self, digit: str = "a", content: Mapping[str, str] | None = None, **more: str) -> Built:
        """A wheel of another build for another digit."""
        name = more.pop("name", "sgl-kernel")
        of = record(digit * 64, **more)
        given = {"sgl_kernel/__init__.py": f"__version__ = {digit!r}\n", **(content or {})}
        made = write_wheel(self.home.path.parent / "made", of, given, name=name)
        return finish(made, self.home.state.kernels(NAME), tag(of), of)

    def install(self, built: Built) -> Installed:
        state = self.home.state
        return install(built, self.environment, state, Run.start(state, "build-kernels", []), Console.current())

    def rollback(self) -> Installed:
        state = self.home.state
        return rollback(self.environment, state, Run.start(state, "build-kernels", []), Console.current())

    def prove(self, built: Built) -> Any:
        state = self.home.state
        run = Run.start(state, "build-kernels", [])
        return prove_or_roll_back(built, self.environment, state, run, Console.current())

    def imported(self) -> str:
        argv = [str(self.environment.python), "-I", "-c", "import sgl_kernel; print(sgl_kernel.__version__)"]
        return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()

    def assert_whole(self) -> None:
        """The record is followed: no task installs anything, and doctor finds nothing changed."""
        found, why = look(self.stack, self.home.state)
        assert found is not None, why
        (seen,) = [read() for read in environments.environments(self.home.state, os.environ).values()]
        assert {d.name: d.version for d in seen.distributions} == dict(seen.locked)
        assert seen.problem is None
        assert not list(self.folder.glob(".sm120-install*"))

    def assert_as_before(self) -> None:
        self.assert_whole()
        assert snapshot(self.folder) == self.before
        found, _ = look(self.stack, self.home.state)
        assert found is not None
        assert found.fingerprint == self.environment.fingerprint


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    return Home.make(tmp_path, monkeypatch)


def make_bench(home: Home, kernels: str | None = "sgl-kernel", content: Mapping[str, str] = OLD) -> Bench:
    wheels = home.path.parent / "wheels"
    made = [make_wheel(wheels, "leaf", "1.0", content={"leaf/__init__.py": "", "leaf/data.txt": "of leaf\n"})]
    made += [make_wheel(wheels, "torch", "2.13.0+cpu", content=TORCH)]
    if kernels:
        made += [make_wheel(wheels, kernels, "0.3.20", content=content)]
    packages = 'torch = "2.13.0+cpu"\nleaf = "1.0"\n' + (f'{kernels} = "0.3.20"' if kernels else "")
    stack = home.stack(packages)
    home.write_lock(stack, {wheel: wheel.as_uri() for wheel in made})
    environment = home.ensure(stack)
    return Bench(home, stack, environment, snapshot(environment.python.parents[1]))


@pytest.fixture
def bench(home: Home) -> Bench:
    return make_bench(home)


def test_over_the_locked_kernels_and_back(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    built = bench.built()
    done = bench.install(built)
    assert done == Installed(before="sgl-kernel 0.3.20", after=f"sgl-kernel {built.version}", kept="sgl-kernel 0.3.20")
    assert bench.imported() == "a"
    assert not (bench.site / "sgl_kernel" / "only_old.py").exists()
    assert not (bench.site / "triton_kernels").exists()
    bench.assert_whole()
    content = record_of(bench.environment)
    assert content["built"] == [
        {"name": "sgl-kernel", "version": built.version, "sha256": built.sha256, "wheel": built.path.name}
    ]
    assert f"sgl-kernel {built.version}" in content["present"]

    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("nothing is to be started"))
        again = bench.home.ensure(bench.stack)
        assert bench.install(built).before == f"sgl-kernel {built.version}"
    assert not again.fresh
    assert again.fingerprint != bench.environment.fingerprint

    back = bench.rollback()
    assert back == Installed(before=f"sgl-kernel {built.version}", after="sgl-kernel 0.3.20", kept=None)
    assert bench.imported() == "old"
    bench.assert_as_before()
    with pytest.raises(errors.UsageError, match="nothing to go back to"):
        bench.rollback()


@pytest.mark.parametrize(("locked", "name"), [("sglang-kernel", "sgl-kernel"), ("sgl-kernel", "sglang-kernel")])
def test_the_other_name_goes_before_this_one_comes(home: Home, locked: str, name: str) -> None:
    bench = make_bench(home, locked)
    assert bench.imported() == "old"
    assert list(bench.site.glob("sgl_kernel/__pycache__/*.pyc"))
    done = bench.install(bench.built(name=name))
    assert done.before == f"{locked} 0.3.20"
    assert bench.imported() == "a"
    assert len(list(bench.site.glob("sgl*_kernel-*.dist-info"))) == 1
    assert {path.name for path in (bench.site / "sgl_kernel").iterdir()} - {"__pycache__"} == {
        "__init__.py",
        "_build.json",
    }
    bench.assert_whole()
    assert bench.rollback().after == f"{locked} 0.3.20"
    bench.assert_as_before()


def test_a_stack_without_kernels_gets_some_and_loses_them_again(home: Home) -> None:
    bench = make_bench(home, None)
    assert bench.install(bench.built()).before is None
    assert bench.imported() == "a"
    bench.assert_whole()
    assert bench.rollback().after is None
    assert not (bench.site / "sgl_kernel").exists()
    bench.assert_as_before()


def test_back_by_one_wheel_at_a_time(bench: Bench) -> None:
    first, second = bench.built("a"), bench.built("b", name="sglang-kernel")
    bench.install(first)
    one = bench.home.ensure(bench.stack).fingerprint
    done = bench.install(second)
    assert (done.before, done.kept) == (f"sgl-kernel {first.version}", f"sgl-kernel {first.version}")
    assert bench.home.ensure(bench.stack).fingerprint not in {one, bench.environment.fingerprint}

    back = bench.rollback()
    assert (back.after, back.kept) == (f"sgl-kernel {first.version}", "sgl-kernel 0.3.20")
    assert bench.imported() == "a"
    assert bench.home.ensure(bench.stack).fingerprint == one
    bench.assert_whole()
    bench.rollback()
    bench.assert_as_before()


def test_a_wheel_that_comes_again_is_not_counted_twice(bench: Bench) -> None:
    first, second = bench.built("a"), bench.built("b")
    for built in (first, second, first):
        bench.install(built)
    assert [entry["version"] for entry in record_of(bench.environment)["built"]] == [second.version, first.version]
    assert bench.rollback().after == f"sgl-kernel {second.version}"
    bench.rollback()
    bench.assert_as_before()


def test_a_wheel_that_is_gone_is_passed_over(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = bench.built("a"), bench.built("b")
    bench.install(first)
    bench.install(second)
    bench.home.store().prune([file.sha256 for file in bench.home.lock().files])
    first.path.unlink()
    Console.create()  # what the fixture printed to is not captured any more
    assert bench.rollback().after == "sgl-kernel 0.3.20"
    assert f"{first.path.name} is gone" in capsys.readouterr().err
    bench.assert_as_before()


def test_the_locked_wheel_is_fetched_before_it_is_taken_out(bench: Bench) -> None:
    """What is not in the store any more is brought again, or else nothing is changed."""
    (kernels,) = [file for file in bench.home.lock().files if file.name == "sgl-kernel"]
    built, kept = bench.built(), bench.home.store().path(kernels)
    kept.unlink()
    source = bench.home.path.parent / "wheels" / kernels.filename
    source.rename(source.with_suffix(".away"))
    with pytest.raises(errors.PreflightError, match="is gone"):
        bench.install(built)
    bench.assert_as_before()
    source.with_suffix(".away").rename(source)
    bench.install(built)
    assert kept.exists()


def test_damaged_files_are_put_right_by_the_same_wheel(bench: Bench) -> None:
    built = bench.built()
    bench.install(built)
    (bench.site / "sgl_kernel" / "__init__.py").write_text("__version__ = 'changed'\n")
    bench.install(built)
    assert bench.imported() == "a"
    bench.assert_whole()


# Refused


def test_files_of_another_package_are_not_overwritten(bench: Bench) -> None:
    built = bench.built(content={"leaf/data.txt": "of the kernels\n"})
    with pytest.raises(errors.BinaryError, match=r"would overwrite leaf/data\.txt of leaf"):
        bench.install(built)
    bench.assert_as_before()


def test_files_that_another_package_has_too_are_not_taken_from_it(bench: Bench) -> None:
    bench.install(bench.built(content={"leaf/data.txt": "of leaf\n"}))
    bench.rollback()
    assert (bench.site / "leaf" / "data.txt").read_text() == "of leaf\n"
    bench.assert_as_before()


def test_an_adopted_interpreter_is_not_changed(bench: Bench) -> None:
    built = bench.built()
    environment, _ = adopt.adopt(bench.environment.python, "theirs", bench.home.state)
    state = bench.home.state
    run = Run.start(state, "build-kernels", [])
    with pytest.raises(errors.UsageError, match="never changed") as raised:
        install(built, environment, state, run, Console.current())
    assert str(built.path) in raised.value.message
    assert f"-m pip install --no-deps '{built.path}'" in (raised.value.remedy or "")
    with pytest.raises(errors.UsageError, match="adopted"):
        rollback(environment, state, run, Console.current())
    assert snapshot(bench.folder) == bench.before


def test_a_wheel_for_another_torch_is_refused(bench: Bench) -> None:
    bench.install(bench.built("b", torch="2.13.0+cpu"))
    with pytest.raises(errors.BinaryError, match=r"against torch 2\.14\.0, and mine has 2\.13\.0\+cpu"):
        bench.install(bench.built("c", torch="2.14.0"))


def test_an_environment_that_changed_meanwhile_is_not_touched(bench: Bench) -> None:
    built = bench.built()
    (bench.site / "more-1.0.dist-info").mkdir()
    with pytest.raises(errors.PreflightError, match=r"changed since: \+ more 1\.0"):
        bench.install(built)
    bench.environment.lock.unlink()
    with pytest.raises(errors.PreflightError, match="is not whole"):
        bench.install(built)


# Interrupted

STEPS = {
    "before the old is removed": (Kernels, "_remove", True),
    "after the old was removed": (Kernels, "_remove", False),
    "after the new was installed": (Installer, "install", False),
    "before it is looked over": (Kernels, "wrong_files", True),
    "before the record": (Kernels, "_write_record", True),
}


def interrupted(
    patched: pytest.MonkeyPatch, where: tuple[type, str, bool], how: Callable[[], None]
) -> Callable[..., object]:
    owner, name, before = where
    whole: Callable[..., Any] = getattr(owner, name)

    def step(*words: Any) -> Any:
        if before:
            how()
        done = whole(*words)
        how()
        return done

    patched.setattr(owner, name, step)
    return step


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("where", STEPS.values(), ids=STEPS)
def test_interrupted_it_is_as_before_for_the_next_task(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, where: tuple[type, str, bool]
) -> None:
    built, torch = bench.built(name="sglang-kernel"), bench.site / "torch" / "__init__.py"
    inode = torch.stat().st_ino
    with monkeypatch.context() as patched:
        interrupted(patched, where, interrupt)
        with pytest.raises(KeyboardInterrupt):
            bench.install(built)
    found, why = look(bench.stack, bench.home.state)
    assert (found, why) == (None, "an exchange of its kernels was interrupted")
    (seen,) = [read() for read in environments.environments(bench.home.state, os.environ).values()]
    assert seen.problem == "an exchange of its kernels was interrupted"

    assert not bench.home.ensure(bench.stack).fresh
    assert torch.stat().st_ino == inode, "the rest of the environment is not made anew"
    bench.assert_as_before()
    bench.install(built)
    assert bench.imported() == "a"


@pytest.mark.parametrize("where", STEPS.values(), ids=STEPS)
def test_interrupted_rollback_leaves_the_built_ones(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, where: tuple[type, str, bool]
) -> None:
    bench.install(bench.built())
    after = snapshot(bench.folder)
    with monkeypatch.context() as patched:
        interrupted(patched, where, interrupt)
        with pytest.raises(KeyboardInterrupt):
            bench.rollback()
    assert not bench.home.ensure(bench.stack).fresh
    assert snapshot(bench.folder) == after
    assert bench.imported() == "a"
    bench.rollback()
    bench.assert_as_before()


def test_interrupted_after_the_record_it_is_done(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    built = bench.built()
    with monkeypatch.context() as patched:
        interrupted(patched, (Kernels, "_write_record", False), interrupt)
        with pytest.raises(KeyboardInterrupt):
            bench.install(built)
    assert not bench.home.ensure(bench.stack).fresh
    assert bench.imported() == "a"
    bench.assert_whole()


def test_the_next_installation_puts_right_what_was_interrupted(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    built = bench.built()
    with monkeypatch.context() as patched:
        interrupted(patched, STEPS["after the old was removed"], interrupt)
        with pytest.raises(KeyboardInterrupt):
            bench.install(built)
    assert bench.install(built).before == "sgl-kernel 0.3.20"
    bench.assert_whole()


KILLED = """
import os, signal, sys
from pathlib import Path
from sm120.build import install, wheel
from sm120.console import Console
from sm120.runs import Run
from sm120.stack.install import exchange, record
from sm120.state import State

def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)

exchange.Kernels.wrong_files = kill
state = State.resolve()
environment = record.environment(record.read(state.env("mine")), "mine", state, fresh=False)
built = wheel.existing(state.kernels("mine"), "a" * 64)
install.install(built, environment, state, Run.start(state, "build-kernels", []), Console.create())
"""


def test_killed_it_is_as_before_for_the_next_task(bench: Bench) -> None:
    built = bench.built(name="sglang-kernel")
    done = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert (bench.folder / EXCHANGE).exists()
    assert list(bench.site.glob("sglang_kernel-0.3.21*"))
    assert not bench.home.ensure(bench.stack).fresh
    bench.assert_as_before()
    bench.install(built)
    assert bench.imported() == "a"


def test_what_an_interruption_left_and_nothing_can_put_right_is_made_anew(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = bench.built()
    bench.install(built)
    with monkeypatch.context() as patched:
        interrupted(patched, STEPS["after the old was removed"], interrupt)
        with pytest.raises(KeyboardInterrupt):
            bench.install(bench.built("b"))
    built.path.unlink()
    bench.home.store().prune([file.sha256 for file in bench.home.lock().files])
    assert bench.home.ensure(bench.stack).fresh
    bench.assert_as_before()


# Failed


def test_files_that_are_not_what_the_wheel_says_are_taken_out_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    built, whole = bench.built(), Installer.install

    def spoiled(self: Installer, wanted: Any, again: Any) -> None:
        whole(self, wanted, again)
        if wanted[0].version != "0.3.20":
            (bench.site / "sgl_kernel" / "__init__.py").write_text("")

    with monkeypatch.context() as patched:
        patched.setattr(Installer, "install", spoiled)
        with pytest.raises(errors.BinaryError, match=r"but not whole: sgl_kernel/__init__\.py"):
            bench.install(built)
    bench.assert_as_before()


def test_a_disk_that_is_too_small_is_seen_beforehand(home: Home) -> None:
    with small_disk(home.path, "16m"):
        bench = make_bench(home)
        built = bench.built(content={"sgl_kernel/big.txt": "0" * 40_000_000})
        with pytest.raises(errors.PreflightError, match="no space left on the disk") as raised:
            bench.install(built)
        assert "SM120_HOME" in (raised.value.remedy or "")
        bench.assert_as_before()


def test_a_disk_that_fills_up_meanwhile(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    with small_disk(home.path, "16m"):
        bench = make_bench(home)
        built = bench.built(content={"sgl_kernel/big.txt": "0" * 40_000_000})
        with monkeypatch.context() as patched:
            patched.setattr(files, "free_bytes", lambda _: 10**12)
            with pytest.raises(errors.PreflightError, match="no space left on the disk while packages"):
                bench.install(built)
        bench.assert_as_before()


# Proven


def test_what_imports_is_proven(bench: Bench) -> None:
    built = bench.built()
    bench.install(built)
    proof = bench.prove(built)
    assert (proof.module, proof.outcome) == ("sgl_kernel", "OK")
    assert proof.detail == "a imports; no card here to compute on"
    assert Path(proof.facts["file"]).is_relative_to(bench.site)
    bench.assert_whole()


def test_what_does_not_import_is_taken_out_again(bench: Bench) -> None:
    built = bench.built(content={"sgl_kernel/__init__.py": "raise RuntimeError('undefined symbol: c10')\n"})
    bench.install(built)
    with pytest.raises(errors.BinaryError, match="does not import: RuntimeError: undefined symbol: c10") as raised:
        bench.prove(built)
    assert "it was taken out again: mine has sgl-kernel 0.3.20, as before" in raised.value.message
    bench.assert_as_before()


def test_what_cannot_be_taken_out_again_says_so(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    built = bench.built(content={"sgl_kernel/__init__.py": "raise RuntimeError('no')\n"})
    bench.install(built)
    with monkeypatch.context() as patched:
        patched.setattr(files, "free_bytes", lambda _: 0)
        with pytest.raises(errors.BinaryError, match="it could not be taken out again: no space"):
            bench.prove(built)


def test_without_a_driver_it_is_said_that_nothing_is_proven(bench: Bench) -> None:
    missing = "raise ImportError('libcuda.so.1: cannot open shared object file: No such file or directory')\n"
    built = bench.built(content={"sgl_kernel/__init__.py": missing})
    bench.install(built)
    proof = bench.prove(built)
    assert (proof.outcome, proof.detail.startswith("not proven on this machine: needs libcuda.so.1")) == (
        "SKIPPED",
        True,
    )
    bench.assert_whole()


def test_another_build_in_its_place_is_not_proven(bench: Bench) -> None:
    bench.install(bench.built("a"))
    with pytest.raises(errors.BinaryError, match="the record there is another's"):
        bench.prove(bench.built("b"))


def test_a_setup_that_makes_the_environment_anew_names_the_built_kernels(bench: Bench) -> None:
    bench.install(bench.built())
    bench.environment.lock.unlink()
    done = bench.home.setup("--stack", str(bench.stack.path))
    assert done.returncode == 0, done.stderr
    assert "are not in it: scripts/inv build-kernels --stack mine" in done.stderr
    bench.assert_as_before()

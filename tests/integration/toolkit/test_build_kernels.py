"""``build-kernels`` from a small project of our own to a wheel that is imported, as a user starts it.

The project (kernel_project/) has the traits of upstream's; nvcc, CMake, ninja, the backend and torch are the real ones.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from packaging.version import Version
from tests.integration.toolkit.kernel_project_made import HOST, Project, git, make_project
from tests.integration.toolkit.stack_home import invocation, wait_until

from sm120 import process
from sm120.build.patches import Context, load_series, propose
from sm120.build.patches import State as PatchState
from sm120.console import Console
from sm120.stack import Environment, ensure_environment, load_stack
from sm120.stack.fetch.store import Store
from sm120.stack.install.record import site_packages
from sm120.stack.lock import read_lock
from sm120.state import State

STACK = "cpu"
LEFT_OUT = {"common_ops_sm90_build", "flash_ops"}
# A library without which nothing of this runs, and an object that is soon there; both below the build folder.
LIBRARY = "sm100/common_ops.abi3.so"
USE = """
import json, sys
import torch, sgl_kernel, sgl_kernel.flash_attn as flash_attn
assert sgl_kernel.__file__.startswith(sys.prefix)
try:
    flash_attn.flash_attn(torch.zeros(1), torch.zeros(1))
except RuntimeError as error:
    absent = str(error)
print(json.dumps({
    "version": sgl_kernel.__version__,
    "values": sgl_kernel.fp4_values().tolist(),
    "launches": sgl_kernel.launches(),
    "operators": [hasattr(torch.ops.sgl_kernel, name) for name in ("fp4_tile_mm", "scale_values")],
    "kernels": torch._C._dispatch_dump("sgl_kernel::fp4_tile_mm"),
    "absent": absent,
}))
"""


@dataclass(frozen=True, kw_only=True)
class Workshop:
    """A home of its own with the CPU stack in it, and the project to build there."""

    home: Path
    state: State
    environment: Environment
    project: Project
    ccache: bool = False  # or else it is told to keep nothing: what is looked at here is the build itself

    @property
    def build(self) -> Path:
        return self.state.build(STACK, "sgl-kernel")

    @property
    def objects(self) -> Path:
        return self.build / "cmake"

    def argv(self, *words: str, source: Path | None = None, mirror: Path | None = None) -> list[str]:
        flags = ["--source", source or self.project.checkout, "--git-mirror", mirror or self.project.mirror]
        return invocation("build-kernels", "--json", "--stack", STACK, *map(str, flags), *words)

    def variables(self) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("CCACHE_", "INVOKE_", "GIT_"))}
        return {**kept, "SM120_HOME": str(self.home), **({} if self.ccache else {"CCACHE_DISABLE": "1"})}

    def run(
        self, *words: str, source: Path | None = None, mirror: Path | None = None
    ) -> "subprocess.CompletedProcess[str]":
        argv = self.argv(*words, source=source, mirror=mirror)
        return subprocess.run(argv, env=self.variables(), capture_output=True, text=True, check=False, timeout=280)

    def ok(self, *words: str, source: Path | None = None, mirror: Path | None = None) -> dict[str, Any]:
        done = self.run(*words, source=source, mirror=mirror)
        assert done.returncode == 0, done.stderr
        result: dict[str, Any] = json.loads(done.stdout)
        return result

    def start(self, *words: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            self.argv(*words), env=self.variables(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def import_it(self) -> dict[str, Any]:
        argv = [str(self.environment.python), "-I", "-c", USE]
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stderr
        result: dict[str, Any] = json.loads(done.stdout)
        return result

    def forget_build(self) -> None:
        """The objects and the wheels, so that the next build compiles all."""
        shutil.rmtree(self.build)
        for wheel in self.state.kernels(STACK).rglob("*.whl"):
            wheel.unlink()

    def compiled(self) -> dict[str, int]:
        """When each object was made, by ninja's log."""
        lines = (self.objects / ".ninja_log").read_text().splitlines()[1:]
        entries = (line.split("\t") for line in lines)
        return {output: int(when) for _, _, when, output, _ in entries if output.endswith(".o")}


def cpu_home(home: Path) -> tuple[State, Environment]:
    """The CPU stack installed anew, from the wheels of the one that the checkout has."""
    console = Console.create(json=True)
    stack, real = load_stack(STACK), State.resolve()
    ensure_environment(stack, real, console)
    state = State(root=home / ".sm120", runs=home / "runs")
    state.prepare()
    lock = state.lock_file(STACK)
    lock.parent.mkdir()
    shutil.copyfile(real.lock_file(STACK), lock)
    for file in read_lock(lock).files:
        place = Store(state.wheels).path(file)
        place.parent.mkdir(parents=True)
        try:
            os.link(Store(real.wheels).path(file), place)
        except OSError:  # another file system
            shutil.copyfile(Store(real.wheels).path(file), place)
    return state, ensure_environment(stack, state, console)


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    root = tmp_path_factory.mktemp("workshop")
    state, environment = cpu_home(root / "home")
    return Workshop(home=root / "home", state=state, environment=environment, project=make_project(root / "made"))


@dataclass(frozen=True, kw_only=True)
class First:
    """What the first build said, and what it found."""

    result: dict[str, Any]
    source: dict[str, str]  # the user's folder beforehand

    @property
    def sha256(self) -> str:
        return str(self.result["wheel"]["sha256"])


@pytest.fixture(scope="module")
def first(workshop: Workshop) -> First:
    source = contents(workshop.project.checkout)
    return First(result=workshop.ok(), source=source)


def contents(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }


def traces(folder: Path) -> dict[str, tuple[int, int]]:
    """Every path below, with what changes when it is written."""
    return {str(path): (path.lstat().st_mtime_ns, path.lstat().st_ino) for path in folder.rglob("*")}


# The project itself


@pytest.mark.parametrize(("torch", "not_pending"), [("2.13.0", {"cxx-standard"}), ("2.14.1", set())])
def test_every_patch_has_something_to_do_on_the_project(tmp_path: Path, torch: str, not_pending: set[str]) -> None:
    project = make_project(tmp_path)
    context = Context(cmake=Version("4.2.0"), cuda=Version("13.0"), torch=Version(torch), compile_threads=2)
    applied = propose(load_series(), project.checkout, context)
    assert {one.patch for one in applied.outcomes if one.state is not PatchState.PENDING} == not_pending
    assert not applied.conflicts
    assert set(applied.left_out) == LEFT_OUT


def test_without_the_patches_the_project_does_not_build(workshop: Workshop, tmp_path: Path) -> None:
    """CMake 4 stops at the old sub-project; past that, the host compiler does not find CCCL."""
    environment, project = workshop.environment, workshop.project
    fetched = {}
    for name, repository in project.repositories.items():
        fetched[f"repo-{name}" if name != "marks" else name] = tmp_path / name
        git(repository, "clone", "--quiet", ".", str(tmp_path / name))
    (tmp_path / "scale-steps" / "include").mkdir(parents=True)
    fetched["repo-scale-steps"] = tmp_path / "scale-steps"
    torch = site_packages(environment.python.parents[1]) / "torch"
    tools = Path(sys.executable).parent
    configure = [
        *(tools / "cmake", "-S", project.checkout / "sgl-kernel", "-B", tmp_path / "build", "-G", "Ninja"),
        *(f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}", f"-DCMAKE_PREFIX_PATH={torch / 'share' / 'cmake'}"),
        *(f"-DPython_EXECUTABLE={environment.python}", "-DSKBUILD_SABI_COMPONENT=Development.SABIModule"),
        "-DSKBUILD_SABI_VERSION=3.10",
        *(f"-DFETCHCONTENT_SOURCE_DIR_{name.upper()}={path}" for name, path in fetched.items()),
    ]
    env = {**os.environ, **environment.variables}
    for name in ("CPLUS_INCLUDE_PATH", "C_INCLUDE_PATH", "CMAKE_POLICY_VERSION_MINIMUM"):
        env.pop(name, None)
    stopped = process.run([*map(str, configure)], env=env)
    assert stopped.returncode != 0
    assert any("Compatibility with CMake < 3.5 has been removed" in line for line in stopped.tail)

    configured = process.run([*map(str, configure), "-DCMAKE_POLICY_VERSION_MINIMUM=3.5"], env=env)
    assert configured.returncode == 0, configured.tail
    stopped = process.run([str(tools / "cmake"), "--build", str(tmp_path / "build"), "-t", "tally_static"], env=env)
    assert stopped.returncode != 0
    assert any("cuda/atomic: No such file or directory" in line for line in stopped.tail)


# Beforehand


def test_patches_and_dry_run_write_nothing(workshop: Workshop) -> None:
    before = traces(workshop.home), traces(workshop.project.checkout), traces(workshop.project.mirror)
    shown = workshop.ok("--patches")
    states = {one["patch"]: one["state"] for one in shown["patches"]}
    assert states.pop("cxx-standard") == "not-needed"
    assert set(states.values()) == {"pending"}
    assert len(states) == 5
    assert '-    "-gencode=arch=compute_90,code=sm_90"' in shown["diff"]
    plan = workshop.ok("--dry-run", "--jobs", "1")
    assert plan["plan"]["architectures"] == ["120a"]
    assert plan["plan"]["jobs"] == 1
    assert plan["plan"]["reason"]
    assert set(plan["plan"]["targets_left_out"]) == LEFT_OUT
    assert plan["source"]["commit"] == workshop.project.commit
    assert (traces(workshop.home), traces(workshop.project.checkout), traces(workshop.project.mirror)) == before


@pytest.mark.parametrize(
    ("name", "file", "named"),
    [
        ("tally", "tally.git", f"https://{HOST}/small/tally.git at "),
        ("scale-steps", "small-scale-steps-v1.tar.gz", f"https://{HOST}/small/scale-steps/archive/v1.tar.gz"),
    ],
)
def test_what_the_mirror_lacks_is_named(workshop: Workshop, tmp_path: Path, name: str, file: str, named: str) -> None:
    mirror = tmp_path / "mirror"
    shutil.copytree(workshop.project.mirror, mirror)
    (gone,) = mirror.rglob(file)
    gone.rename(tmp_path / "gone")
    done = workshop.run("--no-install", mirror=mirror)
    assert done.returncode == 10, done.stderr
    error = json.loads(done.stdout)["error"]
    assert f"repo-{name}: {named}" in error["message"]
    for other in {"fp4-numbers", "tally", "scale-steps"} - {name}:
        assert other not in error["message"]
    assert error["remedy"]
    assert "Traceback" not in done.stderr


def test_a_commit_that_the_mirror_lacks_is_named(workshop: Workshop, tmp_path: Path) -> None:
    mirror = tmp_path / "mirror"
    shutil.copytree(workshop.project.mirror, mirror)
    old = workshop.project.revisions["fp4-numbers"]
    (numbers,) = mirror.rglob("fp4-numbers.git")
    shutil.rmtree(numbers)
    git(tmp_path, "clone", "--quiet", "--bare", str(workshop.project.repositories["tally"]), str(numbers))
    done = workshop.run("--no-install", mirror=mirror)
    assert done.returncode == 10, done.stderr
    assert old in json.loads(done.stdout)["error"]["message"]


# The whole flow


def test_from_the_users_folder_to_an_imported_wheel(workshop: Workshop, first: First) -> None:
    result = first.result
    assert contents(workshop.project.checkout) == first.source, "the user's folder stays as it is"
    assert git(workshop.project.checkout, "status", "--porcelain", "--ignored") == ""
    assert result["component"] == "sgl-kernel"
    assert result["source"]["commit"] == workshop.project.commit
    assert result["source"]["dirty"] is False
    assert set(result["plan"]["targets_left_out"]) == LEFT_OUT
    taken = {one["name"]: one["revision"] for one in result["dependencies"]}
    assert taken == {
        f"repo-{name}": revision for name, revision in workshop.project.revisions.items() if name != "marks"
    }

    wheel = Path(result["wheel"]["path"])
    assert hashlib.sha256(wheel.read_bytes()).hexdigest() == first.sha256
    assert re.fullmatch(r"0\.3\.99\+sm120\.[0-9a-f]{10}", result["wheel"]["version"])
    assert result["wheel"]["version"] in wheel.name
    assert result["wheel"]["reused"] is False

    assert result["installed"]["before"] is None
    assert result["installed"]["after"] == f"sgl-kernel {result['wheel']['version']}"
    used = workshop.import_it()
    assert used["values"] == [
        448 * value for value in (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6)
    ]
    assert used["launches"] == 1
    assert used["operators"] == [True, True]
    assert "CUDA" in used["kernels"]
    assert "flash_ops is not in this build" in used["absent"]


def test_the_audit_of_the_wheel(workshop: Workshop, first: First) -> None:
    audit = first.result["audit"]
    (library,) = audit["libraries"]
    assert audit["good"] is True
    assert library["name"].endswith(LIBRARY)
    assert library["cubins"] == ["120a"]
    assert library["omma"] > 0
    assert library["undefined"] == []
    assert not [name for name in library["needed"] if "12" in name or name.startswith("libcuda.")]


def test_the_wheel_says_how_it_was_built(workshop: Workshop, first: First) -> None:
    installed = site_packages(workshop.environment.python.parents[1]) / "sgl_kernel" / "_build.json"
    record = json.loads(installed.read_text())
    assert record["commit"] == workshop.project.commit
    assert record["architectures"] == ["120a"]
    assert record["torch"] == "2.13.0+cpu"
    assert set(record["left_out"]) == LEFT_OUT
    assert {one["patch"]: one["state"] for one in record["patches"]}["sm120-only"] == "pending"
    assert str(workshop.home) not in installed.read_text()


def test_again_there_is_nothing_to_build(workshop: Workshop, first: First) -> None:
    before = workshop.compiled()
    again = workshop.ok()
    assert again["wheel"] == {**first.result["wheel"], "reused": True}
    assert again["audit"] == first.result["audit"]
    assert workshop.compiled() == before


# Interrupted


def ninja_of(task: "subprocess.Popen[str]") -> psutil.Process | None:
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(task.pid).children(recursive=True):
            if child.name() == "ninja":
                return child
    return None


def first_object(workshop: Workshop) -> bool:
    """Some objects are there, and others are not."""
    log = workshop.objects / ".ninja_log"
    return log.exists() and bool(workshop.compiled())


def kill_ninja(task: "subprocess.Popen[str]") -> int:
    ninja = ninja_of(task)
    assert ninja is not None
    ninja.kill()
    return 12


def interrupt(task: "subprocess.Popen[str]") -> int:
    task.send_signal(signal.SIGINT)
    return 130


@pytest.mark.parametrize(("stop", "ccache"), [(kill_ninja, False), (interrupt, True)])
def test_interrupted_and_run_again_it_goes_on_to_the_same_wheel(
    workshop: Workshop, first: First, stop: Callable[["subprocess.Popen[str]"], int], ccache: bool
) -> None:
    workshop = replace(workshop, ccache=ccache)
    workshop.forget_build()
    task = workshop.start("--no-install", "--jobs", "1")
    wait_until(lambda: first_object(workshop))
    code = stop(task)
    _, said = task.communicate(timeout=120)
    assert task.returncode == code, said
    assert "Traceback" not in said
    assert "remedy: " in said or code == 130
    assert not (workshop.objects / LIBRARY).exists(), "it was stopped before it had all"
    before = workshop.compiled()

    again = workshop.ok("--no-install", "--jobs", "1")
    assert again["wheel"]["reused"] is False
    after = workshop.compiled()
    assert {output: when for output, when in after.items() if output in before} == before
    assert len(after) > len(before)
    assert again["wheel"]["sha256"] == first.sha256


@contextlib.contextmanager
def disk_of_its_own(folder: Path) -> Iterator[Callable[[str], None]]:
    """A file system of the memory at ``folder``, and what changes its size."""
    folder.mkdir(parents=True, exist_ok=True)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20g", "none", folder], check=False).returncode:
        pytest.skip("mounting is not permitted here")

    def resize(size: str) -> None:
        subprocess.run(["mount", "-o", f"remount,size={size}", folder], check=True)

    try:
        yield resize
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_disk_that_is_too_small_is_refused(workshop: Workshop, first: First) -> None:
    workshop.forget_build()
    with disk_of_its_own(workshop.build) as resize:
        resize("4m")
        refused = workshop.run("--no-install")
        assert refused.returncode == 10, refused.stderr
        assert "are free" in json.loads(refused.stdout)["error"]["message"]
        assert not workshop.objects.exists()


@pytest.mark.parametrize("left", [400_000, 16_000], ids=["while compiling", "while configuring"])
def test_a_disk_that_fills_up_is_one_error_and_then_it_goes_on(workshop: Workshop, first: First, left: int) -> None:
    workshop.forget_build()
    with disk_of_its_own(workshop.build) as resize:
        task = workshop.start("--no-install", "--jobs", "1")
        wait_until(lambda: first_object(workshop))
        task.send_signal(signal.SIGINT)
        task.communicate(timeout=120)
        before = workshop.compiled()
        status = os.statvfs(workshop.build)
        resize(str((status.f_blocks - status.f_bfree) * status.f_frsize + left))
        full = workshop.run("--no-install", "--jobs", "1")
        assert full.returncode == 10, full.stderr
        assert "full" in json.loads(full.stdout)["error"]["message"]
        assert "Traceback" not in full.stderr

        resize("20g")
        again = workshop.ok("--no-install", "--jobs", "1")
        assert {output: when for output, when in workshop.compiled().items() if output in before} == before
        assert again["wheel"]["sha256"] == first.sha256


# Going back


def test_rollback_restores_what_was_installed_before(workshop: Workshop, first: First, tmp_path: Path) -> None:
    other = tmp_path / "checkout"
    shutil.copytree(workshop.project.checkout, other)
    version = other / "sgl-kernel" / "python" / "sgl_kernel" / "version.py"
    version.write_text('__version__ = "changed"\n')
    newer = workshop.ok(source=other)
    assert newer["source"]["dirty"] is True
    assert newer["wheel"]["version"] != first.result["wheel"]["version"]
    assert workshop.import_it()["version"] == "changed"

    back = json.loads(
        subprocess.run(
            invocation("build-kernels", "--json", "--stack", STACK, "--rollback"),
            env=workshop.variables(),
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout
    )
    assert back["installed"]["before"] == newer["installed"]["after"]
    assert back["installed"]["after"] == first.result["installed"]["after"]
    assert workshop.import_it()["version"] == "0.3.99"

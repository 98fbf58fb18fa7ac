"""Small C++ projects through the real backend, CMake, ninja and compiler, in a Python that has none of them."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import venv
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import cmake
import ninja
import psutil
import pytest
from packaging.version import Version
from tests.integration.toolkit.stack_home import wait_until

from sm120 import errors, files
from sm120.build.compile import Compiled, Job, Jobs, compile_wheel
from sm120.build.compile import build as build_module
from sm120.build.compile.tools import lay_out
from sm120.build.toolchain import Toolchain
from sm120.console import Console
from sm120.runs import Run
from sm120.state import State

PYPROJECT = """
[build-system]
requires = ["scikit-build-core>=0.10", "torch>=2.8.0", "wheel"]
build-backend = "scikit_build_core.build"
[project]
name = "tiny"
version = "1.2"
[tool.scikit-build]
wheel.py-api = "cp310"
wheel.packages = ["tiny"]
"""
CMAKELISTS = """
cmake_minimum_required(VERSION 3.26)
project(tiny LANGUAGES CXX)
find_package(Python COMPONENTS Interpreter REQUIRED)
message(STATUS "python is ${Python_EXECUTABLE}")
file(GLOB sources csrc/*.cc)
add_library(ops MODULE ${sources})
set_target_properties(ops PROPERTIES PREFIX "")
install(TARGETS ops LIBRARY DESTINATION tiny)
"""
SOURCES = {f"csrc/{name}.cc": f"int {name}() {{ return {number}; }}\n" for number, name in enumerate("abc")}


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What stands for the stack's Python: it can import nothing but the standard library."""
    folder = tmp_path_factory.mktemp("stack") / "env"
    venv.create(folder, with_pip=False, symlinks=True)
    return folder / "bin" / "python"


class Bench:
    """One project and its build folder."""

    def __init__(self, folder: Path, python: Path) -> None:
        self.folder = folder
        self.project = folder / "build" / "source" / "tiny"
        self.build = folder / "build" / "cmake"
        self.python = python
        self.out = io.StringIO()
        self.state = State.resolve()
        self.run = Run.start(self.state, "build-kernels", [])
        self.write({"pyproject.toml": PYPROJECT, "CMakeLists.txt": CMAKELISTS, "tiny/__init__.py": "", **SOURCES})

    def write(self, texts: Mapping[str, str]) -> None:
        for name, text in texts.items():
            path = self.project / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def add(self, text: str) -> None:
        """More for CMake."""
        with (self.project / "CMakeLists.txt").open("a") as file:
            file.write(text)

    def toolchain(self, *, ccache: Path | None = None) -> Toolchain:
        environment = self.python.parents[1]
        return Toolchain(
            stack="tiny",
            python=self.python,
            python_version=f"{sys.version_info[0]}.{sys.version_info[1]}",
            site=next(environment.glob("lib/python3.*/site-packages")),
            torch=Version("2.11.0"),
            cuda_home=self.folder / "no cuda",
            cuda=Version("13.0"),
            nvcc="13.0.88",
            cxx="any",
            cmake=Path(cmake.CMAKE_BIN_DIR) / "cmake",
            cmake_version=Version("4.0"),
            ninja=Path(ninja.BIN_DIR) / "ninja",
            ccache=ccache,
            variables={},
        )

    def make(
        self,
        *,
        jobs: int = 2,
        ccache: Path | None = None,
        required: tuple[str, ...] = ("ops",),
        defines: Mapping[str, str] | None = None,
    ) -> Compiled:
        job = Job(
            toolchain=self.toolchain(ccache=ccache),
            project=self.project,
            build=self.build,
            wheels=self.folder / "build" / "wheel",
            defines=defines or {},
            environment={},
            jobs=Jobs(jobs=jobs, threads=1, reason=f"{jobs} jobs", estimate_gb=4.0),
            epoch=1_772_850_668,
            required=required,
        )
        console = Console(json=False, verbose=False, out=self.out, err=self.out)
        return compile_wheel(job, self.run, console)

    @property
    def log(self) -> str:
        return self.run.log_path("build").read_text()

    @property
    def shown(self) -> str:
        return self.out.getvalue()

    def script(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.write_text(text)
        path.chmod(0o755)
        return path

    def compiled_objects(self) -> list[str]:
        """Ninja's own record of objects, one line each time that one was made."""
        log = self.build / ".ninja_log"
        lines = log.read_text().splitlines() if log.exists() else []
        return [line for line in lines if ".cc.o\t" in line]


@pytest.fixture
def bench(tmp_path: Path, python: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setenv("SM120_HOME", str(tmp_path / "home"))
    for name in ("CC", "CXX", "CXXFLAGS", "CCACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    return Bench(tmp_path, python)


def test_a_project_becomes_a_wheel(bench: Bench) -> None:
    made = bench.make()
    with zipfile.ZipFile(made.wheel) as archive:
        assert "tiny/ops.so" in archive.namelist()
    assert made.wheel.name.startswith("tiny-1.2-cp310-abi3-")
    assert made.files == 4
    assert {name for name, _ in made.slowest} == {"csrc/a.cc", "csrc/b.cc", "csrc/c.cc", "ops.so"}
    assert made.jobs == 2
    assert made.ccache is None
    assert made.peak_gb_per_thread is None
    assert "cxx" in made.configure_log
    assert f"-- python is {bench.python}\n" in bench.log
    assert " -j 2\n" in bench.log
    titles = [line for line in bench.shown.splitlines() if line.startswith("==>")]
    assert "==> compiling" in titles
    assert titles[-1] == "==> making the wheel"
    assert "-c /" not in bench.shown
    commands = (bench.run.path / "commands.jsonl").read_text().splitlines()
    assert json.loads(commands[0])["returncode"] == 0


def test_only_what_the_backend_needs_can_be_imported(bench: Bench) -> None:
    tools = lay_out(bench.folder / "tools", bench.toolchain())

    def imports(module: str) -> bool:
        words = [
            str(bench.python),
            "-I",
            "-B",
            "-c",
            f"import sys; sys.path.insert(0, {str(tools)!r}); import {module}",
        ]
        return subprocess.run(words, capture_output=True, check=False).returncode == 0

    assert imports(
        "scikit_build_core.build.wheel, packaging, pathspec, importlib.metadata as m; m.version('packaging')"
    )
    assert imports(f"cmake; assert cmake.CMAKE_BIN_DIR == {cmake.CMAKE_BIN_DIR!r}")
    assert imports(f"ninja; assert ninja.BIN_DIR == {ninja.BIN_DIR!r}")
    for module in ("psutil", "invoke", "sm120", "rich"):
        assert not imports(module)


def test_the_same_build_again_compiles_nothing(bench: Bench) -> None:
    first = bench.make().wheel.read_bytes()
    objects = bench.compiled_objects()
    again = bench.make()
    assert again.files == 0
    assert bench.compiled_objects() == objects
    assert again.wheel.read_bytes() == first


def test_what_the_user_set_does_not_change_the_build(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.add('if(BREAK)\nmessage(FATAL_ERROR "broken")\nendif()\n')
    bench.write({"csrc/a.cc": "#ifdef BREAK\n#error broken\n#endif\n"})
    names = {
        "CMAKE_ARGS": "-DBREAK=ON",
        "SKBUILD_CMAKE_DEFINE": "BREAK=ON",
        "CXXFLAGS": "-DBREAK",
        "CMAKE_BUILD_PARALLEL_LEVEL": "7",
        "CMAKE_GENERATOR": "Unix Makefiles",
        "NINJAFLAGS": "-j9",
        "MAKEFLAGS": "-j9",
        "MAX_JOBS": "9",
        "NINJA_STATUS": "%f of %t ",
        "PYTHONPATH": "/nowhere",
    }
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    assert bench.make(jobs=1).files == 4
    assert " -j 1\n" in bench.log
    (warning,) = [line for line in bench.shown.splitlines() if line.startswith("warning:")]
    assert warning.split(": ")[-1].split(", ") == sorted(names)


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        ('"scikit_build_core.build"', '"setuptools.build_meta"', "setuptools.build_meta"),
        ('build-backend = "scikit_build_core.build"', "", "it names none"),
        ("[project]", 'backend-path = ["."]\n[project]', "a folder of its own"),
    ],
)
def test_another_backend_is_refused(bench: Bench, before: str, after: str, named: str) -> None:
    bench.write({"pyproject.toml": PYPROJECT.replace(before, after)})
    with pytest.raises(errors.BuildError, match=named) as caught:
        bench.make()
    assert caught.value.where == str(bench.project / "pyproject.toml")
    assert not bench.build.exists()


def test_the_first_error_is_told_and_not_the_end_of_the_log(bench: Bench) -> None:
    warnings = "".join(f"#warning noise {n}\n" for n in range(400))
    bench.write({"csrc/b.cc": f"int b() {{ return 1; }}\n#include <map>\nint bad = nothing;\n{warnings}"})
    with pytest.raises(errors.BuildError) as caught:
        bench.make(jobs=1)
    assert "csrc/b.cc:3: " in caught.value.message
    assert "was not declared" in caught.value.message
    assert caught.value.where == str(bench.run.log_path("build"))
    assert bench.log.count("noise 399") > 0
    shown = bench.shown.splitlines()
    assert sum("noise" in line for line in shown) <= 40
    assert "noise 399" in bench.shown
    assert not any(line.startswith(("FAILED", "/usr/bin")) for line in shown)
    assert any("failed after" in line for line in shown)


def test_an_error_of_cmake_has_its_place_and_cure(bench: Bench) -> None:
    bench.add("cmake_policy(SET CMP9999 NEW)\n")
    with pytest.raises(errors.BuildError, match=r"CMakeLists\.txt:10: Policy .CMP9999. is not known") as caught:
        bench.make()
    assert "guard-cmake-policies" in (caught.value.remedy or "")


def test_a_kernel_that_cmake_left_out_fails_the_build(bench: Bench) -> None:
    bench.add('message(STATUS "Not building NVFP4 as no compatible archs were found.")\n')
    with pytest.raises(errors.BuildError, match="Not building NVFP4"):
        bench.make()
    assert "Not building NVFP4" in bench.log
    assert not list((bench.folder / "build" / "wheel").glob("*.whl"))


def test_a_library_that_did_not_come_out_fails_the_build(bench: Bench) -> None:
    with pytest.raises(errors.BuildError, match="its wheel lacks flash_ops"):
        bench.make(required=("ops", "flash_ops"))


def test_a_project_that_sets_its_own_number_of_jobs_is_found_out(bench: Bench) -> None:
    bench.write({"pyproject.toml": f'{PYPROJECT}build.tool-args = ["-j5"]\n'})
    with pytest.raises(errors.BuildError, match="ninja runs 5 jobs at a time and not 2"):
        bench.make()


def test_a_repository_that_is_not_there_is_named_with_its_cure(bench: Bench) -> None:
    where = (bench.folder / "not there").as_uri()
    bench.add(
        "include(FetchContent)\n"
        f"FetchContent_Declare(repo-fmt GIT_REPOSITORY {where} GIT_TAG 553ec11ec06fbe0beebfbb45f9dc3c9eabd83d28)\n"
        "FetchContent_MakeAvailable(repo-fmt)\n"
    )
    with pytest.raises(errors.PreflightError, match="wanted to fetch the dependency repo-fmt") as caught:
        bench.make()
    assert "--dependency repo-fmt=DIR" in (caught.value.remedy or "")


def test_a_full_disk_is_the_machines_fault(bench: Bench) -> None:
    bench.add("add_custom_target(full ALL COMMAND cp ${CMAKE_CURRENT_LIST_FILE} /dev/full)\n")
    with pytest.raises(errors.PreflightError, match="the disk is full"):
        bench.make()


def test_a_broken_setting_of_the_backend_is_no_traceback(bench: Bench) -> None:
    bench.write({"pyproject.toml": PYPROJECT.replace('version = "1.2"', "")})
    with pytest.raises(errors.BuildError, match="version") as caught:
        bench.make()
    assert "Traceback" not in caught.value.message
    assert "Traceback" not in bench.shown


# Memory.


def counter(monkeypatch: pytest.MonkeyPatch, values: Callable[[], int | None]) -> None:
    """What the kernel says of those that it killed for want of memory."""
    monkeypatch.setattr(build_module, "oom_kills", values)


def rising() -> Callable[[], int]:
    numbers = iter(range(100))
    return lambda: next(numbers)


@pytest.mark.parametrize(
    ("value", "words", "remedy"),
    [
        (5, "somebody killed it, not the kernel for want of memory", "goes on with what is built"),
        (None, "perhaps the kernel killed it", "--jobs 1"),
    ],
)
def test_a_compiler_that_somebody_killed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, value: int | None, words: str, remedy: str
) -> None:
    killer = bench.script("killer", '#!/bin/sh\ncase "$*" in *b.cc.o*) kill -9 $$ ;; esac\nexec "$@"\n')
    counter(monkeypatch, lambda: value)
    with pytest.raises(errors.BuildError, match=words) as caught:
        bench.make(defines={"CMAKE_CXX_COMPILER_LAUNCHER": str(killer)})
    assert "csrc/b.cc" in caught.value.message
    assert "going on" not in bench.shown
    assert bench.log.count("Run Build Command") == 1
    assert remedy in (caught.value.remedy or "")


def test_memory_that_is_not_enough_halves_the_jobs_and_goes_on(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    killer = bench.script("killer", '#!/bin/sh\n[ $CMAKE_BUILD_PARALLEL_LEVEL = 1 ] || kill -9 $$\nexec "$@"\n')
    counter(monkeypatch, rising())
    made = bench.make(jobs=5, defines={"CMAKE_CXX_COMPILER_LAUNCHER": str(killer)})
    assert made.jobs == 1
    assert [line.split()[-1] for line in bench.log.splitlines() if "Run Build Command" in line] == ["5", "2", "1"]
    assert "the kernel killed it for want of memory" in bench.shown
    assert "going on with 2 jobs: 5 ran out of memory" in bench.shown
    assert "going on with 1 job: 2 ran out of memory" in bench.shown


def test_one_job_that_has_too_little_memory_names_the_file(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    killer = bench.script("killer", '#!/bin/sh\ncase "$*" in *b.cc.o*) kill -9 $$ ;; esac\nexec "$@"\n')
    counter(monkeypatch, rising())
    with pytest.raises(errors.BuildError, match=r"csrc/b\.cc needs more memory than there is"):
        bench.make(jobs=1, defines={"CMAKE_CXX_COMPILER_LAUNCHER": str(killer)})


def test_the_memory_of_device_compilers_is_measured_and_kept_over_attempts(bench: Bench) -> None:
    """A script that is called as nvcc's compiler is, and holds 150 MB long enough to be seen."""
    text = "import os, sys, time\nheld = bytearray(150_000_000)\ntime.sleep(2)\nos.execvp(sys.argv[1], sys.argv[1:])\n"
    compiler = bench.script("cicc", f"#!{sys.executable}\n{text}")
    bench.write({"csrc/b.cc": "int b() { return nothing; }\n"})
    for name in ("a", "c"):
        (bench.project / f"csrc/{name}.cc").unlink()
    with pytest.raises(errors.BuildError):
        bench.make(defines={"CMAKE_CXX_COMPILER_LAUNCHER": str(compiler)})
    bench.write(SOURCES)
    made = bench.make(defines={"CMAKE_CXX_COMPILER_LAUNCHER": ""})
    assert made.peak_gb_per_thread is not None
    assert 0.15 <= made.peak_gb_per_thread < 1


# Interrupted builds.


def kill_ninja() -> None:
    (found,) = [child for child in psutil.Process().children(recursive=True) if child.name() == "ninja"]
    found.kill()


def press_control_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize(
    ("stop", "error"),
    [
        pytest.param(kill_ninja, errors.BuildError, id="ninja killed"),
        pytest.param(press_control_c, errors.Interrupted, id="^C"),
    ],
)
def test_a_build_that_was_stopped_goes_on(
    bench: Bench, stop: Callable[[], None], error: type[errors.ToolkitError]
) -> None:
    gate = bench.folder / "gate"
    waits = bench.script("waits", f"#!/bin/sh\nwhile [ ! -e '{gate}' ]; do sleep 0.05; done\ntouch passed\n")
    bench.add(f'add_custom_command(OUTPUT passed COMMAND "{waits}")\nadd_custom_target(all_wait ALL DEPENDS passed)\n')

    def when_the_objects_are_there() -> None:
        wait_until(lambda: len(bench.compiled_objects()) == 3)
        stop()

    stopper = threading.Thread(target=when_the_objects_are_there)
    stopper.start()
    with pytest.raises(error) as caught:
        bench.make()
    stopper.join()
    assert "goes on with what is built" in (caught.value.remedy or "")
    left = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    assert not [words for words in left if str(waits) in words]
    objects = bench.compiled_objects()
    gate.touch()
    made = bench.make()
    assert bench.compiled_objects() == objects
    resumed = made.wheel.read_bytes()
    shutil.rmtree(bench.build)
    assert bench.make().wheel.read_bytes() == resumed


def test_ccache_has_what_an_earlier_build_compiled(bench: Bench) -> None:
    found = shutil.which("ccache")
    if found is None:
        pytest.skip("no ccache here")
    first = bench.make(ccache=Path(found))
    shutil.rmtree(bench.build)
    bench.run = Run.start(bench.state, "build-kernels", [])
    second = bench.make(ccache=Path(found))
    if first.ccache is None:
        pytest.skip("this ccache keeps no log of a build")
    assert first.ccache == (0, 3)
    assert second.ccache == (3, 0)
    assert bench.state.ccache.is_dir()
    assert files.sha256(first.wheel) == files.sha256(second.wheel)

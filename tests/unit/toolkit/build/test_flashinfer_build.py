"""Planning and building against a FlashInfer of our own, with the real ninja and the real g++."""

import _thread
import fcntl
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from tests.unit.toolkit.build import flashinfer_made
from tests.unit.toolkit.build.audits_made import SM90A, SM120A, audit, library
from tests.unit.toolkit.build.flashinfer_made import AIMED, GEMM, QUANTISER, Made, make, module

from sm120 import errors
from sm120.build.audit import Arch, Audit
from sm120.build.flashinfer import BuiltModule, Module, Planned, State, build, build_flashinfer, command, making, plan
from sm120.console import Console
from sm120.stack.install.record import Environment


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return make(tmp_path)


@pytest.fixture
def console() -> Console:
    return Console.create()


def planned(made: Made, *modules: Module) -> tuple[Planned, ...]:
    return plan(made.toolchain, [AIMED], modules or (GEMM,), None, Console.current())


def built(made: Made, *modules: Module, jobs: int = 2) -> tuple[BuiltModule, ...]:
    return build(planned(made, *modules), made.toolchain, jobs, made.run, Console.current())


def states(made: Made, *modules: Module) -> list[tuple[State, str]]:
    return [(one.state, one.why) for one in planned(made, *modules)]


def with_variables(made: Made, **variables: str) -> Made:
    return Made(root=made.root, variables={**made.variables, **variables}, nvcc=made.nvcc)


def as_a_server(made: Made, code: str = "from flashinfer import ops; ops.get_gemm('120', 128, False)") -> str:
    """FlashInfer on its own, in the stack's environment."""
    env = {**os.environ, **made.toolchain.variables}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    return done.stdout


# The plan


def test_a_plan_asks_for_what_is_not_there_and_writes_nothing(made: Made) -> None:
    (one,) = planned(made)
    assert (one.state, one.units, one.library) == (State.TO_BUILD, 3, made.library())
    assert not made.base.exists()
    assert made.jobs == []


def test_a_module_that_the_version_lacks_is_said_and_the_others_are_planned(made: Made) -> None:
    gone = module("gone", "get_never_written")
    late = module("late", "get_late")
    off = module("norm", "get_quantiser", when="flashinfer.ops:USES_NORM")
    on = module("kept", "get_quantiser", when="flashinfer.ops:NOT_IN_THIS_VERSION")
    found = states(made, gone, late, off, on)
    assert found == [
        (State.ABSENT, "there is no flashinfer.gone:f or flashinfer.ops:get_never_written"),
        (State.ABSENT, "it is compiled when it runs, not by ninja"),
        (State.ABSENT, "this installation does without: flashinfer.ops:USES_NORM is off"),
        (State.TO_BUILD, "not built yet"),
    ]


def test_a_module_of_a_package_is_left_as_it_is(made: Made) -> None:
    library = made.write("data/aot/gemm_120/gemm_120.so", "")
    (one,) = planned(made)
    assert (one.state, one.library) == (State.PACKAGED, library)
    assert built(made) == ()


@pytest.mark.parametrize(
    ("function", "words"),
    [("get_broken", "ValueError: no such card"), ("get_nothing", "RuntimeError: get_nothing builds nothing")],
)
def test_a_generator_that_fails_is_quoted(made: Made, function: str, words: str) -> None:
    with pytest.raises(errors.BuildError, match=f"does not say what odd is made of: {words}"):
        planned(made, module("odd", function))


def test_a_flashinfer_that_cannot_be_imported_is_quoted(made: Made) -> None:
    made.write("__init__.py", "raise OSError('libsomething.so.1: cannot open')")
    with pytest.raises(errors.BuildError, match=r"cannot be imported in the stack made: OSError: libsomething\.so\.1"):
        planned(made)


def test_a_process_that_dies_is_an_error(made: Made) -> None:
    made.write("ops.py", "import os; os._exit(7)")
    with pytest.raises(errors.BuildError, match="ended with exit code 7"):
        planned(made)


def test_a_missing_import_of_flashinfers_own_is_not_taken_for_an_old_version(made: Made) -> None:
    made.write("ops.py", "import not_installed_at_all")
    with pytest.raises(errors.BuildError, match="No module named 'not_installed_at_all'"):
        planned(made)


def test_without_flashinfer(made: Made) -> None:
    (made.site / "flashinfer_python-0.6.12.dist-info").rmdir()
    with pytest.raises(errors.UsageError, match="the stack made has no FlashInfer") as caught:
        planned(made)
    assert "flashinfer-python" in (caught.value.remedy or "")


# Building


def test_what_is_built_is_whole_and_a_server_compiles_nothing(made: Made) -> None:
    gemm, quantiser = built(made, GEMM, QUANTISER)
    assert (gemm.name, gemm.path, gemm.files, quantiser.files) == ("gemm", made.library(), 4, 2)
    assert states(made, GEMM, QUANTISER) == [(State.BUILT, "")] * 2
    before = made.library().stat().st_mtime_ns
    assert "no work to do" in as_a_server(made)
    assert made.library().stat().st_mtime_ns == before
    assert built(made, GEMM, QUANTISER) == ()


def test_the_servers_ninja_gets_the_jobs_of_the_plan(made: Made) -> None:
    built(made, jobs=3)
    assert made.jobs == ["3"]


def test_what_a_server_has_built_is_taken(made: Made) -> None:
    as_a_server(made)
    assert states(made) == [(State.BUILT, "by FlashInfer itself")]


def test_a_library_without_a_finished_build_is_not_whole(made: Made) -> None:
    """As after a kill while the linker wrote."""
    made.library().parent.mkdir(parents=True)
    made.library().write_bytes(b"\x7fELF, and no more")
    assert states(made)[0][0] is State.TO_BUILD
    built(made)
    assert made.library().read_bytes()[:6] == b"\x7fELF\x02\x01"
    assert states(made) == [(State.BUILT, "")]


def test_a_library_that_was_changed_is_linked_again(made: Made) -> None:
    built(made)
    with made.library().open("r+b") as file:
        file.truncate(100)
    assert states(made) == [(State.TO_BUILD, "changed since it was built")]
    (again,) = built(made)
    assert again.files == 1
    assert made.library().stat().st_size > 1000


def test_an_older_source_or_other_flags_are_seen(made: Made) -> None:
    built(made)
    later = time.time() + 1
    made.write("data/one.cc", "int one() { return 11; }\n")
    os.utime(made.data / "one.cc", (later, later))
    assert states(made) == [(State.TO_BUILD, "not whole, or older than its sources")]
    time.sleep(max(0.0, later - time.time()))
    (again,) = built(made)
    assert again.files == 2
    other = with_variables(made, FAKE_CFLAGS="-O1")
    assert states(other) == [(State.TO_BUILD, "built with other flags or sources")]
    (again,) = built(other)
    assert again.files == 4
    assert states(other) == [(State.BUILT, "")]


def test_a_damaged_generated_source_is_seen(made: Made) -> None:
    built(made)
    source = made.library().parents[2] / "generated" / "gemm" / "tile.cc"
    source.write_text("int ti")
    os.utime(source, (1, 1))
    assert states(made) == [(State.TO_BUILD, "built with other flags or sources")]
    (again,) = built(made)
    assert again.files == 2


def test_nothing_of_another_compiler_is_linked_in(made: Made) -> None:
    built(made)
    other = Made(root=made.root, nvcc="13.2.51")
    assert states(other) == [(State.TO_BUILD, "built by nvcc 13.0.88, g++ 12")]
    (again,) = built(other)
    assert again.files == 4
    assert states(other) == [(State.BUILT, "")]


def test_nor_into_a_build_that_was_not_finished(made: Made) -> None:
    made.write("data/two.cc", "int two() { return }\n")
    with pytest.raises(errors.BuildError):
        built(made, jobs=1)
    made.write("data/two.cc", "int two() { return 2; }\n")
    (again,) = built(Made(root=made.root, nvcc="13.2.51"))
    assert again.files == 4


@pytest.mark.parametrize("text", ["", "{", "[]", '{"compilers": 3}', '{"compilers": "x"}', "\udcff"])
def test_a_damaged_record_leaves_the_word_to_ninja(made: Made, text: str) -> None:
    built(made)
    made.library().with_name("sm120.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    assert states(made) == [(State.BUILT, "by FlashInfer itself")]


def test_an_error_is_the_compilers_and_what_was_built_stays(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    made.write("data/two.cc", "int two() { return nowhere; }\n")
    with pytest.raises(errors.BuildError, match=r"two\.cc:1: .nowhere. was not declared") as caught:
        built(made, QUANTISER, GEMM, jobs=1)
    assert "flashinfer-120a-gemm.log" in (caught.value.where or "")
    assert "nowhere" in capsys.readouterr().out
    assert states(made, QUANTISER, GEMM) == [(State.BUILT, ""), (State.TO_BUILD, "not finished")]
    made.write("data/two.cc", "int two() { return 2; }\n")
    (again,) = built(made, QUANTISER, GEMM)
    assert (again.name, again.files) == ("gemm", 3)


@pytest.mark.parametrize(("header", "package"), [("cublasLt.h", "nvidia-cublas"), ("curand_kernel.h", "nvidia-curand")])
def test_a_cuda_home_that_is_too_small_names_the_package(made: Made, header: str, package: str) -> None:
    made.write("data/one.cc", f"#include <{header}>\n")
    with pytest.raises(errors.BuildError, match=f"gemm needs {header}.* the package {package} is not installed"):
        built(made)


def test_a_source_of_the_future_would_be_compiled_at_each_start(made: Made) -> None:
    later = time.time() + 3600
    os.utime(made.data / "one.cc", (later, later))
    with pytest.raises(errors.BuildError, match="FlashInfer would compile it again when a server starts") as caught:
        built(made)
    assert "clock" in (caught.value.remedy or "")


def compiler(made: Made, words: str) -> Made:
    """With a compiler that does something before it compiles."""
    path = made.root / "compiler"
    path.write_text(f'#!/bin/sh\n{words}\nexec c++ "$@"\n')
    path.chmod(0o755)
    return with_variables(made, CXX=str(path))


def test_a_compiler_that_the_kernel_killed_goes_on_with_half_the_jobs(
    made: Made, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    once = made.root / "once"
    once.touch()
    killing = compiler(made, f"if rm {once} 2>/dev/null; then kill -9 $$; fi")
    kills = iter(range(100))
    monkeypatch.setattr(making, "oom_kills", lambda: next(kills))
    built(killing, jobs=5)
    assert made.jobs == ["5", "2"]
    assert "going on with half of 5 jobs" in capsys.readouterr().err
    assert states(killing) == [(State.BUILT, "")]


def test_a_compiler_that_somebody_killed_is_an_error(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(making, "oom_kills", lambda: 4)
    with pytest.raises(errors.BuildError, match="somebody killed it"):
        built(compiler(made, "kill -9 $$"))


def test_an_interrupt_keeps_what_is_built(made: Made) -> None:
    slow = made.root / "slow"
    slow.touch()
    waiting = compiler(made, f'case "$*" in *two.cc*) while [ -e {slow} ]; do sleep 0.05; done;; esac')
    done = made.library().with_name("one.o")

    def interrupt() -> None:
        while not done.exists() or not made.library().with_name(".ninja_log").exists() or not made.compiled():
            time.sleep(0.02)
        _thread.interrupt_main()

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(errors.Interrupted, match="interrupted while building gemm"):
        built(waiting, jobs=1)
    thread.join()
    assert states(waiting) == [(State.TO_BUILD, "not finished")]
    slow.unlink()
    (again,) = built(waiting)
    assert again.files < 4
    assert states(waiting) == [(State.BUILT, "")]


def test_a_server_that_builds_is_waited_for(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    """By FlashInfer's own lock."""
    lock = made.library().parents[1] / "gemm_120.lock"
    lock.parent.mkdir(parents=True)
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        threading.Timer(1.0, fcntl.flock, (file.fileno(), fcntl.LOCK_UN)).start()
        (one,) = built(made)
    assert one.files == 4
    assert "another process builds gemm" in capsys.readouterr().out


# The task


def environment(made: Made) -> Environment:
    return Environment("made", Path(sys.executable), made.root / "lock", "0", fresh=False)


@pytest.fixture
def stands_in(made: Made, monkeypatch: pytest.MonkeyPatch) -> Made:
    monkeypatch.setattr(command, "find", lambda environment: made.toolchain)
    monkeypatch.setattr(command, "modules", lambda: (GEMM, QUANTISER))
    return made


def result(made: Made, *, dry: bool, architectures: tuple[str, ...] = ("120a",)) -> Mapping[str, Any]:
    run = None if dry else made.run
    return build_flashinfer(environment(made), architectures, 2, ("gemm",), dry, run, Console.current())


def test_a_dry_run_shows_the_plan(stands_in: Made, capsys: pytest.CaptureFixture[str]) -> None:
    found = result(stands_in, dry=True)
    (row,) = found["modules"]
    assert (row["name"], row["state"], row["units"], found["built"]) == ("gemm", "to build", 3, [])
    assert "gemm    a test  120a  to build: not built yet  3" in capsys.readouterr().out
    assert not stands_in.base.exists()


@dataclass
class Audits:
    """Stands in for the audit: what was asked of it, and the FP4 instructions that it finds."""

    omma: int = 8
    arch: Arch = SM120A
    asked: list[tuple[str, str, bool]] = field(default_factory=list)

    def __call__(
        self, modules: Sequence[Path], environment: Environment, architecture: str, *, fp4: bool, package: str
    ) -> Audit:
        self.asked += [(str(path), architecture, fp4) for path in modules]
        facts = [
            replace(library(str(path), self.arch), omma={self.arch: self.omma} if fp4 else None) for path in modules
        ]
        return audit(*facts, on=[(12, 0)])


@pytest.fixture
def audits(monkeypatch: pytest.MonkeyPatch) -> Audits:
    stand_in = Audits()
    monkeypatch.setattr(command, "audit_modules", stand_in)
    return stand_in


def test_the_task_builds_audits_and_shows_how_long_it_took(
    stands_in: Made, audits: Audits, capsys: pytest.CaptureFixture[str]
) -> None:
    found = result(stands_in, dry=False)
    (row,) = found["built"]
    assert (row["name"], row["path"], row["files"]) == ("gemm", str(stands_in.library()), 4)
    assert "built now" in capsys.readouterr().out
    assert [one["good"] for one in found["audit"]] == [True]
    again = result(stands_in, dry=False)
    assert again["built"] == []
    assert again["audit"] == found["audit"], "what is there already is audited too"
    assert audits.asked == [(str(stands_in.library()), "120a", False)] * 2


def test_a_module_without_the_fp4_instructions_that_it_is_for_is_refused(
    stands_in: Made, audits: Audits, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "modules", lambda: (replace(GEMM, fp4=True), QUANTISER))
    (done,) = result(stands_in, dry=False)["audit"]
    assert done["libraries"][0]["omma"] == 8
    audits.omma = 0
    with pytest.raises(errors.BinaryError, match=r"holds no FP4 instruction for 12\.0"):
        result(stands_in, dry=False)
    audits.arch = SM90A
    with pytest.raises(errors.BinaryError, match=r"nothing of p runs on 12\.0"):
        result(stands_in, dry=False)


def test_modules_with_fp4_and_without_are_audited_apart(
    stands_in: Made, audits: Audits, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "modules", lambda: (replace(GEMM, fp4=True), QUANTISER))
    found = build_flashinfer(environment(stands_in), ("120a",), 2, (), False, stands_in.run, Console.current())
    assert [len(one["libraries"]) for one in found["audit"]] == [1, 1]  # type: ignore[attr-defined]
    assert [fp4 for _, _, fp4 in audits.asked] == [True, False]


def test_a_folder_that_no_server_here_uses_is_said(stands_in: Made, capsys: pytest.CaptureFixture[str]) -> None:
    found = result(stands_in, dry=True, architectures=("120a", "121a"))
    libraries = [row["library"] for row in found["modules"]]
    assert [Path(library).parents[2].name for library in libraries] == ["120a", "121a"]
    assert "compiles for 12.0a, not for 12.1a" in capsys.readouterr().err


def test_the_toolkit_never_imports_flashinfer(stands_in: Made) -> None:
    result(stands_in, dry=True)
    assert "flashinfer" not in sys.modules
    assert flashinfer_made.AIMED.listed == "12.0a"

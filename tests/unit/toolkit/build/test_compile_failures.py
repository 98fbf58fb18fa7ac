"""From the output of a failed build to its first error and the cure."""

import errno
import io
import random
import re
import tempfile
from pathlib import Path
from typing import IO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sm120 import errors
from sm120.build.compile.explain import explain, full_disk
from sm120.build.compile.failures import Failure, catalogue, error_in, find_failure, left_out
from sm120.build.compile.memory import Kill

CONFIGURE = "*** Configuring CMake..."
BUILDING = "*** Building project with Ninja..."


def step(
    output: str, *, file: str = "csrc/a.cu", code: str = "[code=1] ", total: int = 9, before: str = "", after: str = ""
) -> list[str]:
    """A build whose third file fails."""
    command = f"/cuda/bin/nvcc -O3 -c /s/{file} -o CMakeFiles/ops.dir/{file}.o"
    return [
        CONFIGURE,
        "-- The CXX compiler identification is GNU 12.2.0",
        BUILDING,
        f"[1/{total}] /usr/bin/g++ -c x.cc -o CMakeFiles/ops.dir/x.cc.o",
        *before.splitlines(),
        f"[2/{total}] {command}",
        f"FAILED: {code}CMakeFiles/ops.dir/{file}.o ",
        command,
        *output.splitlines(),
        *after.splitlines(),
        "ninja: build stopped: subcommand failed.",
        "",
        "*** CMake build failed",
    ]


def cmake(text: str, *, before: str = "", header: str = "CMake Error at CMakeLists.txt:10 (message):") -> list[str]:
    body = [f"  {line}" if line else "" for line in text.splitlines()]
    tail = ["Call Stack (most recent call first):", "  CMakeLists.txt:3 (include)", "", "-- Configuring incomplete"]
    return [CONFIGURE, "-- Found Threads: TRUE", *before.splitlines(), header, *body, "", "", *tail]


# What compilers, CMake and git print; one sample or more for each entry of the catalogue.
SAMPLES: dict[str, list[list[str]]] = {
    "disk-full": [
        step("fatal error: error writing to /tmp/ccX.s: No space left on device\ncompilation terminated."),
        step("as: CMakeFiles/a.o: final close: No space left on device"),
        [BUILDING, "*** Making wheel...", "sm120-build:error OSError: [Errno 28] No space left on device"],
    ],
    "cccl-moved": [
        step(
            "In file included from /d/mscclpp/src/x.cc:3:\n"
            "/d/mscclpp/include/atomic_device.hpp:10:10: fatal error: cuda/atomic: No such file or directory\n"
            "   10 | #include <cuda/atomic>\n      |          ^~~~~~~~~~~~~\ncompilation terminated.",
            file="src/x.cc",
        ),
        step("/c/fast_math.h:42:10: fatal error: cuda/std/utility: No such file or directory"),
    ],
    "unknown-policy": [
        cmake(
            'Policy "CMP0177" is not known to this version of CMake.',
            header="CMake Error at CMakeLists.txt:10 (cmake_policy):",
        )
    ],
    "cmake-too-old-project": [
        cmake(
            "Compatibility with CMake < 3.5 has been removed from CMake.\n\nUpdate the VERSION argument <min> value.",
            header="CMake Error at /b/deps/dlpack/CMakeLists.txt:5 (cmake_minimum_required):",
        )
    ],
    "cxx20": [
        step("/t/include/c10/util/C++20.h:9:2: error: #error You need C++20 to compile PyTorch"),
        step("/t/include/x.h(9): error: #error directive: C++20 or later compatible compiler is required"),
    ],
    "unsupported-architecture": [
        step("nvcc fatal   : Unsupported gpu architecture 'compute_121a'"),
        step("ptxas fatal   : Value 'sm_120f' is not defined for option 'gpu-name'"),
    ],
    "needs-arch-specific-target": [
        step(
            "ptxas /tmp/x.ptx, line 29; error   : Instruction 'cvt with .e2m1x2' not supported on .target 'sm_120'\n"
            "ptxas fatal   : Ptx assembly aborted due to errors"
        ),
        step("ptxas /tmp/tmpxft_00.ptx, line 29; error   : Arguments mismatch for instruction 'cvt'"),
        step("ptxas x.ptx, line 9; error   : Feature 'mxf4nvf4' not supported on .target 'sm_120'"),
    ],
    "glibc-rsqrt": [
        cmake(
            'Compiling the CUDA compiler identification source file\n"CMakeCUDACompilerId.cu" failed.\n\n'
            "Compiler: /cuda/bin/nvcc\n\nThe output was:\n\n2\n\n/usr/include/x86_64-linux-gnu/bits/mathcalls.h(206): "
            'error: exception specification is incompatible with that of previous function "rsqrt" (declared at '
            "line 629 of /cuda/include/crt/math_functions.h)\n   extern double rsqrt (double __x) noexcept (true);",
            header="CMake Error at /c/CMakeDetermineCompilerId.cmake:909 (message):",
        )
    ],
    "sve": [
        cmake(
            "Compiling the CUDA compiler identification source file failed.\n\n"
            '/usr/include/aarch64-linux-gnu/bits/math-vector.h(96): error: identifier "__SVFloat64_t" is undefined'
        )
    ],
    "host-compiler-too-new": [
        step(
            "/cuda/include/crt/host_config.h:143:2: error: #error -- unsupported GNU version! gcc versions later than"
            " 15 are not supported!"
        )
    ],
    "two-cuda": [
        cmake("Found two conflicting CUDA installs:\n\nV12.4.131 in '/usr/local/cuda/include' and\nV13.0.88 in '/h'"),
        cmake("Found two conflicting CUDA versions: 12.4 and 13.0"),
        cmake("FindCUDA says CUDA version is 13.0 (usually determined by nvcc), but the headers say 12.4"),
    ],
    "no-torch": [
        cmake(
            'By not providing "FindTorch.cmake" in CMAKE_MODULE_PATH this project has\nasked CMake to find a package'
            ' configuration file provided by "Torch", but\nCMake did not find one.',
            header="CMake Error at CMakeLists.txt:52 (find_package):",
        ),
        cmake("ModuleNotFoundError: No module named 'torch'"),
    ],
    "no-numa": [
        cmake("Could NOT find NUMA (missing: NUMA_LIBRARIES NUMA_INCLUDE_DIRS)"),
        step("/d/mscclpp/src/numa.cc:9:10: fatal error: numa.h: No such file or directory", file="src/numa.cc"),
        step("/usr/bin/ld: cannot find -lnuma: No such file or directory\ncollect2: error: ld returned 1 exit status"),
    ],
    "no-ibverbs": [
        cmake("Could NOT find IBVerbs (missing: IBVERBS_LIBRARIES)"),
        step("/d/src/ib.cc:9:10: fatal error: infiniband/verbs.h: No such file or directory"),
    ],
    "small-toolkit": [
        step("/t/ATen/cuda/CUDAContextLight.h:6:10: fatal error: cublasLt.h: No such file or directory"),
        step("/s/a.cu:2:10: fatal error: curand_kernel.h: No such file or directory"),
        cmake('Target "common_ops" links to target "CUDA::cublasLt" but the target was not found.'),
    ],
    "no-git": [
        cmake("could not find git for clone of repo-cutlass"),
    ],
    "network": [
        cmake(
            "Failed to clone repository:\n\n  'https://host.invalid/x/cutlass'",
            before="[1/9] Creating directories for 'repo-cutlass-populate'\nCloning into 'repo-cutlass-src'...\n"
            "fatal: unable to access 'https://host.invalid/x/cutlass/': Could not resolve host: host.invalid",
            header="CMake Error at repo-cutlass-subbuild/repo-cutlass-populate-prefix/tmp/"
            "repo-cutlass-populate-gitclone.cmake:55 (message):",
        ),
        cmake(
            "Each download failed!\n\n  error: downloading 'https://host.invalid/x.tar.gz' failed\n"
            '        status_string: "Could not resolve hostname"',
            header="CMake Error at repo-cutlass-subbuild/repo-cutlass-populate-prefix/src/"
            "repo-cutlass-populate-stamp/download-repo-cutlass-populate.cmake:163 (message):",
        ),
    ],
    "missing-submodule": [
        cmake("Cannot find source file:\n\n  /b/deps/cutlass/x.cu"),
        cmake("The source directory\n\n  /b/deps/fmt\n\ndoes not contain a CMakeLists.txt file."),
    ],
    "no-ninja": [["sm120-build:error NinjaNotFoundError: Ninja is required to build"]],
    "no-cmake": [
        ["sm120-build:error CMakeNotFoundError: Could not find CMake with version >=9"],
        cmake("CMake 9.26 or higher is required.  You are running version 4.4.5"),
    ],
    "out-of-memory": [
        step("cc1plus: out of memory allocating 65536 bytes after a total of 2147483648 bytes"),
        step("terminate called after throwing an instance of 'std::bad_alloc'"),
    ],
    "temporary-files": [
        step("Assembler messages:\nFatal error: can't create a.o: Read-only file system"),
        step("nvcc error   : could not open output file '/tmp/tmpxft_00.ii'"),
    ],
    "compiler-crashed": [
        step("/s/a.cu:9:1: internal compiler error: Segmentation fault\nPlease submit a full bug report"),
        step("nvcc error   : 'cicc' died due to signal 11 (Invalid memory reference)"),
    ],
}


def test_the_catalogue_is_whole() -> None:
    ids = [known.id for known in catalogue()]
    assert sorted(ids) == sorted(SAMPLES)
    assert len(set(ids)) == len(ids)
    for known in catalogue():
        assert known.what
        assert known.cure
        assert known.source
        asked = set(re.findall(r"\{(\w+)\}", known.what + known.cure))
        assert asked <= set(known.naming.groupindex if known.naming else ())


@pytest.mark.parametrize(
    ("id_", "lines"),
    [pytest.param(id_, lines, id=f"{id_}-{n}") for id_, all_ in SAMPLES.items() for n, lines in enumerate(all_)],
)
def test_every_sample_is_known_as_what_it_is(id_: str, lines: list[str]) -> None:
    entry = next(known for known in catalogue() if known.id == id_)
    failure = find_failure(lines)
    found = failure.diagnosis()
    assert found is not None, failure
    assert found.id == id_, failure
    error = explain(failure, Kill.NONE, jobs=2, held=None, log="/run/build.log", full=None)
    assert isinstance(error, errors.PreflightError if entry.machine else errors.BuildError)
    assert error.where == "/run/build.log"
    assert error.remedy == found.cure


def test_a_fetch_that_failed_names_the_dependency() -> None:
    for lines in SAMPLES["network"]:
        found = find_failure(lines).diagnosis()
        assert found is not None
        assert "--dependency repo-cutlass=DIR" in found.cure
        assert "dependency repo-cutlass " in found.what


def test_a_fetch_without_a_name_says_name() -> None:
    found = find_failure(cmake("Could not resolve host: a.b")).diagnosis()
    assert found is not None
    assert "--dependency NAME=DIR" in found.cure


def test_error_has_place_message_and_file() -> None:
    failure = find_failure(SAMPLES["cccl-moved"][0])
    assert failure.first == "/d/mscclpp/include/atomic_device.hpp:10: cuda/atomic: No such file or directory"
    assert failure.file == "src/x.cc"
    error = explain(failure, Kill.NONE, jobs=2, held=None, log="l", full=None)
    assert error.message.endswith(
        ": src/x.cc: /d/mscclpp/include/atomic_device.hpp:10: cuda/atomic: No such file or directory"
    )


def test_the_first_error_is_found_far_above_the_end() -> None:
    noise = "\n".join(f"/t/include/deep.h:{n}:1: note: candidate {n}" for n in range(400))
    other = "[3/9] g++ -c b.cc\nFAILED: [code=1] CMakeFiles/ops.dir/b.cc.o \ng++ -c b.cc\nb.cc:1:1: error: the second"
    failure = find_failure(step(f"a.cu(7): error: the first\n{noise}\na.cu(9): error: a later one", after=other))
    assert failure.first == "a.cu:7: the first"
    assert failure.file == "csrc/a.cu"
    assert len(failure.output) == 402


def test_warnings_before_are_not_the_error() -> None:
    warnings = "a.cu(3): warning #177-D: variable was declared but never referenced\nptxas info    : 0 bytes gmem"
    failure = find_failure(step(f"{warnings}\na.cu(8): error: expected a ;", before="x.cc:3:1: error: of a try"))
    assert failure.first == "a.cu:8: expected a ;"


def test_colours_do_not_hide_it() -> None:
    failure = find_failure(
        step("\x1b[01m\x1b[Ka.cc:1:10:\x1b[m\x1b[K \x1b[01;31m\x1b[Kfatal error: \x1b[m\x1b[Kno.h: No such file")
    )
    assert failure.first == "a.cc:1: no.h: No such file"


def test_an_error_of_a_stage_that_went_well_does_not_count() -> None:
    tried = ["*** Configuring CMake...", "CMake Error at x.cmake:1 (message):", "  of a try", ""]
    failure = find_failure([*tried, *step("a.cu(1): error: real")[2:]])
    assert failure.first == "a.cu:1: real"


def test_a_command_in_pieces_is_no_output() -> None:
    lines = step("a.cu(1): error: real")
    at = lines.index("FAILED: [code=1] CMakeFiles/ops.dir/csrc/a.cu.o ")
    lines[at + 1 : at + 2] = ["x" * 8192, "error: in the middle of a command", "a.cu(1): error: real"]
    failure = find_failure(lines)
    assert failure.first == "a.cu:1: real"
    assert "error: in the middle of a command" not in failure.output


@pytest.mark.parametrize(
    ("lines", "first"),
    [
        (step("", code="[code=5] "), "csrc/a.cu: ended with exit code 5"),
        (step("", code=""), "csrc/a.cu: failed without a word"),
        (step("something odd\nhappened"), "something odd"),
        ([BUILDING, "ninja: error: 'x.cu', needed by 'x.o', missing and no known rule to make it"],
         "ninja: error: 'x.cu', needed by 'x.o', missing and no known rule to make it"),
        ([CONFIGURE, "CMake Error: The source is not there"], "The source is not there"),
        ([CONFIGURE, "CMake Error in csrc/CMakeLists.txt:", "  Imported target", "  is bad"],
         "csrc/CMakeLists.txt: Imported target is bad"),
        (step("/usr/bin/ld: a.o: in function `f':\na.cc:(.text+0x9): undefined reference to `g()'", file="x"),
         "a.cc:(.text+0x9): undefined reference to `g()'"),
    ],
)  # fmt: skip
def test_other_ends(lines: list[str], first: str) -> None:
    failure = find_failure(lines)
    assert failure.first == first
    assert not failure.silent


def test_an_end_without_a_word_is_silent() -> None:
    failure = find_failure([BUILDING, "[1/9] g++ -c a.cc -o a.o", "a warning"])
    assert failure.silent
    assert failure.output == ("a warning",)
    error = explain(failure, Kill.SOMEBODY, jobs=2, held=None, log="l", full=None)
    assert "without a word" in error.message


@pytest.mark.parametrize(
    ("lines", "killed"),
    [
        (step("", code="[code=137] "), True),
        (step("Killed", code=""), True),
        (step("g++: fatal error: Killed signal terminated program cc1plus\ncompilation terminated."), True),
        (step("nvcc error   : 'cicc' died due to signal 9 (Kill signal)", code="[code=9] "), True),
        (step("nvcc error   : 'cicc' died due to signal 11 (Invalid memory reference)"), False),
        (step('a.cu(1): error: identifier "Killed" is undefined'), False),
        (step("a.cu(1): error: real", code="[code=2] "), False),
    ],
)
def test_who_was_killed(lines: list[str], killed: bool) -> None:
    assert find_failure(lines).killed is killed


def test_words_about_a_kill() -> None:
    failure = find_failure(step("Killed", code="[code=137] "))

    def words(kill: Kill, jobs: int = 8) -> errors.ToolkitError:
        return explain(failure, kill, jobs=jobs, held=4_200_000_000, log="l", full=None)

    memory = words(Kill.MEMORY, 1)
    assert memory.message.startswith("csrc/a.cu needs more memory than there is (seen with 4.2 GB)")
    perhaps = words(Kill.PERHAPS)
    assert "perhaps" in perhaps.message
    assert "--jobs 4" in (perhaps.remedy or "")
    somebody = words(Kill.SOMEBODY)
    assert "somebody killed it, not the kernel for want of memory" in somebody.message
    assert "jobs" not in (somebody.remedy or "")
    for error in (memory, perhaps, somebody):
        assert error.exit_code == 12


def test_an_unknown_error_says_where_to_read() -> None:
    error = explain(Failure(first="a.cu:1: odd", file="a.cu"), Kill.NONE, jobs=1, held=None, log="/l", full=None)
    assert (error.message, error.where, error.exit_code) == ("a.cu:1: odd", "/l", 12)


def test_a_full_disk_is_the_reason_whatever_the_words_were() -> None:
    failure = Failure(first="build.ninja:48: unknown build rule 'CUSTOM_COMMAND'")
    error = explain(failure, Kill.NONE, jobs=1, held=None, log="/l", full=Path("/b"))
    assert isinstance(error, errors.PreflightError)
    assert error.message.startswith("the disk is full at /b: build.ninja:48")
    assert "free some space" in (error.remedy or "")


def test_a_folder_with_room_is_not_full(tmp_path: Path) -> None:
    assert full_disk(tmp_path, tmp_path / "absent") is None
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_room_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def temporary(*, dir: Path) -> IO[bytes]:  # noqa: A002 -- tempfile names it so
        if dir == tmp_path:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        return io.BytesIO()

    monkeypatch.setattr(tempfile, "TemporaryFile", temporary)
    assert full_disk(Path("/other"), tmp_path) == tmp_path


@given(st.lists(st.text()))
def test_any_output_has_an_explanation(lines: list[str]) -> None:
    failure = find_failure(lines)
    assert failure.first
    assert explain(failure, Kill.NONE, jobs=1, held=None, log="l", full=None).message


@given(st.integers(0, 2**32))
def test_the_end_of_a_log_may_be_cut_anywhere(seed: int) -> None:
    chance = random.Random(seed)
    lines = chance.choice(chance.choice(list(SAMPLES.values())))
    text = "\n".join(lines)
    assert find_failure(text[: chance.randrange(len(text))].splitlines()).first


@pytest.mark.parametrize(
    "line",
    [
        "-- Not building NVFP4 as no compatible archs were found.",
        "-- Not building Marlin kernels as no compatible archs found in CUDA target architectures",
        "-- Not building scaled_mm_c3x_sm90 as CUDA Compiler version is not >= 12.0, we recommend upgrading",
        "  No supported CUDA architectures found for the MoE kernels",
        "-- Skipping FP4 kernels: CUDA 12.8 or later is needed",
        "-- Disabling cutlass_moe_sm100",
        "-- The attention kernels will not be built",
    ],
)
def test_lines_that_leave_a_kernel_out(line: str) -> None:
    assert left_out(line)


@pytest.mark.parametrize(
    "line",
    [
        "-- sm120: flash_ops is left out: its code is for sm_90a, sm_80, sm_86 only",
        "-- USE_CUDNN is set to 0. Compiling without cuDNN support",
        "-- clang-format not found.",
        "-- Building NVFP4 for archs: 12.0a",
        "-- Bypassing GPU check: using NVIDIA/CUDA.",
        "-- Performing Test HAVE_X - Failed",
        "-- Skipping the tests",
    ],
)
def test_lines_that_leave_none_out(line: str) -> None:
    assert not left_out(line)


@pytest.mark.parametrize(
    "line",
    [
        "a.cu(1): warning #20012-D: an error: of no kind",
        "   10 | #include <cuda/atomic>",
        "ptxas info    : Used 32 registers",
        "a.cc:1:2: note: error is a word",
        "In file included from a.h:1,",
        '2 errors detected in the compilation of "d.cu".',
    ],
)
def test_lines_that_are_no_error(line: str) -> None:
    assert error_in(line) is None

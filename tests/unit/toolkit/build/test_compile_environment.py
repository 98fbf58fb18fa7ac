"""What a build is told, and what of the user's it is not told."""

from pathlib import Path

import pytest
from packaging.version import Version

from sm120.build.compile.environment import (
    build_environment,
    ccache_environment,
    compilers,
    definitions,
    settings,
    without_what_changes_the_build,
)
from sm120.build.toolchain import Toolchain


def toolchain(ccache: Path | None = None, variables: dict[str, str] | None = None) -> Toolchain:
    return Toolchain(
        stack="s",
        python=Path("/env/bin/python"),
        python_version="3.12",
        site=Path("/env/lib/python3.12/site-packages"),
        torch=Version("2.11.0"),
        cuda_home=Path("/cuda"),
        cuda=Version("13.0"),
        nvcc="13.0.88",
        cxx="g++ 12",
        cmake=Path("/cmake"),
        cmake_version=Version("4.2"),
        ninja=Path("/ninja"),
        ccache=ccache,
        variables=variables or {},
    )


@pytest.mark.parametrize(
    "name",
    [
        *("CFLAGS", "CXXFLAGS", "CPPFLAGS", "CUDAFLAGS", "LDFLAGS", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"),
        *("NVCC_CCBIN", "CMAKE_ARGS", "CMAKE_BUILD_PARALLEL_LEVEL", "CMAKE_PREFIX_PATH", "CMAKE_GENERATOR"),
        *("SKBUILD_CMAKE_ARGS", "NINJAFLAGS", "MAKEFLAGS", "MAX_JOBS", "NINJA_STATUS", "CUDAARCHS", "CUDAHOSTCXX"),
        *("PYTHONPATH", "PYTHONHOME"),
    ],
)
def test_what_would_change_the_build_is_dropped_and_named(name: str) -> None:
    assert without_what_changes_the_build({name: "x", "HOME": "/h"}) == ({"HOME": "/h"}, (name,))
    assert without_what_changes_the_build({name: ""}) == ({}, ())


@pytest.mark.parametrize("name", ["PATH", "HOME", "CC", "CXX", "CCACHE_DIR", "TMPDIR", "XCFLAGSX", "MY_CMAKE_ARGS"])
def test_the_rest_is_kept(name: str) -> None:
    assert without_what_changes_the_build({name: "x"}) == ({name: "x"}, ())


def test_colours_go_without_a_word() -> None:
    assert without_what_changes_the_build({"FORCE_COLOR": "1", "CLICOLOR_FORCE": "1"}) == ({}, ())


def environment(base: dict[str, str], found: Toolchain, **added: str) -> dict[str, str]:
    return build_environment(
        base, found, tools=Path("/b/tools"), added=added, jobs=3, epoch=1772850668, find=lambda name: f"/usr/bin/{name}"
    )


def test_the_stack_comes_first_and_our_tools_before_it() -> None:
    made = environment(
        {"PATH": "/usr/bin", "HOME": "/h"}, toolchain(variables={"PATH": "/cuda/bin:/usr/bin", "CUDA_HOME": "/cuda"})
    )
    assert made["PATH"] == "/b/tools/bin:/env/bin:/cuda/bin:/usr/bin"
    assert made["HOME"] == "/h"
    assert made["CUDA_HOME"] == "/cuda"
    assert made["CUDACXX"] == "/cuda/bin/nvcc"
    assert made["CMAKE_BUILD_PARALLEL_LEVEL"] == "3"
    assert made["SOURCE_DATE_EPOCH"] == "1772850668"
    assert made["NVCC_APPEND_FLAGS"] == "-objtemp"
    assert made["CXX"] == "c++"


def test_what_patches_set_comes_last() -> None:
    made = environment({}, toolchain(), CMAKE_POLICY_VERSION_MINIMUM="3.5", LC_ALL="C")
    assert made["CMAKE_POLICY_VERSION_MINIMUM"] == "3.5"
    assert made["LC_ALL"] == "C"


@pytest.mark.parametrize(
    ("base", "there", "expected"),
    [
        ({}, {"g++", "gcc"}, {"CXX": "g++", "CC": "gcc"}),
        ({}, {"c++", "g++", "cc"}, {"CXX": "c++", "CC": "cc"}),
        ({}, set(), {}),
        ({"CXX": "g++-13"}, {"gcc-13"}, {"CXX": "g++-13", "CC": "gcc-13", "CUDAHOSTCXX": "g++-13"}),
        (
            {"CXX": "/o/bin/clang++"},
            {"/o/bin/clang"},
            {"CXX": "/o/bin/clang++", "CC": "/o/bin/clang", "CUDAHOSTCXX": "/o/bin/clang++"},
        ),
        ({"CXX": "g++-13"}, set(), {"CXX": "g++-13", "CC": "cc", "CUDAHOSTCXX": "g++-13"}),
        ({"CXX": "ccache g++", "CC": "mine"}, set(), {"CXX": "ccache g++", "CC": "mine"}),
    ],
)
def test_compilers_are_the_users_or_the_first_on_path(
    base: dict[str, str], there: set[str], expected: dict[str, str]
) -> None:
    assert compilers(base, lambda name: name if name in there else None) == expected


def test_definitions_with_and_without_ccache() -> None:
    made = definitions(toolchain(Path("/usr/bin/ccache")), {"X": "1", "Python_EXECUTABLE": "/other"})
    assert made["CMAKE_CUDA_COMPILER_LAUNCHER"] == made["CMAKE_CXX_COMPILER_LAUNCHER"] == "/usr/bin/ccache"
    assert made["ENABLE_CCACHE"] == "OFF"
    assert made["CMAKE_PREFIX_PATH"] == "/env/lib/python3.12/site-packages/torch/share/cmake"
    assert made["Python3_EXECUTABLE"] == "/env/bin/python"
    assert (made["X"], made["Python_EXECUTABLE"]) == ("1", "/other")
    assert definitions(toolchain(), {})["CMAKE_CUDA_COMPILER_LAUNCHER"] == ""


def test_settings_are_words_of_the_backend() -> None:
    words = settings(Path("/b/cmake"), {"A": "b=c"})
    assert "build-dir=/b/cmake" in words
    assert "cmake.define.A=b=c" in words
    assert "build.verbose=true" in words


def test_the_users_own_cache_is_kept() -> None:
    def made(base: dict[str, str]) -> dict[str, str]:
        return ccache_environment(base, cache=Path("/c"), log=Path("/l"))

    assert made({})["CCACHE_DIR"] == "/c"
    assert made({})["CCACHE_MAXSIZE"] == "20G"
    assert made({"CCACHE_DIR": "/mine", "CCACHE_MAXSIZE": "5G"}) == {
        **made({}),
        "CCACHE_DIR": "/mine",
        "CCACHE_MAXSIZE": "5G",
    }
    assert "CCACHE_BASEDIR" not in made({})
    assert made({})["CCACHE_STATSLOG"] == "/l"

"""Each rule on the shapes that the build files had, and on what it must leave alone or refuse."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.version import Version
from tests.unit.toolkit.build import trees
from tests.unit.toolkit.build.trees import MARCH, NEWEST

from sm120.build.patches import Context, Outcome, Series, State, load_series, propose
from sm120.build.patches.source import BuildFile
from sm120.errors import UsageError

SERIES = load_series()
GENCODE = re.compile(r"compute_(\w+),")
HEAD = (
    "cmake_minimum_required(VERSION 3.26)\nproject(sgl-kernel LANGUAGES CXX CUDA)\nfind_package(CUDAToolkit REQUIRED)\n"
)


def only(name: str) -> Series:
    return replace(SERIES, patches=tuple(patch for patch in SERIES.patches if patch.name == name))


def judged(root: Path, name: str, tree: trees.Tree, context: Context = NEWEST) -> tuple[Outcome, str]:
    """The outcome of one patch, and the main build file after it."""
    made = propose(only(name), trees.lay_out(root, tree), context)
    main = trees.main_of(tree)
    data = made.changes.get(main, tree[main].encode())
    assert data is not None
    return made.outcomes[0], data.decode()


def small(text: str) -> trees.Tree:
    return {"sgl-kernel/CMakeLists.txt": text, "sgl-kernel/pyproject.toml": ""}


def target(name: str, flags: str) -> str:
    return (
        f"Python_add_library({name} MODULE {name}.cc {name}.cu)\n"
        f"target_compile_options({name} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:${{{flags}}}>)\n"
    )


# --- guard-cmake-policies


@pytest.mark.parametrize("shape", trees.ALL)
def test_policies_get_a_guard_on_every_shape(tmp_path: Path, shape: str) -> None:
    tree = trees.ALL[shape]()
    before = tree[trees.main_of(tree)]
    outcome, after = judged(tmp_path, "guard-cmake-policies", tree)
    assert outcome.state is State.PENDING
    names = re.findall(r"cmake_policy\(SET (CMP\d+)", before)
    assert outcome.where == tuple(f"{trees.main_of(tree)}:{7 + index}" for index in range(len(names)))
    guarded = re.findall(
        r"if\(POLICY (CMP\d+)\)[^\n]*\n    cmake_policy\(SET (CMP\d+) (?:OLD|NEW)\)\nendif\(\)\n", after
    )
    assert guarded == [(name, name) for name in names]


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("if(POLICY CMP0169)\ncmake_policy(SET CMP0169 OLD)\nendif()", State.UPSTREAM),
        ("if(A AND POLICY CMP0169)\ncmake_policy(SET CMP0169 OLD)\nendif()", State.UPSTREAM),
        ("if(A)\nelseif(POLICY CMP0169)\ncmake_policy(SET CMP0169 OLD)\nendif()", State.UPSTREAM),
        ("if(POLICY CMP0169)\nelse()\ncmake_policy(SET CMP0169 OLD)\nendif()", State.PENDING),
        ("if(NOT POLICY CMP0169)\ncmake_policy(SET CMP0169 OLD)\nendif()", State.PENDING),
        ("if(POLICY CMP0169 OR A)\ncmake_policy(SET CMP0169 OLD)\nendif()", State.PENDING),
        ("if(POLICY CMP0177)\ncmake_policy(SET CMP0169 OLD)\nendif()", State.PENDING),
        ("if(POLICY CMP0169)\nendif()\ncmake_policy(SET CMP0169 OLD)", State.PENDING),
        ("# cmake_policy(SET CMP0169 OLD)\nset(A [[\ncmake_policy(SET CMP0169 OLD)\n]])", State.NOT_NEEDED),
        ("cmake_policy(VERSION 3.26)\ncmake_policy(PUSH)\ncmake_policy(GET CMP0169 A)", State.NOT_NEEDED),
    ],
)
def test_only_a_guard_for_that_policy_is_one(tmp_path: Path, text: str, state: State) -> None:
    outcome, _ = judged(tmp_path, "guard-cmake-policies", small(HEAD + text))
    assert outcome.state is state


def test_a_policy_in_an_included_file_is_found_and_one_of_another_project_is_not(tmp_path: Path) -> None:
    tree = trees.twins()
    tree["sgl-kernel/cmake/utils.cmake"] += "cmake_policy(SET CMP0180 NEW)\n"
    tree["sgl-kernel/csrc/cpu/CMakeLists.txt"] = "cmake_policy(SET CMP0181 NEW)\n"
    made = propose(only("guard-cmake-policies"), trees.lay_out(tmp_path, tree), MARCH)
    assert "sgl-kernel/cmake/utils.cmake:6" in made.outcomes[0].where
    assert sorted(made.changes) == ["sgl-kernel/CMakeLists.txt", "sgl-kernel/cmake/utils.cmake"]


def test_comment_indentation_and_line_ends_stay(tmp_path: Path) -> None:
    text = HEAD + "if(A)\n\tcmake_policy(SET CMP0169 OLD)  # why ( not\nendif()"
    outcome, after = judged(tmp_path, "guard-cmake-policies", small(text.replace("\n", "\r\n")))
    assert outcome.state is State.PENDING
    wanted = (
        "if(A)\n\tif(POLICY CMP0169)  # sm120: guard-cmake-policies\n"
        "\t    cmake_policy(SET CMP0169 OLD)  # why ( not\n\tendif()\nendif()"
    )
    assert after == (HEAD + wanted).replace("\n", "\r\n")


# --- cuda13-cccl-include


@pytest.mark.parametrize("shape", trees.ALL)
def test_cccl_is_told_to_host_compilers_before_the_first_target(tmp_path: Path, shape: str) -> None:
    outcome, after = judged(tmp_path, "cuda13-cccl-include", trees.ALL[shape]())
    assert outcome.state is State.PENDING
    assert not outcome.environment
    added = after.index('include_directories(SYSTEM "$<$<COMPILE_LANGUAGE:C,CXX>:${sm120_include}/cccl>")')
    assert after.index("find_package(CUDAToolkit") < added < after.index("Python_add_library")
    bare = [name for name in re.findall(r"library\((\w+)", after) if name != "flashmla_ops"]
    assert len([place for place in outcome.where if "CMakeLists" in place]) == len(bare)


def test_before_cuda_13_nothing_moved(tmp_path: Path) -> None:
    outcome, _ = judged(tmp_path, "cuda13-cccl-include", trees.twins(), replace(MARCH, cuda=Version("12.9")))
    assert (outcome.state, outcome.reason) == (State.NOT_NEEDED, "for cuda >=13.0.dev0; this is 12.9")


def test_one_target_that_finds_cccl_does_not_speak_for_the_others(tmp_path: Path) -> None:
    tree = trees.archives()
    outcome, _ = judged(tmp_path, "cuda13-cccl-include", tree)
    assert outcome.state is State.PENDING
    assert not any("flashmla" in place for place in outcome.where)


@pytest.mark.parametrize(
    "text",
    [
        "include_directories(${CUDA}/include/cccl)\n" + target("a", "F") + target("b", "F"),
        target("a", "F") + "target_link_libraries(a PRIVATE CCCL::CCCL)\n",
        target("a", "F") + "target_include_directories(a PRIVATE ${CCCL_DIR})\n",
    ],
)
def test_upstream_when_every_target_finds_cccl(tmp_path: Path, text: str) -> None:
    outcome, _ = judged(tmp_path, "cuda13-cccl-include", small(HEAD + text))
    assert outcome.state is State.UPSTREAM


def test_a_path_of_somebodys_machine_is_no_cure(tmp_path: Path) -> None:
    text = "include_directories(/usr/local/cuda/include/cccl)\n" + target("a", "F")
    outcome, _ = judged(tmp_path, "cuda13-cccl-include", small(HEAD + text))
    assert (outcome.state, outcome.where) == (State.PENDING, ("sgl-kernel/CMakeLists.txt:5",))


def test_the_environment_carries_it_where_no_toolkit_is_looked_for_and_for_projects_of_their_own(
    tmp_path: Path,
) -> None:
    head = HEAD.replace("find_package(CUDAToolkit REQUIRED)\n", "")
    outcome, after = judged(tmp_path / "a", "cuda13-cccl-include", small(head + target("a", "F")))
    assert (outcome.state, after) == (State.PENDING, head + target("a", "F"))
    assert outcome.environment["CPLUS_INCLUDE_PATH"] == "{cuda}/include/cccl"
    outcome, after = judged(
        tmp_path / "b", "cuda13-cccl-include", small(HEAD + target("a", "F") + "ExternalProject_Add(x)")
    )
    assert "cccl" in after
    assert outcome.environment["CPLUS_INCLUDE_PATH"] == "{cuda}/include/cccl"


def test_a_toolkit_looked_for_after_a_target_comes_too_late(tmp_path: Path) -> None:
    text = HEAD.replace("find_package", target("a", "F") + "find_package")
    outcome, after = judged(tmp_path, "cuda13-cccl-include", small(text))
    assert (outcome.state, after) == (State.PENDING, text)
    assert outcome.environment["CPLUS_INCLUDE_PATH"] == "{cuda}/include/cccl"


def test_a_tree_without_cuda_has_no_place_for_cccl(tmp_path: Path) -> None:
    text = "project(sgl-kernel LANGUAGES CXX)\n" + target("a", "F")
    assert judged(tmp_path, "cuda13-cccl-include", small(text))[0].state is State.CONFLICT


# --- cmake-policy-minimum


@pytest.mark.parametrize("shape", ["single", "twins"])
def test_the_minimum_is_set_before_a_dependency_is_configured(tmp_path: Path, shape: str) -> None:
    outcome, after = judged(tmp_path, "cmake-policy-minimum", trees.ALL[shape]())
    assert outcome.state is State.PENDING
    assert after.splitlines()[2].startswith("set(CMAKE_POLICY_VERSION_MINIMUM 3.5)")
    assert re.fullmatch(r"sgl-kernel/CMakeLists.txt:\d+", outcome.where[0])


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("add_subdirectory(${repo-x_SOURCE_DIR} x)", State.PENDING),
        ("FetchContent_MakeAvailable(x)", State.PENDING),
        ("set(CMAKE_POLICY_VERSION_MINIMUM 3.5)\nFetchContent_MakeAvailable(x)", State.UPSTREAM),
        ("set(CMAKE_POLICY_VERSION_MINIMUM 3.10)\nFetchContent_MakeAvailable(x)", State.UPSTREAM),
        ("set(CMAKE_POLICY_VERSION_MINIMUM 3.1)\nFetchContent_MakeAvailable(x)", State.PENDING),
        ("FetchContent_MakeAvailable(x)\nset(CMAKE_POLICY_VERSION_MINIMUM 3.5)", State.PENDING),
        ("if(A)\nset(CMAKE_POLICY_VERSION_MINIMUM 3.5)\nendif()\nFetchContent_MakeAvailable(x)", State.PENDING),
        ("add_subdirectory(csrc)\nadd_subdirectory(${CMAKE_CURRENT_SOURCE_DIR}/x)", State.NOT_NEEDED),
        ("FetchContent_Populate(x)", State.NOT_NEEDED),
    ],
)
def test_only_what_is_configured_can_be_too_old(tmp_path: Path, text: str, state: State) -> None:
    assert judged(tmp_path, "cmake-policy-minimum", small(HEAD + text))[0].state is state


def test_cmake_3_needs_no_minimum(tmp_path: Path) -> None:
    assert judged(tmp_path, "cmake-policy-minimum", trees.twins(), MARCH)[0].state is State.NOT_NEEDED


# --- sm120-only


@pytest.mark.parametrize("architectures", [("120a",), ("120f",), ("121a",), ("120a", "121a")])
@pytest.mark.parametrize("shape", trees.ALL)
def test_only_the_asked_architectures_stay(tmp_path: Path, shape: str, architectures: tuple[str, ...]) -> None:
    tree = trees.ALL[shape]()
    outcome, after = judged(tmp_path, "sm120-only", tree, replace(NEWEST, architectures=architectures))
    assert outcome.state is State.PENDING
    variables = 1 + (shape == "archives")  # InfLLM has flags of its own
    assert GENCODE.findall(after) == list(architectures) * variables
    assert "--compress-mode=size" in after or shape == "single"
    assert "use_fast_math" not in after
    kept = set(re.findall(r"^ *Python_add_library\((\w+)", after, re.MULTILINE))
    assert (
        kept
        == {
            "single": {"common_ops", "spatial_ops"},
            "twins": {"common_ops_sm100_build", "spatial_ops"},
            "archives": {"common_ops_sm100_build", "spatial_ops", "infllm_ops"},
        }[shape]
    )
    assert set(outcome.left_out) == set(re.findall(r"library\((\w+)", "".join(tree.values()))) - kept
    for name in outcome.left_out:
        told = f'message(STATUS "sm120: {name} is left out: '
        assert after.count(told) == 1
        assert re.search(rf"\b{name}\b", after.replace(told, "")) is None


@pytest.mark.parametrize("shape", trees.ALL)
def test_flags_that_are_not_of_an_architecture_stay(tmp_path: Path, shape: str) -> None:
    tree = trees.ALL[shape]()
    before = BuildFile("x", tree[trees.main_of(tree)].encode())
    _, text = judged(tmp_path, "sm120-only", tree)
    after = BuildFile("x", text.encode())

    def others(file: BuildFile) -> list[str]:
        values = (v for c in file.named("set", "list") for v in c.values[2 if c.name == "list" else 1 :])
        return [value for value in values if "gencode" not in value]

    assert others(after) == others(before)


def test_a_flag_stands_where_no_condition_can_take_it_away(tmp_path: Path) -> None:
    flags = 'set(F "-O3")\nif(A)\n    list(APPEND F "-gencode=arch=compute_120a,code=sm_120a")\nendif()\n'
    _, after = judged(tmp_path, "sm120-only", small(HEAD + flags + target("a", "F")))
    assert 'set(F "-O3"\n"-gencode=arch=compute_120a,code=sm_120a")\nif(A)\nendif()\n' in after


@pytest.mark.parametrize(
    "flags",
    [
        "set(F -gencode arch=compute_90a,code=sm_90a -gencode arch=compute_120,code=[sm_120,compute_120])\n",
        'set(F --generate-code=arch=compute_90a,code=sm_90a "-gencode arch=compute_120a,code=sm_120a")\n',
        "list(APPEND F -gencode=arch=compute_120,code=sm_120)\nlist(APPEND F -gencode=arch=compute_80,code=sm_80 -O)\n",
        "set(G -gencode=arch=compute_120a,code=sm_120a -gencode=arch=compute_90,code=sm_90)\nset(F ${G} -O3)\n",
    ],
)
def test_every_spelling_of_an_architecture_is_known(tmp_path: Path, flags: str) -> None:
    outcome, after = judged(tmp_path, "sm120-only", small(HEAD + flags + target("a", "F")))
    assert (outcome.state, outcome.left_out) == (State.PENDING, ())
    assert re.findall(r"compute_(\w+)", after) == ["120a"]
    assert after.count("gencode") == 1


def test_options_of_one_target_and_of_all(tmp_path: Path) -> None:
    own = "Python_add_library(a MODULE a.cu)\ntarget_compile_options(a PRIVATE -gencode=arch=compute_120,code=sm_120)\n"
    everybody = "add_compile_options(-gencode=arch=compute_90,code=sm_90)\n"
    outcome, after = judged(tmp_path, "sm120-only", small(HEAD + everybody + own))
    flag = '"-gencode=arch=compute_120a,code=sm_120a"'
    assert (outcome.state, outcome.left_out) == (State.PENDING, ())
    assert after == (HEAD + everybody + own).replace("-gencode=arch=compute_90,code=sm_90", flag).replace(
        "-gencode=arch=compute_120,code=sm_120", flag
    )


@pytest.mark.parametrize(
    ("text", "reason", "line"),
    [
        ("set(CMAKE_CUDA_ARCHITECTURES 90)\n" + target("a", "F"), "in another way", 1),
        ('set(F "${X} -gencode arch=compute_90,code=sm_90")\n' + target("a", "F"), "unknown form", 4),
        ("set(F -gencode ${ARCH})\n" + target("a", "F"), "unknown form", 4),
        (
            "set(F -gencode=arch=compute_120a,code=sm_120a)\nset(G -gencode=arch=compute_90a,code=sm_90a)\n"
            + target("a", "F")
            + target("b", "G")
            + "add_custom_command(OUTPUT x DEPENDS b)\n",
            "add_custom_command() names b",
            10,
        ),
        (
            "if(A)\nset(F -gencode=arch=compute_120,code=sm_120)\nendif()\n" + target("a", "F"),
            "under conditions only",
            5,
        ),
    ],
)
def test_what_the_rule_does_not_know_is_a_conflict_with_its_place(
    tmp_path: Path, text: str, reason: str, line: int
) -> None:
    outcome, after = judged(tmp_path, "sm120-only", small(HEAD + text))
    assert outcome.state is State.CONFLICT
    assert reason in outcome.reason
    assert outcome.where == (f"sgl-kernel/CMakeLists.txt:{line}",)
    assert after == HEAD + text


def test_a_target_is_taken_out_of_the_commands_that_name_others_too(tmp_path: Path) -> None:
    text = (
        "set(F -gencode=arch=compute_120a,code=sm_120a)\nset(G -gencode=arch=compute_90a,code=sm_90a)\n"
        + target("a", "F")
        + target("b", "G")
        + "install(TARGETS a b LIBRARY DESTINATION sgl_kernel)\n"
        + "set_target_properties(a b PROPERTIES PREFIX x)\nset_property(TARGET b PROPERTY FOLDER x)\n"
        + "foreach(t a b)\nendforeach()\nadd_dependencies(a b)\nif(TARGET b)\nendif()\n"
    )
    outcome, after = judged(tmp_path, "sm120-only", small(HEAD + text))
    assert (outcome.state, outcome.left_out) == (State.PENDING, ("b",))
    rest = after[after.index("install") :]
    assert rest == (
        "install(TARGETS a LIBRARY DESTINATION sgl_kernel)\nset_target_properties(a PROPERTIES PREFIX x)\n"
        "foreach(t a)\nendforeach()\nif(TARGET b)\nendif()\n"
    )


def test_flags_in_the_options_of_a_target_that_goes_go_with_it(tmp_path: Path) -> None:
    text = (
        "set(F -gencode=arch=compute_120a,code=sm_120a)\n"
        + target("a", "F")
        + "Python_add_library(b MODULE b.cu)\ntarget_compile_options(b PRIVATE -gencode=arch=compute_90a,code=sm_90a)\n"
    )
    outcome, after = judged(tmp_path, "sm120-only", small(HEAD + text))
    assert (outcome.state, outcome.left_out) == (State.PENDING, ("b",))
    assert "sm_90a" not in after.replace("its code is for sm_90a only", "")


def test_what_would_still_be_compiled_for_another_card_is_a_conflict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The edited files are read anew: a fault in the reduction cannot pass as a reduction."""
    monkeypatch.setattr("sm120.build.patches.rules.gencode._removals", lambda sites: iter(()))
    outcome, _ = judged(tmp_path, "sm120-only", trees.twins())
    assert outcome.state is State.CONFLICT
    assert "would still be compiled for" in outcome.reason


def test_a_file_whose_settings_are_used_elsewhere_is_not_dropped_whole(tmp_path: Path) -> None:
    tree = trees.twins()
    tree["sgl-kernel/CMakeLists.txt"] += "message(STATUS ${repo-flashmla_SOURCE_DIR})\n"
    made = propose(only("sm120-only"), trees.lay_out(tmp_path, tree), MARCH)
    assert made.outcomes[0].state is State.PENDING
    mla = made.changes["sgl-kernel/cmake/flashmla.cmake"]
    assert mla is not None
    assert b"FetchContent_Populate(repo-flashmla)" in mla
    assert b"target_" not in mla
    assert b"gencode" not in mla


def test_a_twin_stays_when_there_is_nothing_in_its_place(tmp_path: Path) -> None:
    tree = trees.twins()
    main = trees.main_of(tree)
    tree[main] = tree[main].replace("common_ops_sm100_build", "common_ops_other_build")
    assert "common_ops_sm90_build" not in judged(tmp_path, "sm120-only", tree)[0].left_out


def test_a_target_that_comes_to_have_sm120_code_is_kept(tmp_path: Path) -> None:
    """Discovered in the tree, not listed: FlashMLA for SM120 would be built."""
    tree = trees.twins()
    path = "sgl-kernel/cmake/flashmla.cmake"
    tree[path] = tree[path].replace("compute_103a,code=sm_103a", "compute_120f,code=sm_120f")
    made = propose(only("sm120-only"), trees.lay_out(tmp_path, tree), MARCH)
    assert "flashmla_ops" not in made.outcomes[0].left_out
    mla = made.changes[path]
    assert mla is not None
    assert GENCODE.findall(mla.decode()) == ["120a"]


@pytest.mark.parametrize(("arch", "cuda"), [("120a", "12.6"), ("120f", "12.8"), ("121a", "12.8")])
def test_an_architecture_that_this_cuda_cannot_make(tmp_path: Path, arch: str, cuda: str) -> None:
    context = replace(MARCH, architectures=(arch,), cuda=Version(cuda))
    outcome, _ = judged(tmp_path, "sm120-only", trees.twins(), context)
    assert outcome.state is State.CONFLICT
    assert f"CUDA {cuda} cannot compile for sm_{arch}" in outcome.reason


@pytest.mark.parametrize("architectures", [("120",), ("90a",), ("sm_120a",), ()])
def test_an_architecture_that_is_none_of_sm120s_is_refused(architectures: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match="SM120 only"):
        replace(MARCH, architectures=architectures)


def test_a_module_of_upstreams_own_is_not_overwritten(tmp_path: Path) -> None:
    tree = trees.twins() | {"sgl-kernel/python/sgl_kernel/flash_ops.py": "x = 1\n"}
    outcome, _ = judged(tmp_path, "sm120-only", tree)
    assert (outcome.state, outcome.where) == (State.CONFLICT, ("sgl-kernel/python/sgl_kernel/flash_ops.py:1",))


# --- cxx-standard


def test_the_standard_is_raised_everywhere_it_is_named(tmp_path: Path) -> None:
    tree = trees.twins()
    main = trees.main_of(tree)
    outcome, after = judged(tmp_path, "cxx-standard", tree)
    assert outcome.state is State.PENDING
    assert len(outcome.where) == tree[main].count("17)") + tree[main].count("c++17")
    assert "17)" not in after
    assert "c++17" not in after


def test_the_setting_is_raised_where_the_tree_has_one(tmp_path: Path) -> None:
    tree = trees.archives()
    outcome, after = judged(tmp_path, "cxx-standard", tree)
    assert (outcome.state, outcome.edits) == (State.PENDING, 1)
    assert 'set(SGL_KERNEL_CXX_STANDARD "20" CACHE STRING' in after


@pytest.mark.parametrize(
    ("text", "state", "after"),
    [
        ("set(CMAKE_CXX_STANDARD 20)", State.UPSTREAM, "set(CMAKE_CXX_STANDARD 20)"),
        ("set(CMAKE_CXX_STANDARD 23)", State.UPSTREAM, "set(CMAKE_CXX_STANDARD 23)"),
        ("set(CMAKE_CXX_STANDARD 98)", State.PENDING, "set(CMAKE_CXX_STANDARD 20)"),
        ("set(CMAKE_CUDA_STANDARD 17)", State.PENDING, "set(CMAKE_CUDA_STANDARD 20)"),
        ("set(F -std=c++2a -std=gnu++1z)", State.PENDING, "set(F -std=c++2a -std=gnu++20)"),
        (
            "target_compile_features(a PRIVATE cxx_std_17)",
            State.PENDING,
            "target_compile_features(a PRIVATE cxx_std_20)",
        ),
        (
            "set_target_properties(a PROPERTIES CXX_STANDARD 17 X 17 CUDA_STANDARD 14)",
            State.PENDING,
            "set_target_properties(a PROPERTIES CXX_STANDARD 20 X 17 CUDA_STANDARD 20)",
        ),
        (
            "target_compile_options(a PRIVATE $<$<X:Y>:-std=c++17>)",
            State.PENDING,
            "target_compile_options(a PRIVATE $<$<X:Y>:-std=c++20>)",
        ),
        ('message("-std=c++17")\nset(A "17")', State.CONFLICT, 'message("-std=c++17")\nset(A "17")'),
    ],
)
def test_every_way_to_name_a_standard(tmp_path: Path, text: str, state: State, after: str) -> None:
    outcome, made = judged(tmp_path, "cxx-standard", small(HEAD + text))
    assert (outcome.state, made) == (state, HEAD + after)


@pytest.mark.parametrize(
    ("torch", "state"),
    [
        ("2.13.0+cpu", State.NOT_NEEDED),
        ("2.14.0", State.PENDING),
        ("2.14.0.dev20260801+cu130", State.PENDING),
        (None, State.NOT_NEEDED),
    ],
)
def test_only_a_torch_that_demands_it(tmp_path: Path, torch: str | None, state: State) -> None:
    context = replace(NEWEST, torch=Version(torch) if torch else None)
    assert judged(tmp_path, "cxx-standard", trees.twins(), context)[0].state is state


# --- compile-threads


@pytest.mark.parametrize("shape", trees.ALL)
def test_the_plans_threads_stand_in_every_shape(tmp_path: Path, shape: str) -> None:
    outcome, after = judged(tmp_path, "compile-threads", trees.ALL[shape](), replace(NEWEST, compile_threads=3))
    assert (outcome.state, outcome.edits) == (State.PENDING, 1)
    wanted = '    "--threads=3"' if shape == "single" else "set(SGL_KERNEL_COMPILE_THREADS 3 CACHE"
    assert wanted in after
    assert "set(SGL_KERNEL_COMPILE_THREADS 1)" in after or shape == "single"
    outcome, after = judged(
        tmp_path / "same", "compile-threads", trees.ALL[shape](), replace(NEWEST, compile_threads=32)
    )
    assert outcome.state is State.UPSTREAM


@pytest.mark.parametrize(
    ("text", "state", "after"),
    [
        ("set(F --threads 8 -O3)", State.PENDING, "set(F --threads 2 -O3)"),
        ('set(F "--threads" "8")', State.PENDING, 'set(F "--threads" "2")'),
        (
            "target_compile_options(a PRIVATE $<$<X:Y>:--threads=16>)",
            State.PENDING,
            "target_compile_options(a PRIVATE $<$<X:Y>:--threads=2>)",
        ),
        (
            "set(F --threads=${N})\nmessage(--threads=8)",
            State.NOT_NEEDED,
            "set(F --threads=${N})\nmessage(--threads=8)",
        ),
        ("set(SGL_KERNEL_COMPILE_THREADS 4)", State.NOT_NEEDED, "set(SGL_KERNEL_COMPILE_THREADS 4)"),
    ],
)
def test_every_way_to_ask_for_threads(tmp_path: Path, text: str, state: State, after: str) -> None:
    outcome, made = judged(tmp_path, "compile-threads", small(HEAD + text))
    assert (outcome.state, made) == (state, HEAD + after)

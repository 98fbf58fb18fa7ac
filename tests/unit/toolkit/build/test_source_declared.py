from pathlib import Path

import pytest

from sm120 import errors
from sm120.build.source import Dependency, dependencies

COMMIT = "1" * 40
HASH = "ab" * 32


def _tree(root: Path, main: str, **others: str) -> Path:
    for name, text in {"CMakeLists.txt": main, **others}.items():
        path = root / "sgl-kernel" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    return root


def _one(tmp_path: Path, arguments: str, before: str = "") -> Dependency:
    text = f"{before}\nFetchContent_Declare(Repo-A {arguments})\nFetchContent_Populate(repo-a)\n"
    (found,) = dependencies(_tree(tmp_path, text), "sgl-kernel", {})
    return found


def test_a_git_repository_with_all_its_submodules(tmp_path: Path) -> None:
    found = _one(tmp_path, f'GIT_REPOSITORY "https://h/o/n" GIT_TAG {COMMIT} GIT_SHALLOW OFF')
    assert found == Dependency(
        name="repo-a",
        kind="git",
        url="https://h/o/n",
        revision=COMMIT,
        submodules=True,
        place="sgl-kernel/CMakeLists.txt:2",
    )


@pytest.mark.parametrize(
    ("words", "submodules"),
    [
        ('GIT_SUBMODULES ""', False),
        ("GIT_SUBMODULES", False),
        ("GIT_SUBMODULES a b/c", ("a", "b/c")),
        ('GIT_SUBMODULES "a;b"', ("a", "b")),
        ("GIT_SUBMODULES_RECURSE ON", True),
    ],
)
def test_submodules(tmp_path: Path, words: str, submodules: bool | tuple[str, ...]) -> None:
    assert _one(tmp_path, f"GIT_REPOSITORY https://h/o/n GIT_TAG v1 {words}").submodules == submodules


def test_a_branch_of_the_remote(tmp_path: Path) -> None:
    assert _one(tmp_path, "GIT_REPOSITORY https://h/o/n GIT_TAG origin/main").revision == "main"


def test_an_archive_with_a_variable_in_its_address(tmp_path: Path) -> None:
    found = _one(
        tmp_path,
        f"URL https://${{FORGE}}/o/n/archive/{COMMIT}.tar.gz URL_HASH SHA256={HASH.upper()}",
        'set(FORGE "github.com" CACHE STRING "where")',
    )
    assert (found.kind, found.url) == ("archive", f"https://github.com/o/n/archive/{COMMIT}.tar.gz")
    assert (found.sha256, found.revision) == (HASH, COMMIT)


def test_an_archive_without_a_hash(tmp_path: Path) -> None:
    found = _one(tmp_path, "URL https://h/json.tar.xz DOWNLOAD_EXTRACT_TIMESTAMP TRUE")
    assert (found.kind, found.sha256, found.revision) == ("archive", None, "")


def test_variables_in_variables(tmp_path: Path) -> None:
    before = "set(HOST h)\nset(BASE https://${HOST}/o)\nset(TAG v1)"
    found = _one(tmp_path, "GIT_REPOSITORY ${BASE}/n GIT_TAG ${TAG}", before)
    assert (found.url, found.revision) == ("https://h/o/n", "v1")


def test_the_environment_is_one_way_to_set_it_and_the_default_another(tmp_path: Path) -> None:
    before = "if(DEFINED ENV{FORGE})\nset(FORGE $ENV{FORGE})\nelse()\nset(FORGE h)\nendif()"
    assert _one(tmp_path, "GIT_REPOSITORY https://${FORGE}/o/n GIT_TAG v1", before).url == "https://h/o/n"


@pytest.mark.parametrize(
    ("arguments", "before", "reason"),
    [
        ("GIT_REPOSITORY https://h/o/n GIT_TAG v1 PATCH_COMMAND true", "", "PATCH_COMMAND"),
        ("GIT_REPOSITORY https://h/o/n GIT_TAG v1 FIND_PACKAGE_ARGS NAMES A", "", "FIND_PACKAGE_ARGS"),
        ("GIT_REPOSITORY https://h/o/n", "", "no GIT_TAG"),
        ("GIT_REPOSITORY https://h/o/n GIT_TAG v1 GIT_SUBMODULES_RECURSE OFF", "", "GIT_SUBMODULES_RECURSE"),
        ("GIT_REPOSITORY https://h/o/n GIT_TAG ${TAG}", "", "TAG is set nowhere"),
        ("GIT_REPOSITORY https://h/o/n GIT_TAG ${TAG}", "set(TAG v1)\nset(TAG v2)", "TAG has more than one value"),
        ("GIT_REPOSITORY https://h/o/n GIT_TAG ${TAG}", "set(TAG ${TAG})", "only CMake knows"),
        ("GIT_REPOSITORY https://h/o/n GIT_TAG $ENV{TAG}", "", "only CMake knows"),
        ("GIT_REPOSITORY https://h/o/n GIT_TAG v1 SOURCE_DIR ${X}/y", "", "where SOURCE_DIR"),
        ("GIT_REPOSITORY https://h/o/n GIT_TAG v1 SOURCE_DIR ${a_SOURCE_DIR}/../../y", "", "where SOURCE_DIR"),
        ("URL https://h/a.zip", "", "no tar archive"),
        ("URL ${CMAKE_CURRENT_SOURCE_DIR}/a.tar.gz", "", "CMAKE_CURRENT_SOURCE_DIR"),
        ("URL https://h/a.tar.gz URL_HASH MD5=aa", "", "no SHA256"),
        ("URL https://h/a.tar.gz GIT_TAG v1", "", "neither one git repository nor one archive"),
        ("SVN_REPOSITORY https://h/o", "", "SVN_REPOSITORY"),
        ("lower https://h/o", "", "lower"),
    ],
)
def test_what_is_not_sure_is_left_to_cmake(tmp_path: Path, arguments: str, before: str, reason: str) -> None:
    found = _one(tmp_path, arguments, before)
    assert found.kind == "cmake"
    assert reason in found.reason


def test_one_dependency_in_another(tmp_path: Path) -> None:
    found = _one(
        tmp_path,
        f"URL https://h/a.tar.gz URL_HASH SHA256={HASH} SOURCE_DIR ${{repo-Mla_SOURCE_DIR}}/csrc/cutlass",
    )
    assert (found.kind, found.inside) == ("archive", "repo-mla/csrc/cutlass")


def test_only_what_is_made_available_counts(tmp_path: Path) -> None:
    main = f"""
include(cmake/more.cmake)
FetchContent_Declare(unused GIT_REPOSITORY https://h/o/unused GIT_TAG v1)
FetchContent_Declare(used GIT_REPOSITORY https://h/o/first GIT_TAG v1)
FetchContent_MakeAvailable(used other)
FetchContent_Declare(other URL https://h/o.tar.gz URL_HASH SHA256={HASH})
"""
    more = "FetchContent_Declare(USED GIT_REPOSITORY https://h/o/first GIT_TAG v1)"
    found = dependencies(_tree(tmp_path, main, **{"cmake/more.cmake": more}), "sgl-kernel", {})
    by_name = {one.name: one for one in found}
    assert set(by_name) == {"used", "other"}
    assert by_name["used"].kind == "git"
    assert by_name["other"].place == "sgl-kernel/CMakeLists.txt:6"


def test_two_declarations_that_differ_are_left_to_cmake(tmp_path: Path) -> None:
    text = """
if(X)
FetchContent_Declare(a GIT_REPOSITORY https://h/o/a GIT_TAG v1)
else()
FetchContent_Declare(A GIT_REPOSITORY https://h/o/a GIT_TAG v2)
endif()
FetchContent_Populate(a)
"""
    (found,) = dependencies(_tree(tmp_path, text), "sgl-kernel", {})
    assert found.kind == "cmake"
    assert "CMakeLists.txt:3 and in another way at sgl-kernel/CMakeLists.txt:5" in found.reason


def test_a_name_in_a_variable_makes_all_of_them_count(tmp_path: Path) -> None:
    text = "FetchContent_Declare(a GIT_REPOSITORY https://h/o/a GIT_TAG v1)\nFetchContent_MakeAvailable(${NAME})\n"
    assert [one.name for one in dependencies(_tree(tmp_path, text), "sgl-kernel", {})] == ["a"]


def test_populate_that_says_itself_where_from_looks_at_no_variable(tmp_path: Path) -> None:
    text = "FetchContent_Populate(a QUIET GIT_REPOSITORY https://h/o/a GIT_TAG v1)\n"
    (found,) = dependencies(_tree(tmp_path, text), "sgl-kernel", {})
    assert (found.name, found.kind) == ("a", "cmake")


def test_the_changes_are_what_counts(tmp_path: Path) -> None:
    root = _tree(tmp_path, "include(cmake/a.cmake)\n", **{"cmake/a.cmake": ""})
    declared = b"FetchContent_Declare(a GIT_REPOSITORY https://h/o/a GIT_TAG v1)\nFetchContent_Populate(a)\n"
    assert dependencies(root, "sgl-kernel", {}) == ()
    assert len(dependencies(root, "sgl-kernel", {"sgl-kernel/cmake/a.cmake": declared})) == 1
    assert (
        dependencies(root, "sgl-kernel", {"sgl-kernel/CMakeLists.txt": b"", "sgl-kernel/cmake/a.cmake": declared}) == ()
    )


def test_the_component_s_folder_alone(tmp_path: Path) -> None:
    (tmp_path / "CMakeLists.txt").write_text(
        "FetchContent_Declare(a GIT_REPOSITORY https://h/o/a GIT_TAG v1)\nFetchContent_Populate(a)\n"
    )
    assert dependencies(tmp_path, "", {})[0].place == "CMakeLists.txt:1"


def test_what_is_no_cmake_is_named_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(errors.PatchError, match=r"sgl-kernel/CMakeLists.txt:2"):
        dependencies(_tree(tmp_path, "project(x)\nset(\n"), "sgl-kernel", {})

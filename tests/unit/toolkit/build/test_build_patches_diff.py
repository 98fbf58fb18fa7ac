"""Diffs that a user adds: git apply, no fuzz, and no influence of where it runs or who runs it."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.toolkit.build import trees
from tests.unit.toolkit.build.trees import MARCH

from sm120.build.patches import Outcome, Series, State, apply, examine, gitdiff, load_series
from sm120.errors import PatchError

OLD = "one\ntwo\nthree\nfour\nfive\nsix\nseven\n"
HUNK = """\
--- a/notes.txt
+++ b/notes.txt
@@ -2,5 +2,5 @@
 two
 three
-four
+FOUR
 five
 six
"""
PATCH = """\
schema = 1
title = "t"
why = "w"
references = ["r"]
removable = "when"
kind = "diff"
diff = "one.patch"
"""


def series(root: Path, diff: str, extra: str = "", names: str = '"a"') -> Series:
    root.mkdir(exist_ok=True)
    (root / "series.toml").write_text(f"schema = 1\npatches = [{names}]\n")
    (root / "a.toml").write_text(PATCH + extra)
    (root / "one.patch").write_bytes(diff.encode())
    return load_series(root)


def checkout(root: Path, text: str = OLD) -> Path:
    return trees.lay_out(root, trees.twins() | {"sgl-kernel/notes.txt": text})


def notes(root: Path) -> str:
    return (root / "sgl-kernel/notes.txt").read_bytes().decode()


def one(found: tuple[Outcome, ...]) -> Outcome:
    assert len(found) == 1
    return found[0]


def test_pending_then_applied(tmp_path: Path) -> None:
    root, made = checkout(tmp_path / "tree"), series(tmp_path / "patches", HUNK)
    outcome = one(examine(made, root, MARCH))
    assert (outcome.state, outcome.where, outcome.edits) == (State.PENDING, ("sgl-kernel/notes.txt:1",), 1)
    apply(made, root, MARCH)
    assert notes(root) == OLD.replace("four", "FOUR")
    assert one(apply(made, root, MARCH).outcomes).state is State.APPLIED
    assert notes(root) == OLD.replace("four", "FOUR")


def test_a_tree_that_holds_the_diff_by_itself(tmp_path: Path) -> None:
    root = checkout(tmp_path / "tree", OLD.replace("four", "FOUR"))
    assert one(examine(series(tmp_path / "patches", HUNK), root, MARCH)).state is State.APPLIED


def test_moved_lines_apply_and_changed_context_does_not(tmp_path: Path) -> None:
    made = series(tmp_path / "patches", HUNK)
    assert one(examine(made, checkout(tmp_path / "moved", "zero\n" * 9 + OLD), MARCH)).state is State.PENDING
    root = checkout(tmp_path / "fuzz", OLD.replace("six", "SIX"))
    outcome = one(examine(made, root, MARCH))
    assert (outcome.state, outcome.where) == (State.CONFLICT, ("sgl-kernel/notes.txt:2",))
    assert "patch failed" in outcome.reason
    with pytest.raises(PatchError, match=r"notes\.txt"):
        apply(made, root, MARCH)
    assert notes(root) == OLD.replace("six", "SIX")


def test_paths_below_the_component_and_below_the_repository(tmp_path: Path) -> None:
    whole = HUNK.replace("/notes", "/sgl-kernel/notes")
    root = checkout(tmp_path / "tree")
    assert one(examine(series(tmp_path / "a", whole, 'base = "repository"\n'), root, MARCH)).state is State.PENDING
    assert one(examine(series(tmp_path / "b", whole), root, MARCH)).state is State.CONFLICT


def test_it_works_inside_a_repository_and_against_its_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """git apply skips, in silence, what lies outside the folder it runs in; and settings may change white space."""
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "scratch").mkdir()
    config = tmp_path / ".gitconfig"
    config.write_text("[core]\n\tautocrlf = true\n[apply]\n\twhitespace = fix\n\tignorewhitespace = change\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", "/")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    spaced = HUNK.replace("+FOUR", "+FOUR  \t")
    root = checkout(tmp_path / "tree")
    apply(series(tmp_path / "patches", spaced), root, MARCH)
    assert notes(root) == OLD.replace("four", "FOUR  \t")
    wide = checkout(tmp_path / "wide", OLD.replace("three", "th  ree"))
    spaced = HUNK.replace("three", "th ree")
    assert one(examine(series(tmp_path / "patches", spaced), wide, MARCH)).state is State.CONFLICT


def test_windows_line_ends_are_a_part_of_the_lines(tmp_path: Path) -> None:
    root = checkout(tmp_path / "tree", OLD.replace("\n", "\r\n"))
    assert one(examine(series(tmp_path / "a", HUNK), root, MARCH)).state is State.CONFLICT
    lines = HUNK.splitlines(keepends=True)
    made = series(tmp_path / "b", "".join(lines[:3]) + "".join(lines[3:]).replace("\n", "\r\n"))
    apply(made, root, MARCH)
    assert notes(root) == OLD.replace("four", "FOUR").replace("\n", "\r\n")


def test_files_are_made_renamed_and_taken_away(tmp_path: Path) -> None:
    diff = """\
diff --git a/notes.txt b/moved.txt
similarity index 100%
rename from notes.txt
rename to moved.txt
diff --git a/new/one.txt b/new/one.txt
new file mode 100644
--- /dev/null
+++ b/new/one.txt
@@ -0,0 +1 @@
+x
diff --git a/csrc/gemm.cu b/csrc/gemm.cu
deleted file mode 100644
--- a/csrc/gemm.cu
+++ /dev/null
@@ -1 +0,0 @@
-
"""
    root, made = checkout(tmp_path / "tree"), series(tmp_path / "patches", diff)
    before = trees.contents(root)
    result = apply(made, root, MARCH)
    after = trees.contents(root)
    assert after["sgl-kernel/moved.txt"] == OLD.encode()
    assert after["sgl-kernel/new/one.txt"] == b"x\n"
    assert set(before) - set(after) == {"sgl-kernel/notes.txt", "sgl-kernel/csrc/gemm.cu"}
    assert "deleted file mode" in result.diff
    assert one(examine(made, root, MARCH)).state is State.APPLIED


@pytest.mark.parametrize(
    "diff",
    [
        HUNK.replace("notes.txt", "../notes.txt"),
        HUNK.replace("notes.txt", "x/../../../notes.txt"),
        HUNK.replace("a/notes.txt", "/etc/passwd").replace("b/notes.txt", "/etc/passwd"),
        HUNK.replace("notes.txt", ".git/config"),
        "diff --git a/l b/l\nnew file mode 120000\n--- /dev/null\n+++ b/l\n@@ -0,0 +1 @@\n+/etc\n",
        "diff --git a/../x b/y\nsimilarity index 100%\nrename from ../x\nrename to y\n",
        "no diff at all\n",
        "",
        HUNK[:-20],
        HUNK.replace("notes.txt", "absent.txt"),
    ],
)
def test_a_diff_that_is_none_or_leaves_the_tree(tmp_path: Path, diff: str) -> None:
    root = checkout(tmp_path / "tree")
    made = series(tmp_path / "patches", diff)
    before = trees.contents(tmp_path)
    outcome = one(examine(made, root, MARCH))
    assert outcome.state is State.CONFLICT
    assert outcome.where
    assert trees.contents(tmp_path) == before


@pytest.mark.parametrize("path", ["../x", "a/../../x", ".git/hooks/x", "a/.git/x"])
def test_a_path_out_of_the_tree_is_refused_before_anything_is_read(path: str) -> None:
    with pytest.raises(gitdiff.Refused, match="leaves the tree"):
        gitdiff.names(HUNK.replace("notes.txt", path).encode(), "", "one.patch")


def test_a_diff_and_rules_on_the_same_lines_apply_twice_over(tmp_path: Path) -> None:
    """After the rules neither the diff nor its reverse fits any more: the record says that it was applied."""
    diff = """\
--- a/CMakeLists.txt
+++ b/CMakeLists.txt
@@ -4,5 +4,6 @@
 include(${CMAKE_CURRENT_LIST_DIR}/cmake/utils.cmake)
 include(FetchContent)
<
+# mine
 cmake_policy(SET CMP0169 OLD)
 cmake_policy(SET CMP0177 NEW)
""".replace("<", " ")
    own = series(tmp_path / "patches", diff)
    rules = load_series()
    both = replace(own, patches=own.patches + rules.patches)
    root = checkout(tmp_path / "tree")
    apply(both, root, MARCH)
    once = trees.contents(root)
    again = apply(both, root, MARCH)
    assert trees.contents(root) == once
    assert {outcome.state for outcome in again.outcomes} == {State.APPLIED, State.NOT_NEEDED}


def test_only_for_the_versions_it_names(tmp_path: Path) -> None:
    made = series(tmp_path / "patches", "no diff", '[applies]\ncuda = "<13"\n')
    outcome = one(examine(made, checkout(tmp_path / "tree"), MARCH))
    assert (outcome.state, outcome.reason) == (State.NOT_NEEDED, "for cuda <13; this is 13.0")

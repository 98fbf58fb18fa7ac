"""The corpus: every version of a history once, each patch's state counted, conflicts with their commit."""

import subprocess
from collections import Counter
from pathlib import Path

import pytest
from tests.unit.toolkit.build import trees
from tests.unit.toolkit.build.trees import MARCH, NEWEST

from sm120.build.patches import State, load_series
from sm120.build.patches.corpus import COLUMNS, corpus
from sm120.build.patches.rules import guard_cmake_policies
from sm120.errors import PatchError

SERIES = load_series()


class History:
    def __init__(self, root: Path) -> None:
        self.root = root
        self._days = 0
        root.mkdir()
        self.git("init", "-q", "-b", "main")

    def git(self, *words: str, day: int = 1) -> str:
        date = f"2025-10-{day:02}T12:00:00+00:00"
        environment = {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            **{f"GIT_{who}_{what}": value for who in ("AUTHOR", "COMMITTER") for what, value in _WHO.items()},
            **{f"GIT_{who}_DATE": date for who in ("AUTHOR", "COMMITTER")},
        }
        done = subprocess.run(["git", "-C", str(self.root), *words], capture_output=True, check=True, env=environment)
        return done.stdout.decode().strip()

    def commit(self, tree: trees.Tree) -> str:
        self._days += 1
        trees.lay_out(self.root, tree)
        self.git("add", "-A", day=self._days)
        self.git("commit", "-q", "-m", "x", day=self._days)
        return self.git("rev-parse", "HEAD")


_WHO = {"NAME": "n", "EMAIL": "e@example.invalid"}


@pytest.fixture
def history(tmp_path: Path) -> History:
    return History(tmp_path / "repository")


def test_each_version_is_tried_once_on_all_branches(history: History) -> None:
    history.commit(trees.single())
    history.commit(trees.single() | {"sgl-kernel/csrc/gemm.cu": "// not a build file\n"})
    history.commit(trees.twins())
    history.commit(trees.single())  # back again: nothing new
    history.git("checkout", "-q", "-b", "side")
    history.git("rm", "-q", "-r", "sgl-kernel")
    history.commit(trees.archives())
    history.git("checkout", "-q", "main")
    counts = corpus(history.root, SERIES, contexts=(MARCH, NEWEST))
    # the last checkout of "single" keeps the twins' flashmla.cmake: a version of its own
    assert (counts.versions, counts.contexts, counts.conflicts) == (4, 2, ())
    assert counts.states["guard-cmake-policies"] == Counter({State.PENDING: 8})
    assert counts.states["cmake-policy-minimum"] == Counter({State.NOT_NEEDED: 5, State.PENDING: 3})
    table = dict(zip(COLUMNS, counts.rows()[2], strict=True))
    assert table == {
        "patch": "cmake-policy-minimum",
        "applied": "3",
        "upstream": "0",
        "not-needed": "5",
        "conflict": "0",
    }


def test_a_version_whose_branch_was_merged_and_dropped_is_tried_too(history: History) -> None:
    history.commit(trees.single())
    history.git("checkout", "-q", "-b", "side")
    history.commit(trees.twins())
    history.git("checkout", "-q", "main")
    history.git("merge", "-q", "-s", "ours", "-m", "x", "side", day=9)
    history.git("branch", "-q", "-D", "side")
    assert corpus(history.root, SERIES, contexts=(MARCH,)).versions == 2


def test_a_conflict_is_told_with_commit_place_and_reason(history: History) -> None:
    history.commit(trees.twins())
    broken = trees.twins()
    broken[trees.main_of(broken)] += "add_custom_command(OUTPUT x DEPENDS flash_ops)\n"
    commit = history.commit(broken)
    counts = corpus(history.root, SERIES, contexts=(MARCH, NEWEST))
    assert counts.states["sm120-only"] == Counter({State.PENDING: 2, State.CONFLICT: 2})
    (conflict,) = counts.conflicts
    assert (conflict.commit, conflict.patch) == (commit, "sm120-only")
    assert conflict.where == f"sgl-kernel/CMakeLists.txt:{broken[trees.main_of(broken)].count(chr(10))}"
    assert "flash_ops" in conflict.reason


def test_what_is_older_is_left_out(history: History) -> None:
    history.commit(trees.single())
    history.commit(trees.twins())
    counts = corpus(history.root, SERIES, since="2025-10-02T00:00:00+00:00", contexts=(MARCH,))
    assert counts.versions == 1


def test_the_repository_is_only_read(history: History) -> None:
    history.commit(trees.twins())
    before = trees.contents(history.root)
    corpus(history.root, SERIES, contexts=(MARCH,))
    assert trees.contents(history.root) == before


@pytest.mark.parametrize("kind", ["absent", "no repository", "empty", "another project"])
def test_a_repository_without_a_version_is_told_in_words(tmp_path: Path, kind: str) -> None:
    root = tmp_path / "x"
    if kind == "no repository":
        root.mkdir()
    elif kind != "absent":
        made = History(root)
        if kind == "another project":
            made.commit({"CMakeLists.txt": "project(other)\n"})
    with pytest.raises(PatchError) as caught:
        corpus(root, SERIES, contexts=(MARCH,))
    assert str(root) in caught.value.message
    assert caught.value.remedy == "name a clone of SGLang with its history"


def test_a_patch_that_would_change_its_own_result_counts_as_a_conflict(
    history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard_cmake_policies, "_asks", lambda branch, policy: False)
    history.commit(trees.twins())
    counts = corpus(history.root, SERIES, contexts=(MARCH,))
    assert counts.states["guard-cmake-policies"] == Counter({State.CONFLICT: 1})
    assert counts.conflicts[0].reason.startswith("a second time: ")
    assert counts.states["compile-threads"] == Counter({State.PENDING: 1})

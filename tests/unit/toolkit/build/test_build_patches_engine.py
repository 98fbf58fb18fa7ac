"""The series on a tree: all or nothing, once and for all, and never outside the tree."""

import errno
import json
import os
import shutil
import stat
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.version import Version
from tests.unit.toolkit.build import trees
from tests.unit.toolkit.build.trees import MARCH, NEWEST

from sm120 import files
from sm120.build.patches import (
    COLUMNS,
    Context,
    Series,
    State,
    apply,
    detect_layout,
    engine,
    examine,
    load_series,
    propose,
    rows,
    write,
)
from sm120.errors import PatchError, PreflightError

SERIES = load_series()
LEDGER = ".sm120-patches.json"


def git_apply(root: Path, diff: str, *words: str) -> None:
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(root.parent)}
    data = diff.encode("utf-8", "surrogateescape")
    subprocess.run(["git", "apply", *words, "-"], cwd=root, input=data, check=True, env=environment)


def without(series: Series, *names: str) -> Series:
    return replace(series, patches=tuple(patch for patch in series.patches if patch.name not in names))


@pytest.mark.parametrize("context", [MARCH, NEWEST], ids=["march", "newest"])
@pytest.mark.parametrize("shape", trees.ALL)
def test_a_second_application_changes_nothing(tmp_path: Path, shape: str, context: Context) -> None:
    trees.lay_out(tmp_path, trees.ALL[shape]())
    before = examine(SERIES, tmp_path, context)
    first = apply(SERIES, tmp_path, context)
    assert first.outcomes == before
    assert first.diff
    once = trees.contents(tmp_path)
    second = apply(SERIES, tmp_path, context)
    assert trees.contents(tmp_path) == once
    assert (second.diff, second.changes) == ("", {})
    expected = [State.APPLIED if o.state is State.PENDING else o.state for o in first.outcomes]
    assert [outcome.state for outcome in second.outcomes] == expected
    assert second.left_out == first.left_out
    assert second.series == first.series


@pytest.mark.parametrize("shape", trees.ALL)
def test_looking_changes_nothing(tmp_path: Path, shape: str) -> None:
    trees.lay_out(tmp_path, trees.ALL[shape]())
    before = trees.contents(tmp_path)
    assert propose(SERIES, tmp_path, NEWEST).diff
    assert trees.contents(tmp_path) == before


@pytest.mark.parametrize("shape", trees.ALL)
def test_git_applies_the_diff_and_takes_it_back(tmp_path: Path, shape: str) -> None:
    pristine, patched = tmp_path / "pristine", tmp_path / "patched"
    tree = trees.ALL[shape]()
    main = trees.main_of(tree)
    tree[main] = tree[main].removesuffix("\n")
    trees.lay_out(pristine, tree)
    trees.lay_out(patched, tree)
    before = trees.contents(pristine)
    made = apply(SERIES, patched, NEWEST)
    git_apply(pristine, made.diff)
    after = trees.contents(patched)
    del after[str(Path(main).parent / LEDGER)]
    assert trees.contents(pristine) == after
    git_apply(pristine, made.diff, "--reverse")
    assert trees.contents(pristine) == before


@pytest.mark.parametrize("change", ["crlf", "bom", "tabs", "no utf-8"])
def test_what_no_patch_names_stays_byte_for_byte(tmp_path: Path, change: str) -> None:
    tree = trees.twins()
    main = trees.main_of(tree)
    data = {
        "crlf": lambda text: text.replace("\n", "\r\n").encode(),
        "bom": lambda text: b"\xef\xbb\xbf" + text.encode(),
        "tabs": lambda text: text.replace("    ", "\t").encode(),
        "no utf-8": lambda text: b"# caf\xe9\n" + text.encode(),
    }[change](tree[main])
    trees.lay_out(tmp_path, tree)
    (tmp_path / main).write_bytes(data)
    made = apply(SERIES, tmp_path, NEWEST)
    after = (tmp_path / main).read_bytes()
    plain = propose(SERIES, trees.lay_out(tmp_path / "plain", tree), NEWEST).changes[main]
    assert plain is not None
    if change == "crlf":
        assert after == plain.replace(b"\n", b"\r\n")
    elif change == "tabs":
        assert after.replace(b"\t", b"    ") == plain.replace(b"\t", b"    ")
    else:
        assert after[: len(after) - len(plain)] + plain == after
    (tmp_path / main).write_bytes(data)
    git_apply(tmp_path, "".join(made.diff.partition("diff --git a/sgl-kernel/python")[:1]))
    assert (tmp_path / main).read_bytes() == after


def test_one_conflict_changes_nothing_at_all(tmp_path: Path) -> None:
    tree = trees.twins()
    main = trees.main_of(tree)
    tree[main] += "add_custom_command(OUTPUT x DEPENDS flash_ops)\n"
    trees.lay_out(tmp_path, tree)
    before = trees.contents(tmp_path)
    states = {outcome.patch: outcome.state for outcome in examine(SERIES, tmp_path, MARCH)}
    assert states["guard-cmake-policies"] is State.PENDING
    assert states["sm120-only"] is State.CONFLICT
    with pytest.raises(PatchError) as caught:
        apply(SERIES, tmp_path, MARCH)
    line = tree[main].count("\n")
    assert caught.value.exit_code == 11
    assert caught.value.where == f"{main}:{line}"  # as the file on the disk counts, though patches moved it
    assert "sm120-only" in caught.value.message
    assert "Nothing was changed" in caught.value.message
    assert "scripts/inv build-kernels --patches" in str(caught.value.remedy)
    assert trees.contents(tmp_path) == before


@pytest.mark.parametrize(
    ("text", "reason"),
    [("set(A", "never closed"), ("if(A)\n", "if() is never closed"), ("x" * (4 * 2**20 + 1), "more than a build file")],
)
def test_a_file_that_is_no_build_file_is_a_conflict_of_each_patch_that_reads_it(
    tmp_path: Path, text: str, reason: str
) -> None:
    tree = trees.twins()
    tree["sgl-kernel/cmake/flashmla.cmake"] = text
    trees.lay_out(tmp_path, tree)
    for outcome in examine(SERIES, tmp_path, NEWEST):
        assert outcome.state is State.CONFLICT
        assert outcome.where == ("sgl-kernel/cmake/flashmla.cmake:1",)
        assert reason in outcome.reason


def test_a_link_that_leads_out_of_the_tree_is_refused(tmp_path: Path) -> None:
    """The copy of a checkout may hold links; what they lead to is not ours to patch."""
    outside = tmp_path / "outside"
    trees.lay_out(outside, {"flashmla.cmake": trees.twins()["sgl-kernel/cmake/flashmla.cmake"]})
    root = trees.lay_out(tmp_path / "tree", trees.twins())
    shutil.rmtree(root / "sgl-kernel/cmake")
    (root / "sgl-kernel/cmake").symlink_to(outside)
    before = trees.contents(outside)
    with pytest.raises(PatchError, match="symbolic link"):
        apply(SERIES, root, MARCH)
    assert trees.contents(outside) == before


def test_the_disk_filling_up_leaves_the_tree_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = trees.lay_out(tmp_path / "tree", trees.twins())
    before = trees.contents(root)
    real, calls = os.fsync, []

    def full(handle: int) -> None:
        calls.append(handle)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(PreflightError, match="no space left"):
        apply(SERIES, root, MARCH)
    assert trees.contents(root) == before


def test_a_failure_between_two_files_takes_the_first_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = trees.lay_out(tmp_path / "tree", trees.twins())
    before = trees.contents(root)
    real = Path.replace

    def broken(self: Path, target: Path) -> Path:
        if Path(target).name == "flash_ops.py":
            raise OSError(errno.EIO, "Input/output error")
        return real(self, target)

    monkeypatch.setattr(Path, "replace", broken)
    with pytest.raises(PreflightError, match="flash_ops"):
        apply(SERIES, root, MARCH)
    assert trees.contents(root) == before


def test_the_mode_of_a_file_stays(tmp_path: Path) -> None:
    tree = trees.twins()
    root = trees.lay_out(tmp_path, tree)
    (root / trees.main_of(tree)).chmod(0o750)
    apply(SERIES, root, MARCH)
    assert stat.S_IMODE((root / trees.main_of(tree)).stat().st_mode) == 0o750


def test_another_context_moves_a_patched_tree_on(tmp_path: Path) -> None:
    tree = trees.twins()
    main = trees.main_of(tree)
    apply(SERIES, trees.lay_out(tmp_path / "a", tree), MARCH)
    later = replace(NEWEST, architectures=("121a",), compile_threads=4)
    made = apply(SERIES, tmp_path / "a", later)
    assert made.outcomes[0].state is State.APPLIED
    fresh = apply(SERIES, trees.lay_out(tmp_path / "b", tree), later)
    assert (tmp_path / "a" / main).read_bytes() == (tmp_path / "b" / main).read_bytes()
    assert set(fresh.left_out) == {"common_ops_sm90_build", "flash_ops", "flashmla_ops"}


def test_a_tree_patched_by_hand_counts_as_upstream(tmp_path: Path) -> None:
    """Without our record nobody can say who did it."""
    root = trees.lay_out(tmp_path, trees.twins())
    apply(SERIES, root, MARCH)
    (root / "sgl-kernel" / LEDGER).unlink()
    outcomes = examine(SERIES, root, MARCH)
    assert {outcome.state for outcome in outcomes} == {State.UPSTREAM, State.NOT_NEEDED}


@pytest.mark.parametrize("written", range(5))
def test_an_application_that_was_killed_is_brought_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    """Record, two modules, the build file: whatever was written when it was killed, the next time adds the rest."""

    class Killed(BaseException):
        pass

    whole = trees.lay_out(tmp_path / "whole", trees.twins())
    apply(SERIES, whole, MARCH)
    root = trees.lay_out(tmp_path / "cut", trees.twins())
    real, left = Path.replace, [written]

    def cut(self: Path, target: Path) -> Path:
        if not left[0]:
            raise Killed
        left[0] -= 1
        return real(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", cut)
        patch.setattr(write, "_restore", lambda path, data: None)
        if written < 4:
            with pytest.raises(Killed):
                apply(SERIES, root, MARCH)
        else:
            apply(SERIES, root, MARCH)
    assert (trees.contents(root) == trees.contents(whole)) is (written == 4)
    apply(SERIES, root, MARCH)
    (whole / "sgl-kernel" / LEDGER).write_bytes((root / "sgl-kernel" / LEDGER).read_bytes())
    assert trees.contents(root) == trees.contents(whole)
    again = propose(SERIES, root, MARCH)
    assert {outcome.state for outcome in again.outcomes} == {State.APPLIED, State.NOT_NEEDED}
    assert again.left_out == ("common_ops_sm90_build", "flash_ops", "flashmla_ops")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"schema": 1}', '{"schema": 1, "files": {"../x": null}, "applied": 3}']
)
def test_a_damaged_record_is_no_record(tmp_path: Path, text: str) -> None:
    root = trees.lay_out(tmp_path, trees.twins() | {f"sgl-kernel/{LEDGER}": text})
    assert examine(SERIES, root, MARCH)[0].state is State.PENDING
    apply(SERIES, root, MARCH)
    assert examine(SERIES, root, MARCH)[0].state is State.APPLIED


def test_a_record_of_a_tree_that_was_changed_since_is_no_record(tmp_path: Path) -> None:
    root = trees.lay_out(tmp_path, trees.twins())
    apply(SERIES, root, MARCH)
    path = root / "sgl-kernel/CMakeLists.txt"
    path.write_text(path.read_text() + "# by hand\n")
    assert examine(SERIES, root, MARCH)[0].state is State.UPSTREAM


def test_a_file_where_our_module_goes_is_kept_and_told(tmp_path: Path) -> None:
    root = trees.lay_out(tmp_path, trees.twins() | {"sgl-kernel/python/sgl_kernel/flash_ops.py": "x = 1\n"})
    with pytest.raises(PatchError, match="flash_ops"):
        apply(SERIES, root, MARCH)
    assert (root / "sgl-kernel/python/sgl_kernel/flash_ops.py").read_text() == "x = 1\n"


# --- layouts


@pytest.mark.parametrize("shape", trees.ALL)
def test_the_layout_is_found_in_a_checkout_and_in_the_folder_alone(tmp_path: Path, shape: str) -> None:
    tree = trees.ALL[shape]()
    folder = str(Path(trees.main_of(tree)).parent)
    trees.lay_out(tmp_path, tree)
    assert detect_layout(tmp_path).folder == folder
    assert detect_layout(tmp_path / folder).folder == ""
    alone = propose(SERIES, tmp_path / folder, NEWEST)
    whole = propose(SERIES, tmp_path, NEWEST)
    assert {f"{folder}/{path}": data for path, data in alone.changes.items()} == whole.changes


def test_the_newer_layout_wins_over_a_remnant_of_the_older(tmp_path: Path) -> None:
    trees.lay_out(tmp_path, trees.twins() | trees.archives())
    assert detect_layout(tmp_path).folder == "python/sglang/kernels/aot"


@pytest.mark.parametrize("name", ["absent", "empty", "file"])
def test_another_folder_is_refused_in_words(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(PatchError, match="no source tree of sgl-kernel") as caught:
        examine(SERIES, tmp_path / name, MARCH)
    assert "python/sglang/kernels/aot" in str(caught.value.remedy)


# --- what is told


def test_the_table_has_a_row_for_each_patch(tmp_path: Path) -> None:
    made = propose(SERIES, trees.lay_out(tmp_path, trees.archives()), MARCH)
    table = rows(made.outcomes)
    assert [row[0] for row in table] == [patch.name for patch in SERIES.patches]
    assert {len(row) for row in table} == {len(COLUMNS)}
    assert table[3][3].endswith("and 12 more")
    assert json.loads(json.dumps([outcome.as_json() for outcome in made.outcomes]))[0]["state"] == "pending"


def test_places_are_told_as_the_file_on_the_disk_counts(tmp_path: Path) -> None:
    tree = trees.twins()
    lines = tree[trees.main_of(tree)].splitlines()
    for outcome in examine(SERIES, trees.lay_out(tmp_path, tree), NEWEST):
        for place in outcome.where:
            path, _, line = place.rpartition(":")
            if path == trees.main_of(tree):
                words = ("POLICY", "policy", "library", "subdirectory", "gencode", "STANDARD", "std=", "THREADS")
                assert any(word in lines[int(line) - 1] for word in words), place


def test_a_version_that_is_not_known_is_not_guessed(tmp_path: Path) -> None:
    root = trees.lay_out(tmp_path, trees.twins())
    outcome = examine(SERIES, root, replace(NEWEST, torch=None))[4]
    assert (outcome.state, outcome.reason) == (
        State.NOT_NEEDED,
        "for torch >=2.14.dev0; which one will be used is not known",
    )


# --- the modules in the place of what is left out


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[types.SimpleNamespace]:
    """The Python package of a patched tree, importable, with a torch that registered no operator but one."""
    apply(SERIES, trees.lay_out(tmp_path, trees.twins()), MARCH)
    torch = types.ModuleType("torch")
    operators = types.SimpleNamespace(plan="of another library")
    torch.ops = types.SimpleNamespace(sgl_kernel=operators)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.syspath_prepend(str(tmp_path / "sgl-kernel/python"))
    yield operators
    for name in [name for name in sys.modules if name.partition(".")[0] == "sgl_kernel"]:
        del sys.modules[name]


def test_the_package_still_imports_and_says_what_is_absent_when_it_is_called(package: types.SimpleNamespace) -> None:
    import importlib

    importlib.import_module("sgl_kernel.flash_attn")  # as SGLang does for every vision model
    message = (
        r"torch\.ops\.sgl_kernel\.fwd: flash_ops is not in this build of sgl_kernel.*SM120.*sm_90a, sm_80, sm_86 only"
    )
    for operator in (package.fwd, package.fwd.default):
        with pytest.raises(RuntimeError, match=message):
            operator(1, k=2)
    assert package.plan == "of another library"
    assert not hasattr(package, "gone")
    importlib.import_module("sgl_kernel.flashmla_ops")
    with pytest.raises(RuntimeError, match="flashmla_ops is not in this build"):
        package.mla_fwd()


def test_the_hash_of_a_series_follows_files_order_and_rules(tmp_path: Path) -> None:
    folder = tmp_path / "patches"
    shutil.copytree(SERIES.path.parent, folder)
    same = load_series(folder)
    assert same.sha256 == SERIES.sha256
    path = folder / "compile-threads.toml"
    path.write_text(path.read_text() + "\n")
    assert load_series(folder).sha256 != SERIES.sha256
    shutil.copy(SERIES.path.parent / path.name, path)
    listed = folder / "series.toml"
    text = listed.read_text()
    listed.write_text(
        text.replace('    "sm120-only",\n', "").replace("patches = [\n", 'patches = [\n    "sm120-only",\n')
    )
    assert load_series(folder).sha256 != SERIES.sha256


def test_the_series_hash_follows_the_source_of_the_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = files.sha256
    monkeypatch.setattr(files, "sha256", lambda path: "x" if path.name == "sm120_only.py" else real(path))
    assert load_series().sha256 != SERIES.sha256


def test_a_second_rule_sees_what_the_first_made(tmp_path: Path) -> None:
    """The raised standard is not looked for in a file that sm120-only dropped."""
    tree = trees.archives()
    path = "python/sglang/kernels/aot/cmake/flashmla.cmake"
    tree[path] = tree[path].replace("c++20", "c++17")
    root = trees.lay_out(tmp_path, tree)
    assert path not in propose(SERIES, root, NEWEST).changes
    assert path in propose(without(SERIES, "sm120-only"), root, NEWEST).changes


def test_versions_are_compared_as_versions(tmp_path: Path) -> None:
    root = trees.lay_out(tmp_path, trees.twins())
    states = {}
    for text in ("3.31.10", "4.0.0", "4.0.0rc1", "10.0"):
        outcomes = examine(SERIES, root, replace(MARCH, cmake=Version(text)))
        states[text] = outcomes[2].state
    assert list(states.values()) == [State.NOT_NEEDED, State.PENDING, State.PENDING, State.PENDING]


def test_the_tree_of_a_fault_in_the_engine_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = trees.lay_out(tmp_path, trees.twins())
    before = trees.contents(root)
    monkeypatch.setattr(engine, "unified_diff", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        apply(SERIES, root, MARCH)
    assert trees.contents(root) == before

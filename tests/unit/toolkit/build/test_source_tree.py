import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sm120 import errors
from sm120.build.source.tree import Item, bring, content, is_made, items, walk

OLD = 10**9


def _look(folder: Path) -> dict[str, tuple[str, bool]]:
    found = {}
    for path in walk(folder):
        place = folder / path
        text = f"-> {place.readlink()}" if place.is_symlink() else place.read_text()
        found[path] = (text, not place.is_symlink() and os.access(place, os.X_OK))
    return found


def _age(folder: Path) -> None:
    for path in walk(folder):
        os.utime(folder / path, (OLD, OLD), follow_symlinks=False)


def test_only_what_differs_is_written(tmp_path: Path) -> None:
    wanted = {
        "a": Item(data=b"1"),
        "b/c": Item(data=b"2"),
        "b/run": Item(data=b"3", executable=True),
        "l": Item(link="a"),
    }
    bring(wanted, tmp_path)
    assert _look(tmp_path) == {"a": ("1", False), "b/c": ("2", False), "b/run": ("3", True), "l": ("-> a", False)}
    _age(tmp_path)
    bring({**wanted, "a": Item(data=b"4")}, tmp_path)
    assert (tmp_path / "a").read_bytes() == b"4"
    assert [path for path in walk(tmp_path) if (tmp_path / path).lstat().st_mtime != OLD] == ["a"]


def test_what_is_no_longer_there_goes_with_its_folder_and_what_an_interruption_left(tmp_path: Path) -> None:
    bring({"a": Item(data=b"1"), "b/c/d": Item(data=b"2")}, tmp_path)
    (tmp_path / ".a.part").write_text("half")
    bring({"a": Item(data=b"1")}, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]


def test_an_exec_bit_alone_is_a_difference(tmp_path: Path) -> None:
    bring({"a": Item(data=b"1")}, tmp_path)
    bring({"a": Item(data=b"1", executable=True)}, tmp_path)
    assert os.access(tmp_path / "a", os.X_OK)


_TREES = st.dictionaries(
    st.lists(st.sampled_from("abc"), min_size=1, max_size=3).map("/".join),
    st.one_of(
        st.builds(Item, data=st.sampled_from([b"", b"x", b"y"]), executable=st.booleans()),
        st.builds(Item, link=st.sampled_from(["a", "b"])),
    ),
    max_size=6,
).map(lambda made: {path: made[path] for path in made if not any(other.startswith(f"{path}/") for other in made)})


@given(_TREES, _TREES)
def test_any_tree_becomes_any_other(first: dict[str, Item], second: dict[str, Item]) -> None:
    place = Path(tempfile.mkdtemp())
    try:
        for wanted in (first, second):
            bring(wanted, place)
            assert _look(place) == {
                path: (f"-> {item.link}", False) if item.link else ((item.data or b"").decode(), item.executable)
                for path, item in wanted.items()
            }
    finally:
        shutil.rmtree(place)


def test_a_link_in_the_place_of_a_folder_is_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "a").symlink_to(outside)
    bring({"a/b": Item(data=b"1")}, copy)
    assert (copy / "a" / "b").read_bytes() == b"1"
    assert [path.name for path in outside.iterdir()] == ["kept"]


@pytest.mark.parametrize("path", ["../a", "/a", "a/../b", "a//b", ".git/config"])
def test_a_path_that_leaves_is_a_mistake(tmp_path: Path, path: str) -> None:
    with pytest.raises(ValueError, match="no path below"):
        bring({path: Item(data=b"")}, tmp_path)


@pytest.mark.parametrize("target", ["/etc/passwd", "../outside", "b/../../outside", "itself", "through/outside"])
def test_links_that_lead_outside_are_refused(tmp_path: Path, target: str) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (tmp_path / "outside").write_text("x")
    (folder / "b").mkdir()
    (folder / "through").symlink_to(tmp_path)
    (folder / "itself").symlink_to(target)
    with pytest.raises(errors.PreflightError, match="itself leads out"):
        items(folder, ["itself"])


def test_links_inside_stay_links(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "f").write_text("x")
    (tmp_path / "a" / "up").symlink_to("../b")
    (tmp_path / "folder").symlink_to("a")
    assert list(walk(tmp_path)) == ["folder", "a/f", "a/up"]
    assert items(tmp_path, ["a/up", "folder"]) == {"a/up": Item(link="../b"), "folder": Item(link="a")}


def test_a_pipe_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert items(tmp_path, ["pipe", "gone"]) == {}


def test_the_content_tells_paths_bits_and_bytes_apart() -> None:
    trees: list[dict[str, Item]] = [
        {},
        {"a": Item(data=b"")},
        {"b": Item(data=b"")},
        {"a": Item(data=b"x")},
        {"a": Item(data=b"x", executable=True)},
        {"a": Item(link="x")},
        {"a": Item(data=b"x"), "b": Item(data=b"")},
        {"a": Item(data=b""), "b": Item(data=b"x")},
    ]
    assert len({content(tree) for tree in trees}) == len(trees)


def test_the_content_does_not_depend_on_order_or_place(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x")
    (tmp_path / "b").write_bytes(b"y")
    found = items(tmp_path, ["b", "a"])
    assert content(found) == content({"a": Item(data=b"x"), "b": Item(data=b"y")})


@pytest.mark.parametrize(
    ("path", "made"),
    [
        ("build/CMakeCache.txt", True),
        ("dist/a.whl", True),
        ("python/sgl_kernel/common_ops.abi3.so", True),
        ("python/__pycache__/a.pyc", True),
        ("a.egg-info/PKG-INFO", True),
        ("csrc/build/a.cu", False),
        ("build.sh", False),
        ("csrc/so.cc", False),
    ],
)
def test_what_an_earlier_build_made(path: str, made: bool) -> None:
    assert is_made(path) is made

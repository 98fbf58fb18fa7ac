"""The wheel of a build: its version, the record in it, and that it is the same bytes each time."""

import hashlib
import json
import subprocess
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.toolkit.build.wheels_made import digest, record, tag, write_wheel

from sm120 import errors, files
from sm120.build.wheel import existing, finish, overlay

TAG = "sm120.0123456789"
PYPROJECT = """\
# about
[build-system]
requires = [
  "scikit-build-core>=0.10",
]

[project]
name = "sgl-kernel"
version = "0.3.21" # of upstream
authors = [{ name="Us" , email="us@example.org"}]

[tool.scikit-build]
wheel.py-api = "cp310"
wheel.packages = ["python/sgl_kernel"]

[project.urls]
"Homepage" = 'https://example.org'
"""
RECORD = record()


def lines_changed(before: str, after: str) -> list[tuple[str, str]]:
    return [pair for pair in zip(before.splitlines(), after.splitlines(), strict=True) if pair[0] != pair[1]]


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.3.21", f"0.3.21+{TAG}"),
        ("0.3.21+cu130", f"0.3.21+{TAG}"),
        ("0.3.21+sm120.ffff", f"0.3.21+{TAG}"),
        ("0.4.0.post1", f"0.4.0.post1+{TAG}"),
        ("v0.4.0-rc1", f"0.4.0rc1+{TAG}"),
    ],
)
def test_only_the_value_of_the_version_changes(version: str, expected: str) -> None:
    before = PYPROJECT.replace("0.3.21", version)
    after = overlay(before.encode(), TAG, RECORD)["pyproject.toml"].decode()
    assert lines_changed(before, after) == [
        (f'version = "{version}" # of upstream', f'version = "{expected}" # of upstream')
    ]


def test_line_ends_and_everything_else_stay() -> None:
    before = PYPROJECT.replace("\n", "\r\n").encode()
    after = overlay(before, TAG, RECORD)["pyproject.toml"]
    assert after == before.replace(b'"0.3.21"', f'"0.3.21+{TAG}"'.encode())


@given(st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=30), st.integers(0, 99))
def test_a_comment_of_any_text_stays(comment: str, number: int) -> None:
    before = f"# {comment}\n{PYPROJECT}# {comment}\n".replace("0.3.21", f"0.{number}")
    after = overlay(before.encode(), TAG, RECORD)["pyproject.toml"].decode()
    assert after == before.replace(f'"0.{number}"', f'"0.{number}+{TAG}"')


def test_twice_is_as_once() -> None:
    once = overlay(PYPROJECT.encode(), TAG, RECORD)
    assert overlay(once["pyproject.toml"], TAG, RECORD) == once


@pytest.mark.parametrize(
    ("packages", "expected"),
    [
        ('wheel.packages = ["python/sgl_kernel"]', "python/sgl_kernel"),
        ('wheel.packages = ["src/tools", "python/sgl_kernel/"]', "python/sgl_kernel"),
        ('wheel.packages = ["src/mine"]', "src/mine"),
        ('[tool.scikit-build.wheel.packages]\n"sgl_kernel" = "lib/sgl_kernel"', "lib/sgl_kernel"),
    ],
)
def test_the_record_lies_in_the_package(packages: str, expected: str) -> None:
    text = PYPROJECT.replace('wheel.packages = ["python/sgl_kernel"]', packages)
    added = overlay(text.encode(), TAG, {"b": 1, "a": {"d": 2, "c": 3}})
    assert added.keys() == {"pyproject.toml", f"{expected}/_build.json"}
    text = added[f"{expected}/_build.json"].decode()
    assert json.loads(text) == {"a": {"c": 3, "d": 2}, "b": 1}
    assert (
        text
        == overlay(PYPROJECT.encode(), TAG, {"a": {"c": 3, "d": 2}, "b": 1})["python/sgl_kernel/_build.json"].decode()
    )
    assert tomllib.loads(added["pyproject.toml"].decode())["project"]["version"].endswith(TAG)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('version = "0.3.21"', 'dynamic = ["version"]', "says no version: it is dynamic"),
        ('version = "0.3.21"', "", "says no version"),
        ('version = "0.3.21"', "version = 3", "says no version"),
        ('version = "0.3.21"', 'version = "newest"', "'newest', which is none"),
        ("[project]", "[project", "cannot be read"),
        ('wheel.packages = ["python/sgl_kernel"]', "", "names no folder of a package"),
        ('wheel.packages = ["python/sgl_kernel"]', "wheel.packages = []", "names no folder of a package"),
        ('"python/sgl_kernel"', '"../../sgl_kernel"', "names no folder of a package"),
        ('"python/sgl_kernel"', '"/sgl_kernel"', "names no folder of a package"),
    ],
)
def test_what_cannot_be_stamped_is_one_error(old: str, new: str, message: str) -> None:
    with pytest.raises(errors.BuildError, match=message) as raised:
        overlay(PYPROJECT.replace(old, new).encode(), TAG, RECORD)
    assert raised.value.remedy


def test_no_utf8_is_one_error() -> None:
    with pytest.raises(errors.BuildError, match="cannot be read"):
        overlay(PYPROJECT.encode() + b"# \xff", TAG, RECORD)


def test_a_wheel_gets_to_its_place_with_its_sum_beside_it(tmp_path: Path) -> None:
    made = write_wheel(tmp_path / "made", RECORD)
    built = finish(made, tmp_path / "kernels", tag(RECORD), RECORD)
    assert built.path == tmp_path / "kernels" / made.name
    assert (built.name, built.version, built.module) == ("sgl-kernel", f"0.3.21+{tag(RECORD)}", "sgl_kernel")
    assert built.record == RECORD
    assert built.sha256 == hashlib.sha256(built.path.read_bytes()).hexdigest()
    assert not made.exists()
    assert {path.name for path in built.path.parent.iterdir()} == {made.name, f"{made.name}.sha256"}
    checked = subprocess.run(["sha256sum", "--check", f"{made.name}.sha256"], cwd=built.path.parent, check=False)
    assert checked.returncode == 0
    with zipfile.ZipFile(built.path) as archive:
        names = archive.namelist()
        assert archive.testzip() is None
    assert names[-1].endswith("/RECORD")


def test_permissions_order_and_compression_of_the_backend_do_not_count(tmp_path: Path) -> None:
    """Measured: scikit-build-core keeps the files' permissions, so the umask decides them; all else is the same."""
    one = finish(write_wheel(tmp_path / "1", RECORD), tmp_path / "a", tag(RECORD), RECORD)
    two = finish(write_wheel(tmp_path / "2", RECORD, mode=0o600, order=-1), tmp_path / "b", tag(RECORD), RECORD)
    assert one.path.read_bytes() == two.path.read_bytes()
    with zipfile.ZipFile(one.path) as archive:
        assert {info.external_attr >> 16 for info in archive.infolist()} == {0o100644}


def test_what_can_be_executed_stays_so(tmp_path: Path) -> None:
    built = finish(write_wheel(tmp_path, RECORD, mode=0o700), tmp_path / "a", tag(RECORD), RECORD)
    with zipfile.ZipFile(built.path) as archive:
        assert {info.external_attr >> 16 for info in archive.infolist()} == {0o100755}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"says": {"Version": "0.3.21"}}, "says in its METADATA that it is sgl-kernel 0.3.21$"),
        ({"says": {"Name": "torch"}}, "says in its METADATA that it is torch"),
        ({"without_record": True}, "holds 0 files _build.json"),
        ({"content": {"other/_build.json": "{}"}}, "holds 2 files _build.json"),
        ({"lines": {"sgl_kernel/_build.json": digest("another")}}, "_build.json otherwise than its RECORD says"),
        ({"extra": {"sgl_kernel/more.py": ""}}, "other files than its RECORD names"),
    ],
)
def test_a_wheel_that_is_not_what_was_asked_is_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    made = write_wheel(tmp_path / "made", RECORD, **options)
    with pytest.raises(errors.BuildError, match=message):
        finish(made, tmp_path / "kernels", tag(RECORD), RECORD)
    assert made.exists()
    assert not list((tmp_path / "kernels").glob("*")), "nothing of it is left"


def test_the_record_of_another_build_is_refused(tmp_path: Path) -> None:
    made = write_wheel(tmp_path, RECORD)
    with pytest.raises(errors.BuildError, match=r"its local part is not sm120\.bbb"):
        finish(made, tmp_path / "kernels", "sm120.bbb", RECORD)
    with pytest.raises(errors.BuildError, match=r"another build's _build\.json"):
        finish(made, tmp_path / "kernels", tag(RECORD), {**RECORD, "commit": "f"})


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "gone"])
def test_a_damaged_wheel_is_one_error(tmp_path: Path, damage: str) -> None:
    made = write_wheel(tmp_path / "made", RECORD)
    data = made.read_bytes()
    if damage == "gone":
        made.unlink()
    else:
        made.write_bytes(
            {"cut": data[:-30], "flipped": bytes([*data[:60], data[60] ^ 1, *data[61:]]), "empty": b""}[damage]
        )
    with pytest.raises(errors.BuildError):
        finish(made, tmp_path / "kernels", tag(RECORD), RECORD)
    assert existing(tmp_path / "kernels", RECORD["identity"]) is None


def test_the_wheel_of_a_recipe_is_found_again(tmp_path: Path) -> None:
    other = record("b" * 64)
    built = finish(write_wheel(tmp_path / "made", RECORD), tmp_path, tag(RECORD), RECORD)
    finish(write_wheel(tmp_path / "made", other), tmp_path, tag(other), other)
    assert existing(tmp_path, RECORD["identity"]) == built
    assert existing(tmp_path, "c" * 64) is None
    assert existing(tmp_path / "nowhere", RECORD["identity"]) is None


def test_half_a_wheel_is_none(tmp_path: Path) -> None:
    built = finish(write_wheel(tmp_path / "made", RECORD), tmp_path, tag(RECORD), RECORD)
    sums = built.path.with_name(f"{built.path.name}.sha256")
    whole, said = built.path.read_bytes(), sums.read_text()

    sums.write_text(said.replace(built.sha256, "0" * 64))
    assert existing(tmp_path, RECORD["identity"]) is None
    sums.unlink()
    assert existing(tmp_path, RECORD["identity"]) is None
    sums.write_text(said)
    built.path.write_bytes(whole[:-1])
    assert existing(tmp_path, RECORD["identity"]) is None
    built.path.write_bytes(whole)
    assert existing(tmp_path, RECORD["identity"]) == built


def test_one_that_was_interrupted_between_the_wheel_and_its_sum_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = write_wheel(tmp_path / "made", RECORD)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(files, "write_text_atomic", interrupt)
        with pytest.raises(KeyboardInterrupt):
            finish(made, tmp_path, tag(RECORD), RECORD)
    assert existing(tmp_path, RECORD["identity"]) is None
    assert finish(made, tmp_path, tag(RECORD), RECORD) == existing(tmp_path, RECORD["identity"])


def test_a_wheel_of_the_same_name_is_replaced_as_a_whole(tmp_path: Path) -> None:
    first = finish(write_wheel(tmp_path / "made", RECORD), tmp_path, tag(RECORD), RECORD)
    (tmp_path / f".{first.path.name}.tmp").write_text("left by one that was killed")
    second = finish(write_wheel(tmp_path / "made", RECORD, {"sgl_kernel/a.py": ""}), tmp_path, tag(RECORD), RECORD)
    assert (second.path, second.sha256 != first.sha256) == (first.path, True)
    assert existing(tmp_path, RECORD["identity"]) == second
    assert not list(tmp_path.glob(".*"))

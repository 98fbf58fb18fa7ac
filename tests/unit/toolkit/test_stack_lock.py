import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from packaging.pylock import Pylock

from sm120 import errors
from sm120.stack.lock import Lock, LockedFile, read_lock, write_lock

TORCH = LockedFile(
    name="torch",
    version="2.13.0+cpu",
    filename="torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl",
    url="https://example.org/whl/torch-2.13.0%2Bcpu-cp311-cp311-manylinux_2_28_x86_64.whl",
    sha256="a" * 64,
    size=123,
)
LEAF = LockedFile(
    name="ml-dtypes",
    version="1.0",
    filename="ml_dtypes-1.0-py3-none-any.whl",
    url="wheels/ml_dtypes-1.0-py3-none-any.whl",
    sha256="b" * 64,
    size=None,
)
LOCK = Lock(
    stack="cpu",
    request="f" * 64,
    python="3.11",
    platform="linux_x86_64",
    created="2026-12-01T00:00:00+00:00",
    sources=("https://example.org/simple",),
    files=(LEAF, TORCH),
)


def written(folder: Path, lock: Lock = LOCK) -> Path:
    path = folder / "pylock.cpu.toml"
    write_lock(lock, path)
    return path


def test_round_trip_in_any_order_of_files(tmp_path: Path) -> None:
    path = written(tmp_path)
    assert read_lock(path) == LOCK
    before = path.read_bytes()
    write_lock(replace(LOCK, files=(TORCH, LEAF)), path)
    assert path.read_bytes() == before


def test_it_is_a_pylock_file_that_others_can_read(tmp_path: Path) -> None:
    pylock = Pylock.from_dict(tomllib.loads(written(tmp_path).read_text()))
    assert [str(package.name) for package in pylock.packages] == ["ml-dtypes", "torch"]
    wheels = [wheel for package in pylock.packages for wheel in package.wheels or ()]
    assert [(wheel.path, wheel.url) for wheel in wheels] == [(LEAF.url, None), (None, TORCH.url)]
    assert wheels[1].hashes == {"sha256": "a" * 64}


def test_fingerprint_is_of_names_versions_and_hashes() -> None:
    base = LOCK.fingerprint
    assert replace(LOCK, files=(TORCH, LEAF)).fingerprint == base
    assert replace(LOCK, created="later", sources=(), files=(LEAF, replace(TORCH, url="file:///x"))).fingerprint == base
    assert replace(LOCK, files=(LEAF, replace(TORCH, sha256="c" * 64))).fingerprint != base
    assert replace(LOCK, files=(LEAF, replace(TORCH, version="2.13.0"))).fingerprint != base
    assert replace(LOCK, files=(LEAF,)).fingerprint != base


def test_file_by_name() -> None:
    assert LOCK.file("torch") == TORCH
    assert LOCK.file("numpy") is None


def test_no_lock(tmp_path: Path) -> None:
    with pytest.raises(errors.UsageError, match="cannot read") as raised:
        read_lock(tmp_path / "none.toml")
    assert "add --lock to the setup command" in (raised.value.remedy or "")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('lock-version = "1.0"', "", "not a pylock file"),
        ('lock-version = "1.0"', 'lock-version = "9.0"', "not a pylock file"),
        ('created-by = "sm120-toolkit"', 'created-by = "uv"', "written by 'uv', not by this toolkit"),
        ("schema = 1", "schema = 2", "has schema 2; this toolkit reads 1"),
        ('request = "f', 'request = 5 # "f', "request must be text"),
        ('python = "3.11"', 'python = "/x"', "python is no version"),
        ("[tool.sm120]", "[tool.other]", "not by this toolkit"),
        ('"a', '"A', "has no SHA-256"),
        ('sha256 = "a', 'sha512 = "a', "has no SHA-256"),
        ("aaaa", "aaa", "has no SHA-256"),
        ("size = 123", "size = -1", "has the size -1"),
        ("size = 123", 'size = "123"', "not a pylock file"),
        ('\nversion = "1.0"', '\nversion = "1.1"', "not a pylock file"),
        ('name = "ml-dtypes"', 'name = "torch"', "not a pylock file"),
        ('ml_dtypes-1.0-py3-none-any.whl"\npath', '../../x.whl"\npath', "not a pylock file"),
        ('"ml_dtypes-1.0-py3-none-any.whl"\npath', '"../ml_dtypes-1.0-py3-none-any.whl"\npath', "not a pylock file"),
        ('ml_dtypes-1.0-py3-none-any.whl"\npath', 'x.tar.gz"\npath', "not a pylock file"),
        ('ml_dtypes-1.0-py3-none-any.whl"\npath', 'ml_dtypes-1.0-py3-no/ne-any.whl"\npath', "no usable file name"),
        ('path = "wheels/', 'path = "/etc/', "no usable URL or path"),
        ('path = "wheels/', 'path = "../../', "no usable URL or path"),
        ("https://example.org/whl", "ftp://example.org/whl", "no usable URL or path"),
        ("https://example.org/whl", "https://u:p@example.org/whl", "no usable URL or path"),
        ("https://example.org/whl", "https://exa mple.org/whl", "no usable URL or path"),
        ("https://example.org/whl", "https://[example.org/whl", "no usable URL or path"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, old: str, new: str, words: str) -> None:
    path = written(tmp_path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(errors.UsageError) as raised:
        read_lock(path)
    assert words in raised.value.message
    assert str(path) in raised.value.message
    assert "u:p" not in raised.value.message


def test_a_package_twice_and_none_at_all(tmp_path: Path) -> None:
    path = written(tmp_path, replace(LOCK, files=(TORCH, TORCH)))
    with pytest.raises(errors.UsageError, match="torch is there twice"):
        read_lock(path)
    path = written(tmp_path, replace(LOCK, files=()))
    with pytest.raises(errors.UsageError, match="it names no package"):
        read_lock(path)


def test_a_lock_that_is_too_large(tmp_path: Path) -> None:
    path = tmp_path / "pylock.toml"
    with path.open("wb") as file:
        file.truncate(33 * 2**20)
    with pytest.raises(errors.UsageError, match="too many for a lock"):
        read_lock(path)


def test_text_that_overwhelms_the_reader(tmp_path: Path) -> None:
    path = tmp_path / "pylock.toml"
    for text in ("a = " + "[" * 100_000, "\0", "a = " + "9" * 5000):
        path.write_text(text)
        with pytest.raises(errors.UsageError, match="not a lock that can be used"):
            read_lock(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.floats(0, 1), st.integers(0, 30), st.text(max_size=8))
def test_a_damaged_lock_is_read_whole_or_not_at_all(tmp_path: Path, at: float, length: int, text: str) -> None:
    path = written(tmp_path)
    whole = path.read_text()
    start = int(at * len(whole))
    path.write_text(whole[:start] + text + whole[start + length :], "utf-8", "replace")
    try:
        lock = read_lock(path)
    except errors.UsageError:
        return
    for file in lock.files:
        assert "/" not in file.filename
        assert len(file.sha256) == 64


@given(st.lists(st.sampled_from(["sha", "url", "version", "size"]), min_size=1, unique=True), st.data())
def test_any_lock_comes_back_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, names: list[str], data: st.DataObject
) -> None:
    files = tuple(
        LockedFile(
            name=name,
            version=version,
            filename=f"{name}-{version}-py3-none-any.whl",
            url=data.draw(st.sampled_from(["https://h/é%20x", "file:///a/b.whl", "w/b.whl", "http://h:8080/a?b=c"])),
            sha256=data.draw(st.text("0123456789abcdef", min_size=64, max_size=64)),
            size=data.draw(st.none() | st.integers(0, 2**40)),
        )
        for name in sorted(names)
        for version in [data.draw(st.sampled_from(["1.0", "2!1.0rc1", "2.12.0.dev20260307+cu130"]))]
    )
    lock = replace(LOCK, files=files, sources=tuple(data.draw(st.lists(st.text("ab\"'\\\n{}é"), max_size=3))))
    path = tmp_path_factory.mktemp("lock") / "pylock.x.toml"
    write_lock(lock, path)
    assert read_lock(path) == lock

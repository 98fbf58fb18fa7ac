from pathlib import PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sm120 import errors
from sm120.build.source.address import (
    address,
    archive_names,
    archived,
    is_commit,
    is_revision,
    is_short_commit,
    is_tarball,
    relative,
)

COMMIT = "57e3cfb47a2d9e0d46eb6335c3dc411498efa198"


@pytest.mark.parametrize(
    ("url", "kept"),
    [
        ("https://github.com/NVIDIA/cutlass", "github.com/NVIDIA/cutlass.git"),
        ("https://github.com/NVIDIA/cutlass.git", "github.com/NVIDIA/cutlass.git"),
        ("https://github.com/NVIDIA/cutlass.git/", "github.com/NVIDIA/cutlass.git"),
        ("https://user:word@GitHub.com/NVIDIA/cutlass", "github.com/NVIDIA/cutlass.git"),
        ("http://127.0.0.1:8000/a/b", "127.0.0.1_8000/a/b.git"),
        ("ssh://git@host/a/b.git", "host/a/b.git"),
        ("git@github.com:NVIDIA/cutlass.git", "github.com/NVIDIA/cutlass.git"),
        ("file:///srv/git/a.git", "local/srv/git/a.git"),
        ("/srv/git/a b", "local/srv/git/a%20b.git"),
    ],
)
def test_one_store_for_each_repository_however_it_is_written(url: str, kept: str) -> None:
    assert address(url).kept == PurePosixPath(kept)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "-c",
        "--upload-pack=touch x",
        "ext::sh -c touch",
        "ftp://host/a/b",
        "https:///a/b",
        "https://host",
        "https://host/../../etc",
        "https://[half/a",
        "ssh://-oProxyCommand=x/a",
        "-oProxyCommand=x:a",
        "../beside",
        "a/b",
        "fd::17",
        "https://host/a\nb",
    ],
)
def test_what_git_must_not_be_given_is_refused(url: str) -> None:
    with pytest.raises(errors.PreflightError, match="no address of a git repository"):
        address(url)


def test_the_label_holds_no_password() -> None:
    assert "word" not in address("https://user:word@host/a/b").label


@given(st.text(max_size=40))
def test_a_store_never_leaves_the_folder_of_stores(text: str) -> None:
    for url in (text, f"https://{text}", f"https://host/{text}", f"/{text}", f"git@host:{text}"):
        try:
            made = address(url)
        except errors.PreflightError:
            continue
        assert not url.startswith("-")
        assert not made.kept.is_absolute()
        assert ".." not in made.kept.parts
        assert all(not place.startswith("/") for place in made.places())


@pytest.mark.parametrize("text", ["v3.5.1", "sgl-kernel", "release/2.9", COMMIT, "v1", "a+b"])
def test_names_of_revisions(text: str) -> None:
    assert is_revision(text)


@pytest.mark.parametrize(
    "text",
    ["", "-x", "--all", "a..b", "a b", "a:b", "HEAD~1", "HEAD^", "+a", "a@{1}", "a*", "x.lock", "a/", "a//b", "/a"],
)
def test_what_is_no_name_of_a_revision(text: str) -> None:
    assert not is_revision(text)


@given(st.text(max_size=20))
def test_a_revision_is_never_an_option_nor_two_names(text: str) -> None:
    if is_revision(text):
        assert not text.startswith("-")
        assert not set(text) & set(" :^~?*[\\\0\n")


def test_commits_in_full_and_short() -> None:
    assert is_commit(COMMIT)
    assert not is_commit(COMMIT[:39])
    assert is_short_commit(COMMIT[:7])
    assert not is_short_commit(COMMIT)
    assert not is_short_commit("v3.5.1")


@pytest.mark.parametrize(
    ("base", "url", "made"),
    [
        ("https://host/a/b", "https://other/c/d.git", "https://other/c/d.git"),
        ("https://host/a/b.git", "../c.git", "https://host/a/c.git"),
        ("https://host/a/b/", "../../x/c", "https://host/x/c"),
        ("https://host/a/b", "./c", "https://host/a/b/c"),
        ("git@host:a/b", "../c", "git@host:a/c"),
        ("git@host:b", "../c", "git@host:c"),
        ("/srv/a/b", "../c", "/srv/a/c"),
    ],
)
def test_a_submodule_beside_its_repository(base: str, url: str, made: str) -> None:
    assert relative(base, url) == made


@pytest.mark.parametrize(
    ("url", "found"),
    [
        (f"https://github.com/NVIDIA/cutlass/archive/{COMMIT}.tar.gz", ("https://github.com/NVIDIA/cutlass", COMMIT)),
        ("https://host/a/b/archive/v3.6.0.tar.gz", ("https://host/a/b", "v3.6.0")),
        ("https://host/a/b/archive/refs/tags/v3.6.0.tar.gz", ("https://host/a/b", "v3.6.0")),
        ("https://github.com/a/json/releases/download/v3/json.tar.xz", None),
        ("https://host/a/b/archive/-x.tar.gz", None),
        ("https://host/v1.tar.gz", None),
    ],
)
def test_archives_that_a_forge_makes_of_a_commit(url: str, found: tuple[str, str] | None) -> None:
    assert archived(url) == found


def test_names_of_an_archive_in_a_mirror() -> None:
    assert archive_names("https://h/o/n/archive/v1.tar.gz") == ("o-n-v1.tar.gz", "v1.tar.gz")
    assert archive_names("https://h/v1.tar.gz?x=1") == ("v1.tar.gz",)
    assert is_tarball("https://h/a.tar.xz?x=1")
    assert not is_tarball("https://h/a.zip")


def test_places_in_a_mirror_the_most_exact_first() -> None:
    assert address("https://github.com/NVIDIA/cutlass.git").places() == (
        "github.com/NVIDIA/cutlass.git",
        "github.com/NVIDIA/cutlass",
        "NVIDIA/cutlass.git",
        "NVIDIA/cutlass",
        "cutlass.git",
        "cutlass",
    )

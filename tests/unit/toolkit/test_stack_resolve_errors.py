"""What uv says, in words; and the machine's constraints. The texts are uv 0.13's, from its runs."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version

from sm120 import errors
from sm120.process import Completed
from sm120.stack.resolve.constraints import Forbidden, Limit, blame, limits
from sm120.stack.resolve.index import Offer
from sm120.stack.resolve.market import nearest
from sm120.stack.resolve.overlay import Overlay
from sm120.stack.resolve.uv import Resolved, parse_resolution
from sm120.stack.resolve.uverrors import NoSuchVersion, Unsatisfiable, contradiction, explain, explanation

NO_SOLUTION = "error: No solution found when resolving dependencies\n  cause: "
END = ", we can conclude that your requirements are unsatisfiable."
CONFLICT = (
    NO_SOLUTION
    + "Because all versions of sglang depend on torch==2.14.1 and you require torch==2.13.0, we can conclude"
    " that your requirements and all versions of sglang are incompatible.\n         And because you require"
    " sglang==0.5.23" + END
)


def explained(text: str, code: int = 1, *, timed_out: bool = False) -> errors.PreflightError:
    done = Completed(("uv",), code, 1.0, tuple(text.splitlines()), timed_out=timed_out)
    error = explain(text, done, "/log")
    assert error.where == "/log"
    assert error.remedy
    return error


def test_two_wishes_that_contradict() -> None:
    error = explained(CONFLICT)
    assert isinstance(error, Unsatisfiable)
    assert "torch==2.14.1" in error.message
    assert "sglang" in error.message
    assert "the stack" in error.message
    assert "torch==2.13.0" in error.message
    assert "conclude" not in error.message


@pytest.mark.parametrize(
    ("text", "first", "second"),
    [
        ("a==1 depends on torch==2.14.1 and you require torch>=2.15", "torch==2.14.1", "torch>=2.15"),
        ("you require torch==2.13.0 and torch<2.10", "torch==2.13.0", "torch<2.10"),
        ("a depends on x>=1,<2 and b depends on x==3.0", "x==3.0", "x<2,>=1"),
        ("a[cu13]==1 depends on y[z]==2.0 and b==1 depends on y==3.0", "y[z]==2.0", "y==3.0"),
        ("Because all versions of a depend on t==2.14.1 and t<2.10, we can conclude", "t==2.14.1", "t<2.10"),
    ],
)
def test_pairs(text: str, first: str, second: str) -> None:
    found = contradiction(text)
    assert found is not None
    assert {str(wish.requirement) for wish in found} == {first, second}


@pytest.mark.parametrize(
    "text",
    [
        "a depends on torch==2.14.1 and you require torch>=2.14",
        "a depends on torch>3 and you require torch<2",  # true, but of that uv must tell the reason
        "a depends on torch==2.14.1 and b depends on numpy==3",
        "",
    ],
)
def test_no_pair(text: str) -> None:
    assert contradiction(text) is None


@pytest.mark.parametrize(
    ("cause", "wanted", "package"),
    [
        ("there is no version of torch==2.13.0+cpu and you require torch==2.13.0+cpu", "torch==2.13.0+cpu", "torch"),
        ("nosuch was not found in the package registry and you require nosuch==2", "nosuch", "nosuch"),
        ("there are no versions of garbage and you require garbage", "garbage", "garbage"),
        (
            "onlypy==1.0 has no wheels with a matching Python implementation tag (e.g., `cp311`) and you require it",
            "onlypy==1.0",
            "onlypy",
        ),
        (
            "only flashinfer_python<=0.7.2 is available and you require it>=0.8",
            "flashinfer_python<=0.7.2",
            "flashinfer-python",
        ),
    ],
)
def test_what_cannot_be_had(cause: str, wanted: str, package: str) -> None:
    error = explained(f"{NO_SOLUTION}Because {cause}{END}\n")
    assert isinstance(error, NoSuchVersion)
    assert (error.wanted, error.package) == (wanted, package)
    assert f"no configured package index has {wanted} for this Python" in error.message


def test_hint_about_another_python() -> None:
    text = f"{NO_SOLUTION}Because x==1.0 has no wheels with a matching ABI tag (e.g., `cp311`) and you require x{END}"
    error = explained(f"{text}\n\nhint: You require CPython 3.11, but we only found wheels for `x` with: `cp313`\n")
    assert "we only found wheels for `x` with: `cp313`" in error.message


def test_a_long_explanation_is_cut() -> None:
    text = NO_SOLUTION + "Because " + " and ".join(f"a{n} depends on b{n}>1" for n in range(200)) + END
    error = explained(text)
    assert type(error) is Unsatisfiable
    assert 400 < len(error.message) < 700
    assert "conclude" not in explanation(text)


@pytest.mark.parametrize(
    ("text", "words", "remedy"),
    [
        (
            "error: Request failed\n  cause: Failed to fetch: https://h/simple/torch/\n  cause: tcp connect error",
            "https://h/simple/torch/ could not be reached",
            "PIP_NO_INDEX",
        ),
        (
            "error: Failed to fetch: `https://h/simple/x/`\n  cause: dns error\n  cause: failed to lookup address",
            "https://h/simple/x/ could not be reached",
            "network",
        ),
        (
            "error: Failed to fetch: https://h/s/\n  cause: invalid peer certificate: UnknownIssuer\n  cause: Connect",
            "the certificate of https://h/s/ is not trusted",
            "global.cert",
        ),
        (
            "error: Failed to fetch: https://h/f.whl\n  cause: HTTP status client error (403 Forbidden) for url (https://h/f)",
            "https://h/f.whl answers 403 Forbidden",
            "netrc",
        ),
        (
            "error: Failed to write\n  cause: No space left on device (os error 28)",
            "no space left on the disk",
            "TMPDIR",
        ),
        (
            "error: Failed to download and build `src==1.0`\n  cause: Invalid tar file\n  cause: Invalid gzip header",
            "uv fails with exit code 1: Failed to download and build `src==1.0` cause: Invalid gzip header",
            "log",
        ),
        ("", "uv fails with exit code 1: no output", "log"),
    ],
)
def test_other_failures(text: str, words: str, remedy: str) -> None:
    error = explained(text)
    assert words in error.message
    assert remedy in (error.remedy or "")


def test_uv_that_hangs() -> None:
    assert "did not end in time" in explained("", timed_out=True).message


@given(st.text())
def test_any_text_is_explained(text: str) -> None:
    explained(text)
    explained(f"{NO_SOLUTION}{text}")


@given(
    st.lists(st.sampled_from(["torch==2", "depends on", "and", "you require", "x>=1,<2", ",", "all versions of", "a"]))
)
def test_any_words_of_uv_are_explained(words: list[str]) -> None:
    explained(f"{NO_SOLUTION}Because {' '.join(words)}")


def test_resolution_with_its_sources() -> None:
    text = (
        "filelock==4.3.1\n    # via torch\n    # from https://h/simple\n"
        "Torch_Vision==2.13.0+cpu\n    # via\n    #   -r in\n    #   -c c.txt\n    # from file:///srv/wheels/\n"
        "x[extra]==1 ; python_version < '4'\n    # from https://u:****@h/simple\n"
    )
    assert parse_resolution(text) == [
        Resolved(name="filelock", version="4.3.1", source="https://h/simple"),
        Resolved(name="torch-vision", version="2.13.0+cpu", source="file:///srv/wheels"),
        Resolved(name="x", version="1", source="https://h/simple"),
    ]


def unsatisfiable(text: str) -> Unsatisfiable:
    return Unsatisfiable("they do not fit", where="/log", remedy="r", text=text)


def test_limits_of_constraint_files(tmp_path: Path) -> None:
    path = tmp_path / "c.txt"
    path.write_text(
        "# comment\n\ntorch<2.10  # why\n-c other.txt\nFlash_Attn==1.0; python_version > '3'\nnot a (requirement\n"
    )
    found = limits((str(path), "https://h/c.txt"))
    assert found == [
        Limit("torch", "torch<2.10", f"{path}:3"),
        Limit("flash-attn", "Flash_Attn==1.0", f"{path}:5"),
    ]
    assert limits((path.as_uri(),)) == found
    with pytest.raises(errors.UsageError, match="cannot read"):
        limits((str(tmp_path / "none.txt"),))


@pytest.mark.parametrize(
    ("constraint", "text", "is_in"),
    [
        ("torch<2.10", "you require torch==2.13.0 and torch<2.10", True),
        ("torch>=2,<2.10", "you require torch==2.13.0 and torch>=2,<2.10", True),
        ("torch<2.10", "you require torchvision==2.13.0 and torch==1", False),
        ("flash-attn<2", "a depends on flash_attn<2", True),
        ("torch<2.1", "you require torch==2.13.0 and numpy<2.1", False),
        ("torch", "you require torch==2.13.0", False),
        ("torch<2.10", "my-torch depends on my-torch<2.10 and torch==2.13.0", False),
    ],
)
def test_the_constraint_that_took_part_is_named(tmp_path: Path, constraint: str, text: str, is_in: bool) -> None:
    path = tmp_path / "c.txt"
    path.write_text(f"{constraint}\n")
    error = blame(unsatisfiable(text), (str(path),))
    assert isinstance(error, Forbidden) is is_in
    if is_in:
        assert f"{constraint} ({path}:1)" in error.message
        assert "they do not fit" in error.message


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ("torch==3", "1 2 4 5 6"),
        ("torch==0.1", "1 2 4 5 6"),
        ("torch==99", "4 5 6 7 8"),
        ("torch==6.5", "4 5 6 7 8"),
        ("torch>=9", "4 5 6 7 8"),
        ("torch==3.*", "4 5 6 7 8"),
        ("torch", "4 5 6 7 8"),
    ],
)
def test_nearest_versions(wanted: str, expected: str) -> None:
    versions = [Version(text) for text in ("1", "2", "4", "5", "6", "7", "8")]
    assert " ".join(str(version) for version in nearest(wanted, versions)) == expected
    assert nearest("torch==3", versions[:2]) == versions[:2]


def test_overlay_page(tmp_path: Path) -> None:
    overlay = Overlay(tmp_path / "overlay")
    url = 'https://h/a%2Bb/x-1+cpu-py3-none-any.whl?sig=1&n="2"'
    made = Offer.of("x", "x-1+cpu-py3-none-any.whl", url, requires_python=">=3.11")
    assert made is not None
    overlay.add([made])
    page = (tmp_path / "overlay" / "x" / "index.html").read_text()
    assert 'href="https://h/a%2Bb/x-1+cpu-py3-none-any.whl?sig=1&amp;n=%222%22"' in page
    assert 'data-requires-python="&gt;=3.11"' in page
    overlay.fetched(made, tmp_path / "x-1+cpu-py3-none-any.whl", "a" * 64, 5)
    page = (tmp_path / "overlay" / "x" / "index.html").read_text()
    assert page.count("<a ") == 1
    assert f"{(tmp_path / 'x-1').as_uri()}%2Bcpu-py3-none-any.whl#sha256={'a' * 64}" in page
    assert overlay.origin(made.filename) == url
    (found,) = overlay.offers("x")
    assert (found.sha256, found.size) == ("a" * 64, 5)

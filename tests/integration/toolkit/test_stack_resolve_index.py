"""Listings of package indexes as ours reads them, and pip's configuration as the real pip tells it."""

import os
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
import requests
from tests.integration.toolkit.local_index import LocalIndex, make_wheel, serving

from sm120 import errors
from sm120.stack.fetch.transport import Transport
from sm120.stack.resolve import index as index_module
from sm120.stack.resolve.index import LARGEST, Offer, linked, offers
from sm120.stack.resolve.pipconfig import PipConfig, read_pip_config


@pytest.fixture
def index(tmp_path: Path) -> Iterator[LocalIndex]:
    with serving(tmp_path / "index") as made:
        yield made


@pytest.fixture
def session() -> Iterator[requests.Session]:
    with Transport(PipConfig(retries=0, timeout=10)).session() as made:
        yield made


def versions(found: tuple[Offer, ...]) -> list[str]:
    return sorted(str(offer.version) for offer in found)


@pytest.mark.parametrize("is_json", [True, False])
def test_listing(index: LocalIndex, session: requests.Session, is_json: bool) -> None:
    index.json = is_json
    wheel = index.wheel("torch", "2.12.0.dev20260307+cu130", tag="cp311-cp311-manylinux_2_28_x86_64")
    index.yanked[index.wheel("torch", "2.11.0").name] = "broken"
    index.wheel("torchvision", "0.27.0")
    (index.files / "torch-2.10.0.tar.gz").write_bytes(b"source")
    found = {str(offer.version): offer for offer in offers(f"{index.url}/", "Torch", session)}
    assert sorted(found) == ["2.11.0", "2.12.0.dev20260307+cu130"]
    offer = found["2.12.0.dev20260307+cu130"]
    assert (offer.filename, offer.url) == (wheel.name, index.file_url(wheel))
    assert offer.size == (wheel.stat().st_size if is_json else None)
    assert offer.uploaded == (datetime(2026, 3, 7, 8, tzinfo=UTC) if is_json else None)
    assert len(offer.sha256 or "") == 64
    assert [version for version, offer in found.items() if offer.yanked] == ["2.11.0"]
    index.hashes = False
    assert {offer.sha256 for offer in offers(index.url, "torch", session)} == {None}


def test_what_an_index_does_not_have(index: LocalIndex, session: requests.Session, tmp_path: Path) -> None:
    assert offers(index.url, "torch", session) == ()
    assert offers((tmp_path / "none").as_uri(), "torch", session) == ()
    index.listings["torch"] = b"<!DOCTYPE html><html><body></body></html>"
    with pytest.raises(errors.PreflightError, match="lists no files"):
        offers(index.url, "torch", session)


@pytest.mark.parametrize(
    ("listing", "words"),
    [
        (b"<html>please log in</html>", "a page that lists no files"),
        (b"\x00\xff\xfe\x00 garbage", "a page that lists no files"),
        (b'<a href="//[">torch-1.0-py3-none-any.whl</a>', "cannot be understood"),
        (
            b'<meta name="pypi:repository-version" content="9.0"><a href="x">x</a>',
            "a later version of the index protocol",
        ),
    ],
)
def test_listings_that_are_none(index: LocalIndex, session: requests.Session, listing: bytes, words: str) -> None:
    index.listings["torch"] = listing
    with pytest.raises(errors.PreflightError) as raised:
        offers(index.url, "torch", session)
    assert words in raised.value.message
    assert f"{index.url}/torch/" in raised.value.message


def test_links_that_are_no_wheels_are_passed_over(index: LocalIndex, session: requests.Session) -> None:
    index.listings["torch"] = (
        b'<a href="x.whl">torch-1.0-py3-none-any.whl</a> <a href="y">readme</a> <a>z</a>'
        b'<a href="o-1-py3-none-any.whl">o-1-py3-none-any.whl</a> <a href="../../torch-x.whl">torch-x.whl</a>'
    )
    assert versions(offers(index.url, "torch", session)) == ["1.0"]


def test_a_listing_without_end(index: LocalIndex, session: requests.Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "LARGEST", 100_000)
    index.listings["torch"] = b"<a>" * 100_000
    with pytest.raises(errors.PreflightError, match="larger than"):
        offers(index.url, "torch", session)
    assert LARGEST > 10**7


def test_a_listing_that_drips(index: LocalIndex, session: requests.Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "SECONDS", 0.5)
    stop = threading.Event()

    def drip(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.send_header("Content-Type", "text/html")
        request.send_header("Content-Length", str(2**40))
        request.end_headers()
        try:
            while not stop.wait(0.01):
                request.wfile.write(b" " * 2**16)
        except OSError:
            request.close_connection = True

    monkeypatch.setattr(index, "answer", drip)
    with pytest.raises(errors.PreflightError, match=r"did not come within|larger than"):
        offers(index.url, "torch", session)
    stop.set()


def test_folder_and_page_of_links(index: LocalIndex, session: requests.Session, tmp_path: Path) -> None:
    make_wheel(tmp_path / "wheels", "ml-dtypes", "0.7.0")
    make_wheel(tmp_path / "wheels", "torch", "2.13.0")
    for place in (str(tmp_path / "wheels"), (tmp_path / "wheels").as_uri()):
        (offer,) = linked(place, "ML_Dtypes", session)
        assert (offer.name, str(offer.version), offer.sha256) == ("ml-dtypes", "0.7.0", None)
    index.wheel("torch", "2.13.0")
    assert versions(linked(f"{index.url}/torch/", "torch", session)) == ["2.13.0"]
    assert linked(f"{index.root}/nothing", "torch", session) == ()


@pytest.fixture
def pip_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user folder for pip's files, and no variables but what the test sets."""
    for name in list(os.environ):
        if name.startswith("PIP_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_DIRS", str(tmp_path / "xdg"))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    (tmp_path / ".config" / "pip").mkdir(parents=True)
    (tmp_path / "xdg" / "pip").mkdir(parents=True)
    (tmp_path / "wheels").mkdir()
    return tmp_path


def test_configuration_as_pip_tells_it(pip_files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (pip_files / "xdg" / "pip" / "pip.conf").write_text("[global]\nindex-url = https://all.example.org/simple\n")
    (pip_files / ".config" / "pip" / "pip.conf").write_text(
        "[global]\nindex-url = https://me:s3cret%25word@mine.example.org/simple\n"
        "extra-index-url =\n    https://a.example.org/simple\n    https://b.example.org/simple\n"
        f"find-links = {pip_files / 'wheels'} {pip_files / 'gone'}\n[install]\ntrusted-host = a.example.org\n"
    )
    (pip_files / "c.txt").touch()
    monkeypatch.setenv("PIP_CONSTRAINT", str(pip_files / "c.txt"))
    monkeypatch.setenv("PIP_RETRIES", "2")
    monkeypatch.setenv("PIP_PROXY", "proxy:3128")
    made = read_pip_config()
    # The user's file wins over the system's; the listing alone would not say so.
    assert made.index_url == "https://me:s3cret%25word@mine.example.org/simple"
    assert made.credentials() == {"mine.example.org": ("me", "s3cret%word")}
    assert made.extra_index_urls == ("https://a.example.org/simple", "https://b.example.org/simple")
    assert made.find_links == (str(pip_files / "wheels"),)
    assert made.constraints == (str(pip_files / "c.txt"),)
    assert (made.trusted_hosts, made.retries, made.proxy) == (("a.example.org",), 2, "http://proxy:3128")


def test_file_that_is_named_wins_whatever_its_path(pip_files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The listing is sorted by path, so the first and the last of a key may be either."""
    for name in ("a.conf", "zz.conf"):
        (pip_files / name).write_text(f"[global]\nindex-url = https://{name}.example.org/\n")
        (pip_files / "xdg" / "pip" / "pip.conf").write_text("[global]\nindex-url = https://all.example.org/\n")
        monkeypatch.setenv("PIP_CONFIG_FILE", str(pip_files / name))
        assert read_pip_config().index_url == f"https://{name}.example.org/"


@pytest.mark.parametrize("key", ["cert", "client-cert", "constraint"])
def test_a_file_that_pip_is_told_of_and_that_is_not_there(
    pip_files: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv(f"PIP_{key.upper().replace('-', '_')}", "/nowhere/file")
    with pytest.raises(errors.PreflightError, match=f"pip's {key} is /nowhere/file, which does not exist"):
        read_pip_config()


def test_configuration_that_pip_cannot_read(pip_files: Path) -> None:
    (pip_files / ".config" / "pip" / "pip.conf").write_text("index-url = no section\n")
    with pytest.raises(errors.PreflightError, match="pip config list fails") as raised:
        read_pip_config()
    assert "pip config debug" in (raised.value.remedy or "")

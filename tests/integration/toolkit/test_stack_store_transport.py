"""Certificates, proxies and credentials as pip has them, against servers on loopback."""

import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
from requests.utils import DEFAULT_CA_BUNDLE_PATH
from tests.integration.toolkit.file_server import FileServer, serving

from sm120.stack.fetch.transport import Transport
from sm120.stack.resolve.pipconfig import PipConfig


@pytest.fixture(autouse=True)
def _nothing_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "NO_PROXY", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no netrc"))


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A key and a certificate of 127.0.0.1, signed by itself, in one file."""
    folder = tmp_path_factory.mktemp("tls")
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"]
    words += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "key.pem", "-out", "cert.pem"]
    try:
        subprocess.run(words, cwd=folder, check=True, capture_output=True)
    except OSError:
        pytest.skip("no openssl here")
    both = folder / "both.pem"
    both.write_text((folder / "key.pem").read_text() + (folder / "cert.pem").read_text())
    return both


def context(pem: Path, *, client: bool = False) -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.load_cert_chain(pem)
    if client:
        made.load_verify_locations(pem)
        made.verify_mode = ssl.CERT_REQUIRED
    return made


@pytest.fixture
def secure(pem: Path) -> Iterator[FileServer]:
    with serving(context(pem)) as made:
        made.files["a"] = b"data"
        yield made


def get(url: str, config: PipConfig) -> bytes:
    with Transport(config).session() as session:
        response = session.get(url)
        response.raise_for_status()
        return response.content


def config(
    *,
    cert: Path | None = None,
    client_cert: Path | None = None,
    proxy: str | None = None,
    trusted_hosts: tuple[str, ...] = (),
    extra: tuple[str, ...] = (),
) -> PipConfig:
    return PipConfig(
        cert=str(cert) if cert else None,
        client_cert=str(client_cert) if client_cert else None,
        proxy=proxy,
        trusted_hosts=trusted_hosts,
        extra_index_urls=extra,
        timeout=10,
        retries=0,
    )


def test_a_certificate_must_be_trusted(secure: FileServer, pem: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(requests.exceptions.SSLError):
        get(secure.url("a"), config())
    assert get(secure.url("a"), config(cert=pem)) == b"data"
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", DEFAULT_CA_BUNDLE_PATH)
    assert get(secure.url("a"), config(cert=pem)) == b"data"  # pip's own setting wins
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(pem))
    assert get(secure.url("a"), config()) == b"data"  # without one, the variable counts, as with pip


def test_a_trusted_host_may_have_any_certificate(secure: FileServer) -> None:
    for host in ("127.0.0.1", f"127.0.0.1:{secure.port}"):
        assert get(secure.url("a"), config(trusted_hosts=(host,))) == b"data"
    for host in ("127.0.0.2", f"127.0.0.1:{secure.port + 1}", "127.0.0"):
        with pytest.raises(requests.exceptions.SSLError):
            get(secure.url("a"), config(trusted_hosts=(host,)))


def test_a_client_certificate_is_shown(pem: Path) -> None:
    with serving(context(pem, client=True)) as server:
        server.files["a"] = b"data"
        with pytest.raises(requests.exceptions.ConnectionError):
            get(server.url("a"), config(cert=pem))
        assert get(server.url("a"), config(cert=pem, client_cert=pem)) == b"data"


def test_pips_proxy_is_used_and_wins_over_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as proxy, serving() as other:
        proxy.files["http://index.invalid/a"] = b"by proxy"
        assert get("http://index.invalid/a", config(proxy=proxy.url())) == b"by proxy"
        monkeypatch.setenv("HTTP_PROXY", other.url())
        monkeypatch.setenv("http_proxy", other.url())
        assert get("http://index.invalid/a", config(proxy=proxy.url())) == b"by proxy"
        assert other.requests == []
        other.files["http://index.invalid/a"] = b"by the environment"
        assert get("http://index.invalid/a", config()) == b"by the environment"


def test_credentials_are_not_sent_in_the_clear_after_a_redirect(secure: FileServer, pem: Path) -> None:
    with serving() as plain:
        plain.files["a"] = b"data"
        secure.redirect = plain.url()[:-1]
        urls = (
            secure.url("simple").replace("://", "://someone:staple@"),
            f"http://someone:staple@127.0.0.1:{plain.port}/",
        )
        assert get(secure.url("a"), config(cert=pem, extra=urls)) == b"data"
        assert "authorization" in secure.requests[0][1]
        assert "authorization" not in plain.requests[0][1]
        assert get(plain.url("a"), config(extra=urls)) == b"data"  # asked for in the clear, they are
        assert "authorization" in plain.requests[1][1]


def test_credentials_of_a_url_and_of_a_host_with_a_port() -> None:
    with serving() as server:
        server.files["a"] = b"data"
        server.user = ("some one", "sta/ple")
        url = server.url("a").replace("://", "://some%20one:sta%2Fple@")
        assert get(url, config()) == b"data"
        assert get(server.url("a"), config(extra=(url,))) == b"data"
        other = url.replace(f":{server.port}", ":1")
        with pytest.raises(requests.exceptions.HTTPError):
            get(server.url("a"), config(extra=(other,)))

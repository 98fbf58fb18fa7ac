import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sm120 import errors
from sm120.stack.resolve.pipconfig import PipConfig, bare, parse_listing, translate

HOME, CWD = Path("/home/me"), Path("/here")


def config(**values: str) -> PipConfig:
    """From keys as in ``global__index_url``."""
    listed = {}
    for key, value in values.items():
        section, _, name = key.partition("__")
        listed[f"{':env:' if section == 'env' else section}.{name.replace('_', '-')}"] = value
    return translate(listed, home=HOME, cwd=CWD)


def test_listing_as_pip_prints_it() -> None:
    lines = [
        ":env:.cert='/etc/ssl/certs/ca.crt'",
        "",
        "global.extra-index-url='https://a/simple\\nfile:///b'",
        'global.proxy="it\'s"',
        "global.cert='/other'",
        "global.cert='/third'",
    ]
    assert parse_listing(lines) == {
        ":env:.cert": ["/etc/ssl/certs/ca.crt"],
        "global.extra-index-url": ["https://a/simple\nfile:///b"],
        "global.proxy": ["it's"],
        "global.cert": ["/other", "/third"],
    }


@pytest.mark.parametrize("line", ["WARNING: something", "a.b=unquoted", "a.b=5", "nodot='x'", "a.b=" + "(" * 10_000])
def test_a_line_that_pip_does_not_print(line: str) -> None:
    with pytest.raises(errors.PreflightError, match="a line that is none of its own"):
        parse_listing([line])


@given(st.dictionaries(st.from_regex(r"[a-z]+\.[a-z-]+", fullmatch=True), st.text(), max_size=5))
def test_any_value_comes_back(values: dict[str, str]) -> None:
    lines = [f"{key}={value!r}" for key, value in values.items()]
    assert parse_listing(lines) == {key: [value] for key, value in values.items()}


@given(st.lists(st.text(max_size=60), max_size=5))
def test_any_lines_are_read_or_explained(lines: list[str]) -> None:
    with contextlib.suppress(errors.PreflightError):
        parse_listing(lines)


def test_nothing_is_configured() -> None:
    empty = config()
    assert empty == PipConfig()
    assert empty.index_urls == (None,)
    assert empty.uv_words() == ["--index-strategy", "unsafe-best-match"]
    assert empty.credentials() == {}


def test_everything_is_configured() -> None:
    full = config(
        global__index_url="https://u:p%40ss@a.org:8080/simple",
        global__extra_index_url="https://b.org/simple  file:///c\nsub/d",
        global__find_links="/srv/wheels ~/wheels wheels https://e.org/links.html",
        global__constraint="/etc/c.txt https://f.org/c.txt",
        global__cert="~/ca.pem",
        global__client_cert="client.pem",
        global__proxy="proxy.org:3128",
        global__trusted_host="a.org b.org:444",
        global__timeout="12.5",
        global__retries="7",
        global__keyring_provider="import",
        global__no_cache_dir="true",
    )
    assert full == PipConfig(
        index_url="https://u:p%40ss@a.org:8080/simple",
        extra_index_urls=("https://b.org/simple", "file:///c", "file:///here/sub/d"),
        find_links=("/srv/wheels", "/home/me/wheels", "/here/wheels", "https://e.org/links.html"),
        constraints=("/etc/c.txt", "https://f.org/c.txt"),
        cert="/home/me/ca.pem",
        client_cert="/here/client.pem",
        proxy="http://proxy.org:3128",
        trusted_hosts=("a.org", "b.org:444"),
        timeout=12.5,
        retries=7,
        keyring="import",
    )
    assert full.credentials() == {"a.org:8080": ("u", "p@ss")}
    assert full.uv_words() == [
        *("--index-strategy", "unsafe-best-match"),
        *("--find-links", "/srv/wheels", "--find-links", "/home/me/wheels"),
        *("--find-links", "/here/wheels", "--find-links", "https://e.org/links.html"),
        *("--constraints", "/etc/c.txt", "--constraints", "https://f.org/c.txt"),
        *("--allow-insecure-host", "a.org", "--allow-insecure-host", "b.org:444"),
        *("--keyring-provider", "subprocess"),
    ]
    env = full.uv_environment({"PATH": "/bin", "no_proxy": "a.org", "https_proxy": "http://other"})
    assert env == {
        "PATH": "/bin",
        "UV_NO_CONFIG": "1",
        "UV_PYTHON_DOWNLOADS": "never",
        "UV_NO_PROGRESS": "1",
        "NO_COLOR": "1",
        "COLUMNS": "10000",
        "UV_DEFAULT_INDEX": "https://u:p%40ss@a.org:8080/simple",
        "UV_INDEX": "https://b.org/simple file:///c file:///here/sub/d",
        "UV_HTTP_TIMEOUT": "13",
        "UV_HTTP_RETRIES": "7",
        "SSL_CERT_FILE": "/home/me/ca.pem",
        "SSL_CLIENT_CERT": "/here/client.pem",
        "HTTP_PROXY": "http://proxy.org:3128",
        "HTTPS_PROXY": "http://proxy.org:3128",
        "ALL_PROXY": "http://proxy.org:3128",
    }


def test_words_hold_no_password() -> None:
    secret = config(global__index_url="https://u:hunter2@a/", global__extra_index_url="https://u:hunter2@b/")
    assert "hunter2" not in " ".join(secret.uv_words())
    assert secret.sources == ("https://***@a/", "https://***@b/")


def test_what_wins() -> None:
    both = {"global__index_url": "https://global/", "install__index_url": "https://install/"}
    assert config(**both).index_url == "https://install/"
    assert config(**both, env__index_url="https://env/").index_url == "https://env/"
    assert config(**both, env__index_url="").index_url == "https://install/"
    assert config(global__index_url="https://global/", download__index_url="https://d/").index_url == "https://global/"
    assert config(
        global__extra_index_url="https://a/ https://b/", env__extra_index_url="https://c/"
    ).extra_index_urls == ("https://c/",)


def test_other_names_of_an_option() -> None:
    assert config(env__default_timeout="180").timeout == 180.0
    assert config(global__pypi_url="https://a/").index_url == "https://a/"


@pytest.mark.parametrize(("text", "value"), [("true", True), ("Yes", True), ("1", True), ("off", False), ("0", False)])
def test_no_index(text: str, value: bool) -> None:
    made = config(global__no_index=text, global__index_url="https://a/")
    assert made.no_index is value
    assert ("--no-index" in made.uv_words()) is value
    assert made.index_urls == (() if value else ("https://a/",))


@pytest.mark.parametrize(
    ("key", "text", "words"),
    [
        ("global__no_index", "perhaps", "no-index must be yes or no, not 'perhaps'"),
        ("global__timeout", "soon", "timeout must be a number from 0, not 'soon'"),
        ("global__timeout", "nan", "timeout must be a number"),
        ("env__default_timeout", "-1", "timeout must be a number"),
        ("global__retries", "inf", "retries must be a number"),
        ("global__index_url", "https://[half", "is no URL"),
    ],
)
def test_values_without_sense(key: str, text: str, words: str) -> None:
    with pytest.raises(errors.PreflightError) as raised:
        config(**{key: text})
    assert words in raised.value.message
    assert "pip config" in (raised.value.remedy or "")


def test_uv_variables_that_change_what_is_installed_are_left_out() -> None:
    base = {
        "UV_INDEX_URL": "https://evil/",
        "UV_EXCLUDE_NEWER": "2001-01-01",
        "UV_CONFIG_FILE": "/x",
        "UV_OVERRIDE": "/x",
        "UV_TORCH_BACKEND": "cpu",
        "UV_PYTHON": "3.9",
        "VIRTUAL_ENV": "/venv",
        "CONDA_PREFIX": "/conda",
        "PYTHONPATH": "/x",
        "UV_KEYRING_PROVIDER": "subprocess",
        "UV_HTTP_TIMEOUT": "99",
        "HTTPS_PROXY": "http://p",
        "SSL_CERT_FILE": "/ca.pem",
        "NETRC": "/netrc",
    }
    env = PipConfig().uv_environment(base)
    kept = {"UV_KEYRING_PROVIDER", "UV_HTTP_TIMEOUT", "HTTPS_PROXY", "SSL_CERT_FILE", "NETRC"}
    assert {name: env[name] for name in kept} == {name: base[name] for name in kept}
    assert not (set(base) - kept) & set(env)


def test_certificates(tmp_path: Path) -> None:
    assert PipConfig().uv_environment({})["UV_SYSTEM_CERTS"] == "true"  # as pip does by default
    assert PipConfig().uv_environment({"REQUESTS_CA_BUNDLE": "/r.pem"})["SSL_CERT_FILE"] == "/r.pem"
    named = PipConfig(cert="/c.pem").uv_environment({"REQUESTS_CA_BUNDLE": "/r.pem", "SSL_CERT_FILE": "/s.pem"})
    assert named["SSL_CERT_FILE"] == "/c.pem"
    assert PipConfig(cert=str(tmp_path)).uv_environment({})["SSL_CERT_DIR"] == str(tmp_path)


@given(st.text("abc:@/%[]", max_size=20))
def test_bare_has_no_user(rest: str) -> None:
    assert bare(f"https://u:p@h/{rest}") == f"https://h/{rest}"
    assert bare(f"https://h/{rest}") == f"https://h/{rest}"


KEYS = st.sampled_from(
    [
        *(
            "index-url",
            "extra-index-url",
            "find-links",
            "constraint",
            "no-index",
            "cert",
            "proxy",
            "timeout",
            "retries",
        ),
        *("trusted-host", "keyring-provider", "pypi-url", "default-timeout", "unknown"),
    ]
)
SECTIONS = st.sampled_from(["global", "install", ":env:", "freeze"])


@given(st.dictionaries(st.builds("{}.{}".format, SECTIONS, KEYS), st.text(), max_size=8))
def test_any_configuration_is_translated_or_explained(listed: dict[str, str]) -> None:
    with contextlib.suppress(errors.PreflightError):
        made = translate(listed, home=HOME, cwd=CWD)
        made.credentials()
        assert all(word.strip() for word in made.uv_words())
        assert all(value.strip() for value in made.uv_environment({}).values())

"""The machine's pip configuration, and the same in uv's terms: uv does not read it.

``read_pip_config`` asks pip itself, which merges its files and variables; all the rest is a pure translation.
"""

import ast
import math
import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit, urlunsplit

from sm120 import errors, redact

SECONDS = 60.0  # for pip to print its configuration
_TIMEOUT = 15.0  # pip's defaults, in seconds and attempts
_RETRIES = 5
_SECTIONS = ("global", "install", ":env:")  # later ones win
_ALIASES = {"default-timeout": "timeout", "pypi-url": "index-url"}
_TRUE = {"y", "yes", "t", "true", "on", "1"}
_FALSE = {"n", "no", "f", "false", "off", "0"}
_REMEDY = "see pip config list and pip config debug; correct the file or the variable, then run the same command again"

# What uv keeps of the user's own uv variables: how to reach and authenticate, never what or where.
_KEPT = {
    *("UV_HTTP_TIMEOUT", "UV_HTTP_CONNECT_TIMEOUT", "UV_HTTP_RETRIES", "UV_CONCURRENT_DOWNLOADS"),
    *("UV_CONCURRENT_BUILDS", "UV_CREDENTIALS_DIR", "UV_KEYRING_PROVIDER", "UV_INSECURE_HOST", "UV_SYSTEM_CERTS"),
}
# What would make another Python, or another environment, than the one that is named.
_ELSEWHERE = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX"}
_PROXIES = {"HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"}


@dataclass(frozen=True, kw_only=True)
class PipConfig:
    index_url: str | None = None  # None: the default of pip and of uv, which is the same
    extra_index_urls: tuple[str, ...] = ()
    find_links: tuple[str, ...] = ()  # URLs and absolute paths
    constraints: tuple[str, ...] = ()  # URLs and absolute paths of files
    no_index: bool = False
    cert: str | None = None  # a file, or a folder, of authorities
    client_cert: str | None = None
    proxy: str | None = None
    trusted_hosts: tuple[str, ...] = ()  # host or host:port
    timeout: float = _TIMEOUT  # seconds
    retries: int = _RETRIES
    keyring: str | None = None  # pip's keyring-provider

    @property
    def index_urls(self) -> tuple[str | None, ...]:
        """Every configured index; None stands for the default one."""
        return () if self.no_index else (self.index_url, *self.extra_index_urls)

    @property
    def sources(self) -> tuple[str, ...]:
        """The configured places, in words and without credentials."""
        indexes = [redact.redact(url) if url else "the default package index" for url in self.index_urls]
        return (*indexes, *(redact.redact(link) for link in self.find_links))

    def credentials(self) -> dict[str, tuple[str, str]]:
        """User and password by host, or by host:port where a port is named. Never written anywhere."""
        found: dict[str, tuple[str, str]] = {}
        for url in (self.index_url or "", *self.extra_index_urls, *self.find_links, *self.constraints):
            parts = _split(url)
            user, at, host = parts.netloc.rpartition("@")
            if at:
                name, _, password = user.partition(":")
                found.setdefault(host.lower(), (unquote(name), unquote(password)))
        return found

    def uv_words(self) -> list[str]:
        """Flags of ``uv pip compile``. Indexes are in ``uv_environment``: every user can read a command's words."""
        words = ["--index-strategy", "unsafe-best-match"]  # pip takes the best of all indexes too
        if self.no_index:
            words.append("--no-index")
        for link in self.find_links:
            words += ["--find-links", link]
        for constraint in self.constraints:
            words += ["--constraints", constraint]
        for host in self.trusted_hosts:
            words += ["--allow-insecure-host", host]
        if self.keyring in {"subprocess", "import"}:  # uv has only the command; pip's default asks for none either
            words += ["--keyring-provider", "subprocess"]
        return words

    def uv_environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """The whole environment for uv, made of ours: no uv configuration but how to reach and authenticate."""
        env = {k: v for k, v in base.items() if (not k.startswith("UV_") or k in _KEPT) and k not in _ELSEWHERE}
        env |= {"UV_NO_CONFIG": "1", "UV_PYTHON_DOWNLOADS": "never", "UV_NO_PROGRESS": "1", "NO_COLOR": "1"}
        env["COLUMNS"] = "10000"  # uv breaks its lines by it, and its errors are read line by line
        if self.index_url is not None:
            env["UV_DEFAULT_INDEX"] = self.index_url
        if self.extra_index_urls:
            env["UV_INDEX"] = " ".join(self.extra_index_urls)
        env.setdefault("UV_HTTP_TIMEOUT", str(max(1, math.ceil(self.timeout))))
        env.setdefault("UV_HTTP_RETRIES", str(self.retries))
        env |= self._certificates(base)
        if self.client_cert:
            env["SSL_CLIENT_CERT"] = self.client_cert
        if self.proxy:  # pip then ignores the environment's proxies, exceptions included
            env = {k: v for k, v in env.items() if k.upper() not in _PROXIES}
            env |= dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), self.proxy)
        return env

    def _certificates(self, base: Mapping[str, str]) -> dict[str, str]:
        named = self.cert or base.get("REQUESTS_CA_BUNDLE") or base.get("CURL_CA_BUNDLE")
        if named is None:
            # pip asks the system's store by default; uv would ask the one that is built into it.
            return {} if base.get("SSL_CERT_FILE") or base.get("SSL_CERT_DIR") else {"UV_SYSTEM_CERTS": "true"}
        return {"SSL_CERT_DIR" if Path(named).is_dir() else "SSL_CERT_FILE": named}


def read_pip_config() -> PipConfig:
    """What pip says its configuration is. Raises PreflightError when it cannot, or when that makes no sense."""
    lines = _pip("list")
    listed = parse_listing(lines)
    settled = {key: values[0] for key, values in listed.items()}
    for key, values in listed.items():
        if len(set(values)) > 1:  # in several files; the listing does not say which of them wins
            settled[key] = "\n".join(_pip("get", key))
    config = translate(settled, home=Path.home(), cwd=Path.cwd())
    for key, place in (
        ("cert", config.cert),
        ("client-cert", config.client_cert),
        *(("constraint", c) for c in config.constraints),
    ):
        if place is not None and place.startswith("/") and not Path(place).exists():
            raise _error(f"pip's {key} is {place}, which does not exist")
    # pip passes over a folder that is not there; uv refuses it.
    return replace(config, find_links=tuple(x for x in config.find_links if not x.startswith("/") or Path(x).exists()))


def parse_listing(lines: Iterable[str]) -> dict[str, list[str]]:
    """``section.key`` → its values, from lines as in ``global.index-url='https://…'``."""
    found: dict[str, list[str]] = {}
    for line in lines:
        key, equals, text = line.partition("=")
        if not line.strip():
            continue
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            value = None
        if not equals or "." not in key or not isinstance(value, str):
            raise _error(f"pip config list prints a line that is none of its own: {line[:200]!r}")
        found.setdefault(key, []).append(value)
    return found


def translate(listed: Mapping[str, str], *, home: Path, cwd: Path) -> PipConfig:
    """The configuration of ``pip install``: its own section over the global one, and variables over both."""
    values: dict[str, str] = {}
    for section in _SECTIONS:
        for full, value in listed.items():
            prefix, _, key = full.rpartition(".")
            if prefix == section and value.strip():  # pip passes over empty ones
                values[_ALIASES.get(key, key)] = value.strip()
    proxy = values.get("proxy")
    return PipConfig(
        index_url=_index(values["index-url"], home, cwd) if "index-url" in values else None,
        extra_index_urls=tuple(_index(url, home, cwd) for url in _words(values, "extra-index-url")),
        find_links=tuple(_place(link, home, cwd) for link in _words(values, "find-links")),
        constraints=tuple(_place(file, home, cwd) for file in _words(values, "constraint")),
        no_index=_flag(values, "no-index"),
        cert=_path(values, "cert", home, cwd),
        client_cert=_path(values, "client-cert", home, cwd),
        proxy=proxy if proxy is None or "://" in proxy else f"http://{proxy}",
        trusted_hosts=tuple(_words(values, "trusted-host")),
        timeout=_number(values, "timeout", _TIMEOUT),
        retries=int(_number(values, "retries", _RETRIES)),
        keyring=values.get("keyring-provider"),
    )


def bare(url: str) -> str:
    """The URL without user name and password."""
    parts = _split(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2])) if "@" in parts.netloc else url


def _pip(*words: str) -> list[str]:
    """The lines that ``pip config`` prints. Not by ``process.run``: it masks passwords, which are needed here."""
    import subprocess

    argv = [sys.executable, "-I", "-m", "pip", "--disable-pip-version-check", "config", *words]
    env = {k: v for k, v in os.environ.items() if k not in {"PIP_QUIET", "PIP_VERBOSE", "PIP_LOG", "PIP_PYTHON"}}
    asked = f"pip config {' '.join(words)}"
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, errors="replace", timeout=SECONDS, env=env, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise _error(f"{asked} did not end within {SECONDS:.0f} s") from error
    if done.returncode:
        said = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        raise _error(f"{asked} fails: {redact.redact(said[-1]) if said else 'no output'}")
    return done.stdout.splitlines()


def _error(message: str) -> errors.PreflightError:
    return errors.PreflightError(message, where="the machine's pip configuration", remedy=_REMEDY)


def _split(url: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError as error:
        raise _error(f"{redact.redact(url)!r} is no URL: {error}") from error


def _words(values: Mapping[str, str], key: str) -> list[str]:
    return values.get(key, "").split()


def _place(text: str, home: Path, cwd: Path) -> str:
    """A URL as it is; a path made absolute, as pip reads it."""
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:", text):
        _split(text)
        return text
    if text == "~" or text.startswith("~/"):
        return str(home / text[2:])
    return str(cwd / text)


def _index(text: str, home: Path, cwd: Path) -> str:
    place = _place(text, home, cwd)
    return Path(place).as_uri() if place.startswith("/") else place


def _path(values: Mapping[str, str], key: str, home: Path, cwd: Path) -> str | None:
    return _place(values[key], home, cwd) if key in values else None


def _flag(values: Mapping[str, str], key: str) -> bool:
    text = values.get(key, "no").lower()
    if text not in _TRUE | _FALSE:
        raise _error(f"pip's {key} must be yes or no, not {values[key]!r}")
    return text in _TRUE


def _number(values: Mapping[str, str], key: str, default: float) -> float:
    try:
        number = float(values.get(key, default))
    except ValueError:
        number = math.nan
    if not 0 <= number < 10**6:  # false for what is no number as well
        raise _error(f"pip's {key} must be a number from 0, not {values[key]!r}")
    return number

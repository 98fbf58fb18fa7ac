"""Keeps secrets out of records: credentials in URLs, tokens, and values of secret environment variables."""

import os
import re
from collections.abc import Callable, Iterable, Mapping

MASK = "***"

# Whole words of a name: HF_TOKEN and accessToken hold a secret; tokenizer, max_tokens and PWD do not.
_SECRET_NAME = re.compile(
    r"passw(?:or)?d|passphrase|_pwd|(?:^|_)(?:token|secrets?|credentials?|pat|(?:api|access|private|auth)_?key)(?:_|\d|$)"
)
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
# A URL's user part reaches to the last @ before the path: a password may hold an unescaped @.
_URL_USER = re.compile(r"(?<=://)[^\s/?#'\"<>]+@")
_QUERY = re.compile(
    r"([?&](?:[\w.-]*(?:token|secret|signature|password|credential|api_?key)[\w.-]*)=)[^\s&#'\"]+", re.IGNORECASE
)
_HEADER = re.compile(r"(authorization['\"]?\s*[:=]\s*['\"]?(?:bearer|basic|token)?\s*)[\w.~+/=-]{6,}", re.IGNORECASE)
_BEARER = re.compile(r"(\bbearer\s+)[\w.~+/=-]{6,}", re.IGNORECASE)
_TOKENS = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|nvapi-[\w-]{20,}"
    r"|sk-[A-Za-z0-9_-]{20,}|pypi-[\w-]{20,}|AKIA[0-9A-Z]{16})"
)
_SHORTEST_SECRET = 8
_FLAG = re.compile(r"^--?([\w-]+)(?:=(.*))?$", re.DOTALL)


def is_secret_name(name: str) -> bool:
    words = _CAMEL.sub("_", name).replace("-", "_").replace(".", "_").lower()
    return _SECRET_NAME.search(words) is not None


def _secret_values(env: Mapping[str, str]) -> list[str]:
    values = {v for k, v in env.items() if is_secret_name(k) and len(v) >= _SHORTEST_SECRET}
    return sorted(values, key=len, reverse=True)


def redact(text: str) -> str:
    """The text without URL credentials, tokens, and values of this process's secret environment variables."""
    return _mask(text, _secret_values(os.environ))


def redactor(env: Mapping[str, str]) -> Callable[[str], str]:
    """``redact`` for many lines of a process that runs with ``env``."""
    values = _secret_values({**os.environ, **env})
    return lambda text: _mask(text, values)


def _mask(text: str, values: list[str]) -> str:
    if "://" in text:
        text = _URL_USER.sub(MASK + "@", text)
        text = _QUERY.sub(rf"\g<1>{MASK}", text)
    lower = text.lower()
    if "authorization" in lower or "bearer" in lower:
        text = _HEADER.sub(rf"\g<1>{MASK}", text)
        text = _BEARER.sub(rf"\g<1>{MASK}", text)
    text = _TOKENS.sub(MASK, text)
    for value in values:
        text = text.replace(value, MASK)
    return text


def redact_json(value: object) -> object:
    """A copy of a JSON value in which every string is redacted, and whatever stands under a secret's name is masked."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {
            redact(str(k)): MASK if is_secret_name(str(k)) and isinstance(v, str) and v else redact_json(v)
            for k, v in value.items()
        }
    if isinstance(value, list | tuple):
        return [redact_json(item) for item in value]
    return value


def redact_argv(argv: Iterable[str]) -> list[str]:
    """Command words without secrets: ``--token X`` and ``--token=X`` are masked by the flag's name."""
    words: list[str] = []
    mask_next = False
    for word in argv:
        flag = _FLAG.match(word)
        if mask_next and flag is None:
            words.append(MASK)
        elif flag is not None and flag[2] is not None and is_secret_name(flag[1]):
            words.append(f"{word[: word.index('=')]}={MASK}")
        else:
            words.append(redact(word))
        mask_next = flag is not None and flag[2] is None and is_secret_name(flag[1])
    return words


def redact_env(env: Mapping[str, str]) -> dict[str, str]:
    return {k: MASK if is_secret_name(k) and v else redact(v) for k, v in env.items()}

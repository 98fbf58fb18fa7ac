import pytest
from hypothesis import given
from hypothesis import strategies as st

from sm120 import redact


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://user:pass@host/simple", "https://***@host/simple"),
        ("https://token@host/simple", "https://***@host/simple"),
        ("https://user:p@ss@host/x@y", "https://***@host/x@y"),
        ("git+ssh://git:secret@host/repo and https://a:b@c", "git+ssh://***@host/repo and https://***@c"),
        ("https://host/f?token=abc123&x=1", "https://host/f?token=***&x=1"),
        ("https://host/f?X-Amz-Signature=abc&y=2", "https://host/f?X-Amz-Signature=***&y=2"),
        ("Authorization: Bearer abcdef0123456789", "Authorization: Bearer ***"),
        ("HF key hf_abcdefghijklmnopqrst end", "HF key *** end"),
        ("ghp_" + "a" * 36, "***"),
        ("nothing to hide: a@b.c, 12:34@5", "nothing to hide: a@b.c, 12:34@5"),
        ("https://host/path", "https://host/path"),
    ],
)
def test_text(text: str, expected: str) -> None:
    assert redact.redact(text) == expected


def test_value_of_a_secret_variable_is_masked_wherever_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "correct-horse-battery")
    assert redact.redact("sent correct-horse-battery twice: correct-horse-battery") == "sent *** twice: ***"
    assert redact.redactor({"DB_PASSWORD": "staple-staple"})("staple-staple correct-horse-battery") == "*** ***"


def test_working_folder_is_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PWD", "/home/someone/checkout")
    assert redact.redact("/home/someone/checkout/src") == "/home/someone/checkout/src"


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "GITHUB_TOKEN", "accessToken", "api-key", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD"]
)
def test_secret_names(name: str) -> None:
    assert redact.is_secret_name(name)


@pytest.mark.parametrize(
    "name", ["tokenizer", "max_tokens", "PWD", "OLDPWD", "PATH", "keyboard", "TOKENIZERS_PARALLELISM"]
)
def test_names_that_are_no_secrets(name: str) -> None:
    assert not redact.is_secret_name(name)


def test_json_is_masked_in_depth() -> None:
    value = {"env": {"HF_TOKEN": "abc", "max_tokens": 5}, "urls": ["https://u:p@h/"], "n": 1.5, "none": None}
    assert redact.redact_json(value) == {
        "env": {"HF_TOKEN": "***", "max_tokens": 5},
        "urls": ["https://***@h/"],
        "n": 1.5,
        "none": None,
    }


def test_argv() -> None:
    argv = [
        "serve",
        "--api-key",
        "abc",
        "--token=def",
        "--tokenizer",
        "qwen",
        "--token",
        "--port",
        "1",
        "https://u:p@h",
    ]
    assert redact.redact_argv(argv) == [
        "serve", "--api-key", "***", "--token=***", "--tokenizer", "qwen", "--token", "--port", "1", "https://***@h",
    ]  # fmt: skip


def test_environment() -> None:
    assert redact.redact_env({"A_TOKEN": "x", "INDEX": "https://u:p@h/"}) == {
        "A_TOKEN": "***",
        "INDEX": "https://***@h/",
    }


@given(
    st.text(
        st.characters(exclude_characters="@/?#'\"<> \t\n\r\x0b\x0c", exclude_categories=["Cs", "Z", "Cc"]), min_size=1
    )
)
def test_no_user_part_survives_in_a_url(user: str) -> None:
    assert redact.redact(f"see https://{user}:{user}@host/path now") == "see https://***@host/path now"


@given(st.text())
def test_any_text_is_survived(text: str) -> None:
    assert isinstance(redact.redact(text), str)

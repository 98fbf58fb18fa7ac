import errno
from pathlib import Path

import pytest

from sm120.build.source.address import address
from sm120.build.source.failure import Failed, Trouble, explained, trouble

COMMIT = "57e3cfb47a2d9e0d46eb6335c3dc411498efa198"
HERE = address("https://user:secret-word@github.com/NVIDIA/cutlass")


@pytest.mark.parametrize(
    ("lines", "kind"),
    [
        (["fatal: unable to access 'https://h/': Could not resolve host: h"], Trouble.HOST),
        (
            ["ssh: Could not resolve hostname h: Name or service not known", "fatal: Could not read from it"],
            Trouble.HOST,
        ),
        (["fatal: unable to access 'http://h/': Failed to connect to h port 80 after 0 ms"], Trouble.NETWORK),
        (
            ["error: RPC failed; curl 56", "fatal: early EOF", "fatal: fetch-pack: invalid index-pack output"],
            Trouble.NETWORK,
        ),
        (["fatal: unable to access 'https://h/': The requested URL returned error: 503"], Trouble.NETWORK),
        (["fatal: unable to access 'https://h/': The requested URL returned error: 403"], Trouble.ABSENT),
        (["fatal: could not read Username for 'https://github.com': terminal prompts disabled"], Trouble.ABSENT),
        (["fatal: repository 'http://127.0.0.1/x/' not found"], Trouble.ABSENT),
        (
            ["git@github.com: Permission denied (publickey).", "fatal: Could not read from remote repository."],
            Trouble.ABSENT,
        ),
        (["fatal: '/x' does not appear to be a git repository", "fatal: Could not read from remote"], Trouble.ABSENT),
        (["fatal: remote error: upload-pack: not our ref 1234"], Trouble.REVISION),
        (["fatal: couldn't find remote ref refs/tags/v9"], Trouble.REVISION),
        (["error: Server does not allow request for unadvertised object 12"], Trouble.EXACT),
        (["fatal: dumb http transport does not support shallow capabilities"], Trouble.EXACT),
        (
            [
                "remote: fatal: unable to read 06ebe5ad",
                "fatal: early EOF",
                "fatal: the remote end hung up unexpectedly",
            ],
            Trouble.DAMAGED,
        ),
        (["fatal: bad object HEAD"], Trouble.DAMAGED),
        (["fatal: write error: No space left on device", "fatal: early EOF"], Trouble.FULL),
        (["error: unable to write file a", "fatal: x"], Trouble.FULL),
        (["fatal: detected dubious ownership in repository at '/x'", "fatal: Could not read from"], Trouble.OWNER),
        (["warning: a", "fatal: something new"], Trouble.OTHER),
        ([], Trouble.OTHER),
    ],
)
def test_the_cause_is_told_from_what_follows_it(lines: list[str], kind: Trouble) -> None:
    found, said = trouble(lines)
    assert found is kind
    assert not said.startswith(("fatal:", "error:", "remote:"))


@pytest.mark.parametrize("kind", list(Trouble))
@pytest.mark.parametrize("mirror", [None, Path("/m/NVIDIA/cutlass.git")])
def test_every_failure_has_a_place_and_a_remedy_and_no_password(kind: Trouble, mirror: Path | None) -> None:
    error = explained(Failed(kind, "words"), HERE, COMMIT, "CMakeLists.txt:47", mirror=mirror, store=Path("/s"))
    assert error.remedy
    assert error.where == ("/s" if kind is Trouble.FULL else "CMakeLists.txt:47")
    assert "secret-word" not in f"{error.message} {error.remedy} {error.where}"


def test_what_is_missing_is_named_exactly() -> None:
    def message(kind: Trouble, mirror: Path | None = None) -> str:
        return explained(Failed(kind, "words"), HERE, COMMIT, "", mirror=mirror, store=Path("/s")).message

    assert "github.com" in message(Trouble.HOST)
    assert COMMIT in message(Trouble.REVISION)
    assert COMMIT in message(Trouble.REVISION, Path("/m/c.git"))
    assert "/m/c.git is damaged" in message(Trouble.DAMAGED, Path("/m/c.git"))
    assert message(Trouble.FULL).startswith("no space left on the disk"), errno.ENOSPC

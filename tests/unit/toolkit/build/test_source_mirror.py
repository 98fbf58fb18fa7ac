import hashlib
from pathlib import Path

import pytest

from sm120 import errors
from sm120.build.source.address import address
from sm120.build.source.git import numbered
from sm120.build.source.mirror import Mirror, git_environment, open_mirror

CUTLASS = address("https://github.com/NVIDIA/cutlass")


def _bare(place: Path) -> Path:
    (place / "objects").mkdir(parents=True)
    (place / "HEAD").write_text("ref: refs/heads/main\n")
    return place


def _settings(environment: dict[str, str]) -> dict[str, str]:
    """Prefix of an address → where it leads."""
    count = int(environment["GIT_CONFIG_COUNT"])
    pairs = [(environment[f"GIT_CONFIG_KEY_{n}"], environment[f"GIT_CONFIG_VALUE_{n}"]) for n in range(count)]
    return {
        value: key.removeprefix("url.").removesuffix(".insteadOf") for key, value in pairs if key.startswith("url.")
    }


@pytest.mark.parametrize("place", CUTLASS.places())
def test_every_accepted_place(tmp_path: Path, place: str) -> None:
    made = _bare(tmp_path / place)
    assert Mirror(folder=tmp_path).repository(CUTLASS) == made


def test_a_checkout_is_a_repository_too_and_a_plain_folder_is_none(tmp_path: Path) -> None:
    (tmp_path / "cutlass").mkdir()
    assert Mirror(folder=tmp_path).repository(CUTLASS) is None
    _bare(tmp_path / "cutlass" / ".git")
    assert Mirror(folder=tmp_path).repository(CUTLASS) == tmp_path / "cutlass"


def test_another_owner_s_repository_is_not_taken_for_it(tmp_path: Path) -> None:
    _bare(tmp_path / "other" / "cutlass.git")
    assert Mirror(folder=tmp_path).repository(CUTLASS) is None


@pytest.mark.parametrize("name", ["v1.tar.gz", "o-n-v1.tar.gz", "archives/v1.tar.gz", "archives/o-n-v1.tar.gz"])
def test_an_archive_by_its_name_and_hash(tmp_path: Path, name: str) -> None:
    url = "https://h/o/n/archive/v1.tar.gz"
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"right")
    right = hashlib.sha256(b"right").hexdigest()
    assert Mirror(folder=tmp_path).archive(url, right) == (path, ())
    assert Mirror(folder=tmp_path).archive(url, "0" * 64) == (None, (path,))
    assert Mirror(folder=tmp_path).archive(url, None) == (path, ())


def test_the_right_one_of_two_archives(tmp_path: Path) -> None:
    (tmp_path / "v1.tar.gz").write_bytes(b"another project's")
    (tmp_path / "o-n-v1.tar.gz").write_bytes(b"right")
    sha256 = hashlib.sha256(b"right").hexdigest()
    found, _ = Mirror(folder=tmp_path).archive("https://h/o/n/archive/v1.tar.gz", sha256)
    assert found == tmp_path / "o-n-v1.tar.gz"


def test_a_mirror_that_is_no_folder(tmp_path: Path) -> None:
    with pytest.raises(errors.PreflightError, match="--git-mirror"):
        open_mirror(tmp_path / "none")


def test_without_a_mirror_only_the_transports_are_narrowed() -> None:
    assert git_environment(None) == {
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_ALLOW_PROTOCOL": "file:git:http:https:ssh",
    }


def test_with_a_mirror_every_address_leads_into_it(tmp_path: Path) -> None:
    folder = tmp_path / "a mirror"
    _bare(folder / "NVIDIA" / "cutlass.git")
    _bare(folder / "gitlab.com" / "o" / "n")
    made = git_environment(folder)
    assert made["GIT_ALLOW_PROTOCOL"] == "file"
    leads = _settings(made)
    cutlass = f"file://{tmp_path}/a%20mirror/NVIDIA/cutlass.git"
    assert leads["https://github.com/NVIDIA/cutlass"] == leads["git@github.com:NVIDIA/cutlass.git"] == cutlass
    assert leads["https://gitlab.com/o/n.git"] == f"file://{tmp_path}/a%20mirror/gitlab.com/o/n"
    assert leads["https://github.com/"] == f"file://{tmp_path}/a%20mirror/"


def test_settings_come_behind_those_that_are_there() -> None:
    made = numbered([("a.b", "c")], {"GIT_CONFIG_COUNT": "2"})
    assert made == {"GIT_CONFIG_COUNT": "3", "GIT_CONFIG_KEY_2": "a.b", "GIT_CONFIG_VALUE_2": "c"}
    assert numbered([("a.b", "c")], {"GIT_CONFIG_COUNT": "x"})["GIT_CONFIG_COUNT"] == "1"

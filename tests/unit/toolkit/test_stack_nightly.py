import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version

from sm120.stack.resolve.index import Offer, best
from sm120.stack.resolve.nightly import NightlySet, complete_sets, day, gone, why_not
from sm120.stack.resolve.target import make_target
from sm120.stack.spec import Nightly, Stack, parse

TARGET = make_target("3.11.7", "linux_x86_64")
OWN = "cp311-cp311-manylinux_2_17_x86_64"
OTHER = "cp312-cp312-manylinux_2_17_x86_64"
BASE = {"torch": "2.12.0", "torchvision": "0.27.0", "torchaudio": "2.11.0"}

Listings = dict[str, list[Offer]]


def offer(name: str, version: str, tag: str = OWN, **known: object) -> Offer:
    filename = f"{name}-{version}-{tag}.whl"
    made = Offer.of(name, filename, f"https://example.org/{filename}", **known)
    assert made is not None
    return made


def build(name: str, date: str, tag: str = OWN, local: str = "+cu130", **known: object) -> Offer:
    return offer(name, f"{BASE[name]}.dev{date}{local}", tag, **known)


def nightly(date: str | None = None, frozen: tuple[str, ...] = ("torchaudio", "triton")) -> Nightly:
    return Nightly(
        url="https://example.org/nightly/cu130",
        lead="torch",
        packages=("torchvision",),
        frozen=frozen,
        date=date,
        reason="r",
    )


def listings() -> Listings:
    return {
        "torch": [build("torch", date) for date in ("20260330", "20260331", "20260401", "20260403")],
        "torchvision": [build("torchvision", date) for date in ("20260330", "20260331", "20260402", "20260403")],
        "torchaudio": [build("torchaudio", "20260331")],
        "triton": [offer("triton", "3.7.0+gitabcdef01")],
    }


def dates(found: Sequence[NightlySet]) -> list[str]:
    return [item.date for item in found]


def sets(given_listings: Listings, wanted: Nightly | None = None, local: str | None = "cu130") -> list[NightlySet]:
    return complete_sets(wanted or nightly(), given_listings, TARGET, local)


@pytest.mark.parametrize(
    ("version", "date"),
    [
        ("2.12.0.dev20260307+cu130", "20260307"),
        ("2.12.0.dev20260307", "20260307"),
        ("2.12.0", None),
        ("2.12.0.dev7", None),
        ("3.7.0+git20260307", None),
    ],
)
def test_day_of_a_version(version: str, date: str | None) -> None:
    assert day(Version(version)) == date


def test_days_with_all_of_it_newest_first() -> None:
    # 0401 has no torchvision, 0402 no torch, 0330 no torchaudio that old.
    found = sets(listings())
    assert dates(found) == ["20260403", "20260331"]
    assert found[0].words == (
        "torch 2.12.0.dev20260403+cu130, torchvision 0.27.0.dev20260403+cu130, torchaudio 2.11.0.dev20260331+cu130"
    )


def test_frozen_is_the_newest_that_is_not_newer() -> None:
    given_listings = listings()
    given_listings["torchaudio"] += [build("torchaudio", date) for date in ("20260329", "20260402", "20260404")]
    chosen = {item.date: str(item.files[2].version) for item in sets(given_listings)}
    assert chosen == {
        "20260403": "2.11.0.dev20260402+cu130",
        "20260331": "2.11.0.dev20260331+cu130",
        "20260330": "2.11.0.dev20260329+cu130",
    }


def test_triton_without_days_is_left_to_the_lead() -> None:
    assert all("triton" not in item.words for item in sets(listings()))
    without = listings()
    del without["triton"]
    assert dates(sets(without)) == dates(sets(listings()))


def test_wheels_for_other_pythons_do_not_count() -> None:
    given_listings = listings()
    given_listings["torchvision"][3] = build("torchvision", "20260403", OTHER)
    assert dates(sets(given_listings)) == ["20260331"]
    given_listings["torchvision"].append(build("torchvision", "20260403", requires_python=">=3.12"))
    assert dates(sets(given_listings)) == ["20260331"]
    given_listings["torchvision"].append(build("torchvision", "20260403"))
    assert dates(sets(given_listings)) == ["20260403", "20260331"]


def test_yanked_files_do_not_count() -> None:
    given_listings = listings()
    given_listings["torch"][3] = build("torch", "20260403", yanked=True)
    assert dates(sets(given_listings)) == ["20260331"]


def test_builds_for_another_cuda_do_not_count() -> None:
    given_listings = listings()
    given_listings["torch"] += [build("torch", "20260402", local="+cu128"), build("torch", "20260403", local="+cu132")]
    assert dates(sets(given_listings)) == ["20260403", "20260331"]
    assert str(sets(given_listings)[0].files[0].version) == "2.12.0.dev20260403+cu130"
    assert dates(sets(given_listings, local=None)) == ["20260403", "20260402", "20260331"]
    assert sets(given_listings, local="cu129") == []


def test_releases_are_no_nightlies() -> None:
    assert sets({name: [offer(name, BASE[name])] for name in BASE}) == []
    assert sets({}) == []


def test_two_versions_of_one_day() -> None:
    given_listings = listings()
    given_listings["torch"].append(offer("torch", "2.13.0.dev20260403+cu130"))
    assert str(sets(given_listings)[0].files[0].version) == "2.13.0.dev20260403+cu130"


@pytest.mark.parametrize(
    ("date", "words"),
    [
        ("20260307", "the torch of 20260307 has left the index, which shows 20260330 to 20260403"),
        ("20260402", "the torch of 20260402 is not on the index, which shows 20260330 to 20260403"),
        ("20260401", "there is no torchvision of 20260401"),
        ("20260330", "there is no torchaudio of 20260330 or before for Python 3.11"),
    ],
)
def test_why_a_day_is_not_complete(date: str, words: str) -> None:
    assert why_not(nightly(date), listings(), TARGET, "cu130") == words


def test_why_a_day_is_not_complete_though_there_are_files() -> None:
    given_listings = listings()
    given_listings["torch"][3] = build("torch", "20260403", OTHER)
    given_listings["torchvision"][3] = build("torchvision", "20260403", yanked=True)
    assert why_not(nightly("20260403"), given_listings, TARGET, "cu130") == (
        "the torch of 20260403 is there for cp312, but not for Python 3.11; the torchvision of 20260403 was withdrawn"
    )
    assert why_not(nightly("20260331"), listings(), TARGET, "cu129") == (
        "there is no +cu129 build of the torch of 20260331; there is no +cu129 build of the torchvision of 20260331; "
        "there is no torchaudio of 20260331 or before for Python 3.11"
    )
    assert (
        why_not(nightly(), {}, TARGET, "cu130") == "there is no nightly of torch on https://example.org/nightly/cu130"
    )


def stack() -> Stack:
    text = 'schema = 2\nsummary = "s"\npython = ">=3.11"\ndisk-mb = 1\n[packages]\nnumpy = "2"\n'
    return parse(text, Path("my stacks/mine.toml"))


@pytest.mark.parametrize(
    ("date", "shown", "take"),
    [
        ("20260307", ["20260331", "20260403"], "20260331"),
        ("20260401", ["20260331", "20260403"], "20260403"),
        ("20260501", ["20260331", "20260403"], "20260403"),
    ],
)
def test_the_nearest_days_are_offered(date: str, shown: list[str], take: str) -> None:
    error = gone(stack(), nightly(date), "it has left", sets(listings()))
    positions = [error.message.index(f"{name} (torch 2.12.0.dev{name}+cu130") for name in shown]
    assert positions == sorted(positions)
    assert f"> mine-{take}.toml && scripts/inv setup --stack mine-{take}.toml" in (error.remedy or "")
    assert "'my stacks/mine.toml'" in (error.remedy or "")


def test_no_more_than_two_on_each_side() -> None:
    many = [build("torch", f"202603{number:02}") for number in range(1, 31)]
    found = sets({"torch": many}, Nightly(url="u", lead="torch", packages=(), frozen=(), date=None, reason="r"))
    error = gone(stack(), nightly("20260315"), "gone", [item for item in found if item.date != "20260315"])
    assert [f"202603{n:02} (" in error.message for n in range(1, 31)] == [n in {13, 14, 16, 17} for n in range(1, 31)]


def test_no_day_at_all() -> None:
    error = gone(stack(), nightly("20260307"), "there is none", [])
    assert "no day has a complete set of torch, torchvision, torchaudio, triton" in error.message
    assert "SM120_PYTHON" in (error.remedy or "")
    assert "the newest day" in gone(stack(), nightly(), "there is none", []).message


DAYS = [f"2026030{number}" for number in range(1, 6)]


@given(
    st.dictionaries(
        st.sampled_from(list(BASE)),
        st.lists(st.tuples(st.sampled_from(DAYS), st.sampled_from([OWN, OTHER]), st.booleans()), max_size=8),
    )
)
def test_every_set_is_whole_and_every_whole_day_is_a_set(files: dict[str, list[tuple[str, str, bool]]]) -> None:
    given_listings = {
        name: [build(name, date, tag, yanked=yanked) for date, tag, yanked in entries]
        for name, entries in files.items()
    }
    good = {name: {date for date, tag, yanked in files.get(name, []) if tag == OWN and not yanked} for name in BASE}
    is_dated = bool(files.get("torchaudio"))
    expected = [
        date
        for date in sorted(good["torch"] & good["torchvision"], reverse=True)
        if not is_dated or any(d <= date for d in good["torchaudio"])
    ]
    found = sets(given_listings)
    assert dates(found) == expected
    for item in found:
        assert all(not file.yanked and file.fits(TARGET.tags, TARGET.python) for file in item.files)
    for date in DAYS:
        if date not in expected:
            assert why_not(nightly(date), given_listings, TARGET, "cu130")


def test_best_prefers_version_then_tag() -> None:
    tags = [OWN, "cp311-abi3-manylinux_2_17_x86_64", "py3-none-any"]
    for order in itertools.permutations(tags):
        chosen = best([offer("torch", "1.0", tag) for tag in order], TARGET.tags, TARGET.python)
        assert chosen is not None
        assert OWN in chosen.filename
    newer = best([offer("torch", "1.0"), offer("torch", "1.1", "py3-none-any")], TARGET.tags, TARGET.python)
    assert newer is not None
    assert newer.version == Version("1.1")
    assert best([offer("torch", "1.0", OTHER)], TARGET.tags, TARGET.python) is None

"""The series on disk: what is wrong with it is told with file and line."""

import shutil
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from sm120.build.patches import FOLDER, load_series
from sm120.build.patches.rules import RULES
from sm120.build.patches.series import _LIMIT
from sm120.errors import PatchError

RULE = """\
schema = 1
title = "t"
why = "w"
references = ["r"]
removable = "when"
kind = "rule"
rule = "cxx-standard"
[applies]
torch = ">=2.14"
[parameters]
standard = 20
"""
DIFF = """\
schema = 1
title = "t"
why = "w"
references = ["r"]
removable = "when"
kind = "diff"
diff = "one.patch"
"""


def folder(root: Path, series: str | None = 'schema = 1\npatches = ["a"]\n', **texts: str) -> Path:
    root.mkdir(exist_ok=True)
    if series is not None:
        (root / "series.toml").write_text(series)
    for name, text in texts.items():
        suffix = ".patch" if name == "one" else ".toml"
        (root / f"{name}{suffix}").write_text(text)
    return root


def test_the_toolkits_own_series() -> None:
    series = load_series()
    assert [patch.name for patch in series.patches] == [
        *("guard-cmake-policies", "cuda13-cccl-include", "cmake-policy-minimum"),
        *("sm120-only", "cxx-standard", "compile-threads"),
    ]
    assert {patch.rule for patch in series.patches} == set(RULES)
    for patch in series.patches:
        assert all(link.startswith("https://") for link in patch.references)


def test_rule_and_diff_are_read(tmp_path: Path) -> None:
    made = load_series(folder(tmp_path, 'schema = 1\npatches = ["b", "a"]\n', a=RULE, b=DIFF, one="diff"))
    diff, rule = made.patches
    assert (diff.name, diff.diff, diff.base, diff.rule) == ("b", b"diff", "component", None)
    assert (rule.rule, rule.parameters, dict(rule.applies)) == (
        "cxx-standard",
        {"standard": 20},
        {"torch": SpecifierSet(">=2.14")},
    )


@pytest.mark.parametrize(
    ("series", "line", "message"),
    [
        (None, None, "cannot read"),
        ("schema = 1\npatches = [\n", 3, "not TOML"),
        ("schema = 2\npatches = []\n", 1, "schema must be 1"),
        ('schema = 1\npatches = "a"\n', 2, "list of names"),
        ("schema = 1\n", 1, "list of names"),
        ('schema = 1\npatches = ["a", "a"]\n', 2, "a is named twice"),
        ('schema = 1\npatches = ["../a"]\n', 2, "no name of a patch"),
        ('schema = 1\npatches = ["a", "b"]\n', 2, "b has no file b.toml"),
        ("schema = 1\npatches = []\n", 2, "a.toml is in no patch of the series"),
        ('schema = 1\npatches = ["a"]\npatch = 1\n', 3, "unknown key 'patch'"),
        ("#" * (_LIMIT + 1), 1, "more than"),
    ],
)
def test_a_wrong_series_file(tmp_path: Path, series: str | None, line: int | None, message: str) -> None:
    with pytest.raises(PatchError, match=message) as caught:
        load_series(folder(tmp_path, series, a=RULE))
    place = f"{tmp_path}/series.toml"
    assert caught.value.where == (place if line is None else f"{place}:{line}")
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ("schema = 1", "schema = 3", 1, "schema must be 1"),
        ('title = "t"', "", 1, "title is missing"),
        ('why = "w"', "why = 3", 3, "why must be text"),
        ('references = ["r"]', "references = []", 4, "references must be a list"),
        ('removable = "when"', 'removable = ""', 5, "removable must be text"),
        ('kind = "rule"', 'kind = "sed"', 6, "kind must be 'rule' or 'diff'"),
        ('"cxx-standard"', '"cxx-standart"', 7, "no rule 'cxx-standart'; did you mean cxx-standard"),
        ('torch = ">=2.14"', 'torch = "new"', 9, "torch: Invalid specifier"),
        ('torch = ">=2.14"', 'torsh = ">=2.14"', 9, "unknown key 'torsh'"),
        ("standard = 20", 'standard = "20"', 11, "needs standard: a number"),
        ("standard = 20", "standard = true", 11, "needs standard: a number"),
        ("standard = 20", "", 10, "needs standard"),
        ("standard = 20", "standard = 19", 11, "needs standard: a number such as 20"),
        ("standard = 20", "standard = 20\nmore = 1", 12, "unknown key 'more'"),
        ('kind = "rule"', 'kind = "rule"\ndiff = "x.patch"', 7, "diff is for kind = 'diff'"),
        ("[applies]", "[applise]", 8, "unknown key 'applise'"),
        ("[applies]", "[[applies]]", 8, "applies must be a table"),
    ],
)
def test_a_wrong_patch_file(tmp_path: Path, old: str, new: str, line: int, message: str) -> None:
    assert old in RULE
    with pytest.raises(PatchError, match=message) as caught:
        load_series(folder(tmp_path, a=RULE.replace(old, new)))
    assert caught.value.where == f"{tmp_path}/a.toml:{line}"
    assert caught.value.exit_code == 11


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"one.patch"', '"two.patch"', "two.patch cannot be read: No such file"),
        ('"one.patch"', '"../one.patch"', "no name of a .patch file"),
        ('"one.patch"', '"a.toml"', "no name of a .patch file"),
        ('diff = "one.patch"', 'diff = "one.patch"\nbase = "home"', "base must be component or repository"),
        ('diff = "one.patch"', 'diff = "one.patch"\nrule = "cxx-standard"', "rule is for kind = 'rule'"),
        ('diff = "one.patch"', "", "diff is missing"),
    ],
)
def test_a_wrong_diff(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(PatchError, match=message):
        load_series(folder(tmp_path, a=DIFF.replace(old, new), one=""))


def test_a_diff_that_no_patch_names_is_not_left_out_in_silence(tmp_path: Path) -> None:
    with pytest.raises(PatchError, match=r"one.patch is in no patch of the series: write a .toml with kind = 'diff'"):
        load_series(folder(tmp_path, a=RULE, one=""))


def test_a_rule_has_its_parameters_checked(tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path / "x")
    path = tmp_path / "x/sm120-only.toml"
    path.write_text(path.read_text().replace("because =", "becos ="))
    with pytest.raises(PatchError, match="the rule sm120-only needs twins: for each target a table"):
        load_series(tmp_path / "x")

from pathlib import Path

import pytest

from sm120 import errors
from sm120.build.options import Options, dotted


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (("12.0a",), ("120a",)),
        (("12.1a", "12.0a"), ("120a", "121a")),
        (("12.0f", "12.0f"), ("120f",)),
    ],
)
def test_architectures_are_named_as_nvcc_names_them_in_one_order(
    given: tuple[str, ...], found: tuple[str, ...]
) -> None:
    assert Options(arch=given).architectures == found


@pytest.mark.parametrize("text", ["120a", "12", "12.0b", "sm_120a", "12.0a;9.0a", "-1.0", "12.0a\n"])
def test_what_is_no_architecture_is_refused(text: str) -> None:
    with pytest.raises(errors.UsageError, match="no architecture"):
        Options(arch=(text,)).check()


def test_folders_for_dependencies_are_absolute_and_named_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Options(dependency=("repo-cutlass=cutlass", "json=/src/json")).given == {
        "repo-cutlass": tmp_path / "cutlass",
        "json": Path("/src/json"),
    }
    for bad, why in (("json", "not NAME=DIR"), ("=dir", "not NAME=DIR"), ("json=", "not NAME=DIR")):
        with pytest.raises(errors.UsageError, match=why):
            Options(dependency=(bad,)).check()
    with pytest.raises(errors.UsageError, match="named twice"):
        Options(dependency=("json=/a", "JSON=/b")).check()


@pytest.mark.parametrize(
    "options",
    [
        Options(component="sgl-kernl"),
        Options(jobs=0),
        Options(component="flashinfer", source=Path("x")),
        Options(component="flashinfer", patches=True),
        Options(component="flashinfer", install=False),
        Options(rollback=True, source=Path("x")),
        Options(modules=("fp4",)),
    ],
)
def test_flags_that_do_not_go_together_are_refused(options: Options) -> None:
    with pytest.raises(errors.UsageError):
        options.check()


def test_flags_that_go_together_pass() -> None:
    Options(source=Path("x"), git_mirror=Path("m"), jobs=2, arch=("12.0a", "12.1a"), install=False).check()
    Options(component="flashinfer", modules=("fp4_quantization",)).check()
    Options(rollback=True).check()


@pytest.mark.parametrize(("architecture", "text"), [("120a", "12.0a"), ("121f", "12.1f"), ("90", "9.0")])
def test_an_architecture_in_the_way_of_torchs_variable(architecture: str, text: str) -> None:
    assert dotted(architecture) == text

from pathlib import Path

import pytest

from sm120 import errors
from sm120.stack import verify
from sm120.stack.pip import Distribution
from sm120.stack.spec import Stack


def stack(**packages: str) -> Stack:
    return Stack(
        name="mine",
        path=Path("mine.toml"),
        summary="",
        python=">=3.11",
        disk_bytes=1,
        packages=packages,
        imports=(),
        indexes=(),
    )


def site(folder: Path, *names: str, cuda: str | None = None) -> Path:
    for name in names:
        (folder / f"{name}.dist-info").mkdir()
    if cuda is not None:
        (folder / "torch").mkdir()
        (folder / "torch" / "version.py").write_text(f"__version__ = '2'\ndebug = False\n{cuda}\nhip = None\n")
    return folder


def reported(**packages: str) -> list[Distribution]:
    return [Distribution(name, version, "file:///x", "0" * 64) for name, version in packages.items()]


def test_names_are_canonical(tmp_path: Path) -> None:
    assert verify.installed(site(tmp_path, "ml_dtypes-0.7.0", "Jinja2-3.1.6")) == {
        "ml-dtypes": "0.7.0",
        "jinja2": "3.1.6",
    }


def test_pins_that_were_kept(tmp_path: Path) -> None:
    versions = {"torch": "2.13.0+cpu", "numpy": "2.4"}
    verify.check_pins(stack(**versions), site(tmp_path, "torch-2.13.0+cpu", "numpy-2.4.0"), reported(**versions))


@pytest.mark.parametrize(
    ("present", "pip_says"),
    [
        pytest.param("2.13.0+cu130", "2.13.0+cu130", id="cuda-build"),
        pytest.param("2.13.0", "2.13.0+cpu", id="another-on-disk"),
        pytest.param("2.13.0+cpu", "2.13.0", id="another-reported"),
    ],
)
def test_torch_of_another_build_is_refused(tmp_path: Path, present: str, pip_says: str) -> None:
    with pytest.raises(errors.BinaryError, match=r"says torch 2\.13\.0\+cpu, but"):
        verify.check_pins(stack(torch="2.13.0+cpu"), site(tmp_path, f"torch-{present}"), reported(torch=pip_says))


def test_a_package_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(errors.BinaryError, match="but nothing was installed"):
        verify.check_pins(stack(numpy="2.4"), site(tmp_path), reported(numpy="2.4"))


@pytest.mark.parametrize(
    ("pin", "cuda"),
    [
        ("2.13.0+cpu", "cuda: Optional[str] = None"),
        ("2.13.0+cpu", "cuda = None"),
        ("2.12.0.dev20260307+cu130", "cuda: Optional[str] = '13.0'"),
        ("2.13.0", "cuda = '13.0'"),
        ("2.13.0+local.build", "cuda = '13.0'"),
    ],
)
def test_torch_that_is_what_its_pin_says(tmp_path: Path, pin: str, cuda: str) -> None:
    verify.check_torch(stack(torch=pin), site(tmp_path, cuda=cuda))


@pytest.mark.parametrize(
    ("pin", "cuda"),
    [
        ("2.13.0+cpu", "cuda: Optional[str] = '13.0'"),
        ("2.13.0+cu130", "cuda = None"),
        ("2.13.0+cu130", 'cuda = "12.8"'),
    ],
)
def test_torch_that_contradicts_its_pin(tmp_path: Path, pin: str, cuda: str) -> None:
    with pytest.raises(errors.BinaryError, match=r"is a .* build"):
        verify.check_torch(stack(torch=pin), site(tmp_path, cuda=cuda))


def test_torch_that_does_not_say(tmp_path: Path) -> None:
    with pytest.raises(errors.BinaryError, match="does not say which CUDA"):
        verify.check_torch(stack(torch="2.13.0+cpu"), site(tmp_path))


def test_a_stack_without_torch(tmp_path: Path) -> None:
    verify.check_torch(stack(numpy="2.4"), site(tmp_path))

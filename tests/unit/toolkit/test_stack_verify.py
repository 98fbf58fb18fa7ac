import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sm120 import errors
from sm120.process import Completed
from sm120.stack.install import verify
from sm120.stack.install.record import distributions
from sm120.stack.install.verify import Outcome, Proof
from sm120.stack.lock import Lock, LockedFile
from sm120.stack.spec import Package, Stack


def stack(*packages: Package, cuda: str | None = None) -> Stack:
    return Stack(
        name="mine",
        path=Path("mine.toml"),
        summary="",
        python=">=3.11",
        disk_bytes=1,
        packages=packages,
        overrides=(),
        constraints=(),
        nightly=None,
        indexes=(),
        last=(),
        imports=(),
        driver_imports=(),
        cuda=cuda,
    )


def lock(**versions: str) -> Lock:
    names = {name.replace("_", "-"): version for name, version in versions.items()}
    return Lock(
        stack="mine",
        request="r",
        python="3.11",
        platform="linux_x86_64",
        created="now",
        sources=(),
        files=tuple(
            LockedFile(name=n, version=v, filename=f"{n}.whl", url="file:///x", sha256="0" * 64, size=1)
            for n, v in sorted(names.items())
        ),
    )


def site(folder: Path, *names: str, cuda: str | None = None) -> Path:
    for name in names:
        (folder / f"{name}.dist-info").mkdir()
    if cuda is not None:
        (folder / "torch").mkdir()
        (folder / "torch" / "version.py").write_text(f"__version__ = '2'\ndebug = False\n{cuda}\nhip = None\n")
    return folder


def test_names_are_canonical(tmp_path: Path) -> None:
    assert distributions(site(tmp_path, "ml_dtypes-0.7.0", "Jinja2-3.1.6")) == [
        ("jinja2", "3.1.6"),
        ("ml-dtypes", "0.7.0"),
    ]


@pytest.mark.parametrize(
    ("specifier", "version"),
    [
        ("==2.13.0+cpu", "2.13.0+cpu"),
        ("==2.13.0", "2.13.0+cu130"),  # the local tag is as good as none where none is asked for
        ("==13.0.*", "13.0.96"),
        (">=13.2", "13.3.1"),
        ("", "1.0rc1"),
        ("==2.12.0.dev20260307+cu130", "2.12.0.dev20260307+cu130"),
    ],
)
def test_a_lock_that_has_what_is_asked(specifier: str, version: str) -> None:
    verify.check_pins(stack(Package(name="torch", specifier=specifier)), lock(torch=version))


@pytest.mark.parametrize(
    ("specifier", "version"),
    [
        ("==2.13.0+cpu", "2.13.0"),
        ("==2.13.0+cpu", "2.13.0+cu130"),
        ("==13.0.*", "13.1.0"),
        (">=13.2", "13.1"),
        ("==2.12.0.dev20260307+cu130", "2.12.0.dev20260308+cu130"),
    ],
)
def test_a_lock_of_something_else(specifier: str, version: str) -> None:
    with pytest.raises(errors.BinaryError, match=r"says torch.*but its lock has torch") as raised:
        verify.check_pins(stack(Package(name="torch", specifier=specifier)), lock(torch=version))
    assert "--lock" in (raised.value.remedy or "")


def test_a_lock_without_what_is_asked() -> None:
    with pytest.raises(errors.BinaryError, match="its lock has no such package"):
        verify.check_pins(stack(Package(name="torch", specifier="")), lock(numpy="1"))


def test_what_is_locked_is_installed(tmp_path: Path) -> None:
    verify.check_versions(
        lock(torch="2.13.0+cpu", ml_dtypes="0.7"), site(tmp_path, "torch-2.13.0+cpu", "ml_dtypes-0.7.0")
    )


@pytest.mark.parametrize(
    ("present", "message"),
    [
        pytest.param(
            ["torch-2.13.0+cu130", "numpy-2.4"], r"says torch 2\.13\.0\+cpu, but torch 2\.13\.0\+cu130", id="cuda"
        ),
        pytest.param(["torch-2.13.0", "numpy-2.4"], r"says torch 2\.13\.0\+cpu, but torch 2\.13\.0 was", id="no tag"),
        pytest.param(["torch-2.13.0+cpu"], r"says numpy 2\.4, but nothing was installed", id="missing"),
        pytest.param(["torch-2.13.0+cpu", "numpy-2.4", "more-1"], r"nothing of more, but more 1", id="more"),
        pytest.param(["torch-2.13.0+cpu", "numpy-2.4", "numpy-2.3"], r"numpy is installed more than once", id="twice"),
        pytest.param(["torch-2.13.0+cpu", "torch-2.12.0", "numpy-2.4"], r"torch is installed more than", id="torches"),
        pytest.param(["torch-not-a-version", "numpy-2.4"], r"torch", id="no version"),
    ],
)
def test_something_else_is_installed(tmp_path: Path, present: list[str], message: str) -> None:
    with pytest.raises(errors.BinaryError, match=message):
        verify.check_versions(lock(torch="2.13.0+cpu", numpy="2.4"), site(tmp_path, *present))


@pytest.mark.parametrize(
    ("version", "says", "cuda"),
    [
        ("2.13.0+cpu", "cuda: Optional[str] = None", None),
        ("2.13.0+cpu", "cuda = None", None),
        ("2.12.0.dev20260307+cu130", "cuda: Optional[str] = '13.0'", "13.0"),
        ("2.14.1", "cuda = '13.0'", "13.0"),
        ("2.13.0", "cuda = '13.0'", None),
        ("2.13.0+cpu", "cuda = None", "13.0"),  # a CPU build that is asked for, beside a CUDA home
        ("2.13.0+local.build", "cuda = '13.0'", None),
    ],
)
def test_torch_that_is_what_was_asked_for(tmp_path: Path, version: str, says: str, cuda: str | None) -> None:
    verify.check_torch(stack(cuda=cuda), lock(torch=version), site(tmp_path, cuda=says))


@pytest.mark.parametrize(
    ("version", "says", "cuda", "message"),
    [
        ("2.13.0+cpu", "cuda: Optional[str] = '13.0'", None, "is a cu130 build"),
        ("2.13.0+cu130", "cuda = None", "13.0", "is a cpu build"),
        ("2.13.0+cu130", 'cuda = "12.8"', None, "is a cu128 build"),
        ("2.14.1", 'cuda = "12.8"', "13.0", r"is for CUDA 13\.0, but torch 2\.14\.1 is a cu128 build"),
        ("2.14.1", "cuda = None", "13.0", "is a cpu build"),
        ("2.14.1+local", "cuda = None", "13.0", "is a cpu build"),
    ],
)
def test_torch_of_another_build(tmp_path: Path, version: str, says: str, cuda: str | None, message: str) -> None:
    with pytest.raises(errors.BinaryError, match=message):
        verify.check_torch(stack(cuda=cuda), lock(torch=version), site(tmp_path, cuda=says))


def test_torch_that_does_not_say(tmp_path: Path) -> None:
    with pytest.raises(errors.BinaryError, match="does not say which CUDA"):
        verify.check_torch(stack(), lock(torch="2.13.0+cpu"), site(tmp_path))


def test_a_stack_without_torch(tmp_path: Path) -> None:
    verify.check_torch(stack(cuda="13.0"), lock(numpy="2.4"), site(tmp_path))


# ---- what came of an import ----


def completed(*tail: str, code: int = 0, timed_out: bool = False) -> Completed:
    return Completed(argv=("python",), returncode=code, seconds=1.0, tail=tail, timed_out=timed_out)


def failed_with(*chain: tuple[str, str]) -> Completed:
    return completed("Traceback …", "proved " + json.dumps({"chain": chain}))


NO_DRIVER = "libcuda.so.1: cannot open shared object file: No such file or directory"


def test_an_import_that_works() -> None:
    done = completed("a warning", "proved " + json.dumps({"version": "2.4", "cuda": None}))
    proof = verify.judge("numpy", done, needs_driver=False)
    assert (proof.outcome, proof.detail, proof.facts) == (Outcome.OK, "2.4", {"cuda": None})


@pytest.mark.parametrize(
    "chain",
    [
        pytest.param([("ImportError", NO_DRIVER)], id="itself"),
        pytest.param([("ImportError", "no common_ops library"), ("OSError", NO_DRIVER)], id="wrapped"),
        pytest.param([("ImportError", f"tried:\n - sm100: {NO_DRIVER}\n - sm90: {NO_DRIVER}")], id="told twice"),
    ],
)
def test_only_the_driver_is_missing(chain: list[tuple[str, str]]) -> None:
    assert verify.judge("sgl_kernel", failed_with(*chain), needs_driver=True).outcome is Outcome.SKIPPED
    assert verify.judge("sgl_kernel", failed_with(*chain), needs_driver=False).outcome is Outcome.FAILED


@pytest.mark.parametrize(
    "chain",
    [
        pytest.param([("ImportError", "libnvrtc.so.12: cannot open shared object file")], id="another library"),
        pytest.param(
            [("ImportError", f"{NO_DRIVER}; libcudart.so.12: cannot open shared object file")], id="another beside it"
        ),
        pytest.param([("ImportError", "undefined symbol: cuInit in libcuda.so.1")], id="there but wrong"),
        pytest.param([("RuntimeError", "no CUDA device")], id="no device"),
        pytest.param([("ImportError", "xlibcuda.so.1: cannot open shared object file")], id="a longer name"),
        pytest.param([("ImportError", "libcuda.so.12: cannot open shared object file")], id="another version"),
    ],
)
def test_something_else_is_missing(chain: list[tuple[str, str]]) -> None:
    proof = verify.judge("sgl_kernel", failed_with(*chain), needs_driver=True)
    assert proof.outcome is Outcome.FAILED
    assert proof.detail.startswith(chain[0][0])


@pytest.mark.parametrize(
    ("done", "detail"),
    [
        (completed("Segmentation fault", code=-11), "ended by signal 11"),
        (completed("bye", code=3), "ended with exit code 3"),
        (completed(), "ended with exit code 0"),
        (completed('proved {"version": "1"}', code=-6), "ended by signal 6"),
        (completed(code=-9, timed_out=True), "did not end within 600 s"),
        (failed_with(("ImportError", "first line\n\nlast line\n")), "ImportError: last line"),
        (failed_with(("SystemExit", "")), "SystemExit: no message"),
    ],
)
def test_an_import_that_fails(done: Completed, detail: str) -> None:
    for needs_driver in (False, True):
        proof = verify.judge("m", done, needs_driver=needs_driver)
        assert (proof.outcome, proof.detail) == (Outcome.FAILED, detail)


@given(st.lists(st.text(max_size=40), max_size=4))
def test_noise_is_never_a_success_or_a_skip(tail: list[str]) -> None:
    noise = [line for line in tail if not line.startswith("proved ")]
    assert verify.judge("m", completed(*noise), needs_driver=True).outcome is Outcome.FAILED


def proofs(*outcomes: Outcome) -> list[Proof]:
    return [Proof(module=f"m{n}", outcome=outcome, detail=f"d{n}", facts={}) for n, outcome in enumerate(outcomes)]


def test_every_failure_is_named() -> None:
    verify.check_proofs("mine", proofs(Outcome.OK, Outcome.SKIPPED), Path("log"))
    with pytest.raises(errors.BinaryError, match=r"does not import: m0: d0; m2: d2$") as raised:
        verify.check_proofs("mine", proofs(Outcome.FAILED, Outcome.OK, Outcome.FAILED), Path("log"))
    assert raised.value.where == "log"


# ---- the torch that is imported ----


def torch_proof(folder: Path, **changes: object) -> Proof:
    facts: dict[str, object] = {
        "file": str(folder / "torch" / "__init__.py"),
        "cuda": "13.0",
        "architectures": ["sm_75", "sm_90", "sm_120"],
        **changes,
    }
    return Proof(module="torch", outcome=Outcome.OK, detail="2.14.1+cu130", facts=facts)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"architectures": ["sm_120a"]},
        {"architectures": ["sm_121"]},
        {"architectures": ["compute_120"]},
        {"architectures": None},
        {"cuda": None, "architectures": None},
        {"cuda": None, "architectures": ["sm_90"]},
    ],
)
def test_a_torch_that_can_be_used(tmp_path: Path, changes: dict[str, object]) -> None:
    verify.check_imported_torch(lock(torch="2.14.1+cu130"), tmp_path, [torch_proof(tmp_path, **changes)])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["sm_50", "sm_90", "sm_100", "sm_103"]}, r"no code for compute capability 12\.x"),
        ({"architectures": ["sm_1200", "sm_12"]}, r"no code for compute capability 12\.x"),
        ({"file": "/usr/lib/python3/dist-packages/torch/__init__.py"}, "is imported, from /usr/lib"),
    ],
)
def test_a_torch_that_cannot_be_used(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(errors.BinaryError, match=message):
        verify.check_imported_torch(lock(torch="2.14.1+cu130"), tmp_path, [torch_proof(tmp_path, **changes)])


def test_a_torch_whose_wheel_does_not_tell_its_local_tag(tmp_path: Path) -> None:
    verify.check_imported_torch(lock(torch="2.14.1"), tmp_path, [torch_proof(tmp_path)])


@pytest.mark.parametrize("said", ["2.14.0+cu130", "2.14.1+cpu", "2.14.1", "unknown"])
def test_a_torch_of_another_version_is_imported(tmp_path: Path, said: str) -> None:
    proof = replace(torch_proof(tmp_path), detail=said)
    with pytest.raises(errors.BinaryError, match=rf"torch {re.escape(said)} is imported"):
        verify.check_imported_torch(lock(torch="2.14.1+cu130"), tmp_path, [proof])


def test_nothing_is_said_of_a_torch_that_was_not_imported(tmp_path: Path) -> None:
    for outcome in (Outcome.SKIPPED, Outcome.FAILED):
        proof = replace(torch_proof(tmp_path, file="/elsewhere"), outcome=outcome)
        verify.check_imported_torch(lock(torch="2.14.1+cu130"), tmp_path, [proof])
    verify.check_imported_torch(lock(numpy="1"), tmp_path, [torch_proof(tmp_path, file="/elsewhere")])

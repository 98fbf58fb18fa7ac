import re
from pathlib import Path

import pytest
from packaging.version import Version

from sm120 import errors
from sm120.build.flashinfer import modules
from sm120.build.flashinfer.modules import chosen
from sm120.build.flashinfer.target import Target, environment, target

KNOWN = {module.name: module for module in modules()}


def test_each_module_says_what_for_and_whom_to_ask() -> None:
    assert len(KNOWN) == len(modules())
    for module in modules():
        assert module.why
        assert module.ask
        for name in (*module.ask, *([module.when] if module.when else [])):
            assert re.fullmatch(r"flashinfer(\.\w+)+:\w+", name), name
        assert all(re.fullmatch(r"torch\.\w+|\{sm\}|\w+", a) for a in module.arguments if isinstance(a, str))


def test_fp4_code_is_demanded_of_the_multiplications_alone() -> None:
    assert {module.name for module in modules() if module.fp4} == {"fp4-gemm", "fused-moe"}


def test_what_is_not_needed_is_built_only_when_it_is_named() -> None:
    names = [module.name for module in chosen((), modules())]
    assert "attention-256-fp8" in names
    assert "attention-128" not in names
    assert [module.name for module in chosen(("attention-128", "fp4-gemm"), modules())] == ["fp4-gemm", "attention-128"]


def test_a_mistyped_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(errors.UsageError, match=r"no FlashInfer module 'fp4_gemm'; did you mean fp4-gemm"):
        chosen(("fp4_gemm",), modules())


@pytest.mark.parametrize(
    ("name", "version", "count"),
    [
        ("fp4-gemm", "0.6.6", 1),
        ("fp4-gemm", "0.6.7", 0),
        ("fused-moe", "0.6.7.post3", 1),
        ("fused-moe", "0.6.8", 0),
        ("fused-moe", "0.6.17+cu130", 1),
        ("fp4-quantization", "0.6.12", 1),
        ("fp4-quantization", "0.6.13", 0),
    ],
)
def test_faults_of_a_version(name: str, version: str, count: int) -> None:
    assert len(KNOWN[name].known_faults(Version(version))) == count


@pytest.mark.parametrize(
    ("architecture", "listed", "expected", "served"),
    [
        pytest.param("120a", "12.0a", "12.0a", True, id="the-activation's"),
        pytest.param("120a", "12.0f", "12.0f", True, id="the-user's-family"),
        pytest.param("120a", "12.0a 12.1a", "12.0a 12.1a", True, id="the-whole-list-names-the-folder"),
        pytest.param("121a", "12.0a", "12.1a", False, id="another-card"),
        pytest.param("120a", "12.1a", "12.0a", False, id="no-part-of-a-name"),
        pytest.param("120f", "12.0a", "12.0f", False, id="family-asked"),
        pytest.param("100a", "10.0a", "10.0a", True, id="two-digits"),
        pytest.param("120a", "", "12.0a", False, id="no-list"),
    ],
)
def test_the_target_is_the_folder_that_the_server_uses(
    architecture: str, listed: str, expected: str, served: bool
) -> None:
    found = target(architecture, {"FLASHINFER_CUDA_ARCH_LIST": listed})
    assert (found.listed, found.served) == (expected, served)


def test_the_name_for_flashinfers_functions() -> None:
    assert target("120a", {}).sm == "120"
    assert target("121f", {}).sm == "121"


def test_the_environment_is_the_servers_but_for_output_and_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NINJA_STATUS", "FORCE_COLOR", "MAX_JOBS", "FLASHINFER_EXTRA_CUDAFLAGS"):
        monkeypatch.setenv(name, "theirs")
    aimed = Target(architecture="120a", listed="12.0f", served=True)
    env = environment({"CUDA_HOME": "/home", "FLASHINFER_WORKSPACE_BASE": "/real"}, aimed, Path("/else"), 3)
    assert not {"NINJA_STATUS", "FORCE_COLOR"} & env.keys()
    assert env["MAX_JOBS"] == "3"
    assert env["FLASHINFER_EXTRA_CUDAFLAGS"] == "theirs"
    assert (env["FLASHINFER_CUDA_ARCH_LIST"], env["FLASHINFER_WORKSPACE_BASE"]) == ("12.0f", "/else")
    assert env["CUDA_HOME"] == "/home"

"""The real FlashInfer, built ahead of time by NVIDIA's real compilers, without a GPU."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.version import Version

from sm120 import errors
from sm120.build.flashinfer import State as Planned
from sm120.build.flashinfer import build, modules, plan
from sm120.build.flashinfer.target import target
from sm120.build.toolchain import Toolchain
from sm120.console import Console
from sm120.runs import Run
from sm120.stack import activation
from sm120.stack.cuda.home import make_cuda_home
from sm120.state import State

pytestmark = [pytest.mark.slow, pytest.mark.network, pytest.mark.timeout(2400)]

SMALL = ("nvcc", "nvvm", "crt", "cudart", "cccl")
TOOLS = ("nvidia-cuda-cuobjdump>=13.2", "nvidia-cuda-nvdisasm>=13.2")
NEEDED = ("click", "einops", "filelock", "ninja", "nvidia-ml-py", "packaging", "requests", "tabulate", "tqdm")
# The CPU build of torch stands in for a CUDA build. FlashInfer's choice of a generator asks it for this alone.
TORCH = "import torch.version\ntorch.version.cuda = '13.0'\n"


def install(folder: Path, *words: str) -> None:
    uv = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", sys.executable]
    subprocess.run([*uv, "--target", str(folder), *words], check=True, timeout=1200)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cuda-wheels") / "site"
    install(folder, f"cuda-toolkit[{','.join((*SMALL, 'cublas', 'curand'))}]==13.0.*", *TOOLS)
    return folder


@pytest.fixture(scope="module", params=["0.6.12", "0.7.2"])
def packages(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packages")
    install(folder, "--no-deps", f"flashinfer-python=={request.param}", "apache-tvm-ffi==0.1.11")
    install(folder, *NEEDED)
    (folder / "sitecustomize.py").write_text(TORCH)
    return folder


@pytest.fixture
def toolchain(wheels: Path, packages: Path, tmp_path: Path) -> Toolchain:
    python = State.resolve().env("cpu") / "bin" / "python"
    assert python.exists(), "torch comes from the CPU stack: scripts/inv setup --stack cpu"
    home = make_cuda_home(wheels, tmp_path / "cuda" / "made")
    assert home.nvcc is not None
    variables = activation.variables(
        "made",
        environment=Path(sys.prefix),
        cuda_home=home.path,
        cache=tmp_path / "cache" / "made",
        capability=None,
        base=os.environ,
    )
    return Toolchain(
        stack="made",
        python=python,
        python_version="3",
        site=packages,
        torch=Version("2"),
        cuda_home=home.path,
        cuda=Version("13.0"),
        nvcc=home.nvcc,
        cxx="g++",
        cmake=Path("cmake"),
        cmake_version=Version("4"),
        ninja=Path("ninja"),
        ccache=None,
        variables={**variables, "PYTHONPATH": str(packages), "PATH": f"{packages}/bin:{variables['PATH']}"},
    )


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.start(State(root=tmp_path / "state", runs=tmp_path / "runs"), "build-kernels", [])


def test_fp4_quantisation_is_built_and_flashinfer_compiles_nothing(
    toolchain: Toolchain, run: Run, tmp_path: Path
) -> None:
    console = Console.create()
    aimed = target("120a", toolchain.variables)
    found = {one.name: one for one in plan(toolchain, [aimed], modules(), run, console)}
    assert {name for name, one in found.items() if one.state is not Planned.TO_BUILD} <= {"norm"}
    assert found["fused-moe"].units > 50
    wanted = found["fp4-quantization"]
    assert not (tmp_path / "cache").exists()

    (built,) = build([wanted], toolchain, 2, run, console)
    assert built.path == wanted.library
    assert built.path.is_relative_to(tmp_path / "cache" / "made" / "flashinfer")
    listed = subprocess.run(
        [toolchain.cuda_home / "bin" / "cuobjdump", "--list-elf", built.path],
        env={**os.environ, **toolchain.variables},
        capture_output=True,
        text=True,
        check=True,
    )
    assert set(re.findall(r"\.(sm_\w+)\.cubin", listed.stdout)) <= {"sm_120", "sm_120a", "sm_120f"}
    assert listed.stdout

    (again,) = plan(toolchain, [aimed], [wanted.module], run, console)
    assert (again.state, again.why) == (Planned.BUILT, "")
    assert build([again], toolchain, 2, run, console) == ()
    # As a server does: the function that gets the module, but for loading it, which needs a driver.
    code = (
        "from flashinfer.jit.core import JitSpec\n"
        "from flashinfer.quantization.fp4_quantization import get_fp4_quantization_module\n"
        "JitSpec.build_and_load = lambda spec: spec.build(verbose=True)\n"
        "try:\n    get_fp4_quantization_module('120')\nexcept Exception as error:\n    print('then', error)\n"
    )
    server = subprocess.run(
        [toolchain.python, "-c", code],
        env={**os.environ, **toolchain.variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "ninja: no work to do." in server.stdout, server.stdout + server.stderr


def test_a_home_without_cublas_is_named(toolchain: Toolchain, run: Run, tmp_path: Path) -> None:
    """As the CPU stack's is."""
    small = tmp_path / "small"
    install(small, f"cuda-toolkit[{','.join(SMALL)}]==13.0.*")
    home = make_cuda_home(small, tmp_path / "cuda" / "small").path
    variables = {
        name: value.replace(str(toolchain.cuda_home), str(home)) for name, value in toolchain.variables.items()
    }
    lacking = replace(toolchain, cuda_home=home, variables=variables)
    wanted = [module for module in modules() if module.name == "fp4-gemm"]
    planned = plan(lacking, [target("120a", variables)], wanted, run, Console.create())
    with pytest.raises(errors.BuildError, match=r"the package nvidia-(cublas|curand) is not installed") as caught:
        build(planned, lacking, 1, run, Console.create())
    assert "scripts/inv setup --stack made" in (caught.value.remedy or "")

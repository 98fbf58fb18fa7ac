"""The CUDA home and the activation with NVIDIA's real wheels and compilers. No GPU is needed."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile

from sm120.stack import activation
from sm120.stack.cuda.home import CudaHome, is_current, make_cuda_home
from sm120.state import State

HERE = Path(__file__).parent
SOURCES = HERE / "cuda_sources"
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SMALL = ("nvcc", "nvvm", "crt", "cudart", "cccl")
TOOLS = ("nvidia-cuda-cuobjdump>=13.2", "nvidia-cuda-nvdisasm>=13.2")


def cpu_stack() -> Path | None:
    """Site-packages of the installed CPU stack when it has the compiler."""
    found = State.resolve().env("cpu").glob("lib/python3.*/site-packages/nvidia/cu13/bin/nvcc")
    return next((path.parents[3] for path in found), None)


# Without the CPU stack the wheels come from the package index.
pytestmark = [] if cpu_stack() else [pytest.mark.network]


def install(target: Path, *words: str) -> Path:
    """Into a folder of its own, by uv and the index that it is configured for."""
    uv = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", sys.executable]
    subprocess.run([*uv, "--target", str(target), *words], check=True, timeout=1200)
    return target


def toolkit(*extras: str) -> str:
    return f"cuda-toolkit[{','.join(extras)}]==13.0.*"


@dataclass(frozen=True)
class Bench:
    """A home, and what is built with it."""

    home: CudaHome
    site: Path
    work: Path

    def variables(self, base: Mapping[str, str] | None = None) -> dict[str, str]:
        base = {"PATH": SYSTEM_PATH, "HOME": str(self.work), "LC_ALL": "C.UTF-8", **(base or {})}
        return {
            **base,
            **activation.variables(
                "cpu",
                environment=Path(sys.prefix),
                cuda_home=self.home.path,
                cache=self.work / "cache" / "cpu",
                capability=None,
                base=base,
            ),
        }

    def run(
        self, *argv: str | Path, env: Mapping[str, str] | None = None, timeout: float = 240
    ) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            argv,
            cwd=self.work,
            env=dict(env if env is not None else self.variables()),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            check=False,
        )

    def must(self, *argv: str | Path, env: Mapping[str, str] | None = None, timeout: float = 240) -> str:
        done = self.run(*argv, env=env, timeout=timeout)
        assert done.returncode == 0, done.stdout[-4000:]
        return done.stdout

    def architectures(self, binary: Path) -> set[str]:
        listed = self.must("cuobjdump", "--list-elf", binary)
        return set(re.findall(r"\.(sm_\w+)\.cubin", listed))


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cpu_stack() or install(tmp_path_factory.mktemp("cuda-wheels") / "site", toolkit(*SMALL), *TOOLS)


@pytest.fixture
def bench(site: Path, tmp_path: Path) -> Bench:
    work = tmp_path / "work"
    work.mkdir()
    return Bench(make_cuda_home(site, tmp_path / "cuda" / "cpu"), site, work)


def needed(binary: Path) -> list[str]:
    with binary.open("rb") as file:
        dynamic = ELFFile(file).get_section_by_name(".dynamic")
        assert isinstance(dynamic, DynamicSection)
        return [str(vars(tag)["needed"]) for tag in dynamic.iter_tags() if tag.entry.d_tag == "DT_NEEDED"]


def outside(paths: Sequence[str], *roots: Path) -> list[str]:
    """Those that are neither the home's, nor the wheels', nor the host compiler's and C library's."""
    allowed = [
        *(str(root) for root in roots),
        "/usr/include/",
        "/usr/lib/gcc/",
        "/usr/lib64/gcc/",
        "/usr/local/include/",
    ]
    return [path for path in paths if not path.startswith(tuple(allowed))]


# The home


def test_the_wheels_make_a_usable_home(bench: Bench) -> None:
    home = bench.home
    assert home.usable
    assert home.version == "13.0"
    assert home.nvcc is not None
    assert home.nvcc.startswith("13.0.")
    assert home.problems == ()
    for tool in ("nvcc", "ptxas", "nvlink", "fatbinary", "cudafe++", "cuobjdump", "nvdisasm", "__nvcc_device_query"):
        assert os.access(home.path / "bin" / tool, os.X_OK), tool
    assert is_current(home.path, bench.site)
    dangling = [p for p in home.path.rglob("*") if p.is_symlink() and not p.exists()]
    assert dangling == []
    assert [name for name in home.missing if name.startswith(("bin/", "nvvm/", "lib64/libcudart", "lib64/stubs"))] == []


def test_a_program_compiles_links_and_starts(bench: Bench) -> None:
    bench.must("nvcc", "-arch=sm_120a", SOURCES / "hello.cu", "-o", "hello")
    hello = bench.work / "hello"
    assert bench.architectures(hello) == {"sm_120a"}
    assert not any(name.startswith("libcudart") for name in needed(hello)), "the static runtime is nvcc's default"
    assert bench.run(hello).returncode == 0


def test_it_links_the_shared_runtime_and_the_driver(bench: Bench) -> None:
    source = SOURCES / "driver.cpp"
    bench.must("nvcc", "-shared", "-Xcompiler", "-fPIC", "-cudart", "shared", source, "-lcuda", "-o", "libdriver.so")
    assert {"libcuda.so.1", "libcudart.so.13"} <= set(needed(bench.work / "libdriver.so"))


def test_ptx_and_fatbin(bench: Bench) -> None:
    bench.must("nvcc", "-ptx", "-arch=sm_120a", SOURCES / "hello.cu", "-o", "hello.ptx")
    assert ".target sm_120a" in (bench.work / "hello.ptx").read_text()
    bench.must("nvcc", "-fatbin", "-arch=sm_120a", SOURCES / "hello.cu", "-o", "hello.fatbin")
    assert bench.architectures(bench.work / "hello.fatbin") == {"sm_120a"}


def test_the_fp4_instruction_of_sm120(bench: Bench) -> None:
    bench.must("nvcc", "-cubin", "-arch=sm_120a", SOURCES / "fp4_mma.cu", "-o", "fp4.cubin")
    code = bench.must("cuobjdump", "-sass", "fp4.cubin")
    assert re.search(r"OMMA\.SF\.16864\.F32\.E2M1\.E2M1\.UE4M3\.4X", code), code


def test_plain_sm120_has_no_such_instruction(bench: Bench) -> None:
    done = bench.run("nvcc", "-cubin", "-arch=sm_120", SOURCES / "fp4_mma.cu", "-o", "fp4.cubin")
    assert done.returncode != 0
    assert re.search(r"not supported on .target 'sm_120'", done.stdout), done.stdout


def test_it_works_under_a_path_with_a_space(site: Path, tmp_path: Path) -> None:
    (tmp_path / "w").mkdir()
    made = Bench(make_cuda_home(site, tmp_path / "a state" / "cpu"), site, tmp_path / "w")
    assert any("has a space" in problem for problem in made.home.problems)
    made.must("nvcc", "-arch=sm_120a", SOURCES / "hello.cu", "-o", "hello")
    assert made.architectures(tmp_path / "w" / "hello") == {"sm_120a"}


# The activation


def test_the_host_compiler_finds_cccl(bench: Bench) -> None:
    bench.must("g++", "-std=c++17", SOURCES / "cccl_host.cpp", "-o", "host")
    assert bench.run(bench.work / "host").returncode == 0


def test_without_the_activation_it_does_not(bench: Bench) -> None:
    done = bench.run(
        *("g++", "-std=c++17", f"-I{bench.home.path}/include", SOURCES / "cccl_host.cpp", "-o", "host"),
        env={"PATH": SYSTEM_PATH},
    )
    assert done.returncode != 0
    assert re.search(r"cuda/(atomic|std/utility): No such file", done.stdout), done.stdout


def test_the_host_linker_finds_the_driver_by_name(bench: Bench) -> None:
    """As SGLang's JIT links: -lcuda, and no folder for it."""
    words = ("g++", "-shared", "-fPIC", f"-I{bench.home.path}/include", SOURCES / "driver.cpp", "-lcuda", "-o", "d.so")
    bench.must(*words)
    assert "libcuda.so.1" in needed(bench.work / "d.so")
    without = {**bench.variables(), "LIBRARY_PATH": ""}
    assert "-lcuda" in bench.run(*words, env=without).stdout or shutil.which("nvidia-smi")


def test_an_empty_path_list_is_not_the_current_folder(bench: Bench) -> None:
    """What is left of CPATH when only another toolkit's folder was in it."""
    (bench.work / "stray.h").write_text("int stray;\n")
    (bench.work / "stray.c").write_text("#include <stray.h>\n")
    env = bench.variables({"CPATH": "/usr/local/cuda/include"})
    assert env["CPATH"] == ""
    done = bench.run("gcc", "-c", "stray.c", env=env)
    assert "No such file" in done.stdout


@pytest.fixture
def poisoned(tmp_path: Path) -> Path:
    """Another toolkit, whose every header stops the compiler, and whose every program fails."""
    root = tmp_path / "cuda-12.1"
    for name in ("cuda.h", "cuda_runtime.h", "cuda_fp4.h", "cuda/atomic", "cuda/std/utility"):
        path = root / "include" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#error the other toolkit's header\n")
    (root / "bin").mkdir()
    for name in ("nvcc", "ptxas", "cicc", "cudafe++", "fatbinary"):
        program = root / "bin" / name
        program.write_text("#!/bin/sh\necho the other toolkit\nexit 1\n")
        program.chmod(0o755)
    (root / "lib64").mkdir()
    (root / "lib64" / "libcudart.so").write_text("not a library")
    (root / "lib64" / "libcudart_static.a").write_text("not a library")
    return root


def with_other_toolkit(poisoned: Path) -> dict[str, str]:
    return {
        "CUDA_HOME": str(poisoned),
        "CUDA_PATH": str(poisoned),
        "CUDAToolkit_ROOT": str(poisoned),
        "CUDACXX": f"{poisoned}/bin/nvcc",
        "CPATH": f"{poisoned}/include",
        "CPLUS_INCLUDE_PATH": f"{poisoned}/include",
        "LIBRARY_PATH": f"{poisoned}/lib64",
        "LD_LIBRARY_PATH": f"{poisoned}/lib64",
        "PATH": f"{poisoned}/bin:{SYSTEM_PATH}",
    }


def test_another_toolkit_that_the_user_has_set_does_not_leak_in(bench: Bench, poisoned: Path) -> None:
    theirs = with_other_toolkit(poisoned)
    host = ("g++", "-std=c++17", SOURCES / "cccl_host.cpp", "-o", "host")
    assert "the other toolkit" in bench.run(*host, env=theirs).stdout, "it would leak in"

    env = bench.variables(theirs)
    bench.must(*host, env=env)
    bench.must("nvcc", "-arch=sm_120a", SOURCES / "hello.cu", "-o", "hello", env=env)


@pytest.mark.slow
def test_nor_into_cmake(bench: Bench, poisoned: Path) -> None:
    env = bench.variables(with_other_toolkit(poisoned))
    bench.must(sys.executable, "-m", "cmake", "-S", SOURCES / "project", "-B", "build", env=env)
    assert str(poisoned) not in (bench.work / "build" / "CMakeCache.txt").read_text()


def test_nothing_is_read_from_a_system_toolkit(bench: Bench) -> None:
    """Whatever is installed below /usr/local/cuda: no header and no program of it takes part."""
    home, site = bench.home.path, bench.site
    for compiler, source in (("nvcc", "hello.cu"), ("g++", "cccl_host.cpp")):
        listed = bench.must(compiler, "-M", *(["-arch=sm_120a"] if compiler == "nvcc" else []), SOURCES / source)
        headers = listed.split(":", 1)[1].replace("\\\n", " ").split()
        assert len(headers) > 50
        assert outside(headers, home, site, SOURCES) == []
    steps = bench.must("nvcc", "--dryrun", "-arch=sm_120a", SOURCES / "hello.cu", "-o", "hello")
    assert f"_HERE_={home}/bin" in steps
    assert "/usr/local/cuda" not in steps.replace(str(home), "")
    assert shutil.which("ptxas", path=bench.variables()["PATH"]) == str(home / "bin" / "ptxas")


# CMake


@pytest.mark.parametrize("space", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_cmake_takes_it_for_a_toolkit(site: Path, tmp_path: Path, space: bool) -> None:
    work = tmp_path / "work"
    work.mkdir()
    bench = Bench(make_cuda_home(site, tmp_path / ("a state" if space else "state") / "cpu"), site, work)
    cmake = (sys.executable, "-m", "cmake")
    bench.must(*cmake, "-S", SOURCES / "project", "-B", "build", "-DCMAKE_CUDA_ARCHITECTURES=120a-real")
    version, programs, libraries, headers = (work / "build" / "found.txt").read_text().splitlines()
    home = bench.home.path
    assert version == bench.home.nvcc
    assert Path(programs) == home / "bin"
    assert Path(libraries).is_relative_to(home)
    assert all(Path(folder).is_relative_to(home) for folder in headers.split(";"))
    bench.must(*cmake, "--build", "build")
    assert bench.architectures(work / "build" / "hello") == {"sm_120a"}
    assert "libcuda.so.1" in needed(work / "build" / "libdriver.so")
    has_nvrtc = (home / "lib64" / "libnvrtc.so").exists()
    assert (work / "build" / "libnvrtc_user.so").exists() is has_nvrtc


# FlashInfer. Its own JIT, in a Python with a CPU build of torch: it compiles against tvm-ffi, not against torch.


@pytest.fixture(scope="session")
def large_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With what FlashInfer's sources include besides: cublasLt.h, curand_kernel.h."""
    return install(tmp_path_factory.mktemp("cuda-wheels") / "large", toolkit(*SMALL, "cublas", "curand"), *TOOLS)


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("version", ["0.7.2", "0.6.12"])
def test_flashinfers_fp4_quantiser_is_built_for_sm120a(large_site: Path, tmp_path: Path, version: str) -> None:
    stack = cpu_stack()
    assert stack is not None, "torch comes from the CPU stack: invoke setup --stack cpu"
    python = stack.parents[2] / "bin" / "python"
    (tmp_path / "work").mkdir()
    bench = Bench(make_cuda_home(large_site, tmp_path / "cuda" / "stable"), large_site, tmp_path / "work")
    packages = tmp_path / "packages"
    install(packages, "--no-deps", f"flashinfer-python=={version}", "apache-tvm-ffi==0.1.11")
    install(packages, "click", "einops", "ninja", "nvidia-ml-py", "packaging", "requests", "tabulate", "tqdm")

    env = bench.variables({"PYTHONPATH": str(packages), "MAX_JOBS": "2"})
    env["PATH"] = f"{packages}/bin:{env['PATH']}"
    said = bench.must(python, HERE / "build_flashinfer.py", env=env, timeout=2000)
    library = Path(said.splitlines()[-1].removeprefix("library "))
    assert library.is_relative_to(bench.work / "cache" / "cpu" / "flashinfer")
    assert bench.architectures(library) == {"sm_120a"}
    assert "libcudart.so.13" in needed(library)

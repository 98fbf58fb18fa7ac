"""The CUDA home from made-up wheels. The real ones are in tests/integration/toolkit/test_cuda_home.py."""

import ctypes
import itertools
import json
import os
import platform
import shutil
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

from sm120 import errors, files
from sm120.stack.cuda import home as cuda
from sm120.stack.cuda import stub as cuda_stub
from sm120.stack.cuda.home import CudaHome, is_current, make_cuda_home, read_cuda_home

NVCC = """#!/bin/sh
echo 'nvcc: NVIDIA (R) Cuda compiler driver'
echo 'Cuda compilation tools, release {0}, V{0}.88'
"""
CUDA_H = """
#include <stddef.h>
typedef int CUresult;
#define cuMemAlloc cuMemAlloc_v2
#ifdef CUDA_API_PER_THREAD_DEFAULT_STREAM
#define cuLaunch cuLaunch_ptsz
#endif
#if defined(__CUDA_API_VERSION_INTERNAL)
#undef cuMemAlloc
CUresult cuMemAlloc_v2(size_t bytes);
#endif
typedef void (*CUstreamCallback)(int cuNotAFunction);
CUresult cuInit(unsigned int flags);  /* cuOnlyInAComment(void); */
CUresult cuMemAlloc(size_t bytes);
CUresult cuLaunch(void);
"""
FILES: Mapping[str, str] = {
    "bin/nvcc": NVCC.format("13.0"),
    "bin/nvcc.profile": "TOP = $(_HERE_)/..",
    "bin/ptxas": "program",
    "bin/cuobjdump": "program",
    "bin/nvdisasm": "program",
    "bin/crt/link.stub": "stub",
    "nvvm/bin/cicc": "program",
    "nvvm/libdevice/libdevice.10.bc": "bitcode",
    "include/cuda.h": CUDA_H,
    "include/cudaProfiler.h": "int cuProfilerStart(void);\n",
    "include/cuda_runtime.h": "#include <crt/host_config.h>\n",
    "include/cuda_runtime_api.h": "#define CUDART_VERSION  13000\n",
    "include/cuda_profiler_api.h": "",
    "include/crt/host_config.h": "",
    "include/cccl/cuda/std/utility": "",
    "include/cupti.h": "",
    "include/nvml.h": "typedef int nvmlReturn_t;\nnvmlReturn_t nvmlInit_v2(void);\n",
    "include/nvtx3/nvToolsExt.h": "",
    "include/nvvm.h": "",
    "lib/libcudart.so.13": "library",
    "lib/libcudart_static.a": "library",
    "lib/libcudadevrt.a": "library",
    "lib/libnvrtc.so.13": "library",
    "lib/libnvrtc-builtins.so.13.0": "library",
    "lib/libnvJitLink.so.13": "library",
    "lib/libcublas.so.13": "library",
    "lib/libcublasLt.so.13": "library",
    "lib/libcusolver.so.12": "library",
    "lib/libcusparse.so.12": "library",
    "lib/libcurand.so.10": "library",
    "lib/libcufft.so.12": "library",
    "lib/libnvvm.so.4": "library",
    "lib/libcheckpoint.so": "library",
    "lib/cmake/cccl/cccl-config.cmake": "",
}
PLATFORM = cuda.TARGETS.get(platform.machine(), f"{platform.machine()}-linux")


def put(root: Path, content: Mapping[str, str]) -> None:
    for name, text in content.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        if name.startswith("bin/") and "." not in name:
            path.chmod(0o755)


def without(*names: str) -> dict[str, str]:
    return {name: text for name, text in FILES.items() if name not in names}


def packages(site: Path, *names: str) -> None:
    for name in names:
        (site / f"{name}.dist-info").mkdir(parents=True)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Site-packages with a whole toolkit."""
    made = tmp_path / "site-packages"
    put(made / "nvidia" / "cu13", FILES)
    packages(made, "nvidia_cuda_nvcc-13.0.88", "nvidia_cuda_runtime-13.0.96", "cuda_toolkit-13.0.3.0", "numpy-2.4.6")
    return made


@pytest.fixture(autouse=True)
def quick_stubs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling takes half a second: only the tests of the stubs do."""
    if "real_stubs" not in request.fixturenames:
        monkeypatch.setattr(cuda_stub, "make_stub", lambda stub, include, library, compiler: library.write_text("stub"))


@pytest.fixture
def real_stubs() -> None:
    """Asks for stubs that are compiled."""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "state" / "cuda" / "stable"


def links_of(home: Path) -> list[Path]:
    found = (Path(folder, name) for folder, names, others in os.walk(home) for name in (*names, *others))
    return [path for path in found if path.is_symlink()]


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(p): (p.lstat().st_mtime_ns, p.lstat().st_size) for p in sorted(folder.rglob("*"))}


def exported(library: Path) -> tuple[set[str], str]:
    with library.open("rb") as file:
        elf = ELFFile(file)
        dynamic, table = elf.get_section_by_name(".dynamic"), elf.get_section_by_name(".dynsym")
        assert isinstance(dynamic, DynamicSection)
        assert isinstance(table, SymbolTableSection)
        symbols = {symbol.name for symbol in table.iter_symbols()} - {""}
        soname = next(str(vars(tag)["soname"]) for tag in dynamic.iter_tags() if tag.entry.d_tag == "DT_SONAME")
    return symbols, soname


# What it looks like


def test_it_is_laid_out_like_an_installed_toolkit(site: Path, home: Path) -> None:
    before = snapshot(site)
    made = make_cuda_home(site, home)

    assert made == CudaHome(path=home, version="13.0", nvcc="13.0.88", usable=True, missing=(), problems=())
    assert (home / "include").readlink() == Path(f"targets/{PLATFORM}/include")
    assert (home / "lib64").readlink() == Path(f"targets/{PLATFORM}/lib")
    assert (home / "lib").resolve() == (home / "lib64").resolve()
    assert not (home / "bin").is_symlink(), "nvcc takes its own path for the toolkit's"
    assert (home / "bin" / "nvcc").readlink() == site / "nvidia" / "cu13" / "bin" / "nvcc"
    assert (home / "bin" / "crt" / "link.stub").read_text() == "stub"
    assert (home / "include" / "cccl" / "cuda" / "std" / "utility").is_file()
    assert (home / "lib64" / "libcudart.so").resolve() == site / "nvidia" / "cu13" / "lib" / "libcudart.so.13"
    assert (home / "lib64" / "libnvrtc-builtins.so").readlink() == Path("libnvrtc-builtins.so.13.0")
    assert (home / "lib64" / "cmake" / "cccl" / "cccl-config.cmake").is_file()
    assert (home / "nvvm" / "bin" / "cicc").read_text() == "program"
    assert (home / "nvvm" / "lib64" / "libnvvm.so").resolve().name == "libnvvm.so.4"
    assert (home / "nvvm" / "include" / "nvvm.h").is_file()
    assert (home / "extras" / "CUPTI" / "include" / "cupti.h").is_file()
    assert (home / "extras" / "CUPTI" / "lib64").resolve() == (home / "lib64").resolve()
    assert json.loads((home / "version.json").read_text()) == {
        "cuda": {"name": "CUDA SDK", "version": "13.0.3"},
        "cuda_nvcc": {"name": "CUDA NVCC", "version": "13.0.88"},
    }
    links = links_of(home)
    assert len(links) > 20
    assert [link for link in links if not link.exists()] == []
    assert all(link.resolve().is_relative_to(site) or link.resolve().is_relative_to(home) for link in links)
    assert snapshot(site) == before, "site-packages is never touched"


@pytest.mark.parametrize(("machine", "target"), [("aarch64", "sbsa-linux"), ("riscv64", "riscv64-linux")])
def test_the_platform_folder_has_nvidias_name(
    site: Path, home: Path, monkeypatch: pytest.MonkeyPatch, machine: str, target: str
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert make_cuda_home(site, home).usable
    assert (home / "include").readlink() == Path(f"targets/{target}/include")


def test_the_unversioned_name_leads_to_the_highest_version(site: Path, home: Path) -> None:
    put(site / "nvidia/cu13/lib", {"libnvrtc.so.9": "old", "libcublas.so.13.10": "", "libcublas.so.13.9": ""})
    make_cuda_home(site, home)
    assert (home / "lib64" / "libnvrtc.so").readlink() == Path("libnvrtc.so.13")
    assert (home / "lib64" / "libcublas.so").readlink() == Path("libcublas.so.13.10")


def test_an_unversioned_library_of_the_wheel_stays(site: Path, home: Path) -> None:
    put(site / "nvidia/cu13/lib", {"libcheckpoint.so.2": "other"})
    make_cuda_home(site, home)
    assert (home / "lib64" / "libcheckpoint.so").readlink() == site / "nvidia/cu13/lib/libcheckpoint.so"


# What is missing


@pytest.mark.parametrize("part", [part for part in cuda.PARTS if "stubs" not in part.path], ids=lambda part: part.path)
def test_a_missing_part_is_named_with_its_package(site: Path, home: Path, part: cuda.Part) -> None:
    stem = part.path.replace("lib64/", "lib/")
    for path in (site / "nvidia" / "cu13").glob(f"{stem}*"):
        if path.name == Path(stem).name or path.name.startswith(f"{Path(stem).name}."):
            path.unlink()
    made = make_cuda_home(site, home)
    assert f"{part.path} ({part.package})" in made.missing
    assert made.usable is not part.essential


def test_nothing_of_cuda_is_an_error_with_a_cure(tmp_path: Path, home: Path) -> None:
    put(tmp_path / "site" / "nvidia" / "cudnn", {"README": ""})
    with pytest.raises(errors.BinaryError, match="no CUDA toolkit among the packages") as caught:
        make_cuda_home(tmp_path / "site", home)
    assert "nvidia-cuda-nvcc" in (caught.value.remedy or "")
    assert not home.parent.exists()


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        (NVCC, 0o644, "nvcc does not start"),
        ("#!/no/such/interpreter\n", 0o755, "nvcc does not start"),
        ("#!/bin/sh\necho it is broken; exit 3\n", 0o755, "ended with 3 and said: it is broken"),
        ("#!/bin/sh\n", 0o755, "ended with 0 and said: nothing"),
    ],
)
def test_a_compiler_that_does_not_start_is_no_toolkit(site: Path, home: Path, text: str, mode: int, said: str) -> None:
    nvcc = site / "nvidia/cu13/bin/nvcc"
    nvcc.write_text(text)
    nvcc.chmod(mode)
    made = make_cuda_home(site, home)
    assert made.nvcc is None
    assert not made.usable
    assert any(said in problem for problem in made.problems)


def test_a_program_without_the_permission_is_named(site: Path, home: Path) -> None:
    shutil.copy("/bin/true", site / "nvidia/cu13/bin/ptxas")
    (site / "nvidia/cu13/bin/ptxas").chmod(0o644)
    (problem,) = make_cuda_home(site, home).problems
    assert problem == f"{site}/nvidia/cu13/bin/ptxas may not be executed: it lacks the permission"


# Versions


def test_a_compiler_of_another_cuda_than_the_headers_is_said(site: Path, home: Path) -> None:
    put(site / "nvidia" / "cu13", {"bin/nvcc": NVCC.format("13.2")})
    made = make_cuda_home(site, home)
    assert (made.version, made.nvcc) == ("13.0", "13.2.88")
    assert made.problems == ("nvcc is 13.2.88, but the headers are of CUDA 13.0: only equal ones fit",)


@pytest.mark.parametrize(
    ("defined", "version"), [("#define CUDART_VERSION 12090", "12.9"), ("  #  define CUDART_VERSION\t13020", "13.2")]
)
def test_the_version_is_that_of_the_headers(site: Path, home: Path, defined: str, version: str) -> None:
    put(site / "nvidia" / "cu13", {"include/cuda_runtime_api.h": f"/* … */\n{defined}\n"})
    assert make_cuda_home(site, home).version == version
    assert json.loads((home / "version.json").read_text())["cuda"]["version"] == f"{version}.0"


def test_headers_without_a_version(site: Path, home: Path) -> None:
    put(site / "nvidia" / "cu13", {"include/cuda_runtime_api.h": "#define CUDART_VERSION"})
    assert make_cuda_home(site, home).version is None
    assert not (home / "version.json").exists()


# Which folders


def test_of_whole_toolkits_the_newest_with_a_compiler(site: Path, home: Path) -> None:
    put(site / "nvidia" / "cu9", FILES)
    put(site / "nvidia" / "cu14", {"lib/libcudart.so.14": ""})
    make_cuda_home(site, home)
    assert (home / "bin" / "nvcc").resolve() == site / "nvidia/cu13/bin/nvcc"
    assert not (home / "lib64" / "libcudart.so.14").exists()


def test_a_library_package_of_another_cuda_beside_it_lends_nothing(site: Path, home: Path) -> None:
    (site / "nvidia/cu13/lib/libcublas.so.13").unlink()
    put(site / "nvidia" / "cublas", {"lib/libcublas.so.12": "", "include/cublas_v2.h": ""})
    made = make_cuda_home(site, home)
    assert "lib64/libcublas.so (nvidia-cublas)" in made.missing
    assert not (home / "include" / "cublas_v2.h").exists()


def test_folders_of_single_components_become_one_toolkit(tmp_path: Path, home: Path) -> None:
    nvidia = tmp_path / "site" / "nvidia"
    put(nvidia / "cuda_cccl", {"include/cccl/cuda/std/utility": "", "include/same.h": "1", "include/crt/more.h": ""})
    put(nvidia / "cuda_nvcc", without("include/cccl/cuda/std/utility", "lib/libcublas.so.13", "lib/libcublasLt.so.13"))
    put(nvidia / "cuda_nvcc", {"include/same.h": "1", "include/__init__.py": "", "include/nvml.h": "int nvmlA(void);"})
    put(nvidia / "cublas", {"lib/libcublas.so.12": "", "lib/libcublasLt.so.12": "", "include/nvml.h": "different"})
    put(nvidia / "cudnn", {"lib/libcudnn.so.9": "", "include/cudnn.h": ""})
    made = make_cuda_home(tmp_path / "site", home)
    assert made.usable
    assert made.missing == ()
    assert (home / "lib64" / "libcublas.so").readlink() == Path("libcublas.so.12")
    assert sorted(path.name for path in (home / "include" / "crt").iterdir()) == ["host_config.h", "more.h"]
    assert (home / "include" / "nvml.h").read_text() == "int nvmlA(void);", "nvcc's own folder comes first"
    (problem,) = made.problems
    assert problem == f"{nvidia}/cuda_nvcc/include/nvml.h and {nvidia}/cublas/include/nvml.h differ: the first is used"
    assert not (home / "include" / "cudnn.h").exists()
    assert not (home / "include" / "__init__.py").exists()


def test_a_file_in_the_place_of_a_folder_is_said(tmp_path: Path, home: Path) -> None:
    nvidia = tmp_path / "site" / "nvidia"
    put(nvidia / "cuda_nvcc", FILES)
    put(nvidia / "cuda_other", {"include/crt": "a file"})
    (problem,) = make_cuda_home(tmp_path / "site", home).problems
    assert problem == f"{nvidia}/cuda_nvcc/include/crt and {nvidia}/cuda_other/include/crt differ: the first is used"
    assert (home / "include" / "crt" / "host_config.h").is_file()


def test_a_dangling_link_in_the_wheels_is_left_out_and_said(site: Path, home: Path) -> None:
    (site / "nvidia/cu13/include/gone.h").symlink_to("nowhere.h")
    made = make_cuda_home(site, home)
    assert made.problems == (f"{site}/nvidia/cu13/include/gone.h is a dangling link",)
    assert not (home / "include" / "gone.h").is_symlink()


# Stubs


def test_the_stubs_export_what_the_headers_declare(site: Path, home: Path, real_stubs: None) -> None:
    make_cuda_home(site, home)
    stub = home / "lib64" / "stubs" / "libcuda.so"
    names = {"cuInit", "cuMemAlloc", "cuMemAlloc_v2", "cuLaunch", "cuLaunch_ptsz", "cuProfilerStart"}
    assert exported(stub) == (names, "libcuda.so.1")
    assert exported(home / "lib64/stubs/libnvidia-ml.so") == ({"nvmlInit_v2"}, "libnvidia-ml.so.1")
    loaded = ctypes.CDLL(str(stub))
    assert loaded.cuInit(0) == 34, "CUDA_ERROR_STUB_LIBRARY"
    assert sorted(path.name for path in stub.parent.iterdir()) == ["libcuda.so", "libnvidia-ml.so"]


def test_headers_that_do_not_compile_leave_the_stub_out(site: Path, home: Path, real_stubs: None) -> None:
    put(site / "nvidia" / "cu13", {"include/cuda.h": "#error not today\n"})
    made = make_cuda_home(site, home)
    assert made.usable, "only -lcuda does not link"
    (missing,) = made.missing
    assert missing.startswith("lib64/stubs/libcuda.so ")
    (problem,) = made.problems
    assert "no lib64/stubs/libcuda.so, so -lcuda does not link" in problem
    assert "not today" in problem


def test_headers_that_declare_nothing(site: Path, home: Path, real_stubs: None) -> None:
    put(site / "nvidia" / "cu13", {"include/nvml.h": "int other(void);\n"})
    (problem,) = make_cuda_home(site, home).problems
    assert "declares no function nvml" in problem


def test_a_compiler_that_hangs_is_given_up(
    site: Path, home: Path, monkeypatch: pytest.MonkeyPatch, real_stubs: None
) -> None:
    compiler = site.parent / "cc"
    compiler.write_text("#!/bin/sh\nexec sleep 60\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(cuda_stub, "find_compiler", lambda: str(compiler))
    monkeypatch.setattr(cuda_stub, "_TIMEOUT", 0.2)
    assert all("did not end within" in problem for problem in make_cuda_home(site, home).problems)


def test_without_a_compiler_the_stub_is_missing_and_made_when_there_is_one(
    site: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setenv("PATH", str(site))
        made = make_cuda_home(site, home)
    assert made.missing == ("lib64/stubs/libcuda.so (a C compiler: cc, gcc or clang)",)
    assert made.usable
    assert make_cuda_home(site, home).missing == ()


# Again


def test_a_current_home_is_no_work(site: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_cuda_home(site, home)
    before = snapshot(home.parent)
    monkeypatch.setattr(cuda, "_make", lambda *_: pytest.fail("made again"))
    monkeypatch.setattr(files, "lock", lambda *_: pytest.fail("a folder that is only read needs no lock"))
    assert make_cuda_home(site, home) == made
    assert is_current(home, site)
    assert snapshot(home.parent) == before


def test_a_home_of_another_layout_is_made_again(site: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_cuda_home(site, home)
    monkeypatch.setattr(cuda, "LAYOUT", cuda.LAYOUT + 1)
    assert not is_current(home, site)


def test_relative_paths_name_the_same_home(site: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(site.parent)
    made = make_cuda_home(Path("site-packages"), Path("state/cuda/stable"))
    assert made.path == home
    assert is_current(home, site)


def add_library(site: Path, home: Path) -> None:
    put(site / "nvidia/cu13/lib", {"libnew.so.1": ""})


def replace_header(site: Path, home: Path) -> None:
    path = site / "nvidia/cu13/include/cuda.h"
    path.with_suffix(".new").write_text(f"{CUDA_H}// new")
    path.with_suffix(".new").rename(path)


def upgrade(site: Path, home: Path) -> None:
    (site / "nvidia_cuda_nvcc-13.0.88.dist-info").rename(site / "nvidia_cuda_nvcc-13.0.99.dist-info")


def move_away_a_linked_file(site: Path, home: Path) -> None:
    folder = site / "nvidia/cu13/bin"
    stat = folder.stat()
    (folder / "cuobjdump").unlink()
    os.utime(folder, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def break_a_link_of_the_home(site: Path, home: Path) -> None:
    (home / "nvvm" / "bin").unlink()
    (home / "nvvm" / "bin").symlink_to("nowhere")


def damage_the_manifest(site: Path, home: Path) -> None:
    (home / cuda.MANIFEST).write_text('{"stamp": ')


def empty_the_manifest(site: Path, home: Path) -> None:
    content = json.loads((home / cuda.MANIFEST).read_text())
    (home / cuda.MANIFEST).write_text(json.dumps({"stamp": content["stamp"]}))


@pytest.mark.parametrize(
    "change",
    [
        add_library,
        replace_header,
        upgrade,
        move_away_a_linked_file,
        break_a_link_of_the_home,
        damage_the_manifest,
        empty_the_manifest,
    ],
)
def test_a_changed_home_is_made_again(site: Path, home: Path, change: object) -> None:
    make_cuda_home(site, home)
    assert callable(change)
    change(site, home)
    assert not is_current(home, site)
    assert read_cuda_home(home, site) is None
    make_cuda_home(site, home)
    assert is_current(home, site)
    assert [link for link in links_of(home) if not link.exists()] == []
    assert (home / "lib64" / "libnew.so").exists() is (change is add_library)
    assert ("// new" in (home / "include" / "cuda.h").read_text()) is (change is replace_header)
    assert (home / "bin" / "cuobjdump").exists() is (change is not move_away_a_linked_file)
    assert [path.name for path in home.parent.iterdir() if path.name.endswith(".tmp")] == []


def test_a_home_of_other_packages_or_another_place_is_not_current(site: Path, home: Path) -> None:
    make_cuda_home(site, home)
    other = site.with_name("other")
    shutil.copytree(site, other)
    assert not is_current(home, other)
    moved = home.rename(home.with_name("moved"))
    assert not is_current(moved, site)
    assert not is_current(home, site)


def test_several_at_once_make_it_once(site: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = itertools.count()
    real = cuda._make

    def counted(site: Path, roots: Iterable[Path], home: Path) -> CudaHome:
        next(count)
        return real(site, list(roots), home)

    monkeypatch.setattr(cuda, "_make", counted)
    with ThreadPoolExecutor(4) as pool:
        made = set(pool.map(lambda _: make_cuda_home(site, home), range(4)))
    assert len(made) == 1
    assert next(count) == 1


# Whole or absent, and nobody else's


def test_an_interrupted_making_leaves_the_former_home(site: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_cuda_home(site, home)
    before = snapshot(home)
    add_library(site, home)
    with monkeypatch.context() as patched:
        patched.setattr(cuda, "_look_over", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            make_cuda_home(site, home)
    assert snapshot(home) == before
    assert sorted(path.name for path in home.parent.iterdir()) == [".stable.lock", "stable"]


def test_what_a_killed_making_left_is_removed(site: Path, home: Path) -> None:
    rubble = home.parent / ".stable.abc.tmp"
    (rubble / "new").mkdir(parents=True)
    other = home.parent / ".nightly.abc.tmp"
    other.mkdir()
    make_cuda_home(site, home)
    assert not rubble.exists()
    assert other.exists()


def test_a_home_that_cannot_be_put_in_place_leaves_the_former_one(tmp_path: Path) -> None:
    put(tmp_path / "home", {"a": "former"})
    with pytest.raises(FileNotFoundError):
        cuda._exchange(tmp_path / "no such new one", tmp_path / "home", tmp_path / "old")
    assert (tmp_path / "home" / "a").read_text() == "former"


def test_what_is_not_ours_is_not_removed(site: Path, home: Path) -> None:
    put(home, {"precious": "data"})
    with pytest.raises(errors.PreflightError, match="not a CUDA home that the toolkit made") as caught:
        make_cuda_home(site, home)
    assert (home / "precious").read_text() == "data"
    assert caught.value.remedy == f"move it away: mv {home} {home}.old"


@pytest.mark.parametrize("kind", ["link", "file"])
def test_a_link_or_a_file_in_its_place_is_not_ours(site: Path, home: Path, kind: str) -> None:
    home.parent.mkdir(parents=True)
    if kind == "link":
        elsewhere = make_cuda_home(site, home.with_name("elsewhere"))
        home.symlink_to(elsewhere.path)
    else:
        home.write_text("")
    with pytest.raises(errors.PreflightError, match="not a CUDA home"):
        make_cuda_home(site, home)
    assert home.is_symlink() is (kind == "link")


def test_an_empty_folder_is_taken(site: Path, home: Path) -> None:
    home.mkdir(parents=True)
    assert make_cuda_home(site, home).usable


def test_a_place_that_cannot_be_written_is_said(site: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(errors.PreflightError, match="cannot write"):
        make_cuda_home(site, tmp_path / "file" / "cuda" / "stable")


def test_a_space_in_the_path_is_said(site: Path, tmp_path: Path) -> None:
    made = make_cuda_home(site, tmp_path / "my state" / "stable")
    assert made.usable
    (problem,) = made.problems
    assert "has a space: nvcc and CMake work, but FlashInfer" in problem
    assert replace(made, problems=()).missing == ()

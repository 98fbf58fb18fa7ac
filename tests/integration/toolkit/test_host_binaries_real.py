"""The readers against files that others made: gcc's libraries, libc, the torch of the CPU stack; pyelftools agrees."""

import ctypes.util
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from elftools.elf.dynamic import DynamicSegment
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sm120 import errors
from sm120.host.binaries import clashes, elf, kernel_libraries, wheel_facts
from sm120.host.facts import Library
from sm120.stack import load_stack
from sm120.stack.install.environment import look
from sm120.state import State

ALL = re.compile(rb".")
# The function of libc10 that a failing TORCH_CHECK calls; its mangled name spells the types of its arguments.
REAL = "_ZN3c106detail14torchCheckFailEPKcS2_jRKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"
ALTERED = REAL.replace("S2_j", "S2_i")  # unsigned int became int: pitfall A01


def compile_library(
    path: Path, source: str, *, soname: str | None = None, link: Sequence[Path] = (), options: Sequence[str] = ()
) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    words = ["gcc", "-shared", "-fPIC", "-nostdlib", "-Wl,--no-as-needed", "-x", "c", "-", "-x", "none"]
    words += ["-o", str(path), *map(str, link), *options, *([f"-Wl,-soname,{soname}"] if soname else [])]
    subprocess.run(words, input=source, text=True, check=True, timeout=60)
    return path


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """An environment whose torch is for CUDA 13 and takes ``int`` where an older one took ``unsigned int``."""
    folder = tmp_path / "env/lib/python3.11/site-packages"
    cudart = compile_library(folder / "nvidia/cu13/lib/libcudart.so.13", "void f(void) {}", soname="libcudart.so.13")
    check = "void _ZN3c104cuda29c10_cuda_check_implementationEiPKcS2_ib(void) {}"
    rpath = ["-Wl,-rpath,$ORIGIN/../../nvidia/cu13/lib"]
    compile_library(folder / "torch/lib/libc10.so", check, soname="libc10.so", link=[cudart], options=rpath)
    return folder


def test_the_two_faults_of_a_kernel_package_are_told_apart(site: Path, tmp_path: Path) -> None:
    old = compile_library(tmp_path / "cu12/libcudart.so.12", "void g(void) {}", soname="libcudart.so.12")
    c10 = site / "torch/lib/libc10.so"
    call = "void _ZN3c104cuda29c10_cuda_check_implementationEiPKcS2_{}(void); void run(void) {{ {} }}"
    name = "_ZN3c104cuda29c10_cuda_check_implementationEiPKcS2_"
    compile_library(site / "sgl_kernel/cuda.so", call.format("ib", f"{name}ib();"), link=[old, c10])
    compile_library(site / "sgl_kernel/abi.so", call.format("jb", f"{name}jb();"), link=[c10])
    compile_library(site / "sgl_kernel/good.so", call.format("ib", f"{name}ib();"), link=[c10])
    found = {library.path: library for library in kernel_libraries(site)}
    assert found["sgl_kernel/cuda.so"] == Library(
        path="sgl_kernel/cuda.so", needed=("libcudart.so.12", "libc10.so"), unresolved_cuda=("libcudart.so.12",)
    )
    assert found["sgl_kernel/abi.so"] == Library(
        path="sgl_kernel/abi.so", needed=("libc10.so",), undefined_torch=(f"{name}jb",)
    )
    assert found["sgl_kernel/good.so"] == Library(path="sgl_kernel/good.so", needed=("libc10.so",))
    assert found["torch/lib/libc10.so"] == Library(path="torch/lib/libc10.so", needed=("libcudart.so.13",))


def test_versions_weakness_and_visibility_are_as_the_linker_wrote_them(tmp_path: Path) -> None:
    script = tmp_path / "versions.map"
    script.write_text("V1 { global: torch_one; torch_two; local: *; };\n")
    source = """
        void torch_one(void) {}
        void torch_two(void) {}
        void torch_hidden(void) {}
    """
    lib = compile_library(tmp_path / "libv.so", source, soname="libv.so.1", options=[f"-Wl,--version-script={script}"])
    assert elf.read(lib, ALL).exported >= {b"torch_one", b"torch_two"}
    assert b"torch_hidden" not in elf.read(lib, ALL).exported
    source = """
        void torch_one(void);
        __attribute__((weak)) void torch_two(void);
        void torch_gone(void);
        void run(void) { torch_one(); if (torch_two) torch_two(); torch_gone(); }
    """
    user = elf.read(compile_library(tmp_path / "user.so", source, link=[lib]), re.compile(rb"torch_"))
    assert user.needed == ("libv.so.1",)
    assert user.undefined == {b"torch_one", b"torch_gone"}  # versioned in the file: torch_one@V1


def _by_pyelftools(path: Path) -> elf.Elf:
    with path.open("rb") as file:
        read = ELFFile(file)
        (dynamic,) = (segment for segment in read.iter_segments() if isinstance(segment, DynamicSegment))
        tags: list[tuple[str, Any]] = [(tag.entry.d_tag, tag) for tag in dynamic.iter_tags()]
        search = [t.runpath for kind, t in tags if kind == "DT_RUNPATH"] or [
            t.rpath for k, t in tags if k == "DT_RPATH"
        ]
        table = read.get_section_by_name(".dynsym")
        assert isinstance(table, SymbolTableSection)
        symbols = [symbol for symbol in table.iter_symbols() if symbol.name]
        undefined = {
            symbol.name.encode()
            for symbol in symbols
            if symbol["st_shndx"] == "SHN_UNDEF" and symbol["st_info"]["bind"] not in {"STB_WEAK", "STB_LOCAL"}
        }
        exported = {
            symbol.name.encode()
            for symbol in symbols
            if symbol["st_shndx"] != "SHN_UNDEF"
            and symbol["st_info"]["bind"] != "STB_LOCAL"
            and symbol["st_other"]["visibility"] in {"STV_DEFAULT", "STV_PROTECTED"}
        }
        return elf.Elf(
            machine={"EM_X86_64": "x86_64", "EM_AARCH64": "aarch64"}[read["e_machine"]],
            soname=next((tag.soname for kind, tag in tags if kind == "DT_SONAME"), None),
            needed=tuple(tag.needed for kind, tag in tags if kind == "DT_NEEDED"),
            search=tuple(folder for text in search for folder in text.split(":") if folder),
            exported=frozenset(exported),
            undefined=frozenset(undefined),
        )


@pytest.fixture(scope="module")
def cpu_site() -> Path:
    environment, why = look(load_stack("cpu"), State.resolve())  # looks only: these tests install nothing
    if environment is None:
        pytest.skip(f"the stack cpu is not installed here: {why}")
    (folder,) = environment.python.parents[1].glob("lib/python3*/site-packages")
    return folder


def test_pyelftools_reads_the_same(cpu_site: Path) -> None:
    libraries = [path for path in sorted(cpu_site.rglob("*.so*")) if path.is_file() and path.suffix != ".h"]
    small = [path for path in libraries if path.stat().st_size < 4 * 2**20][:40]
    assert {"libc10.so", "libtorch_global_deps.so"} <= {path.name for path in small}
    for path in small:
        assert elf.read(path, ALL) == _by_pyelftools(path), path


def test_the_cpu_environment_lacks_nothing(cpu_site: Path) -> None:
    libraries = kernel_libraries(cpu_site)
    assert {"torch/lib/libtorch_cpu.so", "torch/lib/libtorch_python.so", "torch/lib/libc10.so"} <= {
        library.path for library in libraries if library.distribution == "torch"
    }
    assert [lib for lib in libraries if lib.undefined_torch or lib.unresolved_cuda or lib.problem] == []
    assert clashes(cpu_site) == ()


def test_a_letter_that_changed_in_torchs_own_symbol_is_seen(cpu_site: Path, tmp_path: Path) -> None:
    site = tmp_path / "env/lib/python3.11/site-packages"
    site.mkdir(parents=True)
    (site / "torch").mkdir()
    (site / "torch/lib").symlink_to(cpu_site / "torch/lib")
    for name, symbol in (("good", REAL), ("bad", ALTERED)):
        source = f"void {symbol}(void); void run(void) {{ {symbol}(); }}"
        compile_library(site / f"{name}.so", source, link=[site / "torch/lib/libc10.so"])
    found = {library.path: library.undefined_torch for library in kernel_libraries(site)}
    assert found == {"good.so": (), "bad.so": (ALTERED,)}


def _libc() -> bytes:
    name = ctypes.util.find_library("c")
    with Path("/proc/self/maps").open() as maps:
        (path,) = {line.split()[-1] for line in maps if line.rstrip().endswith(f"/{name}")}
    return Path(path).read_bytes()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150, deadline=None)
@given(data=st.data())
def test_a_damaged_libc_is_read_or_told(tmp_path: Path, data: st.DataObject) -> None:
    whole = _libc()
    ends = int.from_bytes(whole[40:48], "little")
    # Where damage can matter: the headers and tables at both ends, and anywhere.
    places = st.integers(0, 1200) | st.integers(ends, len(whole) - 1) | st.integers(0, len(whole) - 1)
    broken = bytearray(whole)
    for place, value in data.draw(st.lists(st.tuples(places, st.integers(0, 255)), min_size=1, max_size=20)):
        broken[place] = value
    path = tmp_path / "libc.so"
    path.write_bytes(broken[: data.draw(st.integers(0, len(whole)) | st.just(len(whole)))])
    try:
        found = elf.read(path, ALL)
    except errors.BinaryError as error:
        assert error.where == str(path)  # noqa: PT017 - either outcome is right
    else:
        assert found.machine


def test_a_wheel_that_a_build_backend_made(tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    (tmp_path / "small/__init__.py").touch()
    (tmp_path / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n'
        '[project]\nname = "Small"\nversion = "1.0+cu130"\n'
    )
    words = [sys.executable, "-m", "hatchling", "build", "-t", "wheel"]
    subprocess.run(words, cwd=tmp_path, check=True, capture_output=True, timeout=120)
    (path,) = (tmp_path / "dist").glob("*.whl")
    found = wheel_facts(path)
    assert (found.name, found.version, found.problem) == ("small", "1.0+cu130", None)
    assert (found.metadata_name, found.metadata_version) == ("small", "1.0+cu130")
    renamed = wheel_facts(path.rename(path.with_name(path.name.replace("+cu130", ""))))
    assert (renamed.version, renamed.metadata_version) == ("1.0", "1.0+cu130")

"""The kernel libraries of made environments: which count, what they lack, and what must not be called lacking."""

import os
import platform
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.unit.toolkit.host_binaries_made import WEAK, Symbol, install, library

from sm120.host.binaries import elf, kernel_libraries, loader
from sm120.host.facts import Library

NATIVE = {machine: number for number, machine in elf.MACHINES.items()}[platform.machine()]
FOREIGN = next(number for number, machine in elf.MACHINES.items() if machine != platform.machine())
CHECK = "_ZN3c104cuda29c10_cuda_check_implementationEiPKcS2_"  # ends in ib in one torch, in jb in another


@pytest.fixture(autouse=True)
def _bare_system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without any CUDA of its own."""
    monkeypatch.setattr(loader, "_CACHE", tmp_path / "ld.so.cache")
    monkeypatch.setattr(loader, "_SYSTEM", (str(tmp_path / "system"),))


@pytest.fixture
def site(tmp_path: Path) -> Path:
    folder = tmp_path / "env/lib/python3.11/site-packages"
    folder.mkdir(parents=True)
    return folder


def made(*, needed: Sequence[str] = (), undefined: Sequence[str] = (), exports: Sequence[str] = ()) -> bytes:
    return library(needed=needed, undefined=undefined, exports=exports, machine=NATIVE)


def install_torch(site: Path, exports: Sequence[str] = (f"{CHECK}ib",)) -> None:
    files = {
        "torch/lib/libc10.so": made(exports=exports),
        "torch/lib/libtorch_cuda.so": made(needed=["libcudart.so.13", "libc10.so"], exports=["_ZN2at5emptyEv"]),
    }
    install(site, "torch", "2.14.1", files)
    install(site, "nvidia-cuda-runtime", "13.0.96", {"nvidia/cu13/lib/libcudart.so.13": made()})


def one(site: Path, path: str, *, folders: Sequence[Path] = ()) -> Library:
    (found,) = (item for item in kernel_libraries(site, folders=folders) if item.path == path)
    return found


def test_a_library_for_another_cuda_is_seen(site: Path) -> None:
    install_torch(site)
    install(
        site, "sgl-kernel", "0.3.21", {"sgl_kernel/common_ops.abi3.so": made(needed=["libcudart.so.12", "libc10.so"])}
    )
    assert kernel_libraries(site) == (
        Library(
            path="sgl_kernel/common_ops.abi3.so",
            distribution="sgl-kernel",
            needed=("libcudart.so.12", "libc10.so"),
            unresolved_cuda=("libcudart.so.12",),
        ),
        Library(path="torch/lib/libc10.so", distribution="torch"),
        Library(
            path="torch/lib/libtorch_cuda.so", distribution="torch", needed=("libcudart.so.13", "libc10.so")
        ),
    )  # fmt: skip


def test_a_library_for_another_torch_is_seen(site: Path) -> None:
    install_torch(site)
    needed = ["libcudart.so.13", "libc10.so"]
    install(site, "sgl-kernel", "0.3.20", {"sgl_kernel/bad.so": made(needed=needed, undefined=[f"{CHECK}jb"])})
    install(site, "sglang-kernel", "0.4.10", {"sgl_kernel/good.so": made(needed=needed, undefined=[f"{CHECK}ib"])})
    # Linked against nothing: it counts on torch's being loaded first. Nobody else's library stands in for torch.
    install(site, "vllm", "1", {"vllm/_C.so": made(undefined=[f"{CHECK}ib", f"{CHECK}jb"])})
    (site / "stray.so").write_bytes(made(needed=["libcuda.so.1"], undefined=[f"{CHECK}jb"]))
    (site / "other.so").write_bytes(made(exports=[f"{CHECK}jb"]))
    assert one(site, "vllm/_C.so").undefined_torch == (f"{CHECK}jb",)
    assert one(site, "stray.so").undefined_torch == (f"{CHECK}jb",)
    assert one(site, "sgl_kernel/bad.so").undefined_torch == (f"{CHECK}jb",)
    assert one(site, "sgl_kernel/good.so").undefined_torch == ()


@pytest.mark.parametrize(
    ("symbol", "asked"),
    [
        ("_ZN3c105ErrorC1ESs", True),
        ("_ZNK2at6Tensor4sizeEv", True),
        ("_ZNKR5torch7Library3defEv", True),
        ("_ZN6caffe28TypeMetaE", True),
        ("_ZTIN3c105ErrorE", True),
        ("_ZTVN5torch3jit8FunctionE", True),
        ("_ZGVN2at6globalE", True),
        ("_ZThn16_N5torch3jit8FunctionD1Ev", True),
        ("aoti_torch_get_dtype", True),
        ("torch_library_impl", True),
        ("_ZN10torchaudio4loadEv", False),
        ("_ZN3c11fooEv", False),
        ("_ZNSt6vectorIN2at6TensorEE9push_backEv", False),
        ("_ZN7cutlass3runEN3c106ScalarE", False),
        ("cudaLaunchKernel", False),
        ("PyTorch_nothing", False),
        ("my_torch_function", False),
    ],
)
def test_only_what_must_be_torchs_is_asked_of_torch(site: Path, symbol: str, asked: bool) -> None:
    install_torch(site)
    install(site, "vllm", "1", {"vllm/_C.so": made(undefined=[symbol])})
    assert one(site, "vllm/_C.so").undefined_torch == ((symbol,) if asked else ())


def test_weak_symbols_may_stay_undefined(site: Path) -> None:
    install_torch(site)
    weak = Symbol("_ZN3c104gone", defined=False, binding=WEAK)
    install(site, "vllm", "1", {"vllm/_C.so": library(symbols=[weak], machine=NATIVE)})
    assert one(site, "vllm/_C.so").undefined_torch == ()


def test_what_is_loaded_with_a_library_may_provide_its_symbols(site: Path) -> None:
    install_torch(site)
    wants = ["_ZN5torch5firstEv", "_ZN5torch6secondEv", "_ZN5torch5thirdEv", "_ZN5torch4goneEv"]
    files = {
        "a/_C.so": made(needed=["libfirst.so", "libc10.so"], undefined=wants),
        "a/own.so": made(exports=wants[2:3]),  # not needed by name, but its package may load it first
    }
    install(site, "a", "1", files)
    install(site, "b", "1", {"b/libfirst.so": made(needed=["libsecond.so.7"], exports=wants[:1])})
    install(site, "c", "1", {"c/any.so": library(soname="libsecond.so.7", exports=wants[1:2], machine=NATIVE)})
    install(site, "d", "1", {"d/_C.so": made(exports=wants)})  # has nothing to do with it
    assert one(site, "a/_C.so").undefined_torch == ("_ZN5torch4goneEv",)


def test_without_a_whole_torch_nothing_is_said_of_symbols(site: Path) -> None:
    needing = {"vllm/_C.so": made(needed=["libc10.so"], undefined=["_ZN3c104goneEv"])}
    install(site, "vllm", "1", needing)
    assert one(site, "vllm/_C.so").undefined_torch == ()
    install_torch(site)
    assert one(site, "vllm/_C.so").undefined_torch == ("_ZN3c104goneEv",)
    broken = site / "torch/lib/libtorch_cuda.so"
    broken.write_bytes(broken.read_bytes()[:-1])
    assert one(site, "vllm/_C.so").undefined_torch == ()
    assert "truncated" in (one(site, "torch/lib/libtorch_cuda.so").problem or "")


def test_a_neighbour_that_cannot_be_read_may_hold_the_symbols(site: Path) -> None:
    install_torch(site)
    neighbour = library(exports=["_ZN3c104goneEv"], machine=NATIVE)
    # Its headers are whole, but its section table holds no symbols any more.
    install(site, "vllm", "1", {"vllm/b.so": neighbour[: -3 * 64] + bytes(3 * 64)})
    install(site, "other", "1", {"vllm/a.so": made(needed=["b.so", "libc10.so"], undefined=["_ZN3c104goneEv"])})
    assert one(site, "vllm/a.so").undefined_torch == ()
    assert one(site, "vllm/b.so").problem == "without a section of dynamic symbols"


@pytest.mark.parametrize(
    "name",
    [
        "libcudart.so.13", "libcublasLt.so.13", "libcudnn.so.9", "libcudnn_graph.so.9", "libnvrtc-builtins.so.13.0",
        "libnvrtc.so.13", "libnvJitLink.so.13", "libnccl.so.2", "libnvshmem_host.so.3", "libcusparseLt.so.0",
        "libcufft.so.12", "libcudart-9335f6a2.so.12", "libcudart.faf08d9a.so.13", "libcupti.so.13", "libnppicc.so.13",
    ],
)  # fmt: skip
def test_a_cuda_library_that_is_nowhere_is_missing(site: Path, name: str) -> None:
    (site / "x.so").write_bytes(made(needed=[name]))
    assert one(site, "x.so").unresolved_cuda == (name,)


@pytest.mark.parametrize("name", ["libcuda.so.1", "libtorch.so", "libnvidia-ml.so.1", "libc.so.6", "libstub_cudart.so"])
def test_the_driver_and_others_are_never_missing(site: Path, name: str) -> None:
    (site / "x.so").write_bytes(made(needed=[name, "libc10.so"]))
    assert one(site, "x.so").unresolved_cuda == ()


def test_a_cuda_library_is_found_wherever_it_may_come_from(site: Path, tmp_path: Path) -> None:
    name = "libcudart.so.13"

    def missing(*, runpath: str | None = None, rpath: str | None = None, folders: Sequence[Path] = ()) -> bool:
        data = library(needed=[name], runpath=runpath, rpath=rpath, machine=NATIVE)
        (site / "pkg").mkdir(exist_ok=True)
        (site / "pkg/x.so").write_bytes(data)
        return one(site, "pkg/x.so", folders=folders).unresolved_cuda == (name,)

    def put(place: Path) -> Path:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(made())
        return place

    assert missing()
    elsewhere = put(tmp_path / "env/cuda" / name)
    assert missing()
    assert not missing(folders=[elsewhere.parent])
    assert not missing(runpath=f"/nowhere:{elsewhere.parent}")
    assert not missing(rpath="$ORIGIN/../../../../cuda")
    assert not missing(runpath="${ORIGIN}/../../../../cuda")
    assert missing(runpath="$ORIGIN/cuda")
    for place in (site / "nvidia/cu13/lib" / name, tmp_path / "env/lib" / name, tmp_path / "system" / name):
        put(place)
        assert not missing(), place
        place.unlink()
        assert missing()
    (tmp_path / "ld.so.cache").write_bytes(b"glibc-ld.so.cache1.1\0" + f"/usr/not{name}\0/usr/{name}.0\0".encode())
    assert missing()
    (tmp_path / "ld.so.cache").write_bytes(b"glibc-ld.so.cache1.1\0" + f"/usr/cuda/{name}\0".encode())
    assert not missing()


def test_a_loaded_library_is_known_by_its_soname(site: Path) -> None:
    (site / "x.so").write_bytes(made(needed=["libcudart.so.13"]))
    (site / "cudart_of_ours.so").write_bytes(library(soname="libcudart.so.13", machine=NATIVE))
    assert one(site, "x.so").unresolved_cuda == ()


def test_what_counts_is_what_a_file_needs_or_who_owns_it(site: Path) -> None:
    install(
        site,
        "anything",
        "1",
        {
            f"{n}.so": made(needed=[need])
            for n, need in enumerate(["libcudart.so.13", "libc10.so", "libtorch_cuda.so", "libcuda.so.1"])
        },
    )
    install(site, "numpy", "2.4.6", {"numpy/core.so": made(needed=["libc.so.6"]), "numpy/libs/libtorchlike.so": made()})
    install(site, "triton", "3.8.0", {"triton/_C/libtriton.so": made(), "triton/knobs.py": b"", "triton/x.so.h": b""})
    install(site, "Apache.TVM_ffi", "0.1.11", {"tvm_ffi/lib/libtvm_ffi.so.1.2": made()})
    (site / "stray.so.2").write_bytes(made(needed=["libcublas.so.13"]))
    assert [(item.path, item.distribution) for item in kernel_libraries(site)] == [
        ("0.so", "anything"),
        ("1.so", "anything"),
        ("2.so", "anything"),
        ("3.so", "anything"),
        ("stray.so.2", None),
        ("triton/_C/libtriton.so", "triton"),
        ("tvm_ffi/lib/libtvm_ffi.so.1.2", "apache-tvm-ffi"),
    ]


def test_a_damaged_library_is_told_of_kernel_packages_only(site: Path) -> None:
    names = ("text.so", "pipe.so", "zero.so", "loop.so", "gone.so")
    for package in ("vllm", "numpy"):
        install(site, package, "1", {f"{package}/{name}": b"text" for name in names})
        for name in names[1:]:
            (site / package / name).unlink()
        os.mkfifo(site / package / "pipe.so")
        (site / package / "zero.so").symlink_to("/dev/zero")
        (site / package / "loop.so").symlink_to("loop.so")
    assert {item.path: item.problem for item in kernel_libraries(site)} == {
        "vllm/text.so": "not an ELF file",
        "vllm/pipe.so": "cannot be read: not a regular file",
        "vllm/zero.so": "cannot be read: not a regular file",
        "vllm/loop.so": "cannot be read: Too many levels of symbolic links",
    }


def test_a_library_of_another_machine_is_told_unless_it_is_meant_for_one(site: Path) -> None:
    install_torch(site)
    other = elf.MACHINES[FOREIGN]
    foreign = library(needed=["libcudart.so.12", "libc10.so"], undefined=["_ZN3c104goneEv"], machine=FOREIGN)
    files = {f"dsl/{place}/lib.so": foreign for place in ("lib", "stubs/qnx", f"_native/{other}")}
    files[f"dsl/_native/{platform.machine()}/lib.so"] = made()
    install(site, "humming-kernels", "1", files)
    found = {item.path: item for item in kernel_libraries(site) if item.distribution == "humming-kernels"}
    assert set(found) == {"dsl/lib/lib.so", f"dsl/_native/{platform.machine()}/lib.so"}
    assert found["dsl/lib/lib.so"] == Library(
        path="dsl/lib/lib.so",
        distribution="humming-kernels",
        needed=("libcudart.so.12", "libc10.so"),
        problem=f"built for {other}, and this machine is {platform.machine()}",
    )


def test_an_empty_or_absent_folder_holds_nothing(site: Path, tmp_path: Path) -> None:
    assert kernel_libraries(site) == ()
    assert kernel_libraries(tmp_path / "gone") == ()
    (site / "round").symlink_to(site)  # linked folders are not entered, so this ends
    (site / "x.so").write_bytes(made(needed=["libc10.so"]))
    assert [item.path for item in kernel_libraries(site)] == ["x.so"]

"""Programs, CUDA toolkits and environments: folders of small scripts stand for the real ones."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from sm120.host import binaries
from sm120.host.facts import Clash, Library, Tool
from sm120.host.gather import environments, programs, toolkits
from sm120.state import State


def script(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def says(path: Path, text: str) -> Path:
    return script(path, f"cat <<'END'\n{text}\nEND")


def nvcc_text(release: str) -> str:
    return (
        "nvcc: NVIDIA (R) Cuda compiler driver\nCopyright (c) 2005-2025 NVIDIA Corporation\n"
        f"Cuda compilation tools, release {release}, V{release}.88\nBuild cuda_{release}.r{release}/compiler.1_0"
    )


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (nvcc_text("13.0"), "13.0.88"),
        ("gcc (Debian 12.2.0-14+deb12u1) 12.2.0\nCopyright (C) 2022", "12.2.0"),
        ("g++-14 (Ubuntu 14.2.0-4ubuntu2~24.04) 14.2.0", "14.2.0"),
        ("GNU ld (GNU Binutils for Debian) 2.40", "2.40"),
        ("gcc (crosstool-NG 1.26.0.72_8146332) 14.2.0", "14.2.0"),
        ("Ubuntu clang version 18.1.3 (1ubuntu1)", "18.1.3"),
        ("cmake version 3.25.1\n\nCMake suite", "3.25.1"),
        ("1.11.1", "1.11.1"),
        ("ccache version 4.9.1\nFeatures: file-storage", "4.9.1"),
        ("uv 0.9.7 (abcdef 2026-10-30)", "0.9.7"),
        ("NVIDIA-SMI version  : 580.65.06\nNVML version  : 580.65", "580.65.06"),
        ("GNU Make 4.3\nBuilt for x86_64", "4.3"),
        ("git version 2.39.5", "2.39.5"),
        ("v1.2.3", "1.2.3"),
        ("no version here", None),
        ("", None),
    ],
)
def test_version_in_what_a_program_prints(text: str, version: str | None) -> None:
    assert programs.version(text) == version


def test_tools_are_those_of_the_path(tmp_path: Path) -> None:
    says(tmp_path / "gcc", "gcc (GCC) 14.2.1")
    says(tmp_path / "nvcc", nvcc_text("12.8"))
    script(tmp_path / "cmake", "echo broken >&2; exit 3")
    (tmp_path / "git").write_text("not a program")
    found = {tool.name: tool for tool in programs.tools({"PATH": f"{tmp_path}:/bin"})}
    assert found["gcc"] == Tool(name="gcc", path=str(tmp_path / "gcc"), version="14.2.1")
    assert found["nvcc"].version == "12.8.88"
    assert found["cmake"] == Tool(name="cmake", path=str(tmp_path / "cmake"))
    assert found["nvidia-smi"] == Tool(name="nvidia-smi")


def test_without_a_path_the_tools_of_the_toolkit_itself_are_left() -> None:
    found = {tool.name: tool for tool in programs.tools({"PATH": ""})}
    assert found["gcc"].path is None
    assert found["cmake"].path == str(Path(sys.executable).parent / "cmake")


def test_a_program_that_hangs_is_stopped(tmp_path: Path) -> None:
    slow = script(tmp_path / "slow", "echo 'release 13.0, V13.0.1'; exec sleep 60")
    text, failure = programs.output([str(slow)], seconds=0.5)
    assert "V13.0.1" in text
    assert failure == f"{slow} did not end within 0.5 s"


def test_a_program_that_cannot_be_started(tmp_path: Path) -> None:
    (tmp_path / "nvcc").write_bytes(b"\x7fELF rubbish")
    (tmp_path / "nvcc").chmod(0o755)
    release, failure = programs.cuda_release(tmp_path / "nvcc")
    assert release is None
    assert failure is not None
    assert str(tmp_path / "nvcc") in failure


def cuda(root: Path, release: str = "13.0", *, headers: str | None = "13000", cccl: str = "include/cccl") -> Path:
    """A toolkit as NVIDIA installs it."""
    says(root / "bin/nvcc", nvcc_text(release))
    says(root / "bin/ptxas", nvcc_text(release).replace("nvcc", "ptxas"))
    if headers is not None:
        (root / "include").mkdir(exist_ok=True)
        (root / "include/cuda_runtime_api.h").write_text(f"/* CUDART_VERSION 1 */\n#define CUDART_VERSION  {headers}\n")
    version = root / cccl / "cuda/std/__cccl/version.h"
    version.parent.mkdir(parents=True)
    version.write_text("#define CCCL_VERSION 3000001 // MMMmmmppp\n")
    (root / cccl / "cuda/std/utility").write_text("")
    (root / "lib64").mkdir()
    (root / "lib64/libcudart.so").write_text("")
    (root / "lib64/libcudart.so.13").write_text("")
    return root


def test_a_whole_toolkit_seen_three_ways_is_one(tmp_path: Path) -> None:
    home = cuda(tmp_path / "usr/local/cuda-13.0")
    (tmp_path / "usr/local/cuda").symlink_to("cuda-13.0")
    env = {
        "CUDA_HOME": str(tmp_path / "usr/local/cuda"),
        "PATH": f"{tmp_path}/usr/local/cuda/bin:/usr/bin:/bin",
        "LD_LIBRARY_PATH": f":{tmp_path}/usr/local/cuda/lib64:/nowhere",
    }
    (found,) = toolkits.toolkits(env, root=tmp_path)
    assert found.root == str(home)
    assert found.seen_by == ("CUDA_HOME", "PATH", "LD_LIBRARY_PATH", "system")
    assert (found.nvcc, found.ptxas, found.headers) == ((13, 0), (13, 0), (13, 0))
    assert (found.cccl, found.cccl_under) == ("3.0.1", "include/cccl")
    assert (found.library_folder, found.cudart) == ("lib64", ("libcudart.so", "libcudart.so.13"))
    assert found.problems == ()


def test_three_toolkits_mixed(tmp_path: Path) -> None:
    """The system's, another one's libraries, and a third by variable (pitfalls A16)."""
    cuda(tmp_path / "usr/local/cuda", "12.8", headers="12080", cccl="include")
    cuda(tmp_path / "env", "13.3", headers=None)
    libraries = tmp_path / "other/targets/x86_64-linux/lib"
    libraries.mkdir(parents=True)
    (libraries / "libcudart.so.12").write_text("")
    (tmp_path / "other/include").mkdir()
    (tmp_path / "other/include/cuda_runtime_api.h").write_text("#define CUDART_VERSION 12090\n")
    env = {"CUDA_PATH": str(tmp_path / "env"), "LD_LIBRARY_PATH": str(libraries), "PATH": "/bin"}
    found = {item.seen_by: item for item in toolkits.toolkits(env, root=tmp_path)}
    assert found["CUDA_PATH",].nvcc == (13, 3)
    assert found["CUDA_PATH",].headers is None
    other = found["LD_LIBRARY_PATH",]
    assert (other.root, other.nvcc, other.headers) == (str(tmp_path / "other"), None, (12, 9))
    assert (other.library_folder, other.cudart) == ("targets/x86_64-linux/lib", ("libcudart.so.12",))
    assert (found["system",].nvcc, found["system",].cccl_under) == ((12, 8), "include")


def test_nvcc_on_the_path_may_be_a_script_that_starts_the_real_one(tmp_path: Path) -> None:
    home = cuda(tmp_path / "real")
    script(
        home / "bin/nvcc",
        f"case $1 in --dryrun) echo '#$ TOP={home}/bin/..' >&2;; *) echo release 13.1, V13.1.2;; esac",
    )
    script(tmp_path / "bin/nvcc", f'exec {home}/bin/nvcc "$@"')
    (found,) = toolkits.toolkits({"PATH": f"{tmp_path}/bin:/bin"}, root=tmp_path / "empty")
    assert (found.root, found.seen_by, found.nvcc) == (str(home), ("PATH",), (13, 1))


def test_a_folder_named_by_variable_is_listed_even_when_it_is_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    env = {"CUDA_HOME": str(tmp_path / "gone"), "CUDA_PATH": str(tmp_path / "empty"), "PATH": ""}
    gone, empty = toolkits.toolkits(env, root=tmp_path / "root")
    assert gone.problems == ("there is no such folder",)
    assert empty.problems == ("it holds neither bin/nvcc nor include/cuda_runtime_api.h",)
    assert toolkits.toolkits({"CUDA_HOME": "", "PATH": ""}, root=tmp_path / "root") == ()


def test_a_system_folder_without_a_toolkit_is_not_one(tmp_path: Path) -> None:
    (tmp_path / "usr/local/cuda-samples").mkdir(parents=True)
    assert toolkits.toolkits({"PATH": ""}, root=tmp_path) == ()


def test_a_broken_nvcc_is_told(tmp_path: Path) -> None:
    home = cuda(tmp_path / "home")
    script(home / "bin/nvcc", "echo cannot load libm >&2; exit 127")
    (found,) = toolkits.toolkits({"CUDA_HOME": str(home), "PATH": ""}, root=tmp_path / "root")
    assert found.nvcc is None
    assert found.problems == (f"{home}/bin/nvcc ended with 127: cannot load libm",)
    assert found.headers == (13, 0)


def test_toolkit_of_wheels(tmp_path: Path) -> None:
    home = tmp_path / "nvidia/cu13"
    (home / "include").mkdir(parents=True)
    (home / "include/cuda_runtime_api.h").write_text("#define CUDART_VERSION 13020\n")
    (home / "lib").mkdir()
    (home / "lib/libcudart.so.13").write_text("")
    (tmp_path / "nvidia/cudnn/include").mkdir(parents=True)
    (tmp_path / "nvidia/cu12/lib").mkdir(parents=True)
    assert toolkits.wheels(tmp_path) == [home]
    (found,) = toolkits.toolkits({"PATH": ""}, [("wheels:stable", home), ("home:stable", home)], tmp_path / "root")
    assert found.seen_by == ("wheels:stable", "home:stable")
    assert (found.headers, found.nvcc, found.library_folder) == ((13, 2), None, "lib")
    assert found.cudart == ("libcudart.so.13",)


def test_cccl_of_older_toolkits_by_cub(tmp_path: Path) -> None:
    home = cuda(tmp_path / "home", cccl="include")
    (home / "include/cuda/std/__cccl/version.h").unlink()
    (home / "include/cub").mkdir()
    (home / "include/cub/version.cuh").write_text("#define CUB_VERSION 200700 // 2.7.0\n")
    (found,) = toolkits.toolkits({"CUDA_HOME": str(home), "PATH": ""}, root=tmp_path / "root")
    assert (found.cccl, found.cccl_under) == ("2.7.0", "include")


@pytest.fixture(autouse=True)
def no_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is inside of libraries is another module's business, with tests of its own."""

    def libraries(site: Path, *, folders: Sequence[Path]) -> tuple[Library, ...]:
        found = Library(path="torch/lib/libc10.so", needed=tuple(str(folder) for folder in folders))
        return (found,) if (site / "torch").is_dir() else ()

    monkeypatch.setattr(binaries, "kernel_libraries", libraries)
    monkeypatch.setattr(binaries, "clashes", lambda site: (Clash(path=str(site), claims=()),))


def venv(state: State, name: str, python: str | None = None) -> Path:
    """The skeleton of a virtual environment; ``python`` is the body of the script that stands for its interpreter."""
    folder = state.env(name)
    site = folder / "lib/python3.12/site-packages"
    site.mkdir(parents=True)
    (folder / "pyvenv.cfg").write_text("home = /usr/bin\nversion = 3.12.3\n")
    if python is not None:
        script(folder / "bin/python", python)
    return site


def distribution(site: Path, name: str, version: str, *requires: str) -> None:
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    lines = [
        "Metadata-Version: 2.4", f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {r}" for r in requires),
    ]  # fmt: skip
    (folder / "METADATA").write_text("\n".join(lines) + "\n\nRequires-Dist: torch==0 is only said in the text\n")


@pytest.fixture
def state(tmp_path: Path) -> State:
    return State(root=tmp_path / ".sm120", runs=tmp_path / "runs")


def answers(*said: object) -> str:
    return f"echo noise; echo 'said {json.dumps(said)}'"


def test_managed_environment(state: State) -> None:
    site = venv(state, "stable", answers("2.14.1+cu130", "13.0", ["sm_90", "sm_120"]))
    distribution(site, "Torch", "2.14.1+cu130", "nvidia-cublas==13.1", "filelock", "triton~=3.8 ; extra == 'x'")
    distribution(site, "sglang-kernel", "0.4.10", "numpy>=2", "nvidia_cutlass_dsl[cu13]==4.8.0")
    (site / "torch").mkdir()
    (site / "torch/version.py").write_text("__version__ = '2.14.1+cu130'\n")
    record = {"distributions": [{"name": "torch", "version": "2.14.1+cu130", "sha256": "0"}, "rubbish", {}]}
    (state.env("stable") / "sm120-lock.json").write_text(json.dumps(record))
    (found,) = [read() for read in environments.environments(state, os.environ).values()]
    assert (found.stack, found.python_version, found.adopted, found.problem) == ("stable", "3.12.3", False, None)
    assert found.site == str(site)
    assert found.python == str(state.env("stable") / "bin/python")
    by_name = {d.name: d for d in found.distributions}
    assert by_name["torch"].requires == ("nvidia-cublas==13.1", "triton~=3.8 ; extra == 'x'")
    assert by_name["sglang-kernel"].requires == ("nvidia_cutlass_dsl[cu13]==4.8.0",)
    assert found.torch is not None
    assert (found.torch.version, found.torch.cuda) == ("2.14.1+cu130", (13, 0))
    assert (found.torch.arch_list, found.torch.problem) == (("sm_90", "sm_120"), None)
    assert found.locked == {"torch": "2.14.1+cu130"}
    assert [library.path for library in found.libraries] == ["torch/lib/libc10.so"]
    assert [clash.path for clash in found.clashes] == [str(site)]


def test_libraries_are_looked_for_where_the_loader_would(state: State) -> None:
    site = venv(state, "stable", answers("2.14.1", "13.0", []))
    (site / "torch").mkdir()
    env = {**os.environ, "LD_LIBRARY_PATH": "/first::/second", "CUDA_HOME": "/cuda"}
    (found,) = [read() for read in environments.environments(state, env).values()]
    assert found.libraries[0].needed == ("/first", "/second", "/cuda/lib64")
    bare = {name: value for name, value in env.items() if name not in {"LD_LIBRARY_PATH", "CUDA_HOME"}}
    (found,) = [read() for read in environments.environments(state, bare).values()]
    assert found.libraries[0].needed == ()


def test_torch_that_does_not_import_is_read_from_its_files(state: State) -> None:
    site = venv(state, "broken", "echo 'ImportError: libcudart.so.13: cannot open' >&2; exit 1")
    distribution(site, "torch", "2.14.1")
    (site / "torch").mkdir()
    (site / "torch/version.py").write_text(
        "from typing import Optional\n__version__ = '2.14.1+cu130'\ncuda: Optional[str] = '13.0'\nhip = None\n"
    )
    (found,) = [read() for read in environments.environments(state, os.environ).values()]
    assert found.torch is not None
    assert (found.torch.version, found.torch.cuda, found.torch.arch_list) == ("2.14.1+cu130", (13, 0), None)
    assert found.torch.problem is not None
    assert "libcudart.so.13: cannot open" in found.torch.problem


def test_environment_without_torch_asks_nobody(state: State) -> None:
    site = venv(state, "bare", f"touch {state.root}/asked")
    distribution(site, "numpy", "2.4.6")
    (site / "half-1.0.dist-info").mkdir()
    (found,) = [read() for read in environments.environments(state, os.environ).values()]
    assert found.torch is None
    assert not (state.root / "asked").exists()
    assert [(d.name, d.version) for d in found.distributions] == [("half", "1.0"), ("numpy", "2.4.6")]


def test_unfinished_environment_says_so(state: State) -> None:
    venv(state, "half")
    (found,) = [read() for read in environments.environments(state, os.environ).values()]
    assert found.problem == "its installation was not finished"
    (state.env("half") / "sm120-lock.json").write_text("{")
    (found,) = [read() for read in environments.environments(state, os.environ).values()]
    assert found.problem is not None
    assert "not JSON" in found.problem
    (state.env("half") / "sm120-lock.json").write_text("{}")
    (found,) = [read() for read in environments.environments(state, os.environ).values()]
    assert found.problem is not None
    assert "its Python is gone" in found.problem


def test_adopted_interpreter_is_asked_where_its_packages_are(state: State, tmp_path: Path) -> None:
    """A real Python: what it says of itself is what counts, whatever PYTHONPATH says."""
    (state.root / "env").mkdir(parents=True)
    (state.root / "env/mine.adopted.json").write_text(json.dumps({"python": sys.executable}))
    (tmp_path / "decoy/torch").mkdir(parents=True)
    (tmp_path / "decoy/torch/__init__.py").write_text("")
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "decoy")}
    (found,) = [read() for read in environments.environments(state, env).values()]
    assert (found.stack, found.adopted, found.problem) == ("mine", True, None)
    assert found.python_version == ".".join(str(part) for part in sys.version_info[:3])
    assert found.site is not None
    assert Path(found.site, "packaging").is_dir()
    assert "packaging" in {d.name for d in found.distributions}


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ("{}", "names no Python"),
        ("[]", "is damaged"),
        ("{", "not JSON"),
        ('{"python": "/gone/python"}', "/gone/python"),
    ],
)
def test_adopted_interpreter_that_cannot_be_asked(state: State, record: str, said: str) -> None:
    (state.root / "env").mkdir(parents=True)
    (state.root / "env/mine.adopted.json").write_text(record)
    (found,) = [read() for read in environments.environments(state, os.environ).values()]
    assert found.adopted
    assert found.problem is not None
    assert said in found.problem


def triton(site: Path, **versions: str) -> Path:
    folder = site / "triton/backends/nvidia/bin"
    for name, release in versions.items():
        says(folder / name.replace("_", "-"), nvcc_text(release))
    return folder


def test_ptxas_that_triton_runs_for_these_cards(state: State, tmp_path: Path) -> None:
    old, new = venv(state, "a"), venv(state, "b")
    triton(old, ptxas="12.8")
    folder = triton(new, ptxas="12.8", ptxas_blackwell="13.1")
    other = says(tmp_path / "ptxas", nvcc_text("13.0"))

    def read(**env: str) -> list[tuple[tuple[int, int] | None, str | None]]:
        found = environments.environments(state, {**os.environ, **env})
        return [(e.triton_ptxas, e.triton_ptxas_path) for e in (read() for read in found.values())]

    assert read()[0][0] == (12, 8)
    assert read()[1] == ((13, 1), str(folder / "ptxas-blackwell"))
    assert read(TRITON_PTXAS_PATH=str(other)) == [((13, 0), str(other)), ((13, 1), str(folder / "ptxas-blackwell"))]
    assert read(TRITON_PTXAS_BLACKWELL_PATH=str(other))[1] == ((13, 0), str(other))
    assert read(TRITON_PTXAS_PATH="/gone")[0][0] == (12, 8)


def test_no_state_folder_no_environments(state: State) -> None:
    assert environments.environments(state, os.environ) == {}
    assert environments.wheels(state) == ()


def test_folder_without_a_possible_name_costs_only_itself(tmp_path: Path) -> None:
    runtime = tmp_path / "cuda/lib64/libcudart.so.13"
    runtime.parent.mkdir(parents=True)
    runtime.touch()
    endless = "/" + "a" * 300
    env = {"CUDA_HOME": endless, "LD_LIBRARY_PATH": f"{endless}:{runtime.parent}", "PATH": ""}
    found = {toolkit.seen_by: toolkit for toolkit in toolkits.toolkits(env, root=tmp_path / "nothing")}
    assert found[("CUDA_HOME",)].problems == ("it cannot be read: File name too long",)
    assert found[("LD_LIBRARY_PATH",)].root == str(tmp_path / "cuda")


def test_pipes_in_an_environment_do_not_stop_the_doctor(tmp_path: Path) -> None:
    state = State(root=tmp_path, runs=tmp_path / "runs")
    folder = state.env("piped")
    site = folder / f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    info = site / "torch-2.14.1.dist-info"
    info.mkdir(parents=True)
    (site / "~orch-2.13.0.dist-info").mkdir()
    (folder / "pyvenv.cfg").write_text("version = 3.11.2\n")
    for pipe in (info / "METADATA", folder / "sm120-lock.json", state.adopted("other")):
        os.mkfifo(pipe)
    read = environments.environments(state, {})
    environment = read["piped"]()
    assert [(d.name, d.version) for d in environment.distributions] == [("torch", "2.14.1")]
    assert environment.problem == f"{folder / 'sm120-lock.json'} is not a file"
    assert read["other"]().problem == f"{state.adopted('other')} is not a file"


def test_dist_info_without_a_version_keeps_its_name(tmp_path: Path) -> None:
    state = State(root=tmp_path, runs=tmp_path / "runs")
    site = state.env("s") / f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    (site / "sglang.dist-info").mkdir(parents=True)
    (state.env("s") / "pyvenv.cfg").touch()
    assert [(d.name, d.version) for d in environments.environments(state, {})["s"]().distributions] == [("sglang", "")]

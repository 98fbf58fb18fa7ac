"""Patched build files under the real CMake, with stand-ins for CUDA, torch, Python and the fetched dependencies.

The unpatched files fail with the very errors that the patches cure: without that, passing would say nothing.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from packaging.version import Version
from tests.unit.toolkit.build import trees

from sm120.build.patches import Context, apply, load_series
from sm120.build.patches.source import BuildFile

STANDINS = Path(__file__).with_name("test_build_patches_standins")
SERIES = load_series()
CURRENT = "the toolkit's own"
VERSIONS = ("3.26.4", "3.30.9", "3.31.10", "newest")
_DEPENDENCY = re.compile(r"FetchContent_Declare\(\s*(\S+)")
_FOREIGN = re.compile(r"\$\{(repo-[\w-]+)_SOURCE_DIR\}/([\w./-]+\.\w+)")

Cmake = Callable[[str], Path]


@dataclass(frozen=True, kw_only=True)
class Configured:
    returncode: int
    output: str
    build: Path

    @property
    def targets(self) -> set[str]:
        reply = self.build / ".cmake/api/v1/reply"
        names = {json.loads(path.read_text())["name"] for path in reply.glob("target-*.json")}
        return {name for name in names if not name.startswith(("mscclpp", "Experimental", "Nightly", "Continuous"))}

    def command(self, source: str, target: str) -> list[str]:
        """How that source of the target is compiled."""
        entries = json.loads((self.build / "compile_commands.json").read_text())
        found = [e for e in entries if e["file"].endswith(source) and f"{target}.dir" in e["command"]]
        assert len(found) == 1
        return shlex.split(found[0]["command"])


@pytest.fixture(scope="module")
def cmake(tmp_path_factory: pytest.TempPathFactory) -> Cmake:
    """A CMake by its version, installed from the package index when it is not the toolkit's own."""
    made: dict[str, Path] = {}

    def get(version: str) -> Path:
        if version == CURRENT:
            return Path(sys.executable).with_name("cmake")
        if version not in made:
            place = tmp_path_factory.mktemp("cmake")
            wanted = "cmake" if version == "newest" else f"cmake=={version}"
            command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(place), wanted]
            subprocess.run(command, check=True, capture_output=True)
            (made[version],) = (path for path in place.rglob("bin/cmake") if "data" in path.parts)
        return made[version]

    return get


def configure(program: Path, root: Path, tree: trees.Tree, *, oldest: str = "3.5") -> Configured:
    """Lays out empty stand-ins for what the tree fetches, and configures it. ``oldest``: what mscclpp asks of CMake."""
    text = "".join(text for path, text in tree.items() if path.endswith((".txt", ".cmake")))
    fetched = root / "fetched"
    for name, path in _FOREIGN.findall(text):
        (fetched / name / path).parent.mkdir(parents=True, exist_ok=True)
        (fetched / name / path).touch()
    mscclpp = (
        f"cmake_minimum_required(VERSION {oldest})\nproject(mscclpp NONE)\nadd_library(mscclpp_static INTERFACE)\n"
    )
    trees.lay_out(fetched, {"repo-mscclpp/CMakeLists.txt": mscclpp})
    trees.lay_out(root / "toolkit", {"include/cccl/cuda/std/utility": "", "include/cuda.h": ""})
    build = root / "build"
    (build / ".cmake/api/v1/query/codemodel-v2").mkdir(parents=True)
    names = dict.fromkeys(_DEPENDENCY.findall(text))
    for name in names:
        (fetched / name).mkdir(parents=True, exist_ok=True)
    command = [
        *(str(program), "-S", str((root / "tree" / trees.main_of(tree)).parent), "-B", str(build)),
        *("-G", "Unix Makefiles", f"-DCMAKE_MAKE_PROGRAM={shutil.which('make') or shutil.which('true')}"),
        *(
            f"-DCMAKE_MODULE_PATH={STANDINS}",
            f"-DSM120_TOOLKIT={root / 'toolkit'}",
            "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON",
        ),
        *(f"-DFETCHCONTENT_SOURCE_DIR_{name.upper()}={fetched / name}" for name in names),
    ]
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("CMAKE_", "CUDA", "CPLUS", "C_INC"))}
    done = subprocess.run(command, capture_output=True, text=True, env=kept, check=False, timeout=200)
    return Configured(returncode=done.returncode, output=done.stdout + done.stderr, build=build)


def version_of(program: Path) -> Version:
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    return Version(done.stdout.split()[2])


def patched(root: Path, tree: trees.Tree, program: Path) -> Context:
    context = replace(trees.NEWEST, cmake=version_of(program))
    apply(SERIES, trees.lay_out(root / "tree", tree), context)
    return context


def check_patched(program: Path, root: Path, tree: trees.Tree) -> Configured:
    """The patched tree configures, and only what is for SM120 is a target of it."""
    patched(root, tree, program)
    made = configure(program, root, tree, oldest="3.1" if version_of(program) >= Version("4") else "3.5")
    assert made.returncode == 0, made.output
    every = set(re.findall(r"Python_add_library\((\w+)", "".join(tree.values())))
    out = set(re.findall(r"sm120: (\w+) is left out: ", made.output))
    assert out >= {"flash_ops"}
    assert made.targets == every - out
    return made


def check_prologue(program: Path, root: Path, tree: trees.Tree) -> None:
    """The unpatched tree stops where this CMake does not know a policy that the tree sets."""
    trees.lay_out(root / "tree", tree)
    made = configure(program, root, tree)
    known = {"CMP0169": Version("3.30"), "CMP0177": Version("3.31")}
    named = set(re.findall(r"cmake_policy\(SET (CMP\d+)", tree[trees.main_of(tree)]))
    failing = {policy for policy in named if version_of(program) < known[policy]}
    assert (made.returncode != 0) == bool(failing)
    assert set(re.findall(r'Policy "(CMP\d+)" is not known to this version of CMake', made.output)) == failing


@pytest.mark.parametrize("shape", trees.ALL)
def test_patched_trees_configure_under_the_toolkits_own_cmake(tmp_path: Path, shape: str, cmake: Cmake) -> None:
    tree = trees.ALL[shape]()
    made = check_patched(cmake(CURRENT), tmp_path, tree)
    target = "common_ops" if shape == "single" else "common_ops_sm100_build"
    words = made.command("csrc/gemm.cu", target)
    assert [word for word in words if "gencode" in word] == ["-gencode=arch=compute_120a,code=sm_120a"]
    assert [word for word in words if "std=" in word] == ["-std=c++20"]
    assert [word for word in words if "threads" in word] == ["--threads=2"]
    assert not any("cccl" in word for word in words)  # nvcc keeps its own order of include folders
    host = made.command("csrc/common_extension.cc", target)
    assert host[host.index(f"{tmp_path}/toolkit/include/cccl") - 1] == "-isystem"
    assert any(word in {"-std=gnu++20", "-std=c++20"} for word in host)


@pytest.mark.parametrize("fixed", [False, True], ids=["as it is", "patched"])
def test_a_host_file_finds_cccl_only_when_it_is_patched(tmp_path: Path, cmake: Cmake, *, fixed: bool) -> None:
    program, tree = cmake(CURRENT), trees.twins()
    trees.lay_out(tmp_path / "tree", tree)
    if fixed:
        patched(tmp_path, tree, program)
    made = configure(program, tmp_path, tree)
    words = made.command("csrc/common_extension.cc", "common_ops_sm100_build")
    done = subprocess.run(
        [words[0], "-E", *words[1 : words.index("-o")], words[-1]], capture_output=True, text=True, check=False
    )
    assert (done.returncode == 0) is fixed, done.stderr
    assert ("fatal error: cuda/std/utility: No such file or directory" in done.stderr) is not fixed


@pytest.mark.parametrize("fixed", [False, True], ids=["as it is", "patched"])
def test_an_old_dependency_configures_under_cmake_4_only_when_it_is_patched(
    tmp_path: Path, cmake: Cmake, *, fixed: bool
) -> None:
    program, tree = cmake(CURRENT), trees.twins()
    if version_of(program) < Version("4"):
        pytest.skip("the toolkit's own CMake is older than 4: it lets every dependency pass")
    trees.lay_out(tmp_path / "tree", tree)
    if fixed:
        patched(tmp_path, tree, program)
    made = configure(program, tmp_path, tree, oldest="3.1")
    assert (made.returncode == 0) is fixed, made.output
    assert ("Compatibility with CMake < 3.5 has been removed from CMake" in made.output) is not fixed


@pytest.mark.network
@pytest.mark.slow
@pytest.mark.parametrize("shape", trees.ALL)
@pytest.mark.parametrize("version", VERSIONS)
def test_patched_trees_configure_and_unpatched_ones_fail_as_told(
    tmp_path: Path, version: str, shape: str, cmake: Cmake
) -> None:
    tree = trees.ALL[shape]()
    check_prologue(cmake(version), tmp_path / "unpatched", tree)
    check_patched(cmake(version), tmp_path / "patched", tree)


def test_cmake_reads_the_arguments_that_the_parser_reads(tmp_path: Path, cmake: Cmake) -> None:
    """CMake's own trace of a file with everything that the language has."""
    text = """\
function(f)
endfunction()
f(a b;c "d e" [[f g]] [=[h ]] i]=] [==[
j]==])
F ( "k\\
l" m\\ n "o\\"p" q"r s"t $(U) -D"v w"x ) # f(no)
#[[ f(no) ]]
f(y) #[=[ f(no)
]=]
f(
  # f(no)
  z "# no" [b [=c ]d e=f =g
)
if(TRUE AND (1 OR (0)))
  f("line
line")
endif()
\tf("tab\\tin" \\; "semi\\;colon" $<1:x> ${y} "${z}")
f()
"""
    path = tmp_path / "script.cmake"
    path.write_text(text)
    program = cmake(CURRENT)
    log = tmp_path / "trace.json"
    command = [str(program), "--trace", "--trace-format=json-v1", f"--trace-redirect={log}", "-P", str(path)]
    subprocess.run(command, check=True, capture_output=True)
    traced = [json.loads(line) for line in log.read_text().splitlines()]
    seen = [(entry["line"], entry["cmd"].lower(), entry["args"]) for entry in traced if "cmd" in entry]
    file = BuildFile("x", text.encode())
    ours = [(c.line, c.name, [_as_traced(a.token.text) for a in c.arguments]) for c in file.commands]
    assert [entry for entry in ours if not entry[1].startswith("end")] == [
        entry for entry in seen if not entry[1].startswith("end")
    ]


def _as_traced(text: str) -> str:
    """The trace shows an argument without its quotes or brackets, escapes as they are written."""
    if text.startswith('"'):
        return text[1:-1].replace("\\\n", "")
    bracket = re.fullmatch(r"\[(=*)\[\n?(.*)\]\1\]", text, re.DOTALL)
    return bracket[2] if bracket else text

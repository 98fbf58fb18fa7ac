"""The audit on what nvcc really makes, in wheels good and bad, and on SGLang's published ones. No GPU is needed."""

import json
import os
import subprocess
import sys
import threading
import tracemalloc
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.integration.toolkit.test_cuda_home import SMALL, SOURCES, TOOLS, cpu_stack, install, toolkit

from sm120 import errors
from sm120.build.audit import (
    Arch,
    Audit,
    Fp4,
    Level,
    Runs,
    Tools,
    audit_files,
    audit_folder,
    audit_wheel,
    auditing,
    command,
    cuobjdump,
    find_tools,
    installed,
)
from sm120.build.audit.command import Options
from sm120.build.patches.rules import standin
from sm120.console import Console
from sm120.host.binaries import elf, fatbin
from sm120.runs import Run
from sm120.stack.cuda.home import make_cuda_home
from sm120.stack.install.record import Environment
from sm120.state import State

# Without the CPU stack the wheels come from the package index.
pytestmark = [] if cpu_stack() else [pytest.mark.network]

PRODUCT = "fp4_tile_mm(Tensor a, Tensor b) -> Tensor"
BOTH = ((12, 0), (12, 1))
KERNEL = """
__global__ void scale(float *values, float factor) { values[threadIdx.x] *= factor; }
"""


@dataclass(frozen=True)
class Workshop:
    """Libraries by name, each compiled once."""

    tools: Tools
    folder: Path

    def library(self, name: str, source: str, *words: str) -> Path:
        made = self.folder / f"{name}.so"
        if not made.exists():
            text = self.folder / f"{name}.cu"
            text.write_text(source)
            nvcc = [str(self.tools.cuobjdump.with_name("nvcc")), "-shared", "-Xcompiler", "-fPIC", "-cudart", "shared"]
            done = subprocess.run(
                [*nvcc, *words, str(text), "-o", str(made)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=240,
                check=False,
            )
            assert done.returncode == 0, done.stdout
        return made

    def fp4(self, arch: str, schema: str = PRODUCT) -> Path:
        """With the instruction, and an operator that says so."""
        code = f"-gencode=arch=compute_{arch},code=sm_{arch}"
        return self.library(f"fp4_{arch}_{schema[:8]}", f'#include "{SOURCES}/fp4_mma.cu"\n{operator(schema)}', code)

    def plain(self, *codes: str, schema: str = "scale(Tensor! a) -> ()", source: str = KERNEL) -> Path:
        """``sm_90a`` is a cubin, ``compute_90`` is PTX."""
        words = [f"-gencode=arch=compute_{code.partition('_')[2]},code={code}" for code in codes]
        return self.library(f"plain_{'_'.join(codes)}_{schema[:8]}", source + operator(schema), *words)


def operator(schema: str) -> str:
    return f'extern "C" const char *registered() {{ return "{schema}"; }}\n'


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    site = cpu_stack() or install(tmp_path_factory.mktemp("cuda-wheels") / "site", toolkit(*SMALL), *TOOLS)
    home = make_cuda_home(site, tmp_path_factory.mktemp("audit-home") / "cuda" / "cpu")
    return Workshop(find_tools(home.path, 13), tmp_path_factory.mktemp("audit-libraries"))


def wheel(folder: Path, members: Mapping[str, Path | str | bytes], name: str = "kernels") -> Path:
    path = folder / f"{name}-1.0-cp310-abi3-manylinux2014_x86_64.whl"
    info = {
        f"{name}-1.0.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{name}-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: false\n",
    }
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for inside, content in {**members, **info}.items():
            archive.writestr(inside, content.read_bytes() if isinstance(content, Path) else content)
    return path


def audited(workshop: Workshop, path: Path, tmp_path: Path, **options: Any) -> Audit:
    options = {"torch_site": None, "capabilities": BOTH, **options}
    scratch = tmp_path / "scratch"
    found = audit_wheel(path, tools=workshop.tools, scratch=scratch, **options)
    assert list(scratch.iterdir()) == [], "what was unpacked is gone"
    return found


def verdicts(found: Audit) -> dict[tuple[str, tuple[int, int]], tuple[Runs, Fp4]]:
    return {key: (verdict.runs, verdict.fp4) for key, verdict in found.verdicts.items()}


def refused(found: Audit) -> list[str]:
    return [finding.text for finding in found.refused]


# What nvcc makes


def test_every_kind_of_code_is_told_apart(workshop: Workshop, tmp_path: Path) -> None:
    """``--list-elf`` calls the code for sm_120f sm_120: the listing must not be read from there."""
    members = {
        "kernels/a.so": workshop.fp4("120a"),
        "kernels/f.so": workshop.fp4("120f"),
        "kernels/plain.so": workshop.plain("sm_120", schema=PRODUCT),
        "kernels/hopper.so": workshop.plain("sm_90a"),
        "kernels/ptx.so": workshop.plain("compute_90"),
    }
    found = audited(workshop, wheel(tmp_path, members), tmp_path)
    assert verdicts(found) == {
        ("kernels/a.so", (12, 0)): (Runs.ARCH, Fp4.NATIVE),
        ("kernels/a.so", (12, 1)): (Runs.NO, Fp4.NONE),
        ("kernels/f.so", (12, 0)): (Runs.FAMILY, Fp4.NATIVE),
        ("kernels/f.so", (12, 1)): (Runs.FAMILY, Fp4.NATIVE),
        ("kernels/plain.so", (12, 0)): (Runs.EXACT, Fp4.UNUSABLE),
        ("kernels/plain.so", (12, 1)): (Runs.LOWER, Fp4.UNUSABLE),
        ("kernels/hopper.so", (12, 0)): (Runs.NO, Fp4.NONE),
        ("kernels/hopper.so", (12, 1)): (Runs.NO, Fp4.NONE),
        ("kernels/ptx.so", (12, 0)): (Runs.PTX_ONLY, Fp4.NOT_BOUND),
        ("kernels/ptx.so", (12, 1)): (Runs.PTX_ONLY, Fp4.NOT_BOUND),
    }
    by_path = {library.path: library for library in found.libraries}
    assert by_path["kernels/a.so"].omma == {Arch(12, 0, "a"): 1}
    assert by_path["kernels/a.so"].operators == ("fp4_tile_mm",)
    assert by_path["kernels/a.so"].cuda_major == 13
    assert "libcudart.so.13" in by_path["kernels/a.so"].needed
    assert by_path["kernels/hopper.so"].omma is None, "nothing FP4 is in it, so nobody looked"
    assert refused(found) == [
        "kernels/plain.so is not usable for FP4 on 12.0: it binds FP4 products and holds no instruction for them",
        "kernels/a.so does not run on 12.1, and FP4 products are in it",
        "kernels/plain.so is not usable for FP4 on 12.1: it binds FP4 products and holds no instruction for them",
    ]


def test_a_wheel_for_sm120a_is_good(workshop: Workshop, tmp_path: Path) -> None:
    found = audited(workshop, wheel(tmp_path, {"kernels/a.so": workshop.fp4("120a")}), tmp_path, capabilities=[(12, 0)])
    assert found.good
    assert [finding.level for finding in found.findings] == [Level.NOTE]  # torch was not compared
    again = audited(workshop, wheel(tmp_path, {"kernels/a.so": workshop.fp4("120a")}), tmp_path, capabilities=[(12, 0)])
    assert again.as_json() == found.as_json()
    assert str(tmp_path) not in json.dumps(found.as_json())


def test_a_folders_name_says_nothing(workshop: Workshop, tmp_path: Path) -> None:
    members = {"k/sm90/common_ops.so": workshop.plain("sm_90a"), "k/sm100/common_ops.so": workshop.plain("sm_120a")}
    found = audited(workshop, wheel(tmp_path, members), tmp_path, capabilities=[(12, 0)])
    assert found.good
    swapped = dict(zip(members, reversed(members.values()), strict=True))
    found = audited(workshop, wheel(tmp_path, swapped), tmp_path, capabilities=[(12, 0)])
    assert refused(found) == ["nothing of kernels runs on 12.0"]


def test_a_twin_that_is_never_loaded_is_not_disassembled(workshop: Workshop, tmp_path: Path) -> None:
    twins = {f"k/{folder}/common_ops.so": workshop.fp4("120a") for folder in ("sm90", "sm100")}
    found = audited(workshop, wheel(tmp_path, twins), tmp_path, capabilities=[(12, 0)])
    assert [library.omma for library in found.libraries] == [None, {Arch(12, 0, "a"): 1}]
    assert found.good


def test_sizes_are_those_of_the_file_packed_or_not(workshop: Workshop, tmp_path: Path) -> None:
    codes = ("sm_80", "compute_80", "sm_120a")
    for mode in ("size", "none"):
        words = [f"-gencode=arch=compute_{code.partition('_')[2]},code={code}" for code in codes]
        path = workshop.library(f"mode_{mode}", KERNEL, f"--compress-mode={mode}", *words)
        (library,) = audit_files([path], tools=workshop.tools, torch_site=None).libraries
        assert {(str(code.arch), code.kind) for code in library.codes} == {
            ("80", "cubin"),
            ("80", "ptx"),
            ("120a", "cubin"),
        }
        sizes = [code.size for code in library.codes]
        assert all(size is not None and size > 0 for size in sizes)
        (section,) = [one for one in elf.sections(path) if one.name == fatbin.SECTION]
        assert sum(size or 0 for size in sizes) < section.size < library.size


def test_parts_that_lack_the_architecture_are_seen(workshop: Workshop, tmp_path: Path) -> None:
    """Two source files of one library, compiled for different architectures, as a build file can ask for."""
    made = workshop.folder / "partial.so"
    nvcc = str(workshop.tools.cuobjdump.with_name("nvcc"))
    objects = []
    for name, arch in (("one", "90a"), ("two", "120a")):
        source = workshop.folder / f"part_{name}.cu"
        source.write_text(KERNEL.replace("scale", name))
        objects.append(source.with_suffix(".o"))
        code = f"-gencode=arch=compute_{arch},code=sm_{arch}"
        words = ["-c", "-Xcompiler", "-fPIC", code, str(source), "-o", str(objects[-1])]
        subprocess.run([nvcc, *words], check=True, timeout=240)
    lib64 = workshop.tools.cuobjdump.parents[1] / "lib64"
    subprocess.run(["g++", "-shared", *map(str, objects), f"-L{lib64}", "-lcudart", "-o", str(made)], check=True)
    found = audit_files([made], tools=workshop.tools, torch_site=None, capabilities=[(12, 0)])
    verdict = found.verdicts[str(made), (12, 0)]
    assert (verdict.runs, verdict.covered) == (Runs.ARCH, (1, 2))
    assert "in 1 of its 2 parts" in found.findings[0].text


def test_where_only_cuobjdump_understands_the_layout_sizes_are_unknown(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pieces(path: Path) -> tuple[fatbin.Piece, ...]:
        raise errors.BinaryError("damaged: another layout")

    known = audit_files([workshop.fp4("120a")], tools=workshop.tools, torch_site=None)
    monkeypatch.setattr(fatbin, "pieces", pieces)
    found = audit_files([workshop.fp4("120a")], tools=workshop.tools, torch_site=None)
    assert verdicts(found) == verdicts(known)
    (before,), (library,) = known.libraries, found.libraries
    assert library.omma == before.omma == {Arch(12, 0, "a"): 1}
    assert [code.count for code in library.codes] == [code.count for code in before.codes]
    assert [code.size for code in library.codes] == [None]
    assert library.units is None


def test_code_that_is_not_disassembled_is_not_code_without_fp4(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuobjdump, "count_omma", lambda *words: {})
    found = audit_files([workshop.fp4("120a")], tools=workshop.tools, torch_site=None)
    assert found.libraries[0].problem == "cuobjdump lists code for sm_120a and disassembles none"
    assert not found.good


def test_another_cuda_is_refused(workshop: Workshop, tmp_path: Path) -> None:
    path = wheel(tmp_path, {"kernels/a.so": workshop.plain("sm_120a")})
    stack12 = Tools(cuobjdump=workshop.tools.cuobjdump, nvdisasm=workshop.tools.nvdisasm, cuda=12)
    found = audit_wheel(path, tools=stack12, torch_site=None, scratch=tmp_path / "scratch")
    assert refused(found) == ["kernels/a.so is built for CUDA 13, and the stack has CUDA 12"]


def test_another_torch_is_refused(workshop: Workshop, tmp_path: Path) -> None:
    site = tmp_path / "lib" / "site-packages"
    (site / "torch" / "lib").mkdir(parents=True)
    (site / "nvidia" / "lib").mkdir(parents=True)
    here = "void _ZN3c104cuda5checkEib(void) {}"
    for name, source in (("torch/lib/libtorch_cuda.so", here), ("nvidia/lib/libcudart.so.13", "int unused;")):
        words = ["gcc", "-shared", "-fPIC", "-nostdlib", "-x", "c", "-", "-o", str(site / name)]
        subprocess.run(words, input=source, text=True, check=True)

    def using(number: str) -> Path:
        name = f"_ZN3c104cuda5checkEi{number}"
        call = f'extern "C" void {name}(); extern "C" void use() {{ {name}(); }}'
        return workshop.plain("sm_120a", schema=f"{number}(int a) -> ()", source=KERNEL + call)

    found = audited(
        workshop, wheel(tmp_path, {"k/a.so": using("b")}), tmp_path, torch_site=site, capabilities=[(12, 0)]
    )
    assert found.findings == ()
    found = audited(
        workshop, wheel(tmp_path, {"k/a.so": using("j")}), tmp_path, torch_site=site, capabilities=[(12, 0)]
    )
    assert [finding.evidence for finding in found.refused] == ["k/a.so: _ZN3c104cuda5checkEij"]


def test_a_torch_without_cuda_is_no_measure(workshop: Workshop, tmp_path: Path) -> None:
    (tmp_path / "torch" / "lib").mkdir(parents=True)
    found = audit_files([workshop.plain("sm_120a")], tools=workshop.tools, torch_site=tmp_path)
    assert [finding.evidence for finding in found.findings] == ["the stack has no torch with CUDA"]


def test_operators_against_what_the_python_calls(workshop: Workshop, tmp_path: Path) -> None:
    standing = standin._TEMPLATE.format(
        name="flash_ops", reason="r", mark=standin.MARK, package="k", namespace="k", operators=("fwd", "plan")
    )
    folder = tmp_path / "k"
    folder.mkdir()
    (folder / "ops.so").write_bytes(workshop.plain("sm_120a").read_bytes())
    (folder / "flash_ops.py").write_text(standing)
    (folder / "gemm.py").write_text("import torch\ntorch.ops.k.scale(1)\ntorch.ops.k.lost(1)\ntorch.ops.k.fwd(1)\n")
    found = audit_folder(folder, tools=workshop.tools, torch_site=None, package="k")
    assert found.good
    assert found.operators.missing == {"lost": "gemm.py"}
    assert found.operators.left_out == ("fwd", "plan")


# Bad input


def test_what_is_no_sound_wheel(workshop: Workshop, tmp_path: Path) -> None:
    path = wheel(tmp_path, {"kernels/a.so": workshop.plain("sm_120a")})
    whole = path.read_bytes()
    for data, words in ((whole[:-100], "no whole zip"), (b"text", "no whole zip"), (b"", "no whole zip")):
        path.write_bytes(data)
        with pytest.raises(errors.BinaryError, match=words):
            audited(workshop, path, tmp_path)
    evil = wheel(tmp_path, {"../../evil.so": b"x"}, "evil")
    with pytest.raises(errors.BinaryError, match="written outside"):
        audited(workshop, evil, tmp_path)
    assert not (tmp_path.parent / "evil.so").exists()


def test_a_member_that_is_damaged_is_the_librarys_problem(workshop: Workshop, tmp_path: Path) -> None:
    path = wheel(tmp_path, {"kernels/a.so": workshop.plain("sm_120a"), "kernels/b.so": workshop.plain("sm_90a")})
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        start = archive.getinfo("kernels/a.so").header_offset
    data[start + 2000 : start + 2100] = b"\xff" * 100
    path.write_bytes(data)
    found = audited(workshop, path, tmp_path, capabilities=[(9, 0)])
    broken, whole = found.libraries
    assert broken.problem is not None
    assert "no whole zip archive" in broken.problem
    assert whole.problem is None
    assert not found.good


def test_a_bomb_is_not_unpacked(workshop: Workshop, tmp_path: Path) -> None:
    path = wheel(tmp_path, {"kernels/a.so": bytes(2**28)})
    tracemalloc.start()
    with pytest.raises(errors.BinaryError, match=r"kernels/a\.so would unpack to \d+ times"):
        audited(workshop, path, tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**24


def test_libraries_that_are_damaged_are_refused(workshop: Workshop, tmp_path: Path) -> None:
    good = workshop.plain("sm_120a").read_bytes()
    (section,) = [one for one in elf.sections(workshop.plain("sm_120a")) if one.name == fatbin.SECTION]
    start = section.offset + 16
    members = {
        "k/cut.so": good[: len(good) // 2],
        "k/empty.so": b"",
        "k/fatbin.so": good[:start] + b"\xff" * 60 + good[start + 60 :],
        "k/text.so": b"INPUT(libreal.so)\n",
        "k/whole.so": good,
    }
    found = audited(workshop, wheel(tmp_path, members), tmp_path, capabilities=[(12, 0)])
    problems = {library.path: library.problem for library in found.libraries}
    assert problems["k/whole.so"] is None
    assert "cuobjdump cannot read it" in str(problems["k/fatbin.so"])
    assert problems["k/empty.so"] == "empty"
    assert problems["k/text.so"] == "not an ELF file"
    assert "truncated" in str(problems["k/cut.so"])
    assert len(found.refused) == 4
    tail = next(library.tail for library in found.libraries if library.path == "k/fatbin.so")
    assert "k/fatbin.so" in tail[0], "not the temporary file's name"


def test_memory_does_not_grow_with_the_library(workshop: Workshop, tmp_path: Path) -> None:
    """The constants of 128 MB and the file around them are read piece by piece."""
    big = f'{KERNEL}\nasm(".section .rodata\\n.incbin \\"{tmp_path}/noise\\"\\n.text\\n");'
    (tmp_path / "noise").write_bytes(os.urandom(2**20) * 2**7)
    path = wheel(tmp_path, {"k/big.so": workshop.library("big", big, "-arch=sm_120a")})
    tracemalloc.start()
    found = audited(workshop, path, tmp_path, capabilities=[(12, 0)])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.good
    assert found.libraries[0].size > 2**27
    assert peak < 2**26


def test_a_failure_stops_what_runs(workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ^C does: one library fails in an unforeseen way while another would take for ever."""
    slow = tmp_path / "bin"
    slow.mkdir()
    for name in ("cuobjdump", "nvdisasm"):
        (slow / name).write_text("#!/bin/sh\nexec sleep 600\n")
        (slow / name).chmod(0o755)
    tools, real, started = find_tools(tmp_path, 13), auditing._read_one, threading.Event()

    def fails(item: Any, request: Any) -> Any:
        if item.name.endswith("b.so"):
            started.wait(30)
            raise KeyboardInterrupt
        started.set()
        return real(item, request)

    monkeypatch.setattr(auditing, "_read_one", fails)
    monkeypatch.setattr(auditing, "_at_once", lambda: 2)
    path = wheel(tmp_path, {"k/a.so": workshop.plain("sm_120a"), "k/b.so": workshop.plain("sm_90a")})
    with pytest.raises(KeyboardInterrupt):
        audit_wheel(path, tools=tools, torch_site=None, scratch=tmp_path / "scratch")
    assert list((tmp_path / "scratch").iterdir()) == []


# The task


@pytest.fixture
def environment(workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Environment:
    """A stack with a CUDA home and two packages, in a home of the toolkit's own."""
    monkeypatch.setenv("SM120_HOME", str(tmp_path / "home"))
    folder = tmp_path / "env"
    site = folder / "lib" / "python3.12" / "site-packages"
    site.mkdir(parents=True)
    (folder / "bin").mkdir()
    (folder / "bin" / "python").symlink_to(sys.executable)
    put(site, "sgl-kernel", "1.0", {"sgl_kernel/common_ops.so": workshop.fp4("120a").read_bytes()})
    put(site, "other", "2.0", {"other/__init__.py": b""})
    made = Environment(
        "mine",
        folder / "bin" / "python",
        folder / "record",
        "f",
        fresh=False,
        cuda_home=workshop.tools.cuobjdump.parents[1],
        cache=tmp_path / "cache",
    )
    monkeypatch.setattr(command, "look", lambda name, state: (made, "") if name == "mine" else (None, "not installed"))
    return made


def put(site: Path, name: str, version: str, content: Mapping[str, bytes]) -> None:
    for path, data in content.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_bytes(data)
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "RECORD").write_text("".join(f"{path},,\n" for path in content))


def result(capsys: pytest.CaptureFixture[str], options: Options) -> dict[str, Any]:
    """What --json prints; the error's exit code is in it."""
    console = Console.create(json=True)
    error = None
    try:
        command.audit(options)
    except errors.ToolkitError as raised:
        error = raised
    console.finish(error)
    document = json.loads(capsys.readouterr().out)
    assert isinstance(document, dict)
    return document


def runs_of_task() -> list[Run]:
    return [Run.open(path) for path in sorted(State.resolve().runs.glob("*-audit-*"))]


def test_a_wheel_by_the_task(
    environment: Environment, workshop: Workshop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = wheel(tmp_path, {"kernels/a.so": workshop.fp4("120a")})
    document = result(capsys, Options(wheel=path, stack="mine"))
    assert "error" not in document
    assert document["good"] is True
    (run,) = runs_of_task()
    assert run.manifest["exit_code"] == 0
    assert run.read_json("result.json") == document
    document = result(capsys, Options(wheel=path, stack="mine", for_=("12.0", "12.1")))
    assert document["good"] is False
    assert document["error"]["exit_code"] == 13
    assert document["error"]["message"].startswith(f"{path.name}: nothing of kernels runs on 12.1")
    assert [run.manifest["exit_code"] for run in runs_of_task()].count(13) == 1


def test_the_table_says_it_in_words(
    environment: Environment, workshop: Workshop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Console.create()
    path = wheel(tmp_path, {"kernels/a.so": workshop.fp4("120a"), "kernels/b.so": workshop.plain("sm_90a")})
    command.audit(Options(wheel=path, stack="mine"))
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["kernels/a.so", "12.0", "yes", "(a)", "native", "sm_120a;", "1", "OMMA"] in rows
    assert ["kernels/b.so", "12.0", "no", "-", "it", "holds", "sm_90a", "only"] in rows
    assert ["WARN:", "kernels/b.so", "does", "not", "run", "on", "12.0"] in rows


def test_what_is_installed(environment: Environment, workshop: Workshop, capsys: pytest.CaptureFixture[str]) -> None:
    cached = environment.cache / "flashinfer" / "0.6" / "120a" / "cached_ops" / "gemm" / "gemm.so"
    cached.parent.mkdir(parents=True)
    cached.write_bytes(workshop.plain("sm_90a").read_bytes())
    document = result(capsys, Options(package="sgl_kernel", stack="mine"))
    assert [library["name"] for library in document["libraries"]] == ["sgl_kernel/common_ops.so"]
    assert document["subject"] == "sgl-kernel 1.0"
    assert document["good"] is True
    document = result(capsys, Options(env=True, stack="mine"))
    assert [library["name"] for library in document["libraries"]] == ["sgl_kernel/common_ops.so", str(cached)]
    assert [finding["text"] for finding in document["findings"] if finding["level"] == "refuse"] == [
        "nothing of flashinfer-cache runs on 12.0"
    ]


def test_a_package_by_the_index(
    environment: Environment,
    workshop: Workshop,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Downloaded by pip as the machine configures it, and once."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    made = wheel(shelf, {"kernels/a.so": workshop.fp4("120a")})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    document = result(capsys, Options(package="kernels==1.0", stack="mine"))
    assert "error" not in document
    assert document["good"] is True
    made.unlink()
    assert result(capsys, Options(package="kernels==1.0", stack="mine"))["good"] is True
    document = result(capsys, Options(package="kernels==2.0", stack="mine"))
    assert document["error"]["exit_code"] == 2
    assert "has no wheel of kernels 2.0" in document["error"]["message"]


def test_a_download_that_fails_leaves_nothing_that_is_taken_for_whole(
    environment: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    run = Run.start(State.resolve(), "audit", [])
    with pytest.raises(errors.ToolkitError) as raised:
        installed.download("kernels==1.0", environment, tmp_path / "downloads", run, Console.create())
    assert raised.value.exit_code in {2, 10}
    assert raised.value.where is not None
    assert Path(raised.value.where).exists(), "pip's own words"
    assert list((tmp_path / "downloads").rglob("*.whl")) == []


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (Options(), 2, "name one thing"),
        (Options(env=True, package="x"), 2, "name one thing"),
        (Options(wheel=Path("/nowhere/x.whl")), 2, "there is no /nowhere/x.whl"),
        (Options(env=True, for_=("12.0a",)), 2, "no compute capability"),
        (Options(env=True, for_=("120",)), 2, "no compute capability"),
        (Options(package="x>=1"), 2, "neither a name nor NAME==VERSION"),
        (Options(package="x==1.*"), 2, "neither a name nor NAME==VERSION"),
        (Options(package="a b"), 2, "neither a name nor NAME==VERSION"),
        (Options(package="sgl-kernal"), 2, "did you mean sgl-kernel?"),
        (Options(package="other"), 3, "nothing to audit in other 2.0"),
        (Options(env=True, stack="else"), 10, "the stack else is not there (not installed)"),
    ],
)
def test_wrong_flags(
    environment: Environment, capsys: pytest.CaptureFixture[str], options: Options, code: int, words: str
) -> None:
    stack = options.stack or "mine"
    document = result(capsys, Options(**{**vars(options), "stack": stack}))
    assert document["error"]["exit_code"] == code
    assert words in document["error"]["message"]


def test_a_wheel_without_code_was_not_audited(
    environment: Environment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = result(capsys, Options(wheel=wheel(tmp_path, {"kernels/__init__.py": ""}), stack="mine"))
    assert document["error"]["exit_code"] == 3
    assert document["error"]["message"].endswith("it has no library with code for GPUs")
    host = tmp_path / "host.so"
    subprocess.run(["gcc", "-shared", "-x", "c", "-", "-o", str(host)], input="int a;", text=True, check=True)
    document = result(capsys, Options(wheel=wheel(tmp_path, {"kernels/host.so": host}), stack="mine"))
    assert document["error"]["exit_code"] == 3


def test_without_a_cuda_home_the_setup_is_named(
    environment: Environment, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = Environment("mine", environment.python, environment.lock, "f", fresh=False)
    monkeypatch.setattr(command, "look", lambda name, state: (bare, ""))
    document = result(capsys, Options(env=True, stack="mine"))
    assert document["error"]["exit_code"] == 10
    assert "scripts/inv setup --stack cpu" in document["error"]["remedy"]
    document = result(capsys, Options(env=True))
    assert document["error"]["message"].startswith("no stack is set up yet")


# SGLang's own


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.timeout(1800)
def test_the_published_kernels_of_october_2026(workshop: Workshop, environment: Environment, tmp_path: Path) -> None:
    """1.2 GB of libraries. All but two run on 12.0, and nothing on 12.1, whatever their folders are called."""
    run = Run.start(State.resolve(), "audit", [])
    path = installed.download("sglang-kernel==0.4.10", environment, tmp_path / "downloads", run, Console.create())
    found = audited(workshop, path, tmp_path)
    runs = {
        (Path(name).name.partition(".")[0], capability): verdict.runs
        for (name, capability), verdict in found.verdicts.items()
        if verdict.is_loaded
    }
    names: Sequence[str] = ("common_ops", "infllm_ops", "spatial_ops", "flash_ops", "flashmla_ops")
    assert runs == {
        **{(name, (12, 0)): Runs.ARCH if name in names[:3] else Runs.NO for name in names},
        **{(name, (12, 1)): Runs.NO for name in names},
    }
    assert "nothing of sglang-kernel runs on 12.1" in refused(found)
    assert all(library.omma is None for library in found.libraries), "it binds no FP4 product any more"

"""NVIDIA's cuobjdump: what code a library holds, and which instructions.

Its plain listing is used: ``--list-elf`` calls code for sm_120f "sm_120". It prints a gigabyte for some libraries, so
what it prints is read as it comes and nothing of it is kept.
"""

import os
import re
import select
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sm120 import errors, process
from sm120.build.audit.model import Arch
from sm120.console import clean

# SM120's block-scaled FP4 product, seen in compiled kernels: OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X. Its FP8 and mixed
# kin is QMMA, at half the rate.
_MARKS = re.compile(rb"^arch = (\w+)|\bOMMA\.SF\.[\w.]*E2M1\.E2M1", re.MULTILINE)
_LISTED = re.compile(rb"^Fatbin (\w+) code:\s*\n=+\s*\narch = (\w+)", re.MULTILINE)
_KINDS = {b"elf": "cubin", b"ptx": "ptx"}
_NOTHING = ("does not contain device code", "No ELF file found", "No PTX file found")
_LIST_SECONDS = 1200.0
_SASS_SECONDS = 4 * 3600.0  # 2 minutes for the 366 MB of SGLang's common_ops of January 2026
_BLOCK = 2**20
_TAIL = 5  # lines


class Failed(Exception):
    """The tool could not read the file. ``tail``: the last lines of what it said."""

    def __init__(self, message: str, tail: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.tail = tail


@dataclass(frozen=True, kw_only=True)
class Tools:
    cuobjdump: Path
    nvdisasm: Path
    cuda: int | None  # the major version of the stack's CUDA


def find_tools(cuda_home: Path, cuda: int | None) -> Tools:
    """Raises PreflightError when the home lacks one."""
    tools = Tools(cuobjdump=cuda_home / "bin" / "cuobjdump", nvdisasm=cuda_home / "bin" / "nvdisasm", cuda=cuda)
    for path in (tools.cuobjdump, tools.nvdisasm):
        if not os.access(path, os.X_OK):
            raise errors.PreflightError(
                f"the CUDA home has no {path.name}, which reads what a library holds",
                where=str(path),
                remedy="scripts/inv setup --stack cpu, then the same command with --stack cpu",
            )
    return tools


def listing(tools: Tools, library: Path, stop: threading.Event) -> tuple[tuple[Arch, str], ...]:
    """Architecture and kind of every piece of code, in the order of the file. Raises Failed."""
    found: list[tuple[Arch, str]] = []
    for block in _whole(_run(tools, [str(library)], stop, _LIST_SECONDS), b"\nFatbin "):
        for kind, name in _LISTED.findall(block):
            if kind not in _KINDS:
                continue  # not for the driver: LTO-IR and its like
            arch = Arch.parse(name.decode("ascii"))
            if arch is None:
                raise Failed(f"cuobjdump names an architecture that this toolkit cannot read: {name.decode()}")
            found.append((arch, _KINDS[kind]))
    return tuple(found)


def count_omma(tools: Tools, library: Path, number: int, stop: threading.Event) -> dict[Arch, int]:
    """Block-scaled FP4 instructions in the cubins whose architecture has this number. Raises Failed.

    cuobjdump looks at the number alone, so 120 gives those of sm_120, sm_120a and sm_120f. What has none is there too.
    """
    counted: Counter[Arch] = Counter()
    now: Arch | None = None
    for block in _whole(_run(tools, ["-sass", "-arch", f"sm_{number}", str(library)], stop, _SASS_SECONDS), b"\n"):
        for mark in _MARKS.finditer(block):
            if mark[1] is not None:
                now = Arch.parse(mark[1].decode("ascii"))
                if now is not None:
                    counted[now] += 0
            elif now is not None:
                counted[now] += 1
    return dict(counted)


def _whole(chunks: Iterator[bytes], mark: bytes) -> Iterator[bytes]:
    """The same bytes, cut only before ``mark``, so that no line of interest is torn."""
    rest = b""
    for chunk in chunks:
        rest += chunk
        cut = rest.rfind(mark)
        if cut > 0 or len(rest) > 8 * _BLOCK:  # nothing that is looked for is that long
            cut = cut if cut > 0 else len(rest)
            yield rest[:cut]
            rest = rest[cut:]
    yield rest


def _end(proc: "subprocess.Popen[bytes]", stop: threading.Event) -> None:
    """It has closed its output; what is left of it is not waited for longer than that takes."""
    for _ in range(100):
        try:
            proc.wait(timeout=0.2)
            return
        except subprocess.TimeoutExpired:
            if stop.is_set():
                return


def _run(tools: Tools, arguments: Sequence[str], stop: threading.Event, seconds: float) -> Iterator[bytes]:
    argv = [str(tools.cuobjdump), *arguments]
    # cuobjdump looks for nvdisasm on PATH.
    env = {**os.environ, "PATH": f"{tools.nvdisasm.parent}:{os.environ.get('PATH', '')}", "LC_ALL": "C"}
    deadline = time.monotonic() + seconds
    with tempfile.TemporaryFile() as said:
        proc = process.spawn(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=said, env=env)
        if proc.stdout is None:
            raise ValueError("the child has no pipe")
        with proc.stdout as pipe:
            try:
                while True:
                    if stop.is_set():
                        raise Failed("stopped")
                    if time.monotonic() > deadline:
                        raise Failed(f"cuobjdump did not end within {seconds:.0f} s")
                    if select.select([pipe], [], [], 0.2)[0]:
                        data = os.read(pipe.fileno(), _BLOCK)
                        if not data:
                            break
                        yield data
                _end(proc, stop)
            finally:
                process.terminate(proc)
        if proc.returncode:
            said.seek(max(0, said.seek(0, os.SEEK_END) - 4096))
            lines = [clean(line.decode("utf-8", "replace")) for line in said.read().splitlines() if line.strip()]
            if not any(text in line for line in lines for text in _NOTHING):
                how = f"signal {-proc.returncode}" if proc.returncode < 0 else f"exit code {proc.returncode}"
                raise Failed(f"cuobjdump cannot read it ({how})", tuple(lines[-_TAIL:]))

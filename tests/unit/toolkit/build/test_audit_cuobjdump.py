"""What becomes of cuobjdump's words, whatever it says: the real one is in the integration tests."""

import threading
import time
import tracemalloc
from pathlib import Path

import psutil
import pytest

from sm120 import errors
from sm120.build.audit.cuobjdump import Failed, Tools, count_omma, find_tools, listing
from sm120.build.audit.model import Arch

LISTED = """
Fatbin elf code:
================
arch = sm_120f
code version = [1,8]
host = linux

Fatbin nvvm code:
================
arch = sm_90

Fatbin ptx code:
================
arch = sm_90
ptxasOptions = arch = sm_80
"""
SASS = """
Fatbin elf code:
================
arch = {first}

	code for {first}
		Function : _Z7fp4_mmaPfPKjS1_S1_
        /*0230*/                   OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X R4, R4, R8, RZ, R0, R3, URZ ;
        /*0240*/                   QMMA.SF.16832.F32.E2M1.E2M1.E8 R4, R4, R8, RZ, R0, R3, URZ ;
        /*0250*/                   OMMA.SF.16864.F32.E2M1.E2M1.E8 R4, R4, R8, RZ ;
        /*0260*/                   HMMA.16816.F32.BF16 R4, R4, R8, RZ ;

Fatbin elf code:
================
arch = {second}
        /*0230*/                   OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X R4, R4, R8, RZ, R0, R3, URZ ;
"""


def tool(folder: Path, script: str) -> Tools:
    for name in ("cuobjdump", "nvdisasm"):
        path = folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
    return find_tools(folder, 13)


def says(folder: Path, text: str) -> Tools:
    (folder / "said").write_text(text)
    return tool(folder, f"cat '{folder}/said'")


def test_code_is_listed_in_order_and_what_the_driver_never_takes_is_left_out(tmp_path: Path) -> None:
    found = listing(says(tmp_path, LISTED), tmp_path / "x.so", threading.Event())
    assert found == ((Arch(12, 0, "f"), "cubin"), (Arch(9, 0), "ptx"))


def test_an_architecture_that_cannot_be_read_is_a_failure(tmp_path: Path) -> None:
    with pytest.raises(Failed, match="sm_next"):
        listing(says(tmp_path, LISTED.replace("sm_120f", "sm_next")), tmp_path / "x.so", threading.Event())


def test_fp4_instructions_are_counted_by_architecture(tmp_path: Path) -> None:
    tools = says(tmp_path, SASS.format(first="sm_120a", second="sm_120"))
    found = count_omma(tools, tmp_path / "x.so", 120, threading.Event())
    assert found == {Arch(12, 0, "a"): 2, Arch(12, 0): 1}


def test_code_without_the_instruction_is_there_with_none(tmp_path: Path) -> None:
    text = SASS.format(first="sm_120a", second="sm_120").replace("OMMA", "QMMA")
    found = count_omma(says(tmp_path, text), tmp_path / "x.so", 120, threading.Event())
    assert found == {Arch(12, 0, "a"): 0, Arch(12, 0): 0}


def test_lines_are_whole_wherever_the_pipe_is_cut(tmp_path: Path) -> None:
    many = SASS.format(first="sm_120a", second="sm_120a") * 20000
    found = count_omma(says(tmp_path, many), tmp_path / "x.so", 120, threading.Event())
    assert found == {Arch(12, 0, "a"): 60000}


def test_nothing_found_is_no_failure(tmp_path: Path) -> None:
    for words in ("does not contain device code", "No ELF file found to extract from x"):
        tools = tool(tmp_path, f"echo \"cuobjdump info    : File 'x' {words}\" >&2; exit 255")
        assert listing(tools, tmp_path / "x.so", threading.Event()) == ()


@pytest.mark.parametrize(
    ("script", "words", "tail"),
    [
        ("echo before; echo 'fatal: Invalid fatbin header' >&2; exit 1", "exit code 1", "fatal: Invalid fatbin header"),
        ("kill -SEGV $$", "signal 11", ""),
        ("printf 'a\\033[31mb' >&2; exit 3", "exit code 3", "a\\x1b[31mb"),
    ],
)
def test_a_failure_is_said_with_its_last_lines(tmp_path: Path, script: str, words: str, tail: str) -> None:
    with pytest.raises(Failed, match=words) as raised:
        listing(tool(tmp_path, script), tmp_path / "x.so", threading.Event())
    assert raised.value.tail == ((tail,) if tail else ())


def test_a_flood_is_read_in_bounded_memory(tmp_path: Path) -> None:
    tools = tool(tmp_path, "head -c 200000000 /dev/zero")
    tracemalloc.start()
    assert listing(tools, tmp_path / "x.so", threading.Event()) == ()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 50e6


def test_it_is_stopped_with_all_it_started(tmp_path: Path) -> None:
    tools = tool(tmp_path, f"sleep 300 & echo $! > '{tmp_path}/pid'; wait")
    stop = threading.Event()
    failures: list[BaseException] = []

    def read() -> None:
        try:
            listing(tools, tmp_path / "x.so", stop)
        except Failed as error:
            failures.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().strip():
        time.sleep(0.02)
    child = int((tmp_path / "pid").read_text())
    stop.set()
    thread.join(30)
    assert not thread.is_alive()
    assert str(failures[0]) == "stopped"
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.02)


def test_a_home_without_the_tools_names_the_setup_that_brings_them(tmp_path: Path) -> None:
    tool(tmp_path, "true")
    (tmp_path / "bin" / "nvdisasm").unlink()
    with pytest.raises(errors.PreflightError, match="has no nvdisasm") as raised:
        find_tools(tmp_path, 13)
    assert raised.value.remedy is not None
    assert "scripts/inv setup --stack cpu" in raised.value.remedy

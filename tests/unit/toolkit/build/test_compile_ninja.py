"""Ninja's lines and its own log."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sm120.build.compile.ninja import Counted, counted, durations, jobs_of, output_of, readable, slowest

NVCC = (
    "ccache /cuda/bin/nvcc -forward-unknown-to-host-compiler -DA=1 -Xcompiler -fPIC --threads=1 -MD -MT x.o -MF x.o.d"
    " -x cu -c /b/source/csrc/gemm/a.cu -o CMakeFiles/ops.dir/csrc/gemm/a.cu.o"
)


def test_a_verbose_line_has_count_and_command() -> None:
    assert counted(f"[12/136] {NVCC}") == Counted(12, 136, NVCC)


@pytest.mark.parametrize(
    "line", ["", "[1/2]", "[a/2] x", " [1/2] x", "-- [1/2] x", "[1/2/3] x", "[99999999999999999999/1] x"]
)
def test_other_lines_have_no_count(line: str) -> None:
    assert counted(line) is None


@given(
    done=st.integers(0, 10**8),
    total=st.integers(0, 10**8),
    what=st.text(alphabet=st.characters(exclude_characters="\n")),
)
def test_count_round_trip(done: int, total: int, what: str) -> None:
    found = counted(f"[{done}/{total}] {what}")
    assert found == Counted(done, total, what)


@given(st.text())
def test_no_text_breaks_the_readers(text: str) -> None:
    counted(text)
    jobs_of(text)
    output_of(text)
    readable(text)
    durations(["# ninja log v7", *text.splitlines()])
    durations(text.splitlines())


@pytest.mark.parametrize(
    ("line", "number"),
    [
        ("Run Build Command(s): /a b/ninja -v -j 2", None),  # a path with a blank is not understood
        ("Run Build Command(s): /tools/bin/ninja -v -j 2", 2),
        ("Run Build Command(s): ninja -j16 -v", 16),
        ("Run Build Command(s): /usr/bin/ninja-build -v -j 2 -j 64", 64),
        ("Run Build Command(s): /usr/bin/ninja -v", None),
        ("Run Build Command(s): /usr/bin/make -j 2", None),
        ("[1/2] ninja -j 2", None),
    ],
)
def test_jobs_that_ninja_runs(line: str, number: int | None) -> None:
    assert jobs_of(line) == number


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (NVCC, "csrc/gemm/a.cu"),
        ("/usr/bin/g++ -O3 -o m/CMakeFiles/m.dir/src/a.cc.o -c /b/deps/m/src/a.cc", "src/a.cc"),
        (
            "g++ -o CMakeFiles/ops.dir/home/u/.sm120/build/s/c/deps/flash/csrc/x.cu.o -c x.cu",
            "deps/flash/csrc/x.cu",
        ),
        (": && /usr/bin/g++ -shared -Wl,-soname,ops.so -o ops.abi3.so a.o b.o && :", "ops.abi3.so"),
    ],
)
def test_name_of_what_is_made(command: str, name: str) -> None:
    output = output_of(command)
    assert output is not None
    assert readable(output) == name


def test_commands_without_output_have_no_name() -> None:
    assert output_of("cd /b && /cmake -P VerifyGlobs.cmake") is None


@pytest.mark.parametrize("version", [5, 6, 7])
def test_durations_of_the_last_time(version: int) -> None:
    log = [
        f"# ninja log v{version}",
        "3\t9\t1796635090337663951\t/b/cmake/CMakeFiles/cmake.verify_globs\t23c957ef051d1e8",
        "10\t1146\t1\tCMakeFiles/a.dir/a.cu.o\t3681cbaac85c5ef2",
        "12\t90012\t1\tCMakeFiles/a.dir/b.cu.o\t9",
        "0\t2000\t1\tCMakeFiles/a.dir/a.cu.o\tff",
        "5\t505\t1\tlib.so\taa",
        "5\t505\t1\tlib.so.1\taa",
        "damaged",
        "7\tx\t1\tdamaged.o\t1",
        "9\t3\t1\tbackwards.o\t1",
    ]
    assert slowest(log, 3) == (("b.cu", 90.0), ("a.cu", 2.0), ("lib.so", 0.5))
    assert durations(log)["CMakeFiles/a.dir/a.cu.o"] == 2.0
    assert "lib.so.1" not in durations(log)


@pytest.mark.parametrize("first", ["", "# ninja log v4", "# ninja log v8", "12\t13\t1\ta.o\t1"])
def test_a_log_of_another_format_says_nothing(first: str) -> None:
    assert durations([first, "0\t2000\t1\ta.o\tff"]) == {}


@given(
    st.dictionaries(
        st.text(st.characters(categories=["L", "N"]), min_size=1),
        st.tuples(st.integers(0, 10**9), st.integers(0, 10**9)),
        max_size=20,
    )
)
def test_every_output_has_its_seconds(steps: dict[str, tuple[int, int]]) -> None:
    rows = [
        f"{start}\t{start + lasted}\t1\t{name}\t{number:x}"
        for number, (name, (start, lasted)) in enumerate(steps.items())
    ]
    found = durations(["# ninja log v7", *rows])
    assert found == {name: lasted / 1000 for name, (_, lasted) in steps.items()}

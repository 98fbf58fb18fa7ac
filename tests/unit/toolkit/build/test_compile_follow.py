"""What the user sees of a build, and what ends it early."""

import io

import pytest

from sm120 import errors
from sm120.build.compile.follow import Follow
from sm120.build.compile.output import Stage, fact, marked, plain, stage_of
from sm120.console import Console

SITE = "/env/lib/python3.12/site-packages"
LOG = f"""sm120-build:process 4711
*** scikit-build-core 1.1.2 using CMake 4.4.5 (wheel)
*** Configuring CMake...
[1/9] Creating directories for 'repo-populate'
-- The CXX compiler identification is GNU 12.2.0
-- The CUDA compiler identification is NVIDIA 13.0.88 with host compiler GNU 12.2.0
-- PyTorch: CUDA detected: 13.0
-- Added CUDA NVCC flags for: -gencode;arch=compute_120a,code=sm_120a
-- Found Torch: {SITE}/torch/lib/libtorch.so
-- sm120: flash_ops is left out: its code is for sm_90a only
*** Building project with Ninja...
Run Build Command(s): /tools/bin/ninja -v -j 2
[0/2] /cmake -P /b/CMakeFiles/VerifyGlobs.cmake
[1/3] g++ -c /s/a.cc -o CMakeFiles/o.dir/a.cc.o
a.cc:1:1: warning: skipping a kernel
[2/3] g++ -c /s/b.cc -o CMakeFiles/o.dir/b.cc.o
[3/3] : && g++ -o ops.so && :
*** Installing project into wheel...
*** Making wheel...
sm120-build:wheel a-1-py3-none-any.whl
"""


class Seen:
    def __init__(self, jobs: int = 2) -> None:
        self.out = io.StringIO()
        console = Console(json=False, verbose=False, out=self.out, err=self.out)
        self.follow = Follow(console, jobs=jobs, site=SITE, log="/run/build.log")

    def feed(self, text: str) -> "Follow":
        with self.follow.shown():
            for line in text.splitlines():
                self.follow.line(line)
            if self.follow.refusal is not None:
                raise self.follow.refusal
        return self.follow


def test_stages_are_steps_and_commands_are_not_shown() -> None:
    seen = Seen()
    seen.feed(LOG)
    titles = [line for line in seen.out.getvalue().splitlines() if line.startswith("==>")]
    assert titles == [
        "==> starting the build",
        "==> configuring",
        "==> compiling",
        "==> collecting what was compiled",
        "==> making the wheel",
    ]
    assert "g++" not in seen.out.getvalue()
    assert "failed" not in seen.out.getvalue()


def test_what_the_output_says_is_kept() -> None:
    follow = Seen().feed(LOG)
    assert follow.process == 4711
    assert follow.wheel == "a-1-py3-none-any.whl"
    assert follow.steps == 3
    assert follow.stage is Stage.WHEEL
    assert follow.facts == {
        "cxx": "GNU 12.2.0",
        "nvcc": "NVIDIA 13.0.88 with host compiler GNU 12.2.0",
        "torch_cuda": "13.0",
        "torch_flags": "-gencode;arch=compute_120a,code=sm_120a",
        "torch": f"{SITE}/torch/lib/libtorch.so",
    }


def test_progress_counts_files_and_names_what_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sm120.console._PLAIN_PROGRESS_SECONDS", 0.0)
    seen = Seen()
    with seen.follow.shown():
        for line in LOG.splitlines()[:14]:
            seen.follow.line(line)
        seen.follow.compiling(("csrc/slow.cu", "csrc/z.cu"))
        seen.follow.line("[2/3] g++ -c /s/b.cc -o CMakeFiles/o.dir/b.cc.o")
    seen.follow.compiling(("later.cu",))
    shown = seen.out.getvalue()
    assert "1/3 a.cc, " in shown
    assert "1/3 csrc/slow.cu and 1 more, " in shown
    assert "2/3 b.cc, " in shown
    assert "left" in shown
    assert "later.cu" not in shown


def test_the_step_that_failed_says_so() -> None:
    seen = Seen()
    cut = LOG.splitlines()[:14]
    with pytest.raises(errors.BuildError, match="left out"):
        seen.feed("\n".join([*cut, "-- Not building X as no compatible archs"]))
    tail = seen.out.getvalue().splitlines()[-2:]
    assert tail[0] == "==> compiling"
    assert tail[1].strip().startswith("failed after")


@pytest.mark.parametrize("place", ["in the middle", "at the end"])
def test_a_kernel_that_is_left_out_ends_the_build(place: str) -> None:
    line = "-- Not building NVFP4 as no compatible archs were found."
    text = LOG.replace("-- Found Torch", f"{line}\n-- Found Torch") if place == "in the middle" else f"{LOG}{line}\n"
    with pytest.raises(errors.BuildError, match="Not building NVFP4") as caught:
        Seen().feed(text)
    assert caught.value.where == "/run/build.log"


def test_another_torch_ends_the_build() -> None:
    with pytest.raises(errors.BuildError, match="another torch than the stack's: /usr/lib"):
        Seen().feed(LOG.replace(f"{SITE}/torch/lib/", "/usr/lib/"))


def test_other_jobs_than_planned_end_the_build() -> None:
    with pytest.raises(errors.BuildError, match="ninja runs 64 jobs at a time and not 2"):
        Seen().feed(LOG.replace("-v -j 2", "-v -j 2 -j64"))


def test_the_line_itself_is_logged_before_the_build_ends() -> None:
    """What is raised while a line is looked at would keep it out of the log."""
    follow = Seen().follow
    with follow.shown():
        follow.line("*** Configuring CMake...")
        follow.line("-- Not building X as no compatible archs")
        with pytest.raises(errors.BuildError):
            follow.line("the next")
        follow.line("what was in the pipe is logged, and raises nothing")


def test_single_lines() -> None:
    assert plain("\x1b[32m*** \x1b[1mBuilding\x1b[0m") == "*** Building"
    assert stage_of("*** CMake build failed") is None
    assert stage_of("x *** Building") is None
    assert marked("sm120-build:error X: y z") == ("error", "X: y z")
    assert marked(" sm120-build:error") is None
    assert fact("-- Found Torch") is None

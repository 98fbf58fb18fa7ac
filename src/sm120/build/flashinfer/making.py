"""Compiles what the plan says, one module after the other; each that is whole stays, whatever comes after it."""

import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sm120 import errors, process
from sm120.build.compile.explain import AGAIN, explain, full_disk, look_into, show
from sm120.build.compile.failures import Failure
from sm120.build.compile.memory import Kill, oom_kills
from sm120.build.compile.ninja import counted, output_of
from sm120.build.flashinfer import ask, inside, whole
from sm120.build.flashinfer.planning import Planned, State, compilers
from sm120.build.flashinfer.target import environment, workspace
from sm120.build.toolchain import Toolchain
from sm120.console import Console, Progress
from sm120.runs import Run

_ABSENT = re.compile(r"fatal error: (\S+): No such file or directory")
# Headers of NVIDIA's that FlashInfer's sources include, and the wheels that bring them.
_BROUGHT_BY = {
    "cublasLt.h": "nvidia-cublas",
    "cublas_v2.h": "nvidia-cublas",
    "curand_kernel.h": "nvidia-curand",
    "cusparse.h": "nvidia-cusparse",
    "cusolverDn.h": "nvidia-cusolver",
    "nvrtc.h": "nvidia-cuda-nvrtc",
    "nvtx3/nvToolsExt.h": "nvidia-nvtx",
}


@dataclass(frozen=True, kw_only=True)
class BuiltModule:
    name: str
    architecture: str
    path: Path
    seconds: float
    files: int  # steps that ninja took


def build(
    planned: Sequence[Planned], toolchain: Toolchain, jobs: int, run: Run, console: Console
) -> tuple[BuiltModule, ...]:
    """Builds those that are to be built. Raises BuildError with the first error; PreflightError for a full disk.

    When the kernel kills a compiler for want of memory, half as many go on.
    """
    waiting = [one for one in planned if one.state is State.TO_BUILD]
    built = []
    with console.progress(sum(one.units + 1 for one in waiting), "FlashInfer") as progress:
        for one in waiting:
            work = _Work(one, toolchain, run, console, progress)
            while (done := work.make(jobs)) is None:
                console.warn(f"{one.name}: {Kill.MEMORY}; going on with half of {jobs} jobs")
                jobs //= 2
            console.detail(f"{one.name}: {done.path}")
            built.append(done)
    return tuple(built)


class _Work:
    """One module, in as many attempts as memory makes necessary."""

    def __init__(self, one: Planned, toolchain: Toolchain, run: Run, console: Console, progress: Progress) -> None:
        self._one, self._toolchain, self._run, self._console, self._progress = one, toolchain, run, console, progress
        self._shown = 0  # steps that the progress counts
        self._steps = 0  # that ninja took
        self._log = run.log_path(f"flashinfer-{one.target.architecture}-{one.name}")

    def make(self, jobs: int) -> BuiltModule | None:
        """None: memory was too little for that many jobs."""
        one, chain = self._one, self._toolchain
        env = environment(chain.variables, one.target, workspace(chain.variables), jobs)
        request = {
            "module": ask.as_request(one.module, one.target),
            "remove": one.remove,
            "record": {"name": whole.RECORD, "text": whole.record_text(compilers(chain))},
        }
        begins = self._log.stat().st_size if self._log.exists() else 0
        before = oom_kills()
        try:
            said, done = ask.inside_stack(
                chain,
                "build",
                request,
                env=env,
                run=self._run,
                log=self._log,
                on_line=self._line,
                stream=self._console.verbose,
            )
        except KeyboardInterrupt:
            raise errors.Interrupted(f"interrupted while building {one.name}", remedy=AGAIN) from None
        result = next((facts for name, facts in said if name == "built"), None)
        if done.returncode or result is None:
            error = self._error(begins, done, before, jobs)
            if error is None:
                return None
            raise error
        return self._finished(Path(result["library"]), result["again"], done.seconds)

    def _line(self, line: str) -> None:
        if line.startswith(f"{inside.MARK}waiting "):
            self._console.info(f"another process builds {self._one.name}, perhaps a server that starts; waiting for it")
        step = counted(line)
        if step is None:
            return
        self._steps += 1
        shown = self._one.units + 1 - step.total + step.done  # what an earlier build left is not made again
        if shown > self._shown:
            name = Path(output_of(step.what) or self._one.name).name
            self._progress.advance(shown - self._shown, f"{self._one.name}: {name}")
            self._shown = shown

    def _finished(self, library: Path, again: str, seconds: float) -> BuiltModule:
        one = self._one
        if whole.IDLE not in again:
            raise errors.BuildError(
                f"{one.name} was built, but FlashInfer would compile it again when a server starts: {again[:300]}",
                where=str(library.parent),
                remedy="look whether the clock was set back, or a file of the stack lies in the future",
            )
        whole.write_record(library.parent, library, compilers(self._toolchain))
        return BuiltModule(
            name=one.name, architecture=one.target.architecture, path=library, seconds=seconds, files=self._steps
        )

    def _error(self, begins: int, done: process.Completed, before: int | None, jobs: int) -> errors.ToolkitError | None:
        """None: fewer jobs may help."""
        failure, kill = look_into(self._log, begins, done, before=before, after=oom_kills())
        if kill is Kill.MEMORY and jobs > 1:
            return None
        show(failure, self._console)
        return self._missing(failure) or explain(
            failure,
            kill,
            jobs=jobs,
            held=None,
            log=str(self._log),
            full=full_disk(workspace(self._toolchain.variables), Path(tempfile.gettempdir())),
        )

    def _missing(self, failure: Failure) -> errors.BuildError | None:
        """The CUDA home is too small."""
        match = _ABSENT.search("\n".join((failure.first, *failure.output)))
        package = _BROUGHT_BY.get(match[1]) if match else None
        if match is None or package is None:
            return None
        return errors.BuildError(
            f"{self._one.name} needs {match[1]}, which the CUDA home of the stack {self._toolchain.stack} lacks:"
            f" the package {package} is not installed",
            where=str(self._toolchain.cuda_home),
            remedy=f"take a stack with a CUDA build of torch, or add {package} to the stack's file; then scripts/inv"
            f" setup --stack {self._toolchain.stack}",
        )

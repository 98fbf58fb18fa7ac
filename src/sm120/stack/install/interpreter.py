"""The Python that an environment is made with."""

import shutil
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from packaging.specifiers import SpecifierSet

from sm120 import errors
from sm120.process import run as run_process
from sm120.runs import Run
from sm120.stack.spec import Stack

_START_SECONDS = 30.0
_OLDEST, _NEWEST = 11, 30  # minor versions of Python 3 that are looked for on PATH


@dataclass(frozen=True, kw_only=True)
class Interpreter:
    path: Path
    version: str  # 3.11.7

    @property
    def minor(self) -> str:
        """3.11: what wheels are made for."""
        return ".".join(self.version.split(".")[:2])


def platform_tag() -> str:
    """As the end of a wheel's name: linux_x86_64."""
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")


def base_python(stack: Stack, minor: str | None = None) -> Interpreter:
    """An interpreter that the stack has wheels for, of this minor version if one is given.

    The toolkit's own, or else one on PATH. PreflightError when there is none.
    """
    wanted = SpecifierSet(stack.python)

    def fits(version: str) -> bool:
        return wanted.contains(version, prereleases=True) and minor in {None, ".".join(version.split(".")[:2])}

    own = Interpreter(
        path=Path(getattr(sys, "_base_executable", None) or sys.executable),
        version=".".join(str(part) for part in sys.version_info[:3]),
    )
    seen = [f"{own.path} is {own.version}"]
    if fits(own.version):
        return own
    fitting = [number for number in range(_NEWEST, _OLDEST - 1, -1) if fits(f"3.{number}.99")]
    for number in fitting:
        found = shutil.which(f"python3.{number}")
        if found is None:
            continue
        argv = [found, "-I", "-c", "import platform; print(platform.python_version())"]
        done = run_process(argv, timeout=_START_SECONDS)
        version = done.tail[-1] if done.tail and not done.returncode else "not one that starts"
        seen.append(f"{found} is {version}")
        if not done.returncode and fits(version):
            return Interpreter(path=Path(found), version=version)
    asked = f"Python {stack.python}" if minor is None else f"Python {minor}, which its wheels are made for"
    example = f"python{minor or f'3.{fitting[0]}'}" if minor or fitting else ""
    raise errors.PreflightError(
        f"the stack {stack.name} needs {asked}; {'; '.join(seen)}",
        where=str(stack.path),
        remedy=f"install one of these versions so that it is on PATH, as in: apt install {example} {example}-venv"
        if example
        else f"correct python = … in {stack.path}",
    )


def make_venv(base: Interpreter, folder: Path, run: Run, held: int) -> Path:
    """A virtual environment without pip; its interpreter. PreflightError when Python cannot make one."""
    argv = [str(base.path), "-I", "-m", "venv", "--without-pip", str(folder)]
    log = run.log_path("venv")
    done = run_process(argv, log=log, pass_fds=(held,))
    run.record_command(done)
    if done.returncode:
        raise errors.PreflightError(
            f"{base.path} could not make a virtual environment: {done.tail[-1] if done.tail else 'no output'}",
            where=str(log),
            remedy="install its venv module (Debian, Ubuntu: apt install python3-venv), then try again",
        )
    return folder / "bin" / "python"

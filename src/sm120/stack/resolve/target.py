"""The Python and the machine that wheels are for."""

import json
from dataclasses import dataclass
from pathlib import Path

from packaging import tags
from packaging.tags import Tag

from sm120 import errors
from sm120.process import run as run_process

_ASK = """
import json, platform, sysconfig
print(json.dumps([platform.python_version(), platform.python_implementation(), sysconfig.get_platform(),
                  bool(sysconfig.get_config_var("Py_GIL_DISABLED"))]))
"""


@dataclass(frozen=True, kw_only=True)
class Target:
    python: str  # "3.11.7"
    platform: str  # "linux_x86_64"
    tags: tuple[Tag, ...]  # best first

    @property
    def short(self) -> str:
        return ".".join(self.python.split(".")[:2])


def target_of(python: Path) -> Target:
    """Asks an interpreter of this machine. Raises PreflightError when it is none, or not CPython."""
    done = run_process([str(python), "-I", "-c", _ASK], timeout=60)
    try:
        version, implementation, platform, is_free_threaded = json.loads(done.tail[-1])
    except (IndexError, ValueError, TypeError) as error:
        raise errors.PreflightError(
            f"{python} is no Python that starts",
            where=str(python),
            remedy="name another one with SM120_PYTHON",
        ) from error
    if implementation != "CPython":
        raise errors.PreflightError(
            f"{python} is {implementation}; the packages are there for CPython",
            where=str(python),
            remedy="name a CPython with SM120_PYTHON",
        )
    return make_target(version, platform.replace("-", "_"), is_free_threaded=is_free_threaded)


def make_target(version: str, platform: str, *, is_free_threaded: bool = False) -> Target:
    """The target of a CPython of that version on this machine."""
    major, minor = (int(part) for part in version.split(".")[:2])
    abi = f"cp{major}{minor}{'t' if is_free_threaded else ''}"
    wanted = [
        *tags.cpython_tags((major, minor), abis=[abi]),
        *tags.compatible_tags((major, minor), interpreter=f"cp{major}{minor}"),
    ]
    return Target(python=version, platform=platform, tags=tuple(wanted))

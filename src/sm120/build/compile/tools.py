"""What the backend needs and the stack's Python has not: links to the toolkit's own packages, cmake and ninja.

Only these become importable there. The toolkit's whole site-packages would bring other versions of what torch and the
project import.
"""

import importlib.metadata
import shutil
from pathlib import Path

from sm120 import errors, files
from sm120.build.toolchain import Toolchain

_PACKAGES = ("scikit_build_core", "packaging", "pathspec")
# The backend asks these modules before PATH, and the stack may have both in versions of its own.
_PROGRAMS = {"cmake": "CMAKE_BIN_DIR", "ninja": "BIN_DIR"}


def lay_out(folder: Path, toolchain: Toolchain) -> Path:
    """A folder for sys.path, made anew. Its ``bin`` is for PATH."""
    with files.writing(folder):
        if folder.exists():
            shutil.rmtree(folder)
        (folder / "bin").mkdir(parents=True)
        for package in _PACKAGES:
            for path in _top_level(package):
                (folder / path.name).symlink_to(path)
        for name, program in (("cmake", toolchain.cmake), ("ninja", toolchain.ninja)):
            (folder / "bin" / name).symlink_to(program)
            (folder / name).mkdir()
            (folder / name / "__init__.py").write_text(f"{_PROGRAMS[name]} = {str(program.parent)!r}\n", "utf-8")
    return folder


def _top_level(package: str) -> list[Path]:
    """The package's folder and its dist-info."""
    try:
        distribution = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        distribution = None
    names = {file.parts[0] for file in (distribution.files or ()) if file.parts[0] != ".."} if distribution else set()
    if distribution is None or package not in names:
        raise errors.PreflightError(
            f"the toolkit's own {package} is not whole", remedy="rm -r .venv, then run the same command again"
        )
    return [Path(str(distribution.locate_file(name))) for name in sorted(names)]

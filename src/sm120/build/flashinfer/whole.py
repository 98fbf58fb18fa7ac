"""Whether what lies in FlashInfer's cache is what a server would load without compiling.

FlashInfer starts ninja each time it loads a module, so ninja's judgement is the server's. It knows neither the
compiler's version nor damage to a finished file: a record beside the library does.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sm120 import errors, files

RECORD = "sm120.json"
NINJA_FILE = "build.ninja"
IDLE = "ninja: no work to do."


@dataclass(frozen=True, kw_only=True)
class Verdict:
    whole: bool
    why: str
    remove: tuple[str, ...] = ()  # below the module's folder, before it is built


def judge(
    *, library: Path, planned: Path, folder: Path, base: tuple[Path, Path], compilers: str, ninja: Callable[[], str]
) -> Verdict:
    """``planned``: the ninja file that FlashInfer wrote in another base folder, ``base[0]``; ``base[1]`` is the real.

    ``ninja`` says what ninja would do in the real one.
    """
    record = read_record(folder)
    if record is not None and record["compilers"] != compilers:
        # No object of another compiler may be linked in: all that is there goes.
        return Verdict(whole=False, why=f"built by {record['compilers']}", remove=(".",))
    stale = _stale_ninja(planned, folder, base)
    if not library.exists():
        return Verdict(whole=False, why="not built yet" if record is None else "not finished", remove=stale)
    if stale or not _same_generated(planned, base):
        return Verdict(whole=False, why="built with other flags or sources", remove=stale)
    if record is not None and record["sha256"] != files.sha256(library):
        return Verdict(whole=False, why="changed since it was built", remove=(library.name, RECORD))
    if IDLE not in ninja():
        return Verdict(whole=False, why="not whole, or older than its sources")
    return Verdict(whole=True, why="" if record is not None else "by FlashInfer itself")


def _stale_ninja(planned: Path, folder: Path, base: tuple[Path, Path]) -> tuple[str, ...]:
    """FlashInfer before 0.6.5 takes any ninja file that is there, so that one that differs has to go."""
    there = folder / NINJA_FILE
    return (NINJA_FILE,) if there.exists() and _text(there) != _moved(planned, base) else ()


def _same_generated(planned: Path, base: tuple[Path, Path]) -> bool:
    """Sources that FlashInfer writes for the module: a server writes those anew that differ, and compiles again."""
    text = _text(planned)
    beside = {path.parent for word in text.split() if (path := Path(word)).is_relative_to(base[0]) and path.exists()}
    made = [path for place in beside for path in sorted(place.iterdir()) if path.is_file()]
    return all(_text(base[1] / path.relative_to(base[0])) == _moved(path, base) for path in made)


def _moved(path: Path, base: tuple[Path, Path]) -> str:
    return _text(path).replace(str(base[0]), str(base[1]))


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", "surrogateescape")
    except OSError:
        return ""


def record_text(compilers: str, library: Path | None = None) -> str:
    """Without a library it is the record of a build that is under way."""
    return json.dumps({"compilers": compilers, "sha256": "" if library is None else files.sha256(library)})


def write_record(folder: Path, library: Path, compilers: str) -> None:
    files.write_text_atomic(folder / RECORD, record_text(compilers, library))


def read_record(folder: Path) -> dict[str, str] | None:
    """A record that is damaged is none: ninja alone decides then."""
    try:
        content = files.read_json(folder / RECORD)
    except errors.UsageError:
        return None
    wanted = ("compilers", "sha256")
    if not isinstance(content, dict) or not all(isinstance(content.get(key), str) for key in wanted):
        return None
    return {key: content[key] for key in wanted}

"""The wheel of a build: named after its recipe, the record of it inside, and the same bytes for the same recipe."""

import contextlib
import hashlib
import json
import os
import re
import zipfile
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import IO, Any

from packaging.metadata import parse_email
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from sm120 import errors, files
from sm120.stack.install.contents import BROKEN, contents_of

RECORD = "_build.json"
_BUILD = re.compile(r"([^/]+)/_build\.json")
_MODULE = "sgl_kernel"
_BLOCK = 2**20


@dataclass(frozen=True, kw_only=True)
class Built:
    path: Path
    name: str  # canonical
    version: str
    sha256: str
    record: Mapping[str, Any]
    module: str  # the package that holds the record: what is imported to prove it


def overlay(pyproject: bytes, tag: str, record: Mapping[str, Any]) -> dict[str, bytes]:
    """What the build's own copy of the component gets: path below the component → contents.

    The version with the tag as its local part, and the record of the build. Raises BuildError when pyproject.toml does
    not say the version, or not where the package lies.
    """
    import tomlkit
    from tomlkit.exceptions import TOMLKitError

    try:
        document = tomlkit.parse(pyproject.decode("utf-8"))
    except (TOMLKitError, UnicodeDecodeError) as error:
        raise _unfit(f"cannot be read: {error}") from error
    project = document.get("project")
    said = project.get("version") if isinstance(project, Mapping) else None
    if not isinstance(project, MutableMapping) or not isinstance(said, str):
        is_dynamic = isinstance(project, Mapping) and "version" in (project.get("dynamic") or ())
        raise _unfit(f"says no version{': it is dynamic' if is_dynamic else ''}")
    try:
        project["version"] = f"{Version(said).public}+{tag}"
    except InvalidVersion as error:
        raise _unfit(f"says the version {said!r}, which is none") from error
    package = _package(document)
    return {
        "pyproject.toml": tomlkit.dumps(document).encode("utf-8"),
        f"{package}/{RECORD}": (json.dumps(record, indent=1, sort_keys=True) + "\n").encode("utf-8"),
    }


def _package(document: Mapping[str, Any]) -> PurePosixPath:
    """The folder of the package that is built, as scikit-build-core is told; of several that of the kernels."""
    found: Any = document
    for key in ("tool", "scikit-build", "wheel", "packages"):
        found = found.get(key) if isinstance(found, Mapping) else None
    folders = [PurePosixPath(str(one)) for one in (found.values() if isinstance(found, Mapping) else found or ())]
    if not folders or any(folder.is_absolute() or ".." in folder.parts for folder in folders):
        raise _unfit("names no folder of a package in [tool.scikit-build] wheel.packages")
    return next((folder for folder in folders if folder.name == _MODULE), folders[0])


def _unfit(what: str) -> errors.BuildError:
    return errors.BuildError(
        f"pyproject.toml of the source {what}",
        where="pyproject.toml",
        remedy="take a source whose pyproject.toml is like SGLang's: --source DIR",
    )


def finish(made: Path, destination: Path, tag: str, record: Mapping[str, Any]) -> Built:
    """Moves a wheel that is what was asked to its place, with its SHA-256 beside it.

    Its archive is written anew: the backend takes permissions from the files, and those from the umask. Raises
    BuildError when name, version, RECORD or the record inside are not as they should be.
    """
    try:
        with zipfile.ZipFile(made) as archive:
            built = _described(made, archive)
            _check_asked(built, tag, record)
            return _take(archive, built, destination, made)
    except BROKEN as error:
        raise _wrong(made, f"is not whole: {error}") from error
    except OSError as error:
        raise _wrong(made, f"cannot be read: {error.strerror or error}") from error


def existing(folder: Path, identity: str) -> Built | None:
    """The wheel of this recipe, when a whole one is there."""
    for sums in sorted(folder.glob("*.whl.sha256")):
        path = sums.with_suffix("")
        with contextlib.suppress(OSError, errors.BuildError, *BROKEN):
            with zipfile.ZipFile(path) as archive:
                built = _described(path, archive)
            digest = files.sha256(path)
            if built.record.get("identity") == identity and sums.read_text("utf-8") == _sums(digest, path):
                return replace(built, sha256=digest)
    return None


def _described(path: Path, archive: zipfile.ZipFile) -> Built:
    """What a wheel says of itself; its SHA-256 is still to be found."""
    try:
        name, version, _, _ = parse_wheel_filename(path.name)
    except InvalidWheelFilename as error:
        raise _wrong(path, "has a name that is none of a wheel") from error
    metadata, _ = parse_email(archive.read(f"{contents_of(archive).info}/METADATA"))
    said = metadata.get("name", "nameless"), metadata.get("version", "")
    if (canonicalize_name(said[0]), said[1]) != (name, str(version)):
        raise _wrong(path, f"says in its METADATA that it is {' '.join(said)}")
    records = [found for member in archive.namelist() if (found := _BUILD.fullmatch(member))]
    if len(records) != 1:
        raise _wrong(path, f"holds {len(records)} files {RECORD} instead of one: see what excludes it from the wheel")
    record = json.loads(archive.read(records[0][0]))
    if not isinstance(record, dict):
        raise _wrong(path, f"holds a {RECORD} that is none")
    return Built(path=path, name=name, version=str(version), sha256="", record=record, module=records[0][1])


def _check_asked(built: Built, tag: str, record: Mapping[str, Any]) -> None:
    if Version(built.version).local != tag:
        raise _wrong(built.path, f"is of the version {built.version}: its local part is not {tag}")
    if built.record != json.loads(json.dumps(record)):
        raise _wrong(built.path, f"holds another build's {RECORD}")


def _take(archive: zipfile.ZipFile, built: Built, destination: Path, made: Path) -> Built:
    path = destination / made.name
    sums = path.with_name(f"{path.name}.sha256")
    staged = path.with_name(f".{path.name}.tmp")  # one name: a build is alone, and what a killed one left goes
    files.make_folder(destination)
    try:
        with files.writing(path):
            with staged.open("wb") as file:
                _copy(archive, file, made)
                file.flush()
                os.fsync(file.fileno())
            digest = files.sha256(staged)
            staged.replace(path)
        files.write_text_atomic(sums, _sums(digest, path))
    finally:
        staged.unlink(missing_ok=True)
    made.unlink()
    return replace(built, path=path, sha256=digest)


def _copy(archive: zipfile.ZipFile, file: IO[bytes], made: Path) -> None:
    """Every member in one order and with one of two permissions. BuildError when RECORD does not say what is in it."""
    recorded = contents_of(archive)
    members = {info.filename: info for info in archive.infolist() if not info.is_dir()}
    if len(members) != len(archive.infolist()) or members.keys() - recorded.hashes.keys() != {
        f"{recorded.info}/RECORD"
    }:
        raise _wrong(made, "holds other files than its RECORD names")
    with zipfile.ZipFile(file, "w") as target:
        for info in sorted(members.values(), key=_place):
            entry = zipfile.ZipInfo(info.filename, info.date_time)
            entry.create_system, entry.compress_type, entry.file_size = 3, zipfile.ZIP_DEFLATED, info.file_size
            entry.external_attr = (0o100755 if info.external_attr >> 16 & 0o100 else 0o100644) << 16
            digest = hashlib.sha256()
            with target.open(entry, "w") as out:
                for block in _blocks(archive, info):
                    digest.update(block)
                    out.write(block)
            if recorded.hashes.get(info.filename, digest.hexdigest()) != digest.hexdigest():
                raise _wrong(made, f"holds {info.filename} otherwise than its RECORD says")


def _place(info: zipfile.ZipInfo) -> tuple[bool, bool, str]:
    """As wheels should have it: their metadata at the end, and RECORD last."""
    folder = info.filename.split("/")[0]
    return folder.endswith(".dist-info"), info.filename.endswith("/RECORD"), info.filename


def _blocks(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Iterator[bytes]:
    with archive.open(info) as file:
        while block := file.read(_BLOCK):
            yield block


def _sums(digest: str, path: Path) -> str:
    """As sha256sum writes and checks it."""
    return f"{digest}  {path.name}\n"


def _wrong(path: Path, what: str) -> errors.BuildError:
    return errors.BuildError(
        f"the wheel {path.name} {what}", where=str(path), remedy="see the log of the build; then build it again"
    )

"""What a package index or an environment has to audit."""

import sys
from collections.abc import Sequence
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from sm120 import errors, files, process
from sm120.build.audit import operators, subject
from sm120.build.audit.operators import Calls
from sm120.build.audit.subject import File
from sm120.console import Console
from sm120.host.binaries import elf, fatbin
from sm120.host.binaries.libraries import KERNEL_PACKAGES, LIBRARY
from sm120.host.binaries.records import Record, read_records
from sm120.runs import Run, safe_name
from sm120.stack.install.record import Environment

Found = tuple[str, Sequence[File], Calls]

# The rest of the stack stands on these, and nothing here replaces them: their facts are shown and refuse nothing.
_FOUNDATIONS = frozenset({"torch", "torchaudio", "torchvision", "triton"})
_NO_SUCH = ("No matching distribution found", "Could not find a version")
_DOWNLOAD_SECONDS = 3600.0


def package(text: str, stack: str, site: Path) -> Found:
    """Of what is installed. UsageError when it is not."""
    try:
        requirement = Requirement(text)
    except InvalidRequirement as error:
        raise _no_package(text) from error
    if requirement.specifier or requirement.url or requirement.extras or requirement.marker:
        raise _no_package(text)
    name = canonicalize_name(requirement.name)
    records = read_records(site)
    mine = next((record for record in records if record.name == name), None)
    if mine is None:
        known = sorted({record.name for record in records})
        raise errors.UsageError(
            f"{name} is not installed in the stack {stack}; {errors.nearest(name, known)}",
            where=str(site),
            remedy=f"for a version of the package index: scripts/inv audit --package {name}==VERSION",
        )
    return f"{name} {mine.version}", _libraries(mine, site), _calls([mine], site)


def environment(stack: str, site: Path, cache: Path) -> Found:
    """The kernel packages' libraries with GPU code, and what FlashInfer's JIT has made."""
    records = [record for record in read_records(site) if record.name in KERNEL_PACKAGES]
    found = [one for record in records for one in _libraries(record, site) if _has_code(one.path)]
    made = sorted(path for path in (cache / "flashinfer").rglob("*.so") if path.is_file())
    cached = [File(name=str(path), path=path, package="flashinfer-cache") for path in made]
    return f"the stack {stack}", [*found, *cached], _calls(records, site)


def _libraries(record: Record, site: Path) -> list[File]:
    judged = record.name not in _FOUNDATIONS
    return [
        File(name=path, path=site / path, package=record.name, judged=judged)
        for path in sorted(record.hashes)
        if LIBRARY.search(path)
    ]


def _has_code(path: Path) -> bool:
    """A file that cannot be read counts too: the audit says what is wrong with it."""
    try:
        return any(section.name == fatbin.SECTION for section in elf.sections(path))
    except errors.BinaryError:
        return True


def _calls(records: Sequence[Record], site: Path) -> Calls:
    paths = [path for record in records if record.name not in _FOUNDATIONS for path in sorted(record.hashes)]
    return operators.calls(subject.python_in_files(site, paths))


def download(text: str, environment: Environment, folder: Path, run: Run, console: Console) -> Path:
    """The wheel of NAME==VERSION for the stack's Python, by pip as the machine configures it; kept for the next time.

    Raises UsageError when there is none, PreflightError when it cannot be had.
    """
    name, version = _pinned(text)
    kept = folder / "wheels" / safe_name(f"{name}-{version}")
    found = sorted(kept.glob("*.whl"))
    if found:
        console.info(f"{name} {version} was downloaded before: {found[0]}")
        return found[0]
    coming = kept.with_name(f"{kept.name}.coming")
    with files.lock(kept.with_name(f"{kept.name}.lock"), waiting=f"another process downloads {name} {version}"):
        log = run.log_path("download")
        with console.step(f"downloading {name} {version}"):
            argv = [sys.executable, "-m", "pip", "--python", str(environment.python), "download", "--no-deps"]
            argv += ["--only-binary=:all:", "--no-input", "--disable-pip-version-check", "--progress-bar=off"]
            done = process.run(
                [*argv, "--dest", str(files.make_folder(coming)), f"{name}=={version}"],
                timeout=_DOWNLOAD_SECONDS,
                log=log,
            )
            run.record_command(done)
            if done.returncode or done.timed_out:
                raise _failed(name, version, done, log)
        with files.writing(kept):
            if not kept.exists():
                coming.rename(kept)
    return min(kept.glob("*.whl"))


def _pinned(text: str) -> tuple[str, Version]:
    try:
        requirement = Requirement(text)
        ((operator, version),) = [(one.operator, one.version) for one in requirement.specifier]
        if operator != "==" or requirement.url or requirement.extras or requirement.marker:
            raise _no_package(text)
        return canonicalize_name(requirement.name), Version(version)
    except (InvalidRequirement, InvalidVersion, ValueError) as error:
        raise _no_package(text) from error


def _no_package(text: str) -> errors.UsageError:
    return errors.UsageError(
        f"--package {text} is neither a name nor NAME==VERSION",
        remedy="write it as in --package sglang-kernel or --package sglang-kernel==0.4.10",
    )


def _failed(name: str, version: Version, done: process.Completed, log: Path) -> errors.ToolkitError:
    said = next((line for line in reversed(done.tail) if line.startswith("ERROR")), " ".join(done.tail[-1:]))
    if any(text in line for line in done.tail for text in _NO_SUCH):
        return errors.UsageError(
            f"the package index has no wheel of {name} {version} for the stack's Python",
            where=str(log),
            remedy=f"look at what there is: pip index versions {name}; or give a file: scripts/inv audit --wheel FILE",
        )
    return errors.PreflightError(
        f"{name} {version} could not be downloaded: {said or 'pip said nothing'}",
        where=str(log),
        remedy="mend the network or pip's configuration, or give a file: scripts/inv audit --wheel FILE",
    )

"""Makes what ``build-kernels`` gets from the files in kernel_project/: a checkout, and the mirrors of what it fetches.

Files that end in .in are templates; those of the Python package are so that they count as input, in upstream's style.
"""

import gzip
import hashlib
import io
import os
import shutil
import subprocess
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

FILES = Path(__file__).with_name("kernel_project")
HOST = "example.invalid"  # never there: whatever is fetched comes from a mirror
ARCHIVE = "small/scale-steps/archive/v1.tar.gz"
_DATE = "2026-03-07T10:31:08+08:00"


@dataclass(frozen=True, kw_only=True)
class Project:
    checkout: Path  # a git repository with sgl-kernel/ in it
    commit: str
    mirror: Path  # bare repositories and the archive
    repositories: Mapping[str, Path]  # in the mirror: fp4-numbers, tally, and marks, which tally asks for
    archive: Path
    revisions: Mapping[str, str]  # commits by the repository's name, and the SHA-256 of scale-steps' archive


def make_project(root: Path) -> Project:
    """Below ``root``. The same files give the same commits, wherever and whenever."""
    mirror = root / "mirror"
    names = {"ARCHIVES_HOST": HOST, "STEPS_PATH": ARCHIVE}
    repositories, revisions = {}, {}
    for name in ("marks", "tally", "fp4-numbers"):
        work = root / "work" / name
        _fill(FILES / "fetched" / name, work, names)
        revisions[name] = commit_all(work)
        repositories[name] = bare(work, mirror / HOST / "small" / f"{name}.git")
        variable = name.rpartition("-")[2].upper()
        names |= {f"{variable}_URL": f"https://{HOST}/small/{name}.git", f"{variable}_COMMIT": revisions[name]}
    archive = mirror / "archives" / ARCHIVE.replace("/archive/", "/").replace("/", "-")
    revisions["scale-steps"] = _archive(FILES / "fetched" / "scale-steps", archive)
    checkout = root / "checkout"
    _fill(FILES / "sgl-kernel", checkout / "sgl-kernel", {**names, "STEPS_SHA256": revisions["scale-steps"]})
    return Project(
        checkout=checkout,
        commit=commit_all(checkout),
        mirror=mirror,
        repositories=repositories,
        archive=archive,
        revisions=revisions,
    )


def _fill(files: Path, target: Path, names: Mapping[str, str]) -> None:
    shutil.copytree(files, target)
    for template in target.rglob("*.in"):
        text = template.read_text("utf-8")
        for name, value in names.items():
            text = text.replace(f"@{name}@", value)
        template.with_suffix("").write_text(text, "utf-8")
        template.unlink()


def git(folder: Path, *words: str) -> str:
    """Without the machine's configuration, and at one time."""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("GIT_")},
        **dict.fromkeys(("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM"), os.devnull),
        **dict.fromkeys(("GIT_AUTHOR_NAME", "GIT_COMMITTER_NAME"), "Somebody"),
        **dict.fromkeys(("GIT_AUTHOR_EMAIL", "GIT_COMMITTER_EMAIL"), "somebody@example.invalid"),
        **dict.fromkeys(("GIT_AUTHOR_DATE", "GIT_COMMITTER_DATE"), _DATE),
    }
    done = subprocess.run(
        ["git", "-C", str(folder), *words], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.strip()


def commit_all(folder: Path) -> str:
    """A repository of all that is in the folder; its one commit."""
    git(folder, "init", "--quiet", "--initial-branch=main")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message=one")
    return git(folder, "rev-parse", "HEAD")


def bare(repository: Path, place: Path) -> Path:
    place.parent.mkdir(parents=True, exist_ok=True)
    git(repository, "clone", "--quiet", "--bare", "--no-hardlinks", ".", str(place.absolute()))
    return place


def _archive(folder: Path, place: Path) -> str:
    """As forges make them: all below one folder. Returns its SHA-256."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path in sorted(folder.rglob("*")):
            tar.add(path, f"{folder.name}-1/{path.relative_to(folder)}", recursive=False, filter=_plain)
    data = gzip.compress(packed.getvalue(), mtime=0)
    place.parent.mkdir(parents=True)
    place.write_bytes(data)
    return hashlib.sha256(data).hexdigest()


def _plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = info.mtime = 0
    info.uname = info.gname = ""
    info.mode = 0o755 if info.isdir() else 0o644
    return info

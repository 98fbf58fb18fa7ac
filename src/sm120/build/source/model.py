"""What is asked for, and what was found."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What the user and the stack ask for."""

    repository: str | None  # of SGLang
    commit: str | None  # all 40 digits, or a tag
    folder: Path | None  # a checkout of the user's, or the component's folder alone; never written
    mirror: Path | None  # a folder of git repositories and archives; with it nothing is asked of the network
    given: Mapping[str, Path] = field(default_factory=dict)  # name of a dependency → the user's folder for it


@dataclass(frozen=True, kw_only=True)
class Pristine:
    """The source before the patches. Never written."""

    root: Path
    folder: str  # the component's, below the root; "" when it is the root
    commit: str | None
    dirty: bool  # the component's folder differs from the commit
    committed: int  # seconds since 1970; one fixed time where no commit is known
    content: str  # SHA-256 over paths, exec bits and bytes of the component's folder
    origin: str  # for the user


@dataclass(frozen=True, kw_only=True)
class Dependency:
    """What a build file asks FetchContent for."""

    name: str  # lower case, as FetchContent has it
    kind: Literal["git", "archive", "cmake"]  # cmake: CMake fetches it itself, for ``reason``
    url: str = ""
    revision: str = ""  # a commit, a tag or a branch; of an archive, what its address or its hash says
    sha256: str | None = None
    submodules: bool | tuple[str, ...] = False  # all of them, or these paths
    inside: str = ""  # where it goes when that is in another dependency: repo-flashmla/csrc/cutlass
    place: str  # file:line
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Checkout:
    """A folder that the build may use, and write, as its own."""

    name: str
    path: Path
    revision: str  # a commit, the SHA-256 of an archive, or the content hash of a folder that was given
    how: Literal["git", "archive", "mirror", "given"]  # mirror: the commit of a mirror, in an archive's stead

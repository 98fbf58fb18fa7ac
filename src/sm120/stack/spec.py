"""Stack files: TOML → a frozen ``Stack``. Every error names file and line."""

import hashlib
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from sm120 import config, errors
from sm120.stack import tomlread
from sm120.stack.tomlread import Place

SCHEMA = 2
STACKS = config.CHECKOUT / "stacks"
_KEYS = {
    *("schema", "summary", "python", "disk-mb", "cuda", "packages", "overrides", "constraints"),
    *("nightly", "index", "last", "prove", "kernels"),
}
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
_MODULE = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")
_REMEDY = "correct the file; stacks/cpu.toml and stacks/nightly.toml are examples"
_LONGEST = 100  # letters of a stack's name: longer names are made of it, and a file's name ends at 255 bytes


@dataclass(frozen=True, kw_only=True)
class GitSource:
    url: str
    commit: str  # 40 hexadecimal digits: a branch would not stay the same
    subdirectory: str = ""


@dataclass(frozen=True, kw_only=True)
class KernelSource:
    """The repository of SGLang that ``build-kernels`` takes sgl-kernel from."""

    url: str
    revision: str  # a commit's 40 digits, or a tag


@dataclass(frozen=True, kw_only=True)
class Package:
    name: str  # canonical
    specifier: str  # "==2.13.0+cpu", ">=13.2", "==13.0.*"; "" for any, and for a package from git
    extras: tuple[str, ...] = ()
    git: GitSource | None = None

    @property
    def pinned(self) -> str | None:
        """The exact version that is asked for, local tag included, when there is one."""
        found = re.fullmatch(r"==\s*([^,*\s]+)", self.specifier)
        return found[1] if found else None

    @property
    def requirement(self) -> str:
        """As in a requirements file."""
        name = f"{self.name}[{','.join(self.extras)}]" if self.extras else self.name
        if self.git is None:
            return f"{name}{self.specifier}"
        folder = f"#subdirectory={self.git.subdirectory}" if self.git.subdirectory else ""
        return f"{name} @ git+{self.git.url}@{self.git.commit}{folder}"


@dataclass(frozen=True, kw_only=True)
class Override:
    """What stands for every other package's requirement of ``name``."""

    name: str
    specifier: str | None  # None: never installed; "": what [packages] or [nightly] says
    reason: str


@dataclass(frozen=True, kw_only=True)
class Constraint:
    """A limit on ``name``, should something need it."""

    name: str
    specifier: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Nightly:
    """A set of builds of one day, from an index that keeps only the newest."""

    url: str
    lead: str
    packages: tuple[str, ...]  # of the same day as the lead
    frozen: tuple[str, ...]  # of that day or before; of no day at all (triton): the lead's requirement decides
    date: str | None  # "20260307"; None: the newest day of which all are there
    reason: str

    @property
    def names(self) -> tuple[str, ...]:
        return (self.lead, *self.packages, *self.frozen)


@dataclass(frozen=True, kw_only=True)
class Index:
    """A package index of the stack's own, asked only for ``packages``, after the machine's own configuration."""

    url: str
    packages: tuple[str, ...]
    reason: str


@dataclass(frozen=True, kw_only=True)
class Last:
    """Packages that are installed after everything else, in this order."""

    packages: tuple[str, ...]
    reason: str


@dataclass(frozen=True, kw_only=True)
class Stack:
    name: str
    path: Path
    summary: str
    python: str  # a version specifier, as in >=3.11,<3.15
    disk_bytes: int
    packages: tuple[Package, ...]
    overrides: tuple[Override, ...]
    constraints: tuple[Constraint, ...]
    nightly: Nightly | None
    indexes: tuple[Index, ...]
    last: tuple[Last, ...]
    imports: tuple[str, ...]  # proved by importing them
    driver_imports: tuple[str, ...]  # the same, where libcuda.so.1 is; it comes with the driver
    cuda: str | None  # CUDA version of the home that is made from the wheels; None: no home
    kernels: KernelSource | None = None  # None: there is nothing to build kernels from but a checkout of the user's

    def requirements(self) -> list[str]:
        """In the file's order, the nightly's packages last."""
        nightly = self.nightly.names if self.nightly else ()
        return [*(package.requirement for package in self.packages), *nightly]

    def package(self, name: str) -> Package | None:
        return next((package for package in self.packages if package.name == name), None)


def is_name(text: str) -> bool:
    """Whether a stack can have this name: files and folders are called after it."""
    return _NAME.fullmatch(text) is not None and len(text) <= _LONGEST


def names() -> list[str]:
    return sorted(path.stem for path in STACKS.glob("*.toml"))


def load_stack(name: str | Path) -> Stack:
    """A stack by its name in stacks/ or by the path of a TOML file. Raises UsageError with file and line."""
    text = str(name)
    is_path = isinstance(name, Path) or "/" in text or text.endswith(".toml")
    path = Path(text).expanduser() if is_path else STACKS / f"{text}.toml"
    if not is_path and text not in names():
        raise errors.UsageError(
            f"no stack is named {text!r}; {errors.nearest(text, names())}",
            where=str(STACKS),
            remedy="name one of these, or give the path of a TOML file",
        )
    if not path.exists():
        copy = f"cp {shlex.quote(str(STACKS / 'cpu.toml'))} my.toml"
        raise errors.UsageError(
            f"there is no stack file {path}",
            where=str(path),
            remedy=f"name one of {', '.join(names())}; or begin with a copy: {copy}",
        )
    return parse(tomlread.read(path, _REMEDY), path)


def parse(text: str, path: Path) -> Stack:
    """A stack from the text of the file ``path``."""
    return _Reader(tomlread.load(text, path, _REMEDY)).stack()


def request(stack: Stack) -> str:
    """SHA-256 over everything that decides which files are installed, and in which order.

    What is proved (imports) and made of them (the CUDA home) is not in it: a change there needs no new resolution.
    """
    nightly = stack.nightly
    asked = {
        "python": stack.python,
        "packages": [package.requirement for package in stack.packages],
        "overrides": [(o.name, o.specifier) for o in stack.overrides],
        "constraints": [(c.name, c.specifier) for c in stack.constraints],
        "nightly": nightly and [nightly.url, nightly.lead, nightly.packages, nightly.frozen, nightly.date],
        "indexes": [(index.url, index.packages) for index in stack.indexes],
        "last": [last.packages for last in stack.last],
    }
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()


class _Reader:
    def __init__(self, document: tomlread.Document) -> None:
        self._doc = document

    def stack(self) -> Stack:
        data, doc = self._doc.data, self._doc
        doc.known(data, _KEYS, "")
        if data.get("schema") != SCHEMA or isinstance(data.get("schema"), bool):
            raise doc.wrong(Place("", "schema"), f"schema must be {SCHEMA}, not {data.get('schema')!r}")
        disk = data.get("disk-mb")
        if not isinstance(disk, int) or isinstance(disk, bool) or not 0 < disk < 10**7:
            raise doc.wrong(Place("", "disk-mb"), "disk-mb must be a whole number of megabytes above 0")
        name = doc.path.stem
        if not is_name(name):
            what = "letters, digits, '.', '_' and '-'"
            raise doc.error(1, f"the file's name must be at most {_LONGEST} {what}, not {name!r}")
        packages = self._packages()
        nightly = self._nightly(packages)
        named = {package.name for package in packages} | set(nightly.names if nightly else ())
        imports, driver_imports = self._prove()
        return Stack(
            name=name,
            path=doc.path,
            summary=doc.text(data, Place("", "summary")),
            python=self._python(),
            disk_bytes=disk * 10**6,
            packages=packages,
            overrides=self._overrides(named),
            constraints=self._constraints(packages),
            nightly=nightly,
            indexes=tuple(self._index(table, n, packages) for n, table in enumerate(doc.tables("index"))),
            last=tuple(self._last(table, n) for n, table in enumerate(doc.tables("last"))),
            imports=imports,
            driver_imports=driver_imports,
            cuda=self._cuda(),
            kernels=self._kernels(packages),
        )

    def _python(self) -> str:
        text = self._doc.text(self._doc.data, Place("", "python"))
        try:
            SpecifierSet(text)
        except InvalidSpecifier as error:
            raise self._doc.wrong(Place("", "python"), f"python is no version specifier: {text!r}") from error
        return text

    def _cuda(self) -> str | None:
        if "cuda" not in self._doc.data:
            return None
        text = self._doc.text(self._doc.data, Place("", "cuda"))
        if not re.fullmatch(r"[1-9]\d?\.\d", text):
            raise self._doc.wrong(Place("", "cuda"), f'cuda must be a version as in "13.0", not {text!r}')
        return text

    def _kernels(self, packages: tuple[Package, ...]) -> KernelSource | None:
        """What [kernels] says, or else where SGLang itself comes from when that is a repository."""
        if "kernels" not in self._doc.data:
            git = next((package.git for package in packages if package.name == "sglang"), None)
            return None if git is None else KernelSource(url=git.url, revision=git.commit)
        table = self._doc.table("kernels")
        self._doc.known(table, {"git", "commit", "tag"}, "kernels")
        if ("commit" in table) == ("tag" in table):
            raise self._doc.wrong(Place("kernels", "git"), "[kernels] must have either a commit or a tag")
        key = "commit" if "commit" in table else "tag"
        revision = self._doc.text(table, Place("kernels", key))
        if not (_COMMIT if key == "commit" else _TAG).fullmatch(revision):
            what = "all 40 digits of a commit" if key == "commit" else "a tag's name"
            raise self._doc.wrong(Place("kernels", key), f"{key} must be {what}, not {revision!r}")
        url = self._doc.text(table, Place("kernels", "git"))
        schemes = {"https", "http", "ssh", "file"}
        return KernelSource(url=self._url(url, schemes, Place("kernels", "git")), revision=revision)

    def _packages(self) -> tuple[Package, ...]:
        packages = tuple(self._package(name, value, place) for name, value, place in self._entries("packages"))
        if not packages and "nightly" not in self._doc.data:
            raise self._doc.wrong(Place("", "packages"), "[packages] names no package")
        return packages

    def _package(self, name: str, value: object, place: Place) -> Package:
        if isinstance(value, str):
            return Package(name=name, specifier=self._specifier(value, place))
        if not isinstance(value, dict):
            raise self._doc.wrong(place, f'{place.key} must be a version in quotes as in "1.2.3", not {value!r}')
        self._doc.known_inline(value, {"version", "extras", "git", "commit", "subdirectory"}, place)
        extras = self._doc.texts(value, place, "extras") if "extras" in value else ()
        for extra in extras:
            self._name(extra, place)
        canonical = tuple(canonicalize_name(extra) for extra in extras)
        if "git" not in value:
            self._doc.known_inline(value, {"version", "extras"}, place)
            specifier = self._specifier(self._doc.text(value, place, "version"), place)
            return Package(name=name, specifier=specifier, extras=canonical)
        self._doc.known_inline(value, {"extras", "git", "commit", "subdirectory"}, place)
        return Package(name=name, specifier="", extras=canonical, git=self._git(value, place))

    def _git(self, value: Mapping[str, Any], place: Place) -> GitSource:
        url = self._url(self._doc.text(value, place, "git"), {"https", "http", "ssh", "file"}, place)
        commit = self._doc.text(value, place, "commit")
        if not _COMMIT.fullmatch(commit):
            raise self._doc.wrong(place, f"commit must be all 40 digits of a commit, not {commit!r}")
        folder = self._doc.text(value, place, "subdirectory") if "subdirectory" in value else ""
        if folder.startswith(("/", "-")) or ".." in PurePosixPath(folder).parts or re.search(r"[\s#&;]", folder):
            raise self._doc.wrong(place, f"subdirectory must be a folder inside the repository, not {folder!r}")
        return GitSource(url=url, commit=commit, subdirectory=folder)

    def _overrides(self, named: set[str]) -> tuple[Override, ...]:
        overrides = []
        for name, value, place in self._entries("overrides"):
            table = self._inline(value, {"version", "drop", "reason"}, place)
            if "drop" in table and (table["drop"] is not True or "version" in table):
                raise self._doc.wrong(place, "drop can only be true, and has no version beside it")
            if "drop" in table and name in named:
                raise self._doc.wrong(place, f"{place.key} is dropped, but [packages] or [nightly] asks for it")
            specifier: str | None
            if "version" in table:
                specifier = self._specifier(self._doc.text(table, place, "version"), place)
            elif "drop" in table or name in named:
                specifier = None if "drop" in table else ""
            else:
                message = f"{place.key} is in neither [packages] nor [nightly]: say version = … or drop = true"
                raise self._doc.wrong(place, message)
            overrides.append(Override(name=name, specifier=specifier, reason=self._doc.text(table, place, "reason")))
        return tuple(overrides)

    def _constraints(self, packages: tuple[Package, ...]) -> tuple[Constraint, ...]:
        pins = {package.name: package.pinned for package in packages}
        constraints = []
        for name, value, place in self._entries("constraints"):
            table = self._inline(value, {"version", "reason"}, place)
            specifier = self._specifier(self._doc.text(table, place, "version"), place)
            pin = pins.get(name)
            if pin is not None and not SpecifierSet(specifier).contains(pin, prereleases=True):
                raise self._doc.wrong(place, f"{place.key} is held to {specifier} here, but [packages] says {pin}")
            reason = self._doc.text(table, place, "reason")
            constraints.append(Constraint(name=name, specifier=specifier, reason=reason))
        return tuple(constraints)

    def _nightly(self, packages: tuple[Package, ...]) -> Nightly | None:
        if "nightly" not in self._doc.data:
            return None
        table = self._doc.table("nightly")
        self._doc.known(table, {"url", "lead", "packages", "frozen", "date", "reason"}, "nightly")
        date = self._doc.text(table, Place("nightly", "date")) if "date" in table else None
        if date is not None and not re.fullmatch(r"20\d\d(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01])", date):
            raise self._doc.wrong(Place("nightly", "date"), f'date must be a day as in "20260307", not {date!r}')
        lead = self._doc.text(table, Place("nightly", "lead"))
        url = self._doc.text(table, Place("nightly", "url"))
        nightly = Nightly(
            url=self._url(url, {"https", "http", "file"}, Place("nightly", "url")),
            lead=self._name(lead, Place("nightly", "lead")),
            packages=self._names(table, Place("nightly", "packages")) if "packages" in table else (),
            frozen=self._names(table, Place("nightly", "frozen")) if "frozen" in table else (),
            date=date,
            reason=self._doc.text(table, Place("nightly", "reason")),
        )
        seen = {package.name for package in packages}
        for key, group in (("lead", (nightly.lead,)), ("packages", nightly.packages), ("frozen", nightly.frozen)):
            for name in group:
                if name in seen:
                    raise self._doc.wrong(Place("nightly", key), f"{name} is named twice")
                seen.add(name)
        return nightly

    def _index(self, table: Mapping[str, Any], number: int, packages: tuple[Package, ...]) -> Index:
        self._doc.known(table, {"url", "packages", "reason"}, "index", number)
        place = Place("index", "url", number)
        url = self._url(self._doc.text(table, place), {"https", "http", "file"}, place)
        wanted = self._names(table, Place("index", "packages", number))
        for name in wanted:
            if name not in {package.name for package in packages}:
                raise self._doc.wrong(Place("index", "packages", number), f"{name} is not in [packages]")
        return Index(url=url, packages=wanted, reason=self._doc.text(table, Place("index", "reason", number)))

    def _last(self, table: Mapping[str, Any], number: int) -> Last:
        self._doc.known(table, {"packages", "reason"}, "last", number)
        reason = self._doc.text(table, Place("last", "reason", number))
        return Last(packages=self._names(table, Place("last", "packages", number)), reason=reason)

    def _prove(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        table = self._doc.table("prove")
        self._doc.known(table, {"imports", "needs-driver"}, "prove")
        seen: list[str] = []
        found: list[tuple[str, ...]] = []
        for key in ("imports", "needs-driver"):
            place = Place("prove", key)
            modules = self._doc.texts(table, place) if key in table else ()
            for module in modules:
                if not _MODULE.fullmatch(module):
                    raise self._doc.wrong(place, f"{module!r} is no module name")
                if module in seen:
                    raise self._doc.wrong(place, f"{module} is named twice")
                seen.append(module)
            found.append(modules)
        return found[0], found[1]

    def _inline(self, value: object, known: set[str], place: Place) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self._doc.wrong(place, f"{place.key} must be a table with a reason, as in {{…, reason = …}}")
        self._doc.known_inline(value, known, place)
        return value

    def _entries(self, table: str) -> Iterator[tuple[str, object, Place]]:
        """Canonical name, value and place of each package in a table; two spellings of one name are refused."""
        seen: set[str] = set()
        for key, value in self._doc.table(table).items():
            name = self._name(key, Place(table, key))
            if name in seen:
                raise self._doc.wrong(Place(table, key), f"{key} is named twice")
            seen.add(name)
            yield name, value, Place(table, key)

    def _name(self, text: str, place: Place) -> str:
        if not _NAME.fullmatch(text):
            raise self._doc.wrong(place, f"{text!r} is no package name")
        return canonicalize_name(text)

    def _names(self, table: Mapping[str, Any], place: Place) -> tuple[str, ...]:
        return tuple(self._name(name, place) for name in self._doc.texts(table, place))

    def _specifier(self, text: str, place: Place) -> str:
        """``2.13.0+cpu`` and ``13.0.*`` ask for just that, ``>=13.2`` for a range, ``*`` for any."""
        if text.strip() == "*":
            return ""
        try:
            Version(text)
        except InvalidVersion:
            exact = re.fullmatch(r"\s*[\w.!+]+\.\*\s*", text) is not None
        else:
            exact = True
        try:
            return str(SpecifierSet(f"=={text.strip()}" if exact else text))
        except InvalidSpecifier as error:
            message = f'{place.key}: {text!r} is neither a version as in "2.13.0+cpu" nor a range as in ">=13.2"'
            raise self._doc.wrong(place, message) from error

    def _url(self, text: str, schemes: set[str], place: Place) -> str:
        try:
            parts = urlsplit(text)
            user = parts.username if parts.scheme != "ssh" else None
        except ValueError:
            parts, user = urlsplit(""), None
        if parts.scheme not in schemes or user is not None or parts.password is not None or re.search(r"\s", text):
            kinds = ", ".join(sorted(schemes))
            message = f"{text if user is None and '@' not in text else 'the URL'} is no URL of the kinds {kinds}"
            raise self._doc.wrong(place, f"{message} without a user name (credentials belong in ~/.netrc)")
        return text

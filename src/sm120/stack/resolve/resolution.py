"""Stack → lock: which file of which package, by URL and SHA-256.

The machine's own pip configuration is asked first and for everything. What it lacks comes from the stack's own index
for that package; nightly builds from theirs. Then every wheel whose hash no index states is fetched once, through the
store, and uv is asked again for the same versions with all hashes known.
"""

import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from sm120 import errors, redact
from sm120.stack.fetch.store import Store
from sm120.stack.fetch.transport import Transport
from sm120.stack.lock import Lock, LockedFile
from sm120.stack.resolve import constraints, nightly
from sm120.stack.resolve.index import Offer, best, linked, offers
from sm120.stack.resolve.market import Market
from sm120.stack.resolve.nightly import NightlySet
from sm120.stack.resolve.overlay import Overlay
from sm120.stack.resolve.pipconfig import bare, read_pip_config
from sm120.stack.resolve.target import Target, target_of
from sm120.stack.resolve.uv import Asked, Resolved, Uv
from sm120.stack.resolve.uverrors import NoSuchVersion, Unsatisfiable
from sm120.stack.resolve.wheels import Builder
from sm120.stack.spec import Index, Nightly, Stack, request
from sm120.state import State

if TYPE_CHECKING:
    from sm120.console import Console
    from sm120.runs import Run

_TRIES = 5  # nightly sets that are tried before giving up; each costs uv some seconds
_NEVER = "sys_platform == 'never'"  # the marker that drops a package


def resolve(stack: Stack, state: State, console: "Console", run: "Run", *, python: Path) -> Lock:
    """The lock of a stack for an interpreter. Everything that no index states a hash for is in the store afterwards.

    Raises PreflightError (no network, no such version, contradicting requirements, a nightly that has gone, no space),
    BuildError (a package from source), UsageError (the stack names what it does not need).
    """
    config = read_pip_config()
    transport = Transport(config)
    target = target_of(python)
    with tempfile.TemporaryDirectory(prefix="sm120-resolve-") as name:
        folder = Path(name)
        overlay = Overlay(folder / "overlay")
        work = _Resolution(
            stack=stack,
            console=console,
            transport=transport,
            store=Store(state.wheels),
            target=target,
            market=Market(config, transport.session(), target),
            overlay=overlay,
            builder=Builder(python=python, folder=folder / "built", run=run, verbose=console.verbose),
            uv=Uv(
                config=config,
                python=python,
                overlay=overlay.url,
                folder=folder,
                cache=state.root / "uv",
                run=run,
                verbose=console.verbose,
            ),
        )
        found = work.files()
    return Lock(
        stack=stack.name,
        request=request(stack),
        python=target.short,
        platform=target.platform,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        sources=tuple(sorted(work.sources)),
        files=tuple(sorted(found, key=lambda file: file.name)),
    )


@dataclass(kw_only=True)
class _Resolution:
    stack: Stack
    console: "Console"
    transport: Transport
    store: Store
    target: Target
    market: Market
    overlay: Overlay
    builder: Builder
    uv: Uv
    sources: set[str] = field(default_factory=set)
    _built: dict[str, str] = field(default_factory=dict)  # name → exact version of a wheel from git
    _settled: set[str] = field(default_factory=set)  # packages that were taken from the stack's own index

    def files(self) -> list[LockedFile]:
        sets = self._sets(self.stack.nightly) if self.stack.nightly else []  # first: it fails soonest
        for package in self.stack.packages:
            if package.git is not None:
                self.console.info(f"    building {redact.redact(package.requirement)}")
                self._built[package.name] = self._take_in(package.name, self.builder.from_git(package))
                self.sources.add(f"git {redact.redact(package.git.url)}")
        if self.stack.nightly:
            asked, resolved = self._newest_that_fits(sets)
        else:
            asked = self._asked(())
            resolved = self._resolve(asked)
        self.sources |= {redact.redact(found.source) for found in resolved if found.source != self.overlay.url}
        self.console.info(f"    {len(resolved)} packages fit together")
        for found in resolved:
            self._make_hash_known(found)
        pins = [f"{found.name}=={found.version}" for found in resolved]
        packages = self.uv.lock(
            Asked(
                requirements=asked.requirements,
                overrides=asked.overrides,
                constraints=[*asked.constraints, *pins],
            )
        )
        locked = [self._locked(package) for package in packages]
        self._check_last({file.name for file in locked})
        return locked

    def _newest_that_fits(self, sets: Sequence[NightlySet]) -> tuple[Asked, list[Resolved]]:
        """What was asked in the end, and the versions that fit together."""
        failure: Unsatisfiable | None = None
        for found in sets[:_TRIES]:
            self.console.info(f"    nightlies of {found.date}: {found.words}")
            asked = self._asked(found.files)
            try:
                return asked, self._resolve(asked)
            except constraints.Forbidden:
                raise
            except Unsatisfiable as error:
                self.console.info(f"    they do not fit: {error.message}")
                failure = failure or error
        tried = (
            f"none of the newest {min(_TRIES, len(sets))} sets of nightlies fits"
            if len(sets) > 1
            else "they do not fit"
        )
        raise errors.PreflightError(
            f"the stack {self.stack.name} and its nightlies: {tried}; {sets[0].date}:"
            f" {failure.message if failure else 'not tried'}",
            where=failure.where if failure else None,
            remedy="say another date = … in a copy of the stack file, or take a release:"
            " scripts/inv setup --stack stable",
        ) from failure

    def _sets(self, wanted: Nightly) -> list[NightlySet]:
        """Complete sets, newest first, of the pinned day only when there is one; what they need is in the overlay."""
        local = f"cu{self.stack.cuda.replace('.', '')}" if self.stack.cuda else None
        listings = {name: self.market.nightlies(name) for name in wanted.names}
        sets = nightly.complete_sets(wanted, listings, self.target, local)
        if not self.market.config.no_index and not any(wanted.date in {None, found.date} for found in sets):
            listings = self._listings(wanted)
            sets = nightly.complete_sets(wanted, listings, self.target, local)
            fitting = [o for found in listings.values() for o in found if o.fits(self.target.tags, self.target.python)]
            self.overlay.add(fitting)
            self.sources.add(redact.redact(wanted.url))
        chosen = [found for found in sets if wanted.date in {None, found.date}]
        if not chosen:
            reason = nightly.why_not(wanted, listings, self.target, local)
            raise nightly.gone(self.stack, wanted, reason, sets)
        return chosen

    def _listings(self, wanted: Nightly) -> dict[str, tuple[Offer, ...]]:
        """What the nightlies' own index has of each of them."""
        session = self.transport.session()
        try:
            return {name: offers(wanted.url, name, session) for name in wanted.names}
        except errors.PreflightError as error:
            raise errors.PreflightError(
                f"the nightlies of the stack {self.stack.name} cannot be looked up: {error.message}",
                where=error.where,
                remedy=f"{error.remedy}; without it: from wheels that were mirrored, scripts/inv setup --offline DIR,"
                " or a release, scripts/inv setup --stack stable",
            ) from error

    def _asked(self, dated: Sequence[Offer]) -> Asked:
        lines = {package.name: package.requirement for package in self.stack.packages}
        for name, version in self._built.items():
            package = self.stack.package(name)
            extras = f"[{','.join(package.extras)}]" if package and package.extras else ""
            lines[name] = f"{name}{extras}=={version}"
        lines |= {offer.name: f"{offer.name}=={offer.version}" for offer in dated}
        overrides = []
        for override in self.stack.overrides:
            if override.specifier is None:
                overrides.append(f"{override.name} ; {_NEVER}")
            elif override.specifier:
                overrides.append(f"{override.name}{override.specifier}")
            elif override.name in lines:  # not a nightly without a day: there the lead's requirement decides
                overrides.append(lines[override.name])
        limits = [f"{limit.name}{limit.specifier}" for limit in self.stack.constraints]
        return Asked(requirements=list(lines.values()), overrides=overrides, constraints=limits)

    def _resolve(self, asked: Asked) -> list[Resolved]:
        while True:
            try:
                return self.uv.resolve(asked)
            except NoSuchVersion as error:
                index = next((index for index in self.stack.indexes if error.package in index.packages), None)
                if index is None or error.package in self._settled or self.market.config.no_index:
                    raise self.market.with_known_versions(error, self.overlay.offers(error.package)) from error
                self._settled.add(error.package)
                self._take_from(index, error)
            except Unsatisfiable as error:
                raise constraints.blame(error, self.market.config.constraints) from error

    def _take_from(self, index: Index, error: NoSuchVersion) -> None:
        """Puts what the stack's own index has of a package into the overlay."""
        name = error.package
        self.console.info(f"    {error.message}; asking {index.url}: {index.reason}")
        package = self.stack.package(name)
        wanted = SpecifierSet(package.specifier if package else "")
        problem = f"it has no {name}{wanted} for Python {self.target.short} on {self.target.platform}"
        fitting: list[Offer] = []
        try:
            for offer in offers(index.url, name, self.transport.session()):
                is_wanted = wanted.contains(offer.version, prereleases=True)
                if is_wanted and not offer.yanked and offer.fits(self.target.tags, self.target.python):
                    fitting.append(offer)
        except errors.PreflightError as failure:
            problem = failure.message
        if not fitting:
            raise errors.PreflightError(
                f"{name}{wanted} is not to be had: the machine's own pip configuration does not have it, and from"
                f" {index.url}: {problem}",
                where=index.url,
                remedy=f"make {index.url} reachable, or put the wheel in a folder and type pip config set"
                " global.find-links /folder; a wheel fits one Python version, and SM120_PYTHON chooses that",
            ) from error
        self.overlay.add(fitting)
        self.sources.add(f"{index.url} for {name}")

    def _make_hash_known(self, found: Resolved) -> None:
        """Fetches the wheel when no index states its hash, and builds it when there is only source in a folder."""
        is_ours = found.source == self.overlay.url
        listed = self.overlay.offers(found.name) if is_ours else self.market.unhashed(found)
        if listed is None:
            return
        wheel = best((o for o in listed if o.version == Version(found.version)), self.target.tags, self.target.python)
        if wheel is None:
            self._take_in(found.name, self.builder.from_source(found.name, found.version))
        elif wheel.sha256 is None:
            digest, size = self.store.fetch_unhashed(wheel.url, wheel.filename, self.transport, self.console)
            self.overlay.fetched(wheel, self.store.root / digest / wheel.filename, digest, size)

    def _take_in(self, name: str, wheel: Path) -> str:
        """Takes a wheel that was built here into store and overlay; its version."""
        digest, size = self.store.add(wheel)
        path = self.store.root / digest / wheel.name
        (offer,) = linked(str(path.parent), name, self.transport.session())
        self.overlay.fetched(offer, path, digest, size)
        return str(offer.version)

    def _locked(self, package: dict[str, Any]) -> LockedFile:
        name, version = package["name"], package["version"]
        wheels = {_filename(wheel): wheel for wheel in package.get("wheels", ())}
        if not wheels:
            self.console.info(f"    building {name} {version}: no index has a wheel of it")
            self._take_in(name, self.builder.from_source(name, version))
            (built,) = (o for o in self.overlay.offers(name) if o.version == Version(version) and o.sha256)
            return self._file(built)
        made = [Offer.of(name, filename, wheel["url"]) for filename, wheel in wheels.items()]
        offer = best((offer for offer in made if offer), self.target.tags, self.target.python)
        if offer is None:
            raise errors.PreflightError(
                f"{name} {version} has no wheel for Python {self.target.short} on {self.target.platform}",
                remedy="use another Python (SM120_PYTHON), or change the pin in a copy of the stack file",
            )
        wheel = wheels[offer.filename]
        return self._file(offer, sha256=wheel["hashes"]["sha256"], size=wheel.get("size"))

    def _file(self, offer: Offer, *, sha256: str | None = None, size: int | None = None) -> LockedFile:
        path = Path(unquote(urlsplit(offer.url).path))
        if size is None and urlsplit(offer.url).scheme == "file" and path.is_file():
            size = path.stat().st_size
        return LockedFile(
            name=offer.name,
            version=str(offer.version),
            filename=offer.filename,
            url=bare(self.overlay.origin(offer.filename) or offer.url),
            sha256=sha256 or offer.sha256 or "",
            size=size,
        )

    def _check_last(self, names: Iterable[str]) -> None:
        for last in self.stack.last:
            for name in last.packages:
                if name not in names:
                    raise errors.UsageError(
                        f"the stack {self.stack.name} installs {name} last, but nothing in it needs {name}",
                        where=str(self.stack.path),
                        remedy="take it out of [[last]], or name it in [packages]",
                    )


def _filename(wheel: dict[str, Any]) -> str:
    return str(wheel.get("name") or unquote(urlsplit(wheel["url"]).path).rpartition("/")[2])

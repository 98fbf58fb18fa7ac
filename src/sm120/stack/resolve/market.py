"""What the machine's own pip configuration offers of a package, listed by us where uv does not say it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version

from sm120.stack.resolve.index import Offer, default_index, linked, offers
from sm120.stack.resolve.pipconfig import PipConfig, bare
from sm120.stack.resolve.target import Target
from sm120.stack.resolve.uverrors import NoSuchVersion

if TYPE_CHECKING:
    import requests

    from sm120.stack.resolve.uv import Resolved

_SHOWN = 5  # versions that are named beside one that is missing


@dataclass
class Market:
    config: PipConfig
    session: "requests.Session"
    target: Target
    _states_hashes: set[str] = field(default_factory=set)  # indexes that do

    def nightlies(self, package: str) -> tuple[Offer, ...]:
        """Nightly builds of a package; the default index has none, and is not asked."""
        urls = [url for url in self.config.index_urls if url is not None]
        found = [offer for url in urls for offer in offers(url, package, self.session)]
        found += [offer for place in self.config.find_links for offer in linked(place, package, self.session)]
        return tuple(found)

    def unhashed(self, found: "Resolved") -> tuple[Offer, ...] | None:
        """What the source of a package lists of it, when it may state no hashes; None when it states them.

        An index states hashes for all of its files or for none, so it is asked until one file has shown it.
        """
        if (place := self._place(found.source)) is not None:
            return linked(place, found.name, self.session)
        if found.source in self._states_hashes:
            return None
        listed = offers(found.source, found.name, self.session)
        if any(offer.sha256 for offer in listed) or not listed:
            self._states_hashes.add(found.source)
            return None
        return listed

    def _place(self, source: str) -> str | None:
        """The find-links place that uv names as a source."""
        for place in self.config.find_links:
            url = Path(place).as_uri() if place.startswith("/") else bare(place)
            if url.rstrip("/") == source:
                return place
        return None

    def with_known_versions(self, error: NoSuchVersion, others: Sequence[Offer]) -> NoSuchVersion:
        """The same error, saying also which versions there are. An index that refuses access is the better error."""
        listed = [*others]
        for url in self.config.index_urls:
            listed += offers(url or default_index(), error.package, self.session)
        for place in self.config.find_links:
            listed += linked(place, error.package, self.session)
        return NoSuchVersion(
            f"{error.message}; {_known(error.wanted, listed, self.target)}",
            wanted=error.wanted,
            where=error.where or "",
            remedy=error.remedy or "",
            text=error.text,
        )


def _known(wanted: str, listed: Sequence[Offer], target: Target) -> str:
    """A clause about what is there instead."""
    if not listed:
        return "no version of it is to be had at all"
    try:
        specifier = SpecifierSet(re.sub(r"^[A-Za-z0-9._-]+(?:\[[^\]]*\])?", "", wanted))
    except InvalidSpecifier:
        specifier = SpecifierSet()
    fitting = sorted({offer.version for offer in listed if offer.fits(target.tags, target.python)})
    others = {o for o in listed if o.version not in fitting and specifier.contains(o.version, prereleases=True)}
    clauses = []
    if others:
        interpreters = sorted({tag.interpreter for offer in others for tag in offer.tags})
        platforms = sorted({tag.platform for offer in others for tag in offer.tags})
        clauses.append(f"it is there for {', '.join(interpreters[:_SHOWN])} on {', '.join(platforms[:_SHOWN])} only")
    if fitting:
        clauses.append(f"there are {', '.join(str(v) for v in nearest(wanted, fitting))}")
    return ", and ".join(clauses) or "none of its versions is for this Python"


def nearest(wanted: str, versions: Sequence[Version]) -> list[Version]:
    """Up to five of the sorted versions: those around an exact version that is wanted, or else the newest."""
    exact = re.search(r"==([^,*\s]+)$", wanted)
    if exact is None:
        return list(versions[-_SHOWN:])
    place = sum(version < Version(exact[1]) for version in versions)
    start = max(0, min(place - _SHOWN // 2, len(versions) - _SHOWN))
    return list(versions[start : start + _SHOWN])

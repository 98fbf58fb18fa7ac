"""Nightly builds: which days have a whole set, and what to say when the day that is asked for has gone.

Pure rules over listings. An index of nightlies keeps about the newest sixty of a package, and on some days one of the
packages was not built.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from packaging.version import Version

from sm120 import errors
from sm120.stack.resolve.index import Offer, best
from sm120.stack.resolve.target import Target
from sm120.stack.spec import Nightly, Stack

_SHOWN = 2  # sets named on each side of a day that has gone


@dataclass(frozen=True, kw_only=True)
class NightlySet:
    date: str  # "20260331"
    files: tuple[Offer, ...]  # lead first; packages without a day (triton) are not among them

    @property
    def words(self) -> str:
        return ", ".join(f"{offer.name} {offer.version}" for offer in self.files)


def day(version: Version) -> str | None:
    """``20260331`` of ``2.12.0.dev20260331+cu130``."""
    return str(version.dev) if version.dev is not None and re.fullmatch(r"20\d{6}", str(version.dev)) else None


def complete_sets(
    nightly: Nightly, listings: Mapping[str, Sequence[Offer]], target: Target, local: str | None
) -> list[NightlySet]:
    """Every day of which lead, packages and frozen ones can be had for this Python, newest first.

    ``local`` is the local version that all must carry (``cu130``); None takes any. Yanked files do not count.
    """
    by_day = {name: _by_day(listings.get(name, ()), target, local) for name in nightly.names}
    found = []
    for date in sorted(by_day[nightly.lead], reverse=True):
        files = [by_day[name].get(date) for name in (nightly.lead, *nightly.packages)]
        files += [_frozen(by_day[name], date) for name in nightly.frozen if _is_dated(listings.get(name, ()))]
        whole = [offer for offer in files if offer is not None]
        if len(whole) == len(files):
            found.append(NightlySet(date=date, files=tuple(whole)))
    return found


def _by_day(listing: Sequence[Offer], target: Target, local: str | None) -> dict[str, Offer]:
    days: dict[str, list[Offer]] = {}
    for offer in listing:
        date = day(offer.version)
        if date is not None and not offer.yanked and (local is None or offer.version.local == local):
            days.setdefault(date, []).append(offer)
    chosen = {date: best(group, target.tags, target.python) for date, group in days.items()}
    return {date: offer for date, offer in chosen.items() if offer is not None}


def _is_dated(listing: Sequence[Offer]) -> bool:
    """Whether a package's builds carry days; triton's carry a commit, and the lead's requirement names it."""
    return any(day(offer.version) for offer in listing)


def _frozen(days: Mapping[str, Offer], date: str) -> Offer | None:
    return days[max(fitting)] if (fitting := [d for d in days if d <= date]) else None


def why_not(nightly: Nightly, listings: Mapping[str, Sequence[Offer]], target: Target, local: str | None) -> str:
    """Why the day that is pinned, or else the lead's newest day, has no whole set, in words."""
    days = sorted({d for offer in listings.get(nightly.lead, ()) if (d := day(offer.version))})
    if not days:
        return f"there is no nightly of {nightly.lead} on {nightly.url}"
    date = nightly.date or days[-1]
    if date not in days:
        what = "has left the index" if date < days[0] else "is not on the index"
        return f"the {nightly.lead} of {date} {what}, which shows {days[0]} to {days[-1]}"
    missing = [
        _missing(name, date, listings.get(name, ()), target, local) for name in (nightly.lead, *nightly.packages)
    ]
    for name in nightly.frozen:
        listing = listings.get(name, ())
        if _is_dated(listing) and _frozen(_by_day(listing, target, local), date) is None:
            missing.append(f"there is no {name} of {date} or before for Python {target.short}")
    return "; ".join(problem for problem in missing if problem)


def _missing(name: str, date: str, listing: Sequence[Offer], target: Target, local: str | None) -> str:
    """Why a package of a day does not count; empty when it does."""
    group = [offer for offer in listing if day(offer.version) == date]
    right = [offer for offer in group if local is None or offer.version.local == local]
    kept = [offer for offer in right if not offer.yanked]
    if not group:
        return f"there is no {name} of {date}"
    if not right:
        return f"there is no +{local} build of the {name} of {date}"
    if not kept:
        return f"the {name} of {date} was withdrawn"
    if best(kept, target.tags, target.python) is None:
        pythons = sorted({tag.interpreter for offer in kept for tag in offer.tags})
        return f"the {name} of {date} is there for {', '.join(pythons)}, but not for Python {target.short}"
    return ""


def gone(stack: Stack, nightly: Nightly, reason: str, sets: Sequence[NightlySet]) -> errors.PreflightError:
    """The error for a day without a whole set: the nearest days that have one, and the command to take one."""
    asked = f"of {nightly.date}" if nightly.date else "of the newest day"
    message = f"the stack {stack.name} asks for the nightlies {asked}, but {reason}"
    if not sets or nightly.date is None:
        return errors.PreflightError(
            f"{message}; no day has a complete set of {', '.join(nightly.names)} for Python on this machine",
            where=nightly.url,
            remedy="another Python may have one (SM120_PYTHON); or take a release: scripts/inv setup --stack stable",
        )
    before = [found for found in sets if found.date < nightly.date][:_SHOWN]
    after = [found for found in sets if found.date > nightly.date][-_SHOWN:]
    shown = "; ".join(f"{found.date} ({found.words})" for found in sorted([*after, *before], key=lambda s: s.date))
    take = (after or before)[-1 if after else 0].date
    copy = f"{stack.name}-{take}.toml"
    change = f"sed 's/^date = .*/date = \"{take}\"/' {shlex.quote(str(stack.path))} > {shlex.quote(copy)}"
    return errors.PreflightError(
        f"{message}; the nearest days that have a complete set: {shown}",
        where=nightly.url,
        remedy=f"take {take}: {change} && scripts/inv setup --stack {shlex.quote(copy)}; or the newest:"
        " scripts/inv setup --stack nightly; wheels that were mirrored in time serve for ever:"
        " scripts/inv setup --offline DIR",
    )

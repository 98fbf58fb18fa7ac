"""Which of FlashInfer's modules are built ahead of time, and what for: ``modules.toml``."""

import functools
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from sm120 import errors

Argument = str | int | bool


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What some versions are known to do wrong."""

    versions: SpecifierSet
    what: str
    source: str


@dataclass(frozen=True, kw_only=True)
class Module:
    name: str
    why: str  # which backend or operation needs it
    ask: tuple[str, ...]  # module:function, in which a running server gets it; the first that is there counts
    arguments: tuple[Argument, ...] = ()
    when: str | None = None  # module:value, by which this installation of FlashInfer says whether it uses the module
    fp4: bool = False  # must hold SM120's block-scaled FP4 instructions
    optional: bool = False  # built only when it is named
    faults: tuple[Fault, ...] = ()

    def known_faults(self, version: Version) -> tuple[Fault, ...]:
        return tuple(fault for fault in self.faults if fault.versions.contains(version.base_version, prereleases=True))


@functools.cache
def modules() -> tuple[Module, ...]:
    data = tomllib.loads(Path(__file__).with_name("modules.toml").read_text("utf-8"))
    return tuple(
        Module(
            name=row["name"],
            why=row["why"],
            ask=tuple(row["ask"]),
            arguments=tuple(row.get("arguments", ())),
            when=row.get("when"),
            fp4=row.get("fp4", False),
            optional=row.get("optional", False),
            faults=tuple(
                Fault(versions=SpecifierSet(fault["versions"]), what=fault["what"], source=fault["source"])
                for fault in row.get("fault", ())
            ),
        )
        for row in data["module"]
    )


def chosen(only: Sequence[str], known: Sequence[Module]) -> tuple[Module, ...]:
    """Those that are named, or else all that are not optional. UsageError for a name that is none."""
    names = [module.name for module in known]
    for name in only:
        if name not in names:
            raise errors.UsageError(
                f"no FlashInfer module {name!r}; {errors.nearest(name, names)}", remedy="correct --modules"
            )
    return tuple(module for module in known if (module.name in only if only else not module.optional))

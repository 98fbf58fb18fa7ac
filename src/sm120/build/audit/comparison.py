"""Libraries against the stack that is to load them: torch's symbols, CUDA's libraries."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from sm120 import errors
from sm120.build.audit.model import LibraryFacts
from sm120.build.audit.reading import Read
from sm120.host.binaries import elf, loader
from sm120.host.binaries.libraries import library_files
from sm120.host.binaries.symbols import TORCH, torch_exports


@dataclass
class Comparison:
    """Reads the stack once. ``site``: its site-packages, None where there is no stack."""

    site: Path | None
    why_not: str | None = field(init=False, default=None)  # torch's symbols are not compared
    _exports: frozenset[bytes] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.site is None:
            self.why_not = "no environment is set up to compare with"
        elif not (self.site / "torch" / "lib" / "libtorch_cuda.so").exists():
            self.why_not = "the stack has no torch with CUDA"
        else:
            self._exports = torch_exports(self.site)
            if self._exports is None:
                self.why_not = "the stack's torch cannot be read"

    def compare(self, reads: Sequence[Read]) -> tuple[LibraryFacts, ...]:
        """The facts with what is undefined or found nowhere."""
        if self.site is None or self._exports is None:
            return tuple(one.facts for one in reads)
        offered = self._exports.union(*(one.header.exported for one in reads if one.header is not None))
        search = self._search(self.site, reads)
        return tuple(self._compared(one, offered, search) for one in reads)

    def _compared(self, one: Read, offered: frozenset[bytes], search: loader.Search) -> LibraryFacts:
        if one.header is None:
            return one.facts
        undefined = (name for name in one.header.undefined - offered if TORCH.match(name))
        return replace(
            one.facts,
            undefined_torch=tuple(sorted(name.decode("ascii", "backslashreplace") for name in undefined)),
            unresolved=search.missing_cuda(one.facts.path),
        )

    def _search(self, site: Path, reads: Sequence[Read]) -> loader.Search:
        headers: dict[str, elf.Elf] = {}
        for path in library_files(site):
            try:
                headers[path] = elf.read(site / path)
            except errors.BinaryError:
                continue
        own = {one.facts.path: one.header for one in reads if one.header is not None}
        return loader.Search(site, [*library_files(site), *own], {**headers, **own})

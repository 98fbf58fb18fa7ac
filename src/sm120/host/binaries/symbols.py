"""Torch symbols that a library asks for and the installed torch has not got: ABI, not architecture (pitfall A03)."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath

from sm120 import errors
from sm120.host.binaries import elf
from sm120.host.binaries.elf import Elf

# Functions and data of namespaces c10, at, torch and caffe2, their type information and thunks (Itanium C++ ABI, 5.1),
# and the C functions of torch's stable ABI. Nobody but torch is to provide these.
TORCH = re.compile(
    rb"_Z(?:T[VTIS]|GV|T[hv]n?\d{1,9}_(?:n?\d{1,9}_)?)?N[rVK]{0,3}[RO]?(?:3c10|2at|5torch|6caffe2)|(?:aoti_)?torch_"
)


def torch_exports(site: Path) -> frozenset[bytes] | None:
    """The symbols that the torch in site-packages offers. None: there is no torch, or not all of it can be read."""
    exports: set[bytes] = set()
    for path in sorted((site / "torch" / "lib").glob("lib*.so*")):
        try:
            exports |= elf.read(path, TORCH).exported
        except errors.BinaryError:
            return None
    return frozenset(exports) or None


class TorchSymbols:
    """What the torch of an environment exports, against what the environment's libraries ask for.

    ``libraries`` are the environment's, by path relative to site-packages; ``owners`` their distributions. Every symbol
    table is read once at most.
    """

    def __init__(self, site: Path, libraries: Mapping[str, Elf], owners: Mapping[str, str]) -> None:
        self._site = site
        self._libraries = libraries
        self._owners = owners
        self._read: dict[str, Elf] = {}
        self._exports = torch_exports(site)

    def undefined(self, path: str) -> tuple[str, ...]:
        """Torch symbols that neither torch nor anything loaded with the library provides; none where torch is unread.

        What the library needs, and what that needs, is loaded with it; what its own distribution holds may be. Raises
        BinaryError when the library's symbols cannot be read.
        """
        if self._exports is None:
            return ()
        left = self._symbols(path).undefined - self._exports
        for other in self._company(path) if left else ():
            try:
                left -= self._symbols(other).exported
            except errors.BinaryError:
                return ()  # it may hold them
        return tuple(sorted(name.decode("ascii", "backslashreplace") for name in left))

    def _symbols(self, path: str) -> Elf:
        if path not in self._read:
            self._read[path] = elf.read(self._site / path, TORCH)
        return self._read[path]

    def _company(self, path: str) -> Iterator[str]:
        owner = self._owners.get(path)
        wanted = set(self._libraries[path].needed)
        waiting = dict(self._libraries)
        del waiting[path]
        while found := [
            other
            for other in waiting
            if {PurePath(other).name, self._libraries[other].soname} & wanted
            or (owner is not None and self._owners.get(other) == owner)
        ]:
            for other in found:
                wanted |= set(waiting.pop(other).needed)
                yield other

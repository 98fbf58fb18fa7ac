"""A small package index in a folder, written by us and asked by uv before all others.

It holds what no configured index can give in a usable form: wheels built here, wheels from a stack's own index (uv sees
these packages of it and no others), and wheels that were fetched because nobody states their hash. uv hashes a wheel of
unknown hash by unpacking it into its cache; for a nightly that is 3 GB, for each resolution.
"""

import html
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import quote

from sm120 import files
from sm120.stack.resolve.index import Offer


@dataclass
class Overlay:
    folder: Path
    _offers: dict[str, dict[str, Offer]] = field(default_factory=dict)  # package → file name → offer
    _origins: dict[str, str] = field(default_factory=dict)  # file name → the URL that the lock is to name

    def __post_init__(self) -> None:
        files.make_folder(self.folder)

    @property
    def url(self) -> str:
        return self.folder.as_uri()

    def add(self, offers: Iterable[Offer]) -> None:
        for offer in offers:
            known = self._offers.setdefault(offer.name, {})
            known[offer.filename] = offer
            self._origins.setdefault(offer.filename, offer.url)
            files.write_text_atomic(self.folder / offer.name / "index.html", _page(known.values()))

    def fetched(self, offer: Offer, path: Path, sha256: str, size: int) -> None:
        """The wheel is at ``path`` now; the lock will name it by the URL that it came from."""
        self._origins.setdefault(offer.filename, offer.url)
        self.add([replace(offer, url=path.as_uri(), sha256=sha256, size=size)])

    def offers(self, name: str) -> tuple[Offer, ...]:
        return tuple(self._offers.get(name, {}).values())

    def origin(self, filename: str) -> str | None:
        return self._origins.get(filename)

    def size(self, name: str, filename: str) -> int | None:
        found = self._offers.get(name, {}).get(filename)
        return found.size if found else None


def _page(offers: Iterable[Offer]) -> str:
    links = "\n".join(_link(offer) for offer in offers)
    return f"<!DOCTYPE html>\n<html><body>\n{links}\n</body></html>\n"


def _link(offer: Offer) -> str:
    url = quote(offer.url, safe=":/?&=%@!$'()*,;~#+") + (f"#sha256={offer.sha256}" if offer.sha256 else "")
    python = f' data-requires-python="{html.escape(offer.requires_python)}"' if offer.requires_python else ""
    return f'<a href="{html.escape(url)}"{python}>{html.escape(offer.filename)}</a>'

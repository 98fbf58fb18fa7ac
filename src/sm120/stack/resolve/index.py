"""What a package index offers: PEP 503 and 691 listings over HTTP or from a folder, and folders of wheels."""

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote, urlsplit

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.tags import Tag
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

from sm120 import errors, redact
from sm120.stack.resolve.pipconfig import bare

if TYPE_CHECKING:
    import requests

LARGEST = 64 * 2**20  # bytes of one listing; the longest in use have some ten megabytes
SECONDS = 120.0  # for one listing
_BLOCK = 2**16


@dataclass(frozen=True, kw_only=True)
class Offer:
    """One wheel of a listing."""

    name: str  # canonical
    version: Version
    filename: str
    url: str  # without credentials
    tags: frozenset[Tag]
    sha256: str | None = None
    size: int | None = None  # bytes
    uploaded: datetime | None = None
    yanked: bool = False
    requires_python: str | None = None

    @classmethod
    def of(cls, name: str, filename: str, url: str, **known: Any) -> "Offer | None":
        """A file of a package; None for what is no wheel, of another package, or at no URL."""
        try:
            found, version, _, tags = parse_wheel_filename(filename)
            place = bare(url)
        except (InvalidWheelFilename, errors.PreflightError):
            return None
        return (
            cls(name=name, version=version, filename=filename, url=place, tags=tags, **known) if found == name else None
        )

    def fits(self, tags: Iterable[Tag], python: str) -> bool:
        """Whether the wheel is for this Python ("3.11.7") and this machine."""
        if self.tags.isdisjoint(tags):
            return False
        try:
            return SpecifierSet(self.requires_python or "").contains(python, prereleases=True)
        except InvalidSpecifier:  # old packages have some; pip passes over them too
            return True


def offers(index: str, package: str, session: "requests.Session") -> tuple[Offer, ...]:
    """The wheels of a package on an index; none when the index does not have the package.

    Raises PreflightError when the index cannot be read.
    """
    name = canonicalize_name(package)
    url = f"{bare(index).rstrip('/')}/{quote(name)}/"
    found = _read(url, session)
    return _listed(name, url, *found) if found else ()


def linked(place: str, package: str, session: "requests.Session") -> tuple[Offer, ...]:
    """The wheels of a package at a place of pip's find-links: a folder, or a page of links."""
    name = canonicalize_name(package)
    folder = Path(unquote(urlsplit(place).path)) if urlsplit(place).scheme in {"", "file"} else None
    if folder is None:
        found = _fetch(bare(place), session)
        return _listed(name, bare(place), *found) if found else ()
    made = (
        Offer.of(name, path.name, path.absolute().as_uri(), size=path.stat().st_size)
        for path in sorted(folder.glob("*.whl"))
    )
    return tuple(offer for offer in made if offer is not None)


def default_index() -> str:
    """The index that pip and uv ask when none is configured."""
    from pypi_simple import PYPI_SIMPLE_ENDPOINT

    return str(PYPI_SIMPLE_ENDPOINT)


def _listed(name: str, url: str, data: bytes, content_type: str) -> tuple[Offer, ...]:
    from pypi_simple import ProjectPage, UnsupportedContentTypeError, UnsupportedRepoVersionError

    try:
        if "json" in content_type:
            page = ProjectPage.from_json_data(json.loads(data), base_url=url)
        else:
            page = ProjectPage.from_html(name, data, base_url=url)
    except (ValueError, KeyError, TypeError, RecursionError, UnsupportedContentTypeError) as error:
        raise _error(url, f"what it lists for {name} cannot be understood: {error}") from error
    except UnsupportedRepoVersionError as error:
        raise _error(url, f"it speaks a later version of the index protocol: {error}") from error
    if not page.packages and b"<a " not in data[:_BLOCK].lower() and "json" not in content_type and data.strip():
        raise _error(url, f"it answers for {name} with a page that lists no files")
    made = (
        Offer.of(
            name,
            file.filename,
            file.url,
            sha256=file.digests.get("sha256"),
            size=file.size,
            uploaded=file.upload_time,
            yanked=file.is_yanked,
            requires_python=file.requires_python,
        )
        for file in page.packages
    )
    return tuple(offer for offer in made if offer is not None)


def best(found: Iterable[Offer], tags: Sequence[Tag], python: str) -> Offer | None:
    """The wheel that an installer would take for this Python: newest version, then the most specific tag."""
    rank = {tag: -number for number, tag in enumerate(tags)}
    fitting = [offer for offer in found if offer.fits(rank, python)]
    return max(fitting, key=lambda o: (o.version, max(rank[t] for t in o.tags if t in rank)), default=None)


def _read(url: str, session: "requests.Session") -> tuple[bytes, str] | None:
    """Bytes and content type of a listing; None when there is none."""
    if urlsplit(url).scheme == "file":
        path = Path(unquote(urlsplit(url).path)) / "index.html"
        try:
            if path.stat().st_size > LARGEST:
                raise _too_large(url)
            return path.read_bytes(), "text/html"
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _error(url, f"cannot read it: {error.strerror or error}") from error
    return _fetch(url, session)


def _fetch(url: str, session: "requests.Session") -> tuple[bytes, str] | None:
    import requests
    from pypi_simple import ACCEPT_ANY

    deadline = time.monotonic() + SECONDS
    try:
        with session.get(url, headers={"Accept": ACCEPT_ANY}, stream=True) as response:
            if response.status_code in {404, 410}:
                return None
            if response.status_code in {401, 403}:
                host = urlsplit(url).hostname
                remedy = f"put its user name and password into ~/.netrc: machine {host} login … password …"
                raise _error(url, f"it refuses access ({response.status_code})", remedy)
            if response.status_code != 200:
                raise _error(url, f"it answers {response.status_code} {response.reason}")
            data = bytearray()
            for block in response.iter_content(_BLOCK):
                data += block
                if len(data) > LARGEST:
                    raise _too_large(url)
                if time.monotonic() > deadline:
                    raise _error(url, f"its listing did not come within {SECONDS:.0f} s")
            return bytes(data), response.headers.get("Content-Type", "").lower()
    except requests.exceptions.SSLError as error:
        raise _error(
            url,
            f"its certificate is not trusted: {_innermost(error)}",
            remedy="name your company's certificates: pip config set global.cert /path/to/bundle.pem",
        ) from error
    except requests.exceptions.RequestException as error:
        raise _error(
            url,
            f"it cannot be reached: {_innermost(error)}",
            remedy="connect to the network (through a proxy: pip config set global.proxy URL), or name an index that"
            " can be reached: pip config set global.index-url URL, beside others global.extra-index-url",
        ) from error


def _innermost(error: BaseException) -> str:
    """The first cause, without the layers that each say it again."""
    seen: set[int] = set()
    current: BaseException = error
    while id(current) not in seen:
        seen.add(id(current))
        inner = getattr(current, "reason", None)
        following = inner if isinstance(inner, BaseException) else current.__cause__ or current.__context__
        if following is None:
            break
        current = following
    return redact.redact(str(current))[:300]


def _too_large(url: str) -> errors.PreflightError:
    return _error(url, f"its listing is larger than {LARGEST // 2**20} MiB")


def _error(url: str, problem: str, remedy: str | None = None) -> errors.PreflightError:
    place = redact.redact(url)
    return errors.PreflightError(
        f"the package index {place} cannot be used: {problem}",
        where=place,
        remedy=remedy or "look at that address; pip config list says who named it, or else the stack file",
    )

"""A package index on loopback (PEP 503, PEP 691) over a folder of small wheels that carry real names and versions.

What can be wrong with an index is a field that a test sets: no hashes, no ranges, credentials required, files that are
corrupt, cut off, gone, yanked, or that never come.
"""

import base64
import hashlib
import json
import threading
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal
from urllib.parse import quote, unquote

from packaging.utils import canonicalize_name, parse_wheel_filename

Fault = Literal["corrupt", "truncated", "gone", "stalled", "refused"]
JSON = "application/vnd.pypi.simple.v1+json"


def make_wheel(
    folder: Path,
    name: str,
    version: str,
    *,
    content: Mapping[str, str] | None = None,
    requires: Sequence[str] = (),
    tag: str = "py3-none-any",
    says: str | None = None,
    extras: Sequence[str] = (),
    padding: int = 0,
) -> Path:
    """A wheel whose metadata, when it lies, ``says`` another version; ``padding`` is in incompressible bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {says or version}\n"
    metadata += "".join(f"Requires-Dist: {requirement}\n" for requirement in requires)
    metadata += "".join(f"Provides-Extra: {extra}\n" for extra in extras)
    members: dict[str, bytes] = {
        path: text.encode()
        for path, text in {
            **({f"{module}/__init__.py": f"__version__ = {version!r}\n"} if content is None else content),
            f"{info}/METADATA": metadata,
            f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n",
        }.items()
    }
    if padding:
        members[f"{module}/padding.bin"] = hashlib.shake_128(f"{name} {version}".encode()).digest(padding)
    record = ""
    for path, data in members.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record += f"{path},sha256={digest},{len(data)}\n"
    wheel = folder / f"{module}-{version}-{tag}.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, data in members.items():
            archive.writestr(zipfile.ZipInfo(path, (2026, 3, 7, 0, 0, 0)), data)  # the same bytes each time
        archive.writestr(zipfile.ZipInfo(f"{info}/RECORD", (2026, 3, 7, 0, 0, 0)), f"{record}{info}/RECORD,,\n")
    return wheel


@dataclass(frozen=True)
class Request:
    method: str
    path: str  # decoded
    range: str | None
    authorization: str | None

    @property
    def file(self) -> str | None:
        """The wheel that was asked for."""
        return self.path.removeprefix("/files/") if self.path.startswith("/files/") else None


class LocalIndex:
    """Serves ``root/files``. Made with ``serving``."""

    def __init__(self, root: Path) -> None:
        self.files = root / "files"
        self.files.mkdir(parents=True, exist_ok=True)
        self.hashes = True  # whether the listing states SHA-256
        self.json = True  # whether PEP 691 is spoken, beside PEP 503
        self.ranges = True  # whether Range is honoured
        self.listings: dict[str, bytes] = {}  # canonical name → a listing to serve instead, of any bytes
        self.faults: dict[str, Fault] = {}  # file name → what is wrong with it
        self.yanked: dict[str, str] = {}  # file name → reason
        self.user: tuple[str, str] | None = None  # name and password that a request must carry
        self.requests: list[Request] = []
        self.stop = threading.Event()
        index = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                index.answer(self)

            def do_HEAD(self) -> None:
                index.answer(self)

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self._thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()

    @property
    def root(self) -> str:
        scheme = "https" if hasattr(self.server.socket, "context") else "http"
        return f"{scheme}://127.0.0.1:{self.server.server_address[1]}"

    @property
    def url(self) -> str:
        """As in pip's index-url."""
        return f"{self.root}/simple"

    def url_with(self, user: str, password: str) -> str:
        return self.url.replace("://", f"://{quote(user)}:{quote(password)}@")

    def file_url(self, wheel: Path) -> str:
        return f"{self.root}/files/{quote(wheel.name)}"

    def wheel(self, name: str, version: str, **options: object) -> Path:
        """``make_wheel`` into this index."""
        return make_wheel(self.files, name, version, **options)  # type: ignore[arg-type] # passed through

    def downloads(self, wheel: Path | str) -> list[Request]:
        """The whole downloads of a file: what was asked for with GET and without a Range."""
        name = wheel if isinstance(wheel, str) else wheel.name
        return [r for r in self.requests if r.file == name and r.method == "GET" and r.range is None]

    def asked_for(self, name: str) -> list[Request]:
        """Every request for the listing or a file of a package."""
        module = name.replace("-", "_")
        return [
            r
            for r in self.requests
            if r.path.rstrip("/") == f"/simple/{name}" or (r.file or "").split("-")[0] == module
        ]

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = unquote(request.path.partition("?")[0])
        authorization = request.headers.get("Authorization")
        self.requests.append(Request(request.command, path, request.headers.get("Range"), authorization))
        if self.user is not None:
            token = base64.b64encode(":".join(self.user).encode()).decode()
            if authorization != f"Basic {token}":
                self._send(request, 401, b"who are you?", {"WWW-Authenticate": 'Basic realm="index"'})
                return
        if path.startswith("/files/"):
            self._answer_file(request, path.removeprefix("/files/"))
        elif path.startswith("/simple/"):
            self._answer_listing(request, path.removeprefix("/simple/").strip("/"))
        else:
            self._send(request, 404, b"")

    def _answer_listing(self, request: BaseHTTPRequestHandler, name: str) -> None:
        if name in self.listings:
            self._send(request, 200, self.listings[name], {"Content-Type": "text/html"})
            return
        wheels = [wheel for wheel in sorted(self.files.glob("*.whl")) if parse_wheel_filename(wheel.name)[0] == name]
        sdists = [
            path for path in sorted(self.files.glob("*.tar.gz")) if canonicalize_name(path.name.split("-")[0]) == name
        ]
        if not [*wheels, *sdists]:
            self._send(request, 404, b"no such package")
        elif self.json and JSON in request.headers.get("Accept", ""):
            entries = [self._entry(path) for path in [*wheels, *sdists]]
            listing = {"meta": {"api-version": "1.1"}, "name": name, "versions": [], "files": entries}
            self._send(request, 200, json.dumps(listing).encode(), {"Content-Type": JSON})
        else:
            links = "\n".join(self._link(path) for path in [*wheels, *sdists])
            page = f"<!DOCTYPE html><html><body>\n{links}\n</body></html>"
            self._send(request, 200, page.encode(), {"Content-Type": "text/html"})

    def _entry(self, path: Path) -> dict[str, object]:
        return {
            "filename": path.name,
            "url": f"../../files/{quote(path.name)}",
            "hashes": {"sha256": self._sha256(path)} if self.hashes else {},
            "size": path.stat().st_size,
            "upload-time": "2026-03-07T08:00:00Z",
            "yanked": self.yanked.get(path.name, False),
        }

    def _link(self, path: Path) -> str:
        digest = f"#sha256={self._sha256(path)}" if self.hashes else ""
        yanked = f' data-yanked="{self.yanked[path.name]}"' if path.name in self.yanked else ""
        return f'<a href="../../files/{quote(path.name)}{digest}"{yanked}>{path.name}</a><br>'

    def _sha256(self, path: Path) -> str:
        return hashlib.sha256(path.read_bytes()).hexdigest()

    def _answer_file(self, request: BaseHTTPRequestHandler, name: str) -> None:
        path = self.files / name
        fault = self.faults.get(name)
        if "/" in name or not path.is_file() or fault == "gone":
            self._send(request, 404, b"no such file")
            return
        if fault == "refused":
            self._send(request, 403, b"not for you")
            return
        data = path.read_bytes()
        if fault == "corrupt":
            data = data[:-1] + bytes([data[-1] ^ 1])
        start, end = self._range(request, len(data))
        headers = {"Content-Type": "application/octet-stream", "ETag": f'"{self._sha256(path)[:16]}"'}
        if self.ranges:
            headers["Accept-Ranges"] = "bytes"
        if start is None:
            self._send(request, 200, data, headers, fault)
        elif start >= len(data):
            self._send(request, 416, b"", {**headers, "Content-Range": f"bytes */{len(data)}"})
        else:
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(data)}"
            self._send(request, 206, data[start:end], headers, fault)

    def _range(self, request: BaseHTTPRequestHandler, size: int) -> tuple[int | None, int]:
        """The half-open range of bytes that is asked for; no start: all of it."""
        text = request.headers.get("Range")
        if text is None or not self.ranges:
            return None, size
        first, _, last = text.removeprefix("bytes=").partition("-")
        if not first:
            return max(0, size - int(last)), size
        return int(first), min(size, int(last) + 1) if last else size

    def _send(
        self,
        request: BaseHTTPRequestHandler,
        status: int,
        data: bytes,
        headers: Mapping[str, str] | None = None,
        fault: Fault | None = None,
    ) -> None:
        request.send_response(status)
        for name, value in (headers or {}).items():
            request.send_header(name, value)
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        if request.command == "HEAD":
            return
        if fault in {"truncated", "stalled"}:
            request.wfile.write(data[: len(data) // 2])
            request.wfile.flush()
            if fault == "stalled":
                self.stop.wait(120)
            request.close_connection = True
            return
        request.wfile.write(data)

    def close(self) -> None:
        self.stop.set()
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()


@contextmanager
def serving(root: Path) -> Iterator[LocalIndex]:
    index = LocalIndex(root)
    try:
        yield index
    finally:
        index.close()


NIGHTLY_DATES = ("20260330", "20260331", "20260401", "20260403")


def fill_nightly(index: LocalIndex, *, dates: Sequence[str] = NIGHTLY_DATES, tag: str = "py3-none-any") -> None:
    """A nightly index as PyTorch's is: no hashes, a gap in the dates, a triton without a date, torchaudio frozen.

    torchvision is missing for the newest date, so the newest complete set is the one before it.
    """
    index.hashes = False
    for number, date in enumerate(dates):
        triton = f"3.7.0+git{number:08x}"
        index.wheel("triton", triton, tag=tag)
        requires = (f"triton=={triton}", "sympy>=1.13")
        index.wheel("torch", f"2.12.0.dev{date}+cu130", tag=tag, requires=requires, padding=50_000)
        if date != dates[-1] or len(dates) == 1:
            version = f"0.27.0.dev{date}+cu130"
            index.wheel("torchvision", version, tag=tag, requires=(f"torch==2.12.0.dev{date}",))
    index.wheel("torchaudio", f"2.11.0.dev{dates[0]}+cu130", tag=tag, requires=("torch",))

"""Files on loopback from a server that can be told to misbehave."""

import base64
import contextlib
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class FileServer:
    files: dict[str, bytes] = field(default_factory=dict)
    ranges: bool = True
    tags: bool = True
    lengths: bool = True
    drop_after: int | None = None  # bytes of a body before the connection ends
    drops: int = 10**9  # how often it does that
    stall_after: int | None = None  # bytes of a body before nothing more comes until ``go_on``
    statuses: list[int] = field(default_factory=list)  # answered first, in turn
    redirect: str | None = None  # the start of the URL that everything is found below
    user: tuple[str, str] | None = None
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)  # path, headers
    counted: int = 0  # bytes of bodies
    answering: int = 0  # requests
    quiet: threading.Condition = field(default_factory=threading.Condition)
    stalled: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)
    scheme: str = "http"
    port: int = 0

    def url(self, name: str = "") -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}/{name}"

    @property
    def sent(self) -> int:
        """Bytes of bodies, when every answer is at its end: who was answered may look here before the server counts."""
        with self.quiet:
            assert self.quiet.wait_for(lambda: not self.answering, 60)
            return self.counted

    def take(self, request: BaseHTTPRequestHandler) -> None:
        with self.quiet:
            self.answering += 1
        try:
            self.answer(request)
        finally:
            with self.quiet:
                self.answering -= 1
                self.quiet.notify_all()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.requests.append((request.path, headers))
        if self.redirect is not None:
            return self._head(request, 302, {"Location": self.redirect + request.path, "Content-Length": "0"})
        if self.user is not None:
            wanted = "Basic " + base64.b64encode(":".join(self.user).encode()).decode()
            if headers.get("authorization") != wanted:
                return self._head(request, 401, {"Content-Length": "0"})
        data = self.files.get(request.path.lstrip("/"))
        status = self.statuses.pop(0) if self.statuses else 200 if data is not None else 404
        if status != 200 or data is None:
            return self._head(request, status, {"Content-Length": "0"})
        tag = f'"{hash(data)}"'
        if self.tags and headers.get("if-none-match") == tag:
            return self._head(request, 304, {})
        start = 0
        if self.ranges and "range" in headers and headers.get("if-range", tag) == tag:
            start = int(headers["range"].removeprefix("bytes=").rstrip("-"))
            if start >= len(data):
                return self._head(request, 416, {"Content-Range": f"bytes */{len(data)}", "Content-Length": "0"})
        answer = {"Content-Length": str(len(data) - start)} if self.lengths else {}
        answer |= {"ETag": tag} if self.tags else {}
        if start:
            answer |= {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"}
        self._head(request, 206 if start else 200, answer)
        self._body(request, data[start:])
        return None

    def _head(self, request: BaseHTTPRequestHandler, status: int, headers: dict[str, str]) -> None:
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name, value)
        request.send_header("Connection", "close")
        request.end_headers()

    def _body(self, request: BaseHTTPRequestHandler, body: bytes) -> None:
        cut = len(body)
        if self.drop_after is not None and self.drops > 0 and self.drop_after < cut:
            self.drops -= 1
            cut = self.drop_after
        if self.stall_after is not None:
            cut = min(cut, self.stall_after)
        with contextlib.suppress(OSError):
            request.wfile.write(body[:cut])
            request.wfile.flush()
            with self.quiet:
                self.counted += cut
        if self.stall_after is not None and cut < len(body):
            self.stalled.set()
            self.go_on.wait(120)
            with contextlib.suppress(OSError):
                request.wfile.write(body[cut:])


@contextlib.contextmanager
def serving(tls: ssl.SSLContext | None = None) -> Iterator[FileServer]:
    made = FileServer(scheme="https" if tls else "http")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            made.take(self)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    made.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield made
    finally:
        made.go_on.set()
        server.shutdown()
        server.server_close()
        thread.join()

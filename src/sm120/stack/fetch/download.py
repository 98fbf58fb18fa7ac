"""Several files at once over HTTP: gone on with where they stopped, verified while they come, progress in bytes."""

import contextlib
import hashlib
import queue
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from sm120 import errors, files, redact
from sm120.stack.fetch.store import digest_of, file_path, locked_part, take, wrong_file

if TYPE_CHECKING:
    import requests

    from sm120.console import Console
    from sm120.stack.fetch.transport import Transport

THREADS = 6
_BLOCK = 2**18  # bytes between looks at whether to stop
_PROGRESS = 2**20  # bytes that a connection must bring, or else its end counts as one more failure in a row
_PATIENCE = 2.0  # seconds that threads are waited for when we stop early; after that they are left behind


@dataclass(frozen=True, kw_only=True)
class Job:
    url: str
    filename: str
    path: Path  # where the whole file goes
    sha256: str | None = None  # None: not known beforehand
    size: int | None = None
    known_tag: str | None = None  # validator of what we have: the server may answer that it has not changed


@dataclass(frozen=True, kw_only=True)
class Fetched:
    tag: str | None = None  # the server's validator: an entity tag, or else a date
    unchanged: bool = False  # the server says so, and sent nothing


class _Stopped(Exception):
    """Another thread failed, or the user interrupted."""


class _Restart(Exception):
    """The server does not go on where the partial file ends."""


def fetch_all(jobs: Sequence[Job], transport: "Transport | None", console: "Console", total: int) -> list[Fetched]:
    """Fetches all, ``total`` bytes as far as that is known. The first failure ends all; what has come is kept."""
    crew = _Crew(jobs, transport)
    fetched: dict[int, Fetched] = {}
    with console.progress(total, jobs[0].filename, in_bytes=True) as progress:
        try:
            crew.start()
            while len(fetched) < len(jobs):
                news = crew.news.get()
                if isinstance(news, BaseException):
                    raise news
                if isinstance(news, _Expect):
                    progress.expect(news.size)
                elif isinstance(news, _Came):
                    progress.advance(news.size, _short(news.filename))
                else:
                    number, result = news
                    fetched[number] = result
        finally:
            crew.stop()
    return [fetched[number] for number in range(len(jobs))]


@dataclass(frozen=True)
class _Expect:
    size: int


@dataclass(frozen=True)
class _Came:
    size: int
    filename: str


class _Crew:
    """Threads that fetch. Daemons: one that waits for a silent server must not keep an interrupted program alive."""

    def __init__(self, jobs: Sequence[Job], transport: "Transport | None") -> None:
        self.news: queue.SimpleQueue[_Expect | _Came | tuple[int, Fetched] | BaseException] = queue.SimpleQueue()
        self._transport = transport
        self._stopping = threading.Event()
        self._todo: queue.SimpleQueue[tuple[int, Job]] = queue.SimpleQueue()
        for number, job in sorted(enumerate(jobs), key=lambda item: -(item[1].size or 0)):  # the longest first
            self._todo.put((number, job))
        count = min(THREADS, len(jobs))
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(count)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(_PATIENCE / len(self._threads))

    def _work(self) -> None:
        session: requests.Session | None = None
        try:
            while not self._stopping.is_set():
                try:
                    number, job = self._todo.get_nowait()
                except queue.Empty:
                    return
                source = file_path(job.url)
                if source is not None:
                    self._take(job, source)
                    self.news.put((number, Fetched()))
                    continue
                session = session or self._session(job)
                self.news.put((number, self._fetch(job, session)))
        except _Stopped:
            pass
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits
            self.news.put(error)
        finally:
            if session is not None:
                session.close()

    def _session(self, job: Job) -> "requests.Session":
        if self._transport is None:
            raise errors.PreflightError(
                f"{job.filename} is to come without any network, but its place is {redact.redact(job.url)}",
                where=str(job.path),
            )
        return self._transport.session()

    def _take(self, job: Job, source: Path) -> None:
        take(source, job.path, job.sha256)
        self.news.put(_Came(job.size or 0, job.filename))

    def _fetch(self, job: Job, session: "requests.Session") -> Fetched:
        with locked_part(job.path, self._stopping.is_set) as part:
            if part is None:
                raise _Stopped
            if job.sha256 is not None and job.path.exists():  # brought by another process meanwhile
                _remove_partial(job.path)
                return Fetched()
            if job.size is not None and part.seek(0, 2) > job.size:
                self._restart(part)
            fetched, found = self._download(job, part, session)
            if not fetched.unchanged and job.sha256 not in {None, found}:
                self._restart(part)  # once: what was there, or a proxy, may have been at fault
                fetched, found = self._download(job, part, session)
                if found != job.sha256:
                    _remove_partial(job.path)
                    raise wrong_file(job.filename, f"SHA-256 {job.sha256}", f"SHA-256 {found}", job.url)
            if not fetched.unchanged:
                with files.writing(job.path):
                    job.path.with_name(f"{job.path.name}.part").replace(job.path)
            _remove_partial(job.path)
            return fetched

    def _restart(self, part: FileIO) -> None:
        self.news.put(_Expect(part.seek(0, 2)))
        part.truncate(0)

    def _download(self, job: Job, part: FileIO, session: "requests.Session") -> tuple[Fetched, str]:
        """Fills the partial file; a connection that breaks off is made again. Returns what came, and its SHA-256."""
        from urllib3.exceptions import HTTPError

        retries = self._transport.retries if self._transport else 0
        failures, farthest = 0, 0
        while True:
            try:
                return self._attempt(job, part, session)
            except _Restart:
                self._restart(part)
            except HTTPError as error:  # in the middle of the body; before it, the session itself tries again
                position = part.seek(0, 2)
                failures = 0 if position >= farthest + _PROGRESS else failures + 1
                farthest = max(farthest, position)
                if failures > retries:
                    raise _unreachable(job, error) from error
                self._stopping.wait(min(0.25 * 2**failures, 20.0))
            if self._stopping.is_set():
                raise _Stopped

    def _attempt(self, job: Job, part: FileIO, session: "requests.Session") -> tuple[Fetched, str]:
        import requests

        digest, start = digest_of(part)
        tag = _read_tag(job.path) if start else None
        if start and tag is None and job.sha256 is None:
            raise _Restart  # nothing could tell whether the rest belongs to it
        if job.size is not None and start == job.size:
            return Fetched(), digest.hexdigest()  # it ended before the file was put in its place
        headers = {"Accept-Encoding": "identity", **_conditions(job, start, tag)}
        try:
            with session.get(job.url, headers=headers, stream=True) as response:
                if response.status_code == 304 and job.known_tag:
                    return Fetched(tag=job.known_tag, unchanged=True), ""
                if not _goes_on(job, response, start):
                    self._restart(part)
                    digest, start = hashlib.sha256(), 0
                tag = _tag(response)
                _write_tag(job.path, tag)
                self._receive(job, part, response, digest, start)
        except requests.RequestException as error:
            raise _unreachable(job, error) from error
        return Fetched(tag=tag), digest.hexdigest()

    def _receive(
        self, job: Job, part: FileIO, response: "requests.Response", digest: "hashlib._Hash", start: int
    ) -> None:
        length = response.headers.get("Content-Length", "")
        announced = start + int(length) if length.isdigit() else None
        if job.size is None and announced is not None:
            self.news.put(_Expect(announced - start))
        if job.size is not None and announced not in {None, job.size}:
            _remove_partial(job.path)
            raise wrong_file(job.filename, f"{job.size} bytes", f"{announced} bytes", job.url)
        position = start
        for block in response.raw.stream(_BLOCK, decode_content=False):
            if self._stopping.is_set():
                raise _Stopped
            position += len(block)
            if job.size is not None and position > job.size:
                _remove_partial(job.path)
                raise wrong_file(job.filename, f"{job.size} bytes", f"more than {position - 1} bytes", job.url)
            with files.writing(job.path):
                _write(part, block)
            digest.update(block)
            self.news.put(_Came(len(block), job.filename))


def _write(part: FileIO, block: bytes) -> None:
    left = memoryview(block)
    while left:
        left = left[part.write(left) :]


def _conditions(job: Job, start: int, tag: str | None) -> Mapping[str, str]:
    if start:
        return {"Range": f"bytes={start}-", **({"If-Range": tag} if tag else {})}
    if job.known_tag:
        name = "If-None-Match" if job.known_tag.startswith('"') else "If-Modified-Since"
        return {name: job.known_tag}
    return {}


def _goes_on(job: Job, response: "requests.Response", start: int) -> bool:
    """Whether the answer's body belongs behind what is there. Raises for an answer that is no file."""
    status = response.status_code
    if status == 206 and response.headers.get("Content-Range", "").startswith(f"bytes {start}-"):  # partial content
        return True
    if status in {206, 416} and start:  # range not satisfiable
        raise _Restart
    if status == 200:  # the server does not know ranges, or the file has changed
        return start == 0
    raise _refused(job, status)


def _tag(response: "requests.Response") -> str | None:
    """A strong entity tag, or else the date of the last change."""
    tag: str = response.headers.get("ETag", "")
    return tag if tag.startswith('"') else response.headers.get("Last-Modified")


def _tag_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.part.tag")


def _read_tag(path: Path) -> str | None:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return _tag_file(path).read_text("utf-8").strip() or None
    return None


def _write_tag(path: Path, tag: str | None) -> None:
    with files.writing(path):
        _tag_file(path).write_text(tag or "", "utf-8")


def _remove_partial(path: Path) -> None:
    for name in (f"{path.name}.part", f"{path.name}.part.tag"):
        path.with_name(name).unlink(missing_ok=True)


def _short(filename: str) -> str:
    return filename if len(filename) <= 40 else f"{filename[:32]}…{filename[-4:]}"


def _refused(job: Job, status: int) -> errors.PreflightError:
    place, host = redact.redact(job.url), urlsplit(job.url).hostname or "the server"
    if status in {401, 403, 407}:
        return errors.PreflightError(
            f"{host} does not let us have {job.filename} (HTTP status {status})",
            where=place,
            remedy=f"put the user name and password for {host} into ~/.netrc or pip's index URL, then run this again",
        )
    if status in {404, 410}:
        return errors.PreflightError(
            f"{job.filename} is gone from {host} (HTTP status {status})",
            where=place,
            remedy="resolve anew, which takes versions that exist now: add --lock to the setup command",
        )
    return errors.PreflightError(
        f"{host} does not serve {job.filename} (HTTP status {status})",
        where=place,
        remedy="run the same command again later: it goes on where it stopped",
    )


def _unreachable(job: Job, error: BaseException) -> errors.PreflightError:
    host = urlsplit(job.url).hostname or "the server"
    return errors.PreflightError(
        f"cannot fetch {job.filename} from {host}: {_reason(error)}",
        where=redact.redact(job.url),
        remedy="check the network, and pip's proxy and certificate (pip config list); then run the same command"
        " again: it goes on where it stopped",
    )


def _reason(error: BaseException) -> str:
    """The innermost cause in its own words, which is where name resolution, refusal and certificates are told apart."""
    seen: set[int] = set()
    inner: object = error
    while id(inner) not in seen:
        seen.add(id(inner))
        deeper = getattr(inner, "reason", None)
        if not isinstance(deeper, BaseException) and isinstance(inner, BaseException) and inner.args:
            deeper = inner.args[0]
        if not isinstance(deeper, BaseException):
            break
        inner = deeper
    text = redact.redact(str(inner)).partition("object at 0x")
    words = text[2].partition(">: ")[2] if text[1] else text[0]
    return (words or text[0])[:200]

"""The wheel store against a server on loopback that misbehaves in every way that servers do."""

import contextlib
import fcntl
import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.integration.toolkit.file_server import FileServer, serving

from sm120 import errors
from sm120.console import Console
from sm120.stack.fetch.store import Store, locked_part
from sm120.stack.fetch.transport import Transport
from sm120.stack.lock import LockedFile
from sm120.stack.resolve.pipconfig import PipConfig

NAME = "big-1.0-py3-none-any.whl"
DATA = hashlib.shake_128(b"big").digest(3_000_000)


@pytest.fixture
def server() -> Iterator[FileServer]:
    with serving() as made:
        made.files[NAME] = DATA
        yield made


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "wheels")


def locked(server: FileServer, name: str = NAME, data: bytes = DATA, **changes: object) -> LockedFile:
    fields: dict[str, object] = {
        "name": name.split("-", maxsplit=1)[0],
        "version": "1.0",
        "filename": name,
        "url": server.url(name),
        "sha256": hashlib.sha256(data).hexdigest(),
        "size": len(data),
        **changes,
    }
    return LockedFile(**fields)  # type: ignore[arg-type] # names and types as above


def pip_config(*, retries: int = 2, timeout: float = 10.0, index_url: str | None = None) -> PipConfig:
    return PipConfig(retries=retries, timeout=timeout, index_url=index_url)


def fetch(store: Store, *wanted: LockedFile, config: PipConfig | None = None) -> None:
    store.fetch(wanted, Transport(config or pip_config()), Console.current())


def leftovers(store: Store) -> list[str]:
    """Everything in the store but whole files in their places, and locks."""
    return sorted(
        str(path.relative_to(store.root))
        for path in store.root.rglob("*")
        if path.is_file() and path.name != ".lock" and path.suffix != ".whl"
    )


def part_of(store: Store, file: LockedFile, content: bytes) -> Path:
    path = store.path(file).with_name(f"{file.filename}.part")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def test_several_files_come_once_and_whole(server: FileServer, store: Store) -> None:
    wanted = []
    for number in range(1, 21):
        name, data = f"small{number}-1.0-py3-none-any.whl", bytes([number]) * (number * 1000)
        server.files[name] = data
        wanted.append(locked(server, name, data, size=None if number % 2 else len(data)))
    assert store.missing_bytes(wanted) == sum(file.size or 0 for file in wanted)
    fetch(store, *wanted)
    for file in wanted:
        assert store.path(file).read_bytes() == server.files[file.filename]
        assert store.has(file)
    assert store.missing_bytes(wanted) == 0
    assert leftovers(store) == []
    asked = len(server.requests)
    fetch(store, *wanted)
    assert len(server.requests) == asked == 20


def test_a_partial_file_is_gone_on_with(server: FileServer, store: Store) -> None:
    file = locked(server)
    part_of(store, file, DATA[:1_000_000])
    assert store.missing_bytes([file]) == 2_000_000
    fetch(store, file)
    assert store.path(file).read_bytes() == DATA
    assert server.sent == 2_000_000
    assert leftovers(store) == []


def test_a_partial_file_that_is_already_whole_needs_no_server(store: Store) -> None:
    with serving() as gone:
        file = locked(gone)
    part_of(store, file, DATA)
    fetch(store, file)
    assert store.path(file).read_bytes() == DATA


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"x" * 1_000_000, id="other content"),
        pytest.param(DATA + b"more", id="too long"),
        pytest.param(b"y" * len(DATA), id="other content of the right size"),
    ],
)
@pytest.mark.parametrize("size", [len(DATA), None])
def test_a_partial_file_that_is_wrong_is_thrown_away(
    server: FileServer, store: Store, content: bytes, size: int | None
) -> None:
    file = locked(server, size=size)
    part_of(store, file, content)
    fetch(store, file)
    assert store.path(file).read_bytes() == DATA
    assert leftovers(store) == []


def test_a_server_without_ranges(server: FileServer, store: Store) -> None:
    server.ranges = False
    file = locked(server)
    part_of(store, file, DATA[:1_000_000])
    fetch(store, file)
    assert store.path(file).read_bytes() == DATA
    assert server.sent == len(DATA)


@pytest.mark.parametrize("size", [len(DATA), None])
@pytest.mark.parametrize("ranges", [True, False])
def test_a_connection_that_breaks_off(server: FileServer, store: Store, ranges: bool, size: int | None) -> None:
    server.ranges, server.drop_after, server.drops = ranges, 1_400_000, 2
    file = locked(server, size=size)
    fetch(store, file)
    assert store.path(file).read_bytes() == DATA
    assert server.sent == (len(DATA) if ranges else len(DATA) + 2 * 1_400_000)


def test_progress_counts_as_a_fresh_start(server: FileServer, store: Store) -> None:
    """Many interruptions of a long download are no reason to give up as long as it gets on."""
    server.drop_after = 1_100_000
    server.files[NAME] = DATA * 3
    file = locked(server, data=DATA * 3)
    fetch(store, file, config=pip_config(retries=1))
    assert store.path(file).read_bytes() == DATA * 3
    assert len(server.requests) > 5


def test_a_connection_that_always_breaks_off(server: FileServer, store: Store) -> None:
    server.drop_after, server.ranges = 1000, False
    with pytest.raises(errors.PreflightError, match=r"cannot fetch big-1\.0.* from 127\.0\.0\.1: ") as raised:
        fetch(store, locked(server))
    assert "goes on where it stopped" in (raised.value.remedy or "")
    assert len(server.requests) == 3
    assert not store.has(locked(server))


def test_a_server_that_falls_silent(server: FileServer, store: Store) -> None:
    server.stall_after = 1000
    with pytest.raises(errors.PreflightError, match=r"(?i)timed out"):
        fetch(store, locked(server), config=pip_config(timeout=0.3, retries=0))


def test_errors_of_the_server_are_tried_again(server: FileServer, store: Store) -> None:
    server.statuses = [503, 500]
    fetch(store, locked(server))
    assert len(server.requests) == 3
    server.statuses = [503] * 9
    store.path(locked(server)).unlink()
    with pytest.raises(errors.PreflightError, match="HTTP status 503"):
        fetch(store, locked(server))


@pytest.mark.parametrize(
    ("status", "message", "remedy"),
    [(404, "is gone from", "--lock"), (403, "does not let us have", "netrc"), (418, "does not serve", "later")],
)
def test_a_refusal_is_not_tried_again(server: FileServer, store: Store, status: int, message: str, remedy: str) -> None:
    server.statuses = [status]
    with pytest.raises(errors.PreflightError, match=message) as raised:
        fetch(store, locked(server))
    assert remedy in (raised.value.remedy or "")
    assert len(server.requests) == 1


def test_no_server(store: Store) -> None:
    with serving() as gone:
        file = locked(gone)
    with pytest.raises(errors.PreflightError, match=r"127\.0\.0\.1: .*[Rr]efused"):
        fetch(store, file, config=pip_config(retries=0))


def test_a_name_that_does_not_resolve(server: FileServer, store: Store) -> None:
    file = locked(server, url=f"http://nowhere.invalid/{NAME}")
    with pytest.raises(errors.PreflightError, match=r"from nowhere\.invalid: .*resolve"):
        fetch(store, file, config=pip_config(retries=0))


def test_a_corrupted_file_is_fetched_anew_once_and_then_refused(server: FileServer, store: Store) -> None:
    file = locked(server)
    server.files[NAME] = DATA[:-1] + b"!"
    found = hashlib.sha256(server.files[NAME]).hexdigest()
    with pytest.raises(errors.BinaryError, match=rf"expected SHA-256 {file.sha256}, found SHA-256 {found}, at http://"):
        fetch(store, file)
    assert len(server.requests) == 2
    assert not store.path(file).exists()
    assert leftovers(store) == []


@pytest.mark.parametrize("lengths", [True, False])
def test_a_file_of_another_length_is_refused_without_reading_it_all(
    server: FileServer, store: Store, lengths: bool
) -> None:
    server.lengths = lengths
    server.files[NAME] = DATA * 4
    found = f"{len(DATA) * 4} bytes" if lengths else r"more than \d+ bytes"
    with pytest.raises(errors.BinaryError, match=rf"expected {len(DATA)} bytes, found {found}"):
        fetch(store, locked(server))
    assert server.sent == 0  # what is sent counts when all of it has been taken
    assert leftovers(store) == []


def test_a_page_in_place_of_a_file_is_refused(server: FileServer, store: Store) -> None:
    server.files[NAME] = b"<html>please log in</html>"
    with pytest.raises(errors.BinaryError, match="expected 3000000 bytes, found 26 bytes"):
        fetch(store, locked(server))


def test_one_failure_ends_the_others_and_what_came_stays(server: FileServer, store: Store) -> None:
    server.stall_after = 2_000_000
    server.files["gone-1.0-py3-none-any.whl"] = b""
    stalled = locked(server)
    gone = locked(server, "lost-1.0-py3-none-any.whl", b"lost")
    with pytest.raises(errors.PreflightError, match="is gone"):
        fetch(store, stalled, gone)
    server.stall_after = None
    server.files[gone.filename] = b"lost"
    fetch(store, stalled, gone)
    assert store.path(stalled).read_bytes() == DATA


def test_progress_is_in_bytes_with_the_time_left(
    server: FileServer, store: Store, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sm120.console._PLAIN_PROGRESS_SECONDS", 0.0)
    fetch(store, locked(server))
    out = capsys.readouterr().out
    assert f"3.0 MB {NAME}, " in out
    assert " s left" in out


# ---- credentials ----


def test_credentials_of_the_configured_index(server: FileServer, store: Store) -> None:
    server.user = ("someone", "battery staple")
    config = pip_config(index_url=server.url("simple").replace("http://", "http://someone:battery%20staple@"))
    fetch(store, locked(server), config=config)
    assert store.has(locked(server))


def test_credentials_of_netrc(
    server: FileServer, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.user = ("someone", "staple")
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login someone password staple\n")
    monkeypatch.setenv("NETRC", str(netrc))
    fetch(store, locked(server))
    assert store.has(locked(server))


def test_credentials_stay_with_their_host(server: FileServer, store: Store) -> None:
    with serving() as other:
        other.files[NAME] = DATA
        server.redirect = other.url()[:-1].replace("127.0.0.1", "localhost")
        config = pip_config(index_url=server.url("simple").replace("http://", "http://someone:staple@"))
        fetch(store, locked(server), config=config)
        assert [headers.get("authorization") is not None for _, headers in server.requests] == [True]
        assert [headers.get("authorization") for _, headers in other.requests] == [None]


# ---- local files ----


def test_a_file_url_is_linked_or_copied_and_stays(store: Store, tmp_path: Path) -> None:
    source = tmp_path / "a folder" / NAME
    source.parent.mkdir()
    source.write_bytes(DATA)
    with serving() as server:
        file = locked(server, url=source.as_uri())
    store.fetch([file], None, Console.current())
    assert source.read_bytes() == store.path(file).read_bytes() == DATA
    assert leftovers(store) == []


def test_a_file_url_with_another_content_is_refused(store: Store, tmp_path: Path) -> None:
    source = tmp_path / NAME
    source.write_bytes(b"other")
    with serving() as server:
        file = locked(server, url=source.as_uri())
    with pytest.raises(errors.BinaryError, match="expected SHA-256") as raised:
        store.fetch([file], None, Console.current())
    assert str(source) in raised.value.message
    assert source.read_bytes() == b"other"
    assert leftovers(store) == []
    source.unlink()
    with pytest.raises(errors.PreflightError, match="is gone"):
        store.fetch([file], None, Console.current())


def test_without_a_transport_nothing_is_asked(server: FileServer, store: Store) -> None:
    with pytest.raises(errors.PreflightError, match="without any network"):
        store.fetch([locked(server)], None, Console.current())
    assert server.requests == []


# ---- files without a hash ----


def test_an_unhashed_file_is_hashed_and_not_sent_again(server: FileServer, store: Store) -> None:
    transport, console = Transport(pip_config()), Console.current()
    expected = (hashlib.sha256(DATA).hexdigest(), len(DATA))
    for _ in range(2):
        assert store.fetch_unhashed(server.url(NAME), NAME, transport, console) == expected
    assert server.sent == len(DATA)
    assert store.path(locked(server)).read_bytes() == DATA

    server.files[NAME] = b"changed"
    assert store.fetch_unhashed(server.url(NAME), NAME, transport, console)[1] == 7
    store.path(locked(server)).unlink()  # it is in the store no longer: then the server must send it
    server.files[NAME] = DATA
    assert store.fetch_unhashed(server.url(NAME), NAME, transport, console) == expected


@pytest.mark.parametrize("tags", [True, False])
def test_an_unhashed_partial_file_is_gone_on_with_only_when_it_is_the_same_file(
    server: FileServer, store: Store, tags: bool
) -> None:
    server.tags = tags
    server.drop_after, server.drops = 1_000_000, 1
    with pytest.raises(errors.PreflightError):
        store.fetch_unhashed(server.url(NAME), NAME, Transport(pip_config(retries=0)), Console.current())
    changed = DATA[::-1]
    server.files[NAME] = changed
    found = store.fetch_unhashed(server.url(NAME), NAME, Transport(pip_config()), Console.current())
    assert found == (hashlib.sha256(changed).hexdigest(), len(changed))


def test_an_unhashed_file_resumes(server: FileServer, store: Store) -> None:
    server.drop_after, server.drops = 1_000_000, 1
    store.fetch_unhashed(server.url(NAME), NAME, Transport(pip_config()), Console.current())
    assert server.sent == len(DATA)


# ---- what is in the store ----


def test_a_built_wheel_is_taken_in(store: Store, tmp_path: Path) -> None:
    built = tmp_path / NAME
    built.write_bytes(DATA)
    digest, length = store.add(built)
    assert (store.root / digest / NAME).read_bytes() == DATA
    assert length == len(DATA)
    assert built.exists()
    assert store.add(built) == (digest, length)
    assert leftovers(store) == []


@pytest.mark.parametrize("content", [DATA[:-1] + b"!", DATA[:100], b""])
def test_a_file_that_changed_in_the_store_is_refused(server: FileServer, store: Store, content: bytes) -> None:
    file = locked(server)
    fetch(store, file)
    store.check([file])
    store.path(file).write_bytes(content)
    with pytest.raises(errors.BinaryError, match=rf"has changed: expected SHA-256 {file.sha256}, found") as raised:
        Store(store.root).check([file])
    assert f"rm {store.path(file)}" in (raised.value.remedy or "")


def test_pruning_keeps_what_is_named_and_nothing_while_in_use(server: FileServer, store: Store) -> None:
    server.files["other-1.0-py3-none-any.whl"] = b"other"
    kept, dropped = locked(server), locked(server, "other-1.0-py3-none-any.whl", b"other")
    fetch(store, kept, dropped)
    server.files["nightly-1.0-py3-none-any.whl"] = b"nightly"
    store.fetch_unhashed(
        server.url("nightly-1.0-py3-none-any.whl"),
        "nightly-1.0-py3-none-any.whl",
        Transport(pip_config()),
        Console.current(),
    )
    (store.root / "a folder of somebody's").mkdir()
    with Store(store.root).in_use():
        assert store.prune([kept.sha256]) == 0
        assert store.has(dropped)
    assert store.prune([kept.sha256]) >= len(b"other") + len(b"nightly")
    assert store.path(kept).read_bytes() == DATA
    names = {path.name for path in store.root.iterdir()}
    assert names == {kept.sha256, "unhashed", ".lock", "a folder of somebody's"}
    assert list((store.root / "unhashed").iterdir()) == []


@pytest.mark.parametrize("name", ["../out.whl", "a/b.whl", ".hidden.whl", "", "x" * 300])
def test_a_name_that_would_lead_out_is_refused(server: FileServer, store: Store, name: str) -> None:
    with pytest.raises(errors.UsageError, match="no file name"):
        store.path(locked(server, name))


def test_a_digest_that_would_lead_out_is_refused(server: FileServer, store: Store) -> None:
    with pytest.raises(errors.UsageError, match="no SHA-256"):
        store.path(locked(server, sha256=f"../{'0' * 61}"))


# ---- several processes, and processes that die ----

PROGRAM = """
import json, sys
from pathlib import Path
from sm120 import entry, errors
from sm120.console import Console
from sm120.stack.lock import LockedFile
from sm120.stack.resolve.pipconfig import PipConfig
from sm120.stack.fetch.store import Store, locked_part
from sm120.stack.fetch.transport import Transport
words = json.loads(sys.argv[1])
def body():
    transport = Transport(PipConfig(timeout=60.0, retries=0))
    Store(Path(words["root"])).fetch([LockedFile(**words["file"])], transport, Console.current())
    return 0
sys.exit(entry.guarded(body, {}))
"""


@dataclass
class Fetcher:
    process: "subprocess.Popen[str]"
    output: str = field(default="")

    @classmethod
    def start(cls, store: Store, file: LockedFile, wrap: tuple[str, ...] = ()) -> "Fetcher":
        import json
        from dataclasses import asdict

        words = json.dumps({"root": str(store.root), "file": asdict(file)})
        argv = [*wrap, sys.executable, "-c", PROGRAM, words]
        pipe = subprocess.PIPE
        return cls(subprocess.Popen(argv, stdout=pipe, stderr=subprocess.STDOUT, text=True))

    def end(self) -> int:
        self.output = self.process.communicate(timeout=60)[0]
        return self.process.returncode


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert holds()


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_process_that_ends_in_the_middle_leaves_a_part_to_go_on_with(
    server: FileServer, store: Store, sign: signal.Signals
) -> None:
    server.stall_after = 2_000_000
    fetcher = Fetcher.start(store, file := locked(server))
    part = store.path(file).with_name(f"{NAME}.part")
    wait_until(lambda: server.stalled.is_set() and part.exists() and part.stat().st_size >= 1_000_000)
    os.kill(fetcher.process.pid, sign)
    assert fetcher.end() == (-signal.SIGKILL if sign is signal.SIGKILL else 130), fetcher.output
    assert "Traceback" not in fetcher.output
    left = part.stat().st_size
    server.go_on.set()
    server.stall_after, server.counted = None, 0
    fetch(store, file)
    assert store.path(file).read_bytes() == DATA
    assert server.sent == len(DATA) - left
    assert leftovers(store) == []


def waits(fetcher: Fetcher) -> bool:
    """Whether the process has come to the partial file, which another one holds."""
    folder = Path(f"/proc/{fetcher.process.pid}/fd")
    with contextlib.suppress(OSError):
        return any(str(link.readlink()).endswith(".part") for link in folder.iterdir())
    return False


@pytest.mark.parametrize("killed", [False, True])
def test_two_at_once_bring_it_once(server: FileServer, store: Store, killed: bool) -> None:
    server.stall_after = 1_000_000
    file = locked(server)
    fetchers = [Fetcher.start(store, file)]
    part = store.path(file).with_name(f"{NAME}.part")
    wait_until(lambda: server.stalled.is_set() and part.stat().st_size >= 700_000)
    fetchers.append(Fetcher.start(store, file))
    wait_until(lambda: waits(fetchers[1]))
    assert len(server.requests) == 1
    server.stall_after = None
    if killed:  # the second goes on with what the first has left
        fetchers[0].process.kill()
    else:
        server.go_on.set()
    codes = [fetcher.end() for fetcher in fetchers]
    assert codes == [-9 if killed else 0, 0], [fetcher.output for fetcher in fetchers]
    assert store.path(file).read_bytes() == DATA
    assert len(server.requests) == (2 if killed else 1)
    assert leftovers(store) == []


def test_a_partial_file_that_is_put_in_its_place_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between our opening it and our holding it, whoever held it before may have finished."""
    place, part = tmp_path / "a.whl", tmp_path / "a.whl.part"
    part.write_bytes(b"whole")
    lock = fcntl.flock

    def finish_first(file: int, how: int) -> None:
        if not place.exists():
            part.rename(place)
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", finish_first)
    with locked_part(place, lambda: False) as file:
        assert file is not None
        assert file.read() == b""
        file.write(b"other")
    assert place.read_bytes() == b"whole"


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder], check=False).returncode:
        pytest.skip("mounting is not permitted here")
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_full_disk_is_one_error_and_what_came_is_kept(server: FileServer, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "2m"):
        store = Store(tmp_path / "disk" / "wheels")
        file = locked(server)
        with pytest.raises(errors.PreflightError, match="no space left on the disk") as raised:
            fetch(store, file)
        assert "free some space" in (raised.value.remedy or "")
        assert store.path(file).with_name(f"{NAME}.part").stat().st_size > 1_000_000
        assert not store.path(file).exists()

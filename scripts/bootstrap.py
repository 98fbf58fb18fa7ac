"""Makes the toolkit's environment; scripts/inv runs it when there is none or when it is out of date.

Needs nothing but a Python 3.11 with venv. The environment is built in place under a lock, and a stamp is written last:
without the stamp it is never used, so an interrupted build is simply made again.
"""

import contextlib
import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

INPUTS = ("pyproject.toml", "requirements-dev.lock")
NEEDED_BYTES = 500 * 2**20  # measured: 220 MB installed, and pip's temporary files
PREFLIGHT = 10
TAIL_LINES = 15

NETWORK_SIGNS = (
    "NewConnectionError",
    "ConnectTimeout",
    "ReadTimeout",
    "Temporary failure in name resolution",
    "Name or service not known",
    "Network is unreachable",
    "Connection refused",
    "ProxyError",
    "SSLError",
    "Could not fetch URL",
    "Failed to establish a new connection",
)


def fail(message: str, *remedies: str) -> NoReturn:
    print(f"scripts/inv: {message}", file=sys.stderr)
    for remedy in remedies:
        print(f"  remedy: {remedy}", file=sys.stderr)
    sys.exit(PREFLIGHT)


def fail_to_write(path: Path, error: OSError) -> NoReturn:
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        fail(
            f"no space left on the disk that holds {path}",
            "free some space, or set SM120_HOME=/a/folder/on/another/disk",
        )
    fail(f"cannot write {path}: {error.strerror or error}", "set SM120_HOME=/a/writable/folder")


def say(text: str) -> None:
    print(f"scripts/inv: {text}", file=sys.stderr, flush=True)


def main(root: Path, home: str, python: str) -> None:
    """``home`` and ``python`` are kept as scripts/inv spelled them: it compares the stamp with its own words."""
    if sys.prefix != sys.base_prefix:
        # Run from a virtual environment, perhaps the very one that is about to be replaced.
        base = getattr(sys, "_base_executable", None) or sys.executable
        os.execv(base, [base, "-I", __file__, str(root), home, python])
    try:
        Path(home).mkdir(parents=True, exist_ok=True)
        with lock(Path(home) / ".venv.lock") as held:
            build(root, Path(home) / ".venv", f"{home}/.venv\n{root}\n{python}\n", held)
    except OSError as error:
        fail_to_write(Path(home), error)


@contextlib.contextmanager
def lock(path: Path) -> Iterator[int]:
    """One at a time. The kernel drops the lock with its last holder, so it cannot go stale."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another scripts/inv is making the environment; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


def is_current(root: Path, venv: Path, stamp: str) -> bool:
    marks = venv / ".sm120"
    try:
        return (
            (marks / "complete").read_text() == stamp
            and all((marks / name).read_bytes() == (root / name).read_bytes() for name in INPUTS)
            and os.access(venv / "bin" / "python", os.X_OK)
        )
    except OSError:
        return False


def build(root: Path, venv: Path, stamp: str, held: int) -> None:
    if is_current(root, venv, stamp):
        return  # somebody else made it while we waited
    check_venv_module()
    marks = venv / ".sm120"
    if venv.exists() and not marks.exists() and any(venv.iterdir()):
        fail(
            f"{venv} exists and was not made by scripts/inv",
            f"move it away, or set SM120_HOME=/another/folder: mv '{venv}' '{venv}.old'",
        )
    free = shutil.disk_usage(venv.parent).free
    if free < NEEDED_BYTES:
        fail(
            f"the environment needs {NEEDED_BYTES} bytes in {venv.parent}, {free} are free",
            "free some space, or set SM120_HOME=/a/folder/on/another/disk",
        )
    inputs = {name: (root / name).read_bytes() for name in INPUTS}

    say(f"making {venv} (once; a minute or so)")
    (marks / "complete").unlink(missing_ok=True)
    empty(venv, keep=marks)
    marks.mkdir(parents=True, exist_ok=True)  # says whose it is, even when we are interrupted now
    log = marks / "bootstrap.log"
    log.write_bytes(b"")
    step(log, held, [sys.executable, "-I", "-m", "venv", str(venv)])
    pip = [str(venv / "bin" / "python"), "-I", "-m", "pip", "install", "--no-input", "--progress-bar=off"]
    step(log, held, [*pip, "--require-hashes", "--requirement", str(root / "requirements-dev.lock")])
    step(log, held, [*pip, "--no-deps", "--no-build-isolation", "--editable", str(root)])
    for name, data in inputs.items():
        (marks / name).write_bytes(data)
    complete = marks / "complete.tmp"
    complete.write_text(stamp)
    complete.replace(marks / "complete")


def check_venv_module() -> None:
    try:
        import ensurepip  # noqa: F401 - only whether it is there
        import venv  # noqa: F401
    except ImportError as error:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        fail(
            f"{sys.executable} (Python {version}) cannot make virtual environments: its module {error.name} is missing",
            f"Debian, Ubuntu: apt install python{version}-venv",
            "or set SM120_PYTHON to another Python 3.11 or newer",
        )


def empty(folder: Path, keep: Path) -> None:
    if not folder.exists():
        return
    for entry in folder.iterdir():
        if entry == keep:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def pip_environment() -> dict[str, str]:
    """The user's own pip configuration counts, except for what would send the packages elsewhere."""
    elsewhere = {
        "PIP_TARGET",
        "PIP_PREFIX",
        "PIP_ROOT",
        "PIP_DRY_RUN",
        "PIP_REQUIRE_HASHES",
        "PIP_NO_BINARY",
        "PIP_LOG",
    }
    env = {k: v for k, v in os.environ.items() if k not in elsewhere}
    env.update(PIP_USER="0", PIP_DISABLE_PIP_VERSION_CHECK="1")
    env.setdefault("PIP_RETRIES", "2")
    return env


def step(log: Path, held: int, argv: list[str]) -> None:
    """The child holds the lock too: should we be killed, nobody else starts before it has ended."""
    with log.open("ab") as file:
        file.write(f"+ {' '.join(argv)}\n".encode())
        file.flush()
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=pip_environment(),
            pass_fds=(held,),
            check=False,
        )
    if done.returncode:
        explain(log, done.returncode)


def explain(log: Path, code: int) -> NoReturn:
    text = log.read_text("utf-8", "replace")
    if "No space left on device" in text:
        fail(
            "no space left on the disk while making the environment",
            "free some space, or set SM120_HOME or TMPDIR to another disk",
        )
    if any(sign in text for sign in NETWORK_SIGNS):
        fail(
            f"no package index could be reached (details: {log})",
            "connect to the network, or point pip to an index or a folder of wheels (pip config set"
            " global.index-url URL, or PIP_NO_INDEX=1 PIP_FIND_LINKS=/folder), then run the same command again",
        )
    if "DO NOT MATCH THE HASHES" in text:
        fail(
            f"a package is not the one that requirements-dev.lock names (details: {log})",
            "use an index that serves the files as published, or refresh the lock: scripts/refresh-lock",
        )
    print("\n".join(text.splitlines()[-TAIL_LINES:]), file=sys.stderr)
    fail(
        f"making the environment failed with exit code {code} (whole log: {log})",
        "mend what the lines above say, then run the same command again",
    )


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
    except KeyboardInterrupt:
        sys.exit(130)

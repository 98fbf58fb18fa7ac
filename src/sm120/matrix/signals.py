"""One ^C is enough, and a second one must not stop the cleaning up after the first."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def one_interrupt() -> Iterator[None]:
    """Within it, the first interrupt, SIGTERM or SIGHUP raises KeyboardInterrupt; further ones are ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {sign: signal.getsignal(sign) for sign in _STOPPING}

    def stop(signum: int, frame: FrameType | None) -> None:  # noqa: ARG001
        for sign in _STOPPING:
            signal.signal(sign, signal.SIG_IGN)
        raise KeyboardInterrupt

    for sign in _STOPPING:
        signal.signal(sign, stop)
    try:
        yield
    finally:
        for sign, handler in before.items():
            signal.signal(sign, handler if handler is not None else signal.SIG_DFL)

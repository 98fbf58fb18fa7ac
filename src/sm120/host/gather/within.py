"""Calls that the kernel may never answer: a driver that hangs, a file server that is gone."""

import threading
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

T = TypeVar("T")


class NoAnswer(Exception):
    """A call failed, or was not done in time."""


def together(calls: Mapping[str, Callable[[], T]], seconds: float) -> tuple[dict[str, T], dict[str, str]]:
    """Runs all calls at once; the results, and in words why the others have none.

    A call that is not done in time is left behind in its thread, which ends with the program.
    """
    done: dict[str, T] = {}
    failed: dict[str, str] = {}

    def work(name: str, call: Callable[[], T]) -> None:
        try:
            done[name] = call()
        except Exception as error:  # noqa: BLE001 - whatever goes wrong in a probe is told, never raised
            failed[name] = f"{type(error).__name__}: {error}"

    threads = {n: threading.Thread(target=work, args=(n, call), daemon=True) for n, call in calls.items()}
    for thread in threads.values():
        thread.start()
    deadline = time.monotonic() + seconds
    for name, thread in threads.items():
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            failed[name] = f"no answer within {seconds:g} s"
    reasons = dict(failed)  # copies: a late call must not change what is returned
    return {name: value for name, value in done.copy().items() if name not in reasons}, reasons


def one(call: Callable[[], T], seconds: float) -> T:
    """One such call. Raises NoAnswer, in words."""
    done, failed = together({"": call}, seconds)
    if "" not in done:
        raise NoAnswer(failed[""])
    return done[""]

"""What a build left running when it ended.

A ninja that is killed leaves its compilers, each in a process group of its own: they would write into the next attempt.
"""

import contextlib
import os

import psutil


def end_session(leader: int) -> None:
    """Kills what is left of a session whose leader has ended and was reaped."""
    if psutil.pid_exists(leader):  # the number has passed to somebody else, so the session is empty
        return
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError, PermissionError):
            if os.getsid(process.pid) == leader:
                process.kill()

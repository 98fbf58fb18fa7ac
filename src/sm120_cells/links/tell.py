"""What a rank says: one JSON object a line, whole at once, on a descriptor that nothing else writes to."""

import json
import math
import os
from collections.abc import Mapping
from typing import Any, Final

_TEXT: Final = 300  # characters of any text: escaped, a message still stays below 4096 bytes


class Tell:
    """Messages of one rank."""

    def __init__(self, rank: int, descriptor: int) -> None:
        self._rank = rank
        self._descriptor = descriptor

    def say(self, event: str, **content: Any) -> None:
        """One message. Numbers that JSON does not know become null."""
        message = {"links": 1, "event": event, "rank": self._rank, **_plain(content)}
        os.write(self._descriptor, json.dumps(message, allow_nan=False).encode() + b"\n")

    def at(self, step: str) -> None:
        """What comes next: named where the rank hangs or dies in it."""
        self.say("at", step=step)

    def ready(self) -> None:
        """From now on, a step may take no longer than the request's ``quiet``."""
        self.say("ready")

    def wrong(self, **where: Any) -> None:
        """Something that came out wrong."""
        self.say("wrong", where=where)


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return value[:_TEXT]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value

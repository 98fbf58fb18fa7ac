"""The edge between Invoke and the package: flags in, exit codes out.

A command is a function of one frozen dataclass. Its fields are its flags: Invoke hands them over as text, and their
types say what they must be. A field ``json``, ``verbose`` or ``home`` means the same for every task.
"""

import contextlib
import dataclasses
import importlib
import math
import os
import signal
import sys
import tempfile
import traceback
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from invoke.context import Context
from invoke.exceptions import Exit

from sm120 import config, errors, files, redact
from sm120.console import Console
from sm120.state import State


def run(context: Context, target: str, **flags: object) -> None:
    """Runs ``module:function`` with the flags, and ends the program with its exit code unless that is 0."""
    code = guarded(lambda: _call(context.config.get("sm120") or {}, target, flags), flags)
    if code:
        raise Exit(code=code)


def _call(settings: Mapping[str, object], target: str, flags: Mapping[str, object]) -> int:
    config.use(config.resolve(settings))
    if flags.get("home") is not None:
        if not flags["home"]:
            raise errors.UsageError("--home is empty", remedy="give it a value, or leave --home out")
        config.move(str(flags["home"]))
    module, _, name = target.partition(":")
    command: Callable[[Any], int | None] = getattr(importlib.import_module(module), name)
    return command(options_for(command, flags)) or 0


def guarded(body: Callable[[], int], flags: Mapping[str, object]) -> int:
    """The exit code of ``body``; its errors are printed, never raised."""
    try:
        return _guarded(body, flags)
    except BrokenPipeError:
        # Whoever read our output has gone; Python must not complain again while it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _guarded(body: Callable[[], int], flags: Mapping[str, object]) -> int:
    Console.create(json=bool(flags.get("json")), verbose=bool(flags.get("verbose")))
    error: errors.ToolkitError | None = None
    code = 0
    try:
        with _terminate_is_interrupt():
            code = body()
    except errors.ToolkitError as raised:
        error = raised
    except KeyboardInterrupt:
        error = errors.Interrupted("interrupted; what was done is kept", remedy="run the same command again to go on")
    except BrokenPipeError:
        raise
    except Exception as raised:  # noqa: BLE001 - the last line of defence: no traceback reaches the user
        error = _unexpected(raised)
    Console.current().finish(error)
    return code if error is None else error.exit_code


@contextlib.contextmanager
def _terminate_is_interrupt() -> Iterator[None]:
    """SIGTERM and SIGHUP end a task as ^C does, so that no child is left behind."""

    def raise_interrupt(signum: int, frame: types.FrameType | None) -> None:  # noqa: ARG001
        raise KeyboardInterrupt

    before = {sign: signal.signal(sign, raise_interrupt) for sign in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for sign, handler in before.items():
            signal.signal(sign, handler)


def _unexpected(raised: BaseException) -> errors.ToolkitError:
    text = redact.redact("".join(traceback.format_exception(raised)))
    if Console.current().verbose:
        Console.current().info(text)
    return errors.ToolkitError(
        redact.redact(f"unexpected {type(raised).__name__}: {raised}"),
        where=_write_log(text),
        remedy="this is a fault in the toolkit: please report it with the file named above",
    )


def _write_log(text: str) -> str:
    name = f"error-{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{os.getpid()}.log"
    try:
        path = State.resolve().logs / name
        files.write_text_atomic(path, text)
    except errors.ToolkitError:
        path = Path(tempfile.gettempdir()) / f"sm120-{name}"
        try:
            files.write_text_atomic(path, text)
        except errors.ToolkitError:
            return "no log could be written; --verbose prints the traceback"
    return str(path)


def options_for(command: Callable[[Any], object], flags: Mapping[str, object]) -> object:
    """The command's options dataclass, filled from Invoke's flags. Raises UsageError with a sentence on a bad value."""
    hints = typing.get_type_hints(command)
    (cls,) = (hint for name, hint in hints.items() if name != "return")
    types_of = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    values: dict[str, object] = {}
    for name, raw in flags.items():
        if name not in fields:
            if name in {"json", "verbose", "home"}:
                continue
            raise TypeError(f"{cls.__name__} has no field for the flag {name!r}")
        if raw is None:
            continue  # not given: the dataclass knows the default
        flag = "--" + name.strip("_").replace("_", "-")  # for_: as Invoke has it, since "for" is no name in Python
        if raw == "":  # as from an unset variable of the shell; taken for "not given" it would do something else
            raise errors.UsageError(f"{flag} is empty", remedy=f"give it a value, or leave {flag} out")
        values[name] = parse_flag(flag, raw, types_of[name])
    options: object = cls(**values)
    return options


def parse_flag(flag: str, raw: object, wanted: Any) -> object:
    """One flag's value as the type ``wanted``: bool, int, float, str, Path, a tuple or list of these, or X | None."""
    if typing.get_origin(wanted) in (types.UnionType, typing.Union):
        (wanted,) = (arg for arg in typing.get_args(wanted) if arg is not types.NoneType)
    if isinstance(raw, bool) or wanted is bool:
        return bool(raw)
    text = str(raw)
    origin = typing.get_origin(wanted)
    if origin in (tuple, list):
        inner = typing.get_args(wanted)[0]
        words = [word.strip() for word in text.split(",")]
        if not all(words):
            raise errors.UsageError(f"{flag}: a list has an empty part: {text!r}", remedy=f"write {flag} A,B,C")
        parts = [parse_flag(flag, word, inner) for word in words]
        return tuple(parts) if origin is tuple else parts
    if wanted is int:
        return _number(flag, text, int, "a whole number")
    if wanted is float:
        return _number(flag, text, float, "a number")
    if wanted is Path:
        return Path(text).expanduser()
    return text


def _number(flag: str, text: str, kind: type[int] | type[float], what: str) -> int | float:
    try:
        value = kind(text)
    except ValueError:
        raise errors.UsageError(f"{flag}: {text!r} is not {what}") from None
    if not math.isfinite(value):
        raise errors.UsageError(f"{flag}: {text!r} is not {what}")
    return value

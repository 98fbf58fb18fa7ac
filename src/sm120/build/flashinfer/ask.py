"""Talks with ``inside.py``, which runs in the stack's Python: this process never imports FlashInfer."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sm120 import errors, process
from sm120.build.flashinfer import inside
from sm120.build.flashinfer.modules import Module
from sm120.build.flashinfer.target import Target
from sm120.build.toolchain import Toolchain
from sm120.runs import Run

_ASK_SECONDS = 900.0  # a first import of torch and FlashInfer takes minutes on a slow disk

Said = list[tuple[str, dict[str, Any]]]


def inside_stack(
    toolchain: Toolchain,
    what: str,
    request: Mapping[str, object],
    *,
    env: Mapping[str, str],
    run: Run | None,
    log: Path,
    on_line: Callable[[str], None] | None = None,
    stream: bool = False,
) -> tuple[Said, process.Completed]:
    """What it said in its own lines. BuildError when FlashInfer cannot be imported."""
    said: Said = []

    def each(line: str) -> None:
        if line.startswith(inside.MARK):
            name, _, text = line.removeprefix(inside.MARK).partition(" ")
            said.append((name, _facts(text, log)))
        if on_line is not None:
            on_line(line)

    done = process.run(
        [str(toolchain.python), "-u", "-B", str(Path(inside.__file__)), what, json.dumps(request)],
        cwd=log.parent,
        env=env,
        timeout=_ASK_SECONDS if what == "plan" else None,
        log=log,
        on_line=each,
        stream=stream,
    )
    if run is not None:
        run.record_command(done, env=env, cwd=log.parent)
    for name, facts in said:
        if name == "broken":
            raise errors.BuildError(
                f"FlashInfer cannot be imported in the stack {toolchain.stack}: {facts['error']}",
                where=str(toolchain.site),
                remedy=f"scripts/inv setup --stack {toolchain.stack}; then look at what is missing, in {log}",
            )
    return said, done


def as_request(module: Module, aimed: Target) -> dict[str, object]:
    filled = [aimed.sm if argument == "{sm}" else argument for argument in module.arguments]
    return {"name": module.name, "ask": module.ask, "arguments": filled, "when": module.when}


def silent(done: process.Completed, log: Path) -> errors.BuildError:
    """It ended without an answer."""
    how = "took too long" if done.timed_out else f"ended with exit code {done.returncode}"
    last = next((line.strip() for line in reversed(done.tail) if line.strip()), "it said nothing")
    return errors.BuildError(f"asking FlashInfer for its modules {how}: {last}", where=str(log), remedy="read the log")


def _facts(text: str, log: Path) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise errors.BuildError(f"what FlashInfer's process says cannot be read: {text[:200]}", where=str(log))
    return found

"""A worker as a process of its own, and both ends of its door."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
PLUGINS = Path(__file__).parent / "plugins"
MODEL: dict[str, Any] = {
    "name": "tiny",
    "tp": 1,
    "hidden": 64,
    "moe": {
        "experts": 6,
        "top_k": 2,
        "intermediate": 32,
        "shared_intermediate": 48,
        "shared_gate": True,
        "activation": {"kind": "silu", "limit": None, "alpha": 1.0, "beta": 0.0},
        "routed_scaling": 1.0,
    },
    "dense": [{"name": "o_proj", "n": 48, "k": 64}],
}


def environment(plugins: Sequence[str] = ()) -> dict[str, str]:
    """As the toolkit gives it to a worker, with this folder's backends."""
    return {
        **{k: v for k, v in os.environ.items() if not k.startswith(("SM120_", "COV_"))},
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(PLUGINS)]),
        "PYTHONSAFEPATH": "1",
        "PYTHONNOUSERSITE": "1",
        "OMP_NUM_THREADS": "1",
        "SM120_BACKENDS": os.pathsep.join(plugins),
    }


class Door:
    """Requests and replies, one JSON object a line."""

    def __init__(self, process: "subprocess.Popen[bytes]", errors: Path) -> None:
        self.process, self.errors = process, errors
        self.number = 0
        self.lines: list[str] = []

    def send(self, text: str | bytes) -> None:
        """A line as it is."""
        assert self.process.stdin is not None
        self.process.stdin.write(text.encode() if isinstance(text, str) else text)
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()

    def read(self) -> dict[str, Any]:
        """The next line: strict JSON, which knows no NaN and no Infinity."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline().decode("utf-8")
        if not line.endswith("\n"):
            raise EOFError(f"the worker is gone, its last words: {self.errors.read_text(errors='replace')[-2000:]}")
        self.lines.append(line)

        def refuse(word: str) -> None:
            raise AssertionError(f"{word} in {line}")

        reply: dict[str, Any] = json.loads(line, parse_constant=refuse)
        return reply

    def ask(self, op: str, **fields: Any) -> dict[str, Any]:
        """Send a request, skip its events, give the reply."""
        self.number += 1
        self.send(json.dumps({"id": self.number, "op": op, **fields}))
        reply = self.read()
        assert reply == {"id": self.number, "event": "started"}
        while "event" in reply:
            reply = self.read()
        assert reply["id"] == self.number
        return reply

    def result(self, op: str, **fields: Any) -> dict[str, Any]:
        """The result of a request that must succeed."""
        reply = self.ask(op, **fields)
        assert reply["ok"], reply
        result: dict[str, Any] = reply["result"]
        return result

    def error(self, op: str, **fields: Any) -> dict[str, Any]:
        """The error of a request that must not."""
        reply = self.ask(op, **fields)
        assert not reply["ok"], reply
        error: dict[str, Any] = reply["error"]
        assert set(error) >= {"kind", "message"}
        return error

    def cells(self, *only: str, **fields: Any) -> list[dict[str, Any]]:
        """Planned cells of the tiny model."""
        cells: list[dict[str, Any]] = self.result(
            "plan", **{"profile": "quick", "model": MODEL, **fields}, only=list(only)
        )["cells"]
        return cells

    def cell(self, *only: str, **fields: Any) -> dict[str, Any]:
        """The one cell that matches."""
        (found,) = self.cells(*only, **fields)
        return found

    def run(self, cell: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
        """RESULT of a cell."""
        return self.result("run", cell=cell, **fields)


@contextmanager
def worker(folder: Path, *arguments: str, plugins: Sequence[str] = ("crooked",)) -> Iterator[Door]:
    """A worker in a folder of its own; its stderr goes to a file there."""
    errors = folder / "stderr"
    with (
        errors.open("wb") as log,
        subprocess.Popen(
            [sys.executable, "-m", "sm120_cells.worker", "--device", "cpu", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            cwd=folder,
            env=environment(plugins),
        ) as process,
    ):
        try:
            yield Door(process, errors)
        finally:
            process.kill()

"""What the user sees: steps, tables and progress.

Rich on a terminal, plain lines elsewhere; with --json one document on stdout and everything else on stderr. Text is
never read as markup, and control characters in it are made visible.
"""

import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, TextIO

if TYPE_CHECKING:
    import rich.console
    import rich.progress

    from sm120.errors import ToolkitError

# C0 without tab and newline, DEL, C1, bidirectional overrides, and lone surrogates.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_PLAIN_PROGRESS_SECONDS = 10.0


def clean(text: str) -> str:
    """Text that is safe to print: control characters are shown as escapes, carriage returns as line ends."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return _CONTROL.sub(lambda m: m[0].encode("unicode_escape", "surrogatepass").decode("ascii"), text)


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def size(n: float) -> str:
    """Bytes in decimal units, as disks and networks count them."""
    if abs(n) < 1000:
        return f"{n:.0f} B"
    for unit in ("kB", "MB"):
        n /= 1000
        if abs(n) < 999.95:
            return f"{n:.1f} {unit}"
    return f"{n / 1000:.1f} GB"


class Progress:
    """A count towards ``total`` with the time left; made by ``Console.progress``. In bytes, the total may grow."""

    def __init__(self, console: "Console", total: int, label: str, *, in_bytes: bool = False) -> None:
        self._console = console
        self._total = total
        self._label = clean(label)
        self._in_bytes = in_bytes
        self._done = 0
        self._started = self._shown = time.monotonic()
        self._bar: rich.progress.Progress | None = None
        self._task: rich.progress.TaskID | None = None

    def advance(self, n: int = 1, label: str | None = None) -> None:
        self._done += n
        if label is not None:
            self._label = clean(label)
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self._done, description=self._label)
            return
        now = time.monotonic()
        if now - self._shown >= _PLAIN_PROGRESS_SECONDS:
            self._shown = now
            self._console.info(self._line(now))

    def expect(self, n: int) -> None:
        """``n`` more are to be done than was known."""
        self._total += n
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, total=self._total)

    def _line(self, now: float) -> str:
        line = f"{_of(self._done, self._total) if self._in_bytes else f'{self._done}/{self._total}'} {self._label}"
        if 0 < self._done < self._total:
            line += f", {duration((now - self._started) / self._done * (self._total - self._done))} left"
        return line

    @contextlib.contextmanager
    def _live(self, screen: "rich.console.Console | None") -> Iterator["Progress"]:
        if screen is None:
            yield self
            return
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )
        from rich.table import Column

        count = DownloadColumn if self._in_bytes else MofNCompleteColumn
        columns = (
            BarColumn(bar_width=20, table_column=Column(no_wrap=True, min_width=20)),
            TimeRemainingColumn(table_column=Column(no_wrap=True, min_width=8)),
            count(table_column=Column(no_wrap=True, min_width=7)),
            TextColumn(  # last, and cut: a long name must not push the numbers off a narrow terminal
                "{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)
            ),
        )
        with Progress(*columns, console=screen, transient=True, expand=True) as self._bar:
            self._task = self._bar.add_task(self._label, total=self._total)
            yield self
        self._bar = None


def _of(done: int, total: int) -> str:
    """``1.2/4.5 GB``: both in the unit of the total."""
    number, unit = size(total).split()
    scale = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9}[unit]
    return f"{done / scale:.{0 if unit == 'B' else 1}f}/{number} {unit}"


class Console:
    """Created once a task with ``Console.create``; ``Console.current`` finds it from anywhere."""

    _current: ClassVar["Console | None"] = None

    def __init__(self, *, json: bool, verbose: bool, out: TextIO, err: TextIO) -> None:
        self.json = json
        self.verbose = verbose
        self._out = out
        self._err = err
        self._text = err if json else out
        self._result: dict[str, object] | None = None
        self._screen = _rich_console(self._text)

    @classmethod
    def create(cls, json: bool = False, verbose: bool = False) -> "Console":
        for stream in (sys.stdout, sys.stderr):
            # A locale without UTF-8 must not turn a sign into a crash.
            with contextlib.suppress(AttributeError, ValueError):
                stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr] # guarded by the suppress
        console = cls(json=json, verbose=verbose, out=sys.stdout, err=sys.stderr)
        cls._current = console
        return console

    @classmethod
    def current(cls) -> "Console":
        return cls._current or cls.create()

    def info(self, text: str) -> None:
        self._print(clean(text), self._text)

    def detail(self, text: str) -> None:
        """A line for --verbose only."""
        if self.verbose:
            self.info(text)

    def warn(self, text: str) -> None:
        self._print(f"warning: {clean(text)}", self._err, style="yellow")

    def error(self, error: "ToolkitError") -> None:
        """Message, place, and what to do."""
        self._print(f"error: {clean(error.message)}", self._err, style="bold red")
        if error.where and error.where not in error.message:
            self._print(f"  where: {clean(error.where)}", self._err)
        if error.remedy:
            self._print(f"  remedy: {clean(error.remedy)}", self._err)

    @contextlib.contextmanager
    def step(self, title: str) -> Iterator[None]:
        """Names what is being done, and how long it took or that it failed."""
        self._print(f"==> {clean(title)}", self._text, style="bold")
        started = time.monotonic()
        try:
            yield
        except BaseException:
            self._print(f"    failed after {duration(time.monotonic() - started)}", self._text, style="red")
            raise
        self._print(f"    done in {duration(time.monotonic() - started)}", self._text, style="dim")

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        cells = [[clean(str(value)) for value in row] for row in rows]
        if self._screen is None:
            for line in _plain_table(title, columns, cells):
                self._print(line, self._text)
            return
        from rich.box import SIMPLE_HEAD
        from rich.table import Table
        from rich.text import Text

        table = Table(title=Text(clean(title)), title_justify="left", box=SIMPLE_HEAD)
        for column in columns:
            table.add_column(Text(column), overflow="fold")
        for row in cells:
            table.add_row(*(Text(value) for value in row))
        self._screen.print(table)

    @contextlib.contextmanager
    def progress(self, total: int, label: str, *, in_bytes: bool = False) -> Iterator[Progress]:
        made = Progress(self, total, label, in_bytes=in_bytes)
        with made._live(self._screen) as progress:  # noqa: SLF001 - two halves of one thing
            yield progress

    def result(self, obj: Mapping[str, object]) -> None:
        """Keeps what --json prints at the end of the task: one document on stdout. ValueError, TypeError: no JSON."""
        json.dumps(obj, allow_nan=False)
        self._result = dict(obj)

    def finish(self, error: "ToolkitError | None" = None) -> None:
        """Prints the error, and with --json the result, which then carries the error too."""
        if error is not None:
            self.error(error)
        if not self.json:
            return
        document = self._result or {}
        if error is not None:
            document = {**document, "error": error.as_json()}
        self._out.write(json.dumps(document, indent=2, ensure_ascii=True, allow_nan=False) + "\n")
        self._out.flush()
        self._result = None

    def _print(self, line: str, stream: TextIO, *, style: str | None = None) -> None:
        if self._screen is not None and stream is self._text:
            self._screen.print(line, style=style, soft_wrap=True)
            return
        stream.write(line + "\n")
        stream.flush()


def _rich_console(stream: TextIO) -> "rich.console.Console | None":
    """Rich for a terminal that can do more than plain text; FORCE_COLOR asks for it elsewhere."""
    forced = bool(os.environ.get("FORCE_COLOR"))
    if not (stream.isatty() or forced) or os.environ.get("TERM") == "dumb":
        return None
    from rich.console import Console as RichConsole

    return RichConsole(file=stream, markup=False, emoji=False, highlight=False, force_terminal=True)


def _plain_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    from rich.cells import cell_len

    lines = [list(columns), *(list(row) for row in rows)]
    if any(len(line) != len(columns) for line in lines):
        raise ValueError(f"table {title!r}: a row has not {len(columns)} cells")
    flat = [[cell.replace("\n", " ") for cell in line] for line in lines]
    widths = [max(cell_len(line[i]) for line in flat) for i in range(len(columns))]
    if title:
        yield clean(title)
    for line in flat:
        yield "  ".join(
            cell + " " * (width - cell_len(cell)) for cell, width in zip(line, widths, strict=True)
        ).rstrip()

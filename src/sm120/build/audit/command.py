"""``audit``: what a wheel, a package or an environment can run on. Changes nothing."""

import re
from dataclasses import dataclass
from pathlib import Path

from sm120 import errors
from sm120.build.audit import installed
from sm120.build.audit.auditing import audit_items, audit_wheel
from sm120.build.audit.cuobjdump import Tools
from sm120.build.audit.model import Audit, Capability
from sm120.build.audit.show import show
from sm120.build.audit.step import refuse, tools_of
from sm120.build.audit.subject import scratch as temporary
from sm120.console import Console
from sm120.runs import Run
from sm120.stack.install.environment import look
from sm120.stack.install.record import Environment, site_packages
from sm120.stack.selection import selected
from sm120.state import State

SCHEMA = 1
TASK = "audit"
_CAPABILITY = re.compile(r"(\d{1,2})\.(\d)")
_TOOLS = "scripts/inv setup --stack cpu"


@dataclass(frozen=True, kw_only=True)
class Options:
    wheel: Path | None = None
    package: str | None = None  # NAME: the stack's; NAME==VERSION: the package index's
    env: bool = False
    for_: tuple[str, ...] = ("12.0",)
    stack: str | None = None

    @property
    def capabilities(self) -> tuple[Capability, ...]:
        """In the order given, each once. UsageError for what is none."""
        found: dict[Capability, None] = {}
        for text in self.for_:
            match = _CAPABILITY.fullmatch(text)
            if match is None:
                raise errors.UsageError(
                    f"--for {text} is no compute capability", remedy="write it as in --for 12.0 or --for 12.0,12.1"
                )
            found[int(match[1]), int(match[2])] = None
        return tuple(found)

    def check(self) -> None:
        given = [self.wheel is not None, self.package is not None, self.env]
        if sum(given) != 1:
            raise errors.UsageError(
                "name one thing to audit: --wheel FILE, --package NAME, --package NAME==VERSION, or --env",
                remedy=f"for what is installed: scripts/inv {TASK} --env",
            )
        if self.wheel is not None and not self.wheel.exists():
            raise errors.UsageError(f"--wheel: there is no {self.wheel}", where=str(self.wheel))
        _ = self.capabilities


def audit(options: Options) -> None:
    """Raises UsageError, PreflightError (no tools, no network, no disk), NothingChecked, BinaryError."""
    options.check()
    console, state = Console.current(), State.resolve()
    environment = _environment(options, state)
    tools = tools_of(environment)
    run = Run.start(state, TASK, _argv(options))
    with run.failing():
        done = _audited(options, environment, tools, state, run, console)
        document = {"schema": SCHEMA, "stack": environment.name, **done.as_json()}
        run.write_json("result.json", document)
        console.result(document)
        show(done, console)
        refuse(done)
        console.info(f"{done.subject}: nothing refused")
    run.finish(0, {"subject": done.subject, "good": done.good})


def _environment(options: Options, state: State) -> Environment:
    name = options.stack or selected(state)
    if name is None:
        raise errors.PreflightError(
            "no stack is set up yet, and the tools that read what a library holds come with one",
            where=str(state.root),
            remedy=_TOOLS,
        )
    found, why = look(name, state)
    if found is None:
        raise errors.PreflightError(
            f"the stack {name} is not there ({why})",
            where=str(state.root),
            remedy=f"scripts/inv setup --stack {name}; the tools alone come with {_TOOLS}",
        )
    return found


def _audited(
    options: Options, environment: Environment, tools: Tools, state: State, run: Run, console: Console
) -> Audit:
    site = site_packages(environment.python.parents[1])
    scratch = state.root / "cache" / TASK
    wheel = options.wheel
    if options.package is not None and "=" in options.package:
        wheel = installed.download(options.package, environment, scratch, run, console)
    if wheel is not None:
        return audit_wheel(
            wheel.absolute(), tools=tools, torch_site=site, capabilities=options.capabilities, scratch=scratch
        )
    if options.package is not None:
        name, items, calls = installed.package(options.package, environment.name, site)
    else:
        name, items, calls = installed.environment(environment.name, site, environment.cache)
    with temporary(scratch) as folder:
        return audit_items(
            name,
            items,
            calls,
            tools=tools,
            torch_site=site,
            capabilities=options.capabilities,
            sass="fp4",
            scratch=folder,
        )


def _argv(options: Options) -> list[str]:
    words = [TASK, "--for", ",".join(options.for_)]
    for flag, value in (("--wheel", options.wheel), ("--package", options.package), ("--stack", options.stack)):
        if value is not None:
            words += [flag, str(value)]
    return [*words, "--env"] if options.env else words

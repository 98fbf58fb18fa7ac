"""``setup``: install a stack, or say that there is nothing to do."""

import json
import time
from dataclasses import asdict, dataclass

from sm120 import files
from sm120.console import Console, duration
from sm120.stack.environment import Environment, base_python, ensure_environment, look
from sm120.stack.spec import Stack, load_stack
from sm120.state import State


@dataclass(frozen=True, kw_only=True)
class Options:
    stack: str = "cpu"
    dry_run: bool = False


def setup(options: Options) -> None:
    console = Console.current()
    state = State.resolve()
    stack = load_stack(options.stack)
    if options.dry_run:
        _plan(stack, state, console)
        return
    started = time.monotonic()
    environment = ensure_environment(stack, state, console)
    seconds = time.monotonic() - started
    if environment.fresh:
        _show(environment, console)
        console.info(f"the stack {stack.name} is ready in {environment.lock.parent} ({duration(seconds)})")
    else:
        console.info(f"the stack {stack.name} is ready in {environment.lock.parent}: nothing to do ({seconds:.3f} s)")
    console.result(
        {
            "schema": 1,
            "stack": stack.name,
            "fresh": environment.fresh,
            "seconds": round(seconds, 3),
            "environment": str(environment.lock.parent),
            "python": str(environment.python),
            "lock": str(environment.lock),
            "fingerprint": environment.fingerprint,
        }
    )


def _show(environment: Environment, console: Console) -> None:
    content = json.loads(files.read_text(environment.lock))
    rows = [(d["name"], d["version"], d["sha256"][:16]) for d in content["distributions"]]
    console.table("installed", ("package", "version", "sha256"), rows)


def _plan(stack: Stack, state: State, console: Console) -> None:
    found, why = look(stack, state)
    folder = state.env(stack.name)
    plan: dict[str, object] = {
        "schema": 1,
        "stack": stack.name,
        "environment": str(folder),
        "install": found is None,
        "reason": why or "it is installed and whole",
        "python": str(base_python(stack)),
        "needed_bytes": stack.disk_bytes,
        "free_bytes": files.free_bytes(folder),
        "packages": stack.requirements(),
        "indexes": [asdict(index) for index in stack.indexes],
    }
    if found is not None:
        console.info(f"nothing to do: the stack {stack.name} is installed in {folder}")
    else:
        console.info(f"would install the stack {stack.name} into {folder} ({why})")
        console.info(f"  with {plan['python']}, needing {stack.disk_bytes} bytes of {plan['free_bytes']} free")
        for requirement in stack.requirements():
            console.info(f"  {requirement}")
        for index in stack.indexes:
            console.info(f"  {', '.join(index.packages)}: from {index.url} if pip's own configuration lacks it")
    console.result(plan)

"""Runs in the stack's Python: asks FlashInfer for its JIT modules, and builds one by FlashInfer's own means.

    python -B inside.py plan  '{"modules": [{"name": …, "ask": […], "arguments": […]}, …]}'
    python -B inside.py build '{"module": {…}, "remove": ["build.ninja", …], "record": {"name": …, "text": …}}'

Stands alone: the standard library, and what is imported by name below. What it finds it says in lines that begin with a
mark; all other lines are FlashInfer's, ninja's and the compilers'. No GPU is needed: nothing is loaded.
"""

import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

MARK = "sm120-flashinfer:"


class _Asked(BaseException):
    """Carries a JIT specification out of the function that was going to build and load it."""

    def __init__(self, spec: Any) -> None:
        super().__init__(spec)
        self.spec = spec


def main(what: str, text: str) -> int:
    request = json.loads(text)
    try:
        core = importlib.import_module("flashinfer.jit.core")
        package = importlib.import_module("flashinfer")
    except Exception as error:  # noqa: BLE001 - whatever a broken package raises is what the user is told
        _say("broken", error=_words(error))
        return 1
    _say("flashinfer", version=str(package.__version__))
    if what == "plan":
        for module in request["modules"]:
            _say("module", name=module["name"], **_described(core, module))
        return 0
    return _build(core, request)


def _described(core: Any, module: dict[str, Any]) -> dict[str, Any]:
    try:
        spec = _spec(core, module)
        if spec is None:
            return {"absent": f"there is no {' or '.join(module['ask'])}"}
        if module["when"] is not None and not _found(module["when"], default=True):
            return {"absent": f"this installation does without: {module['when']} is off"}
        if getattr(spec, "is_aot", False):
            return {"library": str(spec.aot_path), "packaged": True}
        if not hasattr(spec, "write_ninja"):
            return {"absent": "it is compiled when it runs, not by ninja"}
        ran: list[tuple[str, str]] = []
        _with_ninja(core, spec, lambda folder, file: ran.append((str(folder), str(file))))
        ((folder, file),) = ran
        return {"library": str(spec.jit_library_path), "folder": folder, "ninja": file, "units": len(spec.sources)}
    except Exception as error:  # noqa: BLE001 - one module that cannot be asked must not hide the others
        return {"error": _words(error)}


def _spec(core: Any, module: dict[str, Any]) -> Any:
    """What the function that the server calls would build; None where the version has no such function."""
    function = next((found for name in module["ask"] if (found := _found(name)) is not None), None)
    if function is None:
        return None
    own = core.JitSpec.build_and_load

    def caught(spec: Any) -> Any:
        raise _Asked(spec)

    core.JitSpec.build_and_load = caught
    try:
        function(*(_value(argument) for argument in module["arguments"]))
    except _Asked as asked:
        return asked.spec
    finally:
        core.JitSpec.build_and_load = own
    raise RuntimeError(f"{function.__name__} builds nothing")


def _found(name: str, default: Any = None) -> Any:
    place, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(place), attribute, default)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{place}.".startswith(f"{error.name}."):
            return default
        raise


def _value(argument: Any) -> Any:
    if isinstance(argument, str) and argument.startswith("torch."):
        return getattr(importlib.import_module("torch"), argument.removeprefix("torch."))
    return argument


def _with_ninja(core: Any, spec: Any, ninja: Callable[[Path, Path], Any]) -> None:
    """Lets FlashInfer do all that it does before it starts ninja, and ``ninja`` in its place."""
    own = core.run_ninja
    core.run_ninja = lambda folder, file, *_, **__: ninja(folder, file)
    try:
        spec.build(verbose=False, need_lock=True)
    finally:
        core.run_ninja = own


def _build(core: Any, request: dict[str, Any]) -> int:
    spec = _spec(core, request["module"])
    lock = core.FileLock(spec.lock_path, thread_local=False)
    try:
        lock.acquire(timeout=0)
    except TimeoutError:
        _say("waiting", lock=str(spec.lock_path))
        lock.acquire()
    # The lock is FlashInfer's own: a server that starts now waits for it, and so does a second build.
    try:
        for name in request["remove"]:
            _remove(Path(spec.build_dir) / name)
        Path(spec.build_dir).mkdir(parents=True, exist_ok=True)
        (Path(spec.build_dir) / request["record"]["name"]).write_text(request["record"]["text"], "utf-8")
        spec.build(verbose=True, need_lock=False)
    except Exception as error:  # noqa: BLE001 - ninja's words stand above; FlashInfer has none of its own to add
        _say("failed", error=_words(error))
        return 1
    finally:
        lock.release()
    again: list[str] = []
    _with_ninja(core, spec, lambda folder, file: again.append(_dry(folder, file)))
    _say("built", library=str(spec.jit_library_path), again=again[0])
    return 0


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _dry(folder: Path, file: Path) -> str:
    """What ninja would do at the server's start."""
    words = ["ninja", "-n", "-d", "explain", "-C", str(folder), "-f", str(file)]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if not line.startswith("ninja: Entering")]
    return "\n".join(lines[:5])[:2000]


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:2000]


def _say(what: str, **facts: Any) -> None:
    sys.stdout.write(f"\n{MARK}{what} {json.dumps(facts)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    if sys.path[0] == os.path.dirname(os.path.abspath(__file__)):  # noqa: PTH120, PTH100 - compared as Python wrote it
        del sys.path[0]  # this folder: its modules are not to be found by the stack's
    sys.exit(main(*sys.argv[1:]))

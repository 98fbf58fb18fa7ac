"""What would be built: FlashInfer is asked in a folder that is thrown away, and its cache only looked at."""

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from sm120 import errors, process
from sm120.build.flashinfer import ask, whole
from sm120.build.flashinfer.modules import Fault, Module
from sm120.build.flashinfer.target import Target, environment, workspace
from sm120.build.toolchain import Toolchain
from sm120.console import Console
from sm120.runs import Run
from sm120.stack.install.record import distributions

DISTRIBUTION = "flashinfer-python"


class State(StrEnum):
    BUILT = "built"
    TO_BUILD = "to build"
    PACKAGED = "in a package"  # of FlashInfer's makers, which the server takes before anything else
    ABSENT = "not used"  # by this version or installation


@dataclass(frozen=True, kw_only=True)
class Planned:
    module: Module
    target: Target
    state: State
    why: str = ""  # of the state
    library: Path | None = None
    folder: Path | None = None
    units: int = 0  # files to compile, when nothing is there
    remove: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = ()

    @property
    def name(self) -> str:
        return self.module.name


def version_in(toolchain: Toolchain) -> Version:
    """Raises UsageError when the stack has no FlashInfer."""
    text = dict(distributions(toolchain.site)).get(DISTRIBUTION)
    try:
        return Version(text or "")
    except InvalidVersion:
        raise errors.UsageError(
            f"the stack {toolchain.stack} has no FlashInfer",
            where=str(toolchain.site),
            remedy="take a stack that names flashinfer-python, as --stack stable does",
        ) from None


def compilers(toolchain: Toolchain) -> str:
    return f"nvcc {toolchain.nvcc}, {toolchain.cxx}"


def plan(
    toolchain: Toolchain, targets: Sequence[Target], modules: Sequence[Module], run: Run | None, console: Console
) -> tuple[Planned, ...]:
    """Module by module, for each target. Changes nothing in the cache.

    Raises UsageError without FlashInfer, BuildError when it cannot be imported or asked.
    """
    version_in(toolchain)
    base = workspace(toolchain.variables).expanduser().resolve()
    found: list[Planned] = []
    with tempfile.TemporaryDirectory(prefix="sm120-flashinfer-") as made:
        for number, aimed in enumerate(targets):
            elsewhere = Path(made).resolve() / str(number)
            elsewhere.mkdir()
            env = environment(toolchain.variables, aimed, elsewhere, jobs=1)
            log = run.log_path("flashinfer-plan") if run is not None else Path(made).resolve() / "plan.log"
            request = {"modules": [ask.as_request(module, aimed) for module in modules]}
            with console.step(f"asking FlashInfer for its modules for {aimed.listed}"):
                said, done = ask.inside_stack(toolchain, "plan", request, env=env, run=run, log=log)
            answers = {facts["name"]: facts for name, facts in said if name == "module"}
            version = next((facts["version"] for name, facts in said if name == "flashinfer"), "")
            if done.returncode or len(answers) != len(modules):
                raise ask.silent(done, log)
            found += [
                _planned(module, answers[module.name], toolchain, aimed, (elsewhere, base), Version(version))
                for module in modules
            ]
    return tuple(found)


def _planned(
    module: Module,
    answer: Mapping[str, Any],
    toolchain: Toolchain,
    aimed: Target,
    base: tuple[Path, Path],
    version: Version,
) -> Planned:
    faults = module.known_faults(version)
    if "error" in answer:
        raise errors.BuildError(
            f"FlashInfer {version} does not say what {module.name} is made of: {answer['error']}",
            where=f"the stack {toolchain.stack}",
            remedy="build the others: name them with --modules",
        )
    if "absent" in answer:
        return Planned(module=module, target=aimed, state=State.ABSENT, why=answer["absent"])
    library = base[1] / Path(answer["library"]).relative_to(base[0]) if "packaged" not in answer else None
    if library is None:
        return Planned(
            module=module,
            target=aimed,
            state=State.PACKAGED,
            library=Path(answer["library"]),
            faults=faults,
        )
    folder = base[1] / Path(answer["folder"]).relative_to(base[0])
    ninja_file = library.parent / Path(answer["ninja"]).name
    env = environment(toolchain.variables, aimed, base[1], jobs=1)
    verdict = whole.judge(
        library=library,
        planned=Path(answer["ninja"]),
        folder=library.parent,
        base=base,
        compilers=compilers(toolchain),
        ninja=partial(_would_do, folder, ninja_file, env),
    )
    return Planned(
        module=module,
        target=aimed,
        state=State.BUILT if verdict.whole else State.TO_BUILD,
        why=verdict.why,
        library=library,
        folder=library.parent,
        units=answer["units"],
        remove=verdict.remove,
        faults=faults,
    )


def _would_do(folder: Path, file: Path, env: Mapping[str, str]) -> str:
    """By the ninja that FlashInfer starts: others may keep their log in another format, and then all is made again."""
    ninja = shutil.which("ninja", path=env.get("PATH"))
    if ninja is None:
        raise errors.BuildError(
            "the stack has no ninja, which FlashInfer starts whenever it loads a module",
            remedy="add ninja to the stack's packages, then scripts/inv setup",
        )
    return "\n".join(process.run([ninja, "-n", "-C", str(folder), "-f", str(file)], env=env, timeout=300).tail)

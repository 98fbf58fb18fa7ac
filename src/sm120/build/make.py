"""From what was prepared to a wheel: dependencies, the build's own copy of the source, compilation."""

import hashlib
import shutil
from dataclasses import dataclass
from pathlib import Path

from sm120 import errors, files
from sm120.build import patches, wheel
from sm120.build.compile import Compiled, Job, compile_wheel, remember
from sm120.build.options import dotted
from sm120.build.prepare import DISK_BYTES, Prepared
from sm120.build.recipe import Recipe
from sm120.build.source import Checkout, check_out, copy, git_environment
from sm120.build.wheel import Built
from sm120.console import Console, size
from sm120.runs import Run
from sm120.state import State

_REQUIRED = ("common_ops",)  # the package imports nothing without it
_IDENTITY = "identity"  # in the build folder: of the recipe that cmake/ was made for


@dataclass(frozen=True, kw_only=True)
class Made:
    built: Built
    recipe: Recipe
    checkouts: tuple[Checkout, ...]
    compiled: Compiled | None  # None: the wheel was there already


def make_wheel(prepared: Prepared, state: State, run: Run, console: Console) -> Made:
    """The wheel of what was prepared; the one that is there when it is of the same recipe.

    Raises PatchError on a conflict, PreflightError (disk, network, a missing dependency), BuildError, BinaryError.
    """
    if prepared.applied.conflicts:
        raise patches.refusal(prepared.applied, prepared.pristine.root)
    stack = prepared.toolchain.stack
    folder = state.build(stack, prepared.component)
    waiting = f"another process builds {prepared.component} for the stack {stack}; waiting for it"
    with files.lock(folder.with_name(f"{folder.name}.lock"), waiting=waiting):
        with console.step("getting the dependencies"):
            checkouts = check_out(prepared.wanted, prepared.found, folder / "deps", state, run, console)
        recipe = recipe_of(prepared, checkouts)
        there = wheel.existing(state.kernels(stack), recipe.identity)
        if there is not None:
            return Made(built=there, recipe=recipe, checkouts=checkouts, compiled=None)
        return _compile(prepared, checkouts, recipe, folder, state, run, console)


def recipe_of(prepared: Prepared, checkouts: tuple[Checkout, ...]) -> Recipe:
    toolchain, pristine, applied = prepared.toolchain, prepared.pristine, prepared.applied
    return Recipe(
        component=prepared.component,
        content=pristine.content,
        commit=pristine.commit,
        dirty=pristine.dirty,
        series=applied.series,
        patches=applied.outcomes,
        changes=hashlib.sha256(applied.diff.encode("utf-8", "surrogateescape")).hexdigest(),
        dependencies={checkout.name: checkout.revision for checkout in checkouts},
        architectures=prepared.architectures,
        python=toolchain.python_version,
        torch=str(toolchain.torch),
        cuda=str(toolchain.cuda),
        nvcc=toolchain.nvcc,
        cxx=toolchain.cxx,
        cmake=str(toolchain.cmake_version),
    )


def _compile(
    prepared: Prepared,
    checkouts: tuple[Checkout, ...],
    recipe: Recipe,
    folder: Path,
    state: State,
    run: Run,
    console: Console,
) -> Made:
    _check_space(folder)
    pristine, applied, toolchain = prepared.pristine, prepared.applied, prepared.toolchain
    source = folder / "source"
    project = source / pristine.folder
    with console.step("making the build's own copy of the source, patched"):
        below = f"{pristine.folder}/" if pristine.folder else ""
        pyproject = applied.changes.get(f"{below}pyproject.toml")
        if pyproject is None:
            pyproject = (pristine.root / pristine.folder / "pyproject.toml").read_bytes()
        added = wheel.overlay(pyproject, recipe.tag, recipe.record())
        copy(pristine, source, {**applied.changes, **{f"{below}{path}": data for path, data in added.items()}})
        _forget_another(folder, recipe)
    job = Job(
        toolchain=toolchain,
        project=project,
        build=folder / "cmake",
        wheels=folder / "wheel",
        defines={f"FETCHCONTENT_SOURCE_DIR_{one.name.upper()}": str(one.path) for one in checkouts},
        environment={
            **git_environment(prepared.wanted.mirror),
            **{name: value.format(cuda=toolchain.cuda_home) for name, value in applied.environment.items()},
            # Without it torch's CMake files add the card that is here to every compilation, or else all that they know.
            "TORCH_CUDA_ARCH_LIST": ";".join(map(dotted, prepared.architectures)),
        },
        jobs=prepared.jobs,
        epoch=pristine.committed,
        required=_REQUIRED,
    )
    compiled = compile_wheel(job, run, console)
    if compiled.peak_gb_per_thread is not None:
        remember(state, f"{toolchain.stack}/{prepared.component}", compiled.peak_gb_per_thread)
    built = wheel.finish(compiled.wheel, state.kernels(toolchain.stack), recipe.tag, recipe.record())
    return Made(built=built, recipe=recipe, checkouts=checkouts, compiled=compiled)


def _forget_another(folder: Path, recipe: Recipe) -> None:
    """Objects of another recipe go: ninja does not see a compiler or a torch that changed. ccache keeps what it can."""
    mark = folder / _IDENTITY
    if mark.exists() and files.read_text(mark) == recipe.identity:
        return
    with files.writing(folder):
        for name in ("cmake", "wheel"):
            if (folder / name).exists():
                shutil.rmtree(folder / name)
    files.write_text_atomic(mark, recipe.identity)


def _check_space(folder: Path) -> None:
    free = files.free_bytes(folder)
    if free < DISK_BYTES and not (folder / "cmake").exists():
        raise errors.PreflightError(
            f"a build needs about {size(DISK_BYTES)} in {folder}, and {size(free)} are free",
            where=str(folder),
            remedy=f"free some space, or {files.MOVE_REMEDY}",
        )

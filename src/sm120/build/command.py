"""``build-kernels``: source → patches → plan → configure and compile → wheel → audit → install → proof."""

from dataclasses import asdict
from typing import TYPE_CHECKING

from sm120 import errors
from sm120.build import patches
from sm120.build.options import Options
from sm120.build.toolchain import find
from sm120.console import Console, duration, size
from sm120.runs import Run
from sm120.stack.install.environment import ensure_environment, look
from sm120.stack.install.record import Environment
from sm120.stack.selection import selected
from sm120.stack.spec import Stack, load_stack
from sm120.state import State

if TYPE_CHECKING:
    from sm120.build.audit import Audit
    from sm120.build.make import Made
    from sm120.build.prepare import Prepared

SCHEMA = 1
TASK = "build-kernels"


def build_kernels(options: Options) -> None:
    """Raises UsageError, PreflightError, PatchError (11), BuildError (12), BinaryError (13)."""
    options.check()
    console, state = Console.current(), State.resolve()
    environment = _environment(options, state, console)
    if options.dry_run or options.patches:
        _carry_out(options, environment, state, console, None)
        return
    run = Run.start(state, TASK, _argv(options))
    with run.failing():
        result = _carry_out(options, environment, state, console, run)
    run.write_json("result.json", result)
    run.finish(0, {"component": options.component, "stack": environment.name})


def _environment(options: Options, state: State, console: Console) -> Environment:
    name = options.stack or selected(state)
    if name is None:
        raise errors.UsageError(
            "no stack is set up yet: kernels are built against the torch of one",
            where=str(state.root),
            remedy="scripts/inv setup, or name one with --stack",
        )
    if options.dry_run or options.patches:
        found, why = look(name, state)
        if found is None:
            raise errors.UsageError(
                f"the stack {name} is not there ({why}): what a build does depends on its torch and its CUDA",
                where=str(state.root),
                remedy=f"scripts/inv setup --stack {name}",
            )
        return found
    return ensure_environment(name, state, console)


def _carry_out(
    options: Options, environment: Environment, state: State, console: Console, run: Run | None
) -> dict[str, object]:
    if options.component == "flashinfer":
        result = _flashinfer(options, environment, state, console, run)
    elif options.rollback:
        result = _rollback(options, environment, state, console, run)
    else:
        result = _sgl_kernel(options, environment, state, console, run)
    console.result(result)
    return result


def _sgl_kernel(
    options: Options, environment: Environment, state: State, console: Console, run: Run | None
) -> dict[str, object]:
    from sm120.build.prepare import prepare

    toolchain = find(environment)
    prepared = prepare(options, _stack(options, environment, state), toolchain, state, run, console)
    result = described(prepared, environment.name)
    if options.patches:
        _show_patches(prepared, console)
        console.result({**result, "diff": prepared.applied.diff})
    if prepared.applied.conflicts:
        raise patches.refusal(prepared.applied, prepared.pristine.root)
    if options.patches:
        return {**result, "diff": prepared.applied.diff}
    _show_plan(prepared, console)
    if run is None:
        return result
    return _build(options, prepared, result, environment, state, console, run)


def _stack(options: Options, environment: Environment, state: State) -> Stack | None:
    """The stack's file; None for an adopted interpreter."""
    return None if environment.adopted else load_stack(options.stack or selected(state) or environment.name)


def _build(
    options: Options,
    prepared: "Prepared",
    planned: dict[str, object],
    environment: Environment,
    state: State,
    console: Console,
    run: Run,
) -> dict[str, object]:
    """``planned``: what is said of the plan, to which the rest is added."""
    from sm120.build.audit import refuse
    from sm120.build.make import make_wheel

    made = make_wheel(prepared, state, run, console)
    _show_wheel(made, console)
    result: dict[str, object] = {
        **planned,
        "dependencies": [{"name": one.name, "how": one.how, "revision": one.revision} for one in made.checkouts],
        "wheel": {
            "path": str(made.built.path),
            "name": made.built.name,
            "version": made.built.version,
            "sha256": made.built.sha256,
            "reused": made.compiled is None,
        },
        "compiled": None if made.compiled is None else {**asdict(made.compiled), "wheel": None},
        "audit": None,
        "installed": None,
        "proved": None,
    }
    console.result(result)  # what there is, should the rest fail
    audit = _audit(made, prepared.architectures, environment, state, console)
    result["audit"] = audit.as_json()
    console.result(result)
    refuse(audit)
    if not options.install:
        console.info(f"not installed, as asked; to do it: scripts/inv {TASK} without --no-install")
        return result
    return {**result, **_install(made, environment, state, console, run)}


def _audit(
    made: "Made", architectures: tuple[str, ...], environment: Environment, state: State, console: Console
) -> "Audit":
    from sm120.build.audit import audit_built, show

    with console.step(f"auditing {made.built.path.name}"):
        audit = audit_built(made.built.path, environment, architectures, state.root / "cache" / "audit")
    show(audit, console)
    return audit


def _install(made: "Made", environment: Environment, state: State, console: Console, run: Run) -> dict[str, object]:
    from sm120.build.install import install
    from sm120.build.prove import prove_or_roll_back

    with console.step(f"installing {made.built.name} {made.built.version} into {environment.name}"):
        installed = install(made.built, environment, state, run, console)
    with console.step("proving it"):
        proof = prove_or_roll_back(made.built, environment, state, run, console)
    console.info(f"sgl_kernel: {proof.outcome}  {proof.detail}")
    return {"installed": asdict(installed), "proved": asdict(proof)}


def _rollback(
    options: Options, environment: Environment, state: State, console: Console, run: Run | None
) -> dict[str, object]:
    from sm120.build.install import rollback

    if run is None:
        raise errors.UsageError("--rollback has no dry run", remedy="leave --dry-run out")
    with console.step(f"going back in {environment.name}"):
        installed = rollback(environment, state, run, console)
    return {"schema": SCHEMA, "component": options.component, "stack": environment.name, "installed": asdict(installed)}


def _flashinfer(
    options: Options, environment: Environment, state: State, console: Console, run: Run | None
) -> dict[str, object]:
    from sm120.build.flashinfer import build_flashinfer
    from sm120.build.prepare import jobs_for

    jobs = jobs_for(options, environment.name, state)
    console.info(f"    {jobs.reason}")
    return build_flashinfer(
        environment=environment,
        architectures=options.architectures,
        jobs=jobs.jobs,
        only=options.modules,
        dry_run=options.dry_run,
        run=run,
        console=console,
    )


def described(prepared: "Prepared", stack: str) -> dict[str, object]:
    """What a build would do, for --json."""
    pristine, applied, jobs = prepared.pristine, prepared.applied, prepared.jobs
    from sm120.build.prepare import DISK_BYTES

    return {
        "schema": SCHEMA,
        "component": prepared.component,
        "stack": stack,
        "source": {
            "origin": pristine.origin,
            "commit": pristine.commit,
            "dirty": pristine.dirty,
            "content": pristine.content,
        },
        "patches": [outcome.as_json() for outcome in applied.outcomes],
        "dependencies": [
            {"name": one.name, "kind": one.kind, "url": one.url, "revision": one.revision, "where": one.place}
            for one in prepared.found
        ],
        "plan": {
            "jobs": jobs.jobs,
            "threads": jobs.threads,
            "reason": jobs.reason,
            "architectures": list(prepared.architectures),
            "targets_left_out": list(applied.left_out),
            "disk_mb": DISK_BYTES // 10**6,
            "ccache": None if prepared.toolchain.ccache is None else str(prepared.toolchain.ccache),
        },
    }


def _show_patches(prepared: "Prepared", console: Console) -> None:
    title = f"patches on {prepared.pristine.origin}"
    console.table(title, patches.COLUMNS, patches.rows(prepared.applied.outcomes))
    if prepared.applied.diff and not console.json:
        console.info(prepared.applied.diff.rstrip("\n"))


def _show_plan(prepared: "Prepared", console: Console) -> None:
    toolchain, pristine, applied = prepared.toolchain, prepared.pristine, prepared.applied
    from sm120.build.prepare import DISK_BYTES

    names = ", ".join(f"sm_{name}" for name in prepared.architectures)
    console.info(f"{prepared.component} for {names}, against torch {toolchain.torch} and CUDA {toolchain.nvcc}")
    console.info(f"    source: {pristine.origin}")
    console.table("", patches.COLUMNS[:3], [row[:3] for row in patches.rows(applied.outcomes)])
    console.table(
        "",
        ("dependency", "from", "revision"),
        [
            (one.name, one.url if one.kind != "cmake" else f"left to CMake: {one.reason}", one.revision or "")
            for one in prepared.found
        ],
    )
    if applied.left_out:
        console.info(f"    left out: {', '.join(applied.left_out)}")
    console.info(f"    {prepared.jobs.reason}")
    ccache = "ccache keeps what is compiled" if toolchain.ccache else "ccache would keep what is compiled: install it"
    console.info(f"    {ccache}; about {size(DISK_BYTES)} of disk")


def _show_wheel(made: "Made", console: Console) -> None:
    what = "the wheel of this very recipe is there already" if made.compiled is None else "built"
    console.info(f"{what}: {made.built.path} ({size(made.built.path.stat().st_size)}, sha256 {made.built.sha256})")
    if made.compiled is not None:
        slowest = ", ".join(f"{name} {duration(seconds)}" for name, seconds in made.compiled.slowest[:3])
        console.info(f"    {made.compiled.files} steps in {duration(made.compiled.seconds)}; slowest: {slowest}")


def _argv(options: Options) -> list[str]:
    words = [TASK, "--component", options.component, "--arch", ",".join(options.arch)]
    for flag, value in (("--source", options.source), ("--git-mirror", options.git_mirror), ("--stack", options.stack)):
        if value is not None:
            words += [flag, str(value)]
    for dependency in options.dependency:
        words += ["--dependency", dependency]
    flags = {"--no-install": not options.install, "--rollback": options.rollback}
    return [*words, *(flag for flag, given in flags.items() if given)]

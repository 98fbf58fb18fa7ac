"""The Invoke namespace: one thin function a task, no logic. What they do is in ``src/sm120``."""

from invoke.collection import Collection
from invoke.context import Context
from invoke.tasks import task

from sm120 import entry

HELP = {
    "json": "print the result as one JSON document on stdout, everything else on stderr",
    "verbose": "say more",
    "home": "the folder that .sm120 and runs live in (default: SM120_HOME, or else the checkout)",
    "dry_run": "print what would be done, and do nothing",
    "device": "where the cells run: cpu or cuda (default: what the machine has)",
    "stack": "the stack to use: a name in stacks/ or a TOML file",
}


def _help(*names: str, **own: str) -> dict[str, str]:
    return {
        name.strip("_").replace("_", "-"): text
        for name, text in {**{name: HELP[name] for name in names}, **own}.items()
    }


@task(
    auto_shortflags=False,
    help=_help(
        "stack",
        "home",
        "json",
        "verbose",
        links="also check the links between the GPUs: peer copies, all-reduce, the fastest setting that is right",
        facts="judge the facts in this file, saved on another machine, instead of this machine",
        save="write this machine's facts to this file, to be judged elsewhere",
    ),
)
def doctor(
    c: Context,
    links: bool = False,
    facts: str | None = None,
    save: str | None = None,
    stack: str | None = None,
    home: str | None = None,
    json: bool = False,
    verbose: bool = False,
) -> None:
    """Judge this machine: driver, cards, links, toolchains, memory, environments. Changes nothing."""
    entry.run(
        c,
        "sm120.host.command:doctor",
        links=links,
        facts=facts,
        save=save,
        stack=stack,
        home=home,
        json=json,
        verbose=verbose,
    )


@task(
    auto_shortflags=False,
    help=_help(
        "dry_run",
        "home",
        "json",
        "verbose",
        stack="a name in stacks/ or a TOML file (default: nightly with a card of compute capability 12.x, else cpu)",
        lock="resolve and write the lock, and install nothing; with a lock there, take what is newest now",
        mirror="also keep the lock and every wheel in this folder, so that --offline can rebuild the environment",
        offline="install from such a folder, without any network",
        adopt="register this Python, which has a stack installed already; it is proven and never changed",
    ),
)
def setup(
    c: Context,
    stack: str | None = None,
    lock: bool = False,
    mirror: str | None = None,
    offline: str | None = None,
    adopt: str | None = None,
    dry_run: bool = False,
    home: str | None = None,
    json: bool = False,
    verbose: bool = False,
) -> None:
    """Resolve a stack, lock it, install it into an environment of its own with a CUDA toolkit, and prove it."""
    entry.run(
        c,
        "sm120.stack.command:setup",
        stack=stack,
        lock=lock,
        mirror=mirror,
        offline=offline,
        adopt=adopt,
        dry_run=dry_run,
        home=home,
        json=json,
        verbose=verbose,
    )


@task(
    auto_shortflags=False,
    help=_help(
        "stack",
        "dry_run",
        "home",
        "json",
        "verbose",
        source="a checkout of SGLang, or its kernel folder alone; never modified (default: the stack's repository)",
        git_mirror="a folder of bare git mirrors and archives: nothing is then taken from the network",
        dependency="folders that stand for dependencies: NAME=DIR, separated by commas",
        arch="what to compile for, separated by commas: 12.0a, 12.0f, 12.1a (default: 12.0a)",
        jobs="compilers at once (default: by cores and memory)",
        component="sgl-kernel, or flashinfer: the modules that the validated backends need, ahead of time",
        modules="with --component flashinfer: these modules only, separated by commas",
        patches="show each patch's state on the source and the resulting diff, and build nothing",
        rollback="go back to what was installed before",
        install="--no-install: build the wheel, and leave the environment alone",
    ),
)
def build_kernels(
    c: Context,
    source: str | None = None,
    git_mirror: str | None = None,
    dependency: str | None = None,
    arch: str | None = None,
    jobs: str | None = None,
    component: str | None = None,
    modules: str | None = None,
    patches: bool = False,
    rollback: bool = False,
    install: bool = True,
    stack: str | None = None,
    dry_run: bool = False,
    home: str | None = None,
    json: bool = False,
    verbose: bool = False,
) -> None:
    """Build sgl-kernel for SM120 from source, install it and prove it."""
    entry.run(
        c,
        "sm120.build.command:build_kernels",
        source=source,
        git_mirror=git_mirror,
        dependency=dependency,
        arch=arch,
        jobs=jobs,
        component=component,
        modules=modules,
        patches=patches,
        rollback=rollback,
        install=install,
        stack=stack,
        dry_run=dry_run,
        home=home,
        json=json,
        verbose=verbose,
    )


@task(
    auto_shortflags=False,
    help=_help(
        "stack",
        "home",
        "json",
        "verbose",
        wheel="a wheel file",
        package="a package: NAME==VERSION is fetched from the package index, NAME alone is the installed one",
        env="the kernel libraries of the stack's environment",
        for_="compute capabilities that it should run on, separated by commas (default: 12.0)",
    ),
)
def audit(
    c: Context,
    wheel: str | None = None,
    package: str | None = None,
    env: bool = False,
    for_: str | None = None,
    stack: str | None = None,
    home: str | None = None,
    json: bool = False,
    verbose: bool = False,
) -> None:
    """Say what a binary can run on: architectures, FP4 instructions, CUDA, torch symbols, operators."""
    entry.run(
        c,
        "sm120.build.audit.command:audit",
        wheel=wheel,
        package=package,
        env=env,
        for_=for_,
        stack=stack,
        home=home,
        json=json,
        verbose=verbose,
    )


@task(
    auto_shortflags=False,
    help=_help(
        "stack",
        "device",
        "dry_run",
        "home",
        "json",
        "verbose",
        model="a checkpoint folder, a config.json, or a preset's name",
        tp="tensor-parallel ranks that the model is cut into",
        quick="fewer cases",
        full="all cases",
        self_test="inject every known fault and see that the judge catches it",
        seeds="number of seeds for --self-test",
        seed="the first seed",
        only="patterns of cell names to run, separated by commas",
        moe_backends="MoE backends to check, separated by commas",
        fp4_backends="FP4 GEMM backends to check, separated by commas",
        require_servable="fail unless a pair passed that a server on this machine can use",
        resume="go on with a run that was interrupted: 'last' or its folder",
        list="show the backends, whether each can be used here and why not, and run nothing",
    ),
)
def validate_backends(
    c: Context,
    model: str | None = None,
    tp: str | None = None,
    quick: bool = False,
    full: bool = False,
    self_test: bool = False,
    seeds: str | None = None,
    seed: str | None = None,
    only: str | None = None,
    moe_backends: str | None = None,
    fp4_backends: str | None = None,
    stack: str | None = None,
    require_servable: bool = False,
    resume: str | None = None,
    list: bool = False,
    device: str | None = None,
    dry_run: bool = False,
    home: str | None = None,
    json: bool = False,
    verbose: bool = False,
) -> None:
    """Check every backend's numbers on this machine, print the grid, write the gate."""
    entry.run(
        c,
        "sm120.matrix.command:validate_backends",
        model=model,
        tp=tp,
        quick=quick,
        full=full,
        self_test=self_test,
        seeds=seeds,
        seed=seed,
        only=only,
        moe_backends=moe_backends,
        fp4_backends=fp4_backends,
        stack=stack,
        require_servable=require_servable,
        resume=resume,
        list=list,
        device=device,
        dry_run=dry_run,
        home=home,
        json=json,
        verbose=verbose,
    )


@task(
    name="test",
    auto_shortflags=False,
    help=_help(
        "home",
        "json",
        "verbose",
        slow="run the tests marked slow and network too",
        only="parts to run, separated by commas: lint, types, toolkit, cells, judge",
        k="only tests whose names match, as pytest's -k",
    ),
)
def dev_test(
    c: Context,
    slow: bool = False,
    only: str | None = None,
    k: str | None = None,
    home: str | None = None,
    json: bool = False,
    verbose: bool = False,
) -> None:
    """Run lint, types and all tests; each part runs even when another fails."""
    entry.run(c, "sm120.dev.command:test", slow=slow, only=only, k=k, home=home, json=json, verbose=verbose)


@task(name="lint", auto_shortflags=False, help=_help("json", "verbose"))
def dev_lint(c: Context, json: bool = False, verbose: bool = False) -> None:
    """Check style, formatting, imports between the packages, and that no file names a package host."""
    entry.run(c, "sm120.dev.command:lint", json=json, verbose=verbose)


@task(name="types", auto_shortflags=False, help=_help("home", "json", "verbose"))
def dev_types(c: Context, home: str | None = None, json: bool = False, verbose: bool = False) -> None:
    """Check types: the toolkit's, and the cells' with the CPU stack's torch."""
    entry.run(c, "sm120.dev.command:types", home=home, json=json, verbose=verbose)


@task(name="format", auto_shortflags=False, help=_help("json", "verbose"))
def dev_format(c: Context, json: bool = False, verbose: bool = False) -> None:
    """Format all Python files, and mend what ruff can mend safely."""
    entry.run(c, "sm120.dev.command:reformat", json=json, verbose=verbose)


@task(
    name="bench",
    auto_shortflags=False,
    help=_help("home", "json", "verbose", name="which benchmark: matrix, setup or build"),
)
def dev_bench(c: Context, name: str, home: str | None = None, json: bool = False, verbose: bool = False) -> None:
    """Measure the toolkit itself: ``dev.bench matrix``, ``dev.bench setup``, ``dev.bench build``."""
    entry.run(c, "sm120.dev.bench:bench", name=name, home=home, json=json, verbose=verbose)


@task(
    name="patches",
    auto_shortflags=False,
    help=_help(
        "json",
        "verbose",
        repository="a git repository that holds SGLang's history; nothing is checked out",
        since="versions of the build files since this date (default: 2025-09-01)",
    ),
)
def dev_patches(
    c: Context, repository: str | None = None, since: str | None = None, json: bool = False, verbose: bool = False
) -> None:
    """Try the patches on every version of the build files in a repository's history."""
    entry.run(c, "sm120.dev.patches:patches", repository=repository, since=since, json=json, verbose=verbose)


dev = Collection("dev", dev_test, dev_lint, dev_types, dev_format, dev_bench, dev_patches)
namespace = Collection(doctor, setup, build_kernels, audit, validate_backends, dev)
namespace.add_task(dev_test, name="test")

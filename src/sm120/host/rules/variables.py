"""Environment variables that change what is loaded or which kernels run, and what could not be read at all."""

from collections.abc import Iterator

from sm120.host.facts import Environment, Facts
from sm120.host.findings import Finding, Severity
from sm120.host.rules.reading import grouped, is_set, listed, parsed, sm12x, version_of


def preload(facts: Facts) -> Iterator[Finding]:
    """Libraries that are put before all others (ld.so(8))."""
    value = facts.variables.get("LD_PRELOAD")
    if value:
        yield Finding(
            id="ld-preload",
            severity=Severity.NOTE,
            what=f"LD_PRELOAD puts {value} before every other library.",
            read=(f"LD_PRELOAD={value}: environment",),
            why="It also goes before the environment's CUDA libraries and allocator, in every program.",
            cure="unset LD_PRELOAD",
        )


def python_path(facts: Facts) -> Iterator[Finding]:
    """Folders that Python searches before an environment's own packages."""
    found = [f"{name}={value}" for name in ("PYTHONPATH", "PYTHONHOME") if (value := facts.variables.get(name))]
    if found:
        yield Finding(
            id="python-path",
            severity=Severity.NOTE,
            what=f"Python is told {listed(found)}.",
            read=tuple(f"{setting}: environment" for setting in found),
            why="A package there goes before the environment's own of the same name; what runs is not what was proven.",
            cure="unset PYTHONPATH PYTHONHOME",
        )


def deepgemm(facts: Facts) -> Iterator[Finding]:
    """DeepGEMM has no kernels for 12.x in older sets and ends in “Unknown recipe” (sglang #25877, vllm #43477).

    SGLang's wheels, deep_gemm_wrapper/configurer.py: 12.0 is left out or probed since 0.5.13, 12.1 since 0.5.22.
    """
    name = "SGLANG_ENABLE_JIT_DEEPGEMM"
    value = facts.variables.get(name)
    if value is not None and not is_set(value):
        return
    for environment in facts.environments:
        sglang = parsed(version_of(environment, "sglang"))
        if sglang is None or not _holds_deep_gemm(environment):
            continue
        exposed = [
            gpu
            for gpu in sm12x(facts)
            if sglang.release < ((0, 5, 13) if gpu.compute_capability == (12, 0) else (0, 5, 22))
        ]
        if exposed:
            cards = grouped(exposed)
            yield Finding(
                id="deepgemm",
                severity=Severity.WARN,
                what=f"SGLang {sglang} in environment {environment.stack} uses DeepGEMM on {cards}, which it has no "
                "kernels for.",
                read=(
                    f"sglang {sglang}: {environment.site or environment.python}",
                    f"{name} {value or 'not set, which means 1'}: environment",
                    f"{cards}: NVML",
                ),
                why="Block-quantised FP8 layers end in “Unknown recipe” or “Unsupported architecture”.",
                cure=f"export {name}=0",
            )


def _holds_deep_gemm(environment: Environment) -> bool:
    """It is a package of its own since 2026-05, and came inside the kernel package before."""
    if any(version_of(environment, name) for name in ("sgl-deep-gemm", "deep-gemm", "sgl-kernel")):
        return True
    kernel = parsed(version_of(environment, "sglang-kernel"))
    return kernel is not None and kernel.release < (0, 4, 3)


def unread(facts: Facts) -> Iterator[Finding]:
    """Probes that failed: an unknown is not a pass."""
    if facts.unread:
        yield Finding(
            id="facts-unread",
            severity=Severity.NOTE,
            what=f"Part of this machine could not be read: {listed(facts.unread)}.",
            read=facts.unread[:8],
            why="Rules that need it had nothing to judge, which is not the same as a pass.",
            cure=None,
        )

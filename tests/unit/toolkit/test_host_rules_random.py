"""Whatever a facts file says, every rule gives its verdict."""

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any

from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tests.unit.toolkit import host_snapshots as snapshots

from sm120.host.facts import Facts
from sm120.host.findings import Finding, Severity
from sm120.host.rules import RULES, judge

# Words that rules look for, and words that look like them.
WORDS = st.sampled_from(
    (
        *(
            "",
            "0",
            "1",
            "-1",
            "a.b",
            "²",
            "None",
            "13.0",
            "2.42",
            "2.14.1+cu130",
            "0.6.16+cu129",
            "1!2.0.dev0+x",
            "0.5.9",
        ),
        *("torch", "sglang", "flashinfer-python", "flashinfer-jit-cache", "triton", "cuda-python", "sgl-kernel"),
        *("nvidia-cutlass-dsl-libs-base", "nvidia-cutlass-dsl-libs-cu13", "torch==2.9.1; bad", "sgl-kernel===x", "]["),
        *(
            "libcudart.so.12",
            "libcudart.so.",
            "libnvrtc.so.999",
            "libcuda.so.1",
            "sm_120a",
            "sm_",
            "compute_90",
            "sm_1200",
        ),
        *(
            "CUDA_HOME",
            "PATH",
            "LD_LIBRARY_PATH",
            "system",
            "home:stable",
            "wheels:stable",
            "state",
            "temporary",
            "triton",
        ),
        *("nfs4", "on", "docker", "microsoft", "open", "proprietary", "version mismatch", "hw_slowdown", "ok"),
        *(
            "GPU-",
            "MIG-1",
            "0,1",
            "9.0a 12.0f",
            "12.0a;12.1a",
            "expandable_segments:True",
            "g++",
            "cmake",
            "/usr/local/cuda",
        ),
        *("a_torch214.so", "x_cu13.so", "libcudart.so.13.0"),
    )
)
TEXT = WORDS | st.text(max_size=8)
VARIABLES = st.sampled_from(
    (
        *("CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "LD_LIBRARY_PATH", "LD_PRELOAD"),
        *("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_P2P_LEVEL", "PYTORCH_CUDA_ALLOC_CONF", "PYTHONPATH"),
        *("FLASHINFER_CUDA_ARCH_LIST", "FLASHINFER_DISABLE_VERSION_CHECK", "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK"),
        *("SGLANG_ENABLE_JIT_DEEPGEMM", "TRITON_PTXAS_PATH", "torch", "flashinfer-cubin", "nofile", "memlock"),
    )
)
NUMBERS = st.sampled_from((-1, 0, 1, 2, 8, 9, 12, 13, 16, 580, 2**31, 2**62)) | st.integers(-(2**62), 2**62)
SMALL = st.sampled_from((-3, 0, 1, 6, 8, 9, 10, 12, 13, 14, 2**40))


def of(hint: Any) -> st.SearchStrategy[Any]:
    """Any value of a field's type."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return st.none() | st.one_of(*(of(arg) for arg in args if arg is not types.NoneType))
    if origin is tuple:
        if args[-1] is Ellipsis:
            return st.lists(of(args[0]), max_size=3).map(tuple)
        return st.tuples(*(SMALL for _ in args))
    if origin is Mapping:
        return st.dictionaries(VARIABLES | TEXT, of(args[1]), max_size=4)
    if dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        fields = {field.name: of(hints[field.name]) for field in dataclasses.fields(hint)}
        return st.fixed_dictionaries(fields).map(lambda values: typing.cast("type[Any]", hint)(**values))
    plain = {
        str: TEXT,
        int: NUMBERS,
        bool: st.booleans(),
        float: st.floats(allow_nan=False, allow_infinity=False) | st.just(0.0),
    }
    return plain[hint]


RANDOM = of(Facts)
# Facts are too large to be shrunk in reasonable time, and the finding rule-failed names the rule and the error anyway.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)


@st.composite
def damaged(draw: st.DrawFn) -> Facts:
    """A snapshot in which a few values, at any depth, are any other of their type."""
    value: Any = snapshots.facts_of(draw(st.sampled_from(snapshots.NAMES)))
    for _ in range(draw(st.integers(1, 4))):
        value = change(draw, value)
    assert isinstance(value, Facts)
    return value


def change(draw: st.DrawFn, value: Any) -> Any:
    hints = typing.get_type_hints(type(value))
    name = draw(st.sampled_from([field.name for field in dataclasses.fields(value)]))
    old = getattr(value, name)
    if dataclasses.is_dataclass(old) and draw(st.booleans()):
        new = change(draw, old)
    elif isinstance(old, tuple) and old and dataclasses.is_dataclass(old[0]) and draw(st.booleans()):
        place = draw(st.integers(0, len(old) - 1))
        new = (*old[:place], change(draw, old[place]), *old[place + 1 :])
    else:
        new = draw(of(hints[name]))
    return dataclasses.replace(value, **{name: new})


def check(facts: Facts) -> tuple[Finding, ...]:
    findings = judge(facts)
    for finding in findings:
        assert finding.id in RULES, finding
        assert finding.what
        assert finding.read
        assert finding.why
    order = [list(Severity).index(finding.severity) for finding in findings]
    assert order == sorted(order)
    return findings


@settings(max_examples=50, deadline=None, phases=PHASES)
@given(RANDOM)
def test_judges_any_facts(facts: Facts) -> None:
    check(facts)


@settings(max_examples=150, deadline=None, phases=PHASES)
@given(damaged())
def test_judges_damaged_snapshots(facts: Facts) -> None:
    check(facts)


@settings(max_examples=50, deadline=None, phases=PHASES)
@given(damaged(), st.randoms(use_true_random=False))
def test_order_of_cards_never_matters(facts: Facts, shuffler: Any) -> None:
    gpus = [dataclasses.replace(gpu, index=place) for place, gpu in enumerate(facts.gpus)]
    shuffled = list(gpus)
    shuffler.shuffle(shuffled)
    one, other = (dataclasses.replace(facts, gpus=tuple(order)) for order in (gpus, shuffled))
    assert judge(one) == judge(other)

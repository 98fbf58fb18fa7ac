"""Devices that a build is for, and what the audit refuses in it."""

from dataclasses import replace

import pytest
from tests.unit.toolkit.build.audits_made import SM90A, SM120A, SM120F, audit, library

from sm120 import errors
from sm120.build.audit import Arch, Capability, LibraryFacts, refuse, refuse_without_fp4
from sm120.build.audit.step import capabilities
from sm120.build.patches.outcome import ARCHITECTURES


@pytest.mark.parametrize(
    ("architectures", "devices"),
    [
        (("120a",), ((12, 0),)),
        (("120f",), ((12, 0), (12, 1))),
        (("121a",), ((12, 1),)),
        (("120a", "121a"), ((12, 0), (12, 1))),
    ],
)
def test_what_is_built_must_run_where_it_is_meant_to(
    architectures: tuple[str, ...], devices: tuple[Capability, ...]
) -> None:
    assert capabilities(architectures) == devices


def test_every_architecture_that_can_be_asked_for_is_known() -> None:
    assert all(capabilities([name]) for name in ARCHITECTURES)


def test_what_runs_is_not_refused() -> None:
    refuse(audit(library("a.so", SM120F)))


def test_the_worst_is_said_and_the_others_counted() -> None:
    with pytest.raises(errors.BinaryError, match=r"^s: nothing of p runs on 12\.0, and 1 more$"):
        refuse(audit(library("a.so", SM90A)))


def test_a_wheel_without_code_is_not_taken_for_a_good_one() -> None:
    with pytest.raises(errors.NothingChecked, match="none of its 1 libraries holds code for GPUs"):
        refuse(audit(library("a.so")))
    with pytest.raises(errors.NothingChecked, match="it has no library"):
        refuse(audit())


@pytest.mark.parametrize("omma", [None, {}, {SM120A: 0}, {SM90A: 5}])
def test_a_module_for_fp4_must_hold_its_instructions(omma: dict[Arch, int] | None) -> None:
    facts: LibraryFacts = replace(library("gemm.so", SM120A), omma=omma)
    with pytest.raises(errors.BinaryError, match=r"gemm\.so holds no FP4 instruction for 12\.0"):
        refuse_without_fp4(audit(facts, on=[(12, 0)]))


def test_a_module_with_them_passes() -> None:
    refuse_without_fp4(audit(replace(library("gemm.so", SM120A), omma={SM120A: 3}), on=[(12, 0)]))

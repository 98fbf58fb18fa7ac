"""What is refused, warned of and noted, from facts alone."""

import json
import platform
from dataclasses import replace

from tests.unit.toolkit.build.audits_made import SM90A, SM120A, SM120F, audit, library

from sm120.build.audit.findings import operators
from sm120.build.audit.model import Arch, Audit, Finding, Level, LibraryFacts, Operators
from sm120.build.audit.operators import Calls


def levels(done: Audit) -> list[Level]:
    return [finding.level for finding in done.findings]


def only(done: Audit) -> Finding:
    (finding,) = done.findings
    return finding


def test_a_library_for_both_is_good() -> None:
    done = audit(library("a.so", SM120F))
    assert done.good
    assert done.findings == ()


def test_nothing_runs_is_refused_for_that_device_alone() -> None:
    done = audit(library("a.so", SM120A), library("b.so", SM90A))
    refused, warned = done.findings
    assert (refused.level, refused.text) == (Level.REFUSE, "nothing of p runs on 12.1")
    assert refused.evidence == "a.so: sm_120a; b.so: sm_90a"
    assert refused.remedy is not None
    assert "scripts/inv" in refused.remedy
    assert (warned.level, warned.library, warned.text) == (Level.WARN, "b.so", "b.so does not run on 12.0")
    assert not done.good


def test_a_library_with_fp4_that_does_not_run_is_refused_though_others_run() -> None:
    helper, kernels = library("a.so", Arch(9, 0), kind="ptx"), library("b.so", SM120A)
    assert levels(audit(helper, kernels, on=[(12, 1)])) == [Level.WARN, Level.WARN]
    done = audit(helper, replace(kernels, operators=("fp4_gemm",)), on=[(12, 1)])
    (refused,) = done.refused
    assert refused.text == "b.so does not run on 12.1, and FP4 products are in it"
    assert refused.evidence == "fp4_gemm; sm_120a"


def test_the_same_file_under_two_names_is_spoken_of_once() -> None:
    one = replace(library("a.so.1", SM90A), sha256="1" * 64)
    done = audit(one, replace(one, path="a.so.2"), library("c.so", SM120A), on=[(12, 0)])
    assert only(done).library == "a.so.1"


def test_packages_are_judged_apart() -> None:
    """An environment whose FlashInfer runs is not good when its sgl-kernel does not."""
    done = audit(library("a.so", SM120A), replace(library("b.so", SM90A), package="q"), on=[(12, 0)])
    assert [finding.text for finding in done.refused] == ["nothing of q runs on 12.0"]


def test_what_is_shown_as_facts_only_is_never_refused() -> None:
    torch = replace(library("torch.so", SM90A), judged=False, cuda_major=12, problem=None)
    assert audit(torch, on=[(12, 0)]).findings == ()
    assert not audit(torch, on=[(12, 0)]).good, "nothing was judged"
    assert audit(torch, library("a.so", SM120A), on=[(12, 0)]).good


def test_a_twin_that_is_not_loaded_saves_nothing_and_harms_nothing() -> None:
    sm90, sm100 = library("k/sm90/common_ops.so", SM120A), library("k/sm100/common_ops.so", SM90A)
    assert "nothing of p runs on 12.0" in [finding.text for finding in audit(sm90, sm100, on=[(12, 0)]).refused]
    swapped = audit(replace(sm90, codes=sm100.codes), replace(sm100, codes=sm90.codes), on=[(12, 0)])
    assert swapped.good
    assert only(swapped).text == "k/sm90/common_ops.so is not loaded on 12.0: its package loads its twin there"


def test_another_cuda_is_refused_once() -> None:
    old = replace(library("a.so", SM120F), cuda_major=12, needed=("libcudart.so.12", "libc10.so"))
    done = audit(old, replace(old, path="b.so", unresolved=("libcudart.so.12",)))
    assert only(done).text == "p is built for CUDA 12, and the stack has CUDA 13"
    assert only(done).evidence == "a.so needs libcudart.so.12; b.so needs libcudart.so.12"
    assert only(audit(old)).text == "a.so is built for CUDA 12, and the stack has CUDA 13"
    assert audit(old, cuda=None).good, "there is no CUDA to compare with"
    assert audit(old, cuda=12).good


def test_missing_cuda_libraries_are_a_warning() -> None:
    done = audit(replace(library("a.so", SM120F), unresolved=("libcublas.so.13",)))
    assert done.good
    assert only(done).text == "a.so needs CUDA libraries that the stack does not have: libcublas.so.13"


def test_another_torch_is_refused_once() -> None:
    alien = replace(library("a.so", SM120F), undefined_torch=("_ZN3c101fEv", "_ZN3c101gEv", "_ZN3c101hEv"))
    done = audit(alien, replace(alien, path="b.so"))
    assert only(done).level is Level.REFUSE
    assert only(done).text.startswith("p is built against another torch than the stack's")
    assert "a.so: _ZN3c101fEv, _ZN3c101gEv and 1 more" in only(done).evidence


def test_fp4_without_its_instruction_is_refused() -> None:
    bound = replace(library("a.so", SM120A), operators=("cutlass_scaled_fp4_mm",), omma={SM120A: 0})
    done = audit(bound, on=[(12, 0)])
    assert only(done).level is Level.REFUSE
    assert only(done).text.startswith("a.so is not usable for FP4 on 12.0")
    assert "cutlass_scaled_fp4_mm" in only(done).evidence
    assert audit(replace(bound, omma={SM120A: 1}), on=[(12, 0)]).findings == ()
    assert audit(replace(bound, operators=("scaled_fp4_quant",)), on=[(12, 0)]).findings == ()


def test_fp4_that_nobody_looked_for_is_a_warning() -> None:
    done = audit(replace(library("a.so", SM120A), operators=("fp4_gemm",)), on=[(12, 0)])
    assert only(done).level is Level.WARN
    assert "was not seen" in only(done).text


def test_ptx_only_is_a_warning_and_for_fp4_a_refusal() -> None:
    ptx = library("a.so", Arch(9, 0), kind="ptx")
    assert levels(audit(ptx, on=[(12, 0)])) == [Level.WARN]
    assert "has only PTX" in only(audit(ptx, on=[(12, 0)])).text
    assert levels(audit(replace(ptx, operators=("fp4_gemm",)), on=[(12, 0)])) == [Level.REFUSE]


def test_parts_without_code_are_a_warning() -> None:
    units: dict[tuple[tuple[Arch, str], ...], int] = {((SM120A, "cubin"),): 1, ((SM90A, "cubin"),): 2}
    done = audit(replace(library("a.so", SM90A, SM120A), units=units), on=[(12, 0)])
    assert "in 1 of its 3 parts" in only(done).text


def test_a_library_that_cannot_be_judged_is_refused() -> None:
    done = audit(
        LibraryFacts(path="a.so", package="p", problem="cuobjdump cannot read it (exit code 1)", tail=("fatal",))
    )
    assert only(done).level is Level.REFUSE
    assert only(done).evidence == "fatal"
    assert not done.good


def test_another_machine_is_a_warning() -> None:
    done = audit(replace(library("a.so", SM120F), machine="other"))
    assert only(done).text == f"a.so is for other, and this machine is {platform.machine()}"


def test_nothing_with_code_is_not_good() -> None:
    assert not audit(library("a.so")).good
    assert not audit().good


def test_what_was_not_compared_is_said() -> None:
    done = audit(library("a.so", SM120F), compared="the stack has no torch with CUDA")
    assert (only(done).level, only(done).evidence) == (Level.NOTE, "the stack has no torch with CUDA")


def test_the_worst_comes_first() -> None:
    broken = LibraryFacts(path="z.so", package="p", problem="empty")
    done = audit(library("a.so", SM120F), library("b.so", SM90A), broken, compared="no torch")
    assert levels(done) == sorted(levels(done), key=list(Level).index)
    assert {*levels(done)} == {*Level}


def test_operators_missing_left_out_and_extra() -> None:
    defines = replace(library("a.so", SM120A), operators=("rmsnorm", "spare"), named=frozenset({"dispose"}))
    calls = Calls(
        files={
            ("sgl_kernel", "rmsnorm"): "k/norm.py",
            ("sgl_kernel", "dispose"): "k/all.py",
            ("sgl_kernel", "fwd"): "k/flash.py",
            ("sgl_kernel", "lost"): "k/gemm.py",
            ("aten", "add"): "k/norm.py",
        },
        stood_in=frozenset({"fwd"}),
    )
    bound = operators([defines], calls)
    assert bound == Operators(missing={"lost": "k/gemm.py"}, left_out=("fwd",), extra=("spare",))
    left, missing = audit(library("a.so", SM120F), bound=bound).findings
    assert (left.level, left.evidence) == (Level.NOTE, "fwd")
    assert (missing.level, missing.evidence) == (Level.NOTE, "lost, in k/gemm.py")


def test_the_document_holds_everything_and_is_json() -> None:
    counted = replace(library("a.so", SM120A), operators=("fp4_gemm",), omma={SM120A: 640})
    document = audit(counted).as_json()
    assert json.loads(json.dumps(document)) == document
    assert document["good"] is False
    libraries = document["libraries"]
    assert isinstance(libraries, list)
    (one,) = libraries
    assert one["name"] == "a.so"
    assert one["cubins"] == ["120a"]
    assert one["omma"] == 640
    assert one["omma_by_architecture"] == {"120a": 640}
    assert one["verdicts"]["12.0"] == {
        "runs": "a",
        "fp4": "native",
        "reason": "sm_120a; 640 OMMA",
        "covered": None,
        "loaded": True,
    }
    assert one["verdicts"]["12.1"]["runs"] == "no"

"""What a patch of kind "rule" can name. A rule reads the tree and answers with a verdict; it writes nothing."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType

from sm120.build.patches.outcome import Context, Verdict
from sm120.build.patches.rules import (
    cmake_policy_minimum,
    compile_threads,
    cuda13_cccl_include,
    cxx_standard,
    guard_cmake_policies,
    sm120_only,
)
from sm120.build.patches.rules.parameters import Parameter, Parameters
from sm120.build.patches.tree import Tree


@dataclass(frozen=True, kw_only=True)
class Rule:
    judge: Callable[[Tree, Context, Parameters], Verdict]
    parameters: Mapping[str, Parameter]  # all of them must be given


def _rule(module: ModuleType) -> Rule:
    return Rule(judge=module.judge, parameters=module.PARAMETERS)


RULES: dict[str, Rule] = {
    module.__name__.rpartition(".")[2].replace("_", "-"): _rule(module)
    for module in (
        guard_cmake_policies,
        cuda13_cccl_include,
        cmake_policy_minimum,
        sm120_only,
        cxx_standard,
        compile_threads,
    )
}

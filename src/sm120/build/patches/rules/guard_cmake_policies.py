"""Every ``cmake_policy(SET CMPnnnn …)`` outside an ``if(POLICY CMPnnnn)`` gets one."""

import itertools

from sm120.build.patches.language import Branch, Command
from sm120.build.patches.outcome import Context, State, Verdict, not_needed, upstream
from sm120.build.patches.rules.parameters import Parameter, Parameters
from sm120.build.patches.source import BuildFile, Edit
from sm120.build.patches.tree import Tree

PARAMETERS: dict[str, Parameter] = {}
MARK = "# sm120: guard-cmake-policies"


def judge(tree: Tree, context: Context, parameters: Parameters) -> Verdict:  # noqa: ARG001 - the form of a rule
    edits: list[Edit] = []
    where: list[str] = []
    policies: list[str] = []
    guarded: list[str] = []
    for file in tree.build_files():
        for command in file.named("cmake_policy"):
            policy = _policy(command)
            if policy is None:
                continue
            if any(_asks(branch, policy) for branch in command.inside):
                guarded.append(file.where(command.start))
                continue
            policies.append(policy)
            where.append(file.where(command.start))
            edits += _guard(file, command, policy)
    if edits:
        names = ", ".join(dict.fromkeys(policies))
        reason = f"{names}: a CMake that does not know the policy stops with an error; set only where it is known"
        return Verdict(state=State.PENDING, reason=reason, where=tuple(where), edits=tuple(edits))
    if guarded:
        return upstream("every policy is set inside an if(POLICY …)", *guarded)
    return not_needed("the tree sets no policy")


def _policy(command: Command) -> str | None:
    values = command.values
    return values[1] if len(values) > 2 and values[0] == "SET" and values[1].startswith("CMP") else None


def _asks(branch: Branch, policy: str) -> bool:
    """Whether the branch is taken only by a CMake that knows the policy."""
    words = branch.head.values
    if branch.head.name not in {"if", "elseif"} or {"OR", "NOT"} & set(words):
        return False
    return any(pair == ("POLICY", policy) for pair in itertools.pairwise(words))


def _guard(file: BuildFile, command: Command, policy: str) -> list[Edit]:
    indent = file.indent(command.start)
    return [
        file.insert(command.start, f"if(POLICY {policy})  {MARK}{file.newline}{indent}    "),
        file.insert(file.line_end(command.end), f"{file.newline}{indent}endif()"),
    ]

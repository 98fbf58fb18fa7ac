"""A Python module in the place of a library that is left out, so that importing it works and using it says why not.

SGLang imports ``sgl_kernel.flash_attn`` wherever it loads a vision model (March 2026: srt/layers/attention/vision.py),
and that fails without ``flash_ops``, though nothing of it is ever called on SM120.
"""

import re
from collections.abc import Iterator

from sm120.build.patches.targets import Project, Target
from sm120.build.patches.tree import Tree

MARK = "Written by the patch sm120-only of the SM120 toolkit"
_LIBRARY = re.compile(r"\bTORCH_LIBRARY(?:_FRAGMENT)?\s*\(\s*(\w+)\s*,")
_OPERATOR = re.compile(r"\bm\.def\(\s*\"(\w+)")
_COMMENTED = re.compile(r"^\s*//.*$", re.MULTILINE)
_HOST = (".cc", ".cpp", ".cxx")
_TEMPLATE = '''"""Stands in for {name}, which this build leaves out: {reason}.

{mark}.
"""

import torch

REASON = "{name} is not in this build of {package}, which is for SM120 alone: {reason}"


class _Absent:
    def __init__(self, operator):
        self._operator = operator

    @property
    def default(self):
        return self

    def __call__(self, *args, **kwargs):
        raise RuntimeError(f"torch.ops.{namespace}.{{self._operator}}: {{REASON}}")


for _operator in {operators}:
    if not hasattr(torch.ops.{namespace}, _operator):
        setattr(torch.ops.{namespace}, _operator, _Absent(_operator))
'''


def modules(tree: Tree, project: Project, target: Target, reason: str) -> dict[str, str]:
    """Path below the root → text, for each place of a Python package that the target would be installed to."""
    made = {}
    for package in _packages(project, target.name):
        name = f"python/{package}/{target.name}.py"
        if tree.text(f"python/{package}/__init__.py") is None:
            continue
        namespace, operators = _operators(tree, project, target)
        made[tree.layout.path(name)] = _TEMPLATE.format(
            name=target.name, reason=reason, mark=MARK, package=package, namespace=namespace, operators=operators
        )
    return made


def _packages(project: Project, target: str) -> Iterator[str]:
    for _, command in project.commands("install"):
        values = command.values
        if values[:1] == ("TARGETS",) and target in values and "DESTINATION" in values[:-1]:
            yield values[values.index("DESTINATION") + 1]


def _operators(tree: Tree, project: Project, target: Target) -> tuple[str, tuple[str, ...]]:
    """The namespace and the names that the target's own sources register with torch."""
    _, sources = project.closure(target.defined.arguments)
    namespace, names = "sgl_kernel", dict[str, None]()
    for source in dict.fromkeys(argument.value for argument in sources):
        if "$" in source or not source.endswith(_HOST) or (path := tree.resolve(source, "")) is None:
            continue
        text = _COMMENTED.sub("", tree.text(path) or "")
        found = _LIBRARY.search(text)
        if found:
            namespace = found[1]
            names |= dict.fromkeys(_OPERATOR.findall(text))
    return namespace, tuple(names)

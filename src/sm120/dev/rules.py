"""Rules of this repository that no ready-made linter knows."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from sm120.config import CHECKOUT

# What each package may import at import time, besides the standard library and itself.
_ALLOWED = {
    "sm120": {
        "cmake",
        "invoke",
        "ninja",
        "packaging",
        "psutil",
        "pynvml",
        "pypi_simple",
        "requests",
        "rich",
        "scikit_build_core",
        "tomli_w",
        "tomlkit",
        "uv",
    },
    "sm120_cells": {"numpy", "torch"},
}
# What each may never import, not even inside a function.
_FORBIDDEN = {
    "sm120": {"torch", "numpy", "ml_dtypes", "sm120_cells", "sglang", "flashinfer"},
    "sm120_cells": {"sm120"},
}

# A package host in a tracked file would bind every user to it: each machine's own configuration names its index.
# PyTorch's wheel index in stacks/ is product data. Written so that this file does not match itself.
_HOSTS = re.compile(
    r"\b(?:[\w-]+\.)*(?:(?:pypi)[.](?:org|io)|(?:pypi)[.]python[.]org|(?:pythonhosted)[.]org"
    r"|(?:npmjs)[.](?:org|com)|(?:debian)[.](?:org|net)|(?:ubuntu)[.]com)\b",
    re.IGNORECASE,
)
_SKIPPED = {".git", ".venv", ".sm120", "runs", "__pycache__"}  # for a checkout without git


def broken_imports(root: Path = CHECKOUT) -> list[str]:
    """Every import that breaks the separation of toolkit and cells, as ``file:line: what``."""
    found = []
    for package in _ALLOWED:
        for path in sorted((root / "src" / package).rglob("*.py")):
            tree = ast.parse(path.read_text("utf-8"), str(path))
            for line, module, at_import in _imports(tree):
                problem = _judge(package, module, at_import=at_import)
                if problem:
                    found.append(f"{path.relative_to(root)}:{line}: {problem}")
    return found


def _judge(package: str, module: str, *, at_import: bool) -> str | None:
    top = module.partition(".")[0]
    if top in _FORBIDDEN[package]:
        return f"{package} must never import {top}"
    if at_import and top not in _ALLOWED[package] | set(sys.stdlib_module_names) | {package}:
        return f"{package} may not import {top} at import time"
    return None


def _imports(tree: ast.AST, *, at_import: bool = True) -> Iterator[tuple[int, str, bool]]:
    """Line, module, and whether it is imported when the file is. ``if TYPE_CHECKING`` blocks never run."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, at_import) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, node.module or "", at_import
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _imports(ast.Module(node.orelse, []), at_import=at_import)
        else:
            inner = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _imports(node, at_import=at_import and not inner)


def named_hosts(root: Path = CHECKOUT) -> list[str]:
    """Every place where a file of the repository names a package host, as ``file:line: host``."""
    found = []
    for path in repository_files(root):
        try:
            text = path.read_text("utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        for number, line in enumerate(text.splitlines(), start=1):
            found += [
                f"{path.relative_to(root)}:{number}: names the package host {m[0]}" for m in _HOSTS.finditer(line)
            ]
    return found


def repository_files(root: Path = CHECKOUT) -> list[Path]:
    """Tracked and new files; without git, every file that is not a product of running."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        every = (path for path in sorted(root.rglob("*")) if path.is_file())
        return [path for path in every if not _SKIPPED & set(path.relative_to(root).parts)]
    paths = (root / name.decode("utf-8", "surrogateescape") for name in listed.split(b"\0") if name)
    return [path for path in paths if path.is_file() and not path.is_symlink()]

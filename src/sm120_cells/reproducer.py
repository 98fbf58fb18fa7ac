"""A stand-alone script that shows one failing cell: needs torch and the library at fault, nothing of this project.

The sources that make the operands, the reference and the judgement travel in the script as plain text, so that whoever
receives it can read what is claimed; the operands come from the case's seed.
"""

import ast
import importlib.util
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sm120_cells import backends

_PACKAGE = "sm120_cells"
_HEAD = '''"""{title}

Run with a Python that has torch{library}.
Exit status: 1 the fault shows, 0 it does not, 2 the backend cannot run here, 3 this script itself failed.
Sources of operands, reference and judgement are at the end of this file, as plain text.
"""

{findings}

import importlib.abc
import importlib.util
import json
import os
import sys
import traceback

CELL = json.loads(r"""{cell}""")
SIZES = {sizes}  # sizes of the sweep at which it failed


class Sources(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Serves the modules at the end of this file."""

    def find_spec(self, name, path=None, target=None):
        if name not in SOURCES:
            return None
        package = any(other.startswith(name + ".") for other in SOURCES)
        return importlib.util.spec_from_loader(name, self, is_package=package)

    def exec_module(self, module):
        exec(compile(SOURCES[module.__name__], module.__name__, "exec"), module.__dict__)


def main():
    sys.meta_path.insert(0, Sources())
    os.environ["{variable}"] = os.pathsep.join({plugins})
    try:
        from sm120_cells.worker import reproduce

        return reproduce(CELL, SIZES)
    except Exception:
        traceback.print_exc()
        return 3


SOURCES = {{}}
'''


def write(path: Path, cell: Mapping[str, Any], findings: Sequence[Mapping[str, Any]], sizes: Sequence[int]) -> None:
    """Write the script for a cell (as on the door), atomically. Sizes are those that failed; empty means all."""
    plugins = backends.plugins()
    sources = _closure([f"{_PACKAGE}.worker", *plugins])
    text = _HEAD.format(
        title=f"Reproducer of {cell['id']}",
        library="" if "torch" in str(cell["subject"]) else " and the backend's library",
        findings="\n".join(_comment(f"{f['tier']} {f['check']}: {f['message']}") for f in findings),
        cell=json.dumps(cell, indent=1),
        sizes=list(sizes),
        variable=backends.PLUGINS_VARIABLE,
        plugins=plugins,
    )
    for name, source in sources.items():
        quoted = source.replace("\\", "\\\\").replace("'''", "\\'\\'\\'").removesuffix("\n") + "\n"
        text += f"\n# {'-' * 20} {name}\nSOURCES[{name!r}] = '''\\\n{quoted}'''\n"
    text += '\nif __name__ == "__main__":\n    sys.exit(main())\n'
    partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def _comment(text: str) -> str:
    """A backend's own words may hold anything."""
    return "\n".join("# " + "".join(c if c.isprintable() else " " for c in line) for line in text.splitlines())


def _closure(names: Sequence[str]) -> dict[str, str]:
    """Sources of modules and of all of this package that they import, packages before their modules."""
    sources: dict[str, str] = {}
    pending = list(names)
    while pending:
        name = pending.pop()
        if name in sources:
            continue
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            continue
        source = Path(spec.origin).read_text(encoding="utf-8")
        sources[name] = source
        if "." in name:
            pending.append(name.rpartition(".")[0])
        pending += _imports(source)
        if name == f"{_PACKAGE}.backends":
            pending += [f"{name}.{p.stem}" for p in Path(spec.origin).parent.glob("*.py") if p.stem != "__init__"]
    return dict(sorted(sources.items()))


def _imports(source: str) -> list[str]:
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(_PACKAGE):
            found.append(str(node.module))
            found += [
                f"{node.module}.{alias.name}" for alias in node.names if _is_module(f"{node.module}.{alias.name}")
            ]
    return found


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False

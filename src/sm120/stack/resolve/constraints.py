"""The machine's own pip constraints, read to name the one that forbids a pin."""

import re
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from sm120 import errors, files, redact
from sm120.stack.resolve.uverrors import Unsatisfiable

_LARGEST = 4 * 2**20  # bytes


@dataclass(frozen=True)
class Limit:
    name: str  # canonical
    text: str  # torch<2.10
    where: str  # file:line


def limits(places: tuple[str, ...]) -> list[Limit]:
    """The constraints in files; those at a URL are left to uv. A file that cannot be read is a UsageError."""
    found = []
    for place in places:
        path = Path(place.removeprefix("file://"))
        if "://" in place and not place.startswith("file://"):
            continue
        if path.is_file() and path.stat().st_size > _LARGEST:
            raise errors.UsageError(f"the constraints in {path} are too large", where=str(path))
        for number, line in enumerate(files.read_text(path).splitlines(), start=1):
            text = re.split(r"\s#|^#", line, maxsplit=1)[0].strip()
            try:
                requirement = Requirement(text)
            except InvalidRequirement:  # empty lines, options, and what uv will complain about
                continue
            limit = text.partition(";")[0].strip()
            found.append(Limit(canonicalize_name(requirement.name), limit, f"{path}:{number}"))
    return found


class Forbidden(Unsatisfiable):
    """A constraint of the machine's own forbids what the stack asks for."""


def blame(error: Unsatisfiable, places: tuple[str, ...]) -> Unsatisfiable:
    """The same error, or one that names the machine's constraints that took part in it."""
    taking_part = [limit for limit in limits(places) if _is_in(limit, error.text)]
    if not taking_part:
        return error
    listed = ", ".join(f"{limit.text} ({redact.redact(limit.where)})" for limit in taking_part)
    return Forbidden(
        f"a constraint of the machine's own pip configuration stands against this stack: {listed}; {error.message}",
        where=taking_part[0].where,
        remedy="lift it for one command, as in PIP_CONSTRAINT=/dev/null scripts/inv setup; or change that file;"
        " or pin what it allows in a copy of the stack file",
        text=error.text,
    )


def _is_in(limit: Limit, text: str) -> bool:
    """Whether uv's explanation names the constraint: its package with one of its clauses."""
    clauses = {str(clause) for clause in Requirement(limit.text).specifier}
    spelled = limit.name.replace("-", "[-_.]+")
    for named in re.finditer(rf"(?i)(?<![\w.-]){spelled}(?:\[[^\]]*\])?([<>=!~][^\s]*)", text):
        if clauses & {clause.strip() for clause in named[1].rstrip(".,").split(",")}:
            return True
    return False
